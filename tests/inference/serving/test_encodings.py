"""What transformers' tokenizers return, as prompts; and tensors in the place of completions."""

from typing import Any

import numpy as np
import pytest
import their_tokenizer
import tiny
import tiny_folder
import torch

from deepspeed_ext.inference.initialize import init_inference
from deepspeed_ext.inference.requests.tokenizer import encoded

TEXTS = ["Once", "Two of them", "x"]


def engine_of(**options: Any) -> Any:
    made = their_tokenizer.tokenizer(**options)
    return tiny.engine(tokenizer=made, stop_tokens=[2], pad_tokens=[0])


def tokens_of(completions: Any) -> list[list[int]]:
    return [each.tokens for each in completions]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("form", ["pt", "np", None])
def test_an_encoding_is_taken_as_it_is(side: str, form: str | None) -> None:
    engine = engine_of(padding_side=side)
    encoding = engine.tokenizer(TEXTS, padding=True, return_tensors=form)
    expected = tokens_of(engine.generate(TEXTS, max_new_tokens=5))
    ids, mask = encoding["input_ids"], encoding["attention_mask"]
    for found in (
        engine.generate(encoding, max_new_tokens=5),
        engine.generate(dict(encoding), max_new_tokens=5),
        engine.generate(**encoding, max_new_tokens=5),
        engine.generate(input_ids=ids, attention_mask=mask, max_new_tokens=5),
        engine.generate(inputs=ids, attention_mask=mask, max_new_tokens=5),
        engine.generate(ids, attention_mask=mask, max_new_tokens=5),
    ):
        assert tokens_of(found) == expected
    one = engine.tokenizer(TEXTS[1])  # lists of numbers
    assert tokens_of(engine.generate(one, max_new_tokens=5)) == expected[1:2]


def test_a_template_of_transformers_gives_a_prompt() -> None:
    engine = engine_of(chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    chat = [{"role": "user", "content": "Once"}]
    ids = engine.tokenizer("Once", add_special_tokens=False)["input_ids"]
    expected = tokens_of(engine.generate(ids, max_new_tokens=5))
    for options in ({}, dict(return_tensors="pt"), dict(return_dict=False)):
        prompt = engine.tokenizer.apply_chat_template(chat, **options)
        assert tokens_of(engine.generate(prompt, max_new_tokens=5)) == expected


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({}, TypeError, "nothing is given, expected prompts or input_ids"),
        (dict(inputs_embeds=[[1.0]]), TypeError, "inputs_embeds is given, expected prompts or inp"),
        (
            dict(prompts={"prompt_token_ids": [1]}),
            TypeError,
            "prompts has a dict with 'prompt_token_ids', expected what it has there",
        ),
        (dict(prompts=["a", {"prompt": "a"}]), TypeError, "prompts has a dict with 'prompt', expe"),
        (dict(prompts=[1], input_ids=[1]), TypeError, "prompts and input_ids are given, expected"),
        (dict(input_ids=[[1, 2]], attention_mask=[[1]]), ValueError, "attention_mask has length 1"),
        (
            dict(prompts=dict(input_ids=[1], attention_mask=[1]), attention_mask=[1]),
            TypeError,
            "attention_mask is given, and one in prompts, expected one of them",
        ),
        (
            dict(prompts=dict(input_ids=[1], pixels=3)),
            ValueError,
            "prompts have 'pixels', expected",
        ),
        (
            dict(input_ids=[[1, 2]], token_type_ids=[[0, 1]]),
            ValueError,
            "token_type_ids has others than 0, expected None or zeros",
        ),
        (dict(input_ids=[1], position_ids=[0]), ValueError, "position_ids is [0], expected attent"),
        (
            dict(input_ids=torch.tensor([[0, 5], [5, 6]])),
            ValueError,
            "prompt 0 begins with token 0",
        ),
        (
            dict(prompts=dict(input_ids=torch.tensor([[5, 6], [5, 0]]))),
            ValueError,
            "prompt 1 ends with token 0, which is for padding, expected attention_mask",
        ),
        (dict(prompts="a", add_special_tokens=1), TypeError, "add_special_tokens is 1, expected"),
    ],
)
def test_what_does_not_fit_is_refused(given: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as error:
        engine_of().generate(**given)
    assert str(error.value).startswith(f"generate: {text}")


def test_types_of_zeros_are_passed_over() -> None:
    engine = engine_of()
    expected = tokens_of(engine.generate([5, 6], max_new_tokens=3))
    for types in ([[0, 0]], torch.zeros(1, 2), np.zeros((1, 2)), [0, 0]):
        found = engine.generate(input_ids=[5, 6], token_type_ids=types, max_new_tokens=3)
        assert tokens_of(found) == expected


def test_text_begins_once() -> None:
    """Also by a tokenizer that cannot be told what to add; a text may repeat it on purpose."""
    theirs, library = their_tokenizer.tokenizer(), init_library()

    class Plain:
        bos_token = "<s>"

        def encode(self, text: str) -> list[int]:
            found: list[int] = theirs.encode(text)
            return found

        def decode(self, ids: list[int]) -> str:
            return ""

    for tokenizer in (theirs, library, Plain()):
        ids = theirs.encode("ab")
        assert encoded(tokenizer, "ab", True) == encoded(tokenizer, "<s>ab", True) == ids
        assert ids[0] == 1 and ids.count(1) == 1
        assert encoded(tokenizer, "aab", True) == theirs.encode("aab")
        assert encoded(tokenizer, "<s>", True) == [1]
    assert encoded(theirs, "<s><s>ab", True) == [1, *ids]
    assert encoded(theirs, "ab", False) == ids[1:] == encoded(library, "ab", False)
    bare = their_tokenizer.tokenizer(adds_begin=False)
    assert encoded(bare, "aab", True) == bare.encode("aab") and len(bare.encode("aab")) == 3
    with pytest.raises(ValueError, match="add_special_tokens is False and tokenizer is Plain, exp"):
        encoded(Plain(), "ab", False)


def init_library() -> Any:
    from deepspeed_ext.inference.requests.tokenizer import tokenizer_of

    return tokenizer_of(None, their_tokenizer.library())


def test_add_special_tokens_may_be_left_out() -> None:
    engine = engine_of()
    ids = engine.tokenizer.encode("ab", add_special_tokens=False)
    found = engine.generate("ab", add_special_tokens=False, max_new_tokens=4)
    assert tokens_of(found) == tokens_of(engine.generate(ids, max_new_tokens=4))


@pytest.fixture(scope="module")
def both(tmp_path_factory: Any) -> Any:
    """A model of transformers, and an engine of it, whose first tokens may end a text."""
    from transformers import AutoModelForCausalLM

    folder = tiny_folder.write(tmp_path_factory.mktemp("both"))
    tokenizer = their_tokenizer.tokenizer(padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder)
    return model, init_inference(folder, tokenizer=tokenizer), tokenizer


@pytest.mark.parametrize("count", [1, 3])
def test_tensors_are_those_of_transformers(both: Any, count: int) -> None:
    model, engine, tokenizer = both
    encoding = tokenizer(TEXTS[:count], padding=True, return_tensors="pt")
    encoding.pop("token_type_ids", None)
    plain = model.generate(**encoding, max_new_tokens=8, do_sample=False, pad_token_id=0)
    ends = sorted({int(plain[0, -5]), int(plain[-1, -2])})
    for stop in ([], ends, ends[:1]):
        options = dict(max_new_tokens=8, do_sample=False, eos_token_id=stop or 96, pad_token_id=0)
        expected = model.generate(**encoding, **options)
        found = engine.generate(**encoding, **options, return_tensors="pt")
        assert found.dtype == torch.int64 and found.device == encoding["input_ids"].device
        assert torch.equal(found, expected)
    several = engine.generate(**encoding, max_new_tokens=3, n=2, return_tensors="pt")
    assert torch.equal(several[::2], several[1::2]) and len(several) == 2 * count


def test_tensors_of_lists_are_padded_to_the_left(both: Any) -> None:
    engine = both[1]
    found = engine.generate([[5, 6, 7], [8]], max_new_tokens=2, return_tensors="pt", pad_token_id=9)
    assert found[:, :3].tolist() == [[5, 6, 7], [9, 9, 8]]
    assert found[1, 3:].tolist() == engine.generate([8], max_new_tokens=2)[0].tokens
    assert engine.generate([], return_tensors="pt").shape == (0, 0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(return_tensors="np"), "return_tensors is 'np', expected None or 'pt'"),
        (dict(return_tensors="pt", stream=True), "return_tensors is 'pt' and stream is True, exp"),
        (dict(return_tensors="pt"), "return_tensors is 'pt' and no token is for padding, expected"),
        (dict(return_tensors="pt", pad_token_id=97), "pad_token_id is 97, expected 0 to 96"),
        (dict(return_tensors="pt", pad_token_id=True), "pad_token_id is True, expected 0 to 96"),
    ],
)
def test_tensors_that_cannot_be_are_refused(options: Any, text: str) -> None:
    with pytest.raises(ValueError) as error:
        tiny.engine().generate([[5], [6]], **options)
    assert str(error.value).startswith(f"generate: {text}")

"""Options in transformers' names and kinds, and with numpy's numbers."""

from typing import Any

import numpy as np
import pytest
import tiny
import torch
from transformers import GenerationConfig
from transformers.generation import LogitsProcessorList, StoppingCriteriaList

from deepspeed_ext.inference.execution.sampling import SamplingOptions
from deepspeed_ext.inference.requests.options import options_of, with_room


def meant(options: Any = None, length: int = 3, **changes: Any) -> SamplingOptions:
    return options_of(options, changes, [[1] * length])[0]


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        (dict(do_sample=False, temperature=0.7, top_k=3), dict(temperature=0.0, top_k=3)),
        (dict(do_sample=True), dict(temperature=1.0, top_k=50)),
        (dict(do_sample=True, temperature=0.5, top_k=0), dict(temperature=0.5)),
        (dict(do_sample=None, temperature=0.5), dict(temperature=0.5)),
        (dict(temperature=None, top_p=None, top_k=None, do_sample=False), {}),
        (dict(eos_token_id=5), dict(stop_tokens=5)),
        (dict(eos_token_id=[5, 6]), dict(stop_tokens=(5, 6))),
        (dict(eos_token_id=torch.tensor([5, 6])), dict(stop_tokens=(5, 6))),
        (dict(eos_token_id=None), {}),
        (dict(max_length=10), dict(max_new_tokens=7)),
        (dict(max_length=10, max_new_tokens=None), dict(max_new_tokens=7)),
        (dict(max_length=10, max_new_tokens=2), dict(max_new_tokens=2)),
        (dict(stop_strings="ab"), dict(stop="ab")),
        (dict(num_return_sequences=3), dict(n=3)),
        (dict(use_cache=False, pad_token_id=3, tokenizer="t", length_penalty=2.0), {}),
        (dict(num_beams=1, penalty_alpha=0.0, typical_p=1.0, bad_words_ids=None), {}),
        (dict(logits_processor=LogitsProcessorList(), streamer=None, min_length=0), {}),
        (dict(stopping_criteria=StoppingCriteriaList(), output_scores=False), {}),
        (dict(cache_implementation="static"), {}),
    ],
)
def test_their_names_mean_ours(given: dict[str, Any], ours: dict[str, Any]) -> None:
    assert meant(**given) == SamplingOptions(**ours)


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ({}, dict(max_new_tokens=None)),
        (dict(temperature=0.7, top_k=5), dict(top_k=5)),  # nothing is drawn without do_sample
        (dict(do_sample=True), dict(temperature=1.0, top_k=50)),
        (
            dict(do_sample=True, temperature=0.5, top_p=0.9),
            dict(temperature=0.5, top_p=0.9, top_k=50),
        ),
        (dict(max_length=9, eos_token_id=[4]), dict(max_new_tokens=6, stop_tokens=(4,))),
        (dict(max_new_tokens=9, stop_strings=["x"]), dict(max_new_tokens=9, stop="x")),
        (dict(num_beams=1, repetition_penalty=1.2), dict(repetition_penalty=1.2)),
    ],
)
def test_a_config_of_generation_is_an_option(given: Any, ours: dict[str, Any]) -> None:
    config = GenerationConfig(**given)
    assert meant(config) == SamplingOptions(**ours)
    before = config.to_dict()
    changed = meant(config, max_new_tokens=4, top_p=0.25)
    assert (changed.max_new_tokens, changed.top_p) == (4, 0.25) and config.to_dict() == before


def test_a_config_and_options_may_be_one_by_one() -> None:
    some = [GenerationConfig(max_length=9), SamplingOptions(n=2), GenerationConfig(do_sample=True)]
    found = options_of(some, dict(seed=3), [[1], [1, 2], [1]])
    assert [each.seed for each in found] == [3] * 3
    assert (found[0].max_new_tokens, found[1].n, found[2].temperature) == (8, 2, 1.0)
    engine = tiny.engine()
    by_name = engine.generate([5], generation_config=GenerationConfig(max_new_tokens=2))
    assert by_name[0].tokens == engine.generate([5], max_new_tokens=2)[0].tokens
    with pytest.raises(TypeError, match=r"^generate: options and generation_config are given, exp"):
        engine.generate([5], some[0], generation_config=some[0])


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        (dict(num_beams=2), ValueError, "num_beams is 2, expected n with temperature and logprobs"),
        (dict(penalty_alpha=0.6), ValueError, "penalty_alpha is 0.6, expected repetition_penalty"),
        (dict(bad_words_ids=[[4]]), ValueError, "bad_words_ids is [[4]], expected logit_bias"),
        (dict(no_repeat_ngram_size=2), ValueError, "no_repeat_ngram_size is 2, expected frequency"),
        (dict(min_new_tokens=2), ValueError, "min_new_tokens is 2, expected stop_tokens=()"),
        (dict(typical_p=0.5), ValueError, "typical_p is 0.5, expected top_k, top_p or min_p"),
        (dict(cache_implementation="quantized"), ValueError, "cache_implementation is 'quantized'"),
        (dict(output_scores=True), ValueError, "output_scores is True, expected logprobs"),
        (
            dict(streamer=print),
            ValueError,
            "streamer is <built-in function print>, expected stream",
        ),
        (dict(max_tokens=5), ValueError, "max_tokens is 5, expected max_new_tokens"),
        (
            dict(chat_template_kwargs={"a": 1}),
            ValueError,
            "chat_template_kwargs is {'a': 1}, expect",
        ),
        (dict(tools=[{}]), ValueError, "tools is [{}], expected template_arguments of chat"),
        (dict(use_tqdm=True), ValueError, "use_tqdm is True, expected progress"),
        (dict(lora_request=5), ValueError, "lora_request is 5, expected adapter of init_inference"),
        (
            dict(max_length=3),
            ValueError,
            "max_length is 3 and prompt 0 has 3 tokens, expected more",
        ),
        (dict(max_length=1.5), TypeError, "max_new_tokens is 1.5, expected an int"),
        (dict(do_sample=True, temperature=0), ValueError, "temperature is 0 and do_sample is True"),
        (dict(do_sample="yes"), TypeError, "do_sample is 'yes', expected True or False"),
        (dict(eos_token_id=5, stop_tokens=6), TypeError, "eos_token_id and stop_tokens are given"),
        (dict(top_kk=5), TypeError, "option is top_kk, expected top_k"),
        (dict(zzz=None), TypeError, "option is zzz, expected one of max_new_tokens"),
    ],
)
def test_what_would_change_the_result_is_refused(given: Any, kind: Any, text: str) -> None:
    with pytest.raises(kind) as error:
        meant(**given)
    assert str(error.value).startswith(f"generate: {text}")


def test_no_field_of_a_config_is_passed_over_unseen() -> None:
    """Each that transformers has is one of ours, refused with a value, or known to do nothing."""
    for name in GenerationConfig().to_dict():
        try:
            meant(**{name: object()})
        except (TypeError, ValueError) as error:
            assert "option is" not in str(error), name


@pytest.mark.parametrize("kind", [np.int8, np.int64, np.uint64])
def test_numbers_of_numpy(kind: Any) -> None:
    names = ("max_new_tokens", "top_k", "seed", "n", "logprobs")
    made = SamplingOptions(**{name: kind(2) for name in names}, stop_tokens=[kind(2)])
    assert made == SamplingOptions(**dict.fromkeys(names, 2), stop_tokens=2)
    assert all(type(getattr(made, name)) is int for name in names)
    assert type(made.stop_tokens[0]) is int and SamplingOptions(stop_tokens=kind(2)).stop_tokens
    for name in ("temperature", "top_p"):
        for value in (np.float32(0.5), np.float64(0.5), np.float16(0.5)):
            found = getattr(SamplingOptions(**{name: value}), name)
            assert found == 0.5 and type(found) is float
    assert SamplingOptions(temperature=kind(1)).temperature == 1
    for name in ("top_k", "temperature"):
        for value in (np.bool_(True), np.array([1]), torch.tensor(1), np.complex64(1), "1"):
            with pytest.raises(TypeError, match=f"^generate: {name} is "):
                SamplingOptions(**{name: value})
    with pytest.raises(ValueError, match=r"^generate: temperature is nan, expected 0 or more"):
        SamplingOptions(temperature=np.float32("nan"))


@pytest.mark.parametrize(
    ("bias", "kind", "text"),
    [
        ({5: float("nan")}, ValueError, "[5] is nan, expected -100 to 100"),
        ({5: 0, 6: float("inf")}, ValueError, "[6] is inf, expected -100 to 100"),
        ({5: 101}, ValueError, "[5] is 101, expected -100 to 100"),
        ({-1: 1}, ValueError, " is -1, expected 0 to 2147483647"),
        ({"5": 1}, TypeError, " is '5', expected an int"),
        ({5: "1"}, TypeError, "[5] is '1', expected a float"),
        ({5: True}, TypeError, "[5] is True, expected a float"),
        (((5, 1), (5, 2)), ValueError, " has token 5 twice, expected once"),
        ([5], TypeError, " is [5], expected a number for each of some tokens, as {50256: -100}"),
        (3, TypeError, " is 3, expected a number for each of some tokens"),
    ],
)
def test_a_bias_that_cannot_be_is_refused(bias: Any, kind: Any, text: str) -> None:
    with pytest.raises(kind) as error:
        SamplingOptions(logit_bias=bias)
    assert str(error.value).startswith(f"generate: logit_bias{text}")


def test_a_bias_is_kept_as_it_was() -> None:
    given = {np.int64(7): np.float32(2), 3: -1}
    made = SamplingOptions(logit_bias=given)
    given[3] = 50
    assert made.logit_bias == ((3, -1.0), (7, 2.0)) and hash(made)
    with pytest.raises(ValueError, match=r"^generate: logit_bias has token 97, expected 0 to 96$"):
        tiny.engine().generate([5], logit_bias={3: 1, 97: 0})
    with pytest.raises(
        ValueError, match=r"^generate: stop_tokens has token 400, expected 0 to 96$"
    ):
        tiny.engine().generate([5], stop_tokens=[96, 400])


def test_without_a_number_there_is_what_has_room() -> None:
    engine = tiny.engine(max_tokens=256)
    for length, count in ((3, 128), (128, 128), (129, 127), (255, 1)):
        assert len(engine.generate([5] * length)[0].tokens) == count
        assert len(engine.generate([5] * length, SamplingOptions())[0].tokens) == count
    both = engine.generate([[5] * 250, [5]], temperature=1.0)
    assert [len(each.tokens) for each in both] == [6, 128]
    with pytest.raises(ValueError, match="prompt 0 has 256 tokens and max_new_tokens is 1, expect"):
        engine.generate([5] * 256)
    with pytest.raises(ValueError, match="has 129 tokens and max_new_tokens is 128, expected at"):
        engine.generate([5] * 129, max_new_tokens=128)
    few = tiny.engine(max_tokens=256, pages=2)
    assert len(few.generate([5] * 100)[0].tokens) == 29  # of which the last is not kept
    assert with_room(SamplingOptions(), -5).max_new_tokens == 1

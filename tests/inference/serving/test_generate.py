"""What `generate` takes, refuses and returns: prompts, options, text, streams, cancelling."""

import gc
import random
from typing import Any

import pytest
import tiny
import torch

from deepspeed_ext.inference.execution.sampling import SamplingOptions
from deepspeed_ext.inference.requests.request import Completion

_EXPECTED = "expected text, numbers of tokens, or several of either"
_OPTIONS = (
    "expected SamplingOptions, or a sequence of them; one option may be given by its name, as n=2"
)


def with_text(**options: Any) -> Any:
    return tiny.engine(tokenizer=tiny.Bytes(), **options)


def check_all_is_free(engine: Any) -> None:
    engine._sweep()
    assert len(engine._scheduler._table.free) == engine.max_batch
    assert engine.cache.free_pages == engine._scheduler._pages


def test_prompts_may_have_many_forms() -> None:
    engine = with_text()
    ids = tiny.Bytes().encode("Hello")
    expected = engine.generate([ids], max_new_tokens=5)[0].tokens
    assert len(expected) == 5
    for one in ("Hello", ids, tuple(ids), torch.tensor(ids), torch.tensor(ids, dtype=torch.uint8)):
        for prompts in (one, [one]):
            found = engine.generate(prompts, max_new_tokens=5)
            assert [each.tokens for each in found] == [expected], one
    found = engine.generate([ids, "Hello", torch.tensor(ids)], max_new_tokens=5)
    assert [each.tokens for each in found] == [expected] * 3
    assert [each.prompt for each in found] == [0, 1, 2]
    both = engine.generate(torch.tensor([ids, ids]), max_new_tokens=5)
    assert [each.tokens for each in both] == [expected] * 2
    for none in ([], (), torch.empty(0, dtype=torch.int64), iter([])):
        assert engine.generate(none, max_new_tokens=5) == []


def test_what_a_completion_has() -> None:
    engine = with_text()
    options = SamplingOptions(max_new_tokens=6, temperature=1.0, seed=3, logprobs=2)
    one = engine.generate("Hello", options)[0]
    assert one.text == str(one) == tiny.Bytes().decode(one.tokens)
    assert one.finish_reason == "length" and one.stop is None and one.seed == 3
    assert len(one.logprobs) == len(one.top_logprobs) == 6
    for token, logprob, top in zip(one.tokens, one.logprobs, one.top_logprobs, strict=True):
        assert len(top) == 2 and top[0][1] >= top[1][1] and top[0][1] >= logprob
        assert dict(top).get(token, logprob) == logprob <= 0
    bare = engine.generate("Hello", options, logprobs=None)[0]
    assert bare.logprobs is None and bare.top_logprobs is None and bare.tokens == one.tokens
    chosen = engine.generate("Hello", options, logprobs=0)[0]
    assert chosen.logprobs == one.logprobs and chosen.top_logprobs is None
    assert tiny.engine().generate([1], max_new_tokens=1)[0].text is None


@pytest.mark.parametrize("stream", [False, True])
def test_no_tokens_are_an_empty_completion(stream: bool) -> None:
    engine = with_text()
    found = engine.generate(["Hello", "you"], max_new_tokens=0, stream=stream)
    if stream:
        assert list(found) == []
        found = found.completions()
    for i, one in enumerate(found):
        assert one == Completion([], "", "length", None, None, None, i, 0, one.seed)
    mixed = [SamplingOptions(max_new_tokens=n) for n in (0, 3, 0)]
    assert [len(each.tokens) for each in engine.generate([[1]] * 3, mixed)] == [0, 3, 0]


def test_options_for_each_prompt() -> None:
    engine = tiny.engine()
    some = [SamplingOptions(max_new_tokens=n, temperature=1.0) for n in (2, 5)]
    found = engine.generate([[1], [1]], some, seed=4)
    assert [len(each.tokens) for each in found] == [2, 5]
    assert found[1].tokens[:2] == found[0].tokens
    with pytest.raises(ValueError) as error:
        engine.generate([[1]], some)
    assert str(error.value) == "generate: options have length 2, expected 1"


@pytest.mark.parametrize(
    ("prompts", "options", "kind", "text"),
    [
        ([[1], []], {}, ValueError, "prompt 1 is empty, expected at least one token"),
        ("", {}, ValueError, "prompt 0 is empty, expected at least one token"),
        ([[1], [96, 97]], {}, ValueError, "prompt 1 has token 97, expected 0 to 96"),
        ([[5, -1]], {}, ValueError, "prompt 0 has token -1, expected 0 to 96"),
        ([[1], 5], {}, TypeError, "prompt 1 is 5, expected text, or numbers of tokens"),
        ([[1.5]], {}, TypeError, "prompt 0 is [1.5], expected text, or numbers of tokens"),
        ([1.5], {}, TypeError, "prompt 0 is [1.5], expected text, or numbers of tokens"),
        ([b"Hi"], {}, TypeError, "prompt 0 is b'Hi', expected text, or numbers of tokens"),
        ([[1], {}], {}, TypeError, "prompt 1 is {}, expected text, or numbers of tokens"),
        ([True, False], {}, TypeError, "prompt 0 is [True, False], expected text, or numbers of"),
        (torch.ones(1, 2).bool(), {}, TypeError, "prompt 0 is [True, True], expected text, or"),
        ({1, 2}, {}, TypeError, f"prompts is {{1, 2}}, {_EXPECTED}"),
        (b"Hi", {}, TypeError, f"prompts is b'Hi', {_EXPECTED}"),
        (5, {}, TypeError, f"prompts is 5, {_EXPECTED}"),
        (torch.tensor(5), {}, TypeError, f"prompts is 5, {_EXPECTED}"),
        (dict(ids=[1]), {}, TypeError, f"prompts is {{'ids': [1]}}, {_EXPECTED}"),
        (torch.empty(0), {}, TypeError, "prompts has dtype torch.float32, expected whole numbers"),
        (
            [[1], torch.ones(2)],
            {},
            TypeError,
            "prompt 1 has dtype torch.float32, expected whole numbers",
        ),
        ([1], dict(options=3), TypeError, f"options is 3, {_OPTIONS}"),
        ([1], dict(options={"n": 2}), TypeError, f"options is {{'n': 2}}, {_OPTIONS}"),
        ([1], dict(options=["n"]), TypeError, f"options is ['n'], {_OPTIONS}"),
        ([1], dict(temprature=1), TypeError, "option is temprature, expected temperature"),
        ([1], dict(top_p=2), ValueError, "top_p is 2, expected over 0, and 1 at most"),
    ],
)
def test_what_cannot_be_is_refused(
    prompts: Any, options: dict[str, Any], kind: type[Exception], text: str
) -> None:
    engine = with_text()
    with pytest.raises(kind) as error:
        engine.generate(prompts, **options)
    assert str(error.value).startswith(f"generate: {text}")
    check_all_is_free(engine)


PADDED = "which is for padding, expected attention_mask beside a tensor of several rows with"


@pytest.mark.parametrize(
    ("pads", "rows", "text"),
    [
        ([0], [[5, 6, 7], [8, 0, 0]], "prompt 1 ends with token 0"),
        ([0], [[5, 6, 7], [0, 0, 8]], "prompt 1 begins with token 0"),
        ([0], [[5, 6, 0], [5, 7, 0]], "prompt 0 ends with token 0"),
        ([0], [[0, 5], [0, 6]], "prompt 0 begins with token 0"),
        ([0, 3], [[5, 6], [5, 3]], "prompt 1 ends with token 3"),
        ([2], [[5, 6, 7], [8, 2, 2]], "prompt 1 ends with token 2"),
        ([2], [[2, 6, 7], [2, 2, 7]], "prompt 1 begins with token 2"),
        ([2], [[5, 6, 7], [2, 6, 7]], "prompt 1 begins with token 2"),
        ([], [[5, 6, 7], [5, 6, 2]], "prompt 1 ends with token 2"),
        ([0], [[5, 0, 6], [6, 0, 7]], None),
        ([0], [[5, 6, 2], [5, 7, 2]], None),  # a stop token where there is one for padding
        ([2], [[2, 6, 7], [2, 8, 9]], None),
        ([0], [[5, 0, 0]], None),
    ],
)
def test_padding_is_not_gone_on_from(pads: list[int], rows: list[list[int]], text: Any) -> None:
    """In a tensor of several rows, unless a mask says that it counts; in lists each token does."""
    engine = tiny.engine(pad_tokens=pads, stop_tokens=[2])
    tensor, options = torch.tensor(rows), dict(max_new_tokens=3, stop_tokens=())
    expected = engine.generate(rows, **options)
    for given in (tensor, tensor.numpy(), tensor.int()):
        if text is None:
            assert tokens_of(engine.generate(given, **options)) == tokens_of(expected)
            continue
        with pytest.raises(ValueError) as error:
            engine.generate(given, **options)
        assert str(error.value).startswith(f"generate: {text}, {PADDED}")
    ones = torch.ones_like(tensor)
    for given in (list(tensor), rows):
        assert tokens_of(engine.generate(given, **options)) == tokens_of(expected)
    assert tokens_of(engine.generate(tensor, attention_mask=ones, **options)) == tokens_of(expected)
    unknown = tiny.engine().generate(tensor, **options)  # of an engine that knows of no such token
    assert tokens_of(unknown) == tokens_of(expected)


def test_a_tokenizer_may_be_told_its_pad_token_late() -> None:
    engine = tiny.engine(stop_tokens=[2])
    engine.tokenizer = tiny.Bytes()
    rows = torch.tensor([[5, 6], [5, 7]])
    engine.generate(rows, max_new_tokens=1)
    engine.tokenizer.pad_token_id = 7
    with pytest.raises(ValueError, match=r"^generate: prompt 1 ends with token 7, which is for"):
        engine.generate(rows)


def tokens_of(completions: list[Completion]) -> list[list[int]]:
    return [each.tokens for each in completions]


def test_a_mask_says_which_tokens_count() -> None:
    """To the left and to the right, of tensors and lists."""
    engine = tiny.engine(pad_tokens=[0])
    rows, mask = [[0, 0, 5, 6], [7, 8, 0, 0], [1, 2, 3, 4]], [[0, 0, 1, 1], [1, 1, 0, 0], [1] * 4]
    expected = engine.generate([[5, 6], [7, 8], [1, 2, 3, 4]], max_new_tokens=5)
    tensor, counts = torch.tensor(rows), torch.tensor(mask)
    for prompts in (rows, tensor, list(tensor)):
        for given in (mask, counts, counts.bool(), counts.float(), list(counts)):
            found = engine.generate(prompts, attention_mask=given, max_new_tokens=5)
            assert tokens_of(found) == tokens_of(expected)
    for one, given in ((rows[0], mask[0]), (tensor[0], counts[0])):
        found = engine.generate(one, attention_mask=given, max_new_tokens=5)
        assert tokens_of(found) == tokens_of(expected[:1])
    assert engine.generate([], attention_mask=[]) == []


@pytest.mark.parametrize(
    ("prompts", "mask", "text"),
    [
        ([[1, 2], [3]], [[1, 1]], "has 1 rows, expected 2, one for each prompt"),
        ([[1, 2], [3]], [[1, 1], [1, 1]], "has length 2 for prompt 1, expected 1, that of the pr"),
        ([[1, 2], [3]], [[1, 1], [0]], "counts no token of prompt 1, expected at least one"),
        ([[1, 2]], [[1, -1]], "has -1, expected 0 or 1"),
        ([[1], [0, 1, 2, 3]], [[1], [0, 1, 0, 1]], "has 0 between ones for prompt 1, expected ze"),
        ([[1, 2]], torch.tensor([[0.0, float("nan")]]), "has nan, expected 0 or 1"),
        (["ab"], [[1, 1]], "is given and prompt 0 is text, expected None, or numbers of tokens"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(prompts: Any, mask: Any, text: str) -> None:
    with pytest.raises(ValueError) as error:
        with_text().generate(prompts, attention_mask=mask)
    assert str(error.value).startswith(f"generate: attention_mask {text}")


@pytest.mark.parametrize("mask", [1, torch.tensor(1), {"a": 1}, [[1], 1]])
def test_a_mask_of_another_kind_is_refused(mask: Any) -> None:
    with pytest.raises(TypeError, match=r"^generate: attention_mask is .*, expected 0 or 1 for"):
        tiny.engine().generate([[1], [1]], attention_mask=mask)


def test_text_takes_a_tokenizer() -> None:
    engine = tiny.engine()
    with pytest.raises(ValueError) as error:
        engine.generate("Hello")
    assert str(error.value) == (
        "generate: prompt 0 is text, expected numbers of tokens, as the engine has no tokenizer"
    )
    with pytest.raises(ValueError) as error:
        engine.generate([1], stop="x")
    assert str(error.value) == (
        "generate: stop is ('x',), expected none, as the engine has no tokenizer"
    )


def test_stop_tokens_end_a_completion() -> None:
    tokens = tiny.engine().generate([1, 2], max_new_tokens=30)[0].tokens
    engine = tiny.engine(stop_tokens=[tokens[9]])
    at = tokens.index(tokens[9])
    found = engine.generate([1, 2], max_new_tokens=30)[0]
    assert (found.tokens, found.finish_reason, found.stop) == (tokens[:at], "stop", tokens[9])
    assert engine.generate([1, 2], max_new_tokens=30, stop_tokens=())[0].tokens == tokens
    other = engine.generate([1, 2], max_new_tokens=30, stop_tokens=[tokens[4], tokens[0]])[0]
    assert (other.tokens, other.stop) == ([], tokens[0])
    one = engine.generate([1, 2], max_new_tokens=30, stop_tokens=tokens[4])[0]
    assert one.stop == tokens[4]
    last = engine.generate([1, 2], max_new_tokens=at + 1)[0]
    assert (last.tokens, last.finish_reason) == (tokens[:at], "stop")


@pytest.mark.parametrize("ahead", [False, True])
def test_stop_strings_end_a_completion(ahead: bool) -> None:
    """Across tokens, which are bytes here; cut off of the text, but not of the tokens."""
    engine = with_text()
    engine._scheduler._ahead = ahead
    whole = engine.generate("Hello", max_new_tokens=40)[0]
    for begin, width in ((10, 1), (12, 3), (0, 2), (39, 1), (35, 5)):
        stop = whole.text[begin : begin + width]
        at = whole.text.index(stop)
        found = engine.generate("Hello", max_new_tokens=40, stop=[stop, "nowhere at all"])[0]
        assert (found.text, found.finish_reason, found.stop) == (whole.text[:at], "stop", stop)
        assert found.tokens == whole.tokens[: at + len(stop)]
        with engine.generate("Hello", max_new_tokens=40, stop=stop, stream=True) as stream:
            assert "".join(piece.text for piece in stream) == found.text
            assert stream.completions()[0].text == found.text
    check_all_is_free(engine)


@pytest.mark.parametrize("ahead", [False, True])
def test_pieces_are_the_completions(ahead: bool) -> None:
    for engine in (with_text(), tiny.engine()):
        engine._scheduler._ahead = ahead
        prompts = [[i, i + 1] for i in range(5)]
        options = dict(max_new_tokens=30, temperature=1.0, seed=1, n=3)
        expected = engine.generate(prompts, **options)
        stream = engine.generate(prompts, stream=True, **options)
        tokens: dict[tuple[int, int], list[int]] = {}
        texts: dict[tuple[int, int], str] = {}
        with pytest.raises(RuntimeError, match="stream: completions are not done, expected all"):
            stream.completions()
        for piece in stream:
            key = piece.prompt, piece.sample
            tokens[key] = tokens.get(key, []) + piece.tokens
            texts[key] = texts.get(key, "") + str(piece)
        assert stream.completions() == expected
        for each in expected:
            assert tokens[each.prompt, each.sample] == each.tokens
            assert texts[each.prompt, each.sample] == (each.text or "")
        check_all_is_free(engine)


@pytest.mark.parametrize("stop", [(), ("\n",)], ids=["to the end", "with a stop string"])
def test_pieces_end_within_a_character_as_the_whole_does(stop: tuple[str, ...]) -> None:
    """Where a run of bytes is unknown as a whole, too, which the engine finds out."""
    table = [*range(10, 42), *range(0xBB, 0xC4), *range(0xC4, 0xE0), *range(0x80, 0x9A), 0xF4, 0xBD]

    class Runs:
        def encode(self, text: str) -> list[int]:
            return [table.index(byte) for byte in text.encode()]

        def decode(self, ids: list[int]) -> str:
            try:
                return bytes(table[i] for i in ids).decode()
            except UnicodeDecodeError:
                return "\ufffd" * len(ids)

    engine = tiny.engine(tokenizer=Runs())
    for seed in range(3):
        for count in range(1, 30, 7):
            options = dict(max_new_tokens=count, temperature=3.0, seed=seed, n=4, stop=stop)
            whole = engine.generate([table.index(0xC3)], **options)
            stream = engine.generate([table.index(0xC3)], **options, stream=True)
            texts = [""] * 4
            for piece in stream:
                texts[piece.sample] += piece.text
            assert texts == [each.text for each in whole]
            assert whole == stream.completions()
            assert stop or texts == [Runs().decode(each.tokens) for each in whole]


def test_the_first_piece_comes_before_the_last_token_is_made() -> None:
    engine = tiny.engine()
    stream = engine.generate([1, 2], max_new_tokens=100, stream=True)
    assert len(next(stream).tokens) == 1
    assert engine.cache.length(next(iter(engine._scheduler._table.requests))) == 2


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("how", ["close", "forget", "cancel", "with"])
def test_what_is_cancelled_makes_room(how: str, ahead: bool) -> None:
    engine = tiny.engine(max_batch=2)
    engine._scheduler._ahead = ahead
    expected = [each.tokens for each in engine.generate([[1], [2], [3], [4]], max_new_tokens=40)]
    other = engine.generate([[3], [4]], max_new_tokens=40, stream=True)
    stream = engine.generate([[1], [2], [1]], max_new_tokens=40, stream=True)
    if how == "with":
        with stream:
            next(stream)
    for _ in range(random.Random(0).randrange(3, 9)):
        next(stream, None)
    if how == "close":
        stream.close()
    elif how == "forget":
        del stream
        gc.collect()
    elif how == "cancel":
        for i in range(3):
            stream.cancel(i)
        list(stream)
        for i, each in enumerate(stream.completions()):
            assert each.finish_reason in ("cancelled", "length")
            assert each.tokens == expected[i % 2][: len(each.tokens)]
    assert [each.tokens for each in list(other) and other.completions()] == expected[2:]
    check_all_is_free(engine)


def test_one_of_several_is_cancelled() -> None:
    engine = tiny.engine()
    expected = engine.generate([[1], [2], [3]], max_new_tokens=20, seed=0)
    stream = engine.generate([[1], [2], [3]], max_new_tokens=20, seed=0, stream=True)
    for _ in range(9):
        next(stream)
    stream.cancel(1)
    list(stream)
    found = stream.completions()
    assert found[0] == expected[0] and found[2] == expected[2]
    assert found[1].finish_reason == "cancelled"
    assert 0 < len(found[1].tokens) < 20


def test_nothing_is_drawn_unless_asked(capfd: pytest.CaptureFixture[str]) -> None:
    engine = tiny.engine()
    engine.generate([[1], [2]], max_new_tokens=5)
    engine.generate([[1], [2]], max_new_tokens=5, progress=True)  # no terminal
    assert capfd.readouterr() == ("", "")


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    import io
    import sys

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    tiny.engine().generate([[1], [2]], max_new_tokens=5, progress=True)
    assert "10/10" in sys.stderr.getvalue()  # type: ignore[attr-defined]


def test_no_bar_where_none_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """One takes a lock of the process, even if it draws nothing; Ctrl-C may leave it taken."""
    monkeypatch.setattr("deepspeed_ext.inference.serving.engine_core.tqdm", None)
    assert len(tiny.engine().generate([[1]], max_new_tokens=5)[0].tokens) == 5


def test_positions_that_a_model_has_not_are_refused() -> None:
    import dataclasses

    of = tiny.decoder()
    of.of = dataclasses.replace(of.of, position="learned", context=128)
    with pytest.raises(ValueError) as error:
        tiny.engine(of=of, max_tokens=129)
    assert str(error.value) == (
        "inference: max_tokens is 129, expected at most 128, as the model has no more positions"
    )


def test_what_comes_and_leaves_as_a_step_begins_is_not_waiting() -> None:
    """Nobody may compute another step, which would see that it has left."""
    engine = tiny.engine()
    scheduler, streams = engine._scheduler, []
    end_unwanted = scheduler._end_unwanted

    def after_one_has_left() -> None:
        if not streams:
            streams.append(engine.generate([[5, 6]], stream=True))
            streams[0].close()
        end_unwanted()

    scheduler._end_unwanted = after_one_has_left  # type: ignore[method-assign]
    engine._sweep()
    assert streams and engine.load == (0, 0)

"""Text made of tokens one by one is the text of all of them, in pieces that are sure."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import tokenizers

from deepspeed_ext.inference.requests.detokenizer import Detokenizer, run_byte_of

SAMPLE = "naïve 日本語 ÷ 𝄞🙂 ~ end.\n"
RULES = "do n't , x ? 's a ' b ' ! we 've \ufffd yes กขค \n\n 🙂🙂🙂 "
Decode = Callable[[list[int]], str]


def of_bytes(ids: list[int]) -> str:
    return bytes(ids).decode(errors="replace")


def of_words(ids: list[int]) -> str:
    """As tokenizers that mark the beginning of words do: the first space of a text is none.

    The last token is a special one, which text has not.
    """
    return "".join((" cat", "s", " sat", " on", "é", " a", " mat", ".", "")[i] for i in ids)[1:]


def of_broken_bytes(ids: list[int]) -> str:
    """With a mark for each byte of what is no character."""
    try:
        return bytes(ids).decode()
    except UnicodeDecodeError:
        return "".join(
            "\ufffd" if "\udc80" <= c <= "\udcff" else c
            for c in bytes(ids).decode(errors="surrogateescape")
        )


def of_runs(ids: list[int]) -> str:
    """As tokenizers with a fallback to bytes do: a run that is not whole is unknown as a whole."""
    try:
        return bytes(ids).decode()
    except UnicodeDecodeError:
        return "\ufffd" * len(ids)


@pytest.mark.parametrize("decode", [of_bytes, of_broken_bytes])
def test_a_character_comes_whole(decode: Decode) -> None:
    text, data = Detokenizer(decode, in_pieces=True), SAMPLE.encode() * 3
    told = ""
    for end, byte in enumerate(data, 1):
        told += text.add(byte)
        assert told == data[:end].removesuffix(b" ").decode(errors="ignore")
    assert told == text.value == SAMPLE * 3 and text.finish() == ""


def byte_level() -> Any:
    """As those of GPT-2 and Llama 3 are: a token is any bytes."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet)
    made.train_from_iterator([SAMPLE + RULES], trainer)
    return made


def with_fallback() -> Any:
    """As that of Llama 2 is: words mark their space, and what is no word is a run of bytes."""
    words = ["▁", "▁a", "▁the", "a", "n", "d", "日", ".", "'", "'t", "▁n", "n't", "'s", "?"]
    all_ = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocabulary = {word: i for i, word in enumerate(all_)}
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True)
    )
    decoders = tokenizers.decoders
    made.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return made


def cleaned(text: str) -> str:
    """What transformers makes of a text where a tokenizer says clean_up_tokenization_spaces."""
    for old in (".", "?", "!", ",", "' ", "n't", "'m", "'s", "'ve", "'re"):
        text = text.replace(f" {old}", old.strip())
    return text


@pytest.mark.parametrize("cleans", [False, True], ids=["as it is", "cleaned"])
@pytest.mark.parametrize("make", [byte_level, with_fallback])
def test_pieces_are_what_the_library_makes_of_the_whole(make: Any, cleans: bool) -> None:
    """However tokens are cut and whatever they are: within characters, and within runs of bytes."""
    made = make()

    def decode(ids: list[int]) -> str:
        return cleaned(made.decode(ids)) if cleans else made.decode(ids)

    run_byte = run_byte_of(lambda text: made.encode(text).ids, decode)
    assert (run_byte is None) == (make is byte_level)
    ids, draw = made.encode((SAMPLE + RULES) * 3).ids, random.Random(0)
    for _ in range(150):
        begin, count = draw.randrange(len(ids)), draw.randint(1, 60)
        for some in (
            ids[begin : begin + count],
            [draw.randrange(made.get_vocab_size()) for _ in range(count)],
        ):
            text = Detokenizer(decode, in_pieces=True, run_byte=run_byte)
            pieces = [*map(text.add, some), text.finish()]
            assert "".join(pieces) == text.value == decode(some)
    text = Detokenizer(decode, in_pieces=True, run_byte=run_byte)  # and nothing waits for the end
    assert "".join(text.add(i) for i in made.encode("a 日🙂a n d").ids) == "a 日🙂a n d"


@pytest.mark.parametrize("before", ["\ufffd😀", "日本😀\ufffd😀", "a\ufffd", "", "\n"])
def test_a_run_of_bytes_waits_until_it_is_over(before: str) -> None:
    """A byte behind it that is no character makes all of it unknown."""
    word = 256

    def decode(ids: list[int]) -> str:
        parts = " ".join(map(str, ids)).split(str(word))
        return "word".join(of_runs([int(i) for i in part.split()]) for part in parts)

    run_byte = run_byte_of(lambda text: [word, *text.encode()], decode)
    assert run_byte == 0xF4
    for rest in ([], [0xE2], [0xE2, 0x82], [word, 65], [0xE2, word, 65, 0xC3]):
        ids = [word, *f"{before}abc".encode(), *rest]
        text = Detokenizer(decode, in_pieces=True, run_byte=run_byte)
        told = ""
        for end in range(len(ids)):
            told += text.add(ids[end])
            assert decode(ids).startswith(told)
        assert told.rstrip("\ufffd").endswith("word")
        assert told + text.finish() == text.value == decode(ids)


def test_a_stop_string_within_a_run_of_bytes() -> None:
    text = Detokenizer(of_runs, ("\n",), in_pieces=True, run_byte=0xF4)
    assert [text.add(byte) for byte in "日\n".encode()] == ["", "", "", "日"]
    assert (text.value, text.stopped) == ("日", "\n")


@pytest.mark.parametrize(
    ("encode", "decode"),
    [
        (lambda text: list(text.encode()), of_bytes),
        (lambda text: list(text.encode()), of_broken_bytes),
        (lambda text: [{"a": 0}[c] for c in text], of_words),
        (lambda text: [0], of_words),
        (lambda text: [], of_words),
        (lambda text: [99], of_words),
    ],
)
def test_a_tokenizer_without_runs_of_bytes(encode: Any, decode: Decode) -> None:
    assert run_byte_of(encode, decode) is None


def test_text_that_was_told_stays() -> None:
    """Whatever a tokenizer makes of it later."""
    text = Detokenizer(lambda ids: "abc"[len(ids) :] + "d" * len(ids), in_pieces=True)
    told = "".join([*map(text.add, range(5)), text.finish()])
    assert told == text.value


def test_bytes_that_are_no_text_come_late_but_come() -> None:
    draw = random.Random(0)
    for _ in range(200):
        data = [draw.choice([65, 0xE2, 0x82, 0xAC, 0xFF, 0xF0, 0x9F]) for _ in range(40)]
        text = Detokenizer(of_bytes, in_pieces=True)
        pieces = [text.add(byte) for byte in data] + [text.finish()]
        assert "".join(pieces) == text.value == of_bytes(data)


def test_words_keep_their_spaces_when_the_window_moves() -> None:
    draw = random.Random(0)
    for most in (7, 8):
        ids = [draw.randint(0, most) for _ in range(400)]
        text = Detokenizer(of_words, in_pieces=True)
        assert "".join([*(text.add(i) for i in ids), text.finish()]) == of_words(ids)


@pytest.mark.parametrize("run_byte", [None, 0xF4])
def test_only_the_last_tokens_are_decoded_again(run_byte: int | None) -> None:
    """With runs of bytes, too, as each is over before the next letter or space."""
    most = 0

    def decode(ids: list[int]) -> str:
        nonlocal most
        most = max(most, len(ids))
        if run_byte is None:
            return of_bytes(ids)
        runs = itertools.groupby(ids, lambda byte: byte < 128)
        return "".join(of_bytes([*run]) if word else of_runs([*run]) for word, run in runs)

    text = Detokenizer(decode, in_pieces=True, run_byte=run_byte)
    for byte in (SAMPLE + "𝄞 日 𝄞 日 ").encode() * 20:
        text.add(byte)
    assert most <= 32
    text.finish()
    assert text.value == (SAMPLE + "𝄞 日 𝄞 日 ") * 20


@pytest.mark.parametrize(
    ("stop", "value", "stopped"),
    [
        (("END",), "one two E", "END"),
        (("ENDx", "two"), "one ", "two"),
        (("D more", "END m"), "one two E", "END m"),
        (("nowhere", "more."), "one two EEND ", "more."),
        (("nowhere",), "one two EEND more.", None),
        (("o", "one"), "", "o"),
    ],
)
def test_a_stop_string_ends_text_across_tokens(
    stop: tuple[str, ...], value: str, stopped: str | None
) -> None:
    whole = "one two EEND more."
    for width in (1, 2, 3, 5, 30):
        parts = [whole[i : i + width] for i in range(0, len(whole), width)]
        text = Detokenizer(lambda ids: "".join(parts[i] for i in ids), stop, in_pieces=False)  # noqa: B023
        told = ""
        for i in range(len(parts)):
            told += text.add(i)
            assert value.startswith(told)
            if text.stopped:
                break
        told += text.finish()
        assert (told, text.value, text.stopped) == (value, value, stopped)


def test_what_may_be_the_beginning_of_a_stop_string_is_held_back() -> None:
    text = Detokenizer(of_bytes, ("abcd",), in_pieces=True)
    assert [text.add(byte) for byte in b"xabababc"] == ["x", "", "", "ab", "", "ab", "", ""]
    assert text.finish() == "abc"


def test_a_stop_string_may_be_whole_only_in_the_end() -> None:
    text = Detokenizer(of_bytes, ("\ufffd",), in_pieces=True)
    assert [text.add(65), text.add(0xE2), text.finish()] == ["A", "", ""]
    assert (text.value, text.stopped) == ("A", "\ufffd")

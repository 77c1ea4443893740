"""Text made of tokens one by one is the text of all of them, in pieces that are sure."""

import random

import pytest

from deepspeed_ext.inference.text import Text

SAMPLE = "naïve 日本語 ÷ 𝄞🙂 ~ end.\n"


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


@pytest.mark.parametrize("decode", [of_bytes, of_broken_bytes, of_runs])
def test_a_character_comes_whole(decode: object) -> None:
    text, data = Text(decode, in_pieces=True), SAMPLE.encode() * 3  # type: ignore[arg-type]
    at = 0
    for byte in data:
        piece = text.add(byte)
        assert "\ufffd" not in piece
        at += len(piece.encode())
    assert text.value == SAMPLE * 3 and text.finish() == "" and at == len(data)


def test_what_follows_an_unknown_character_of_its_own_is_not_lost() -> None:
    """Beside bytes that are to come, it cannot be told from them."""
    for before in ("\ufffd😀", "日本😀\ufffd😀", "a\ufffd"):
        text = Text(of_runs, in_pieces=True)
        for byte in f"{before}abcabc".encode():
            text.add(byte)
        text.finish()
        assert text.value.endswith("abcabc")


def test_bytes_that_are_no_text_come_late_but_come() -> None:
    draw = random.Random(0)
    for _ in range(200):
        data = [draw.choice([65, 0xE2, 0x82, 0xAC, 0xFF, 0xF0, 0x9F]) for _ in range(40)]
        text = Text(of_bytes, in_pieces=True)
        pieces = [text.add(byte) for byte in data] + [text.finish()]
        assert "".join(pieces) == text.value == of_bytes(data)


def test_words_keep_their_spaces_when_the_window_moves() -> None:
    draw = random.Random(0)
    for most in (7, 8):
        ids = [draw.randint(0, most) for _ in range(400)]
        text = Text(of_words, in_pieces=True)
        assert "".join([*(text.add(i) for i in ids), text.finish()]) == of_words(ids)


def test_only_the_last_tokens_are_decoded_again() -> None:
    most = 0

    def decode(ids: list[int]) -> str:
        nonlocal most
        most = max(most, len(ids))
        return of_bytes(ids)

    text = Text(decode, in_pieces=True)
    for byte in SAMPLE.encode() * 20:
        text.add(byte)
    assert most <= 14


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
        text = Text(lambda ids: "".join(parts[i] for i in ids), stop, in_pieces=False)  # noqa: B023
        told = ""
        for i in range(len(parts)):
            told += text.add(i)
            assert value.startswith(told)
            if text.stopped:
                break
        told += text.finish()
        assert (told, text.value, text.stopped) == (value, value, stopped)


def test_what_may_be_the_beginning_of_a_stop_string_is_held_back() -> None:
    text = Text(of_bytes, ("abcd",), in_pieces=True)
    assert [text.add(byte) for byte in b"xabababc"] == ["x", "", "", "ab", "", "ab", "", ""]
    assert text.finish() == "abc"


def test_a_stop_string_may_be_whole_only_in_the_end() -> None:
    text = Text(of_bytes, ("\ufffd",), in_pieces=True)
    assert [text.add(65), text.add(0xE2), text.finish()] == ["A", "", ""]
    assert (text.value, text.stopped) == ("A", "\ufffd")

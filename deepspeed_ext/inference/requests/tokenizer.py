"""From text to the numbers of tokens and back: the tokenizer of a folder, or one that is given."""

import logging
from importlib.util import find_spec
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, Protocol

from deepspeed_ext.inference.model.checkpoint_folder import ModelFolder

_OP = "init_inference"
_logger = logging.getLogger("deepspeed_ext")


class Tokenizer(Protocol):
    """What an engine needs for text."""

    def encode(self, text: str, /) -> list[int]:
        """Return the tokens of a text."""

    def decode(self, ids: list[int], /) -> str:
        """Return the text of tokens."""


class _OfLibrary:
    """One of the package tokenizers, whose `encode` returns more than numbers.

    What a file says of padding and of a greatest length is for training: a prompt is taken whole.

    Args:
        tokenizer: of the package.
        pad_token: the text of that for padding, or None for what the tokenizer itself says.

    Attributes:
        pad_token_id: the number of it, or None.
    """

    def __init__(self, tokenizer: Any, pad_token: str | None = None) -> None:
        padding = tokenizer.padding or {}
        named = None if pad_token is None else tokenizer.token_to_id(pad_token)
        self.pad_token_id: int | None = padding.get("pad_id") if named is None else named
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:  # as of a command line that is no UTF-8
            wrong = text[error.start]
            raise ValueError(f"encode: the text has {wrong!r}, expected whole characters") from None
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids)
        return text


def encoded(tokenizer: Tokenizer, text: str, adds_special_tokens: bool) -> list[int]:
    """Return the tokens of a text, which begins once.

    Where it begins with a token that the tokenizer puts before it, as the text of a template does,
    there is one of the two.

    Args:
        tokenizer: whose encode may have an argument add_special_tokens, as those of transformers.
        text: to be encoded.
        adds_special_tokens: whether the tokenizer may add such as begin and end a text.

    Raises:
        ValueError: it may not, and cannot be told.
    """
    encode: Any = tokenizer.encode
    can_be_told = _takes_special_tokens(encode)
    if not adds_special_tokens:
        if not can_be_told:
            raise ValueError(
                f"generate: add_special_tokens is False and tokenizer is"
                f" {type(tokenizer).__name__}, expected one whose encode takes add_special_tokens"
            )
        return list(encode(text, add_special_tokens=False))
    tokens = list(encode(text))
    if len(tokens) < 2 or tokens[0] != tokens[1]:
        return tokens
    if can_be_told:
        bare = list(encode(text, add_special_tokens=False))
        is_doubled = bare[:1] == tokens[:1] and _repeats(bare) == _repeats(tokens) - 1
        return tokens[1:] if is_doubled else tokens
    begin = getattr(tokenizer, "bos_token", None)
    return tokens[1:] if isinstance(begin, str) and begin and text.startswith(begin) else tokens


def encoded_whole(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of a text that has the special ones in it, such as that of a template."""
    return encoded(tokenizer, text, not _takes_special_tokens(tokenizer.encode))


def _takes_special_tokens(encode: Any) -> bool:
    try:
        parameters = signature(encode).parameters.values()
    except (TypeError, ValueError):  # of what is not written in Python
        return False
    return any(
        each.name == "add_special_tokens" or each.kind is Parameter.VAR_KEYWORD
        for each in parameters
    )


def _repeats(tokens: list[int]) -> int:
    """Return how many tokens at the beginning are the first one."""
    return next((i for i, each in enumerate(tokens) if each != tokens[0]), len(tokens))


def tokenizer_of(folder: ModelFolder | None, given: Any) -> Tokenizer | None:
    """Return what turns text into tokens, or None if there is nothing for it.

    Args:
        folder: of the model, or None. Its tokenizer.json is read by the package tokenizers, other
            files by transformers, if these are installed.
        given: by the user, or None.

    Raises:
        TypeError: what is given cannot encode and decode.
        ValueError: the tokenizer of the folder cannot be read.
    """
    if given is not None:
        for name in ("encode", "decode"):
            if not callable(getattr(given, name, None)):
                raise TypeError(
                    f"{_OP}: tokenizer is {type(given).__name__}, expected one with encode(text)"
                    " and decode(ids)"
                )
        is_of_library = type(given).__module__.partition(".")[0] == "tokenizers"
        tokenizer: Tokenizer = _OfLibrary(_copied(given)) if is_of_library else given
        return tokenizer
    if folder is None:
        return None
    file = folder.path / "tokenizer.json"
    if file.exists() and _has("tokenizers"):
        return _read(folder, file)
    if any(folder.path.glob("tokenizer*")) and _has("transformers"):
        return _by_transformers(folder.path)
    if any(folder.path.glob("tokenizer*")):
        _logger.warning(
            "%s: %s has a tokenizer that nothing here reads, so prompts have to be numbers; for"
            " text: pip install tokenizers",
            _OP,
            folder.path,
        )
    return None


def _has(package: str) -> bool:
    return find_spec(package) is not None


def _copied(tokenizer: Any) -> Any:
    from tokenizers import Tokenizer as Library

    return Library.from_str(tokenizer.to_str())  # others of the package are around one of these


def _read(folder: ModelFolder, file: Path) -> Tokenizer:
    from tokenizers import Tokenizer as Library

    try:
        tokenizer = Library.from_file(str(file))
    except Exception as error:  # the package raises nothing more special
        raise ValueError(f"{_OP}: {file} is no tokenizer: {error}") from None
    pad = folder.fields_of("tokenizer_config.json").get("pad_token")  # the file itself seldom says
    text = pad.get("content") if isinstance(pad, dict) else pad  # with how it is split off
    return _OfLibrary(tokenizer, text if isinstance(text, str) else None)


def _by_transformers(path: Path) -> Tokenizer:
    from transformers import AutoTokenizer

    try:
        found: Any = AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
        words = set(found.get_vocab()) - set(found.get_added_vocab())
        is_empty = words <= set(found.all_special_tokens)  # as where files of it are missing
    except Exception as error:  # of what it calls
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"{_OP}: {path} has no tokenizer that can be read: {reason}") from None
    if is_empty:
        raise ValueError(
            f"{_OP}: {path} has a tokenizer without a vocabulary, expected tokenizer.json, or the"
            " files that it is made of; fetch the folder again, remove what there is of it, or give"
            " tokenizer"
        )
    tokenizer: Tokenizer = found
    return tokenizer

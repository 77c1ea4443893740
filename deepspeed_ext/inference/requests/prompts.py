"""What `generate` takes as prompts, and the numbers of tokens that it comes to."""

import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepspeed_ext.inference.requests.tokenizer import Tokenizer, encoded

Ids = Sequence[int] | Tensor
Encoding = Mapping[str, Any]  # as a call of transformers' tokenizers returns
Prompts = str | Ids | Sequence[str] | Sequence[Ids] | Encoding
Mask = Ids | Sequence[Ids]
# What an encoding may have beside tokens and mask, and a causal model has no use for.
_BESIDE = ("token_type_ids", "special_tokens_mask", "offset_mapping", "length")
_NO_NUMBERS = (bytes, bytearray, Mapping, Set)  # of tokens, although numbers may come out of them


class ReadPrompts(NamedTuple):
    """The prompts of a call.

    Args:
        tokens: of each, those that count.
        rows: of each, as they were given, with those that a mask leaves out.
        device: of the tensor that they were given as, or None.
    """

    tokens: list[list[int]]
    rows: list[list[int]]
    device: torch.device | None


class Given(NamedTuple):
    """Prompts and mask, whichever way they came; what is left are options."""

    prompts: Any
    mask: Any
    others: dict[str, Any]


def given_of(op: str, prompts: Any, mask: Any, named: Mapping[str, Any]) -> Given:
    """Return what was given as prompts: as such, by transformers' names, or in an encoding.

    Args:
        op: the call, for errors.
        prompts: or None.
        mask: likewise.
        named: arguments of any names, among which may be input_ids, and what encodings have.

    Raises:
        TypeError: there are none, or two.
        ValueError: there is something beside them that would change the result.
    """
    others = dict(named)
    sources = {"prompts": prompts}
    sources |= {name: others.pop(name, None) for name in ("input_ids", "inputs")}
    found = [name for name, value in sources.items() if value is not None]
    if len(found) != 1:
        embeds = "inputs_embeds" if others.get("inputs_embeds") is not None else "nothing"
        has = " and ".join(found) if found else embeds
        raise TypeError(
            f"{op}: {has} {'are' if found else 'is'} given, expected prompts or input_ids"
        )
    given = sources[found[0]]
    beside = {name: others.pop(name) for name in _BESIDE if name in others}
    if isinstance(given, Mapping) and "input_ids" in given:
        fields = dict(given)
        given = fields.pop("input_ids")
        of_encoding = fields.pop("attention_mask", None)
        if mask is not None and of_encoding is not None:
            raise TypeError(
                f"{op}: attention_mask is given, and one in prompts, expected one of them"
            )
        mask = of_encoding if mask is None else mask
        for name in fields:
            if name not in _BESIDE:
                raise ValueError(
                    f"{op}: prompts have {name!r}, expected input_ids and attention_mask"
                )
        beside |= fields
    _check_types(op, beside.get("token_type_ids"))
    return Given(given, mask, others)


def _check_types(op: str, types: Any) -> None:
    """Refuse parts of a prompt that are told apart: those of a causal model are all of type 0."""
    if types is None:
        return
    rows = types.tolist() if hasattr(types, "tolist") else types
    flat = [each for row in rows for each in (row if isinstance(row, Iterable) else [row])]
    if any(each != 0 for each in flat):
        raise ValueError(f"{op}: token_type_ids has others than 0, expected None or zeros")


def _check_no_dict(op: str, prompts: Any) -> None:
    """Tell what stands for a prompt that vLLM takes as a dict."""
    some = prompts if isinstance(prompts, list | tuple) else [prompts]
    for each in some:
        for name in ("prompt_token_ids", "prompt"):
            if isinstance(each, Mapping) and name in each:
                raise TypeError(
                    f"{op}: prompts has a dict with {name!r}, expected what it has there"
                )


@dataclass(frozen=True)
class PromptReader:
    """Makes tokens of prompts, or says what is wrong with them.

    Args:
        tokenizer: for text, or None.
        vocabulary: how many tokens there are.
        stop_tokens: of the engine.
        pad_tokens: likewise, beside the tokenizer's; where there are none, stop tokens are mostly
            used for it.
        adds_special_tokens: whether the tokenizer may add those that begin and end a text.
        op: the call, for errors.
    """

    tokenizer: Tokenizer | None
    vocabulary: int
    stop_tokens: tuple[int, ...]
    pad_tokens: tuple[int, ...]
    adds_special_tokens: bool = True
    op: str = "generate"

    def read(self, prompts: Prompts, mask: Mask | None = None) -> ReadPrompts:
        """Return the tokens of each prompt; see `InferenceEngine.generate`."""
        if isinstance(prompts, list) and set(map(type, prompts)) == {int}:
            prompts = [prompts]  # not looked at one by one, as there may be very many
        _check_no_dict(self.op, prompts)
        given = _plain(self.op, "prompts", prompts)
        if not isinstance(given, Iterable) or isinstance(given, _NO_NUMBERS):
            raise TypeError(
                f"{self.op}: prompts is {given!r:.60}, expected text, numbers of tokens, or several"
                " of either"
            )
        each_given = enumerate([given] if isinstance(given, str) else given)
        some: list[Any] = [_plain(self.op, f"prompt {i}", each) for i, each in each_given]
        if some and not any(isinstance(each, Sequence) for each in some):
            some = [some]
        found = [self._tokens(i, each) for i, each in enumerate(some)]
        device = next((p.device for p in _each_or_all(prompts) if isinstance(p, Tensor)), None)
        counted = found if mask is None else _counted(self.op, some, found, mask)
        for i, tokens in enumerate(counted):
            self._check(i, tokens)
        if mask is not None:
            return ReadPrompts(counted, found, device)
        if given is not prompts and len(found) > 1:  # a tensor, or an array
            self._check_padding(found)
        return ReadPrompts(found, found, device)

    def pad_token(self) -> int | None:
        """Return what fills rows up to one length."""
        some = *self.pad_tokens, getattr(self.tokenizer, "pad_token_id", None), *self.stop_tokens
        return next((each for each in some if each is not None), None)

    def _tokens(self, i: int, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError(
                    f"{self.op}: prompt {i} is text, expected numbers of tokens, as the engine has"
                    " no tokenizer"
                )
            prompt = encoded(self.tokenizer, prompt, self.adds_special_tokens)
        try:
            if isinstance(prompt, _NO_NUMBERS):
                raise TypeError
            kinds = set(map(type, prompt))
            if bool in kinds:  # as a mask has
                raise TypeError
            tokens = list(prompt) if kinds == {int} else [operator.index(each) for each in prompt]
        except TypeError:
            raise TypeError(
                f"{self.op}: prompt {i} is {prompt!r:.60}, expected text, or numbers of tokens"
            ) from None
        if not tokens:
            raise ValueError(f"{self.op}: prompt {i} is empty, expected at least one token")
        return tokens

    def _check(self, i: int, tokens: list[int]) -> None:
        """Refuse numbers that are no tokens; where a mask counts none there may be any."""
        last = self.vocabulary - 1
        if min(tokens) < 0 or max(tokens) > last:
            wrong = next(token for token in tokens if not 0 <= token <= last)
            raise ValueError(f"{self.op}: prompt {i} has token {wrong}, expected 0 to {last}")

    def _check_padding(self, rows: list[list[int]]) -> None:
        """Raise if rows of one length are filled up, as the model would go on from that."""
        of_tokenizer = getattr(self.tokenizer, "pad_token_id", None)  # now: it is often set late
        pads = {*self.pad_tokens, *([] if of_tokenizer is None else [of_tokenizer])}
        for pad in pads or self.stop_tokens:
            begins = [row[0] == pad for row in rows]
            if pad in self.stop_tokens and all(begins):  # texts of GPT-2 begin with it
                begins = [row[:2] == [pad, pad] for row in rows]
            for i, (row, begin) in enumerate(zip(rows, begins, strict=True)):
                if begin or row[-1] == pad:
                    raise ValueError(
                        f"{self.op}: prompt {i} {'begins' if begin else 'ends'} with token {pad},"
                        " which is for padding, expected attention_mask beside a tensor of several"
                        " rows with padding; or lists, of which each token counts"
                    )


def _counted(op: str, prompts: list[Any], tokens: list[list[int]], mask: Mask) -> list[list[int]]:
    """Return those tokens of each prompt that a mask counts."""
    rows = _rows_of(op, mask)
    if len(rows) != len(tokens):
        raise ValueError(
            f"{op}: attention_mask has {len(rows)} rows, expected {len(tokens)}, one for each"
            " prompt"
        )
    found = []
    for i, (prompt, each, row) in enumerate(zip(prompts, tokens, rows, strict=True)):
        if isinstance(prompt, str):
            raise ValueError(
                f"{op}: attention_mask is given and prompt {i} is text, expected None, or"
                " numbers of tokens"
            )
        if len(row) != len(each):
            raise ValueError(
                f"{op}: attention_mask has length {len(row)} for prompt {i}, expected"
                f" {len(each)}, that of the prompt"
            )
        wrong = [value for value in row if value not in (0, 1)]
        if wrong:
            raise ValueError(f"{op}: attention_mask has {wrong[0]!r:.60}, expected 0 or 1")
        if not any(row):
            raise ValueError(
                f"{op}: attention_mask counts no token of prompt {i}, expected at least one"
            )
        begin, end = row.index(1), len(row) - row[::-1].index(1)
        if 0 in row[begin:end]:
            raise ValueError(
                f"{op}: attention_mask has 0 between ones for prompt {i}, expected zeros at the"
                " begin or the end alone; leave tokens out of input_ids that are not to count"
            )
        found.append(each[begin:end])
    return found


def _rows_of(op: str, mask: Mask) -> list[Any]:
    """Return a row for each prompt, of which there may be one."""
    given = _plain(op, "attention_mask", mask, floats=True)
    some = isinstance(given, Sequence) and not isinstance(given, str)
    rows = [_plain(op, "attention_mask", row, floats=True) for row in given] if some else []
    of_rows = [isinstance(row, Sequence) for row in rows]
    if not some or (any(of_rows) and not all(of_rows)):
        raise TypeError(f"{op}: attention_mask is {given!r:.60}, expected 0 or 1 for each token")
    return rows if all(of_rows) else [rows]


def _each_or_all(prompts: Any) -> list[Any]:
    """Return what may be on a device."""
    return [prompts, *prompts] if isinstance(prompts, list | tuple) else [prompts]


def _plain(op: str, name: str, value: Any, *, floats: bool = False) -> Any:
    """Return lists in place of a tensor or an array, which may be one of no floats."""
    if not hasattr(value, "tolist"):
        return value
    if not floats and "float" in str(getattr(value, "dtype", "")):
        raise TypeError(f"{op}: {name} has dtype {value.dtype}, expected whole numbers")
    return value.tolist()

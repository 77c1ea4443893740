"""What a call of an engine takes and returns: padded rows of tokens, and their logits."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

_OP = "InferenceEngine"
_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class Logits(NamedTuple):
    """What a model makes of rows of tokens.

    Args:
        logits: (texts, n, vocabulary); 0 where no token counts.
    """

    logits: Tensor


class Row(NamedTuple):
    """The tokens of a text that count.

    Args:
        text: its number.
        begin: where the first one is.
        tokens: all of them, at least one.
    """

    text: int
    begin: int
    tokens: list[int]


def rows_of(ids: Any, mask: Any, vocabulary: int) -> list[Row]:
    """Return the texts that have tokens.

    Args:
        ids: (texts, n).
        mask: the same shape, 1 for tokens that count and 0 for padding before or behind them; None
            if all count.
        vocabulary: how many tokens there are.

    Raises:
        TypeError: something is no tensor.
        ValueError: something does not fit.
    """
    ids = _on_host("input_ids", ids, _WHOLE)
    if ids.dim() != 2:
        raise ValueError(f"{_OP}: input_ids has shape {list(ids.shape)}, expected (texts, tokens)")
    mask = torch.ones_like(ids) if mask is None else _on_host("attention_mask", mask)
    if mask.shape != ids.shape:
        raise ValueError(
            f"{_OP}: attention_mask has shape {list(mask.shape)}, expected {list(ids.shape)}, that"
            " of input_ids"
        )
    wrong = mask[(mask != 0) & (mask != 1)]
    if len(wrong):
        raise ValueError(f"{_OP}: attention_mask has {wrong[0].item()}, expected 0 or 1")
    rows = []
    for text, (row, counts) in enumerate(zip(ids.tolist(), mask.tolist(), strict=True)):
        count = int(sum(counts))
        if count == 0:
            continue
        begin = counts.index(1)
        if not all(counts[begin : begin + count]):
            raise ValueError(
                f"{_OP}: attention_mask has 0 between tokens that count in row {text}, expected"
                " padding on the left or on the right"
            )
        tokens = row[begin : begin + count]
        if min(tokens) < 0 or max(tokens) >= vocabulary:
            token = next(each for each in tokens if not 0 <= each < vocabulary)
            raise ValueError(f"{_OP}: input_ids has {token}, expected 0 to {vocabulary - 1}")
        rows.append(Row(text, begin, tokens))
    return rows


def _on_host(name: str, value: Any, dtypes: tuple[torch.dtype, ...] | None = None) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"{_OP}: {name} is a {type(value).__name__}, expected a tensor")
    if dtypes is not None and value.dtype not in dtypes:
        raise ValueError(f"{_OP}: {name} has dtype {value.dtype}, expected whole numbers")
    return value.detach().cpu()

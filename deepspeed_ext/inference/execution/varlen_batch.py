"""A batch of texts of different lengths, as its tokens alone: what an encoder works on.

It is laid out on the host, and checked there, as an index that does not fit ends a CUDA process.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
from torch import Tensor

_NAME = "EncoderEngine"
_IDS = (torch.int64, torch.int32)
_MASKS = (torch.bool, *_IDS, torch.float32)


@dataclass(frozen=True)
class Limits:
    """What tokens of a model may be.

    Args:
        tokens: how many there are.
        types: likewise, of token types; 1 for a model without.
        positions: rows of learned positions, or None.
        offset: the row of the first position.
        padding: the id of a token without a position, or None; see `Policy`.
    """

    tokens: int
    types: int
    positions: int | None
    offset: int
    padding: int | None

    @property
    def places(self) -> int | None:
        """How many tokens a text may have; None for any number."""
        return None if self.positions is None else self.positions - self.offset


@dataclass(frozen=True)
class Part:
    """Whole texts of a batch, one behind another, shorter ones first.

    Args:
        tokens, types, positions: (n,), int64; positions are rows of those learned.
        places: (n,), int64: where in the batch, counted row by row, these tokens are.
        ends: (texts + 1,), int32: where texts begin and end among these tokens.
        groups: (how many texts, of how many tokens each), in order.
    """

    tokens: Tensor
    types: Tensor
    positions: Tensor
    places: Tensor
    ends: Tensor
    groups: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Batch:
    """The tokens of a batch that count.

    Args:
        shape: of what was given: (texts, tokens).
        firsts: (texts,), int64: where in the batch, counted row by row, the first token of each
            text is; -1 for a text of none.
        rows: (4, n), int64: `Part`'s tokens, types, positions and places, of all texts in order.
        lengths: of these texts, in the same order: the shortest first, those without tokens left
            out.
    """

    shape: tuple[int, int]
    firsts: Tensor
    rows: Tensor
    lengths: tuple[int, ...]

    def parts(self, most: int, device: torch.device) -> Iterator[Part]:
        """Yield parts of at most so many tokens, or of one text, on a device."""
        rows, begin = self.rows.to(device), 0
        for run in _cut(self.lengths, most):
            ends = torch.tensor([0, *accumulate(run)], dtype=torch.int32, device="cpu")
            groups = tuple((len(list(same)), length) for length, same in groupby(run))
            tokens, types, positions, places = rows[:, begin : begin + sum(run)]
            yield Part(tokens, types, positions, places, ends.to(device), groups)
            begin += sum(run)


def batch_of(ids: Tensor, mask: Tensor | None, types: Tensor | None, limits: Limits) -> Batch:
    """Lay out a batch.

    Args:
        ids: (texts, n), int64 or int32.
        mask: the same shape, 1 for tokens that count and 0 for others, bool, an integer or float32;
            None: all count.
        types: the same shape, int64 or int32; None for zeros.
        limits: of the model.

    Raises:
        ValueError: something does not fit.
        TypeError: something is no tensor.
    """
    ids = _on_host("input_ids", ids, _IDS)
    if ids.dim() != 2:
        raise ValueError(
            f"{_NAME}: input_ids has shape {list(ids.shape)}, expected (texts, tokens)"
        )
    counted = torch.ones_like(ids, dtype=torch.bool) if mask is None else _counted(mask, ids)
    types = torch.zeros_like(ids) if types is None else _on_host("token_type_ids", types, _IDS, ids)
    positions = _positions_of(ids, limits)
    lengths, texts = counted.sum(1).sort(stable=True)
    found = counted[texts].nonzero()  # by text, then by place
    places = texts[found[:, 0]] * ids.shape[1] + found[:, 1]
    values = [tensor.flatten()[places] for tensor in (ids.long(), types.long(), positions)]
    _check_range("input_ids", values[0], limits.tokens)
    _check_range("token_type_ids", values[1], limits.types)
    _check_positions(values[2], limits)
    firsts, has_some = torch.full((len(ids),), -1, device="cpu"), lengths > 0
    firsts[texts[has_some]] = places[(lengths.cumsum(0) - lengths)[has_some]]
    rows = torch.stack((*values, places))
    return Batch((len(ids), ids.shape[1]), firsts, rows, tuple(lengths[has_some].tolist()))


def _cut(lengths: tuple[int, ...], most: int) -> Iterator[list[int]]:
    """Yield these lengths in runs of a sum of at most `most`, or of one."""
    run, total = list[int](), 0
    for length in lengths:
        if run and total + length > most:
            yield run
            run, total = [], 0
        run.append(length)
        total += length
    if run:
        yield run


def _on_host(
    name: str, value: Tensor, kinds: tuple[torch.dtype, ...], like: Tensor | None = None
) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"{_NAME}: {name} is a {type(value).__name__}, expected a tensor")
    if value.dtype not in kinds:
        names = " or ".join(str(kind).removeprefix("torch.") for kind in kinds)
        raise ValueError(f"{_NAME}: {name} has dtype {value.dtype}, expected {names}")
    if like is not None and value.shape != like.shape:
        raise ValueError(
            f"{_NAME}: {name} has shape {list(value.shape)}, expected {list(like.shape)}, that of"
            " input_ids"
        )
    return value.detach().cpu()


def _counted(mask: Tensor, ids: Tensor) -> Tensor:
    mask = _on_host("attention_mask", mask, _MASKS, ids)
    counted = mask == 1
    others = mask[~counted & (mask != 0)]
    if len(others):
        raise ValueError(f"{_NAME}: attention_mask has {others[0].item()}, expected 0 or 1")
    return counted


def _check_range(name: str, values: Tensor, count: int) -> None:
    wrong = values[(values < 0) | (values >= count)]
    if len(wrong):
        raise ValueError(f"{_NAME}: {name} has {int(wrong[0])}, expected 0 to {count - 1}")


def _positions_of(ids: Tensor, limits: Limits) -> Tensor:
    """Return the row of learned positions of each token, (texts, n)."""
    if limits.padding is None:
        return (torch.arange(ids.shape[1], device="cpu") + limits.offset).expand(ids.shape)
    has_one = ids != limits.padding
    return has_one.cumsum(1) * has_one + limits.padding


def _check_positions(positions: Tensor, limits: Limits) -> None:
    first = limits.offset if limits.padding is None else limits.padding + 1
    if limits.positions is not None and bool((positions >= limits.positions).any()):
        raise ValueError(
            f"{_NAME}: input_ids has a token at position {int(positions.max()) - first}, expected"
            f" at most {limits.positions - first - 1}"
        )

"""How an optimizer stores its state: the dtype of each tensor, and the way from one to another."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor

from deepspeed_ext.dtensors import is_dtensor, local, part_for, same_layout, spread
from deepspeed_ext.ops.optimizers.state_formats import (
    BLOCK,
    decode_blocks,
    encode_blocks,
    in_memory_order,
    join_float32,
    split_float32,
)

MASTER = "master_param"  # float32 master weights
REMAINDER = "master_remainder"  # the lower 16 bits of split ones; the parameter has the upper
SCALE = "_scale"  # ends the key of the scales of a state tensor in 8-bit codes

_AT_ONCE = 2**19  # elements that are converted at once: whole blocks
_STATE_DTYPES = (torch.float32, torch.bfloat16, torch.uint8)


Parts = Callable[[], Iterator[Tensor]]


class CompactOptions(TypedDict, total=False):
    """Keyword arguments that every optimizer here takes; see `FlatStateOptimizer`."""

    state_dtype: torch.dtype | None
    master: Literal["float32", "remainder"] | None
    master_weights: bool
    seed: int


class FormatOptions(CompactOptions, total=False):
    """The same, where fp32_optimizer_states has no place of its own among the arguments."""

    fp32_optimizer_states: bool


@dataclass(frozen=True)
class StateFormat:
    """The format of one optimizer's state; see `FlatStateOptimizer` for the arguments."""

    fp32_optimizer_states: bool = True
    state_dtype: torch.dtype | None = None
    master: Literal["float32", "remainder"] | None = None
    seed: int = 0

    @staticmethod
    def of(owner: str, options: FormatOptions) -> "StateFormat":
        """Read the options of a constructor.

        Args:
            owner: name of the optimizer, for errors.
            options: as its constructor was given them.

        Raises:
            ValueError: one is not as it must be, or two contradict each other.
            TypeError: one does not exist.
        """
        known = {**CompactOptions.__annotations__, **FormatOptions.__annotations__}
        for name in options:
            if name not in known:
                raise TypeError(f"{owner}: {name} is no argument, expected one of {sorted(known)}")
        made = StateFormat(
            options.get("fp32_optimizer_states", True),
            options.get("state_dtype"),
            options.get("master") or ("float32" if options.get("master_weights") else None),
            options.get("seed", 0),
        )
        wrong = None
        if made.state_dtype not in (None, *_STATE_DTYPES):
            wrong = f"state_dtype is {made.state_dtype}, expected float32, bfloat16 or uint8"
        elif made.master not in (None, "float32", "remainder"):
            wrong = f"master is {made.master!r}, expected 'float32', 'remainder' or None"
        elif made.master == "remainder" and options.get("master_weights"):
            wrong = "master_weights is True, expected False with master='remainder'"
        elif not (isinstance(made.seed, int) and 0 <= made.seed < 2**31):
            wrong = f"seed is {made.seed!r}, expected a whole number, 0 <= seed < 2**31"
        if wrong:
            raise ValueError(f"{owner}: {wrong}")
        return made

    @property
    def rounds_at_random(self) -> bool:
        """Whether state is rounded stochastically."""
        return self.state_dtype in (torch.bfloat16, torch.uint8)

    def dtypes(self, keys: Iterable[str], param_dtype: torch.dtype) -> dict[str, torch.dtype]:
        """Return the dtype of each state tensor of a parameter, its master weight included."""
        dtype = self.state_dtype
        if dtype is None:
            dtype = torch.float32 if self.fp32_optimizer_states else param_dtype
        dtypes = dict.fromkeys(keys, dtype)
        if self.master == "remainder" and param_dtype == torch.bfloat16:
            dtypes[REMAINDER] = torch.int16
        elif self.master is not None and param_dtype != torch.float32:
            dtypes[MASTER] = torch.float32
        return dtypes

    def key_of(self, number: int) -> int:
        """Return the key of a parameter's random bits.

        Args:
            number: of the parameter, as in a state dict.
        """
        return self.seed << 32 | number


def master_weights_in(state: Mapping[str, list[Tensor]]) -> list[Tensor]:
    """Return master weights, or the lower bits of split ones, as the ops take them."""
    return state.get(MASTER) or state.get(REMAINDER) or []


def is_of_format(key: str, dtypes: Mapping[str, torch.dtype]) -> bool:
    """Return whether state under this key is there in some formats only, of state with dtypes."""
    return key in (MASTER, REMAINDER) or key.removesuffix(SCALE) in dtypes


def has_same_codes(
    key: str, values: Mapping[str, Any], param: Tensor, views: Mapping[str, Tensor]
) -> bool:
    """Return whether a state tensor is there in codes for the blocks that the views are for."""
    value = values.get(key)
    if key + SCALE not in views or not isinstance(value, Tensor) or value.dtype != torch.uint8:
        return False
    if is_dtensor(value) != is_dtensor(param):
        return False
    if is_dtensor(value) and is_dtensor(param) and not same_layout(value, param):
        return False
    return local(value).stride() == views[key].stride()


def restored(key: str, values: Mapping[str, Any], param: Tensor, *, signed: bool) -> Tensor | None:
    """Return a state tensor for what this process holds of a parameter, or None if there is none.

    Args:
        key: which one.
        values: state of the parameter in any format, device and sharding.
        param: the parameter; a DTensor perhaps.
        signed: whether values may be negative.

    Returns:
        Floating, or integers for the lower bits of split master weights.
    """
    value = values.get(key)
    if value is None and key == REMAINDER and isinstance(values.get(MASTER), Tensor):
        master = part_for(values[MASTER], param).to(local(param).device)
        return lower_bits_of(master, local(param))
    if value is None and key == MASTER and isinstance(values.get(REMAINDER), Tensor):
        lower = part_for(values[REMAINDER], param).to(local(param).device)
        return join_float32(local(param), lower)
    if not isinstance(value, Tensor):
        return None if value is None else torch.full_like(local(param), value, dtype=torch.float32)
    if value.dtype == torch.uint8:
        codes = local(value)
        scales = values[key + SCALE].to(codes.device)
        decoded = decode_blocks(codes, scales, signed=signed)
        value = spread(decoded, value) if is_dtensor(value) else decoded
    elif value.dtype == torch.int16 and is_dtensor(value):
        value = spread(local(value).int(), value)
    return part_for(value, param)


def store(view: Tensor, scale: Tensor | None, value: Tensor, *, signed: bool) -> None:
    """Put a state tensor into a flat buffer.

    Args:
        view: its place, in the layout of the parameter: float, codes, or int16.
        scale: the place of the scales of codes.
        value: as `restored` returns it; as many elements as the view.
        signed: whether values may be negative.
    """
    value = value.reshape(view.shape)
    if scale is None:
        view.copy_(value)
        return
    laid_out = in_memory_order(torch.empty_like(view, dtype=torch.float32).copy_(value))
    stored = in_memory_order(view)
    for begin in range(0, laid_out.numel(), _AT_ONCE):
        part = laid_out[begin : begin + _AT_ONCE]
        codes, scales = encode_blocks(part, signed=signed, were_coded=True)
        stored[begin : begin + _AT_ONCE].copy_(codes)
        scale[begin // BLOCK :][: len(scales)].copy_(scales)


def portable(entry: Mapping[str, Any], signed: Container[str]) -> dict[str, Any]:
    """Return the state of a parameter in a form that any other sharding can load.

    Codes have scales for the blocks of one process, so sharded ones become float32. Encoding those
    gives the same values again. Lower bits of split master weights become int32, which gloo can
    exchange.

    Args:
        entry: the state.
        signed: keys of state that may be negative.
    """
    made = dict(entry)
    for key, value in entry.items():
        if not (isinstance(value, Tensor) and is_dtensor(value)):
            continue
        if value.dtype == torch.int16:
            made[key] = spread(local(value).int(), value)
        elif value.dtype == torch.uint8:
            scales = made.pop(key + SCALE, None)
            if scales is None:  # somebody else's
                continue
            made[key] = spread(decode_blocks(local(value), scales, signed=key in signed), value)
    return made


def portable_in_parts(
    key: str, entry: Mapping[str, Any], signed: Container[str]
) -> tuple[Tensor, Parts] | None:
    """Return what `portable` makes of one value, on meta, and what makes it part by part.

    Returns:
        None if that is the value as it is.
    """
    value, scales = entry[key], entry.get(key + SCALE)
    if not (isinstance(value, Tensor) and is_dtensor(value)):
        return None
    is_coded = value.dtype == torch.uint8 and scales is not None
    if not is_coded and value.dtype != torch.int16:
        return None
    dtype, stored = torch.float32 if is_coded else torch.int32, local(value)
    described = torch.empty_like(stored, dtype=dtype, device="meta")

    def convert(part: Tensor, begin: int = 0) -> Tensor:
        if scales is None or not is_coded:
            return part.int()
        return decode_blocks(part, scales[begin // BLOCK :], signed=key in signed)

    def parts() -> Iterator[Tensor]:
        if not stored.is_contiguous():
            yield convert(stored)
            return
        flat = stored.view(-1)
        for begin in range(0, flat.numel(), _AT_ONCE):
            yield convert(flat[begin : begin + _AT_ONCE], begin)

    return spread(described, value), parts


def lower_bits_of(master: Tensor, param: Tensor) -> Tensor:
    """Return the lower 16 bits that make a float32 master weight of a bfloat16 parameter.

    Where the parameter is not the rounded master weight, it is taken to be the original. A master
    half way between two of bfloat16, of which the parameter is the lower one, loses its last bit.
    """
    upper, lower = split_float32(master.float())
    same = upper == param
    tie = (lower == -(2**15)) & (master.to(torch.bfloat16) == param)
    lower = torch.where(tie & ~same, torch.full_like(lower, 2**15 - 1), lower)
    return torch.where(same | tie, lower, torch.zeros_like(lower))

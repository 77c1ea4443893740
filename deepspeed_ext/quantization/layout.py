"""Which tensors stand for a quantized weight, and the note in a state dict that says so."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepspeed_ext.dtypes import DTYPES
from deepspeed_ext.ops.quantization.formats import FORMATS, Format, groups_of, number_of
from deepspeed_ext.ops.quantization.packed_weight import row_bytes

PACKING = 1  # of codes; counted on when packed_weight.h draws another order
FLOAT8_MULTIPLE = 16  # of both sizes, for torch._scaled_mm
MOST_NOTE_BYTES = 4096
_SCALES_MULTIPLE = 4
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
_KINDS: dict[str, Any] = {  # of what is in a note
    **{"packing": int, "format": str, "shape": list, "group_size": int, "symmetric": bool},
    **{"activations": str | None, "act_order": bool, "dtype": str},
}
_IN_NOTES = {"input_format": "activations"}  # what notes call it, as files have it


class TensorLayout(NamedTuple):
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class WeightLayout:
    """How the weight of one layer is stored.

    Args:
        format: one of deepspeed_ext.ops.quantization.formats.
        shape: of the weight, (out, in).
        group_size: elements along a row that share a scale; of an fp8 format the whole row.
        symmetric: whether there are no offsets.
        input_format: what the rows of x are rounded to before they are multiplied; None or "int8".
        act_order: whether the columns are in the order of their groups, and x is put in it too.
    """

    format: str
    shape: tuple[int, int]
    group_size: int
    symmetric: bool = True
    input_format: str | None = None
    act_order: bool = False

    def __post_init__(self) -> None:
        """Work out what follows, as compilers cannot."""
        _ = self.of_format, self._tensors, self.nbytes

    def __reduce__(self) -> tuple[type["WeightLayout"], tuple[Any, ...]]:
        """Let files have what it was made of, and not what followed."""
        return WeightLayout, tuple(getattr(self, field.name) for field in fields(self))

    @cached_property
    def of_format(self) -> Format:
        """What is known of the format."""
        return FORMATS[number_of("QuantizedLinear", self.format)]

    @property
    def is_float8(self) -> bool:
        """Whether codes are floats, which torch._scaled_mm multiplies."""
        return self.of_format.float8 is not None

    @property
    def code_dtype(self) -> torch.dtype:
        """What codes of a format of floats are, when they are not seen as bytes."""
        assert self.of_format.float8 is not None
        return self.of_format.float8

    def tensors(self) -> Mapping[str, TensorLayout]:
        """Return what a layer keeps, by name."""
        return self._tensors

    @cached_property
    def _tensors(self) -> dict[str, TensorLayout]:
        n, length = self.shape
        if self.is_float8:
            padded = _rounded_up(n, FLOAT8_MULTIPLE)
            found = {
                "codes": TensorLayout((padded, _rounded_up(length, FLOAT8_MULTIPLE)), torch.uint8),
                "scales": TensorLayout((1, padded), torch.float32),
            }
        else:
            groups = groups_of(length, self.group_size), _rounded_up(n, _SCALES_MULTIPLE)
            found = {
                "codes": TensorLayout((n, row_bytes(length, self.of_format.bits)), torch.uint8),
                "scales": TensorLayout(groups, torch.float32),
            }
            if not self.symmetric:
                found["offsets"] = TensorLayout(groups, torch.float32)
        if self.act_order:
            found["order"] = TensorLayout((length,), torch.int64)
        return found

    @cached_property
    def nbytes(self) -> int:
        """What these tensors take."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self._tensors.values())

    def misfit(self, tensors: Mapping[str, Tensor]) -> str | None:
        """Say which of these tensors is not as this tells; they may be on meta."""
        for name, want in self.tensors().items():
            got = tensors[name]
            if tuple(got.shape) != want.shape or got.dtype != want.dtype:
                return (
                    f"{name} is {got.dtype} of shape {list(got.shape)}, expected {want.dtype} of"
                    f" shape {list(want.shape)}"
                )
        if self.act_order and not tensors["order"].is_meta:  # kernels would read anywhere
            order = tensors["order"]
            if not torch.equal(order.sort().values, torch.arange(len(order), device=order.device)):
                return f"order has other numbers than 0 to {len(order) - 1}, expected each once"
        return None

    def check_rows(self, x: Tensor) -> None:
        """Refuse rows of x that are not as long as those of the weight."""
        if x.dim() == 0 or x.shape[-1] != self.shape[1]:
            raise ValueError(
                f"QuantizedLinear: x has shape {list(x.shape)}, expected [..., {self.shape[1]}]"
            )

    def note(self, dtype: torch.dtype) -> Tensor:
        """Return all of this as text, in a tensor of bytes, as a state dict keeps nothing else.

        Args:
            dtype: of the floats, or of what is added to products.
        """
        own = {_IN_NOTES.get(name, name): value for name, value in asdict(self).items()}
        fields = {"packing": PACKING, **own, "dtype": str(dtype).removeprefix("torch.")}
        text = json.dumps(fields, separators=(",", ":"))
        return torch.tensor(list(text.encode()), dtype=torch.uint8, device="cpu")

    def tensors_on(self, device: torch.device | str | int | None) -> dict[str, Tensor]:
        """Return these tensors, full of zeros."""
        return {
            name: torch.zeros(each.shape, dtype=each.dtype, device=device)
            for name, each in self.tensors().items()
        }

    def empty_on(self, device: torch.device | str | int | None) -> dict[str, Tensor]:
        """Return these tensors, of undefined values."""
        return {
            name: torch.empty(shape, dtype=dtype, device=device)
            for name, (shape, dtype) in self._tensors.items()
        }


def make_layout(
    what: str,
    format: str,
    shape: tuple[int, int],
    group_size: int | None,
    symmetric: bool = True,
    input_format: str | None = None,
    act_order: bool = False,
) -> WeightLayout:
    """Return a layout whose parts go together.

    Args:
        what: begins the text of an error.
        group_size: None stands for a whole row, as does one that is longer.

    Raises:
        ValueError: they do not.
    """
    of_format = FORMATS[number_of(what, format)]
    if group_size is not None and (type(group_size) is not int or group_size < 1):
        raise ValueError(f"{what}: group_size is {group_size!r}, expected 1 or more, or None")
    if not symmetric and not of_format.asymmetric_largest:
        raise ValueError(
            f"{what}: symmetric is False, expected True, as {format} has no form with offsets"
        )
    if input_format is not None and input_format not in ("int8",):
        raise ValueError(f"{what}: input_format is {input_format!r}, expected None or 'int8'")
    if input_format is not None and format not in ("int8", "int4"):
        raise ValueError(
            f"{what}: input_format is {input_format!r}, expected None, as the codes of {format}"
            " are no integers"
        )
    length = max(shape[1], 1)
    if group_size is None or of_format.float8 is not None:
        group_size = length
    return WeightLayout(
        format, shape, min(group_size, length), bool(symmetric), input_format, act_order
    )


def read_note(note: Tensor) -> tuple[WeightLayout, torch.dtype]:
    """Return the layout and dtype that a note tells of, believing nothing that it says.

    Raises:
        ValueError: it is no such note; tells why, as the end of a sentence.
    """
    if note.dtype != torch.uint8 or note.dim() != 1 or note.numel() > MOST_NOTE_BYTES:
        raise ValueError(f"is {note.dtype} of shape {list(note.shape)}, expected a text in bytes")
    if note.is_meta:
        raise ValueError("is on meta, expected values")
    text = bytes(note.tolist())
    try:
        fields: Any = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"is {text[:60]!r}, expected JSON") from None
    if (
        not isinstance(fields, dict)
        or fields.keys() != _KINDS.keys()
        or any(not isinstance(fields[name], kind) for name, kind in _KINDS.items())
    ):
        raise ValueError(f"is {text[:200]!r}, expected {', '.join(_KINDS)}")
    packing = fields.pop("packing")
    if packing is True or packing != PACKING:
        raise ValueError(f"is {text[:200]!r}, expected packing {PACKING}: its version is newer")
    shape, dtype = fields.pop("shape"), _DTYPES.get(fields.pop("dtype"))
    if len(shape) != 2 or any(type(size) is not int or not 0 <= size < 1 << 31 for size in shape):
        raise ValueError(f"has shape {shape}, expected two sizes")
    if dtype is None:
        raise ValueError(f"is {text[:200]!r}, expected dtype {', '.join(_DTYPES)}")
    fields |= {ours: fields.pop(name) for ours, name in _IN_NOTES.items()}
    layout = make_layout("is a note of a weight that cannot be", shape=tuple(shape), **fields)
    if layout.group_size != fields["group_size"]:
        raise ValueError(f"has group_size {fields['group_size']}, expected {layout.group_size}")
    return layout, dtype


def _rounded_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple

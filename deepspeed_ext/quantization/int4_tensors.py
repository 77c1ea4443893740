"""The tensors by which GPTQ and AWQ store a weight of 4 bits, as ours; nothing here opens a file.

An element is (code - zero) * scale, exactly with scales in 16 bits, as they are published. Of
scales in float32 that use over 20 bits zero * scale is rounded: by up to 2^-24 of it an element is
off, also one whose code is zero, beside its own rounding. Eight codes are in an int32, from its
lowest bits on:

  GPTQ  qweight (in / 8, out)       word (i, n): elements 8 i .. 8 i + 7 of row n
        qzeros (groups, out / 8)    word (g, j): rows 8 j .. 8 j + 7; in its first version the
                                    word is 0x11111111 less, so that a zero of 0 borrows, as
                                    GPTQModel writes it; others leave words that nobody can read
        g_idx (in,)                 the group of each column; with desc_act they are mixed
  AWQ   qweight (in, out / 8)       word (k, j): rows 8 j + 0, 2, 4, 6, 1, 3, 5, 7
        qzeros (groups, out / 8)    likewise
  both  scales (groups, out)

See: Frantar et al., "GPTQ", 2022; Lin et al., "AWQ", 2023. The packing is that of the packages
auto-gptq, gptqmodel (`checkpoint_format` "gptq" and "gptq_v2") and autoawq (`version` "gemm").
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from deepspeed_ext.dtypes import DTYPES
from deepspeed_ext.ops.quantization.formats import groups_of
from deepspeed_ext.quantization.layout import make_layout
from deepspeed_ext.quantization.stored_weight import StoredWeight, order_of, words_of

_PER_WORD = 8
_ZERO_OF_SYMMETRIC = 8
_ONES = 0x11111111


@dataclass(frozen=True)
class Int4Settings:
    """What a checkpoint says of all its layers.

    Args:
        method: "gptq" or "awq".
        group_size: None for a whole row.
        symmetric: whether all zeros are 8.
        zeros_less_one: whether they are stored so.
        act_order: whether the groups of columns may be mixed.
    """

    mark: ClassVar[str] = "qweight"
    parts: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales", "g_idx")
    method: str
    group_size: int | None
    symmetric: bool
    zeros_less_one: bool
    act_order: bool

    @property
    def on_host(self) -> tuple[str, ...]:
        """Those whose values are looked at; see `Packing`."""
        return ("g_idx", "qzeros") if self.symmetric else ("g_idx",)

    def stored(
        self, what: str, tensors: Mapping[str, Tensor], length: int | None = None
    ) -> StoredWeight:
        """Return the weight of a layer; see `Packing`. Without a length the tensors say it."""
        return _stored(what, tensors, length, self)


def read_settings(what: str, config: Any) -> Int4Settings:
    """Return what a quantization_config says.

    Args:
        what: begins the text of an error.
        config: as it is in config.json.

    Raises:
        ValueError: it is of another method, packing or number of bits.
    """
    if not isinstance(config, dict):
        raise ValueError(f"{what} has the quantization_config {config!r:.100}, expected an object")

    def get(name: str, default: Any, kind: type, *others: str) -> Any:
        value = next((config[key] for key in (name, *others) if key in config), default)
        if type(value) is not kind:
            raise ValueError(f"{what} has {name} {value!r:.100}, expected {kind.__name__}")
        return value

    def one_of(name: str, value: str, expected: tuple[str, ...]) -> None:
        if value not in expected:
            raise ValueError(f"{what} has {name} {value!r:.100}, expected {' or '.join(expected)}")

    method = get("quant_method", "gptq", str)
    one_of("quant_method", method, ("gptq", "awq"))
    bits = get("bits", None, int, "w_bit")
    if bits != 4:
        raise ValueError(f"{what} has bits {bits}, expected 4")
    group_size = get("group_size", -1, int, "q_group_size")
    if group_size < 1 and group_size != -1:
        raise ValueError(f"{what} has group_size {group_size}, expected 1 or more, or -1")
    _check_one_for_all(what, config, bits, group_size)
    packing = "gptq"
    if method == "gptq":
        packing = get("checkpoint_format", "gptq", str)
        one_of("checkpoint_format", packing, ("gptq", "gptq_v2"))
        if config.get("is_marlin_format"):
            raise ValueError(f"{what} has is_marlin_format true, expected false")
    else:
        one_of("version", get("version", "gemm", str).lower(), ("gemm",))
        if not get("zero_point", True, bool):
            raise ValueError(f"{what} has zero_point false, expected true")
    return Int4Settings(
        method,
        None if group_size == -1 else group_size,
        method == "gptq" and get("sym", False, bool),
        method == "gptq" and packing == "gptq",
        method == "gptq" and get("desc_act", False, bool),
    )


def _check_one_for_all(what: str, config: dict[str, Any], bits: int, group_size: int) -> None:
    """Refuse settings of single layers that say anything else."""
    usual = {
        "bits": bits,
        "group_size": group_size,
        "sym": config.get("sym", False),
        "desc_act": config.get("desc_act", False),
    }
    of_layers = config.get("dynamic") or {}
    if not isinstance(of_layers, dict):
        raise ValueError(f"{what} has dynamic {of_layers!r:.100}, expected an object")
    for pattern, settings in of_layers.items():
        if str(pattern).startswith("-:"):  # layers that are floats
            continue
        for name, value in settings.items() if isinstance(settings, dict) else ():
            if name in usual and value != usual[name]:
                raise ValueError(
                    f"{what} has {name} {value!r:.100} for layers {pattern!r:.100} in dynamic,"
                    f" expected {usual[name]!r}, one for all layers"
                )


def _stored(
    what: str, tensors: Mapping[str, Tensor], length: int | None, settings: Int4Settings
) -> StoredWeight:
    """Return a weight of a checkpoint, with offsets; see above how exactly.

    Args:
        what: begins the text of an error: which layer of which file.
        tensors: qweight, qzeros, scales, and of GPTQ g_idx, which may lack without act_order.
        length: elements of a row; None: what the tensors say.
        settings: of the checkpoint.

    Raises:
        ValueError: a tensor is missing, or does not fit the others.
    """
    for name in ("qweight", "qzeros", "scales"):
        if name not in tensors:
            raise ValueError(f"{what} has no {name}, expected it beside {', '.join(tensors)}")
    qweight, scales = tensors["qweight"], tensors["scales"]
    if qweight.dtype != torch.int32 or qweight.dim() != 2:
        raise ValueError(
            f"{what} has qweight as {qweight.dtype} of shape {list(qweight.shape)}, expected int32"
            " of two dimensions"
        )
    is_awq = settings.method == "awq"
    rows, columns = qweight.shape
    has, n = (rows, columns * _PER_WORD) if is_awq else (rows * _PER_WORD, columns)
    if length not in (None, has):
        raise ValueError(f"{what} has rows of {has} elements in qweight, expected {length}")
    group = min(settings.group_size or has, max(has, 1))
    groups = groups_of(has, group)
    if scales.dtype not in DTYPES or scales.shape != (groups, n):
        raise ValueError(
            f"{what} has scales as {scales.dtype} of shape {list(scales.shape)}, expected floats of"
            f" shape {[groups, n]} for groups of {group}"
        )
    zeros = _zeros(what, tensors["qzeros"], (groups, n), settings)
    if settings.act_order and groups > 1 and "g_idx" not in tensors:
        raise ValueError(f"{what} has no g_idx, expected it, as desc_act is true")
    g_idx = None if is_awq else tensors.get("g_idx")
    order = order_of(what, "g_idx", g_idx, has, group, settings.act_order)
    layout = make_layout(what, "int4", (n, has), group, False, None, order is not None)
    return StoredWeight(layout, qweight.t(), scales, zeros, order, across=is_awq)


def _zeros(
    what: str, qzeros: Tensor, shape: tuple[int, int], settings: Int4Settings
) -> Callable[[int, int], Tensor] | int:
    """Return the zeros; see `StoredWeight`."""
    groups, n = shape
    if n % _PER_WORD:
        raise ValueError(f"{what} has {n} rows, expected a multiple of {_PER_WORD}")
    if qzeros.dtype != torch.int32 or qzeros.shape != (groups, n // _PER_WORD):
        raise ValueError(
            f"{what} has qzeros as {qzeros.dtype} of shape {list(qzeros.shape)}, expected int32 of"
            f" shape {[groups, n // _PER_WORD]} for scales of shape {list(shape)}"
        )
    if not settings.symmetric:
        return partial(_rows_of_zeros, qzeros, settings)
    # Files are about that name the first version and are of the second. What is symmetric has one
    # zero only, so that it does not matter.
    one_zero = [_signed(zero * _ONES) for zero in (_ZERO_OF_SYMMETRIC, _ZERO_OF_SYMMETRIC - 1)]
    is_alike = qzeros.is_meta or any(bool((qzeros == word).all()) for word in one_zero)
    if qzeros.numel() and not is_alike:
        zeros = words_of(qzeros)
        raise ValueError(
            f"{what} has qzeros of {int(zeros.min())} to {int(zeros.max())}, expected all 7, or"
            " all 8, as sym is true"
        )
    return _ZERO_OF_SYMMETRIC


def _rows_of_zeros(qzeros: Tensor, settings: Int4Settings, begin: int, end: int) -> Tensor:
    """Return the zeros of some rows, which begin and end with words."""
    words = qzeros[:, begin // _PER_WORD : end // _PER_WORD]
    if settings.method == "awq":
        return _awq_rows(words)
    return words_of(words + _ONES if settings.zeros_less_one else words)


def _signed(word: int) -> int:
    """Return the int32 of the same bits."""
    return word - (1 << 32) if word >> 31 else word


def _awq_rows(words: Tensor) -> Tensor:
    """Return the same in the order of rows."""
    row = torch.arange(_PER_WORD, device=words.device)  # a list would have to be copied up
    shifts = 4 * (row % 2 * 4 + row // 2)
    return (words[..., None] >> shifts & 15).flatten(-2)

"""Which tensors can be saved, as what, and which of them are one and the same."""

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from deepspeed_ext.dtensors import is_dtensor
from deepspeed_ext.io.checkpoint.format import HeaderEntry
from deepspeed_ext.io.tensors import a, check_kind
from deepspeed_ext.torch_internals.tensors import storage_id

TORCH_DTYPES = {  # of the format's dtypes; torch has none of 6 bits
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F4": torch.float4_e2m1fn_x2,  # two elements of the format in one of torch
}
NEVER_TIED = "format"  # of metadata that files commonly have: {"format": "pt"}
Order = tuple[bool, int, int, str]  # among the tensors of a file
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def check_tensors(
    state_dict: object, *, op: str = "io.save", or_meta: bool = False
) -> dict[str, Tensor]:
    """Return the tensors of a state dict by name, detached, in its order.

    Args:
        state_dict: what the caller was given.
        op: begins the text of an error.
        or_meta: whether tensors may be on meta.

    Raises:
        TypeError: it is no mapping from names to tensors whose elements lie in memory, all here.
        ValueError: a tensor's memory was freed.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"{op}: state_dict is {a(state_dict)}, expected a mapping")
    for name in state_dict:
        if not isinstance(name, str):
            raise TypeError(f"{op}: state_dict has the key {name!r}, expected strings")
    return {
        name: _check(f"{op}: state_dict[{name!r}]", tensor, or_meta)
        for name, tensor in state_dict.items()
    }


def tied_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return for each name but one of each group that is the same tensor the one that is kept.

    The same are tensors that differ in nothing: memory, shape, strides and dtype. The first name
    in alphabetical order is kept, as the safetensors package does, but one that cannot be noted as
    tied before all others.
    """
    groups: defaultdict[tuple[object, ...], list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        if tensor.numel():
            storage = tensor.untyped_storage()
            address = storage_id(storage) if tensor.is_meta else storage.data_ptr()
            memory = (tensor.device, address, tensor.storage_offset())
            layout = (tensor.dtype, tensor.shape, tensor.stride())
            groups[(*memory, *layout, tensor.is_conj(), tensor.is_neg())].append(name)
    ties = {}
    for names in groups.values():
        kept = NEVER_TIED if NEVER_TIED in names else min(names)
        ties.update({name: kept for name in names if name != kept})
    return ties


def lay_out(tensors: Mapping[str, Tensor], page: int) -> dict[str, HeaderEntry]:
    """Place tensors in the data of a file, one after another.

    Those of whole pages come first, so that they stay on page boundaries. The others are ordered
    by the size of their elements, so that each begins at a multiple of it: readers that map the
    file into memory need that.

    Returns:
        An entry for each, in the order of the data.
    """

    def order(item: tuple[str, Tensor]) -> Order:
        name, tensor = item
        return order_of(name, tensor.nbytes, tensor.element_size(), page)

    entries, position = {}, 0
    for name, tensor in sorted(tensors.items(), key=order):
        end = position + tensor.nbytes
        shape = tuple(tensor.shape)
        if tensor.dtype is torch.float4_e2m1fn_x2:
            shape = (*shape[:-1], 2 * shape[-1])
        entries[name] = HeaderEntry(_NAMES[tensor.dtype], shape, position, end)
        position = end
    return entries


def order_of(name: str, nbytes: int, element_bytes: int, page: int) -> Order:
    """Return by what `lay_out` orders tensors."""
    is_odd = nbytes % page != 0
    return is_odd, -element_bytes if is_odd else 0, -nbytes, name


def torch_shape(entry: HeaderEntry) -> tuple[int, ...] | None:
    """Return the shape that a tensor of torch has, None if there is none for it."""
    if entry.dtype not in TORCH_DTYPES:
        return None
    if entry.dtype == "F4":
        if not entry.shape or entry.shape[-1] % 2:
            return None
        return (*entry.shape[:-1], entry.shape[-1] // 2)
    return entry.shape


def _check(what: str, value: object, or_meta: bool) -> Tensor:
    if isinstance(value, Tensor):
        if is_dtensor(value):
            raise TypeError(
                f"{what} is a DTensor, expected a plain torch.Tensor; call full_tensor() on every"
                " rank before, or save with torch.distributed.checkpoint"
            )
        if is_lazy(value):
            raise TypeError(f"{what} has no shape yet, expected values; run the model once")
        if value.is_nested:
            raise TypeError(
                f"{what} is a nested tensor, expected a dense one; see to_padded_tensor"
            )
    if not (or_meta and isinstance(value, Tensor) and value.is_meta):
        value = check_kind(what, value)
    tensor: Tensor = value.detach()
    if tensor.dtype not in _NAMES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _NAMES)
        raise TypeError(f"{what} has dtype {tensor.dtype}, expected one of {names}")
    if tensor.dtype is torch.float4_e2m1fn_x2 and tensor.dim() == 0:
        raise TypeError(f"{what} is one pair of 4-bit numbers, expected at least one dimension")
    return tensor

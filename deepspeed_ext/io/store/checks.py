"""What a tensor store checks of a tensor that it reads."""

import errno

from torch import Tensor

from deepspeed_ext.io._native import native
from deepspeed_ext.io.store.job import Record
from deepspeed_ext.io.store.manifest import TensorInfo
from deepspeed_ext.io.tensors import as_bytes, check_kind, empty, overlaps_itself


def target_of(name: str, info: TensorInfo, out: Tensor | None) -> Tensor:
    """Return `out` if the tensor of that name fits it, or a new tensor when there is none."""
    if out is None:
        return empty(info.shape, info.dtype)
    out = check_kind("TensorStore.get: out", out)
    if out.dtype != info.dtype:
        raise ValueError(
            f"TensorStore.get: out has dtype {out.dtype}, expected {info.dtype} as {name!r} has"
        )
    if tuple(out.shape) != info.shape:
        raise ValueError(
            f"TensorStore.get: out has shape {list(out.shape)}, expected {list(info.shape)} as"
            f" {name!r} has"
        )
    if overlaps_itself(out):
        raise ValueError(
            f"TensorStore.get: out has strides {tuple(out.stride())} for shape {list(out.shape)},"
            " expected elements that do not share memory"
        )
    return out


def checksum_of(memory: Tensor, before: int = 0) -> int:
    """Return the CRC-32C of a contiguous CPU tensor, and of bytes before it that have this one."""
    return int(native().crc32c(*as_bytes(memory), before))


def verified(record: Record, path: str, landing: Tensor, out: Tensor) -> Tensor:
    """Check what was read into `landing`, hand it over to `out` and return that."""
    got, want = checksum_of(landing), record.info.checksum
    if got != want:
        raise OSError(
            errno.EBADMSG,
            f"TensorStore: {record.name!r} in {path} has crc32c {got:08x}, expected {want:08x}: its"
            f" {record.info.nbytes} bytes at offset {record.offset} are not what was put",
        )
    if landing is not out:
        out.detach().copy_(landing)
    return out

"""What all processes must have given alike, compared before anything is sharded."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

_TEXT_BYTES = 512  # of a line that is shown


class Disagreement(ValueError):
    """Processes were given different things; the text says which."""


def check_agreement(op: str, lines: list[str], mesh: DeviceMesh) -> None:
    """Raise on every process if one of them has other lines than another.

    Processes of a mesh call this together; they exchange 8 bytes for each line.

    Args:
        op: for the text of the error.
        lines: each says one thing.
        mesh: whose processes are compared, dimension by dimension.

    Raises:
        Disagreement: the first line that differs, as it is here and as it is elsewhere.
    """
    groups = [mesh.get_group(i) for i in range(mesh.ndim) if mesh.size(i) > 1]
    found = [_difference(lines, group, mesh.device_type) for group in groups]
    # A process may agree with all that it compared itself with, and others not.
    count = torch.tensor(sum(map(bool, found)), device=mesh.device_type)
    for group in groups:
        dist.all_reduce(count, group=group)
    if count:
        what = next(filter(None, found), "other processes differ from each other")
        raise Disagreement(f"{op}: {what}, expected the same model and options on all processes")


@contextmanager
def all_or_none(op: str, mesh: DeviceMesh) -> Iterator[None]:
    """Raise on every process of a mesh what the body raises on one of them.

    Raises:
        RuntimeError: all was well here, and not elsewhere.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    count = torch.tensor(int(error is not None), device=mesh.device_type)
    for i in range(mesh.ndim):
        if mesh.size(i) > 1:
            dist.all_reduce(count, group=mesh.get_group(i))
    if error is not None:
        raise error
    if count:
        raise RuntimeError(f"{op}: another process failed, expected all to go on; it says why")


def _difference(lines: list[str], group: dist.ProcessGroup, device: str) -> str:
    """Return the first difference between processes of a group in words, or nothing."""
    counts = _gathered(torch.tensor([len(lines)], device="cpu"), group, device).flatten().tolist()
    digests = [_digest(line) for line in lines] + [0] * (max(counts) - len(lines))
    of_all = _gathered(torch.tensor(digests, device="cpu"), group, device)
    differing = (of_all != of_all[0]).any(dim=0).nonzero().flatten().tolist()
    if not differing:
        return ""
    first = differing[0]
    text = lines[first] if first < len(lines) else "nothing more"
    raw = bytearray(text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0"))
    texts = _gathered(torch.frombuffer(raw, dtype=torch.uint8), group, device)
    mine = dist.get_rank(group)
    other = int((of_all[:, first] != of_all[mine, first]).nonzero()[0])
    shown = [
        bytes(texts[rank].tolist()).rstrip(b"\0").decode(errors="replace") for rank in (mine, other)
    ]
    ranks = [dist.get_global_rank(group, rank) for rank in (mine, other)]
    return f"process {ranks[0]} has {shown[0]}, process {ranks[1]} has {shown[1]}"


def _gathered(values: Tensor, group: dist.ProcessGroup, device: str) -> Tensor:
    """Return what each process of a group has, a row for each, on the CPU."""
    values = values.to(device)
    rows = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, values, group=group)
    return torch.stack(rows).cpu()


def _digest(line: str) -> int:
    """Return 63 bits of a hash, none of which is 0."""
    return (int.from_bytes(hashlib.sha256(line.encode()).digest()[:8], "little") >> 1) | 1

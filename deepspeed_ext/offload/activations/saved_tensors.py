"""saved_tensors: what autograd saves is kept in host memory or on disk until backward wants it."""

import errno
import os
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh

from deepspeed_ext.offload.activations.counting import NoPlace, call_without_memory
from deepspeed_ext.offload.activations.disk import DiskPlace
from deepspeed_ext.offload.activations.host import HostPlace
from deepspeed_ext.offload.activations.kept import Packed, Place, Staying, staying
from deepspeed_ext.offload.activations.packing import Packing
from deepspeed_ext.offload.activations.sharding import Sharding
from deepspeed_ext.offload.tiers.room import bytes_in
from deepspeed_ext.torch_internals.checkpoints import is_input_of_checkpoint

_DEVICES = ("cpu", "nvme")


class SavedTensors:
    """A context in which what autograd saves leaves its device; see `saved_tensors`."""

    def __init__(
        self,
        device: str,
        *,
        nvme_path: str | os.PathLike[str] | None,
        budget: int | str | None,
        min_bytes: int | str,
    ) -> None:
        name = "saved_tensors"
        if device not in _DEVICES:
            raise ValueError(f"{name}: device is {device!r}, expected one of {', '.join(_DEVICES)}")
        if (device == "nvme") != (nvme_path is not None):
            expected = "a folder on the disk" if device == "nvme" else f"None with {device!r}"
            raise ValueError(f"{name}: nvme_path is {nvme_path!r}, expected {expected}")
        most = bytes_in(f"{name}: budget", budget)
        least = bytes_in(f"{name}: min_bytes", min_bytes)
        if least is None:
            raise ValueError(f"{name}: min_bytes is None, expected bytes, as 1048576 or '1MiB'")
        self.device = device
        self._settings = {"nvme_path": nvme_path, "budget": budget, "min_bytes": min_bytes}
        place: Place = HostPlace() if nvme_path is None else _disk_place(name, nvme_path, most)
        self._packing = Packing(place, most, least)
        self._hooks = saved_tensors_hooks(self._packing.pack, self._packing.unpack)
        self._least = least
        self._shardings: dict[DeviceMesh, Sharding] = {}

    def __enter__(self) -> "SavedTensors":
        self._hooks.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.__exit__()

    def of_checkpoints(self) -> saved_tensors_hooks:
        """Return a context in which inputs of torch's checkpoints leave, and nothing else.

        It is for models that call torch.utils.checkpoint themselves, of both kinds. What torch
        compiles is left as it is.
        """
        return saved_tensors_hooks(self._pack_input, self._packing.unpack)

    def shared_over(self, mesh: DeviceMesh) -> saved_tensors_hooks:
        """Return the context in which what has a graph is shared out; see `checkpoint`."""
        sharding = self._shardings.get(mesh)
        if sharding is None:
            sharding = self._shardings[mesh] = Sharding(self._packing, mesh, self._least)
        return sharding.hooks()

    def stats(self) -> dict[str, int]:
        """Return what was done so far.

        Returns:
            `bytes` that are kept away now, and the `peak` of that; `bytes_out` that have left in
            all; `stayed` bytes for which the budget had no room; bytes of the `largest` storage
            that has left; how many storages came back `ahead` of backward, and how many
            `on_demand`.
        """
        return self._packing.stats()

    def estimate(
        self, function: Callable[..., object], *args: Any, **kwargs: Any
    ) -> dict[str, int]:
        """Return what would leave if a function were called in this context, and take no memory.

        The function is called, on tensors without memory: so it must not look at values, and must
        not call backward. Checkpoints in it count what they keep here. No other thread may use
        this context meanwhile.

        Args:
            function: forward, such as a model with its loss.
            args: of it, on the device where it is to run.
            kwargs: likewise.

        Returns:
            `peak`, `stayed` and `largest`, as `stats` will have them after one such forward.
            Host memory, or the file, has `peak` bytes; the device has what stayed, and about four
            times `largest` for what is on its way.

        Raises:
            RuntimeError: the function calls backward.
        """
        from deepspeed_ext.torch_internals.fakes import FakeTensor  # it is slow to import

        with self._packing.replaced(NoPlace(), FakeTensor) as packing:
            with self:
                made = call_without_memory(function, args, kwargs)
            stats = packing.stats()
            del made  # whose graph had all that
        return {name: stats[name] for name in ("peak", "stayed", "largest")}

    def _pack_input(self, tensor: Tensor) -> Packed | Staying:
        return self._packing.pack(tensor) if is_input_of_checkpoint() else staying(tensor)

    def __reduce__(self) -> tuple[Any, ...]:
        return _made_anew, (self.device, self._settings)


def saved_tensors(
    device: str = "cpu",
    *,
    nvme_path: str | os.PathLike[str] | None = None,
    budget: int | str | None = None,
    min_bytes: int | str = 1 << 20,
) -> SavedTensors:
    """Return a context in which what autograd saves leaves for host memory or a disk.

    Backward brings it back, ahead of time and in the reverse order. Gradients are the same, bit for
    bit. Enter it around forward, as often as you like and in any thread: its memory is used again.
    A storage leaves once, whatever views of it are saved, and tensors come back with the shapes and
    strides that they had. Parameters and leaves that get gradients stay, with their views, and so
    do DTensors and other subclasses, and sparse tensors. A tensor that is written after it was
    saved is an error in backward, as it is without this. Like autograd itself, nothing here sees
    writes that count no version (`.data`, kernels of others); a storage that is saved twice with
    one between has what it had at the first.

    What is kept away belongs to the graph: it goes with it, and stays for another backward if that
    was asked to retain it. On CUDA copies are made on a stream of their own between pinned
    memory and the device, and the host never waits. A disk is written and read beside the device,
    and the host waits where it must.

    Args:
        device: where it goes: "cpu", host memory; "nvme", a file without a name on a disk.
        nvme_path: a folder on that disk.
        budget: most bytes that are away at a time, as a number or as "2GiB"; what is saved beyond
            them stays, and comes first in backward. With a budget forward waits for no copy: give
            what the link carries while forward runs. None: all leaves, and streams wait, so that no
            more than twice the largest storage is still on its way.
        min_bytes: storages of fewer bytes stay.

    Returns:
        The context; its `stats()` tell what is away.

    Raises:
        ValueError: an argument is out of range, named in the text.
        TypeError: nvme_path is no path.
        OSError: nvme_path is no folder that can be used; ENOSPC: it has no room for the budget.
    """
    return SavedTensors(device, nvme_path=nvme_path, budget=budget, min_bytes=min_bytes)


def _disk_place(name: str, path: str | os.PathLike[str], budget: int | None) -> DiskPlace:
    if not isinstance(path, str | bytes | os.PathLike):
        raise TypeError(f"{name}: nvme_path is {type(path).__name__}, expected a folder's path")
    text = os.fsdecode(path)
    if not text or "\0" in text:
        raise ValueError(f"{name}: nvme_path is {text!r}, expected a folder on the disk")
    try:
        return DiskPlace(path, budget)
    except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
        reason = os.strerror(error.errno or errno.EIO)
        why = f"{name}: nvme_path is {text}, expected a folder to write in: {reason}"
        raise OSError(error.errno, why) from error


def _made_anew(device: str, settings: dict[str, Any]) -> SavedTensors:
    return SavedTensors(device, **settings)

"""Define the ops in torch's registry; their native libraries are loaded, or built, on first use.

The schema stands in Python, so an op exists, traces and has a fake before anything is compiled.
Until the native kernel of a device is registered, a call lands in a Python kernel, which loads the
library of that device and calls the op again; from then on torch goes straight to the native one.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from deepspeed_ext.op_builder import load

_NAMESPACE = "deepspeed_ext"
_FRAGMENT = torch.library.Library(_NAMESPACE, "FRAGMENT")


def define(schema: str, libraries: Mapping[str, str]) -> torch._ops.OpOverload:
    """Define the op of this schema and return it.

    Args:
        schema: in torch's schema language; every mutated argument is marked.
        libraries: for each device type, "cpu" or "cuda", the op library that has the kernel.
    """
    name = schema.partition("(")[0]
    calling_again = threading.local()  # other threads may be on their way here for the first time

    def load_and_call_again(*args: object) -> object:
        device = _device_of(op, libraries, args)
        if getattr(calling_again, "now", False):  # torch did not choose the native kernel
            raise TypeError(
                f"{name}: arguments are of a kind that no kernel takes, expected Tensor"
            )
        load(libraries[device])
        calling_again.now = True
        try:
            return op(*args)
        finally:
            calling_again.now = False

    _FRAGMENT.define(schema)
    op: torch._ops.OpOverload = getattr(getattr(torch.ops, _NAMESPACE), name).default
    _FRAGMENT.impl(name, load_and_call_again, "CompositeExplicitAutograd")
    # What it writes and returns has no gradient: autograd has no part in it, and the default
    # fallback would look at every tensor of every list.
    _FRAGMENT.impl(name, torch.library.fallthrough_kernel, "Autograd")
    return op


def check_one_device(
    op: torch._ops.OpOverload, args: tuple[object, ...], *, on_host: Sequence[str] = ()
) -> None:
    """Check what a native kernel would: a fake is also called when one of the tensors is on meta.

    Args:
        op: gives the arguments their names.
        args: of a call of it.
        on_host: names of the arguments that are always in host memory.

    Raises:
        ValueError: a tensor is not on the device of the first one.
    """
    tensors = [item for item in _tensors(op, args) if item[0] not in on_host]
    for argument, tensor in tensors:
        want = tensors[0][1].device
        if tensor.device != want:
            name = op.name().partition("::")[2]
            raise ValueError(f"{name}: {argument} is on {tensor.device}, expected {want}")


def _device_of(
    op: torch._ops.OpOverload, known: Mapping[str, str], args: tuple[object, ...]
) -> str:
    """Return the type of the device that the tensors of these arguments are on.

    Raises:
        ValueError: a tensor is sparse, or on a device that the op has no library for.
    """
    name = op.name().partition("::")[2]
    devices = set()
    for argument, tensor in _tensors(op, args):
        if tensor.layout is not torch.strided:
            raise ValueError(f"{name}: {argument} is {tensor.layout}, expected torch.strided")
        if tensor.device.type not in known:
            expected = " or ".join(known)
            raise ValueError(f"{name}: {argument} is on {tensor.device}, expected {expected}")
        devices.add(tensor.device.type)
    return "cuda" if "cuda" in devices else "cpu"


def _tensors(op: torch._ops.OpOverload, args: tuple[object, ...]) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a call with the text that error messages call it by."""
    for argument, value in zip(op._schema.arguments, args, strict=False):
        if isinstance(value, Tensor):
            yield argument.name, value
        elif isinstance(value, (list, tuple)):
            for i, item in enumerate(value):
                if isinstance(item, Tensor):
                    yield f"{argument.name}[{i}]", item

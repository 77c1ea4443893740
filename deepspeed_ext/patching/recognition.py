"""What a module is: by its class, and by what the forward of that class computes.

A class of transformers is known by where it is defined, and its forward by being the one that is
written there. What that computes is not told by a name, as a version may change it: it is called
with small tensors, beside ours.
"""

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_TRANSFORMERS = "transformers."
_CLOSE = 2e-5  # of the largest, in float32


class Unlike(Exception):
    """A module is not what it looked like; the text says why."""


def class_of(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module was made with: fully_shard puts one of its own before it."""
    found = type(module)
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(module, fsdp.FSDPModule):
        found = found.__bases__[-1]
    return found


def is_of_transformers(module: nn.Module) -> bool:
    """Tell whether a class is one of transformers' own."""
    return class_of(module).__module__.startswith(_TRANSFORMERS)


def check_forward(module: nn.Module) -> None:
    """Refuse a module whose forward is not the one that its class was written with.

    Raises:
        Unlike: it has one of its own, or its class has another since.
    """
    kind = class_of(module)
    if "forward" in vars(module):
        raise Unlike("its forward has been replaced by another")
    owner: Any = next((each for each in kind.__mro__ if "forward" in vars(each)), kind)
    if owner.__module__.startswith("torch.nn."):
        return
    if not owner.__module__.startswith(_TRANSFORMERS):
        raise Unlike(f"its class is of {owner.__module__}, expected one of transformers")
    written = inspect.unwrap(owner.forward)
    home = (written.__module__, written.__qualname__)
    if home != (owner.__module__, f"{owner.__qualname__}.forward"):
        raise Unlike("the forward of its class has been replaced by another")


def stub_of(module: nn.Module, **parts: Any) -> Any:
    """Return a module of the same class and plain attributes, with these parameters and modules."""
    kind: Any = class_of(module)
    stub = kind.__new__(kind)
    nn.Module.__init__(stub)
    for name, value in vars(module).items():
        if not name.startswith("_") and name not in ("training", "forward"):
            stub.__dict__[name] = value
    for name, part in parts.items():
        stub.__dict__.pop(name, None)
        setattr(stub, name, part)
    return stub


def samples(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return random tensors on the CPU; torch's generator is left alone."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def check_same(
    what: str, theirs: Callable[[], Tensor], want: Tensor, close: float = _CLOSE
) -> None:
    """Refuse what does not compute the same.

    Raises:
        Unlike: results differ, or theirs cannot be called so.
    """
    try:
        with torch.no_grad():
            got = theirs()
    except Exception as error:
        raise Unlike(f"{what} cannot be tried: {error!r:.70}") from error
    if got.shape != want.shape:
        raise Unlike(f"{what} computes something else")
    got, want = got.double(), want.double()
    if not (got - want).abs().max() <= close * want.abs().max():
        raise Unlike(f"{what} computes something else")

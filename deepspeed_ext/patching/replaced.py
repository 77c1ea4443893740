"""What stands in the place of a module's forward: in the module, so that no class changes."""

import inspect
from types import MethodType
from typing import Any

from torch import Tensor, nn

from deepspeed_ext.dtensors import is_dtensor
from deepspeed_ext.dtypes import DTYPES
from deepspeed_ext.torch_internals.modules import REPLICATE

_NAME = "_deepspeed_ext_replaced"  # the attribute of a module whose forward was replaced


class Replaced:
    """A forward for one module, which goes with it when it is copied, pickled or replicated.

    Args:
        module: that it is for.

    Attributes:
        by: names of the ops that it calls.
        is_out: it calls the module's own forward: someone has kept it in a forward of theirs.
        origin: what it was made of, for a replica of that one's module.
    """

    by: tuple[str, ...] = ()
    origin: "Replaced | None" = None

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.is_out = False

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the module's own forward, which Trainer asks for."""
        return inspect.signature(MethodType(type(self.module).forward, self.module))

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Do what the forward of the module's class does.

        Accelerate binds what it finds to the module once more.
        """
        if args and args[0] is self.module:
            args = args[1:]
        if self.is_out:
            return self.own(*args, **keywords)
        return self.run(*args, **keywords)

    def own(self, *args: Any, **keywords: Any) -> Any:
        """Call the forward of the module's class."""
        return type(self.module).forward(self.module, *args, **keywords)

    def run(self, *args: Any, **keywords: Any) -> Any:
        """Do the same with our ops."""
        raise NotImplementedError

    def replicate(self) -> nn.Module:
        """Return what the module's class makes for nn.DataParallel, with a forward of its own.

        A replica has all attributes of the module, and the forward would have the module's weights.

        Raises:
            RuntimeError: someone has kept this in a forward of theirs, which is of the module.
        """
        module = self.module
        if not is_in_place(module):
            raise RuntimeError(
                f"patch: the forward of {type(module).__name__} has been put into another, expected"
                " ours alone in a model that is replicated; use torchrun, or unpatch the model"
            )
        replica: nn.Module = getattr(type(module), REPLICATE)(module)
        put(self.made_for(replica))
        return replica

    def made_for(self, replica: nn.Module) -> "Replaced":
        """Return the same for a replica of the module."""
        made = object.__new__(type(self))  # not by copy: it would make code of attention anew
        vars(made).update(vars(self), module=replica, origin=self.origin or self)
        return made


def put(replaced: Replaced) -> None:
    """Let a module call this in place of its own forward."""
    setattr(replaced.module, _NAME, replaced)
    replaced.module.forward = replaced
    setattr(replaced.module, REPLICATE, replaced.replicate)


def replaced_of(module: Any) -> Replaced | None:
    """Return what stands in the place of a module's forward."""
    found: Replaced | None = vars(module).get(_NAME)
    return found


def is_in_place(module: nn.Module) -> bool:
    """Tell whether that is what a call of the module calls: nobody has put another there."""
    replaced = replaced_of(module)
    return replaced is not None and vars(module).get("forward") is replaced


def take_out(module: nn.Module) -> None:
    """Undo `put`, also where another has put a forward around it since."""
    replaced = replaced_of(module)
    if replaced is None:
        return
    delattr(module, _NAME)
    replaced.is_out = True
    if vars(module).get(REPLICATE) == replaced.replicate:
        delattr(module, REPLICATE)
    if vars(module).get("forward") is replaced:
        del module.forward


def are_ours(*tensors: Tensor | None) -> bool:
    """Tell whether our ops take these: of their dtypes and devices, and whole."""
    return all(
        tensor.dtype in DTYPES and tensor.device.type in ("cpu", "cuda") and not is_dtensor(tensor)
        for tensor in tensors
        if tensor is not None
    )

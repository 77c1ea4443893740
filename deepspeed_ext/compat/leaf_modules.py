"""Modules that stage 3 gathers with all that is in them, under the names of deepspeed.utils."""

from collections.abc import Iterable

from torch import nn

from deepspeed_ext.zero.blocks import MARK

Kind = type[nn.Module] | str


def z3_leaf_module(model: nn.Module) -> bool:
    """Tell whether a module is marked as one that is gathered as a whole."""
    return bool(getattr(model, MARK, False))


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that are marked."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark one module, before initialize, or take the mark off."""
    setattr(model, MARK, flag)


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[Kind], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark modules, before initialize, as ones that are gathered with all that is in them.

    Such as layers of experts, of which processes call different ones.

    Args:
        model: whose modules they are.
        leaf_module_classes: classes, or names of classes.
        raise_if_not_found: False: it may be that there is none.

    Returns:
        The modules.

    Raises:
        ValueError: there is none.
    """
    return _mark(model, list(leaf_module_classes), True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[Kind], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Take the marks off; as set_z3_leaf_modules."""
    return _mark(model, list(leaf_module_classes), False, raise_if_not_found)


def _mark(model: nn.Module, kinds: list[Kind], flag: bool, must_be: bool) -> list[nn.Module]:
    found = [module for module in model.modules() if _is_any(module, kinds)]
    if not found and must_be:
        raise ValueError(
            f"z3_leaf_modules: leaf_module_classes is {kinds}, expected classes of modules in model"
        )
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _is_any(module: nn.Module, kinds: list[Kind]) -> bool:
    cls = type(module)
    names = {cls.__name__, f"{cls.__module__}.{cls.__qualname__}"}
    return any(
        kind in names if isinstance(kind, str) else isinstance(module, kind) for kind in kinds
    )

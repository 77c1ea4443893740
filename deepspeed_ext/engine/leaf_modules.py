"""Modules that stage 3 gathers with all that is in them, under the names of deepspeed.utils."""

import logging
from collections.abc import Iterable, Mapping, Set

from torch import nn

from deepspeed_ext.config import Config
from deepspeed_ext.zero.blocks import MARK

Kind = type[nn.Module] | str
_log = logging.getLogger("deepspeed_ext")


def leaf_modules_of(model: nn.Module, config: Config) -> list[nn.Module]:
    """Return the modules that a config wants to be gathered as a whole in stage 3; mark none.

    The log names what the config says and the model has not, but for classes by default.
    """
    block, place = config.zero_optimization.leaf_module, "zero_optimization.leaf_module"
    if config.zero_optimization.stage != 3:
        return []
    named = list(model.named_modules())
    wanted = {
        "classes": {kind: {n for n, m in named if _is_any(m, [kind])} for kind in block.classes},
        "names": {name: {n for n, _ in named if n == name} for name in block.names},
        "name_suffixes": _ending(model, block.name_suffixes),
    }
    for key, found in wanted.items():
        missing = [text for text, names in found.items() if not names]
        if missing and config.is_set(f"{place}.{key}"):
            _log.warning("initialize: %s.%s has %s, of no module in model", place, key, missing)
    of_any = set().union(*(names for found in wanted.values() for names in found.values()))
    return [module for name, module in named if name in of_any]


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


def set_z3_leaf_modules_by_name(
    model: nn.Module,
    module_names: Iterable[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by their names in the model, before initialize, or take the marks off.

    Args:
        model: whose modules they are.
        module_names: as named_modules has them.
        flag: False takes marks off.
        raise_if_not_found: False: some may not be there.

    Returns:
        The modules, and the names that no module has.

    Raises:
        ValueError: a name is of no module. Nothing is marked then.
    """
    names = {name for name, _ in model.named_modules()}
    wanted = {name: {name} & names for name in module_names}
    return _mark_named("module_names", model, wanted, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module,
    module_name_suffixes: Iterable[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """The same for all modules whose names end with one of these texts."""
    wanted = _ending(model, module_name_suffixes)
    return _mark_named("module_name_suffixes", model, wanted, flag, raise_if_not_found)


def _ending(model: nn.Module, suffixes: Iterable[str]) -> dict[str, set[str]]:
    names = [name for name, _ in model.named_modules()]
    return {end: {n for n in names if n.endswith(end)} for end in suffixes}


def _mark_named(
    argument: str, model: nn.Module, wanted: Mapping[str, Set[str]], flag: bool, must_be: bool
) -> tuple[list[nn.Module], list[str]]:
    missing = [text for text, names in wanted.items() if not names]
    if missing and must_be:
        raise ValueError(
            f"z3_leaf_modules: {argument} has {missing}, expected those of modules in model"
        )
    of_any = set().union(*wanted.values())
    found = [module for name, module in model.named_modules() if name in of_any]
    for module in found:
        set_z3_leaf_module(module, flag)
    return found, missing


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

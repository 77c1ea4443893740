"""Which modules of a model are sharded, gathered and reduced as one: its blocks."""

import fnmatch
from collections import Counter
from collections.abc import Iterable

from torch import nn

Block = str | type[nn.Module]
MARK = "_z3_leaf"  # DeepSpeed's, of modules that are one block with all that is in them


def blocks_of(
    model: nn.Module, blocks: Iterable[Block] | None, op: str = "zero.shard"
) -> dict[str, nn.Module]:
    """Return the blocks of a model by name, in the order of its modules; the model is none.

    Args:
        model: whose modules they are.
        blocks: names of modules, in which * stands for anything, or their classes; of modules in
            each other that one name fits, the outer ones. None: the modules of one class that are
            listed one after another in a ModuleList, Sequential or ModuleDict, such as the layers
            of a transformer, and those that have the mark of
            `compat.utils.set_z3_leaf_modules`.
        op: that errors begin with.

    Raises:
        ValueError: a name or a class is that of no module, or of one that is never called.
        TypeError: blocks is one string, or has something else in it.
    """
    modules = {name: module for name, module in model.named_modules() if module is not model}
    if blocks is None:
        repeated = _repeated(model, "")
        return {name: module for name, module in modules.items() if name in repeated}
    if isinstance(blocks, str | type) or not isinstance(blocks, Iterable):
        what = "the string " if isinstance(blocks, str) else ""
        raise TypeError(f"{op}: blocks is {what}{blocks!r}, expected several in a list")
    found: set[str] = set()
    for block in blocks:
        found |= _named(block, modules, op)
    return {name: module for name, module in modules.items() if name in found}


def _named(block: Block, modules: dict[str, nn.Module], op: str) -> set[str]:
    if isinstance(block, str):
        names = _outermost(fnmatch.filter(modules, block), modules)
    elif isinstance(block, type) and issubclass(block, nn.Module):
        names = {name for name, module in modules.items() if isinstance(module, block)}
    else:
        raise TypeError(f"{op}: blocks has {block!r}, expected names or classes of modules in it")
    if not names:
        raise ValueError(
            f"{op}: blocks has {block!r}, expected a name or class of modules of the model,"
            f" such as {next(iter(modules), 'none, as there are none')}"
        )
    for name in sorted(names):
        if not _is_called(modules[name]):
            raise ValueError(
                f"{op}: blocks has {name!r}, a list that is never called, expected its"
                f" members, such as '{name}.*'"
            )
    return names


def _outermost(names: list[str], modules: dict[str, nn.Module]) -> set[str]:
    """Return those that are in none of the others: * stands for dots, too."""
    called = tuple(f"{name}." for name in names if _is_called(modules[name]))
    return {name for name in names if not name.startswith(called)}


def _repeated(module: nn.Module, prefix: str) -> set[str]:
    """Return names of members of lists, as far up as there are lists of alike members."""
    children = {f"{prefix}{name}": child for name, child in module.named_children()}
    found: set[str] = set()
    if isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
        fitting = {n: c for n, c in children.items() if _is_called(c) and _has_parameters(c)}
        often = Counter(type(child) for child in fitting.values())
        found = {name for name, child in fitting.items() if often[type(child)] > 1}
    marked = {n: c for n, c in children.items() if getattr(c, MARK, False) and _is_called(c)}
    found |= {name for name, child in marked.items() if _has_parameters(child)}
    for name, child in children.items():
        if name not in found:
            found |= _repeated(child, f"{name}.")
    return found


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _is_called(module: nn.Module) -> bool:
    """Tell whether a module has a forward; lists of modules have none."""
    forward: object = type(module).forward
    return forward is not nn.Module.forward

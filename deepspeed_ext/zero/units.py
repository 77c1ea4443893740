"""Units: parts of a model that are filled one after another, in the order of its modules."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from deepspeed_ext.torch_internals.modules import buffers_of, parameters_of
from deepspeed_ext.zero.blocks import blocks_of
from deepspeed_ext.zero.names import plain_name


@dataclass(frozen=True)
class Unit:
    """Modules that are drawn together.

    Args:
        modules: those inside of others first.
        tensors: all parameters and buffers that are the modules' own, by module and name in it,
            each with its name in the model.
        wanted: names in the model of those to fill.
    """

    modules: list[nn.Module]
    tensors: dict[tuple[nn.Module, str], str]
    wanted: set[str]


def units_of(model: nn.Module, wanted: set[str]) -> list[Unit]:
    """Cut a model into its blocks, and what lies before, between and after them."""
    sharding = getattr(model, "_deepspeed_ext_sharding", None)
    names = blocks_of(model, None) if sharding is None else sharding.blocks
    apart = {module for name, module in model.named_modules() if name in set(names)}
    return [_unit(modules, wanted) for modules in _cut(model, "", apart, set())]


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Return all parameters and buffers by plain names, tied ones under each of theirs."""
    for name, param in model.named_parameters(remove_duplicate=False):
        yield plain_name(name), param
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield plain_name(name), buffer


Named = list[tuple[str, nn.Module]]


def _cut(
    module: nn.Module, name: str, apart: set[nn.Module], seen: set[nn.Module]
) -> Iterator[Named]:
    """Yield modules of units, each module once, in the order of nn.Module.apply."""
    if module in seen:
        return
    if not any(inner in apart for inner in module.modules() if inner is not module):
        yield list(_in_order(module, name, seen))
        return
    for key, child in module.named_children():
        yield from _cut(child, f"{name}{key}.", apart, seen)
    seen.add(module)
    yield [(name, module)]


def _in_order(
    module: nn.Module, name: str, seen: set[nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    if module in seen:
        return
    seen.add(module)
    for key, child in module.named_children():
        yield from _in_order(child, f"{name}{key}.", seen)
    yield name, module


def _unit(modules: Named, wanted: set[str]) -> Unit:
    tensors = {}
    for prefix, module in modules:
        own = {**parameters_of(module), **buffers_of(module)}
        tensors.update(
            {(module, n): plain_name(prefix + n) for n, t in own.items() if t is not None}
        )
    return Unit([module for _, module in modules], tensors, wanted & set(tensors.values()))

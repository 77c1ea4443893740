"""Which linear layers of a model another kind of layer can stand for, and why not the others."""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from deepspeed_ext.quantization.linear import is_conv1d
from deepspeed_ext.torch_internals.modules import HOOKS, buffers_of, parameters_of
from deepspeed_ext.torch_internals.tensors import (
    has_gradient_hooks,
    is_traceable_wrapper_subclass,
    storage_id,
)

# The last layer of a language model, whose errors reach the result as they are.
DEFAULT_SKIP = ("lm_head", "embed_out")
_HAS_NO_MODULES = frozenset((bool, int, float, str, type(None)))
_HAS_NO_PARTS = _HAS_NO_MODULES | {dict, OrderedDict, set}
_OF_MODULES = frozenset(vars(nn.Module()))  # names of what each has


@dataclass(frozen=True)
class Candidates:
    """The linear layers of a model.

    Args:
        names: a list for each layer that can be replaced: the names that it has, one or more.
        kept: names of the others, with the reason.
        nbytes: of all parameters and buffers of the model, but for sparse ones; memory that some
            share counts once.
    """

    names: list[list[str]]
    kept: dict[str, str]
    nbytes: int


class _Use(NamedTuple):
    """Where a tensor is used, and which bytes of its storage it is."""

    owner: int
    prefix: str
    name: str
    begin: int
    end: int


def find_candidates(what: str, model: nn.Module, skip: Iterable[str]) -> Candidates:
    """Return which layers can be replaced.

    Args:
        what: begins the text of an error.
        model: what has the layers.
        skip: patterns of names of layers, or of modules that hold them, which are to be kept; `*`
            stands for anything. One without a dot is compared with the last part of a name too.

    Raises:
        TypeError: `model` is a layer itself, or `skip` is a string.
        ValueError: a pattern matches nothing, and is none of the default.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{what}: model is a {type(model).__name__}, expected an nn.Module")
    if isinstance(skip, str):
        raise TypeError(f"{what}: skip is the string {skip!r}, expected several in a list")
    if isinstance(model, nn.Linear) or is_conv1d(model):
        raise TypeError(
            f"{what}: model is a {type(model).__name__}, expected a module that has some; for one"
            " layer there is QuantizedLinear.from_linear"
        )
    patterns, modules = tuple(skip), dict(model.named_modules(remove_duplicate=False))
    for pattern in patterns:
        if pattern not in DEFAULT_SKIP and not any(_matches(name, pattern) for name in modules):
            raise ValueError(f"{what}: skip has {pattern!r}, expected names in the model")
    by_layer: defaultdict[nn.Module, list[str]] = defaultdict(list)
    for name, module in modules.items():
        if isinstance(module, nn.Linear) or is_conv1d(module):
            by_layer[module].append(name)
    held = held_elsewhere(modules, by_layer)
    storages: dict[int, int] = {}
    uses = _uses(modules, storages)
    found = Candidates([], {}, sum(storages.values()))
    for module, names in by_layer.items():
        reason = _why_not(module, names, patterns, uses)
        if reason is None and module in held:
            reason = f"is in the attribute {held[module]!r} too"
        if reason is None:
            found.names.append(names)
        else:
            found.kept.update(dict.fromkeys(names, reason))
    return found


def _why_not(
    module: nn.Module,
    names: list[str],
    patterns: tuple[str, ...],
    uses: dict[int, list[_Use]],
) -> str | None:
    for pattern in patterns:
        for name in names:
            if _is_below(name, pattern):
                return f"skip has {pattern!r}"
    if type(module) is not nn.Linear and not is_conv1d(module):
        return f"is a {type(module).__name__}"
    lost = lost_with(module)
    if lost is not None:
        return lost
    weight = parameters_of(module)["weight"]
    assert weight is not None
    for other in _sharing(module, weight, uses):
        return f"shares its weight with {other}"
    return None


def held_elsewhere(
    modules: Mapping[str, nn.Module], layers: Collection[nn.Module]
) -> dict[nn.Module, str]:
    """Return where layers are beside their places: nothing replaces them there.

    Args:
        modules: of a model, by name.
        layers: some of them.
    """
    found = {}
    for prefix, module in modules.items():
        for name, value in vars(module).items():
            if type(value) in _HAS_NO_MODULES or name in _OF_MODULES:
                continue
            for part in _modules_in(value, set()):
                if part in layers:
                    found[part] = f"{prefix}.{name}".lstrip(".")
    return found


def _modules_in(value: object, seen: set[int]) -> Iterator[nn.Module]:
    """Yield the modules of an attribute: in lists and the like, partial functions and methods."""
    if isinstance(value, nn.Module):
        yield value
        return
    parts: Iterable[object] = ()
    if isinstance(value, MethodType):
        parts = (value.__self__,)
    elif isinstance(value, partial):
        parts = (value.func, value.args, value.keywords)
    elif isinstance(value, Mapping):
        parts = (*value.keys(), *value.values())
    elif isinstance(value, list | tuple | set | frozenset | deque):
        parts = tuple(value)
    if parts and id(value) not in seen:
        seen.add(id(value))
        for part in parts:
            if type(part) not in _HAS_NO_MODULES:
                yield from _modules_in(part, seen)


def lost_with(layer: nn.Module, own: Collection[str] = ("weight", "bias")) -> str | None:
    """Say what would be gone if a new layer took the place of a linear one; None: nothing.

    Args:
        own: tensors of the layer that the new one has, or stands for.
    """
    state = vars(layer)
    if "forward" in state:
        return "has a forward of its own"
    for hooks in HOOKS:
        if state[hooks]:
            return "has hooks"
    weight = parameters_of(layer).get("weight")
    if "weight" in own and weight is None:
        return "has a weight that is no parameter"
    if "bias" not in parameters_of(layer):
        return "has a bias that is no parameter"
    if weight is not None and has_gradient_hooks(weight):
        return "has hooks on its weight"
    for kind in ("module", "parameter", "buffer"):
        for name, part in state[f"_{kind}s"].items():
            if part is not None and name not in own:
                return f"has the {kind} {name!r}"
    for name, value in state.items():
        if type(value) in _HAS_NO_PARTS:  # most, and asking what else they are takes long
            continue
        parts = value if isinstance(value, list | tuple) else (value,)
        for part in parts:
            if isinstance(part, Tensor | nn.Module):
                return f"has the attribute {name!r}"
    return None


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or (
        "." not in pattern and fnmatchcase(name.rpartition(".")[2], pattern)
    )


def _is_below(name: str, pattern: str) -> bool:
    """Tell whether a pattern matches a name, or that of a module that holds it."""
    if pattern.isidentifier():  # most are
        return pattern in name.split(".")
    parts = name.split(".")
    return any(_matches(".".join(parts[: i + 1]), pattern) for i in range(len(parts)))


def _uses(modules: dict[str, nn.Module], storages: dict[int, int]) -> dict[int, list[_Use]]:
    """Return by storage all tensors that modules have in it; note what storages take."""
    found: defaultdict[int, list[_Use]] = defaultdict(list)
    for prefix, module in modules.items():
        for name, tensor in own_tensors(module):
            begin, end = _bytes_of(tensor)
            storage = tensor.untyped_storage()
            storages[storage_id(storage)] = storage.nbytes()
            if begin < end:
                found[storage_id(storage)].append(_Use(id(module), prefix, name, begin, end))
    return found


def own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of what a module itself has in storages."""
    for name, tensor in (*parameters_of(module).items(), *buffers_of(module).items()):
        if tensor is not None and has_storage(tensor):
            yield name, tensor


def has_storage(tensor: Tensor) -> bool:
    """Tell whether the elements of a tensor lie in a storage of its own, not in other tensors."""
    if tensor.layout is not torch.strided:
        return False
    if type(tensor) in (Tensor, nn.Parameter):
        return True
    return not is_lazy(tensor) and not is_traceable_wrapper_subclass(tensor)


def _sharing(module: nn.Module, weight: Tensor, uses: dict[int, list[_Use]]) -> Iterator[str]:
    """Yield the names of what other modules have in the memory of a weight."""
    if not has_storage(weight):
        return
    in_storage = uses.get(storage_id(weight.untyped_storage()), ())
    if len(in_storage) < 2:
        return
    begin, end = _bytes_of(weight)
    for use in in_storage:
        if use.owner != id(module) and use.begin < end and begin < use.end:
            yield f"{use.prefix}.{use.name}".lstrip(".")


def _bytes_of(tensor: Tensor) -> tuple[Any, Any]:
    """Return where in its storage a tensor begins and ends."""
    if tensor.numel() == 0:
        return 0, 0
    if tensor.is_contiguous():
        begin = tensor.storage_offset() * tensor.element_size()
        return begin, begin + tensor.nbytes
    dimensions = zip(tensor.shape, tensor.stride(), strict=True)
    reach = 1 + sum((size - 1) * stride for size, stride in dimensions)
    begin = tensor.storage_offset() * tensor.element_size()
    return begin, begin + reach * tensor.element_size()

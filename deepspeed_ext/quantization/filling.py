"""Puts what files hold into a model: quantized layers, and all else as it is."""

from collections.abc import Collection, Iterator, Mapping
from typing import NoReturn

import torch
from torch import Tensor, nn

from deepspeed_ext.dtypes import DTYPES
from deepspeed_ext.quantization.candidates import held_elsewhere, lost_with
from deepspeed_ext.quantization.convert import put_in_place
from deepspeed_ext.quantization.layout import WeightLayout, read_note
from deepspeed_ext.quantization.linear import NOTE, QuantizedLinear, is_conv1d, weight_of
from deepspeed_ext.torch_internals.modules import buffers_of, non_persistent_of, parameters_of


def notes_in(what: str, notes: Mapping[str, Tensor]) -> dict[str, tuple[WeightLayout, torch.dtype]]:
    """Return layout and dtype for each layer that has a note.

    Args:
        what: begins the text of an error: what reads, and which file.
        notes: by their names in a state dict.

    Raises:
        ValueError: a note is none.
    """
    found = {}
    for key, note in notes.items():
        try:
            found[key.removesuffix(f".{NOTE}")] = read_note(note)
        except ValueError as error:
            raise ValueError(f"{what}: {key} {error}") from None
    return found


def fill(
    what: str,
    model: nn.Module,
    layers: Mapping[str, tuple[WeightLayout, torch.dtype]],
    state: Mapping[str, Tensor],
) -> None:
    """Replace layers of a model, and give it all tensors of a state dict.

    Args:
        what: begins the text of an error: what reads, and which file.
        model: its tensors are replaced, so they may be on meta.
        layers: what to put for each name of a layer.
        state: all tensors, of these layers by the names that they have in `QuantizedLinear`. What
            the model ties to another name may lack. Buffers that are in no state dict are for a
            model that has none.

    Raises:
        TypeError: a weight of the model is no plain tensor of float32, bfloat16 or float16, or a
            bias no plain tensor.
        ValueError: they do not fit the model, or lack what it has no values for. It is as it was
            then, as with a TypeError.
    """
    made = _layers_for(what, model, layers, state)
    buffers = other_buffers(model)
    tied = {name: tensor for name, tensor in state.items() if name not in buffers}
    tied.update(_ties_of(what, model, layers, tied))
    _check(what, model, made, tied)
    on_meta = {name: b for name, b in buffers.items() if b.is_meta and name in state}
    for name, buffer in on_meta.items():
        _check_one(what, name, buffer, state)
    _check_meta(what, model, made, tied.keys() | on_meta.keys())
    # From here on nothing is refused.
    for name, layer in made.items():
        put_in_place(model.get_submodule, [name], layer)
    # Names of one tensor get one parameter: an optimizer would step two of them twice.
    parameters: dict[int, nn.Parameter] = {}
    of_model = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, tensor in tied.items():
        if name in of_model:
            made_of = nn.Parameter(tensor, requires_grad=False)
            tied[name] = parameters.setdefault(id(tensor), made_of)
    model.load_state_dict(tied, assign=True)
    for name in on_meta:
        holder, _, last = name.rpartition(".")
        buffers_of(model.get_submodule(holder))[last] = state[name]


def other_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a state dict has not."""
    return {
        f"{prefix}.{name}".lstrip("."): tensor
        for prefix, module in model.named_modules()
        for name, tensor in buffers_of(module).items()
        if tensor is not None and name in non_persistent_of(module)
    }


def _layers_for(
    what: str,
    model: nn.Module,
    layers: Mapping[str, tuple[WeightLayout, torch.dtype]],
    state: Mapping[str, Tensor],
) -> dict[str, QuantizedLinear]:
    """Return what is to be at places of the model; one that has several names stays one."""
    made: dict[nn.Module, QuantizedLinear] = {}
    found, firsts = {}, dict[nn.Module, str]()
    for name, (layout, dtype) in layers.items():
        layer = _layer_for(what, model, name, layout, dtype)
        there = model.get_submodule(name)
        found[name] = made.setdefault(there, layer)
        first = firsts.setdefault(there, name)
        _check_same(what, f"{name}.{NOTE}", f"{first}.{NOTE}", layers[name] == layers[first])
        for key in layout.tensors():
            _check_tied(what, f"{name}.{key}", f"{first}.{key}", state)
    held = held_elsewhere(dict(model.named_modules(remove_duplicate=False)), firsts)
    for there, attribute in held.items():
        raise ValueError(
            f"{what}: {firsts[there]} of the model is in the attribute {attribute!r} too, expected"
            " it at its places only, as nothing else can be replaced"
        )
    return found


def _layer_for(
    what: str, model: nn.Module, name: str, layout: WeightLayout, dtype: torch.dtype
) -> QuantizedLinear:
    """Return what is to be at a place of the model, without values."""

    def refuse(got: str) -> NoReturn:
        shape = list(layout.shape)
        called = name or repr(name)
        raise ValueError(f"{what}: {called} {got}, expected a linear layer with weight {shape}")

    try:
        there = model.get_submodule(name)
    except AttributeError:
        refuse("is not in the model")
    if there is model:
        refuse("is the model itself")
    if isinstance(there, QuantizedLinear):
        shape = there.layout.shape
        own = (*there.layout.tensors(), "bias")
    elif type(there) is nn.Linear or is_conv1d(there):
        own = ("weight", "bias")
        weight = weight_of(f"{what}: {name}", there)
        shape = weight.shape[0], weight.shape[1]
    else:
        refuse(f"of the model is a {type(there).__name__}")
    if shape != layout.shape:
        refuse(f"of the model has weight {list(shape)}")
    lost = lost_with(there, own)
    if lost is not None:
        raise ValueError(
            f"{what}: {name} of the model {lost}, expected a plain layer, as that would be lost"
        )
    bias = parameters_of(there)["bias"]
    layer = QuantizedLinear.of_tensors(layout, layout.tensors_on("meta"), bias, dtype)
    return layer.train(there.training)


def _ties_of(
    what: str, model: nn.Module, layers: Mapping[str, object], state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return for names of one tensor of the model one tensor, if the state has any for them."""
    by_tensor: dict[int, list[str]] = {}
    others = other_buffers(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not name.endswith(".weight") or not _is_of(name, layers):
            by_tensor.setdefault(id(parameter), []).append(name)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name not in others and not _is_of(name, layers):
            by_tensor.setdefault(id(buffer), []).append(name)
    found = {}
    for names in by_tensor.values():
        here = [name for name in names if name in state]
        for name in here[1:]:
            _check_tied(what, name, here[0], state)
        if here:
            found.update(dict.fromkeys(names, state[here[0]]))
    return found


def _check_tied(what: str, name: str, first: str, state: Mapping[str, Tensor]) -> None:
    """Refuse other values for a second name of a tensor."""
    if name in state and first in state and state[name] is not state[first]:
        same = state[name].dtype == state[first].dtype and torch.equal(state[name], state[first])
        _check_same(what, name, first, same)


def _check_same(what: str, name: str, first: str, is_same: bool) -> None:
    if not is_same:
        raise ValueError(
            f"{what} has other values for {name!r} than for {first!r}, expected the same, as the"
            " model ties them"
        )


def _check(
    what: str, model: nn.Module, made: Mapping[str, QuantizedLinear], state: Mapping[str, Tensor]
) -> None:
    """Refuse names that lack or are too many, and other shapes."""
    expected = {name: t for name, t in model.state_dict().items() if not _is_of(name, made)}
    for name, layer in made.items():
        expected.update({f"{name}.{key}": value for key, value in layer.state_dict().items()})
    for name in _first(expected.keys() - state.keys()):
        raise ValueError(f"{what} has no {name!r}, which the model has")
    for name in _first(state.keys() - expected.keys()):
        raise ValueError(f"{what} has {name!r}, expected names that the model has")
    for name, layer in made.items():
        problem = layer.layout.misfit(
            {key: state[f"{name}.{key}"] for key in layer.layout.tensors()}
        )
        if problem is not None:
            raise ValueError(f"{what} has a layer {name!r} of which {problem}")
    for name, want in expected.items():
        if isinstance(want, Tensor) and not name.endswith(NOTE):
            _check_one(what, name, want, state)


def _check_one(what: str, name: str, want: Tensor, state: Mapping[str, Tensor]) -> None:
    """Refuse another shape, and a dtype that nothing of the model could compute with."""
    got = state[name]
    if want.shape != got.shape:
        raise ValueError(
            f"{what} has {name!r} of shape {list(got.shape)}, expected {list(want.shape)}"
        )
    if got.dtype != want.dtype and not (got.dtype in DTYPES and want.dtype in DTYPES):
        expected = "float32, bfloat16 or float16" if want.dtype in DTYPES else str(want.dtype)
        raise ValueError(f"{what} has {name!r} as {got.dtype}, expected {expected}")


def _check_meta(
    what: str, model: nn.Module, made: Mapping[str, QuantizedLinear], given: Collection[str]
) -> None:
    """Refuse to leave what is on meta there."""
    tensors = dict[str, Tensor](model.named_parameters()) | dict(model.named_buffers())
    for name, tensor in (tensors | other_buffers(model)).items():
        if tensor.is_meta and name not in given and not _is_of(name, made):
            raise ValueError(
                f"{what} has no {name!r}, which is on meta in the model, expected values; give it"
                " some after the model is made, or make the model on the CPU"
            )


def _is_of(name: str, made: Mapping[str, object]) -> bool:
    return name.rpartition(".")[0] in made


def _first(names: set[str]) -> Iterator[str]:
    yield from sorted(names)[:1]

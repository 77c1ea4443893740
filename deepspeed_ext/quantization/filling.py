"""Puts what files hold into a model: layers of few bits, and all else as it is."""

from collections.abc import Iterator, Mapping
from typing import NoReturn

import torch
from torch import Tensor, nn

from deepspeed_ext.quantization.convert import put_in_place
from deepspeed_ext.quantization.layout import WeightLayout, read_note
from deepspeed_ext.quantization.linear import NOTE, QuantizedLinear, is_conv1d, weight_of


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
        ValueError: they do not fit the model, which is as it was then; or they lack what it has no
            values for.
    """
    made = _layers_for(what, model, layers)
    buffers = other_buffers(model)
    tied = {name: tensor for name, tensor in state.items() if name not in buffers}
    tied.update(_ties_of(what, model, layers, tied))
    _check(what, model, made, tied)
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
    for name, buffer in buffers.items():
        if buffer.is_meta and name in state and state[name].shape == buffer.shape:
            holder, _, last = name.rpartition(".")
            model.get_submodule(holder)._buffers[last] = state[name]
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise ValueError(
                f"{what} has no {name!r}, which is on meta in the model, expected values; give it"
                " some after the model is made, or make the model on the CPU"
            )


def other_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a state dict has not."""
    return {
        f"{prefix}.{name}".lstrip("."): tensor
        for prefix, module in model.named_modules()
        for name, tensor in module._buffers.items()
        if tensor is not None and name in module._non_persistent_buffers_set
    }


def _layers_for(
    what: str, model: nn.Module, layers: Mapping[str, tuple[WeightLayout, torch.dtype]]
) -> dict[str, QuantizedLinear]:
    """Return what is to be at places of the model; one that has several names stays one."""
    made: dict[nn.Module, QuantizedLinear] = {}
    found = {}
    for name, (layout, dtype) in layers.items():
        layer = _layer_for(what, model, name, layout, dtype)
        found[name] = made.setdefault(model.get_submodule(name), layer)
    return found


def _layer_for(
    what: str, model: nn.Module, name: str, layout: WeightLayout, dtype: torch.dtype
) -> QuantizedLinear:
    """Return what is to be at a place of the model, without values."""

    def refuse(got: str) -> NoReturn:
        shape = list(layout.shape)
        raise ValueError(f"{what}: {name} {got}, expected a linear layer with weight {shape}")

    try:
        there = model.get_submodule(name)
    except AttributeError:
        refuse("is not in the model")
    if isinstance(there, QuantizedLinear):
        shape = there.layout.shape
    elif type(there) is nn.Linear or is_conv1d(there):
        weight = weight_of(f"{what}: {name}", there)
        shape = weight.shape[0], weight.shape[1]
    else:
        refuse(f"of the model is a {type(there).__name__}")
    if shape != layout.shape:
        refuse(f"of the model has weight {list(shape)}")
    bias = there.bias
    assert bias is None or isinstance(bias, nn.Parameter)
    layer = QuantizedLinear.of_tensors(layout, layout.tensors_on("meta"), bias, dtype)
    return layer.train(there.training)


def _ties_of(
    what: str, model: nn.Module, layers: Mapping[str, object], state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return for names of one parameter of the model one tensor, if the state has any for them."""
    by_parameter: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not name.endswith(".weight") or name.removesuffix(".weight") not in layers:
            by_parameter.setdefault(id(parameter), []).append(name)
    found = {}
    for names in by_parameter.values():
        here = [name for name in names if name in state]
        for name in here[1:]:
            if state[name] is not state[here[0]] and not torch.equal(state[name], state[here[0]]):
                raise ValueError(
                    f"{what} has other values for {name!r} than for {here[0]!r}, expected the"
                    " same, as the model ties them"
                )
        if here:
            found.update(dict.fromkeys(names, state[here[0]]))
    return found


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
        if isinstance(want, Tensor) and want.shape != state[name].shape and not name.endswith(NOTE):
            raise ValueError(
                f"{what} has {name!r} of shape {list(state[name].shape)}, expected"
                f" {list(want.shape)}"
            )


def _is_of(name: str, made: Mapping[str, QuantizedLinear]) -> bool:
    return name.rpartition(".")[0] in made


def _first(names: set[str]) -> Iterator[str]:
    yield from sorted(names)[:1]

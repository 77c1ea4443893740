"""What a commit holds: weights, state and options of one step, as plain values and places."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from deepspeed_ext.dtensors import is_dtensor, local, spread
from deepspeed_ext.offload.tiers.disk_state import DiskState, Part, Shape, Shown
from deepspeed_ext.offload.tiers.records import Records
from deepspeed_ext.offload.tiers.stream import StreamInfo, StreamWriter, shown_stream, tensor_at
from deepspeed_ext.optim.buckets import STEP, Bucket, views_of
from deepspeed_ext.optim.formats import SCALE

Contents = dict[str, Any]  # of numbers, text, dtypes and tensors, which torch loads from anybody


def describe(
    stream: StreamWriter,
    groups: Sequence[Mapping[str, Any]],
    model: nn.Module | None,
    buckets: Iterable[tuple[Bucket, list[int]]],
    others: Mapping[int, dict[str, Any]],
) -> Contents:
    """Write weights, and state that rests in memory, to a stream, and return where all is.

    Args:
        stream: takes them.
        groups: of the optimizer.
        model: its state dict is written too.
        buckets: each with the numbers of its parameters.
        others: state that users keep under keys of their own, by number of the parameter.
    """
    params = _params(groups)
    weights = [(stream.append(local(param)), _sharding(param)) for param in params]
    named, objects = {}, {}
    for name, value in _beside(model, params).items():
        if isinstance(value, Tensor):
            named[name] = (stream.append(local(value)), _sharding(value))
        else:
            objects[name] = value
    contents = {
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in groups],
        "sizes": [len(group["params"]) for group in groups],
        "weights": weights,
        "names": _names(model, params),
        "model": named,
        "model_objects": objects,
        "buckets": [_described(stream, bucket, numbers) for bucket, numbers in buckets],
        "others": dict(others),
    }
    return {**contents, "stream": tuple(stream.end())}


def bytes_beside(model: nn.Module | None, params: Sequence[Tensor]) -> int:
    """Return the bytes of a model's state dict beside those of some parameters."""
    return sum(local(value).nbytes for value in _tensors(_beside(model, params)).values())


def names_in(contents: Contents) -> list[str]:
    """Return the names of all records that a commit needs."""
    names = list(StreamInfo(*contents["stream"]).names)
    for saved in contents["buckets"]:
        names += [name for name in saved.get("names", ()) if name is not None]
    return names


def check_fits(
    title: str, contents: Contents, groups: Sequence[Mapping[str, Any]], model: nn.Module | None
) -> None:
    """Raise ValueError that says in what an optimizer differs from the one that was committed."""
    params = _params(groups)
    beside = _beside(model, params)
    got: list[tuple[str, Any, Any]] = [
        ("parameters in groups", [len(group["params"]) for group in groups], contents["sizes"]),
        ("other tensors of model", sorted(_tensors(beside)), sorted(contents["model"])),
    ]
    for i, both in enumerate(zip(_names(model, params), contents["names"], strict=False)):
        if all(both):  # with a model both times
            got.append((f"name of parameter {i}", *both))
    for i, (param, saved) in enumerate(zip(params, contents["weights"], strict=False)):
        got.append((f"parameter {i}", _look(param), _look_of(*saved)))
    for name, value in _tensors(beside).items():
        if name in contents["model"]:
            got.append((name, _look(value), _look_of(*contents["model"][name])))
    for what, now, committed in got:
        if now != committed:
            raise ValueError(
                f"{title}: {what} is {now}, expected {committed} as the commit in nvme_path has it"
            )


def restore_weights(
    records: Records,
    contents: Contents,
    groups: Sequence[Mapping[str, Any]],
    model: nn.Module | None,
) -> None:
    """Give parameters, and the rest of the model, the values that were committed."""
    params = _params(groups)
    beside = _beside(model, params)
    _, memory = shown_stream(records, StreamInfo(*contents["stream"]))
    places = [*contents["weights"], *contents["model"].values()]
    tensors = [*params, *(beside[name] for name in contents["model"])]
    for tensor, (place, _) in zip(tensors, places, strict=True):
        local(tensor).detach().copy_(tensor_at(memory, place))
    if contents["model_objects"] and model is not None:
        model.load_state_dict(contents["model_objects"], strict=False)


def committed_state(
    records: Records, contents: Contents, copies: Sequence[Tensor]
) -> dict[str, Any]:
    """Return a state dict whose tensors are what was committed, where it lies on the disk.

    Args:
        records: has it.
        contents: of the commit.
        copies: of the parameters, whose layout the tensors have.
    """
    _, memory = shown_stream(records, StreamInfo(*contents["stream"]))
    state: dict[int, dict[str, Any]] = {i: dict(v) for i, v in contents["others"].items()}
    for saved in contents["buckets"]:
        flats = _flats(records, saved, memory)
        scales = {key: flats.pop(key + SCALE) for key in saved["scales"]}
        rows = zip(saved["params"], saved["offsets"], saved["counts"], strict=True)
        for i, (number, offset, count) in enumerate(rows):
            copy = copies[number]
            part = local(copy)
            views = views_of(flats, scales, i, offset, part.shape, part.stride())
            entry = state.setdefault(number, {})
            for key, view in views.items():
                is_spread = key in flats and is_dtensor(copy)
                entry[key] = spread(view, copy) if is_spread else view
            entry[STEP] = count
    groups, begin = [], 0
    for options, size in zip(contents["groups"], contents["sizes"], strict=True):
        groups.append({**options, "params": list(range(begin, begin + size))})
        begin += size
    return {"state": state, "param_groups": groups}


def _params(groups: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    return [param for group in groups for param in group["params"]]


def _beside(model: nn.Module | None, params: Sequence[Tensor]) -> dict[str, Any]:
    """Return what the state dict of a model has beside some of its parameters."""
    if model is None:
        return {}
    known = set(map(id, params))
    return {k: v for k, v in _state_dict(model).items() if id(v) not in known}


def _names(model: nn.Module | None, params: Sequence[Tensor]) -> list[str]:
    """Return the names that parameters have in a model, "" of those that are not in it."""
    known = {} if model is None else {id(v): k for k, v in _state_dict(model).items()}
    return [known.get(id(param), "") for param in params]


def _state_dict(model: nn.Module) -> dict[str, Any]:
    """Return what a model has, by names that torch.compile changes nothing about."""
    values = model.state_dict(keep_vars=True)
    return {name.replace("_orig_mod.", ""): value for name, value in values.items()}


def _tensors(values: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def _sharding(tensor: Tensor) -> str:
    return str(tensor.placements) if is_dtensor(tensor) else ""


def _look(tensor: Tensor) -> tuple[Any, ...]:
    part = local(tensor)
    return part.dtype, tuple(part.shape), _sharding(tensor)


def _look_of(place: tuple[Any, ...], sharding: str) -> tuple[Any, ...]:
    _, dtype, shape, _ = place
    return dtype, shape, sharding


def _described(stream: StreamWriter, bucket: Bucket, numbers: list[int]) -> Contents:
    saved: Contents = {
        "params": numbers,
        "offsets": bucket.offsets.tolist(),
        "counts": bucket.buffers[STEP][0].tolist(),
        "scales": list(bucket.scales),
    }
    if isinstance(bucket, DiskState):
        parts = {key: tuple(part) for key, part in bucket.shape.parts.items()}
        cut = {"elements": bucket.elements, "shape": (bucket.shape.elements, parts)}
        return {**saved, **cut, "names": bucket.names}
    flats = {key: flat for key, [flat] in bucket.buffers.items() if key != STEP}
    flats |= {key + SCALE: flat for key, flat in bucket.scales.items()}
    return {**saved, "flats": {key: stream.append(flat) for key, flat in flats.items()}}


def _flats(records: Records, saved: Contents, memory: Tensor) -> dict[str, Tensor]:
    """Return flat tensors of state by key, and of scales."""
    if "flats" in saved:
        return {key: tensor_at(memory, place) for key, place in saved["flats"].items()}
    elements, parts = saved["shape"]
    shape = Shape(elements, {key: Part(*part) for key, part in parts.items()})
    shown = Shown(saved["elements"], shape, records)
    for k, name in enumerate(saved["names"]):
        if name is not None:
            shown.show(k, name)
    return dict(shown.flats)

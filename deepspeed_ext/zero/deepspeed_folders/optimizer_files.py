"""What the optimizer files say: flat float32 weights, flat state, and the options of groups."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from deepspeed_ext.zero.deepspeed_folders.pickles import (
    OP,
    DynamicScaler,
    Fields,
    StaticScaler,
    is_same,
)

ACROSS, IN_EACH = "single_partition_of_fp32_groups", "fp32_flat_groups"
_OUTER = "optimizer_state_dict"
_STATE, _STATE_3 = "base_optimizer_state", "optimizer_state_dict"
_STEP, _ADAM = "step", "exp_avg"
_STEP_OF_ALL = "base_optimizer_state_step"
_PARTLY = "ds_zero_partition_groups"  # experts, whose parts are of fewer processes


@dataclass
class Part:
    """What one process has.

    Args:
        fields: of its file.
        weights: a flat tensor for each group (stage 3: sub-group).
        state: likewise, by keys of the state; flat tensors, and what is one number for all.
        numbers: the latter.
    """

    fields: Fields
    weights: list[Tensor]
    state: list[dict[str, Tensor]]
    numbers: list[dict[str, float]]


@dataclass
class OptimizerFiles:
    """What all processes have.

    Args:
        parts: in the order of the processes.
        is_in_each: stage 3: each process has a part of each parameter.
        paddings: for each group: of each parameter, elements that follow it; None: none.
        options: of each group of parameters; none with elastic_checkpoint.
        group_of: the group of each flat tensor.
        scaler: the state of a loss scaler; None: the run had none.
        counts: of processes that share each flat tensor out: all, or fewer for experts.
    """

    parts: list[Part]
    is_in_each: bool
    paddings: list[list[int]] | None
    options: list[dict[str, Any]]
    group_of: list[int]
    scaler: dict[str, float] | None
    counts: list[int]


def processes_of(first: Fields) -> int:
    """Return how many processes wrote a checkpoint, as the file of the first one says.

    Raises:
        ValueError: it does not say so, or some parameters of stage 3 are of fewer processes.
    """
    return max(_counts(first.inside(_OUTER)))


def _counts(inside: Fields) -> list[int]:
    """Return how many processes share out each group, in stage 3 all."""
    found = inside.get("partition_count", int, list)
    counts = found if isinstance(found, list) else [found]
    is_whole = bool(counts) and all(type(n) is int and n > 0 for n in counts)
    if not is_whole or any(max(counts) % n for n in counts):
        raise ValueError(
            f"{OP}: {inside.path} has {found!r:.80} as partition_count, expected numbers of"
            " processes, each a part of the largest"
        )
    if inside.content.get(_PARTLY) is not None:
        raise ValueError(
            f"{OP}: {inside.path} is of stage 3 with experts, expected stages 1 and 2 for those"
        )
    return counts


def optimizer_of(files: list[Fields]) -> OptimizerFiles:
    """Return what the optimizer files of a checkpoint say.

    Raises:
        ValueError: they are not of one run, or break a rule of their format.
    """
    outer = [file.inside(_OUTER) for file in files]
    first = outer[0]
    stage = int(first.get("zero_stage", int, default=1))  # BF16_Optimizer does not say
    if stage not in (1, 2, 3):
        raise ValueError(f"{OP}: {first.path} has stage {stage}, expected 1, 2 or 3")
    is_in_each = stage == 3
    for other in outer[1:]:
        _check_same_run(first, other)
    parts = [_part(file, is_in_each) for file in outer]
    groups = _groups(first, is_in_each)
    for other in outer[1:]:
        if not is_same(_groups(other, is_in_each), groups):
            raise _other_run(other, "other options in param_groups", first)
    count = len(parts[0].weights)
    for part in parts:
        if len(part.weights) != count:
            raise _other_run(part.fields, f"{len(part.weights)} flat tensors", first, f"{count}")
    for part in parts[1:]:
        if part.numbers != parts[0].numbers:
            raise _other_run(part.fields, "other steps", first)
        if [entry.keys() for entry in part.state] != [e.keys() for e in parts[0].state]:
            raise _other_run(part.fields, "other keys of state", first)
    if groups is None:  # elastic_checkpoint
        step = first.get(_STEP_OF_ALL, int, float, default=None)
        groups = [{} if step is None else {_STEP: step} for _ in range(count)]
    group_of = groups_of_flats(first, groups, count) if is_in_each else list(range(count))
    if not is_in_each and len(groups) != count:
        raise ValueError(
            f"{OP}: {first.path} has {len(groups)} groups for {count} flat tensors, expected one"
            " for each"
        )
    options = [{k: v for k, v in group.items() if k != "params"} for group in groups]
    _take_steps(options, group_of, parts)
    paddings = first.get("param_alignment_paddings", list, default=None)
    counts = _counts(first)
    if not is_in_each and len(counts) != count:
        raise ValueError(
            f"{OP}: {first.path} has {len(counts)} groups in partition_count, expected {count}"
        )
    return OptimizerFiles(parts, is_in_each, paddings, options, group_of, scaler_of(first), counts)


def _check_same_run(first: Fields, other: Fields) -> None:
    for key in ("zero_stage", "partition_count", "ds_version", "param_alignment_paddings"):
        mine, theirs = first.content.get(key), other.content.get(key)
        if not is_same(mine, theirs):
            raise _other_run(other, f"{theirs!r:.80} as {key!r}", first, f"{mine!r:.80}")
    mine, theirs = scaler_of(first), scaler_of(other)
    if mine != theirs:
        raise _other_run(other, f"the loss scale {theirs}", first, f"{mine}")


def _other_run(other: Fields, got: str, first: Fields, wanted: str = "the same") -> ValueError:
    return ValueError(
        f"{OP}: {other.path} has {got}, expected {wanted} as {first.path.name} has; it is of"
        " another run"
    )


def _part(file: Fields, is_in_each: bool) -> Part:
    """Return what a process has, where there is all that there must be."""
    weights = file.tensors(IN_EACH if is_in_each else ACROSS)
    entries = _entries(file, is_in_each, len(weights))
    part = Part(file, weights, [], [])
    for i, entry in enumerate(entries):
        state, numbers = {}, {}
        for key, value in entry.items():
            title = f"state[{i}][{key!r}]"
            if isinstance(value, Tensor) and value.dim() > 0 and key != _STEP:
                state[str(key)] = file.flat(value, title)
            elif value is not None:
                numbers[str(key)] = number_of(file, value, title)
        part.state.append(state)
        part.numbers.append(numbers)
    return part


def number_of(file: Fields, value: object, title: str) -> float:
    """Return what one number stands for, in a tensor or not."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = file.tensor(value, title).item()
    if not isinstance(value, int | float):
        raise ValueError(
            f"{OP}: {file.path} has a {type(value).__name__} as {title}, expected a tensor or a"
            " number"
        )
    return float(value)


def _entries(file: Fields, is_in_each: bool, count: int) -> list[Mapping[Any, Any]]:
    """Return the state of each flat tensor, nothing for one that was not stepped."""
    title = _STATE_3 if is_in_each else _STATE
    found = file.get(title, dict, list)
    if isinstance(found, list):  # elastic_checkpoint
        listed = dict(enumerate(found))
    else:
        listed = file.inside(title).inside("state").content
    for i in listed:
        if type(i) is not int or not 0 <= i < count:
            raise ValueError(
                f"{OP}: {file.path} has state for the flat tensor {i!r:.40}, expected {count} of"
                " them"
            )
    return [Fields(file.path, listed.get(i, {}), f"state[{i}]").content for i in range(count)]


def _groups(file: Fields, is_in_each: bool) -> list[dict[str, Any]] | None:
    title = _STATE_3 if is_in_each else _STATE
    if isinstance(file.get(title, dict, list), list):
        return None
    found = file.inside(title).get("param_groups", list)
    return options_of_groups(file, found)


def options_of_groups(file: Fields, groups: list[Any]) -> list[dict[str, Any]]:
    """Return groups with numbers where they have tensors."""
    listed = [Fields(file.path, group, "param_groups").content for group in groups]
    return [
        {k: number_of(file, v, k) if isinstance(v, Tensor) else v for k, v in group.items()}
        for group in listed
    ]


def groups_of_flats(first: Fields, groups: list[dict[str, Any]], count: int) -> list[int]:
    """Return the group of each sub-group, which are the parameters of DeepSpeed's optimizer."""
    listed = [Fields(first.path, g, "param_groups").get("params", list) for g in groups]
    found = [(i, g) for g, inside in enumerate(listed) for i in inside if type(i) is int]
    if sorted(i for i, _ in found) != list(range(count)) or len(found) != sum(map(len, listed)):
        raise ValueError(
            f"{OP}: {first.path} has the flat tensors {listed!r:.80} in its groups, expected 0 to"
            f" {count - 1}, each once"
        )
    return [group for _, group in sorted(found)]


def _take_steps(options: list[dict[str, Any]], group_of: Sequence[int], parts: list[Part]) -> None:
    """Move a step that a group has, as FusedAdam's, to the state of its parameters.

    Raises:
        ValueError: state has none, and cannot be gone on with.
    """
    steps = [group.pop(_STEP, None) for group in options]
    for flat, group in enumerate(group_of):
        if group < len(steps) and isinstance(steps[group], int | float):
            for part in parts:
                if part.state[flat]:
                    part.numbers[flat].setdefault(_STEP, float(steps[group]))
    for part in parts:
        for flat, (state, numbers) in enumerate(zip(part.state, part.numbers, strict=True)):
            if _ADAM in state and _STEP not in numbers:
                raise ValueError(
                    f"{OP}: {part.fields.path} has no step for {_ADAM!r} of flat tensor {flat},"
                    " expected one in its state or its group"
                )


def scaler_of(first: Fields) -> dict[str, float] | None:
    """Return the state of zero.LossScaler that goes on as DeepSpeed's scaler."""
    found = first.content.get("loss_scaler")
    if not isinstance(found, DynamicScaler | StaticScaler):
        return None
    saved = Fields(first.path, found.saved, "loss_scaler")
    scale = float(saved.get("cur_scale", int, float))
    if isinstance(found, StaticScaler):
        return None if scale == 1 else {"scale": scale, "good_steps": 0, "hysteresis_left": 1}
    window = max(1, saved.get("scale_window", int, default=1))
    # DeepSpeed's scale grows after a step if the steps before it, without overflow, are a multiple.
    good = saved.get("cur_iter", int) - saved.get("last_overflow_iter", int) - 1
    left = saved.get("cur_hysteresis", int, default=1)
    return {
        "scale": scale,
        "good_steps": max(0, good - 1) % window,
        "hysteresis_left": max(1, left),
    }

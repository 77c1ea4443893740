"""FlatGroups: parameters and their state, put together from the flat tensors of all processes."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from deepspeed_ext.zero.deepspeed_folders.lazy import Lazy, cut, lazy
from deepspeed_ext.zero.deepspeed_folders.model_file import ModelFile
from deepspeed_ext.zero.deepspeed_folders.optimizer_files import OptimizerFiles, Part
from deepspeed_ext.zero.deepspeed_folders.pickles import OP, Fields
from deepspeed_ext.zero.deepspeed_folders.placing import (
    Place,
    alignment,
    places_across,
    places_in_each,
)

_EXPERT = re.compile(r"(.*\.deepspeed_experts\.)(\d{1,9})(\..*)")


class FlatGroups:
    """Parameters and their state in the flat tensors of all processes.

    Args:
        model: with the shapes, in the order in which parameters lie.
        optimizer: with the tensors.

    Attributes:
        places: of the parameters, by name.

    Raises:
        ValueError: elements are left over or missing.
    """

    def __init__(self, model: ModelFile, optimizer: OptimizerFiles) -> None:
        assert model.groups is not None
        self._parts = optimizer.parts
        self.places: dict[str, Place] = {}
        if optimizer.is_in_each:
            self._place_in_each(model)
        else:
            self._place_across(model, optimizer)

    def keys(self, name: str) -> Sequence[str]:
        """Return the keys of a parameter's state that has a value for each element."""
        return list(self._parts[0].state[self.places[name].flat])

    def numbers(self, name: str) -> dict[str, float]:
        """Return what state has one number for the whole parameter."""
        return self._parts[0].numbers[self.places[name].flat]

    def tensor(self, name: str, key: str | None = None) -> Lazy:
        """Return a weight, or with a key the state of a parameter."""
        place = self.places[name]
        dtype = self._flat(self._parts[0], place.flat, key).dtype
        return lazy(place.shape, dtype, lambda begin, end: cut(self._spans(place, key), begin, end))

    def _spans(self, place: Place, key: str | None) -> Iterator[Tensor]:
        for span in place.spans:
            flat = self._flat(self._parts[span.process], place.flat, key)
            yield flat[span.start : span.start + span.length]

    def _flat(self, part: Part, flat: int, key: str | None) -> Tensor:
        return part.weights[flat] if key is None else part.state[flat][key]

    def _place_across(self, model: ModelFile, optimizer: OptimizerFiles) -> None:
        assert model.groups is not None
        count = len(self._parts[0].weights)
        if len(model.groups) != count:
            raise ValueError(
                f"{OP}: {model.path} has {len(model.groups)} groups in param_shapes, expected"
                f" {count} as {self._parts[0].fields.path.name} has"
            )
        for i, shapes in enumerate(model.groups):
            paddings = self._paddings(optimizer, i, len(shapes))
            needed = sum(map(math.prod, shapes.values())) + sum(paddings)
            self._check_names(i, shapes)
            kinds = len(self._parts) // optimizer.counts[i]  # of processes, with other experts each
            for kind in range(kinds):
                members = self._parts[kind::kinds]
                self._check_end(i, shapes, paddings, members)
                size = self._check_across(i, None, needed, None, members)
                for key in self._parts[0].state[i]:
                    self._check_across(i, key, needed, size, members)
                found = places_across(
                    i, shapes, paddings, size, range(kind, len(self._parts), kinds)
                )
                self.places |= found if kinds == 1 else _of_all_experts(model, found, kind)

    def _check_names(self, group: int, shapes: Mapping[str, torch.Size]) -> None:
        """Refuse files that say themselves that they have other parameters."""
        for part in self._parts:
            listed = part.fields.get("param_slice_mappings", list, default=[])[group : group + 1]
            mappings = [Fields(part.fields.path, item, "param_slice_mappings") for item in listed]
            for name in (name for mapping in mappings for name in mapping.content):
                if name not in shapes:
                    raise ValueError(
                        f"{OP}: {part.fields.path} has {name!r:.80} in group {group}, expected"
                        " parameters that param_shapes of the model file names; it is of another"
                        " run"
                    )

    def _check_end(
        self,
        group: int,
        shapes: Mapping[str, torch.Size],
        paddings: Sequence[int],
        members: Sequence[Part],
    ) -> None:
        """Name the parameter whose end is beyond that of the weights."""
        total, end = sum(part.weights[group].numel() for part in members), 0
        for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
            begin, end = end, end + math.prod(shape)
            if end > total:
                raise ValueError(
                    f"{OP}: {members[-1].fields.path} and the files of other processes have"
                    f" {max(0, total - begin)} elements left for {name!r}, expected"
                    f" {end - begin} for shape {list(shape)} in the model file"
                )
            end += padding

    def _paddings(self, optimizer: OptimizerFiles, group: int, count: int) -> list[int]:
        if optimizer.paddings is None:
            return [0] * count
        listed = optimizer.paddings[group : group + 1]
        found = listed[0] if listed else None
        is_list = isinstance(found, list) and all(type(n) is int and n >= 0 for n in found)
        if found is None or not is_list or len(found) != count:
            raise ValueError(
                f"{OP}: {self._parts[0].fields.path} has {found!r:.80} as param_alignment_paddings"
                f" of group {group}, expected {count} numbers"
            )
        return found

    def _check_across(
        self,
        group: int,
        key: str | None,
        needed: int,
        size: int | None,
        members: Sequence[Part],
    ) -> int:
        """Refuse flat tensors that are not what a group is cut into, but for padding.

        Args:
            group: whose tensors they are.
            key: of the state; None: weights.
            needed: elements of the group.
            size: that all but the last processes have; None: as the first one has.
            members: of the processes that share the group out.

        Returns:
            The size.
        """
        flats = [self._flat(part, group, key) for part in members]
        what = "weights" if key is None else repr(key)
        if size is None or len(flats) == 1:
            size = flats[0].numel()
        for part, flat in zip(members, flats, strict=True):
            is_short = flat.numel() < size and part is not members[-1]  # there is the padding
            if is_short or flat.numel() > size or flat.dtype != flats[0].dtype:
                raise ValueError(
                    f"{OP}: {part.fields.path} has {flat.numel()} elements of {flat.dtype} as"
                    f" {what} of group {group}, expected {size} of {flats[0].dtype} as in all"
                    " processes"
                )
        total = sum(flat.numel() for flat in flats)
        most = needed + alignment(len(flats)) - 1
        if not needed <= total <= most:
            raise ValueError(
                f"{OP}: {members[0].fields.path} and the files of other processes have {total}"
                f" elements of {what} in group {group}, expected {needed} to {most} for the shapes"
                " in the model file"
            )
        return size

    def _place_in_each(self, model: ModelFile) -> None:
        assert model.groups is not None
        shapes = {name: shape for group in model.groups for name, shape in group.items()}
        sizes = [flat.numel() for flat in self._parts[0].weights]
        for part in self._parts:
            for i, size in enumerate(sizes):
                for key in (None, *part.state[i]):
                    flat, mine = self._flat(part, i, key), self._flat(self._parts[0], i, key)
                    if flat.numel() != size or flat.dtype != mine.dtype:
                        what = "weights" if key is None else repr(key)
                        raise ValueError(
                            f"{OP}: {part.fields.path} has {flat.numel()} elements of {flat.dtype}"
                            f" as {what} of flat tensor {i}, expected {size} of {mine.dtype}"
                        )
        try:
            self.places = places_in_each(sizes, shapes, len(self._parts))
        except ValueError as error:
            raise ValueError(f"{OP}: {self._parts[0].fields.path} has {error}") from None


def _of_all_experts(model: ModelFile, places: Mapping[str, Place], kind: int) -> dict[str, Place]:
    """Return places by names in which experts of all processes are counted, as in their files.

    Args:
        model: for the text of an error.
        places: by names in which each process counts its own experts.
        kind: number of the process among those that have other experts each.
    """
    matches = {name: _EXPERT.fullmatch(name) for name in places}
    counts: dict[str, int] = {}
    for name, match in matches.items():
        if match is None:
            raise ValueError(
                f"{OP}: {model.path} has {name!r} in a group that fewer processes share out,"
                " expected experts only"
            )
        counts[match[1]] = max(counts.get(match[1], 0), int(match[2]) + 1)
    return {
        f"{match[1]}{kind * counts[match[1]] + int(match[2])}{match[3]}": places[name]
        for name, match in matches.items()
        if match is not None
    }

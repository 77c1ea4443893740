"""Contents: what a folder holds, under the names that a checkpoint of zero.save has for it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deepspeed_ext.zero.checkpoint.saving import CLIENT, common_fields, name_of_process
from deepspeed_ext.zero.checkpoint.training_state import COMMON, MODEL, OPTIMIZER
from deepspeed_ext.zero.deepspeed_folders.lazy import Lazy
from deepspeed_ext.zero.deepspeed_folders.pickles import OP
from deepspeed_ext.zero.deepspeed_folders.shard_files import find_shard_files
from deepspeed_ext.zero.deepspeed_folders.source import source_of
from deepspeed_ext.zero.deepspeed_folders.whole_state import Names
from deepspeed_ext.zero.names import by_plain_name, plain_name


@dataclass(frozen=True)
class Contents:
    """What a folder holds.

    Args:
        tensors: by names in a checkpoint.
        values: plain ones, likewise.
    """

    tensors: Mapping[str, Lazy]
    values: Mapping[str, object]


def contents_of(path: Path, with_state: bool = True, names: Names | None = None) -> Contents:
    """Return what the folder of a checkpoint holds.

    Args:
        path: of the folder.
        with_state: that of the optimizer has to be there.
        names: of the parameters of each group of an optimizer here, for stage 0.

    Raises:
        OSError, ValueError: as `source_of` does; or there is no state.
    """
    source = source_of(find_shard_files(path), names)
    if with_state and source.groups is None:
        raise ValueError(
            f"{OP}: {source.reason}; there is no state of an optimizer, expected it; take the"
            " weights only"
        )
    tensors = {MODEL + name: one for name, one in by_plain_name(OP, source.weights).items()}
    for name, entry in by_plain_name(OP, source.state).items():
        tensors |= {f"{OPTIMIZER}{name}.{key}": one for key, one in entry.items()}
    groups = [
        {**group, "params": [plain_name(name) for name in group["params"]]}
        for group in source.groups or ()
    ]
    extra = {plain_name(name): value for name, value in source.extra.items()}
    own = {CLIENT: source.client, "random": {}}
    # As of no process: no number of processes goes on with their random numbers.
    ties = {plain_name(name): plain_name(kept) for name, kept in source.ties.items()}
    values = {COMMON: common_fields(0, groups, extra, ties), name_of_process(0): own}
    return Contents(tensors, values)

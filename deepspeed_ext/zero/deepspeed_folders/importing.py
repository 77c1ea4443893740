"""A folder of DeepSpeed's, written as a checkpoint of this library, or as plain weights."""

import errno
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from deepspeed_ext.io.regular_file import path_text
from deepspeed_ext.zero.checkpoint.storage import MANIFEST
from deepspeed_ext.zero.checkpoint.streaming import save_streamed
from deepspeed_ext.zero.checkpoint.weight_files import Progress, check_options, write_weight_files
from deepspeed_ext.zero.deepspeed_folders.contents import contents_of
from deepspeed_ext.zero.deepspeed_folders.lazy import Lazy
from deepspeed_ext.zero.deepspeed_folders.pickles import OP
from deepspeed_ext.zero.deepspeed_folders.shard_files import find_shard_files, tag_folder
from deepspeed_ext.zero.deepspeed_folders.source import resolved, source_of
from deepspeed_ext.zero.names import by_plain_name


def import_deepspeed(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    tag: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write a checkpoint of DeepSpeed's as one of `zero.save`, for `zero.load` to go on from.

        zero.import_deepspeed("deepspeed_run", "checkpoints")
        client = zero.load("checkpoints", None, model, optimizer)  # on any number of processes

    Reads stages 0 to 3 in float32, bfloat16 and float16, of stage 0 one group with all parameters;
    layers of a pipeline, in stage 1, and experts, in stages 1 and 2, by the names in their files.
    Weights are the float32 master weights; frozen ones and buffers have the dtype that they have
    there. Groups of
    the optimizer have the parameters that were trained, by name, and the options that they had.
    client_state has what DeepSpeed's client gave, and global_steps, global_samples, skipped_steps,
    lr_scheduler and, in float16, loss_scaler in the form of `zero.LossScaler`.
    Nothing in the files is run. 256 MiB of what is being written are in memory, however large a
    parameter is, beside mapped pages that the system can take back.

    Args:
        folder: that DeepSpeed's save_checkpoint was given, or that of one checkpoint. Those of
            several hosts have to be copied into one.
        out: folder of checkpoints of `zero.save`, made if it is not there, not inside of `folder`.
        tag: of the checkpoint, there and here; None: the one that `latest` names.
        progress: called with bytes that were read.

    Returns:
        The folder of the checkpoint, out/tag; it is the latest one.

    Raises:
        OSError: a file is missing or cannot be read; the disk is full; FileExistsError: out has a
            checkpoint of this tag.
        ValueError: a file was cut short, or has anything else in it than tensors and plain values;
            files are not of one run; numbers are left over or missing; there is no state that can
            be told what it belongs to; the run was of model parallelism; or out is inside of
            folder.
        TypeError: something that the client gave is not plain.

    See: DeepSpeed 0.19, utils/zero_to_fp32.py and runtime/engine.py, for the files' layout.
    """
    path, home = _places(folder, out, tag)
    if (home / path.name / MANIFEST).exists():
        text = f"{OP}: {home / path.name} is there, expected no checkpoint of this tag"
        raise FileExistsError(errno.EEXIST, text)
    contents = contents_of(path)

    def read(name: str) -> Iterator[Tensor]:
        for part in contents.tensors[name].small_parts():
            yield part
            if progress is not None:
                progress(part.nbytes)

    save_streamed(OP, home, path.name, _described(contents.tensors), read, contents.values)
    return home / path.name


def import_deepspeed_weights(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    tag: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 << 30,
    progress: Progress | None = None,
) -> list[Path]:
    """Write the weights of a checkpoint of DeepSpeed's as `consolidate` writes those of ours.

    What DeepSpeed's zero_to_fp32 does. The files are those of `zero.consolidate`, tied parameters
    are in them once. Reads what `import_deepspeed` reads, and weights of which the state cannot be
    read.

    Args:
        folder: as for `import_deepspeed`.
        out: a folder, as for `consolidate`, not inside of `folder`.
        tag: of the checkpoint; None: the one that `latest` names.
        dtype: of floating-point weights and buffers; None: float32 for what was trained, else as
            they were saved.
        max_shard_bytes: of a file; a larger tensor has one of its own.
        progress: called with bytes that were written.

    Returns:
        The files: model.safetensors, or several and their index, which comes last.

    Raises:
        OSError: a file is missing, or cannot be read or written.
        ValueError: as for `import_deepspeed`, or dtype is none for weights.
    """
    check_options(OP, dtype, max_shard_bytes)
    path, home = _places(folder, out, tag)
    weights = by_plain_name(OP, source_of(find_shard_files(path)).weights)
    described = {
        name: one.to(dtype) if dtype is not None and one.is_floating_point() else one
        for name, one in _described(weights).items()
    }
    if not described:
        raise ValueError(f"{OP}: {path} has no weights, expected some")
    return write_weight_files(
        home,
        described,
        lambda name, _: weights[name].read().to(described[name].dtype),
        max_shard_bytes,
        progress,
    )


def _places(
    folder: str | os.PathLike[str], out: str | os.PathLike[str], tag: str | None
) -> tuple[Path, Path]:
    """Return the folder of the checkpoint and that of the result, which is none of DeepSpeed's."""
    path, home = tag_folder(folder, tag), Path(path_text(OP, out))
    for theirs in (resolved(folder), resolved(path)):
        for mine in (resolved(home), resolved(home / path.name)):
            if mine == theirs or theirs in mine.parents:
                raise ValueError(f"{OP}: out is {home}, expected a folder outside of {theirs}")
    return path, home


def _described(tensors: Mapping[str, Lazy]) -> dict[str, Tensor]:
    return {name: one.described for name, one in tensors.items()}

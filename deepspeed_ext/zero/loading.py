"""load: a training goes on from a checkpoint, whoever wrote it."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepspeed_ext.io.regular_file import path_text
from deepspeed_ext.zero.checkpoint.folder import folder_of
from deepspeed_ext.zero.checkpoint.saving import load_by
from deepspeed_ext.zero.checkpoint.storage import MANIFEST, Reader
from deepspeed_ext.zero.checkpoint.training_state import TrainingReader, names_in
from deepspeed_ext.zero.deepspeed_folders.reader import DeepSpeedReader
from deepspeed_ext.zero.deepspeed_folders.shard_files import has_shard_files, tag_folder

_OP = "zero.load"


def load(
    folder: str | os.PathLike[str],
    tag: str | None,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    strict: bool = True,
    has_masters: torch.optim.Optimizer | None = None,
    **objects: Any,
) -> dict[str, Any]:
    """Go on from what `save` left, or DeepSpeed's save_checkpoint, on any number of processes.

    All processes call it. Each reads its own rows, and checks what it reads; nothing in the files
    is run. It is read to where weights and state are, which are of no use after an error in that.
    With as many processes as saved, random numbers go on as they would have, and so does
    all training, bit for bit, but where plain buffers differ between processes, as the running
    statistics of BatchNorm do: after a load all have those of process 0. Otherwise random numbers
    are left alone, and client_state is that of the first process.

    A folder of DeepSpeed's is read as `import_deepspeed` reads it, without anything being written.

    Args:
        folder: that `save` was given; or DeepSpeed's save_checkpoint, or that of one of its
            checkpoints.
        tag: of the checkpoint; None: the latest.
        model: that zero.shard was called on, of the same architecture. Float32 weights are read
            from the master weights of those that were saved in 16 bits.
        optimizer: of any class that takes the state, in any state format; None leaves it out.
        strict: False: tensors that only the model has stay as they are, those that only the
            checkpoint has are not read, and a warning counts both. The optimizer's groups have the
            same parameters either way.
        has_masters: where optimizer is None, the one that keeps master weights of this model: they
            get all bits of the weights that were saved, and its other state stays as it is.
        objects: whose load_state_dict gets what client_state of the same name was.

    Returns:
        The rest of client_state, by name.

    Raises:
        OSError: there is no such checkpoint, or EBADMSG: its bytes are not what was saved.
        ValueError: it is of another model, of other groups of parameters, or has state or options
            that the optimizer's class does not take, named in the text; nothing has changed then.
            What is known only when all is read comes later: NaN in state, and what objects and
            set_extra_state raise.
        RuntimeError: the model is between micro-steps, or another process failed.
    """

    def open_reader() -> tuple[Path, Reader]:
        path, is_ours = checkpoint_of(_OP, folder, tag)
        if is_ours:
            return path, TrainingReader(path)
        names = None if optimizer is None else names_in(_OP, model, optimizer)
        return path, DeepSpeedReader(path, names)

    return load_by(open_reader, model, optimizer, objects, strict, has_masters)


def checkpoint_of(op: str, folder: str | os.PathLike[str], tag: str | None) -> tuple[Path, bool]:
    """Return the folder of a checkpoint, and whether `save` wrote it; else DeepSpeed has.

    Args:
        op: for the text of an error.
        folder: of `load`.
        tag: of the checkpoint; None: the latest.

    Raises:
        OSError: there is none that is the latest.
        ValueError: the tag, or what the file says that names the latest, is no name of a folder.
    """
    try:
        theirs = tag_folder(folder, tag)
        if has_shard_files(theirs) and not (theirs / MANIFEST).exists():
            return theirs, False
    except (OSError, ValueError):
        pass  # the name of a checkpoint that is not theirs has other rules
    return folder_of(op, path_text(op, folder), tag), True

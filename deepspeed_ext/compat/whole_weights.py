"""deepspeed.utils.zero_to_fp32: whole float32 weights of checkpoints, ours and DeepSpeed's."""

import errno
import glob
import os
import re
from pathlib import Path

import torch
from torch import Tensor, nn

from deepspeed_ext import zero
from deepspeed_ext.compat.plain_copies import plain_copy
from deepspeed_ext.dtensors import is_dtensor
from deepspeed_ext.io import AsyncIO
from deepspeed_ext.zero.checkpoint.consolidate import SavedWeights
from deepspeed_ext.zero.checkpoint.folder import folder_of
from deepspeed_ext.zero.checkpoint.storage import MANIFEST
from deepspeed_ext.zero.deepspeed_folders.shard_files import find_shard_files, tag_folder
from deepspeed_ext.zero.deepspeed_folders.source import source_of
from deepspeed_ext.zero.names import by_plain_name, plain_name

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_checkpoint_files",
    "get_fp32_state_dict_from_zero_checkpoint",
    "get_model_state_file",
    "get_model_state_files",
    "get_optim_files",
    "load_state_dict_from_zero_checkpoint",
]
_OP = "zero_to_fp32"
_UNITS = {"KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}
_FILE = "pytorch_model.bin"
Folder = str | os.PathLike[str]


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: Folder,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor]:
    """Return the weights and buffers of a checkpoint on the CPU, floating ones in float32.

    A tied weight is there under all of its names, as one tensor.

    Args:
        checkpoint_dir: that save_checkpoint was given, here or in DeepSpeed.
        tag: of the checkpoint; None: the latest.
        exclude_frozen_parameters: False; say it when the checkpoint is saved.
        lazy_mode: False; convert_zero_checkpoint_to_fp32_state_dict holds one tensor at a time.

    Raises:
        OSError: a file is missing or cannot be read.
        ValueError: it is no such checkpoint, or an argument is True.
    """
    for name, value in (
        ("exclude_frozen_parameters", exclude_frozen_parameters),
        ("lazy_mode", lazy_mode),
    ):
        if value:
            raise ValueError(f"{_OP}: {name} is {value}, expected False")
    path = folder_of(_OP, checkpoint_dir, tag)
    if (path / MANIFEST).exists():
        weights = SavedWeights(path, torch.float32)
        with AsyncIO() as engine:
            state = {name: weights.read(name, engine) for name in weights.described}
        ties = weights.ties()
    else:
        source = source_of(find_shard_files(tag_folder(checkpoint_dir, tag)))
        read = {name: one.read() for name, one in by_plain_name(_OP, source.weights).items()}
        state = {name: t.float() if t.is_floating_point() else t for name, t in read.items()}
        ties = by_plain_name(_OP, source.ties)
    return state | {name: state[plain_name(kept)] for name, kept in ties.items()}


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: Folder,
    output_dir: Folder,
    max_shard_size: str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write these weights as pytorch_model.bin, or as safetensors files with their index.

    Args:
        checkpoint_dir: as above.
        output_dir: a folder, made if it is not there.
        max_shard_size: of a file of safetensors; None: all in one.
        safe_serialization: write safetensors files, of which one tensor is in memory at a time.
        tag: as above.
        exclude_frozen_parameters: False, as above.

    Raises:
        OSError, ValueError: as above; or a folder cannot be written to.
    """
    if not safe_serialization:
        state = get_fp32_state_dict_from_zero_checkpoint(
            checkpoint_dir, tag, exclude_frozen_parameters
        )
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        torch.save(state, Path(output_dir) / _FILE)
        return
    if exclude_frozen_parameters:
        raise ValueError(f"{_OP}: exclude_frozen_parameters is True, expected False")
    path = folder_of(_OP, checkpoint_dir, tag)
    is_ours = (path / MANIFEST).exists()
    write = zero.consolidate if is_ours else zero.import_deepspeed_weights
    most = _bytes(max_shard_size) if max_shard_size else 1 << 62
    write(checkpoint_dir, output_dir, tag=tag, dtype=torch.float32, max_shard_bytes=most)


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: Folder, tag: str | None = None
) -> nn.Module:
    """Move a model to the CPU, and load these weights.

    Args:
        model: whose parameters are all in the checkpoint. One that is sharded stays as it is, and a
            copy gets the weights, of modules as they were before; those have no hooks.
        checkpoint_dir: as above.
        tag: as above.

    Returns:
        The model, or the copy.

    Raises:
        OSError, ValueError: as above; or the model has other parameters.
    """
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    is_sharded = any(map(is_dtensor, model.parameters()))
    model = plain_copy(model) if is_sharded else model.cpu()
    params = dict(model.named_parameters(remove_duplicate=False))
    there = {params[name] for name in state if name in params}
    missing = [name for name, param in params.items() if param not in there]
    other = sorted(state.keys() - model.state_dict().keys())
    if missing or other:
        raise ValueError(
            f"{_OP}: model has {missing or 'no'} beside the checkpoint, and the checkpoint"
            f" {other or 'nothing'} beside it, expected the same parameters"
        )
    model.load_state_dict(state, strict=False)  # tied ones are there once in older checkpoints
    return model


def get_checkpoint_files(checkpoint_dir: Folder, glob_pattern: str) -> list[str]:
    """Return paths of files in a folder, numbers in their names by their size.

    Args:
        checkpoint_dir: of one checkpoint of DeepSpeed's, such as run/global_step8.
        glob_pattern: of names in it.

    Raises:
        OSError: there is none.
    """
    home = os.fspath(checkpoint_dir)
    found = glob.glob(os.path.join(glob.escape(home), glob_pattern))
    if not found:
        raise FileNotFoundError(
            errno.ENOENT,
            f"{_OP}: {home} has no files {glob_pattern}, expected the folder of one checkpoint that"
            " DeepSpeed has saved; engine.save_checkpoint here writes others",
        )
    return sorted(found, key=_by_numbers)


def get_optim_files(checkpoint_dir: Folder) -> list[str]:
    """Return the paths of the optimizer's files, one for each process, in their order."""
    return get_checkpoint_files(checkpoint_dir, "*_optim_states.pt")


def get_model_state_files(checkpoint_dir: Folder) -> list[str]:
    """Return the paths of the model's files, in the order of processes."""
    return get_checkpoint_files(checkpoint_dir, "*_model_states.pt")


def get_model_state_file(checkpoint_dir: Folder, zero_stage: int) -> str:
    """Return the path of the first process's file of the model, which depends on the stage."""
    of_process = "zero_pp_rank_0_" if zero_stage == 3 else ""
    return get_checkpoint_files(checkpoint_dir, f"{of_process}mp_rank_00_model_states.pt")[0]


def _by_numbers(path: str) -> list[tuple[int, str]]:
    """Return what sorts names as their numbers do: rank_2 is before rank_10."""
    parts = re.split(r"(\d+)", os.path.basename(path))
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def _bytes(text: str) -> int:
    """Read a size such as 5GB."""
    number, unit = text[:-2], text[-2:].upper()
    if unit not in _UNITS or not number.strip().isdigit():
        raise ValueError(f"{_OP}: max_shard_size is {text!r}, expected a size such as '5GB'")
    return int(number) * _UNITS[unit]

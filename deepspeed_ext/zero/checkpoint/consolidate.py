"""One model in safetensors files, as everybody reads it, from a checkpoint of many processes."""

import os
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from deepspeed_ext.io import AsyncIO
from deepspeed_ext.ops.optimizers.state_formats import join_float32
from deepspeed_ext.optim.formats import MASTER, REMAINDER
from deepspeed_ext.zero.checkpoint.folder import folder_of
from deepspeed_ext.zero.checkpoint.training_state import (
    COMMON,
    MODEL,
    OPTIMIZER,
    TrainingReader,
)
from deepspeed_ext.zero.checkpoint.weight_files import Progress, check_options, write_weight_files

_OP = "zero.consolidate"


def consolidate(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    tag: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 << 30,
    progress: Progress | None = None,
) -> list[Path]:
    """Write the weights of a checkpoint as safetensors files with Hugging Face's index.

    Extra state of modules is not in them. One tensor is in memory at a time, and 256 MiB of what is
    being written. Of weights that were trained with float32 master weights, these are
    written.

    Args:
        folder: that zero.save was given.
        out: a folder, made if it is not there. What it has of an earlier result goes when all of
            the new one is on the disk: model.safetensors, model-00001-of-00002.safetensors and
            others of such names, and the index.
        tag: of the checkpoint; None: the latest.
        dtype: of floating-point weights; None: of the master weights, or as they were saved.
        max_shard_bytes: of a file; a larger tensor has one of its own.
        progress: called with bytes that were written.

    Returns:
        The files: model.safetensors, or several and their index, which comes last.

    Raises:
        OSError: a file cannot be read or written, or EBADMSG: bytes are not what was saved.
        ValueError: the checkpoint is not one of zero.save, or dtype is none for weights.
    """
    check_options(_OP, dtype, max_shard_bytes)
    path = folder_of(_OP, folder, tag)
    source = SavedWeights(path, dtype)
    return write_weight_files(out, source.described, source.read, max_shard_bytes, progress)


class SavedWeights:
    """The weights of a checkpoint, as they are to be written.

    Args:
        path: the folder of the checkpoint.
        dtype: of floating-point weights; None: of the master weights, or as they were saved.

    Attributes:
        described: the weights on meta, by name.
    """

    def __init__(self, path: Path, dtype: torch.dtype | None) -> None:
        self._reader = TrainingReader(path)
        self._metadata = self._reader.read_metadata()
        self.described: dict[str, Tensor] = {}
        for full, entry in self._metadata.state_dict_metadata.items():
            if full.startswith(MODEL) and isinstance(entry, TensorStorageMetadata):
                name, given = full.removeprefix(MODEL), entry.properties.dtype
                if given.is_floating_point:
                    has_master = self._key(name, MASTER) or self._key(name, REMAINDER)
                    given = dtype or (torch.float32 if has_master else given)
                self.described[name] = torch.empty(entry.size, dtype=given, device="meta")
        if not self.described:
            raise ValueError(f"{_OP}: {path} has no weights, expected a checkpoint of zero.save")

    def read(self, name: str, engine: AsyncIO) -> Tensor:
        """Return a weight."""
        described = self.described[name]
        master, lower = self._key(name, MASTER), self._key(name, REMAINDER)
        if master is not None:
            return self._reader.tensor(self._metadata, engine, master).to(described.dtype)
        weight = self._reader.tensor(self._metadata, engine, MODEL + name)
        if lower is not None and weight.dtype == torch.bfloat16:
            weight = join_float32(
                weight, self._reader.tensor(self._metadata, engine, lower).to(torch.int16)
            )
        return weight.to(described.dtype)

    def ties(self) -> dict[str, str]:
        """Return other names of weights, with those here; checkpoints of before tell of none."""
        common = self._reader.value(self._metadata, COMMON)
        return {n: kept for n, kept in common.get("ties", {}).items() if kept in self.described}

    def _key(self, name: str, key: str) -> str | None:
        full = f"{OPTIMIZER}{name}.{key}"
        return full if full in self._metadata.state_dict_metadata else None

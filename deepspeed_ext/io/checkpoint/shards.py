"""Shards: the tensors of a folder with one safetensors file, or with several and their index."""

import json
import os
from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from deepspeed_ext.io.checkpoint.neighbour_reader import ReusedPages
from deepspeed_ext.io.checkpoint.state_dict import SavedFile, SavedTensor
from deepspeed_ext.io.engine.async_io import AsyncIO

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")


class Shards:
    """What the files of a model hold, by their headers; of the index nothing is believed.

    As in Hugging Face's libraries the one file counts where there is an index too.

    Args:
        op: begins the text of an error.
        folder: with model.safetensors, or model.safetensors.index.json and what it names.

    Attributes:
        tensors: what each file says of its tensors, by name.
        files: which has it, by the name of a tensor.

    Raises:
        ValueError: a file breaks a rule of its format or was cut short, or the index names a file
            of another folder, a tensor that its file has not, or not all tensors of a file.
        OSError: a file is missing or cannot be read.
    """

    def __init__(self, op: str, folder: Path) -> None:
        self._op = op
        self.tensors: dict[str, SavedTensor] = {}
        self.files: dict[str, Path] = {}
        self._saved: dict[Path, SavedFile] = {}
        if (folder / ONE_FILE).exists():
            self._add(folder / ONE_FILE)
        elif (folder / INDEX).exists():
            self._add_all(folder / INDEX)
        else:
            self._refuse_without(folder)

    def load(
        self,
        names: Iterable[str],
        device: torch.device,
        engine: AsyncIO,
        pages: ReusedPages | None = None,
        on_host: Collection[str] = (),
    ) -> dict[str, Tensor]:
        """Return some tensors, reading no others; those of a file are read together.

        Args:
            names: of `tensors`.
            device: where to, cpu or cuda.
            engine: what reads.
            pages: memory of the CPU that they share, as they do any on CUDA; None: each has its
                own.
            on_host: with pages, the names of those that are on the CPU whatever the device.

        Raises:
            ValueError: a file is another one by now.
            OSError: a file cannot be read.
        """
        by_file: defaultdict[Path, list[str]] = defaultdict(list)
        for name in names:
            by_file[self.files[name]].append(name)
        loaded: dict[str, Tensor] = {}
        for file, some in by_file.items():
            saved = self._saved[file]
            if pages is None:
                loaded.update(saved.load(some, device, engine))
            else:
                loaded.update(saved.load_together(some, device, engine, pages, on_host))
        return loaded

    def _add(self, file: Path) -> None:
        self._saved[file] = SavedFile(file)
        saved = self._saved[file].inspect().tensors
        for name in saved:
            if name in self.files:
                raise ValueError(
                    f"{self._op}: {file} has the tensor {name!r}, expected it in"
                    f" {self.files[name].name} only"
                )
            self.files[name] = file
        self.tensors.update(saved)

    def _add_all(self, index: Path) -> None:
        """Take in what an index names, if it says no less and no more than the files."""
        named = self._weight_map(index)
        for file in sorted(set(named.values())):
            if not (index.parent / file).exists():
                raise FileNotFoundError(
                    f"{self._op}: {index} names the file {file!r}, expected it beside the index;"
                    " fetch the folder again"
                )
            self._add(index.parent / file)
        for name, file in named.items():
            if name not in self.files or self.files[name].name != file:
                raise ValueError(
                    f"{self._op}: {index} says that {file} has the tensor {name!r}, expected a file"
                    " that has it; fetch the folder again"
                )
        for name, saved in self.tensors.items():
            if name not in named and saved.tied_to is None:
                raise ValueError(
                    f"{self._op}: {index} does not name {name!r}, expected all tensors of"
                    f" {self.files[name].name}; fetch the folder again"
                )

    def _weight_map(self, index: Path) -> dict[str, str]:
        fields = read_json(self._op, index)
        named = fields.get("weight_map") if isinstance(fields, dict) else None
        if not isinstance(named, dict) or not all(_is_plain(file) for file in named.values()):
            raise ValueError(
                f"{self._op}: {index} has the weight_map {named!r:.100}, expected names of files in"
                " the same folder"
            )
        return named

    def _refuse_without(self, folder: Path) -> NoReturn:
        names = sorted(path.name for path in folder.iterdir())
        expected = f"expected {ONE_FILE}, or {INDEX} and the files that it names"
        pickled = [name for name in names if name.endswith(_PICKLED)]
        if pickled:
            raise ValueError(
                f"{self._op}: {folder} has its weights as {pickled[0]}, {expected}; pickled files"
                " can run anything, so convert them where you trust them: save_pretrained of the"
                " model writes safetensors"
            )
        raise FileNotFoundError(f"{self._op}: {folder} has no weights, {expected}")


def read_json(op: str, path: Path) -> Any:
    """Return what a file has as JSON; a name that stands twice in an object is an error.

    Raises:
        ValueError: it is no JSON.
        OSError: it cannot be read.
    """
    try:
        return json.loads(path.read_bytes(), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{op}: {path} is not JSON: {error}") from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice!r:.100} stands twice")
    return fields


def _is_plain(name: object) -> bool:
    return (
        isinstance(name, str)
        and os.path.basename(name) == name
        and name not in ("", ".", "..")
        and "\0" not in name
    )

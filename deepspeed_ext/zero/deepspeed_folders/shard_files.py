"""Which files a checkpoint of DeepSpeed has: found by their names, each process once."""

import errno
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from deepspeed_ext.io.regular_file import open_regular, path_text
from deepspeed_ext.zero.deepspeed_folders.pickles import OP

LATEST, LATEST_UNIVERSAL = "latest", "latest_universal"
PARAMETERS, REST = "zero", "optimizer_state.pt"  # of universal folders
_OF_PROCESS = re.compile(
    r"(?:bf16_)?zero_pp_rank_(\d{1,9})_mp_rank_(\d{1,9})_(model|optim)_states\.pt"
)
_OF_ALL = re.compile(r"mp_rank_(\d{1,9})_model_states\.pt")
_OF_LAYER = re.compile(r"layer_(\d{1,9})-model_states\.pt")
_OF_EXPERT = re.compile(r"layer_(\d{1,9})_expert_(\d{1,9})_mp_rank_0{1,9}_model_states\.pt")
_OF_EXPERTS = re.compile(r"expp_rank_\d{1,9}_mp_rank_0{1,9}_optim_states\.pt")
_STATES = "_states.pt"
_MAX_TAG_BYTES = 200
Key = TypeVar("Key")


@dataclass(frozen=True)
class StageFiles:
    """The files of a stage of a pipeline, or all but those of experts where there is none.

    Args:
        model: one for all processes, or one for each (stage 3 of ZeRO), in their order.
        optimizer: one for each process, in their order; none in stage 0.
        is_by_process: whether each process has a model file.
    """

    model: list[Path]
    optimizer: list[Path]
    is_by_process: bool


@dataclass(frozen=True)
class ShardFiles:
    """The files of a checkpoint.

    Args:
        folder: that they are in.
        stages: of the pipeline; one, if there is none.
        layers: of a pipeline, by their numbers; none, if there is none.
        experts: each of a layer with experts and an expert.
        has_states_of_experts: the optimizer's, of a run without ZeRO.
    """

    folder: Path
    stages: list[StageFiles]
    layers: Mapping[int, Path] = field(default_factory=dict)
    experts: list[Path] = field(default_factory=list)
    has_states_of_experts: bool = False


def tag_folder(folder: str | os.PathLike[str], tag: str | None) -> Path:
    """Return the folder of a checkpoint, which may be the one given.

    Args:
        folder: that DeepSpeed's save_checkpoint was given, or that of one checkpoint.
        tag: of the checkpoint; None: the one that a file calls the latest.

    Raises:
        OSError: there is none.
        ValueError: the tag is no name of a folder.
    """
    home = Path(path_text(OP, folder))
    if tag is not None:
        return _existing(home / _name(tag, "tag"))
    if has_shard_files(home):
        return home
    for latest in (LATEST, LATEST_UNIVERSAL):
        if (home / latest).exists():
            with open(open_regular(OP, home / latest, os.O_RDONLY), "rb") as file:
                text = file.read(_MAX_TAG_BYTES + 2).decode(errors="replace")
            return _existing(home / _name(text.strip(), os.fspath(home / latest)))
    raise FileNotFoundError(
        errno.ENOENT,
        f"{OP}: {home} has no file {LATEST!r} and no files *{_STATES}, expected a folder that"
        " DeepSpeed's save_checkpoint was given, or that of one checkpoint",
    )


def has_shard_files(folder: Path) -> bool:
    """Tell whether there is a file of a checkpoint in a folder."""
    return any(name.endswith(_STATES) for name in os.listdir(folder))


def is_universal(folder: Path) -> bool:
    """Tell whether a folder is one that ds_to_universal makes."""
    return (folder / PARAMETERS / REST).exists()


def _name(tag: str, what: str) -> str:
    # DeepSpeed joins it to a path, so that a tag may have folders in it; none leads out.
    parts = tag.split("/")
    if not tag or "\0" in tag or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"{OP}: {what} is {tag!r:.80}, expected the name of a folder inside")
    return tag


def _existing(folder: Path) -> Path:
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, f"{OP}: {folder} is not there, expected a checkpoint")
    return folder


class _Found:
    """Files by what they are of, each of which there may be once."""

    def __init__(self) -> None:
        self.shared: dict[int, Path] = {}
        self.by_process: dict[tuple[int, str], dict[int, Path]] = {}
        self.layers: dict[int, Path] = {}
        self.experts: dict[tuple[int, int], Path] = {}
        self.has_states_of_experts = False

    def add(self, path: Path) -> None:
        """Take a file.

        Raises:
            ValueError: another one is of the same, or it is of none of these.
        """
        name = path.name
        if match := _OF_PROCESS.fullmatch(name):
            mine = self.by_process.setdefault((int(match[2]), match[3]), {})
            _once(mine, int(match[1]), path, f"process {int(match[1])}")
        elif match := _OF_ALL.fullmatch(name):
            _once(self.shared, int(match[1]), path, f"model-parallel rank {int(match[1])}")
        elif match := _OF_LAYER.fullmatch(name):
            _once(self.layers, int(match[1]), path, f"layer {int(match[1])}")
        elif match := _OF_EXPERT.fullmatch(name):
            key = int(match[1]), int(match[2])
            _once(self.experts, key, path, f"expert {key[1]} of layer {key[0]}")
        elif _OF_EXPERTS.fullmatch(name):
            self.has_states_of_experts = True
        elif name.endswith(_STATES):
            raise _not_read(path)

    def stage(self, folder: Path, number: int) -> StageFiles:
        """Return the files of a stage of a pipeline, 0 if there is none."""
        shared = [path for rank, path in self.shared.items() if rank == number]
        model, optimizer = (
            _in_order(folder, self.by_process.get((number, kind), {}), kind, number)
            for kind in ("model", "optim")
        )
        if shared and is_universal(folder):
            model = []  # of stage 3, which says less; zero.export_deepspeed writes both
        if model and shared:
            raise ValueError(
                f"{OP}: {folder} has {shared[0].name} beside {model[0].name}, expected the files"
                " of one checkpoint"
            )
        if not model and not shared:
            raise FileNotFoundError(
                errno.ENOENT,
                f"{OP}: {folder} has no file {'*' if not number else f'mp_rank_{number:02d}'}"
                "_model_states.pt, expected a checkpoint",
            )
        return StageFiles(model or shared, optimizer, bool(model))


def find_shard_files(folder: Path) -> ShardFiles:
    """Return the files of a checkpoint.

    Raises:
        ValueError: there are files of model parallelism, a process or layer has two, or the files
            are those of two checkpoints.
        OSError: there are none, or a process or stage has none.
    """
    found = _Found()
    for path in sorted(folder.iterdir()):
        found.add(path)
    numbers = {*found.shared, *(number for number, _ in found.by_process)}
    last = max(numbers, default=0)
    if last and not found.layers:
        paths = [found.shared.get(last), *found.by_process.get((last, "optim"), {}).values()]
        raise _not_read(next(path for path in paths if path is not None))
    stages = [found.stage(folder, number) for number in range(last + 1)]
    experts = [found.experts[key] for key in sorted(found.experts)]
    return ShardFiles(folder, stages, found.layers, experts, found.has_states_of_experts)


def _once(mine: dict[Key, Path], key: Key, path: Path, what: str) -> None:
    if key in mine:
        raise ValueError(
            f"{OP}: {path} is of {what} as {mine[key].name} is, expected one file of each; they are"
            " of two checkpoints"
        )
    mine[key] = path


def _not_read(path: Path) -> ValueError:
    return ValueError(
        f"{OP}: {path} is of model parallelism, or of nothing known, expected files of"
        " data-parallel processes, of layers of a pipeline, or of experts"
    )


def _in_order(folder: Path, files: dict[int, Path], kind: str, stage: int) -> list[Path]:
    """Return files by the numbers of their processes, which follow one another."""
    for rank in range(max(files, default=-1) + 1):
        if rank not in files:
            raise _missing(folder, rank, kind, stage)
    return [files[rank] for rank in sorted(files)]


def check_count(folder: Path, stage: int, files: StageFiles, processes: int) -> None:
    """Refuse a checkpoint that says that another number of processes wrote it."""
    kinds = {"optim": files.optimizer} | ({"model": files.model} if files.is_by_process else {})
    for kind, paths in kinds.items():
        if len(paths) < processes:
            raise _missing(folder, len(paths), kind, stage)
        if len(paths) > processes:
            raise ValueError(
                f"{OP}: {paths[processes]} is of process {processes}, expected files of"
                f" {processes} processes as {files.optimizer[0].name} says; it is of another run"
            )


def _missing(folder: Path, rank: int, kind: str, stage: int) -> FileNotFoundError:
    return FileNotFoundError(
        errno.ENOENT,
        f"{OP}: {folder} has no zero_pp_rank_{rank}_mp_rank_{stage:02d}_{kind}_states.pt, expected"
        " one of each process; copy those of all hosts into one folder",
    )

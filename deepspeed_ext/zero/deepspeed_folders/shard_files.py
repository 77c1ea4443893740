"""Which files a checkpoint of DeepSpeed has: found by their names, each process once."""

import errno
import os
import re
from dataclasses import dataclass
from pathlib import Path

from deepspeed_ext.io.regular_file import open_regular, path_text
from deepspeed_ext.zero.deepspeed_folders.pickles import OP

LATEST, LATEST_UNIVERSAL = "latest", "latest_universal"
_OF_PROCESS = re.compile(
    r"(?:bf16_)?zero_pp_rank_(\d{1,9})_mp_rank_(\d{1,9})_(model|optim)_states\.pt"
)
_OF_ALL = re.compile(r"mp_rank_(\d{1,9})_model_states\.pt")
_STATES = "_states.pt"
_MAX_TAG_BYTES = 200


@dataclass(frozen=True)
class ShardFiles:
    """The files of a checkpoint.

    Args:
        folder: that they are in.
        model: one for all processes, or one for each (stage 3), in their order.
        optimizer: one for each process, in their order; none in stage 0.
        is_by_process: whether each process has a model file.
    """

    folder: Path
    model: list[Path]
    optimizer: list[Path]
    is_by_process: bool


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
    if any(_is_states(name) for name in os.listdir(home)):
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


def _is_states(name: str) -> bool:
    return name.endswith(_STATES)


def find_shard_files(folder: Path) -> ShardFiles:
    """Return the files of a checkpoint.

    Raises:
        ValueError: there are files of pipelines, experts or model parallelism, a process has two,
            or the files are those of two checkpoints.
        OSError: there are none, or a process has none.
    """
    shared: list[Path] = []
    by_process: dict[str, dict[int, Path]] = {"model": {}, "optim": {}}
    for path in sorted(folder.iterdir()):
        of_process, of_all = _OF_PROCESS.fullmatch(path.name), _OF_ALL.fullmatch(path.name)
        found = of_process or of_all
        if found is None and not _is_states(path.name):
            continue
        if found is None or int(found[2] if of_process else found[1]) > 0:
            raise ValueError(
                f"{OP}: {path} is of a pipeline, of experts or of model parallelism, expected files"
                " of data-parallel processes only"
            )
        if of_process is None:
            shared.append(path)
            continue
        rank, mine = int(of_process[1]), by_process[of_process[3]]
        if rank in mine:
            raise ValueError(
                f"{OP}: {path} is of process {rank} as {mine[rank].name} is, expected one file of"
                " each process; they are of two checkpoints"
            )
        mine[rank] = path
    model, optimizer = (_in_order(folder, by_process[kind], kind) for kind in ("model", "optim"))
    if (model and shared) or len(shared) > 1:
        raise ValueError(
            f"{OP}: {folder} has {shared[-1].name} beside {(model or shared)[0].name}, expected the"
            " files of one checkpoint"
        )
    if not model and not shared:
        raise FileNotFoundError(
            errno.ENOENT, f"{OP}: {folder} has no file *_model_states.pt, expected a checkpoint"
        )
    return ShardFiles(folder, model or shared, optimizer, bool(model))


def _in_order(folder: Path, files: dict[int, Path], kind: str) -> list[Path]:
    """Return files by the numbers of their processes, which follow one another."""
    for rank in range(max(files, default=-1) + 1):
        if rank not in files:
            raise _missing(folder, rank, kind)
    return [files[rank] for rank in sorted(files)]


def check_count(files: ShardFiles, processes: int) -> None:
    """Refuse a checkpoint that says that another number of processes wrote it."""
    kinds = {"optim": files.optimizer} | ({"model": files.model} if files.is_by_process else {})
    for kind, paths in kinds.items():
        if len(paths) < processes:
            raise _missing(files.folder, len(paths), kind)
        if len(paths) > processes:
            raise ValueError(
                f"{OP}: {paths[processes]} is of process {processes}, expected files of"
                f" {processes} processes as {files.optimizer[0].name} says; it is of another run"
            )


def _missing(folder: Path, rank: int, kind: str) -> FileNotFoundError:
    return FileNotFoundError(
        errno.ENOENT,
        f"{OP}: {folder} has no zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt, expected one of"
        " each process; copy those of all hosts into one folder",
    )

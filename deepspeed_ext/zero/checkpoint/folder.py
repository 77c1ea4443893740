"""A folder of checkpoints: a folder for each tag, and a file that names the latest one."""

import os
from pathlib import Path

import torch

from deepspeed_ext.io import AsyncIO
from deepspeed_ext.io.checkpoint.new_file import NewFile
from deepspeed_ext.io.regular_file import open_regular, path_text

LATEST = "latest"
_MAX_TAG_BYTES = 200


def checked_tag(op: str, tag: object) -> str:
    """Return a tag that can be the name of a folder.

    Raises:
        ValueError: it cannot.
    """
    wanted = (
        "a name without / of 1 to 200 bytes, that is not 'latest' and does not begin with a dot"
    )
    text = tag if isinstance(tag, str) else ""
    is_name = 0 < len(text.encode(errors="replace")) <= _MAX_TAG_BYTES and text.isprintable()
    if not is_name or text.startswith(".") or "/" in text or text == LATEST:
        raise ValueError(f"{op}: tag is {tag!r}, expected {wanted}")
    return text


def folder_of(op: str, path: str | os.PathLike[str], tag: str | None) -> Path:
    """Return the folder of a checkpoint; without a tag that of the latest one.

    Raises:
        OSError: there is none that is the latest.
        ValueError: the tag, or what the file says that names the latest, is no name of a folder.
    """
    home = Path(path_text(op, path))
    if tag is not None:
        return home / checked_tag(op, tag)
    name = os.fspath(home / LATEST)
    with open(open_regular(op, name, os.O_RDONLY), "rb") as file:
        text = file.read(_MAX_TAG_BYTES + 2).decode(errors="replace")
    return home / checked_tag(op, text.removesuffix("\n"))


def name_latest(home: Path, tag: str) -> None:
    """Make a checkpoint the latest one, if it is on the disk."""
    text = torch.frombuffer(bytearray(f"{tag}\n".encode()), dtype=torch.uint8)
    with NewFile(home / LATEST) as new, AsyncIO() as engine:
        engine.write(text, new.file).result()
        new.publish()

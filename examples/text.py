"""The text that the example learns: the source files of Python's own standard library.

Four spaces are learned as one tab: deep indentation would fill much of what the model looks at.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

_MAX_BYTES = 8 << 20  # more than a demonstration reads; keeps the start quick
_INDENTATION = b"    "
_VALIDATION_EVERY = 10  # every tenth file is for validation
# Not the library itself, or not prose and code: packages, tests, tables, other people's changes.
_SKIPPED_FOLDERS = {
    *("site-packages", "dist-packages", "test", "tests"),
    *("distutils", "encodings", "idlelib", "lib2to3", "pydoc_data", "turtledemo"),
}
_SKIPPED_FILES = ("_sysconfigdata", "sitecustomize", "usercustomize")


@dataclass(frozen=True)
class Text:
    """Bytes to train on, and bytes of other files to validate on.

    Args:
        training: (n,), uint8.
        validation: (m,), uint8.
        files: how many files they come from.
        digest: equal for equal text.
    """

    training: Tensor
    validation: Tensor
    files: int
    digest: str


def encode(source: bytes) -> bytes:
    """Return source code as it is learned."""
    return source.replace(_INDENTATION, b"\t")


def decode(learned: bytes) -> bytes:
    """Return the source code that `encode` makes this of."""
    return learned.replace(b"\t", _INDENTATION)


def standard_library(context: int) -> Text:
    """Read the .py files of this Python's standard library, in the order of their paths.

    Args:
        context: the length of one example; both parts must have more bytes than that.

    Raises:
        FileNotFoundError: this Python comes without enough of its sources.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    parts = (bytearray(), bytearray())
    files = 0
    for files, path in enumerate(sources(folder), start=1):
        parts[files % _VALIDATION_EVERY == 0].extend(encode(path.read_bytes()))
        if sum(map(len, parts)) > _MAX_BYTES:
            break
    if min(map(len, parts)) <= context:
        raise FileNotFoundError(
            f"text: {folder} has {files} source files, expected the standard library with sources"
        )
    training, validation = (torch.frombuffer(part, dtype=torch.uint8) for part in parts)
    digest = hashlib.sha256(b"".join(parts)).hexdigest()
    return Text(training, validation, files, digest)


def sources(folder: Path) -> Iterator[Path]:
    """Yield the files of the standard library in a folder, in the order of their paths."""
    for inside, folders, names in os.walk(folder):
        folders[:] = sorted(set(folders) - _SKIPPED_FOLDERS)  # os.walk goes where this says
        for name in sorted(names):
            if name.endswith(".py") and not name.startswith(_SKIPPED_FILES):
                yield Path(inside, name)


def batch(text: Tensor, size: int, context: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw examples from random places; the same seed gives the same ones.

    Args:
        text: (n,), uint8, n > context.
        size: how many examples.
        context: bytes in an example.
        seed: decides the places.

    Returns:
        Bytes, (size, context), int64, and for each the byte that follows it.
    """
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - context, (size, 1), generator=generator)
    examples = text[starts + torch.arange(context + 1)].long()
    return examples[:, :-1], examples[:, 1:]

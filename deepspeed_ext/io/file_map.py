"""Memory that shows parts of files where they lie: see csrc/aio/file_map.h."""

from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.io._native import native
from deepspeed_ext.io.file import File


def file_map(nbytes: int) -> tuple[Any, Tensor]:
    """Return memory of zeros that parts of files may be shown in, and a tensor of all its bytes.

    The memory goes with the tensor and all views of it.
    """
    made = native().FileMap(nbytes)
    if nbytes == 0:
        return made, torch.empty(0, dtype=torch.uint8, device="cpu")
    return made, torch.frombuffer(made, dtype=torch.uint8)


def scratch_file(folder: str) -> File:
    """Return a file without a name in a folder, which goes when nobody has it or shows it.

    Raises:
        OSError: it cannot be made there.
    """
    made: File = native().File.scratch(folder)
    return made

"""Load an op library: override, packaged file, cache, or compile it now."""

import os
import threading
from pathlib import Path

from .compile import compile_library
from .errors import BuildError
from .registry import OPS
from .sources import digest_of, matches

_LOCK = threading.RLock()
_LOADED: dict[str, Path] = {}


def load(name: str) -> Path:
    """Load the library of the op `name` into this process, once, and return its path."""
    with _LOCK:
        if name not in _LOADED:
            spec = next(spec for spec in OPS if spec.name == name)
            digest = digest_of(spec)
            folder = Path(os.path.expanduser("~/.cache/deepspeed_ext")) / f"{name}-{digest[:16]}"
            library = folder / f"{name}.so"
            if not (library.is_file() and matches(library, digest)):
                library = compile_library(spec, folder)
            import torch

            torch.ops.load_library(library)
            _LOADED[name] = library
        return _LOADED[name]

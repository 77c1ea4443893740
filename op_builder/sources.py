"""Which files an op library is made of, and the digest that ties a library to them."""

import hashlib
import re
from pathlib import Path

from . import toolchain
from .errors import Unavailable
from .spec import OpSpec

ROOT = Path(__file__).resolve().parent.parent  # holds csrc and prebuilt, in the tree and installed
CSRC = ROOT / "csrc"
MARKER = "dsx-source-digest:"

# Any quoted header name counts, not only #include: a macro can name the file to include.
_QUOTED = re.compile(rb'"([^"\n]+\.(?:h|hpp|inl|cuh))"')


def files_of(spec: OpSpec, csrc: Path = CSRC) -> list[Path]:
    """Return the sources of `spec` and every header of ours that they reach, sorted."""
    found: dict[Path, None] = {}
    waiting = [csrc / source for source in spec.sources]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        try:
            text = path.read_bytes()
        except OSError as error:
            raise Unavailable(
                f"source {path} cannot be read ({error.strerror})", "install deepspeed_ext again"
            ) from error
        found[path] = None
        for name in _QUOTED.findall(text):
            for folder in (csrc, path.parent):
                header = folder / name.decode()
                if header.is_file():
                    waiting.append(header)
                    break
    return sorted(found)


def digest_of(spec: OpSpec, csrc: Path = CSRC) -> str:
    """Hash the names and bytes of the library's files, and the Python that a module is for."""
    state = hashlib.sha256()
    if "pybind11" in spec.needs:
        state.update(f"{toolchain.python_abi()}\0".encode())
    for path in files_of(spec, csrc):
        data = path.read_bytes()
        state.update(f"{path.relative_to(csrc).as_posix()}\0{len(data)}\0".encode())
        state.update(data)
    return state.hexdigest()


def matches(library: Path, digest: str) -> bool:
    """Tell whether the file `library` was built from the sources with this digest."""
    return (MARKER + digest).encode() in library.read_bytes()

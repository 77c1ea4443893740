"""The library that an op needs on this machine: what it is made of, and what it is called."""

import functools
import hashlib
import importlib.metadata
import json
import re
from dataclasses import dataclass
from pathlib import Path

from . import cuda, toolchain
from .errors import Unavailable
from .spec import OpSpec

ROOT = Path(__file__).resolve().parent.parent  # holds csrc and prebuilt, in the tree and installed
CSRC = ROOT / "csrc"

# Any quoted header name counts, not only #include: a macro can name the file to include.
_QUOTED = re.compile(rb'"([^"\n]+\.(?:h|hpp|inl|cuh))"')


@dataclass(frozen=True)
class Wanted:
    """Made once, when a load or a build begins, and passed on.

    Args:
        spec: the op.
        csrc: the folder of its sources.
        digest: of those sources, as they were then.
    """

    spec: OpSpec
    csrc: Path
    digest: str

    @classmethod
    def of(cls, spec: OpSpec, csrc: Path = CSRC) -> "Wanted":
        """Read the sources of an op; raise Unavailable where one is missing."""
        return cls(spec, csrc, digest_of(spec, csrc))

    @property
    def file(self) -> str:
        """The library's name."""
        return f"{self.spec.name}.so"

    @property
    def stamp(self) -> str:
        """What is compiled into the library, and tells which sources it was built from."""
        return f"dsx-source-digest:{self.digest}"

    def fits(self, library: Path) -> bool:
        """Tell whether the file `library` was built from these sources."""
        return self.stamp.encode() in library.read_bytes()

    @functools.cached_property  # what comes with the package, or is named, is found without it
    def entry(self) -> str:
        """The folder in a cache, `<op>-<key>`; the key hashes all that the library depends on.

        No process is started for it. The compiler's version is not in it, so that an image built
        elsewhere still loads where there is no compiler.
        """
        spec = self.spec
        parts = {
            "sources": self.digest,
            "flags": [toolchain.compile_flags(spec, source) for source in spec.sources],
            "link": toolchain.link_flags(spec),
            "nvcc": toolchain.nvcc_flags(spec) if "cuda" in spec.needs else None,
            "cuda": _cuda_key() if "cuda" in spec.needs else None,
            "platform": toolchain.platform_key(),
            "package": _package_version(),
        }
        return f"{spec.name}-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]}"


def _cuda_key() -> list[str]:
    """Return toolkit version and targets; where there is no toolkit, the version torch wants."""
    try:
        version = cuda.toolkit_version(cuda.toolkit())
    except Unavailable:
        version = toolchain.torch_cuda() or "none"
    return [version, *(str(target) for target in cuda.requested_targets().targets)]


def _package_version() -> str:
    try:
        return importlib.metadata.version("deepspeed_ext")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def files_of(spec: OpSpec, csrc: Path) -> dict[Path, bytes]:
    """Read the sources of `spec` and every header of ours that they reach, in sorted order."""
    found: dict[Path, bytes] = {}
    waiting = [csrc / source for source in spec.sources]
    defined = " ".join(value for _, value in spec.defines)
    waiting += [csrc / name.decode() for name in _QUOTED.findall(defined.encode())]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        try:
            found[path] = path.read_bytes()
        except OSError as error:
            raise Unavailable(
                f"source {path} cannot be read ({error.strerror})", "install deepspeed_ext again"
            ) from error
        for name in _QUOTED.findall(found[path]):
            for folder in (csrc, path.parent):
                header = folder / name.decode()
                if header.is_file():
                    waiting.append(header)
                    break
    return {path: found[path] for path in sorted(found)}


def digest_of(spec: OpSpec, csrc: Path) -> str:
    """Hash the library's files, names and bytes, its macros, and a module's Python."""
    state = hashlib.sha256()
    if "pybind11" in spec.needs:
        state.update(f"{toolchain.python_abi()}\0".encode())
    for name, value in spec.defines:
        state.update(f"{name}={value}\0".encode())
    for path, data in files_of(spec, csrc).items():
        state.update(f"{path.relative_to(csrc).as_posix()}\0{len(data)}\0".encode())
        state.update(data)
    return state.hexdigest()

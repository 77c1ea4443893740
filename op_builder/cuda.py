"""The CUDA toolkit and the targets that kernels are compiled for, without a CUDA context."""

import ctypes
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from .errors import Unavailable
from .toolchain import torch_cuda

DEFAULT_TARGETS = "80;90;100+PTX"
_VARIABLE = "TORCH_CUDA_ARCH_LIST"
_USUAL_PLACE = Path("/usr/local/cuda")


@dataclass(frozen=True, order=True)
class Target:
    """A compute capability to compile for, such as 90, with "a" or "f" for its special features."""

    number: int
    suffix: str = ""
    ptx: bool = False

    def gencode(self) -> list[str]:
        """Return the nvcc flags: machine code, and PTX when later devices shall run it too.

        Machine code for 9.0 runs on 9.0 alone, with special features or without, so it has them.
        """
        arch = f"{self.number}{self.suffix}"
        machine = "90a" if arch == "90" else arch
        flags = [f"-gencode=arch=compute_{machine},code=sm_{machine}"]
        return [*flags, f"-gencode=arch=compute_{arch},code=compute_{arch}"] if self.ptx else flags

    def __str__(self) -> str:
        return f"{self.number // 10}.{self.number % 10}{self.suffix}{'+PTX' * self.ptx}"


@dataclass(frozen=True)
class Request:
    """The targets somebody wants, and who: the environment by name, the devices, or the default."""

    targets: tuple[Target, ...]
    origin: str

    @property
    def by_name(self) -> bool:
        """Tell whether the user listed the targets, so that none may be dropped."""
        return self.origin == _VARIABLE


def parse_targets(text: str, origin: str = _VARIABLE) -> tuple[Target, ...]:
    """Read a list such as "8.0;9.0a 10.0+PTX": major, minor, suffix; the dot may be left out."""
    found = []
    for word in text.replace(";", " ").split():
        match = re.fullmatch(r"(\d{1,2})\.?(\d)([af]?)(\+PTX)?", word)
        if match is None:
            raise Unavailable(
                f"{origin} has {word!r}, expected targets such as 8.0, 9.0a, 10.0f or 12.0+PTX",
                f"correct or unset {origin}",
            )
        major, minor, suffix, ptx = match.groups()
        found.append(Target(int(major + minor), suffix, ptx is not None))
    return tuple(sorted(set(found)))


def requested_targets() -> Request:
    """Return what TORCH_CUDA_ARCH_LIST asks for, else the machine's devices, else a default."""
    text = os.environ.get(_VARIABLE, "")
    if text.replace(";", " ").strip():
        return Request(parse_targets(text), _VARIABLE)
    devices = device_capabilities()
    if devices:
        return Request(tuple(Target(number) for number in devices), "the devices of this machine")
    return Request(parse_targets(DEFAULT_TARGETS), "the default")


def device_capabilities() -> list[int]:
    """Return the distinct capabilities of all GPUs, such as [80, 90], asking the driver's NVML.

    All of them, whatever CUDA_VISIBLE_DEVICES says: ranks that see one device each then agree.
    """
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() != 0:
            return []
    except (OSError, AttributeError):
        return []
    found = set()
    count = ctypes.c_uint(0)
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    for index in range(count.value):
        device, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) != 0:
            continue
        if (
            nvml.nvmlDeviceGetCudaComputeCapability(
                device, ctypes.byref(major), ctypes.byref(minor)
            )
            == 0
        ):
            found.add(10 * major.value + minor.value)
    nvml.nvmlShutdown()
    return sorted(found)


def nvcc() -> Path:
    """Return the CUDA compiler: of CUDA_HOME, on PATH, or in the usual place."""
    home = os.environ.get("CUDA_HOME", "")
    if home:
        path = Path(home) / "bin" / "nvcc"
        if os.access(path, os.X_OK):
            return path
        raise Unavailable(
            f"CUDA_HOME is {home}, which has no bin/nvcc",
            "set CUDA_HOME to the folder of a CUDA toolkit or unset it",
        )
    found = shutil.which("nvcc")
    if found is not None:
        return Path(found)
    if os.access(_USUAL_PLACE / "bin" / "nvcc", os.X_OK):
        return _USUAL_PLACE / "bin" / "nvcc"
    raise Unavailable(
        f"there is no CUDA compiler (no CUDA_HOME, no nvcc on PATH or in {_USUAL_PLACE})",
        "install a CUDA toolkit and set CUDA_HOME to its folder",
    )


def toolkit() -> Path:
    """Return the folder of the toolkit; nvcc itself may be a wrapper script outside of it."""
    compiler = nvcc()
    for root in (compiler.parent.parent, compiler.resolve().parent.parent, _USUAL_PLACE):
        if (root / "include" / "cuda_runtime_api.h").is_file():
            return root
    raise Unavailable(
        f"{compiler} has no toolkit around it (no include/cuda_runtime_api.h)",
        "set CUDA_HOME to the folder of a CUDA toolkit",
    )


def toolkit_version(root: Path) -> str:
    """Read the version of a toolkit, such as "13.0", from its header."""
    text = (root / "include" / "cuda_runtime_api.h").read_text(errors="replace")
    match = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", text)
    if match is None:
        raise Unavailable(f"{root} states no CUDART_VERSION", "install the CUDA toolkit again")
    return f"{int(match[1]) // 1000}.{int(match[1]) % 1000 // 10}"


def library_folders(root: Path) -> list[Path]:
    """Return the folders of the toolkit that may hold libcudart."""
    folders = [root / "lib64", root / "lib", *sorted((root / "targets").glob("*/lib"))]
    return [folder for folder in folders if folder.is_dir()]


def check_version() -> str:
    """Return the toolkit's version; raise when torch was built with another major one."""
    version = toolkit_version(toolkit())
    torch = torch_cuda()
    if torch is not None and torch.split(".")[0] != version.split(".")[0]:
        raise Unavailable(
            f"the CUDA toolkit in {toolkit()} is {version}, but torch was built with CUDA {torch}",
            f"install a CUDA {torch.split('.')[0]} toolkit and set CUDA_HOME to its folder",
        )
    return version


def known_numbers(compiler: Path) -> list[int]:
    """Ask nvcc which capabilities it can compile for."""
    command = [str(compiler), "--list-gpu-arch"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    numbers = sorted(int(number) for number in re.findall(r"compute_(\d+)\b", done.stdout))
    if not numbers:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise Unavailable(
            f"{compiler} does not run ({said[0] if said else f'exit status {done.returncode}'})",
            "install the CUDA toolkit again or set CUDA_HOME to another one",
        )
    return numbers


def clamp(request: Request, known: list[int]) -> tuple[tuple[Target, ...], list[str]]:
    """Drop the targets that nvcc does not know, with a note for each.

    Raises when one was asked for by name or none is left. When a newer one is dropped, PTX of the
    newest that nvcc knows takes its place: the driver can compile that for a later device.
    """
    kept = {target for target in request.targets if target.number in known}
    notes = []
    for target in sorted(set(request.targets) - kept):
        names = f"{min(known) / 10:.1f} to {max(known) / 10:.1f}"
        if request.by_name:
            raise Unavailable(
                f"{request.origin} names {target}, which this nvcc does not know (only {names})",
                f"take it out of {request.origin} or install another CUDA toolkit",
            )
        notes.append(f"target {target} of {request.origin} dropped: this nvcc knows {names}")
        below = [number for number in known if number < target.number]
        if below:
            kept -= {Target(max(below))}
            kept.add(Target(max(below), ptx=True))
    if not kept:
        raise Unavailable(
            f"{request.origin} have no target that this nvcc knows ({notes[-1]})",
            "install a CUDA toolkit for these devices and set CUDA_HOME to its folder",
        )
    return tuple(sorted(kept)), notes

"""Compile one op library with ninja: the only place that writes a ninja file or starts a compiler."""

import json
import re
import shlex
import shutil
import subprocess
import time
from pathlib import Path

from . import cuda, toolchain
from .errors import BuildError, Unavailable
from .sources import CSRC, MARKER, digest_of
from .spec import OpSpec

_FIRST_ERROR = re.compile(
    r"\berror\b|\bfatal\b|undefined reference|cannot find|No space left|Killed|not found", re.I
)
_KNOWN_CAUSES = (  # what a compiler says, and what then helps
    (r"No space left|quota exceeded", "free some space or set DS_EXT_CACHE to another folder"),
    (r"Killed|out of memory|Cannot allocate", "free some memory or set MAX_JOBS=1"),
    (r"c\+\+20|unrecognized command|concept", "install a C++20 compiler and set CXX to it"),
    (r"cannot find -lcudart", "install the CUDA runtime library, or set CUDA_HOME"),
)


def compile_library(spec: OpSpec, build_dir: Path, csrc: Path = CSRC) -> Path:
    """Compile `spec` from nothing in `build_dir` and return the library's path there.

    Leaves build.log, and build.json with what compiled it. Raises BuildError.
    """
    build_dir.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(build_dir / "obj", ignore_errors=True)
    library = build_dir / f"{spec.name}.so"
    library.unlink(missing_ok=True)
    log = build_dir / "build.log"
    try:
        digest = digest_of(spec, csrc)
        recipe, record = _recipe(spec, csrc, library.name)
        ninja, jobs = toolchain.ninja(), toolchain.jobs()
    except Unavailable as missing:
        raise BuildError(spec.name, missing.cause, missing.fix) from missing
    (build_dir / "digest.cpp").write_text(
        f'namespace {{ [[gnu::used]] const char digest[] = "{MARKER}{digest}"; }}\n'
    )
    (build_dir / "build.ninja").write_text(recipe)
    started = time.monotonic()
    with log.open("w") as output:
        done = subprocess.run(
            [ninja, f"-j{jobs}", library.name],
            cwd=build_dir,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    if done.returncode != 0:
        cause = first_error(log.read_text(errors="replace")) or (
            f"ninja ended with status {done.returncode} and no message"
        )
        raise BuildError(spec.name, cause, _fix_for(spec, cause), log=log)
    record["seconds"] = f"{time.monotonic() - started:.1f}"
    (build_dir / "build.json").write_text(json.dumps(record, indent=1) + "\n")
    return library


def _recipe(spec: OpSpec, csrc: Path, library: str) -> tuple[str, dict[str, str]]:
    """Return the text of the ninja file and a record of what it compiles with."""
    cxx = toolchain.cxx()
    record = {"op": spec.name, "cxx": _version(cxx)}
    places, folders = [f"-I{csrc}"], []
    nvcc: list[str] = []
    if "torch" in spec.needs:
        root = toolchain.torch_root()
        places += ["-isystem", f"{root}/include"]
        folders.append(root / "lib")
    if "cuda" in spec.needs:
        record["cuda"] = cuda.check_version()
        targets, notes = cuda.clamp(cuda.requested_targets(), cuda.known_numbers(cuda.nvcc()))
        record["targets"] = " ".join(str(target) for target in targets)
        record["notes"] = "\n".join(notes)
        nvcc = [str(cuda.nvcc()), *toolchain.nvcc_flags(spec), f"-ccbin={_program(cxx)}"]
        nvcc += [flag for target in targets for flag in target.gencode()]
        places += ["-isystem", f"{cuda.toolkit()}/include"]
        folders += cuda.library_folders(cuda.toolkit())
    lines = [
        f"rule cxx\n command = {_command([*cxx, '$flags', *places])} -c $in -o $out",
        f"rule nvcc\n command = {_command([*nvcc, *places])} -c $in -o $out",
        f"rule link\n command = {_command([*cxx, '-shared'])} $in -o $out "
        + _command([*(f"-L{folder}" for folder in folders), *toolchain.link_flags(spec)]),
    ]
    objects = []
    for source in (*spec.sources, "digest.cpp"):
        objects.append(_path(f"obj/{source}.o"))
        path = source if source == "digest.cpp" else str(csrc / source)
        rule = "nvcc" if source.endswith(".cu") else "cxx"
        lines.append(f"build {objects[-1]}: {rule} {_path(path)}")
        lines.append(f" flags = {_command(toolchain.compile_flags(spec, source))}")
    lines.append(f"build {_path(library)}: link {' '.join(objects)}\n")
    return "\n".join(lines), record


def _command(words: list[str]) -> str:
    """Quote words for the shell and for ninja; the variable $flags stays as it is."""
    return " ".join(
        word if word == "$flags" else shlex.quote(word).replace("$", "$$") for word in words
    )


def _path(path: str) -> str:
    """Quote a path for a ninja build line."""
    return re.sub(r"([$ :])", r"$\1", path)


def _program(cxx: list[str]) -> str:
    """Return the compiler itself of a command such as `ccache g++ -m64`."""
    words = [word for word in cxx if not word.startswith("-")]
    return words[1] if len(words) > 1 and Path(words[0]).name in ("ccache", "sccache") else words[0]


def _version(command: list[str]) -> str:
    """Return the first line that `command --version` prints."""
    done = subprocess.run([*command, "--version"], capture_output=True, text=True)
    return (done.stdout.splitlines() or ["unknown"])[0]


def first_error(log: str) -> str:
    """Return the first line of ninja's output that a compiler or linker meant as an error."""
    after_failed = False
    for line in log.splitlines():
        if not after_failed and not line.startswith(("FAILED:", "[")) and _FIRST_ERROR.search(line):
            return line.strip()
        after_failed = line.startswith("FAILED:")  # the next line is the command
    return ""


def _fix_for(spec: OpSpec, cause: str) -> str:
    for pattern, fix in _KNOWN_CAUSES:
        if re.search(pattern, cause, re.I):
            return fix
    return f"mend it, then run: python -m deepspeed_ext.op_builder build {spec.name}"

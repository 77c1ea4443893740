"""Compile one op library in a folder: nothing else writes ninja files or starts compilers."""

import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from . import cuda, toolchain
from .errors import Unavailable
from .log import logger
from .spec import OpSpec
from .wanted import Wanted, digest_of

_FIRST_ERROR = re.compile(  # how g++, clang++, nvcc, ptxas, ld, sh and ninja begin an error
    r"(?:^|[:)] )(?:\w+ )?error *(?:#\S+)?: |\bfatal *:|undefined reference to|: cannot find "
    r"|: No space left|[Qq]uota exceeded|: not found$|: command not found$|^ninja: fatal"
)
_KNOWN_CAUSES = (  # what a compiler says, and what then helps
    (
        r"No space left|quota exceeded",
        "free some space, or set DS_EXT_CACHE and TMPDIR to folders that have some",
    ),
    (r"Could not open output file '.*/tmpxft_", "set TMPDIR to a folder that can be written"),
    (r"Killed|out of memory|Cannot allocate memory", "free some memory or set MAX_JOBS=1"),
    (r"nvcc fatal.*c\+\+20", "install CUDA 12 or newer and set CUDA_HOME to its folder"),
    (
        r"unsupported (GNU|clang) version",
        "set CXX to a compiler that this CUDA toolkit supports, or CUDA_HOME to a newer toolkit",
    ),
    (
        r"c\+\+20|unrecognized command|unknown argument",
        "install a newer compiler, one with C++20, and set CXX to it",
    ),
    (r"cannot find -lcudart", "install the CUDA runtime library, or set CUDA_HOME"),
)


def compile_library(wanted: Wanted, build_dir: Path) -> Path:
    """Compile a library from nothing in `build_dir` and return its path there.

    Leaves build.log, and build.json with what compiled it. Raises Unavailable.
    """
    build_dir.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(build_dir / "obj", ignore_errors=True)
    library = build_dir / wanted.file
    library.unlink(missing_ok=True)
    log = build_dir / "build.log"
    log.unlink(missing_ok=True)
    started = time.monotonic()
    try:
        recipe, record = _recipe(wanted)
        (build_dir / "build.ninja").write_text(recipe)
        (build_dir / "digest.cpp").write_text(
            f'namespace {{ [[gnu::used]] const char digest[] = "{wanted.stamp}"; }}\n'
        )
        _run_ninja(wanted.spec, build_dir, log)
        if not library.is_file():
            raise Unavailable(
                f"the compiler {shlex.join(toolchain.cxx())} ended well but wrote no library",
                "set CXX to a C++20 compiler",
            )
        if digest_of(wanted.spec, wanted.csrc) != wanted.digest:
            raise Unavailable("its sources changed while they were compiled", "try again")
    except Unavailable as failed:
        failed.log = log if log.is_file() else None
        raise
    record["seconds"] = f"{time.monotonic() - started:.1f}"
    (build_dir / "build.json").write_text(json.dumps(record, indent=1) + "\n")
    return library


def _run_ninja(spec: OpSpec, build_dir: Path, log: Path) -> None:
    command = [str(toolchain.ninja()), f"-j{toolchain.jobs()}"]
    environment = {**os.environ, "LC_ALL": "C"}  # first_error reads English
    with log.open("w") as output:
        try:
            done = subprocess.run(
                command,
                check=False,
                cwd=build_dir,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        except OSError as error:
            if error.filename == str(build_dir):
                raise  # that folder is gone; with ninja nothing is wrong
            raise Unavailable(
                f"{command[0]} does not run ({error.strerror})",
                f"run: {sys.executable} -m pip install --force-reinstall ninja",
            ) from error
    if done.returncode != 0:
        text = log.read_text(errors="replace")
        cause = first_error(text)
        if cause:
            raise Unavailable(cause, _fix_for(spec, cause))
        raise Unavailable(
            f"{_failed_program(text) or command[0]} failed and said no error (ninja ended with"
            f" status {done.returncode})",
            "set CXX and CUDA_HOME to compilers that work, or unset them",
        )


def _recipe(wanted: Wanted) -> tuple[str, dict[str, str]]:
    """Return the text of the ninja file and a record of what it compiles with."""
    spec, csrc = wanted.spec, wanted.csrc
    cxx = toolchain.cxx()
    record = {"op": spec.name, "cxx": _first_line([*cxx, "--version"])}
    places, folders = [f"-I{csrc}"], []
    nvcc: list[str] = []
    if "torch" in spec.needs:
        root = toolchain.torch_root()
        places += ["-isystem", f"{root}/include"]
        folders.append(root / "lib")
    if "pybind11" in spec.needs:
        record["python"] = toolchain.python_abi()
        for headers in (toolchain.python_include(), toolchain.pybind11_include()):
            places += ["-isystem", str(headers)]
    if "cuda" in spec.needs:
        record["cuda"] = cuda.check_version()
        targets, notes = cuda.clamp(cuda.requested_targets(), cuda.known_numbers(cuda.nvcc()))
        record["targets"] = " ".join(str(target) for target in targets)
        record["notes"] = "\n".join(notes)
        for note in notes:
            logger.info("%s: %s", spec.name, note)
        nvcc = [str(cuda.nvcc()), *toolchain.nvcc_flags(spec), f"-ccbin={host_compiler(cxx)}"]
        nvcc += [flag for target in targets for flag in target.gencode()]
        places += ["-isystem", f"{cuda.toolkit()}/include"]
        folders += cuda.library_folders(cuda.toolkit())
    runtime = _shared_libstdcxx(cxx)
    lines = [
        f"rule cxx\n command = {_command([*cxx, '$flags', *places])} -c $in -o $out",
        f"rule nvcc\n command = {_command([*nvcc, *places])} -c $in -o $out",
        f"rule link\n command = {_command([*cxx, '-shared'])} $in -o $out "
        + _command([*(f"-L{folder}" for folder in folders), *toolchain.link_flags(spec), *runtime]),
    ]
    objects = []
    for source in (*spec.sources, "digest.cpp"):
        objects.append(_path(f"obj/{source}.o"))
        path = source if source == "digest.cpp" else str(csrc / source)
        rule = "nvcc" if source.endswith(".cu") else "cxx"
        lines.append(f"build {objects[-1]}: {rule} {_path(path)}")
        lines.append(f" flags = {_command(toolchain.compile_flags(spec, source))}")
    lines.append(f"build {_path(wanted.file)}: link {' '.join(objects)}\n")
    return "\n".join(lines), record


def _command(words: list[str]) -> str:
    """Quote words for the shell and for ninja; the variable $flags stays as it is."""
    return " ".join(
        word if word == "$flags" else shlex.quote(word).replace("$", "$$") for word in words
    )


def _path(path: str) -> str:
    """Quote a path for a ninja build line."""
    return re.sub(r"([$ :])", r"$\1", path)


def host_compiler(cxx: list[str]) -> str:
    """Return the compiler itself of a command such as `ccache g++ -m64`."""
    words = [word for word in cxx if not word.startswith("-")]
    return words[1] if len(words) > 1 and Path(words[0]).name in ("ccache", "sccache") else words[0]


def _shared_libstdcxx(cxx: list[str]) -> list[str]:
    """Return the C++ runtime to link, so that one which the compiler would link statically is not.

    With a runtime of its own a library cannot throw: torch ends the process instead of catching.
    """
    found = _first_line([*cxx, "-print-file-name=libstdc++.so.6"])
    return [found] if Path(found).is_absolute() else []


def _first_line(command: list[str]) -> str:
    """Return the first line that a compiler prints."""
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    except OSError as error:
        raise Unavailable(
            f"the compiler {command[0]} does not run ({error.strerror})",
            "set CXX to a C++20 compiler that does",
        ) from error
    return (done.stdout.splitlines() or ["unknown"])[0]


def first_error(log: str) -> str:
    """Return the first line of ninja's output that a compiler or linker meant as an error."""
    after_failed = False
    for line in log.splitlines():
        is_command = after_failed or re.match(r"\[\d+/\d+\] ", line)
        if not is_command and "warning" not in line and _FIRST_ERROR.search(line):
            return line.strip()
        after_failed = line.startswith("FAILED:")  # the next line repeats the command
    return ""


def _failed_program(log: str) -> str:
    """Return the program of the command that ninja says has failed."""
    lines = log.splitlines()
    for line, command in itertools.pairwise(lines):
        if line.startswith("FAILED:"):
            return shlex.split(command)[0]
    return ""


def _fix_for(spec: OpSpec, cause: str) -> str:
    for pattern, fix in _KNOWN_CAUSES:
        if re.search(pattern, cause, re.IGNORECASE):
            return fix
    return f"mend it, then run: python -m deepspeed_ext.op_builder build {spec.name}"

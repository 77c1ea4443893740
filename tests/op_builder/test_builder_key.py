"""The key of a library in the cache: what changes it, one thing at a time, and what must not."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sysconfig
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from deepspeed_ext.op_builder import OpSpec, cuda, toolchain
from deepspeed_ext.op_builder.errors import Unavailable
from deepspeed_ext.op_builder.wanted import Wanted

if TYPE_CHECKING:
    from conftest import Tiny

Patch = pytest.MonkeyPatch
Change = Callable[[Patch, "Tiny"], None]


def rows(tiny: Tiny) -> dict[str, OpSpec]:
    """Return ops of each kind, of the sources of the tiny one."""
    cpu = replace(tiny.spec, sources=("tiny/tiny_ops.cpp", "tiny/tiny.cpp"), needs=("torch",))
    return {
        "cpu": cpu,
        "cuda": replace(cpu, sources=(*cpu.sources, "tiny/tiny.cu"), needs=("torch", "cuda")),
        "module": replace(cpu, needs=("pybind11",)),
    }


@pytest.fixture
def made(tiny: Tiny, monkeypatch: Patch) -> Tiny:
    """Give the tiny op more sources, and this machine a toolkit and targets."""
    for name in ("tiny_ops.cpp", "tiny.cu"):
        (tiny.csrc / "tiny" / name).write_text('#include "tiny/tiny.h"\n')
    (tiny.csrc / "tiny" / "unused.h").write_text("\n")
    monkeypatch.setattr(cuda, "toolkit", Path)
    monkeypatch.setattr(cuda, "toolkit_version", lambda root: "13.0")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0 10.0")
    return tiny


def keys(tiny: Tiny) -> dict[str, str]:
    return {kind: Wanted.of(spec, tiny.csrc).entry for kind, spec in rows(tiny).items()}


def edit(name: str, text: str = "// edited\n") -> Change:
    def change(patch: Patch, tiny: Tiny) -> None:
        path = tiny.csrc / "tiny" / name
        path.write_text(path.read_text() + text)

    return change


def answer(module: object, name: str, value: object) -> Change:
    """Have a function return this, whatever it is called with."""
    return lambda patch, tiny: patch.setattr(module, name, lambda *_: value)


def constant(name: str, value: Callable[[object], object]) -> Change:
    def change(patch: Patch, tiny: Tiny) -> None:
        patch.setattr(toolchain, name, value(getattr(toolchain, name)))

    return change


def variable(name: str, value: str) -> Change:
    return lambda patch, tiny: patch.setenv(name, value)


def rename_a_header(patch: Patch, tiny: Tiny) -> None:
    """What is quoted alike may be found beside the source, or from the root."""
    (tiny.csrc / "tiny" / "tiny").mkdir()
    tiny.header.rename(tiny.csrc / "tiny" / "tiny" / "tiny.h")


def move_a_line_to_the_next_file(patch: Patch, tiny: Tiny) -> None:
    """All bytes of all files, one after the other, are the same as before."""
    following = tiny.csrc / "tiny" / "tiny.inl"
    following.write_text(tiny.header.read_text() + following.read_text())
    tiny.header.write_text("")


def without_a_toolkit(version: str | None) -> Change:
    def missing() -> Path:
        raise Unavailable("there is no CUDA compiler", "install one")

    def change(patch: Patch, tiny: Tiny) -> None:
        patch.setattr(cuda, "toolkit", missing)
        patch.setattr(toolchain, "torch_cuda", lambda: version)

    return change


def on_devices(*numbers: int) -> Change:
    def change(patch: Patch, tiny: Tiny) -> None:
        patch.delenv("TORCH_CUDA_ARCH_LIST")
        patch.setattr(cuda, "device_capabilities", lambda: list(numbers))

    return change


def another_abi(patch: Patch, tiny: Tiny) -> None:
    answers = {"SOABI": "cpython-399-x86_64-linux-gnu"}
    patch.setattr(sysconfig, "get_config_var", answers.get)


ALL = ("cpu", "cuda", "module")
COUNTS: dict[str, tuple[Change, tuple[str, ...]]] = {
    "a source": (edit("tiny.cpp"), ALL),
    "the last source": (edit("tiny.cu"), ("cuda",)),
    "a header": (edit("tiny.h"), ALL),
    "a header that a macro names": (edit("tiny.inl"), ALL),
    "the place of a header": (rename_a_header, ALL),
    "what is in which file": (move_a_line_to_the_next_file, ALL),
    "a flag": (constant("_CXX_FLAGS", lambda flags: (*flags, "-g")), ALL),
    "a flag less": (constant("_CXX_FLAGS", lambda flags: flags[:-1]), ALL),
    "the order of flags": (constant("_CXX_FLAGS", lambda flags: flags[::-1]), ALL),
    "warnings": (variable("DS_EXT_WERROR", "1"), ALL),
    "a flag of nvcc": (answer(toolchain, "nvcc_flags", ["-O3"]), ("cuda",)),
    "a flag of the linker": (answer(toolchain, "link_flags", ["-lm"]), ALL),
    "the ABI target": (constant("_TORCH_TARGET", lambda _: "0x020c000000000000"), ("cpu", "cuda")),
    "the toolkit": (answer(cuda, "toolkit_version", "13.1"), ("cuda",)),
    "no toolkit at all": (without_a_toolkit(None), ("cuda",)),
    "another target": (variable("TORCH_CUDA_ARCH_LIST", "9.0 12.0"), ("cuda",)),
    "one target less": (variable("TORCH_CUDA_ARCH_LIST", "9.0"), ("cuda",)),
    "features of the last target": (variable("TORCH_CUDA_ARCH_LIST", "9.0 10.0a"), ("cuda",)),
    "PTX of the last target": (variable("TORCH_CUDA_ARCH_LIST", "9.0 10.0+PTX"), ("cuda",)),
    "the devices": (on_devices(90, 120), ("cuda",)),
    "the machine": (answer(platform, "machine", "riscv64"), ALL),
    "the C library": (answer(platform, "libc_ver", ("musl", "1.2")), ALL),
    "the C library's version": (
        answer(platform, "libc_ver", (platform.libc_ver()[0], "9.99")),
        ALL,
    ),
    "the package": (answer(importlib.metadata, "version", "99.0"), ALL),
    "the Python ABI": (another_abi, ("module",)),
}


@pytest.mark.parametrize("what", COUNTS)
def test_each_thing_that_a_library_depends_on_changes_its_key(
    made: Tiny, monkeypatch: Patch, what: str
) -> None:
    """And only the keys of libraries that depend on it, so that others are not compiled again."""
    change, kinds = COUNTS[what]
    before = keys(made)
    change(monkeypatch, made)
    after = keys(made)
    assert tuple(kind for kind in before if before[kind] != after[kind]) == kinds


@pytest.mark.parametrize(
    "options",
    [
        {"links": ("m",)},
        {"defines": (("A", "1"),)},
        {"fused_multiply_add": True},
        {"sources": ("tiny/tiny.cu", "tiny/tiny_ops.cpp")},
        {"needs": ("cuda",)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_each_part_of_a_row_changes_its_key(made: Tiny, options: dict[str, object]) -> None:
    row = rows(made)["cuda"]
    one, other = (Wanted.of(r, made.csrc).entry for r in (row, replace(row, **options)))
    assert one != other


def move_the_sources(patch: Patch, tiny: Tiny) -> None:
    away = tiny.csrc.with_name("elsewhere")
    shutil.copytree(tiny.csrc, away)  # with other times
    shutil.rmtree(tiny.csrc)
    away.rename(tiny.csrc)
    for path in tiny.csrc.rglob("*"):
        os.utime(path, (1, 1))


def test_without_a_toolkit_the_one_that_torch_wants_counts(made: Tiny, monkeypatch: Patch) -> None:
    found = [keys(made)["cuda"]]
    for version in ("13.0", "13.2", None):
        without_a_toolkit(version)(monkeypatch, made)
        found.append(keys(made)["cuda"])
    assert found[0] == found[1], "so an image that was built with one serves without"
    assert len(set(found)) == 3


DOES_NOT_COUNT: dict[str, Change] = {
    "when and where the sources were written": move_the_sources,
    "a header that nobody includes": edit("unused.h"),
    "the order of targets": variable("TORCH_CUDA_ARCH_LIST", "10.0;90 9.0"),
    "devices, where targets are named": answer(cuda, "device_capabilities", [120]),
    "the compiler": variable("CXX", "/nowhere/clang++ -m64"),
    "programs": variable("PATH", ""),
    "jobs": variable("MAX_JOBS", "7"),
    "the cache": variable("DS_EXT_CACHE", "/elsewhere"),
    "the home": variable("HOME", "/elsewhere"),
    "the language": variable("LC_ALL", "de_DE.UTF-8"),
    "routes": variable("DS_EXT_JIT", "0"),
}


@pytest.mark.parametrize("what", DOES_NOT_COUNT)
def test_nothing_else_changes_it(made: Tiny, monkeypatch: Patch, what: str) -> None:
    """An image that was built elsewhere loads where there is no compiler."""
    before = keys(made)
    DOES_NOT_COUNT[what](monkeypatch, made)
    assert keys(made) == before


def test_a_check_is_no_part_of_it(made: Tiny) -> None:
    row = rows(made)["cpu"]
    checked = replace(row, self_check="somewhere:else")
    assert Wanted.of(row, made.csrc).entry == Wanted.of(checked, made.csrc).entry

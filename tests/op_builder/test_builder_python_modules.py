"""An op whose library is a Python module: its key, what it takes to build, how it is loaded."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from building import build

from deepspeed_ext.op_builder import (
    BuildError,
    OpSpec,
    aot,
    load,
    load_module,
    loading,
    probe,
    registry,
    toolchain,
)
from deepspeed_ext.op_builder.errors import Unavailable
from deepspeed_ext.op_builder.wanted import Wanted

SOURCE = """
#include <pybind11/pybind11.h>
int answer();
PYBIND11_MODULE(tiny_module, module) { module.def("answer", answer); }
"""
SPEC = OpSpec(
    "tiny_module", "cpu", ("tiny/tiny_bindings.cpp", "tiny/answer.cpp"), needs=("pybind11",)
)
CANNOT_BUILD = probe.why_not(replace(SPEC, sources=()))
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def csrc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("csrc")
    (folder / "tiny").mkdir()
    (folder / "tiny" / "tiny_bindings.cpp").write_text(SOURCE)
    (folder / "tiny" / "answer.cpp").write_text("int answer() { return 42; }\n")
    return folder


@pytest.fixture(scope="module")
def built(csrc: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The module, compiled once for all tests here, with warnings as errors."""
    if CANNOT_BUILD:
        pytest.skip(CANNOT_BUILD[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_EXT_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("XDG_CACHE_HOME", raising=False)
        patch.setenv("DS_EXT_WERROR", "1")
        return build(SPEC, csrc)


@pytest.fixture(autouse=True)
def registered(csrc: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DS_EXT_WERROR", "1")  # as when it was built: it is in the key
    monkeypatch.setattr(registry, "OPS", (SPEC, replace(SPEC, name="other", needs=())))
    monkeypatch.setattr(loading, "CSRC", csrc)
    monkeypatch.setattr(loading, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setattr(loading, "_LOADED", {})
    monkeypatch.setattr(loading, "_MODULES", {})


@pytest.fixture
def packaged(built: Path) -> Path:
    """The module as a wheel brings it."""
    loading.PREBUILT.mkdir()
    path = loading.PREBUILT / built.name
    path.write_bytes(built.read_bytes())
    return path


@pytest.fixture
def no_pybind11(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "pybind11" else find(name)
    )


@pytest.fixture
def no_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "include"))


def test_a_compiled_module_is_found_and_loaded_once(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_EXT_CACHE", str(built.parent.parent))
    monkeypatch.setenv("DS_EXT_JIT", "0")
    with ThreadPoolExecutor(8) as pool:
        modules: list[ModuleType] = list(pool.map(load_module, ["tiny_module"] * 8))
    assert all(module is modules[0] for module in modules)
    assert modules[0].answer() == 42
    assert (modules[0].__name__, modules[0].__file__) == ("tiny_module", str(built))
    assert "tiny_module" not in sys.modules
    assert load("tiny_module") == built


def test_a_module_loads_without_torch_pybind11_headers_and_compiler(
    packaged: Path, csrc: Path, tmp_path: Path
) -> None:
    code = f"""if True:
        import sys, sysconfig
        from pathlib import Path
        sys.path = [{str(ROOT)!r}, *(p for p in sys.path if not p.endswith("-packages"))]
        sysconfig.get_path = lambda name: "/no/such/folder"
        from op_builder import OpSpec, loading, load_module, registry
        assert loading.probe.why_not({SPEC!r}) != []
        registry.OPS, loading.CSRC = ({SPEC!r},), Path({str(csrc)!r})
        loading.PREBUILT = Path({str(packaged.parent)!r})
        print(load_module("tiny_module").answer(), "torch" in sys.modules)
    """
    environment = {**os.environ, "CXX": "no-such-compiler", "DS_EXT_JIT": "0"}
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.stdout.split() == ["42", "False"], done.stderr


@pytest.mark.usefixtures("no_pybind11", "no_headers")
def test_what_is_missing_is_named_with_its_fix(csrc: Path, tmp_path: Path) -> None:
    headers, pybind11 = probe.why_not(SPEC, csrc)[-2:]
    assert headers.startswith(f"there is no Python.h in {tmp_path}/include; install the headers of")
    assert "apt-get install python3." in headers and headers.endswith("-dev")
    assert pybind11.startswith("pybind11 is not installed; run: ")
    assert pybind11.endswith("-m pip install pybind11")
    assert probe.why_not_load(SPEC) == []
    library, reasons = loading.status(SPEC)
    assert library is None and pybind11 in reasons
    with pytest.raises(BuildError, match=r"there is no Python\.h"):
        load_module("tiny_module")


def test_another_python_has_another_key_and_no_use_for_the_library(
    packaged: Path, csrc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_op = replace(SPEC, needs=())
    here, of_torch = Wanted.of(SPEC, csrc), Wanted.of(torch_op, csrc)
    key = here.entry
    assert loading.status(SPEC) == (packaged, [])
    monkeypatch.setattr(toolchain, "python_abi", lambda: "cpython-399-somewhere")
    there = Wanted.of(SPEC, csrc)
    assert there.entry != key and there.digest != here.digest
    assert Wanted.of(torch_op, csrc) == of_torch
    monkeypatch.setenv("DS_EXT_JIT", "0")
    with pytest.raises(BuildError, match=r"built from other sources or for another Python"):
        load_module("tiny_module")
    monkeypatch.setenv("DS_EXT_LIBRARY_TINY_MODULE", str(packaged))
    with pytest.raises(BuildError, match=r"DS_EXT_LIBRARY_TINY_MODULE names .*another Python; "):
        load_module("tiny_module")


def test_an_override_may_have_any_name(
    built: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.so"
    mine.write_bytes(built.read_bytes())
    monkeypatch.setenv("DS_EXT_LIBRARY_TINY_MODULE", str(mine))
    assert load("tiny_module") == mine
    assert load_module("tiny_module").answer() == 42


@pytest.mark.long
def test_a_damaged_module_is_passed_over_or_explained(
    built: Path, csrc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading.PREBUILT.mkdir()
    damaged = loading.PREBUILT / built.name
    damaged.write_bytes(b"\x7fELF " + built.read_bytes()[-200_000:])
    with pytest.raises(Unavailable, match=r"the library cannot be opened \(.*; run: .* clean"):
        loading._open(SPEC, damaged)
    monkeypatch.setenv("DS_EXT_JIT", "0")
    with pytest.raises(BuildError, match="forbids") as caught:
        load_module("tiny_module")
    assert str(damaged) in str(caught.value)
    monkeypatch.setenv("DS_EXT_CACHE", str(built.parent.parent))
    assert load_module("tiny_module").answer() == 42


def test_an_op_that_is_no_module_is_refused() -> None:
    with pytest.raises(BuildError, match=r"other: its library is not a Python module; call load"):
        load_module("other")


def test_a_build_that_does_not_see_pybind11_says_so(
    no_pybind11: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(aot, "OPS", (SPEC,))
    monkeypatch.setenv("DS_BUILD_TINY_MODULE", "1")
    with pytest.raises(BuildError) as caught:
        aot.compile_into_package(tmp_path / "prebuilt", tmp_path / "scratch")
    assert str(caught.value) == (
        "tiny_module: DS_BUILD_TINY_MODULE=1 asks for it, but compiling needs pybind11, which this"
        " build cannot see; run: pip install pybind11, then: pip install --no-build-isolation ., or"
        " set DS_BUILD_TINY_MODULE=0 to install without tiny_module"
    )


TREE = """
import runpy, sys
sys.argv[1:] = ["-q", "bdist_wheel", "--dist-dir", {out!r}]
sys.path.insert(0, ".")
from pathlib import Path
from op_builder import aot, loading, registry, OpSpec
registry.OPS = aot.OPS = ({spec!r},)
aot._compile = lambda spec, scratch: Path({built!r})
runpy.run_path("setup.py", run_name="__main__")
"""


NUMBER = f"cp{sys.version_info.major}{sys.version_info.minor}"
PLATFORM = sysconfig.get_platform().replace("-", "_").replace(".", "_")


@pytest.mark.parametrize(
    ("asked", "spec", "tag"),
    [
        ("1", SPEC, f"{NUMBER}-{NUMBER}-{PLATFORM}"),
        ("1", replace(SPEC, needs=()), f"py3-none-{PLATFORM}"),
        ("0", SPEC, "py3-none-any"),
    ],
    ids=["module", "library", "nothing"],
)
def test_a_wheel_with_a_module_is_for_this_python(
    asked: str, spec: OpSpec, tag: str, built: Path, tmp_path: Path
) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "requirements"):
        (tree / name).symlink_to(ROOT / name)
    for folder in ("csrc", "op_builder"):
        (tree / folder).symlink_to(ROOT / folder)
    (tree / "deepspeed_ext").mkdir()
    init = ROOT / "deepspeed_ext" / "__init__.py"
    (tree / "deepspeed_ext" / "__init__.py").symlink_to(init)
    out = tmp_path / "dist"
    done = subprocess.run(
        [sys.executable, "-c", TREE.format(out=str(out), spec=spec, built=str(built))],
        cwd=tree,
        env={**os.environ, "DS_BUILD_TINY_MODULE": asked},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = out.glob("*.whl")
    assert wheel.name.endswith(f"-{tag}.whl")


def test_the_io_engine_compiles_without_warnings_and_needs_no_other_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if CANNOT_BUILD:
        pytest.skip(CANNOT_BUILD[0])
    monkeypatch.undo()  # back to the cache of all tests, which has it
    code = "from deepspeed_ext.op_builder import load, load_module;"
    code += "print(load_module('async_io').File, load('async_io'), sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kind, library = done.stdout.splitlines()
    assert kind == "<class 'async_io.File'>"
    assert "warning" not in Path(library).with_name("build.log").read_text()
    if shutil.which("readelf") is None:
        pytest.skip("there is no readelf on PATH")
    read = subprocess.run(["readelf", "-d", library], check=True, capture_output=True, text=True)
    needed = set(re.findall(r"\(NEEDED\).*\[(\w+)", read.stdout))
    assert "libstdc" in needed
    assert needed <= {"libstdc", "libm", "libgcc_s", "libc", "libpthread", "ld"}

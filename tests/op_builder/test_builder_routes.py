"""The ways to a library, in their order: override, packaged file, cache, compiler."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from building import build

from deepspeed_ext.op_builder import BuildError, load, loading, registry, toolchain
from deepspeed_ext.op_builder.errors import Unavailable

if TYPE_CHECKING:
    from conftest import Tiny


def test_an_unknown_op() -> None:
    with pytest.raises(
        BuildError, match="no_such_op: there is no such op, expected one of cpu_adam"
    ):
        load("no_such_op")


@pytest.fixture
def registered(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Tiny:
    """Make the tiny op a row of the registry, with no packaged libraries."""
    monkeypatch.setattr(registry, "OPS", (tiny.spec,))
    monkeypatch.setattr(loading, "CSRC", tiny.csrc)
    monkeypatch.setattr(loading, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setattr(loading, "_LOADED", {})
    return tiny


def test_a_miss_with_jit_switched_off(registered: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_EXT_JIT", "0")
    with pytest.raises(BuildError) as caught:
        load("tiny")
    lines = str(caught.value).splitlines()
    assert "DS_EXT_JIT=0" in lines[-1] and "op_builder build tiny" in lines[-1]
    assert any("packaged: " in line for line in lines) and any("cache: " in line for line in lines)
    library = build(registered.spec, registered.csrc)
    assert load("tiny") == library


def test_routes_in_their_order(
    registered: Tiny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened: list[Path] = []
    monkeypatch.setattr(loading, "_open", lambda spec, path: opened.append(path) or path)
    built = load("tiny")
    assert built.is_relative_to(registered.cache)
    packaged = loading.PREBUILT / "tiny.so"
    packaged.parent.mkdir()
    packaged.write_bytes(built.read_bytes())
    override = tmp_path / "mine.so"
    override.write_bytes(built.read_bytes())
    assert load("tiny") == built  # once in a process
    loading._LOADED.clear()
    assert load("tiny") == packaged
    loading._LOADED.clear()
    monkeypatch.setenv("DS_EXT_LIBRARY_TINY", str(override))
    assert load("tiny") == override
    assert opened == [built, packaged, override]


def test_many_threads_open_a_library_once(
    registered: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Path] = []
    monkeypatch.setattr(loading, "_open", lambda spec, path: opened.append(path) or path)
    with ThreadPoolExecutor(8) as pool:
        libraries = set(pool.map(load, ["tiny"] * 8))
    assert libraries == set(opened) and len(opened) == 1


def test_a_packaged_library_that_does_not_open_is_passed_over(
    registered: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_(spec: object, path: Path) -> Path:
        if path.parent == loading.PREBUILT:
            raise Unavailable("GLIBC_9.99 not found", "compile it")
        return path

    monkeypatch.setattr(loading, "_open", open_)
    loading.PREBUILT.mkdir()
    built = build(registered.spec, registered.csrc)
    (loading.PREBUILT / "tiny.so").write_bytes(built.read_bytes())
    assert load("tiny") == built


def test_a_packaged_library_of_other_sources_is_passed_over(
    registered: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading.PREBUILT.mkdir()
    (loading.PREBUILT / "tiny.so").write_bytes(b"dsx-source-digest:" + b"0" * 64)
    monkeypatch.setenv("DS_EXT_JIT", "0")
    with pytest.raises(BuildError, match=r"packaged: .*tiny.so was built from other sources"):
        load("tiny")


@pytest.mark.parametrize("content, cause", [(None, "does not exist"), (b"other", "other sources")])
def test_an_override_must_fit(
    registered: Tiny,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    content: bytes | None,
    cause: str,
) -> None:
    path = tmp_path / "mine.so"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setenv("DS_EXT_LIBRARY_TINY", str(path))
    with pytest.raises(BuildError) as caught:
        load("tiny")
    last = str(caught.value).splitlines()[-1]
    assert str(path) in last and cause in last and "unset DS_EXT_LIBRARY_TINY" in last


@pytest.mark.parametrize(
    "said, fix",
    [
        ("x.so: failed to map segment from shared object", "mounted with exec"),
        ("libcudart.so.12: cannot open shared object file", "set CUDA_HOME"),
        ("version `GLIBCXX_3.4.99' not found", "op_builder clean"),
    ],
)
def test_a_library_that_does_not_open(
    registered: Tiny, monkeypatch: pytest.MonkeyPatch, said: str, fix: str
) -> None:
    import torch

    def refuse(path: Path) -> None:
        raise OSError("Could not load this library") from OSError(said)

    monkeypatch.setattr(torch.ops, "load_library", refuse)
    with pytest.raises(BuildError) as caught:
        load("tiny")
    last = str(caught.value).splitlines()[-1]
    assert said in last and fix in last


def test_a_cuda_op_on_a_cpu_torch_is_refused_before_it_is_compiled(
    registered: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "OPS", (replace(registered.spec, needs=("torch", "cuda")),))
    monkeypatch.setattr(toolchain, "torch_cuda", lambda: None)
    with pytest.raises(BuildError, match="torch that is installed has no CUDA; install a CUDA"):
        load("tiny")
    assert not registered.cache.exists()

"""The cache of compiled libraries: when it builds, when it does not, and where."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from building import build

from deepspeed_ext.op_builder import BuildError, cache, loading, toolchain
from deepspeed_ext.op_builder.wanted import digest_of, files_of

if TYPE_CHECKING:
    from conftest import Tiny

Count = Callable[[], int]
Warnings = Callable[[], list[str]]


def answer(library: Path) -> int:
    function: Callable[[], int] = ctypes.CDLL(str(library)).tiny_answer
    return function()


def test_an_untouched_tree_is_compiled_once(tiny: Tiny, counting_compiler: Count) -> None:
    library = build(tiny.spec, tiny.csrc)
    assert library == build(tiny.spec, tiny.csrc)
    assert library.is_relative_to(tiny.cache)
    assert counting_compiler() == 1
    assert answer(library) == 42


@pytest.mark.parametrize("name", ["tiny.h", "tiny.inl", "tiny.cpp"])
def test_an_edit_of_any_file_compiles_again(
    tiny: Tiny, counting_compiler: Count, name: str
) -> None:
    first = build(tiny.spec, tiny.csrc)
    path = tiny.csrc / "tiny" / name
    path.write_text(path.read_text().replace("40", "50").replace("= 2", "= 3") + "\n")
    second = build(tiny.spec, tiny.csrc)
    assert second != first and counting_compiler() == 2
    assert answer(second) == {"tiny.h": 52, "tiny.inl": 43, "tiny.cpp": 42}[name]


def test_the_digest_covers_what_a_macro_includes_and_what_headers_include(tiny: Tiny) -> None:
    tiny.header.write_text('#include "near.h"\nconstexpr int kHeader = 40;\n')
    (tiny.csrc / "tiny" / "near.h").write_text("\n")
    (tiny.csrc / "tiny" / "unused.h").write_text("\n")
    names = [path.name for path in files_of(tiny.spec, tiny.csrc)]
    assert sorted(names) == ["near.h", "tiny.cpp", "tiny.h", "tiny.inl"]


def test_one_source_serves_rows_that_define_different_macros(tiny: Tiny) -> None:
    """What a macro names is compiled, and is part of the digest, as the macro is."""
    tiny.source.write_text(tiny.source.read_text() + "#include WHICH\n")
    rows = []
    for name in ("one", "two"):
        (tiny.csrc / "tiny" / f"{name}.h").write_text("\n")
        rows.append(replace(tiny.spec, defines=(("WHICH", f'"tiny/{name}.h"'),)))
    rows.append(replace(rows[0], defines=(*rows[0].defines, ("MORE", "1"))))
    assert [path.name for path in files_of(rows[1], tiny.csrc) if path.suffix == ".h"] == [
        "tiny.h",
        "two.h",
    ]
    assert len({digest_of(row, tiny.csrc) for row in rows}) == 3
    assert len({build(row, tiny.csrc) for row in rows}) == 3
    before = digest_of(rows[0], tiny.csrc)
    (tiny.csrc / "tiny" / "one.h").write_text("constexpr int kOne = 1;\n")
    assert digest_of(rows[0], tiny.csrc) != before
    assert "-DMORE=1" in toolchain.nvcc_flags(rows[2])


def test_finding_a_library_starts_no_process_and_needs_no_compiler(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = build(tiny.spec, tiny.csrc)

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a process was started")

    for name in ("run", "Popen"):
        monkeypatch.setattr(subprocess, name, refuse)
    monkeypatch.setattr(os, "system", refuse)
    monkeypatch.setenv("PATH", "")
    assert list(loading.ready(tiny.wanted)) == [library]


def test_a_library_of_other_sources_is_not_taken(tiny: Tiny, counting_compiler: Count) -> None:
    library = build(tiny.spec, tiny.csrc)
    data = library.read_bytes()
    digest = tiny.wanted.digest.encode()
    assert data.count(digest) == 1
    library.write_bytes(data.replace(digest, b"0" * 64))
    routes: list[str] = []
    assert list(loading.ready(tiny.wanted, routes)) == []
    assert "was built from other sources" in routes[-1]
    assert tiny.wanted.fits(build(tiny.spec, tiny.csrc))
    assert counting_compiler() == 2


def test_a_damaged_library_is_replaced(tiny: Tiny, counting_compiler: Count) -> None:
    library = build(tiny.spec, tiny.csrc)
    library.write_bytes(b"")
    assert answer(build(tiny.spec, tiny.csrc)) == 42
    assert counting_compiler() == 2


def test_sources_that_change_while_they_are_compiled_give_no_library(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wrapper = tmp_path / "editing-c++"
    wrapper.write_text(f"#!/bin/sh\necho >> '{tiny.header}'\nexec g++ \"$@\"\n")
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    with pytest.raises(BuildError, match="changed while they were compiled"):
        build(tiny.spec, tiny.csrc)
    assert [path.suffix for path in tiny.cache.iterdir() if path.is_dir()] == [".failed"]


def test_nothing_but_the_library_and_its_records_stays(tiny: Tiny) -> None:
    library = build(tiny.spec, tiny.csrc)
    names = sorted(path.name for path in library.parent.iterdir())
    assert names == ["build.json", "build.log", "tiny.so"]
    assert sorted(path.name for path in tiny.cache.iterdir()) == [library.parent.name, "tiny.lock"]


def test_default_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache.configured_root() == tmp_path / "cache"
    monkeypatch.delenv("DS_EXT_CACHE")
    assert cache.configured_root() == tmp_path / "home" / ".cache" / "deepspeed_ext"
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache.configured_root() == Path("/elsewhere/deepspeed_ext")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache.configured_root() == tmp_path / "home" / ".cache" / "deepspeed_ext"
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # no HOME, unknown user
    assert cache.configured_root() is None


def below_a_file(path: Path) -> Path:
    """Return a folder that cannot be made, even by root."""
    path.write_text("a file")
    return path / "cache"


def test_an_unwritable_cache_falls_back_with_one_warning(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, warnings_logged: Warnings
) -> None:
    monkeypatch.setenv("DS_EXT_CACHE", str(below_a_file(tmp_path / "file")))
    library = build(tiny.spec, tiny.csrc)
    assert build(tiny.spec, tiny.csrc) == library
    assert library.is_relative_to(tmp_path / "temporary")
    assert list(loading.ready(tiny.wanted)) == [library]
    assert cache.private_root().stat().st_mode & 0o777 == 0o700
    (warning,) = warnings_logged()
    assert "Not a directory" in warning and "set DS_EXT_CACHE" in warning


def test_no_home_falls_back(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, warnings_logged: Warnings
) -> None:
    monkeypatch.delenv("DS_EXT_CACHE")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert build(tiny.spec, tiny.csrc).is_relative_to(tmp_path / "temporary")
    assert len(warnings_logged()) == 1 and "no home folder" in warnings_logged()[0]


@pytest.mark.parametrize(
    "options, why", [("ro", "Read-only"), ("noexec", "noexec"), ("size=1m", "MiB free")]
)
def test_a_folder_that_cannot_serve_falls_back(
    tiny: Tiny,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    warnings_logged: Warnings,
    options: str,
    why: str,
) -> None:
    folder = tmp_path / "mounted"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"mode=755,{options}", "none", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("this user may not mount a file system")
    try:
        monkeypatch.setenv("DS_EXT_CACHE", str(folder))
        assert build(tiny.spec, tiny.csrc).is_relative_to(tmp_path / "temporary")
        assert len(warnings_logged()) == 1 and why in warnings_logged()[0]
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_cache_that_fills_up_while_compiling_falls_back(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, warnings_logged: Warnings
) -> None:
    wrapper = tmp_path / "full-c++"
    wrapper.write_text(
        f'#!/bin/sh\ncase "$PWD" in {tiny.cache}/*)\n'
        'echo "x.cpp: fatal error: error writing to x.s: No space left on device" >&2; exit 1;;\n'
        'esac\nexec g++ "$@"\n'
    )
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    assert build(tiny.spec, tiny.csrc).is_relative_to(tmp_path / "temporary")
    assert len(warnings_logged()) == 1 and "No space left" in warnings_logged()[0]


def test_a_read_only_cache_that_holds_the_library_serves_it(tiny: Tiny, tmp_path: Path) -> None:
    library = build(tiny.spec, tiny.csrc)
    mount = ["mount", "--bind", "-o", "ro", str(tiny.cache), str(tiny.cache)]
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("this user may not mount a file system")
    try:
        assert list(loading.ready(tiny.wanted)) == [library]
    finally:
        subprocess.run(["umount", str(tiny.cache)], check=True)


def test_a_temporary_folder_that_others_can_write_is_neither_read_nor_used(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DS_EXT_CACHE", str(below_a_file(tmp_path / "file")))
    build(tiny.spec, tiny.csrc)
    cache.private_root().chmod(0o777)
    assert list(loading.ready(tiny.wanted)) == []
    with pytest.raises(BuildError) as caught:
        build(tiny.spec, tiny.csrc)
    last = str(caught.value).splitlines()[-1]
    assert "others can write to it" in last and "set DS_EXT_CACHE" in last


def test_clean_removes_what_is_ours_and_nothing_else(tiny: Tiny) -> None:
    library = build(tiny.spec, tiny.csrc)
    foreign = tiny.cache / "tiny-notes"
    foreign.mkdir()
    removed, left = cache.clean()
    assert (removed, left) == ([library.parent], {})
    assert not library.exists() and foreign.is_dir()

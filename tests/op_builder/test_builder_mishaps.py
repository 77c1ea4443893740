"""What a first user runs into, and what others do in the middle of a load: the cause is named."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from building import build

from deepspeed_ext.op_builder import (
    BuildError,
    cache,
    compile as compiling,
    jit,
    load,
    loading,
    registry,
    toolchain,
    wanted,
)
from deepspeed_ext.op_builder.__main__ import main
from deepspeed_ext.op_builder.errors import Unavailable
from deepspeed_ext.op_builder.lock import held

if TYPE_CHECKING:
    from conftest import Tiny

Warnings = Callable[[], list[str]]
is_root = os.geteuid() == 0


@pytest.fixture
def registered(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Tiny:
    """Make the tiny op a row of the registry, with no packaged libraries."""
    monkeypatch.setattr(registry, "OPS", (tiny.spec,))
    monkeypatch.setattr(loading, "CSRC", tiny.csrc)
    monkeypatch.setattr(loading, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setattr(loading, "_LOADED", {})
    return tiny


def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str) -> None:
    """Run these lines of shell before each compiler."""
    wrapper = tmp_path / "c++ of this test"
    wrapper.write_text(f'#!/bin/sh\n{lines}\nexec g++ "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", f"'{wrapper}'")


def last_line(error: pytest.ExceptionInfo[BuildError]) -> str:
    return str(error.value).splitlines()[-1]


def test_the_digest_is_worked_out_once_and_checked_once(
    registered: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[str] = []
    digest_of = wanted.digest_of

    def counts(*arguments: object) -> str:
        counted.append("digest")
        return digest_of(*arguments)

    monkeypatch.setattr(wanted, "digest_of", counts)
    monkeypatch.setattr(compiling, "digest_of", counts)
    load("tiny")
    assert len(counted) == 2  # the second one is compared with the first: the files may be edited
    loading._LOADED.clear()
    load("tiny")
    assert len(counted) == 3


def test_a_failure_is_one_error_with_its_finding(
    registered: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a user reads of a traceback is not the same text again and again."""
    registered.source.write_text("int answer() { return nothing; }\n")
    with pytest.raises(BuildError) as caught:
        load("tiny")
    assert caught.value.log is not None and caught.value.log.is_file()
    assert "compiler: failed" in str(caught.value)
    finding = caught.value.__cause__
    assert type(finding) is Unavailable and finding.__cause__ is None


@pytest.fixture
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "deepspeed_ext.op_builder.__main__.compile_into_cache", lambda _: pytest.fail("it compiles")
    )


@pytest.mark.usefixtures("nothing_compiled")
def test_the_command_line_names_a_wrong_target(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "Hopper")
    assert main(["build", "fused_adam"]) == 1
    assert "TORCH_CUDA_ARCH_LIST has 'Hopper'" in capsys.readouterr().out


@pytest.mark.usefixtures("nothing_compiled")
def test_the_command_line_compiles_nothing_against_a_torch_that_is_too_old(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(toolchain, "_torch_states", lambda name: "2.10.0")
    assert main(["build", "cpu_adam"]) == 1
    assert "torch is 2.10.0, expected 2.11 or newer" in capsys.readouterr().out


def folder(path: Path) -> None:
    path.mkdir()


def below_a_file(path: Path) -> None:
    path.parent.joinpath("file").touch()
    path.symlink_to("file/x")


def closed(path: Path) -> None:
    path.symlink_to("closed/x")
    path.with_name("closed").mkdir(mode=0o000)


def ring(path: Path) -> None:
    path.symlink_to(path.name)


@pytest.mark.parametrize(
    "make, why",
    [
        (folder, "which is not a file"),
        (below_a_file, "which cannot be read (Not a directory)"),
        (ring, "which cannot be read (Too many levels of symbolic links)"),
        pytest.param(
            closed,
            "which cannot be read (Permission denied)",
            marks=pytest.mark.skipif(is_root, reason="root may read everything"),
        ),
    ],
)
def test_an_override_that_cannot_be_read(
    registered: Tiny,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    make: Callable[[Path], None],
    why: str,
) -> None:
    path = tmp_path / "mine.so"
    make(path)
    monkeypatch.setenv("DS_EXT_LIBRARY_TINY", str(path))
    with pytest.raises(BuildError) as caught:
        load("tiny")
    assert f"DS_EXT_LIBRARY_TINY names {path}, {why}" in last_line(caught)
    library, (reason,) = loading.status(registered.spec)
    assert library is None and why in reason


def test_a_torch_folder_that_is_no_installation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in the sources of PyTorch, where version.py is not made yet."""
    monkeypatch.setattr(toolchain, "torch_root", lambda: tmp_path / "torch")
    with pytest.raises(Unavailable) as caught:
        toolchain.torch_version()
    assert f"the torch in {tmp_path}/torch has no version.py" in caught.value.cause
    assert "another folder" in caught.value.fix and "pip install" in caught.value.fix


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_compiler_that_may_not_be_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "c++"
    path.mkdir() if kind == "folder" else path.touch(0o644)
    monkeypatch.setenv("CXX", str(path))
    with pytest.raises(Unavailable) as caught:
        toolchain.cxx()
    assert f"CXX names the compiler '{path}', which is no program" in caught.value.cause


@pytest.mark.parametrize(
    "line, fix",
    [
        (
            "nvcc fatal   : Value 'c++20' is not defined for option 'std'",
            "install CUDA 12 or newer and set CUDA_HOME to its folder",
        ),
        (
            "host_config.h:143:2: error: #error -- unsupported GNU version! gcc versions later"
            " than 15 are not supported!",
            "set CXX to a compiler that this CUDA toolkit supports",
        ),
        (
            "nvcc fatal   : Could not open output file '/no/such/tmpxft_00007472_0000000a'",
            "set TMPDIR to a folder that can be written",
        ),
        ("g++: error: unrecognized command-line option '-std=c++20'", "newer compiler"),
    ],
)
def test_the_fix_is_for_the_compiler_that_complains(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str, fix: str
) -> None:
    compiler(tmp_path, monkeypatch, f'case "$*" in *-c*) echo "{line}" >&2; exit 1;; esac')
    with pytest.raises(BuildError) as caught:
        build(tiny.spec, tiny.csrc)
    assert line in last_line(caught) and fix in last_line(caught)


def test_what_is_not_removed_says_why(
    registered: Tiny, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    library = build(registered.spec, registered.csrc)

    def refuses(path: Path) -> None:
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(shutil, "rmtree", refuses)
    assert main(["clean"]) == 1
    assert capsys.readouterr().out == f"left {library.parent}: Read-only file system\n"


def test_what_another_process_uses_is_not_removed(
    registered: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    library = build(registered.spec, registered.csrc)
    with held(registered.cache / "tiny.lock"):
        assert main(["clean"]) == 1
    printed = capsys.readouterr().out
    assert printed == f"left {library.parent}: another process is using it\n"


def test_a_cached_library_that_goes_before_it_is_opened_is_compiled_again(
    registered: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build(registered.spec, registered.csrc)
    open_ = loading._open
    gone: list[Path] = []

    def removes(spec: object, path: Path) -> Path:
        if not gone:
            gone.append(path)
            shutil.rmtree(registered.cache)
        return open_(registered.spec, path)

    monkeypatch.setattr(loading, "_open", removes)
    assert load("tiny") == first
    assert gone == [first] and first.is_file()


def test_a_compiled_library_that_goes_before_it_is_opened_is_named(
    registered: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_ = loading._open

    def removes(spec: object, path: Path) -> Path:
        shutil.rmtree(registered.cache)
        return open_(registered.spec, path)

    monkeypatch.setattr(loading, "_open", removes)
    with pytest.raises(BuildError) as caught:
        load("tiny")
    assert "tiny.so has been removed" in last_line(caught)
    assert last_line(caught).endswith("; load the op again")


@pytest.mark.parametrize("moment", ["--version", "tiny.cpp", "-shared"])
def test_a_cache_that_is_removed_while_it_is_compiled_into(
    tiny: Tiny,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    warnings_logged: Warnings,
    moment: str,
) -> None:
    """The private folder serves, and the warning says what happened to the other one."""
    once = f"mkdir {tmp_path}/once 2> /dev/null && rm -r {tiny.cache}"
    compiler(tmp_path, monkeypatch, f'case "$*" in *{moment}*) {once};; esac')
    assert build(tiny.spec, tiny.csrc).is_relative_to(tmp_path / "temporary")
    (warning,) = warnings_logged()
    assert "No such file" in warning


@pytest.mark.parametrize("moment", ["before its log is opened", "after that"])
def test_a_cache_that_is_removed_before_ninja_starts_in_it(
    tiny: Tiny,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    warnings_logged: Warnings,
    moment: str,
) -> None:
    """Nothing is wrong with ninja: the folder to start it in is not there."""
    removed: list[str] = []

    def removes(when: str) -> None:
        if when == moment and not removed:
            removed.append(when)
            shutil.rmtree(tiny.cache)

    def ninja() -> Path:
        removes("before its log is opened")
        return found

    def run(command: list[str], **options: Any) -> object:
        if "cwd" in options:
            removes("after that")
        return start(command, **options)

    found, start = toolchain.ninja(), subprocess.run
    monkeypatch.setattr(toolchain, "ninja", ninja)
    monkeypatch.setattr(subprocess, "run", run)
    assert build(tiny.spec, tiny.csrc).is_relative_to(tmp_path / "temporary")
    assert removed == [moment] and len(warnings_logged()) == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "mode=755,size=256k", "none", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("this user may not mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_cache_on_a_disk_that_is_full_before_the_compiler_can_say_so(
    tiny: Tiny,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    small_disk: Path,
    warnings_logged: Warnings,
) -> None:
    """There is no room for its words either."""
    fill = f"dd if=/dev/zero of={small_disk}/fill bs=4k 2> /dev/null"
    monkeypatch.setattr(cache, "_NEEDED_BYTES", 1)
    monkeypatch.setenv("DS_EXT_CACHE", str(small_disk))
    compiler(tmp_path, monkeypatch, f'case "$*" in *tiny.cpp*) {fill};; esac')
    assert build(tiny.spec, tiny.csrc).is_relative_to(tmp_path / "temporary")
    (warning,) = warnings_logged()
    assert "No space left" in warning


def test_a_temporary_folder_that_is_full_is_named(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, small_disk: Path
) -> None:
    """Compilers write there, too: another cache alone would not help."""
    with pytest.raises(OSError, match="No space"), (small_disk / "fill").open("wb", 0) as file:
        while True:
            file.write(bytes(4096))
    monkeypatch.setenv("TMPDIR", str(small_disk))
    with pytest.raises(BuildError) as caught:
        build(tiny.spec, tiny.csrc)
    cause, fix = last_line(caught).rsplit("; ", 1)
    assert f"{small_disk}/" in cause and "No space left" in cause
    assert "DS_EXT_CACHE" in fix and "TMPDIR" in fix


def test_without_a_home_or_a_temporary_folder(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, warnings_logged: Warnings
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "file"))
    monkeypatch.delenv("DS_EXT_CACHE")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # no HOME, unknown user
    with pytest.raises(BuildError) as caught:
        build(tiny.spec, tiny.csrc)
    assert "no home (there is no home folder)" in last_line(caught)
    assert "Not a directory" in last_line(caught) and "set DS_EXT_CACHE" in last_line(caught)
    (warning,) = warnings_logged()
    assert warning.startswith("the op cache cannot be used (there is no home folder): ")


def test_a_temporary_folder_that_cannot_be_written_does_not_matter(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, warnings_logged: Warnings
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "no such folder"))
    assert build(tiny.spec, tiny.csrc).is_relative_to(tiny.cache)
    assert warnings_logged() == []


def test_a_report_of_a_failure_that_is_none_is_passed_over(tiny: Tiny) -> None:
    failures = tiny.cache / f"{tiny.wanted.entry}.failed"
    failures.mkdir(parents=True)
    for text in ("[]", '{"cause": "x"}', "null", "{"):
        (failures / "failure.json").write_text(text)
        assert jit._failure(failures) is None

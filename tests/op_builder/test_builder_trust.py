"""A cache that others may write to: nothing in it is opened, one warning says why."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from building import build

from deepspeed_ext.op_builder import BuildError, jit, load, loading, registry, trust
from deepspeed_ext.op_builder.lock import held
from deepspeed_ext.op_builder.trust import Untrusted

if TYPE_CHECKING:
    from conftest import Tiny

Warnings = Callable[[], list[str]]
SOMEBODY = 54321  # a user that has nothing here
is_root = os.geteuid() == 0
for_root = pytest.mark.skipif(not is_root, reason="only root can give files to another user")


def give(path: Path) -> None:
    os.chown(path, SOMEBODY, SOMEBODY, follow_symlinks=False)


@pytest.fixture
def hostile(tiny: Tiny, tmp_path: Path) -> Path:
    """A cache whose library has the right digest, and says so when somebody opens it."""
    library = build(tiny.spec, tiny.csrc)
    digest = json.dumps(tiny.wanted.stamp)
    source = tmp_path / "hostile.cpp"
    source.write_text(
        f"#include <cstdio>\n[[gnu::used]] static const char digest[] = {digest};\n"
        f'[[gnu::constructor]] static void run() {{ std::fclose(std::fopen("{tmp_path}/ran", "w"));'
        " }\n"
    )
    library.unlink()
    subprocess.run(["g++", "-shared", "-fPIC", source, "-o", library], check=True)
    return library


def open_to_all(path: Path) -> None:
    path.chmod(path.stat().st_mode | 0o002)


def sticky(path: Path) -> None:
    path.chmod(0o1777)


def open_to_a_group(path: Path) -> None:
    os.chown(path, -1, SOMEBODY if is_root else os.getegid())
    path.chmod(path.stat().st_mode | 0o020)


WAYS = [
    (open_to_all, "others can write to"),
    (sticky, "others can write to"),
    pytest.param(open_to_a_group, "others can write to", marks=for_root),
    pytest.param(give, f"belongs to user {SOMEBODY}", marks=for_root),
]


@pytest.mark.parametrize("spoil, why", WAYS)
@pytest.mark.parametrize("what", ["cache", "entry", "library"])
def test_what_others_could_write_is_not_opened(
    hostile: Path,
    tiny: Tiny,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    warnings_logged: Warnings,
    what: str,
    spoil: Callable[[Path], None],
    why: str,
) -> None:
    if what == "library" and spoil is sticky:
        spoil = open_to_all  # the bit means nothing for a file
    spoil({"cache": tiny.cache, "entry": hostile.parent, "library": hostile}[what])
    monkeypatch.setattr(registry, "OPS", (tiny.spec,))
    monkeypatch.setattr(loading, "CSRC", tiny.csrc)
    monkeypatch.setattr(loading, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setattr(loading, "_LOADED", {})
    opened = load("tiny")
    assert opened.is_relative_to(tmp_path / "temporary")
    assert not (tmp_path / "ran").exists()
    (warning,) = warnings_logged()
    assert why in warning and str(tiny.cache) in warning and "set DS_EXT_CACHE" in warning
    routes: list[str] = []
    assert list(loading.ready(tiny.wanted, routes)) == [opened]
    assert "is not opened" in routes[1] and why in routes[1]
    assert loading.status(tiny.spec) == (opened, [])
    assert len(warnings_logged()) == 1


def test_without_compiling_the_error_says_why(
    hostile: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.cache.chmod(0o777)
    monkeypatch.setattr(registry, "OPS", (tiny.spec,))
    monkeypatch.setattr(loading, "CSRC", tiny.csrc)
    monkeypatch.setattr(loading, "_LOADED", {})
    monkeypatch.setenv("DS_EXT_JIT", "0")
    with pytest.raises(BuildError, match=r"tiny\.so is not opened \(others can write to it\)"):
        load("tiny")


def test_an_override_that_others_could_write_is_refused(
    hostile: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(registry, "OPS", (tiny.spec,))
    monkeypatch.setattr(loading, "CSRC", tiny.csrc)
    monkeypatch.setattr(loading, "_LOADED", {})
    folder = tmp_path / "inner"
    folder.mkdir()
    hostile.chmod(0o777)
    # By name this is the folder with a good file; the kernel goes through the link first.
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "mine.so").symlink_to(hostile)
    (tmp_path / "inner" / "mine.so").write_bytes(hostile.read_bytes())
    monkeypatch.setenv("DS_EXT_LIBRARY_TINY", str(tmp_path / "link" / ".." / "mine.so"))
    with pytest.raises(BuildError) as caught:
        load("tiny")
    last = str(caught.value).splitlines()[-1]
    assert f"others can write to {hostile}" in last and "copy it to a folder of your own" in last
    assert not (tmp_path / "ran").exists()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder that nobody else can write to, three levels down."""
    folder = tmp_path / "a" / "b" / "c"
    folder.mkdir(parents=True)
    return folder


def test_what_is_ours_is_trusted(place: Path) -> None:
    trust.check(place)
    trust.check(place / "not" / "there")
    (place / "file").touch()
    trust.check(place / "file")
    trust.check(place / "file" / "below a file")


@pytest.mark.parametrize("spoil, why", WAYS)
@pytest.mark.parametrize("levels", [1, 2])
def test_the_folders_above_count(
    place: Path, spoil: Callable[[Path], None], why: str, levels: int
) -> None:
    above = place.parents[levels - 1]
    spoil(above)
    if spoil is sticky:  # as /tmp: others cannot rename what is ours
        trust.check(place)
        trust.check(place / "not there")
        return
    for path in (place, place / "not" / "there", Path(os.path.relpath(place))):
        with pytest.raises(Untrusted, match=why) as caught:
            trust.check(path)
        assert str(above) in str(caught.value)


@for_root
def test_in_a_shared_folder_only_what_is_ours_counts(place: Path) -> None:
    sticky(place.parent)
    give(place)
    with pytest.raises(Untrusted, match=f"it belongs to user {SOMEBODY}"):
        trust.check(place)
    with pytest.raises(Untrusted, match=f"c belongs to user {SOMEBODY}"):
        trust.check(place / "mine")


@pytest.mark.parametrize("relative", [True, False])
def test_links_are_followed(place: Path, tmp_path: Path, relative: bool) -> None:
    link = tmp_path / "link"
    link.symlink_to("a/b/../b/./c" if relative else place)
    trust.check(link)
    trust.check(link / "x")
    place.parent.chmod(0o777)
    for path in (link, link / "x"):
        with pytest.raises(Untrusted, match=f"others can write to {place.parent}"):
            trust.check(path)
    place.parent.chmod(0o755)
    if is_root:
        give(link)
        with pytest.raises(Untrusted, match=f"it belongs to user {SOMEBODY}"):
            trust.check(link)


def test_links_in_a_ring_end(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="Too many levels"):
        trust.check(tmp_path / "a")


def test_only_a_group_without_others_may_write(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.chmod(0o775)
    group = place.stat().st_gid

    class User:
        pw_name, pw_gid = "me", group

    class Group:
        gr_name = "me"
        gr_mem: tuple[str, ...] = ()

    monkeypatch.setattr(trust.pwd, "getpwuid", lambda user: User)
    monkeypatch.setattr(trust.grp, "getgrgid", lambda number: Group)
    trust.check(place)
    Group.gr_mem = ("me",)
    trust.check(place)
    for name, members, first in (
        ("me", ("me", "you"), group),
        ("staff", (), group),
        ("me", (), group + 1),
    ):
        Group.gr_name, Group.gr_mem, User.pw_gid = name, members, first
        with pytest.raises(Untrusted, match="others can write to it"):
            trust.check(place)
    Group.gr_name, Group.gr_mem, User.pw_gid = "me", (), group
    monkeypatch.setattr(trust.os, "listxattr", lambda path: ["system.posix_acl_access"])
    with pytest.raises(Untrusted, match="others can write to it"):  # the mode has its mask
        trust.check(place)
    monkeypatch.setattr(trust.os, "listxattr", _no_lists)
    trust.check(place)


def _no_lists(path: str) -> list[str]:
    raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP), path)


def test_what_is_made_is_for_its_owner_alone_whatever_the_umask(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also while it is made: the compiler looks at the folder it works in."""
    modes = tmp_path / "modes"
    wrapper = tmp_path / "looking-c++"
    wrapper.write_text(f'#!/bin/sh\nstat -c %a "$PWD" >> {modes}\nexec g++ "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    root = tmp_path / "deep" / "cache"
    monkeypatch.setenv("DS_EXT_CACHE", str(root))
    before = os.umask(0)
    try:
        library = build(tiny.spec, tiny.csrc)
        tiny.source.write_text("nothing\n")
        with pytest.raises(BuildError):
            build(tiny.spec, tiny.csrc)
    finally:
        os.umask(before)
    assert library.parent.parent == root
    made = [root.parent, *root.parent.rglob("*")]
    assert {"build.json", "failure.json", "tiny.lock", "tiny.so"} <= {path.name for path in made}
    assert [path for path in made if path.stat().st_mode & 0o022] == []
    assert root.joinpath("tiny.lock").stat().st_mode & 0o777 == 0o600
    assert library.parent.stat().st_mode & 0o777 == 0o755  # others may read it
    assert set(modes.read_text().split()) >= {"700"}
    assert list(loading.ready(tiny.wanted)) == []
    trust.check(library)


def test_a_strict_umask_is_kept(tiny: Tiny) -> None:
    before = os.umask(0o077)
    try:
        library = build(tiny.spec, tiny.csrc)
    finally:
        os.umask(before)
    for path in (library, library.parent, library.parent.parent):
        assert path.stat().st_mode & 0o077 == 0


def test_a_lock_file_can_be_opened_by_nobody_else(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    path.touch(0o644)
    with held(path):
        assert path.stat().st_mode & 0o777 == 0o600


@for_root
def test_a_lock_of_somebody_else_is_not_used(
    tiny: Tiny, tmp_path: Path, warnings_logged: Warnings
) -> None:
    """Whoever can open a lock file can hold it, and write into it whose process to end."""
    tiny.cache.mkdir()
    path = tiny.cache / "tiny.lock"
    path.write_text("1 here")
    give(path)
    with pytest.raises(Untrusted), held(path):
        pass
    assert path.read_text() == "1 here"
    assert build(tiny.spec, tiny.csrc).is_relative_to(tmp_path / "temporary")
    assert len(warnings_logged()) == 1 and "belongs to" in warnings_logged()[0]


def test_the_report_of_a_failure_is_taken_from_nobody_else(tiny: Tiny) -> None:
    failures = tiny.cache / f"{tiny.wanted.entry}.failed"
    failures.mkdir(parents=True)
    (failures / "failure.json").write_text('{"cause": "x", "fix": "run: anything", "id": "1"}')
    assert jit._failure(failures) is not None
    (failures / "failure.json").chmod(0o666)
    assert jit._failure(failures) is None
    (failures / "failure.json").chmod(0o644)
    failures.chmod(0o777)
    assert jit._failure(failures) is None


def test_settings_are_neither_read_nor_saved_where_others_could_write(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from deepspeed_ext.io.engine.arguments import Settings
    from deepspeed_ext.io.tuning.settings import save, saved

    file = save(tmp_path, Settings(threads=3, backend="threads"))
    assert saved(tmp_path) == Settings(threads=3, backend="threads")
    (tmp_path / "cache").chmod(0o777)
    assert saved(tmp_path) is None
    with pytest.raises(OSError, match="others can write to it; set DS_EXT_CACHE"):
        save(tmp_path, Settings())
    assert "3" in file.read_text()


def as_somebody(path: Path, in_namespace: bool) -> str:
    """Return what a check of a path says in a process of another user."""
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(SOMEBODY)
            os.setuid(SOMEBODY)
            if in_namespace:
                enter_namespace()
            trust.check(path)
            text = "trusted"
        except BaseException as error:
            text = str(error)
        os.write(sender, text.encode())
        os._exit(0)
    os.waitpid(child, 0)
    text = os.read(receiver, 4096).decode()
    os.close(receiver)
    os.close(sender)
    return text


def enter_namespace() -> None:
    """Enter a user namespace that has this user and no other, not even root."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(4, 1, 0, 0, 0)  # dumpable, so that /proc/self is ours
    if libc.unshare(0x10000000) != 0:
        raise OSError(ctypes.get_errno(), "no user namespaces here")
    Path("/proc/self/uid_map").write_text(f"{SOMEBODY} {SOMEBODY} 1")


@for_root
def test_an_ordinary_user_trusts_root_and_himself_but_no_third(place: Path) -> None:
    for folder in place.parents:
        if not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o011)
    assert as_somebody(place, in_namespace=False) == "trusted"
    give(place)
    assert as_somebody(place, in_namespace=False) == "trusted"
    os.chown(place, SOMEBODY + 1, 0)
    text = f"it belongs to user {SOMEBODY + 1}"
    assert as_somebody(place, in_namespace=False) == text
    give(place)
    os.chown(place.parent, SOMEBODY + 1, 0)
    text = f"{place.parent} belongs to user {SOMEBODY + 1}"
    assert as_somebody(place, in_namespace=False) == text


@for_root
def test_in_a_namespace_without_root_the_folders_above_may_be_his(place: Path) -> None:
    for folder in place.parents:
        if not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o011)
    give(place)
    said = as_somebody(place, in_namespace=True)
    if "no user namespaces" in said or "uid_map" in said:
        pytest.skip(said)
    assert said == "trusted"
    os.chown(place, 0, 0)  # which may be anybody: the last folder must be his own
    assert as_somebody(place, in_namespace=True).startswith("it belongs to user ")

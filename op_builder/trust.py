"""Tell whether others could change what is at a path; code is loaded from a cache only if not.

Every component of the path, symbolic links included, belongs to this user or to root, and nobody
else can write to it. The walk goes down from the root of the file system. So each answer still
holds when the next one is asked, and when the path is opened afterwards: in a folder that others
cannot change, a name goes on meaning what it meant.

Three things are let pass that look worse than they are:
- Above the path that is asked about, a folder that everybody can write to but that has the sticky
  bit, such as /tmp: others can add names to it, but not rename or remove those of ours.
- A folder that can be written by this user's private group, one of his name without other members,
  and by nobody else that an access list names. Where users have such groups, the usual umask makes
  all their folders so.
- Above the path, in a user namespace without the root of the machine: the owner "nobody", as whom
  he appears there. It may be another user; but those cannot make files that belong to this one.
"""

import errno
import grp
import os
import pwd
import stat
from pathlib import Path

_ACCESS_LIST = "system.posix_acl_access"
_MOST_LINKS = 40  # as in the kernel


class Untrusted(OSError):
    """Others could change what is at a path; the text says how."""


def check(path: Path) -> None:
    """Raise Untrusted if somebody else could change what is at `path`.

    Where nothing is, only the folders above are looked at: ask again when it has been made.
    """
    here, links = "/", 0
    names = [*reversed(path.absolute().parts[1:])]
    while True:
        try:
            status = os.lstat(here)
        except (FileNotFoundError, NotADirectoryError):
            return
        why = _why_not(here, status, is_above=bool(names))
        if why is not None:
            raise Untrusted(why.format("it" if here == str(path) else here))
        if stat.S_ISLNK(status.st_mode):
            links += 1
            if links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            target = os.readlink(here)
            names += reversed(target.split("/"))
            here = "/" if target.startswith("/") else os.path.dirname(here)
        if not names:
            return
        name = names.pop()
        if name == "..":  # of a path without links, as `here` is, that is the folder above
            here = os.path.dirname(here)
        elif name not in ("", "."):
            here = os.path.join(here, name)


def _why_not(path: str, status: os.stat_result, is_above: bool) -> str | None:
    """Return what is wrong with one component, "{}" standing for its name."""
    if not _is_trusted_owner(status.st_uid, is_above):
        return f"{{}} belongs to {_name_of(status.st_uid)}"
    if stat.S_ISLNK(status.st_mode):  # its mode means nothing
        return None
    writers = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)  # of an access list the mode has all
    if writers & stat.S_IWGRP and _is_private_group(status.st_gid) and not _has_list(path):
        writers -= stat.S_IWGRP
    is_shared = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    return "others can write to {}" if writers and not (is_above and is_shared) else None


def _is_trusted_owner(user: int, is_above: bool) -> bool:
    return user in (0, os.geteuid()) or (is_above and user == _root_elsewhere())


def _root_elsewhere() -> int | None:
    """Return the number that the machine's root has in a user namespace without him, if we are."""
    try:
        if Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]:
            return None
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return None


def _is_private_group(group: int) -> bool:
    """Tell whether a group is that of this user alone."""
    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return (
        user.pw_gid == group
        and found.gr_name == user.pw_name
        and set(found.gr_mem) <= {user.pw_name}
    )


def _has_list(path: str) -> bool:
    """Tell whether an access list names users and groups who are not in the mode."""
    try:
        return _ACCESS_LIST in os.listxattr(path)
    except OSError as error:
        return error.errno != errno.ENOTSUP  # a file system that has none


def _name_of(user: int) -> str:
    try:
        return f"user {pwd.getpwuid(user).pw_name}"
    except KeyError:
        return f"user {user}"

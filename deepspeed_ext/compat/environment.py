"""The package deepspeed that enable writes into the environment, and disable or pip removes."""

import fcntl
import hashlib
import os
import shutil
import sys
import sysconfig
import tempfile
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deepspeed_ext.compat.stand_in import (
    METADATA,
    NAME,
    SUFFIX,
    __version__,
    is_ours,
    real_deepspeed,
)

_PREFIX = ".deepspeed_ext-"  # of folders that hold what is on its way in or out
_INFO = f"{NAME}-{__version__}.dist-info"
_INIT = '''\
"""deepspeed_ext as deepspeed; `python -m deepspeed_ext.compat disable` removes it."""

from deepspeed_ext.compat.stand_in import stand_in

stand_in()
'''
# As pip does it: what follows #! may be neither long nor have spaces.
_BEGIN = (
    f"#!{sys.executable}"
    if " " not in sys.executable and len(sys.executable) < 120
    else f"#!/bin/sh\n'''exec' \"{sys.executable}\" \"$0\" \"$@\"\n' '''"
)
_SCRIPT = f"""\
{_BEGIN}
import sys

from deepspeed_ext.compat.launch import main

sys.exit(main())
"""
_FILES = {
    f"{NAME}/__init__.py": _INIT,
    f"{_INFO}/METADATA": METADATA,
    f"{_INFO}/INSTALLER": "deepspeed_ext\n",
    f"{_INFO}/WHEEL": "Wheel-Version: 1.0\nGenerator: deepspeed_ext\nRoot-Is-Purelib: true\n"
    "Tag: py3-none-any\n",
}


class Environment:
    """Where packages and programs of an environment are.

    Args:
        packages: the folder of packages; None: this Python's.
        programs: the folder of programs; None: this Python's.
    """

    def __init__(self, packages: Path | None = None, programs: Path | None = None) -> None:
        self.packages = packages or Path(sysconfig.get_path("purelib"))
        self._package = self.packages / NAME
        self._script = (programs or Path(sysconfig.get_path("scripts"))) / NAME
        self._beside = self._script.with_name(_PREFIX)  # on its way to that

    def enable(self) -> bool:
        """Write the package, unless it is there; an interrupted call leaves none that counts.

        Returns:
            whether it was written.

        Raises:
            ValueError: a real deepspeed, or another program of this name, is there.
            OSError: a folder cannot be written to.
        """
        with self._alone() as scratch:
            self._check_free()
            if self.is_whole():
                return False
            self._remove(scratch)
            for path, text in {**_FILES, f"{_INFO}/RECORD": self._record()}.items():
                (scratch / path).parent.mkdir(exist_ok=True)
                (scratch / path).write_text(text)
            self._beside.write_text(_SCRIPT)
            self._beside.chmod(0o755)
            self._beside.rename(self._script)
            os.rename(scratch / NAME, self._package)
            # Last: without it no such package is installed.
            os.rename(scratch / _INFO, self.packages / _INFO)
            return True

    def disable(self) -> bool:
        """Remove the package, or what an interrupted call has left of it.

        Returns:
            whether there was something.

        Raises:
            ValueError: a real deepspeed is there, which stays.
            OSError: a folder cannot be written to.
        """
        with self._alone() as scratch:
            real = real_deepspeed()
            if real is not None:
                raise ValueError(f"compat.disable: {real} is there, which enable has not written")
            return self._remove(scratch)

    def is_whole(self) -> bool:
        """Tell whether the package is there as `enable` writes it now."""
        try:
            is_written = all((self.packages / p).read_text() == t for p, t in _FILES.items())
            return is_written and self._script.read_text() == _SCRIPT
        except OSError:
            return False

    def has_parts(self) -> bool:
        """Tell whether there is something of it."""
        return bool(self._infos()) or is_ours(self._package / "__init__.py")

    def _check_free(self) -> None:
        real = real_deepspeed()
        package, module = self._package / "__init__.py", self.packages / f"{NAME}.py"
        for other in (package, module, self._script):
            if real is None and os.path.lexists(other) and not is_ours(other):
                real = str(other)
        if real is not None:
            raise ValueError(
                f"compat.enable: {real} is there, expected no deepspeed; uninstall it, or use"
                " another environment"
            )

    def _remove(self, scratch: Path) -> bool:
        """Take out what is there, in the order in which it stops to count."""
        found = False
        for path in (*self._infos(), self._package):
            if path.exists():
                os.rename(path, scratch / f"old-{path.name}")
                found = True
        if is_ours(self._script):
            self._script.unlink()
            found = True
        self._beside.unlink(missing_ok=True)
        return found

    def _infos(self) -> list[Path]:
        """Return folders of metadata, of other versions of this package too."""
        return sorted(self.packages.glob(f"{NAME}-*{SUFFIX}.dist-info"))

    def _record(self) -> str:
        """Return the list of files by which pip removes the package."""
        lines = []
        script = os.path.relpath(self._script, self.packages)
        for path, text in {**_FILES, script: _SCRIPT}.items():
            data = text.encode()
            digest = urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            lines.append(f"{path},sha256={digest},{len(data)}")
        return "\n".join([*lines, f"{_INFO}/RECORD,,", ""])

    @contextmanager
    def _alone(self) -> Iterator[Path]:
        """Keep others out, and give a folder of what is on its way, which is removed at the end."""
        lock = os.open(self.packages, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the system releases it with its process
            for left in self.packages.glob(f"{_PREFIX}*"):
                shutil.rmtree(left)
            scratch = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self.packages))
            try:
                yield scratch
            finally:
                shutil.rmtree(scratch)
        finally:
            os.close(lock)

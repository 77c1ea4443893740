"""What the process has while any Init is under way: a hook on parameters, and nn.Module.apply.

Both come as the first one begins and go as the last one ends, in whatever order and threads. In a
thread that has none they do nothing, and neither do they where they have to stay: an apply around
which another has been put goes on to what was there before.
"""

import threading
from collections.abc import Callable
from typing import Any, Protocol

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.hooks import RemovableHandle

from deepspeed_ext.compat.zero.gathered import GatheredParameters


class Watcher(Protocol):
    """Who is told of parameters that modules register."""

    def registered(self, module: nn.Module) -> None:
        """See a module of this thread that is about to have one more parameter."""


class _Here(threading.local):
    """Attributes:
    inner: those under way in this thread, the innermost last; a thread of the same number that
        comes later has a list of its own.
    """

    def __init__(self) -> None:
        self.inner: list[Watcher] = []


_here = _Here()


class _Installed:
    """The hook and apply, of which the process has one each.

    The lock is one that a thread may take again: a generator that goes as garbage ends its Init
    between any two lines of another's. So each step looks at what is there once more.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._all: dict[Watcher, list[Watcher]] = {}  # with those of its thread
        self._hook: RemovableHandle | None = None
        self._apply: Any = None
        self._plain: Any = None  # what nn.Module had before

    def begin(self, watcher: Watcher) -> bool:
        with self._lock:
            if watcher in self._all:
                return False
            self._all[watcher] = _here.inner
            try:
                self._install()
                _here.inner.append(watcher)
            except BaseException:
                self.end(watcher)
                raise
        return True

    def end(self, watcher: Watcher) -> list[Watcher] | None:
        with self._lock:
            inner = self._all.pop(watcher, None)
            if inner is not None:
                inner[:] = [each for each in inner if each is not watcher]
            if not self._all:
                self._take_out()
        return inner

    def _install(self) -> None:
        if self._hook is not None:
            return
        self._hook = register_module_parameter_registration_hook(_registered)
        if nn.Module.apply is not self._apply:  # else another has put it back since
            self._plain = nn.Module.apply
            self._apply = _gathering(self._plain)
            _set_apply(self._apply)

    def _take_out(self) -> None:
        # Another thread may be in the hook now. Torch looks no further behind the last one.
        hook, self._hook = self._hook, None
        if hook is not None:
            hook.remove()
        if nn.Module.apply is self._apply:
            _set_apply(self._plain)


_installed = _Installed()


def begin(watcher: Watcher) -> bool:
    """Tell it of parameters of this thread; return whether it was not under way before."""
    return _installed.begin(watcher)


def end(watcher: Watcher) -> list[Watcher] | None:
    """Tell it nothing more, from any thread.

    Returns:
        Those that are under way still in its thread, the innermost last; None: it was not.
    """
    return _installed.end(watcher)


def _registered(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
    for innermost in _here.inner[-1:]:
        innermost.registered(module)


def _set_apply(function: Callable[..., Any]) -> None:
    patched: Any = nn.Module
    patched.apply = function


class _Gathered:
    """A function of modules that finds whole what a module has itself.

    Args:
        function: that apply was given.
    """

    def __init__(self, function: Callable[[nn.Module], None]) -> None:
        self.function = function

    def __call__(self, module: nn.Module) -> None:
        with GatheredParameters(module.parameters(recurse=False), modifier_rank=0):
            self.function(module)


def _gathering(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return an apply that lets functions see whole parameters, where an Init is under way."""

    def apply(self: nn.Module, fn: Callable[[nn.Module], None]) -> Any:
        if _here.inner and not isinstance(fn, _Gathered):  # else of the module that this is in
            fn = _Gathered(fn)
        return plain(self, fn)

    return apply

"""Calls of modules with fetched weights in the place of their parameters.

A weight stands in the module's own dictionary, where attributes are looked for first, so that
`module.weight` is on the device while `module.parameters()` and state dicts have what rests.
"""

import threading
import weakref
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from deepspeed_ext.torch_internals.modules import FLAT_WEIGHTS, flat_names_of, parameters_of
from deepspeed_ext.torch_internals.tensors import version_of
from deepspeed_ext.zero.streaming.fetched import Fetched
from deepspeed_ext.zero.streaming.gradients import Gradients, Use
from deepspeed_ext.zero.streaming.saved_weights import Packer, Source, is_innermost, unpack

_THREAD = "_zero_stream_thread"  # the number of the thread that a module has weights in


class Slot(NamedTuple):
    """Where a module has a parameter."""

    module: nn.Module
    name: str
    row: int  # of the piece


class Packing:
    """One call of a module in which autograd saves no weights of a window.

    Args:
        module: that is called.
        packer: knows the weights.
    """

    def __init__(self, module: nn.Module, packer: Packer) -> None:
        self.module = module
        self.packer = packer
        self._pack = packer.with_hooks_here()
        self._hooks = saved_tensors_hooks(self._pack, unpack)

    def begin(self) -> None:
        """Let autograd save so."""
        self._hooks.__enter__()

    def close(self) -> None:
        """Let autograd save as before; likewise again.

        After Ctrl-C hooks of others may be around that were there later; these stay then, and pack
        nothing any more.
        """
        self._pack.end()
        if is_innermost(self._pack):
            self._hooks.__exit__(None, None, None)


class Window:
    """One call of a module, from its first hook to its last.

    Args:
        module: that is called.
        source: fetches weights again for backward.
        gradients: takes theirs.
        got: the weights.
        slots: what they stand in place of.
    """

    def __init__(
        self,
        module: nn.Module,
        source: Source,
        gradients: Gradients,
        got: Fetched,
        slots: list[Slot],
    ) -> None:
        self.module = module
        self._got, self._slots = got, slots
        self.packer = Packer(source, got)
        self._packing: Packing | None = None
        self._flat: list[nn.RNNBase] = []
        self._weights = _weights(gradients, got)
        self._versions = [version_of(weight) for weight in self._weights]

    def begin(self) -> None:
        """Let the module have the weights."""
        for at, name, row in self._slots:
            at.__dict__[_THREAD] = get_ident()
            at.__dict__[name] = self._weights[row]
        for at in {id(slot.module): slot.module for slot in self._slots}.values():
            if isinstance(at, nn.RNNBase):
                self._flat.append(at)
                _flatten(at)
        if torch.is_grad_enabled():
            self._packing = Packing(self.module, self.packer)
            self._packing.begin()

    def close(self) -> None:
        """Let the module have its parameters again, with what it has written to them.

        Ctrl-C may come in between: all of it can be done again.
        """
        if self._packing is not None:
            self._packing.close()
        for at, name, row in self._slots:
            at.__dict__.pop(_THREAD, None)
            if at.__dict__.get(name) is self._weights[row]:
                del at.__dict__[name]
        for at in self._flat:
            _flatten(at)
        self._got.finish()
        self._take_writes()

    def _take_writes(self) -> None:
        for i, (param, weight) in enumerate(
            zip(self._got.piece.params, self._weights, strict=True)
        ):
            if version_of(weight) != self._versions[i]:
                param.detach().copy_(weight.detach())
                self._versions[i] = version_of(weight)


def _weights(gradients: Gradients, got: Fetched) -> list[Tensor]:
    """Return the weights of a piece; those that are trained have a way back to the parameters."""
    params = got.piece.params
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):  # or no version would tell of what forward writes
            return [got.weight(i) for i in range(len(params))]
    trained = [i for i, param in enumerate(params) if param.requires_grad]
    if not torch.is_grad_enabled() or not trained:
        return [got.weight(i) for i in range(len(params))]
    used: Any = Use.apply(gradients, got, trained, *(params[i] for i in trained))  # type: ignore[no-untyped-call]
    given = dict(zip(trained, used, strict=True))
    return [given[i] if i in given else got.weight(i) for i in range(len(params))]


class _Thread:
    """Is there as long as a thread is."""


class Windows(threading.local):
    """The windows that are open in this thread, the innermost last.

    Args:
        of_threads: the same lists for all of them, empty at first; who begins or closes some
            in one thread and asks for others' in another one has a lock.
    """

    def __init__(self, of_threads: "dict[weakref.ref[_Thread], list[Window | Packing]]") -> None:
        self.open: list[Window | Packing] = []
        self._thread = _Thread()
        self._of_threads = of_threads
        of_threads[weakref.ref(self._thread)] = self.open

    def of_others(self) -> list[Window | Packing]:
        """Return those that are open in other threads."""
        lists = self._of_threads.copy().items()
        return [
            window
            for thread, windows in lists
            if thread() is not None and windows is not self.open
            for window in windows
        ]

    def close_left(self) -> None:
        """Close those of threads that have ended in the middle of a call, as by sys.exit()."""
        for thread, windows in self._of_threads.copy().items():
            if thread() is None:
                _close_all(windows)
                self._of_threads.pop(thread, None)

    def pack_again(self, module: nn.Module) -> None:
        """See that nobody's hooks, as those of a checkpoint, save weights of the innermost window.

        They would be other tensors when a checkpoint computes again.
        """
        if self.open and torch.is_grad_enabled():
            packer = self.open[-1].packer
            if not packer.packs_here():
                self.begin(Packing(module, packer))

    def begin(self, window: Window | Packing) -> None:
        """Begin one, which is among the open ones before, wherever Ctrl-C comes."""
        self.open.append(window)
        try:
            window.begin()
        except BaseException:
            self.close(window.module)
            raise

    def close(self, module: nn.Module) -> None:
        """Close the innermost one if it is of this module."""
        if self.open and self.open[-1].module is module:
            _close_innermost(self.open)

    def has(self, module: nn.Module) -> bool:
        """Tell whether one is of this module."""
        return any(window.module is module for window in self.open)

    def close_all(self) -> None:
        """Close all, as nothing is being called any more."""
        _close_all(self.open)


def _close_all(windows: list[Window | Packing]) -> None:
    while windows:
        _close_innermost(windows)


def _close_innermost(windows: list[Window | Packing]) -> None:
    windows[-1].close()
    windows.pop()  # behind that: what Ctrl-C leaves of it is closed by the next forward


def check_thread(module: nn.Module) -> None:
    """Raise RuntimeError if a module has weights of a call that goes on in another thread."""
    thread = module.__dict__.get(_THREAD)
    if thread is not None and thread != get_ident():
        raise RuntimeError(
            f"zero.stream: a {type(module).__name__} is called in two threads at once, expected one"
        )


def _flatten(module: nn.RNNBase) -> None:
    """Let a recurrent module have the weights that are its attributes now."""
    module.__dict__[FLAT_WEIGHTS] = [getattr(module, name, None) for name in flat_names_of(module)]


def slots_of(
    module: nn.Module, recurse: bool, is_streamed: Callable[[Tensor], bool]
) -> Iterator[tuple[Tensor, nn.Module, str]]:
    """Yield parameters that are to be fetched, the modules that have them, and by which names.

    Args:
        module: to look at.
        recurse: at those in it, too.
        is_streamed: tells of a parameter whether it is to be fetched.
    """
    for at in module.modules() if recurse else (module,):
        for name, param in parameters_of(at).items():
            if param is not None and name not in at.__dict__ and is_streamed(param):
                yield param, at, name

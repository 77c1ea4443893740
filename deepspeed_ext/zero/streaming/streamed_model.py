"""stream: weights of a model rest in host memory or a file, and come to the device by blocks."""

import os
import threading
import weakref
from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from deepspeed_ext.offload.activations.tracing import untraced_where_compiled
from deepspeed_ext.offload.copies import CopyStreams
from deepspeed_ext.offload.streamed import home_of, set_beside, set_home
from deepspeed_ext.offload.tiers.room import bytes_in
from deepspeed_ext.torch_internals.dispatch import (
    current_backward,
    is_in_backward,
    queue_callback,
)
from deepspeed_ext.torch_internals.tensors import past_torch_function
from deepspeed_ext.zero.blocks import Block, blocks_of
from deepspeed_ext.zero.memory import is_empty
from deepspeed_ext.zero.streaming.arguments import (
    checked_device,
    checked_folder,
    kept_in_memory,
)
from deepspeed_ext.zero.streaming.fetched import Fetched
from deepspeed_ext.zero.streaming.gradients import Gradients, nothing
from deepspeed_ext.zero.streaming.hooks import Hook
from deepspeed_ext.zero.streaming.moves import keep_at_rest
from deepspeed_ext.zero.streaming.order import Order
from deepspeed_ext.zero.streaming.pieces import Piece
from deepspeed_ext.zero.streaming.rest import (
    OP,
    bring_to_device,
    bring_to_rest,
    pinned_memory,
    streamed_parameters,
)
from deepspeed_ext.zero.streaming.scratch import ScratchMemory, reserved_bytes
from deepspeed_ext.zero.streaming.staging import Staging
from deepspeed_ext.zero.streaming.windows import Slot, Window, Windows, check_thread, slots_of

_MARK = "_zero_stream"
_BLOCK = "_zero_stream_block"  # a mark of its blocks, which their copies have, too


class Stream:
    """A model whose blocks are streamed; see `stream`."""

    def __init__(
        self,
        model: nn.Module,
        blocks: dict[str, nn.Module],
        to: torch.device,
        prefetch: int,
        folder: str | None,
        budget: int | None,
    ) -> None:
        rows = streamed_parameters(model, blocks)
        kept = kept_in_memory(rows, budget, folder is not None, 1 + prefetch)
        scratch = None if folder is None else ScratchMemory(folder, reserved_bytes(rows[kept:]))
        self._scratch = scratch
        self._staging = None if scratch is None else Staging(scratch, 1 + prefetch)
        self._model = weakref.ref(model)
        self._to = self.device = to
        self._prefetch = prefetch
        self._streams = CopyStreams(to)
        self._gradients = Gradients(self._streams, pinned_memory, False)
        of_disk = None if scratch is None else Gradients(self._streams, scratch.memory, True)
        self._of_disk = of_disk or self._gradients
        self._blocks = weakref.WeakSet(blocks.values())
        self._order = {False: Order(blocks.values()), True: Order(reversed([*blocks.values()]))}
        self._windows = Windows({})
        self._lock = threading.RLock()  # autograd has threads of its own
        self._has_ended = False
        self._held: list[Fetched] = []  # for backward, the one that was used last is the last
        self._ahead: dict[nn.Module, Fetched] = {}  # for the forward of the model that goes on
        self._last: Piece | None = None  # that backward has wanted
        self._deferred = deque[Fetched]()
        self._begun_ahead = weakref.WeakSet[Fetched]()  # of which nobody has wanted any yet
        self._is_in_forward = False
        self._backwards: set[int] = set()  # numbers of those under way that want weights
        self._blocks_of = WeakIdKeyDictionary()  # of what rests
        self._counts = {"fetched": 0, "ahead": 0, "bytes_in": 0}
        self._empty = [param for params in rows for param in params if param.is_meta]
        homes = [self._gradients if i < kept else self._of_disk for i in range(len(rows))]
        for params, home in zip(rows, homes, strict=True):
            bring_to_rest(params, home.memory)
        bring_to_device(model, to, (param for params in rows for param in params))
        for param in model.parameters():
            set_beside(param)
        for params, block, home in zip(rows, blocks.values(), homes, strict=True):
            for param in params:
                self._blocks_of[param] = weakref.ref(block)
                set_home(param, home)
        self._hooked = weakref.WeakSet[nn.Module]()  # copies of them have hooks, too
        begin, end = Hook(self, "begin_forward"), Hook(self, "end_forward")
        self._removes = [
            model.register_forward_pre_hook(begin, prepend=True).remove,
            model.register_forward_hook(end, always_call=True).remove,
        ]
        for block, home in zip(blocks.values(), homes, strict=True):
            object.__setattr__(block, _BLOCK, True)
            for module in block.modules():
                if module is block or any(
                    param in self._blocks_of for param in module.parameters(recurse=False)
                ):
                    self._hooked.add(module)
                    before, after = Hook(self, "enter"), Hook(self, "leave")
                    self._removes += [
                        module.register_forward_pre_hook(before, prepend=True).remove,
                        module.register_forward_hook(after, always_call=True).remove,
                        keep_at_rest(module, self._blocks_of.__contains__, home.memory),
                    ]
        object.__setattr__(model, _MARK, self)

    def stats(self) -> dict[str, int]:
        """Return counts so far.

        Returns:
            `fetched`: how often a block came to the device; `ahead`: how often of that before it
            was wanted; `bytes_in` and `bytes_out`: weights to the device, gradients from it;
            `resting_bytes`: of all weights at rest; `disk_bytes`: of those in a scratch file.
        """
        scratch, resting = self._scratch, list(self._blocks_of)
        with past_torch_function():
            on_disk = [] if scratch is None else [p for p in resting if scratch.has(p)]
            sizes = {
                "resting_bytes": sum(param.nbytes for param in resting),
                "disk_bytes": sum(param.nbytes for param in on_disk),
            }
        homes = {self._gradients, self._of_disk}
        return {**self._counts, "bytes_out": sum(home.bytes_out for home in homes), **sizes}

    def close(self) -> None:
        """Stream no more: parameters stay where they are, and the model is an ordinary one.

        A scratch file stays as long as it is the memory of any tensor. More calls do nothing, but
        finish one that an error has ended.

        Raises:
            RuntimeError: a block computes in another thread; nothing was changed.
        """
        with self._lock:
            if not self._has_ended:
                self._check_others()
                self._end()
                self._has_ended = True
            model = self._model()
            if model is not None and getattr(model, _MARK, None) is self:
                object.__delattr__(model, _MARK)  # the last of it: now others may stream the model
            if self._scratch is not None:
                self._scratch.close()

    def _check_others(self) -> None:
        for window in self._windows.of_others():
            raise RuntimeError(
                f"{OP}: close() is called while a {type(window.module).__name__} computes in"
                " another thread, expected none that does"
            )

    def _end(self) -> None:
        for remove in self._removes:
            remove()
        self._windows.close_left()
        self._windows.close_all()
        self._let_go()
        for param in self._blocks_of:
            set_home(param, None)
        for block in self._blocks:
            block.__dict__.pop(_BLOCK, None)
        model = self._model()
        if model is not None:
            for param in model.parameters():
                set_beside(param, False)

    def __deepcopy__(self, memo: Any) -> "Stream":
        return self  # hooks of a copy of the model go on calling it

    def __reduce__(self) -> tuple[Any, ...]:
        return nothing, ()  # a pickle of the model is an ordinary one

    def _let_go(self) -> None:
        with self._lock:
            self._deferred.clear()
            self._drop_held()
            self._ahead.clear()

    # Forward

    def begin_forward(self, model: nn.Module, *_: Any) -> None:
        """See that nothing is left of a forward or a backward that has failed."""
        if is_in_backward():
            return
        self._empty = [param for param in self._empty if is_empty(param)]
        if self._empty:
            raise RuntimeError(
                f"{OP}: {len(self._empty)} parameters that were on meta have no values, expected"
                " some before a forward, as zero.Init's fill(model) gives them"
            )
        self._windows.close_all()
        with self._lock:
            self._let_go()
            self._backwards.clear()
            self._order[False].begin()
            self._is_in_forward = True

    def end_forward(self, model: nn.Module, *_: Any) -> None:
        """Drop what was fetched for blocks that were not called."""
        if is_in_backward():
            return
        with self._lock:
            self._is_in_forward = False
            self._deferred.clear()
            self._ahead.clear()
            if not torch.is_grad_enabled():
                self._drop_held()

    @untraced_where_compiled
    def enter(self, module: nn.Module, *_: Any) -> None:
        """Put fetched weights in the place of parameters, if they are not there."""
        with self._lock:
            self._windows.close_left()
        check_thread(module)
        is_block = _BLOCK in module.__dict__
        self._forget_broken_calls(module, is_block)
        found = list(slots_of(module, is_block, self._is_streamed))
        if not found:
            self._windows.pack_again(module)
            return
        if is_in_backward():
            block = module if is_block else self._block_with(found[0][0]) or module
            piece = self._piece(block) or _piece(found, None)
            got = self.fetched(piece)
        else:
            piece = _piece(found, module if is_block else None)
            got = self._for_forward(piece)
        rows = {id(param): row for row, param in enumerate(piece.params)}
        slots = [Slot(at, name, rows[id(param)]) for param, at, name in found]
        home = home_of(piece.params[0])
        home = home if isinstance(home, Gradients) else self._gradients
        window = Window(module, self, home, got, slots)
        with self._lock:
            if self._has_ended and module in self._hooked:  # meanwhile, by another thread
                self._let_go()
                return
            self._windows.begin(window)

    def _forget_broken_calls(self, module: nn.Module, is_block: bool) -> None:
        """Begin anew where Ctrl-C has left calls open, of which torch tells no hook."""
        is_beside_others = is_block and not is_in_backward()
        if self._windows.has(module) or (is_beside_others and self._windows.open):
            self._windows.close_all()
            self._let_go()
            self._is_in_forward = False

    @untraced_where_compiled
    def leave(self, module: nn.Module, *_: Any) -> None:
        """Let the module have its parameters again."""
        with self._lock:
            self._begin_deferred()
        self._windows.close(module)

    def _for_forward(self, piece: Piece) -> Fetched:
        """Return weights for a call, and begin to bring those that are wanted next.

        Nothing is used again that was fetched for another call: who writes to `.data` tells nobody.
        """
        with self._lock:
            block = piece.block
            ahead = None if block is None else self._ahead.pop(block, None)
            there = None if ahead is None else _found(piece, [ahead])
            del ahead
            self._drop_held()
            got = self._wanted(there, piece)
            self._held.append(got)  # backward may begin with it
            if block is not None and self._is_in_forward:
                order = self._order[False]
                order.note(block)
                for following in order.after(block, self._prefetch):
                    wanted = None if following in self._ahead else self._piece(following)
                    if wanted is not None:
                        self._ahead[following] = self._ahead_of_use(wanted)
            return self._awaited(got)

    def _awaited(self, got: Fetched) -> Fetched:
        """Let the current stream wait for a piece, after others have begun to come."""
        try:
            got.wait()
        except BaseException:
            self._drop_held()  # or it would seem to be there
            raise
        return got

    def _wanted(self, there: Fetched | None, piece: Piece) -> Fetched:
        """Return a piece that is there, or on its way."""
        got = there or self._begun(piece)
        got.begin()
        got.piece = piece  # or one like it
        if got in self._begun_ahead:
            self._begun_ahead.discard(got)
            self._counts["ahead"] += 1
        return got

    def _ahead_of_use(self, piece: Piece) -> Fetched:
        got = self._reserved(piece)
        self._begun_ahead.add(got)
        if got.waits_for_a_step:  # what computes meanwhile is to be queued first
            self._deferred.append(got)
        else:
            got.begin()
        return got

    def _begin_deferred(self) -> None:
        while self._deferred:
            self._deferred.popleft().begin()

    def _begun(self, piece: Piece) -> Fetched:
        got = self._reserved(piece)
        got.begin()
        return got

    def _reserved(self, piece: Piece) -> Fetched:
        got = Fetched(piece, self._streams, self._staging)
        self._counts["fetched"] += 1
        self._counts["bytes_in"] += piece.nbytes
        return got

    # Backward

    @untraced_where_compiled
    def fetched(self, piece: Piece) -> Fetched:
        """Return what a backward wants that has saved weights of a piece."""
        with self._lock:
            self._follow_backward()
            held = self._held
            if self._last is piece and held and held[0].is_of_current_stream():
                return held[0]
            self._last = piece
            wanted = [piece]
            if piece.block is not None:
                order = self._order[True]
                order.note(piece.block)
                following = map(self._piece, order.after(piece.block, self._prefetch))
                wanted += [each for each in following if each is not None]
            there = [_found(each, held) for each in wanted]
            held.clear()  # what is not wanted goes before others come
            got = self._wanted(there[0], piece)
            both = zip(wanted[1:], there[1:], strict=True)
            held += [got, *(known or self._ahead_of_use(each) for each, known in both)]
            return self._awaited(got)

    def _follow_backward(self) -> None:
        number = current_backward()
        if number != -1 and number not in self._backwards:
            if not self._backwards:
                self._order[True].begin()
            self._backwards.add(number)
            queue_callback(partial(self._end_backward, number))

    def _end_backward(self, number: int) -> None:
        with self._lock:
            self._backwards.discard(number)
            if not self._backwards:
                self._drop_held()

    def _drop_held(self) -> None:
        self._last = None
        self._held.clear()

    # What is fetched

    def _is_streamed(self, param: Tensor) -> bool:
        with past_torch_function():
            return param.device != self._to or param in self._blocks_of

    def _block_with(self, param: Tensor) -> nn.Module | None:
        known = self._blocks_of.get(param)
        return None if known is None else known()

    def _piece(self, block: nn.Module) -> Piece | None:
        """Return all that is to be fetched of a block, or None."""
        found = list(slots_of(block, True, self._is_streamed))
        return _piece(found, block) if found else None


def _found(piece: Piece, ahead: Iterable[Fetched]) -> Fetched | None:
    """Return what there is of a piece, as its parameters are now."""
    for got in ahead:
        if got.is_of_current_stream() and piece.is_like(got.piece):
            return got
    return None


def _piece(found: list[tuple[Tensor, nn.Module, str]], block: nn.Module | None) -> Piece:
    return Piece([*{id(param): param for param, *_ in found}.values()], block)


def is_streamed(model: nn.Module) -> bool:
    """Tell whether a model is streamed."""
    return getattr(model, _MARK, None) is not None


def computes_on(model: nn.Module) -> torch.device | None:
    """Return where a model that streams computes; None: it does not stream."""
    found: Stream | None = getattr(model, _MARK, None)
    return None if found is None else found.device


def stream(
    model: nn.Module,
    device: str = "cpu",
    *,
    to: torch.device | str | None = None,
    blocks: Iterable[Block] | None = None,
    prefetch: int = 1,
    memory_budget: int | str | None = None,
    nvme_path: str | bytes | os.PathLike[str] | None = None,
) -> Stream:
    """Let the weights of a model's blocks rest in host memory or a file, and come as wanted.

    Parameters stay the objects that they are. Those of a block lie in one piece of pinned host
    memory, or of a file that is mapped to memory, where optimizers, `state_dict`,
    `load_state_dict` and all that is outside of a forward find them; while a block computes, its
    modules have copies on the device in their place, for which `1 + prefetch` blocks of memory are
    enough. Autograd saves none of these copies: backward fetches them again. Gradients leave the
    device as backward makes them, and parameters get them in host memory when it ends, or at once
    where somebody has a hook on them.

    What is in no block, such as embeddings, what other modules have, too, such as a tied head, and
    what is small beside its block's largest parameter (less than a 64th, as norms and adapters
    are) stays on the device, and so do buffers.

    Make the optimizer before or after it; one that steps in host memory, such as
    `DeepSpeedCPUAdam`, steps what rests. What is not seen: a weight that forward itself writes by
    `.data`; writes that count versions are taken home.

    With "nvme" the host needs memory for `1 + prefetch` blocks, and holds others as far as
    memory_budget says; the kernel's page cache has of the file what fits beside all else. The file
    has no name, and goes with the process, however that ends, or with the last tensor in it:
    `close` leaves parameters there, and so does `OffloadOptimizer`. What has got other memory, as
    by `param.data = ...`, comes from there. A forked child has weights of its own from its first
    write on; before, it may see the parent's.

    Args:
        model: of one process, on any device; what is on meta is to be filled after this, as by
            `Init.fill`. Its blocks are called as modules; what takes their
            weights outside of a call finds them in host memory.
        device: where weights rest: "cpu", or "nvme" for a disk.
        to: where the model computes; None: the current GPU if there is one, else the CPU.
        blocks: names of modules, in which * stands for anything (of modules in each other the
            outer ones), or classes, beside each other. None: modules of one class listed in a
            ModuleList, Sequential or ModuleDict.
        prefetch: how many blocks are brought ahead of the one that computes, 0 or more.
        memory_budget: most bytes of host memory for weights, as a number or as "2GiB". With "nvme"
            the first blocks rest in memory, as far as it holds them beside those that are read;
            None: none do. With "cpu" it has to hold all that rest.
        nvme_path: for "nvme", a folder on the disk to use; nothing is to be seen there.

    Returns:
        What tells of it and ends it: `stats()`, `close()`.

    Raises:
        ValueError: an argument or a parameter is not as it must be; the text names it.
        TypeError: model is none, or nvme_path no path.
        OSError: nvme_path is no folder to write in, or has too little room, and no parameter was
            moved. Of calls of the model: the file cannot be read.

    See: Rajbhandari et al., "ZeRO-Infinity", 2021, section 5.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{OP}: model is a {type(model).__name__}, expected a torch.nn.Module")
    folder = checked_folder(device, nvme_path)
    budget = bytes_in(f"{OP}: memory_budget", memory_budget)
    if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
        raise ValueError(f"{OP}: prefetch is {prefetch!r}, expected a number, 0 or more")
    if is_streamed(model):
        raise ValueError(f"{OP}: model is streamed already, expected one that is not")
    found = blocks_of(model, blocks, OP)
    if not found:
        raise ValueError(
            f"{OP}: model has no list of modules of one class, expected blocks; name them by"
            " blocks="
        )
    return Stream(model, found, checked_device(to), prefetch, folder, budget)

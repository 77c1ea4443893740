"""Gradients of streamed weights: from the device to the parameters, which are in host memory."""

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from deepspeed_ext.offload.copies import Copy, CopyStreams, Event
from deepspeed_ext.offload.host_tensors import Memory
from deepspeed_ext.offload.streamed import Take
from deepspeed_ext.torch_internals.dispatch import (
    accumulates,
    current_backward,
    keeps_graph,
    queue_callback,
)
from deepspeed_ext.torch_internals.tensors import has_gradient_hooks
from deepspeed_ext.zero.streaming.fetched import Fetched


class Use(torch.autograd.Function):
    """Stands between parameters at rest and the weights that a block computes with."""

    @staticmethod
    def forward(ctx: Any, home: "Gradients", got: Fetched, rows: list[int], *_: Tensor) -> Any:
        """Return the weights of some rows of a piece; their parameters are the other arguments."""
        ctx.set_materialize_grads(False)
        ctx.home = home
        ctx.pending = home.note_use([got.piece.params[row] for row in rows])
        return tuple(got.weight(row) for row in rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Bring gradients home, or have them brought there until backward ends."""
        nodes = [node for node, _ in ctx.next_functions]
        return None, None, None, *ctx.home.bring(nodes, grads, ctx.pending)


class _Pending:
    """A use of parameters, of which backward may still bring gradients; it goes with its graph."""

    is_over = False


class Gradients:
    """Brings gradients to host memory.

    Where nobody looks at them before backward ends they come while it goes on, and parameters get
    them at its end. Else, or if it cannot be told, backward waits for them.

    Args:
        streams: of the device.
        memory: see offload.streamed.Home.
        keeps_memory: likewise.
    """

    def __init__(self, streams: CopyStreams, memory: Memory, keeps_memory: bool) -> None:
        self.memory, self.keeps_memory = memory, keeps_memory
        self._streams = streams
        # By the number of the backward, which has them: they go with one that fails.
        self._backwards = weakref.WeakValueDictionary[int, _Backward]()
        self._uses = WeakIdKeyDictionary()  # the pending ones of each parameter
        self._takers = WeakIdKeyDictionary()  # of gradients that are still on the device
        self.bytes_out = 0

    def __deepcopy__(self, memo: Any) -> None:
        """Return None: what a copy of a parameter is to have of it; likewise a pickle."""

    def __reduce__(self) -> tuple[Any, ...]:
        return nothing, ()

    def hand_over(self, param: Tensor, take: Take | None) -> None:
        """See offload.streamed.Home."""
        if take is None:
            self._takers.pop(param, None)
        else:
            self._takers[param] = take

    def hands_over(self, param: Tensor) -> bool:
        """See offload.streamed.Home."""
        return param in self._takers

    def note_use(self, params: Sequence[Tensor]) -> _Pending:
        """Return what stands for the graph's use of parameters."""
        made = _Pending()
        for param in params:
            if param not in self._uses:
                self._uses[param] = weakref.WeakSet()
            self._uses[param].add(made)
        return made

    def bring(
        self, nodes: Sequence[Any], grads: Sequence[Tensor | None], use: _Pending
    ) -> list[Tensor | None]:
        """Return what the backward of `Use` is to return.

        Args:
            nodes: where gradients of the parameters go.
            grads: of the weights.
            use: that they are of.
        """
        if torch.is_grad_enabled():  # a graph is made of this backward, too
            return [None if grad is None else grad.to("cpu") for grad in grads]
        found: list[Tensor | None] = [None] * len(grads)
        later: list[tuple[Tensor, Tensor]] = []
        now: list[int] = []
        for i, (node, grad) in enumerate(zip(nodes, grads, strict=True)):
            if node is None or grad is None:
                continue
            if grad.layout is not torch.strided:
                found[i] = grad.to("cpu")
            elif _is_for_nobody_else(node):
                later.append((node.variable, _lying_as(grad, node.variable)))
            else:
                now.append(i)
        use.is_over = not keeps_graph()
        coming = self._send([grads[i] for i in now])  # type: ignore[misc]
        coming.wait()
        for i, grad in zip(now, coming.host, strict=True):
            found[i] = grad
        if later:
            self._bring_later(later)
        return found

    def _bring_later(self, later: list[tuple[Tensor, Tensor]]) -> None:
        later = [(param, grad) for param, grad in later if not self._is_taken(param, grad)]
        if not later:
            return
        number = current_backward()
        backward = self._backwards.get(number)
        if backward is None:
            backward = self._backwards[number] = _Backward()
            queue_callback(partial(self._end, backward))
        params, grads = map(list, zip(*later, strict=True))
        coming = self._send(grads)
        coming.params = params
        backward.coming.append(coming)

    def _is_taken(self, param: Tensor, grad: Tensor) -> bool:
        """Have a gradient taken, if it is all that this backward brings of the parameter.

        Else it is one of several, of which autograd makes one.
        """
        take: Take | None = self._takers.get(param)
        if take is None or not self._is_whole(param) or not take(param, grad):
            return False
        self.bytes_out += grad.nbytes
        return True

    def _is_whole(self, param: Tensor) -> bool:
        backward = self._backwards.get(current_backward())
        if backward is not None and backward.brings(param):
            return False
        others = sum(not use.is_over for use in self._uses.get(param, ()))
        return others <= int(keeps_graph())

    def _send(self, grads: list[Tensor]) -> "_Coming":
        host = [grad.data for grad in self._streams.staged(grads)] if grads else []
        event = self._streams.fetch(list(map(Copy, host, grads))) if grads else None
        self.bytes_out += sum(grad.nbytes for grad in grads)
        return _Coming(host, event)

    @torch.no_grad()
    def _end(self, backward: "_Backward") -> None:
        """Give parameters what a backward has brought, each its sum, as autograd does."""
        sums: dict[int, tuple[Tensor, Tensor]] = {}
        for coming in backward.coming:
            coming.wait()
            for param, grad in zip(coming.params, coming.host, strict=True):
                known = sums.get(id(param))
                sums[id(param)] = (param, grad if known is None else known[1].add_(grad))
        for param, grad in sums.values():
            take: Take | None = self._takers.get(param)
            if take is not None and take(param, grad):
                continue
            if param.grad is None:
                param.grad = grad
            elif param.grad.layout is torch.strided:
                param.grad.add_(grad)
            else:
                param.grad = grad + param.grad


def nothing() -> None:
    """Return None, as what pickles make of an object that is of this process alone."""


class _Coming:
    """Gradients on their way to host memory."""

    def __init__(self, host: list[Tensor], event: Event | None) -> None:
        self.params: list[Tensor] = []
        self.host = host
        self._event = event

    def wait(self) -> None:
        """Wait until they are there."""
        if self._event is not None:
            self._event.synchronize()


class _Backward:
    """What a backward that is under way has sent."""

    def __init__(self) -> None:
        self.coming: list[_Coming] = []

    def brings(self, param: Tensor) -> bool:
        """Tell whether a gradient of a parameter is among it."""
        return any(param is other for some in self.coming for other in some.params)


def _is_for_nobody_else(node: Any) -> bool:
    """Tell whether only the parameter gets a gradient from this node, and no hook looks at it."""
    param = getattr(node, "variable", None)
    if param is None or has_gradient_hooks(param) or not accumulates(node):
        return False
    # Those of DDP sit where nothing shows them.
    return not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


def _lying_as(grad: Tensor, param: Tensor) -> Tensor:
    """Return a gradient in the layout of its parameter."""
    if grad.stride() == param.stride() and grad.dtype == param.dtype:
        return grad
    made = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device=grad.device)
    return made.copy_(grad)

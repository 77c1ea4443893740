"""The terms of an offloaded step, each measured alone: copies both ways, and the host's step."""

from collections.abc import Callable, Iterator, Sequence, Set
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.harness import seconds_on_cpu, seconds_on_cuda
from benchmarks.offload_contenders import FORMATS, NUMBERS, drop_garbage
from benchmarks.results import Timing
from benchmarks.stream import NAME, Stream
from deepspeed_ext.io import PinnedBuffer
from deepspeed_ext.optim import DeepSpeedCPUAdam

OUT, BACK = "gradients out", "weights in"
TORCH = "torch AdamW(fused=True), fp32"
STREAM = NAME
BYTES = {"fp32": 28, "compact": 14}  # of an element, that the step moves with bf16 weights
_STREAM_BYTES = 28 * 2**28  # so much is enough to know its rate
_WARM_UP = 2


def host(form: str) -> str:
    """Return the name of our step in host memory."""
    return f"DeepSpeedCPUAdam, {form} state"


def beside(form: str, times: int = 1) -> str:
    """Return the name of the same while gradients are copied, and weights once or twice."""
    return f"{host(form)}, beside both copies" + ", weights twice" * (times == 2)


class Terms:
    """Measures terms for the parameters of a model.

    Args:
        model: on the device; its weights are changed a little.
        device: "cpu" or "cuda".
        rounds: how often each is timed.
    """

    def __init__(self, model: nn.Module, device: str, rounds: int) -> None:
        self._params = [param.detach() for param in model.parameters()]
        self._device, self._rounds = device, rounds
        self._weights, self._grads = (_pinned_like(self._params) for _ in range(2))
        for target, param in zip((*self._weights, *self._grads), self._params * 2, strict=True):
            target.copy_(param)
        self._streams = [torch.cuda.Stream() for _ in range(2)] if device == "cuda" else []

    def measure(self, wanted: Set[str], advance: Callable[[], object]) -> dict[str, Timing]:
        """Return how long terms take, by their names; `advance` is called for each."""
        makers: dict[tuple[str, ...], Callable[[], Iterator[Timing]]] = {
            (OUT, BACK): self._of_copies,
            **{
                (host(form), beside(form), beside(form, 2)): partial(self._of_ours, form)
                for form in FORMATS
            },
            (TORCH,): self._of_torch,
            (STREAM,): self._of_stream,
        }
        found: dict[str, Timing] = {}
        for names, make in makers.items():
            if wanted.isdisjoint(names):
                continue
            for name, timing in zip(names, make(), strict=True):
                found[name] = timing
                if name in wanted:
                    advance()
            drop_garbage()
        return found

    def _of_copies(self) -> Iterator[Timing]:
        yield self._time(self._out, self._device)
        yield self._time(self._back, self._device)

    def _out(self) -> None:
        for target, source in zip(self._grads, self._params, strict=True):
            target.copy_(source, non_blocking=True)

    def _back(self) -> None:
        for target, source in zip(self._params, self._weights, strict=True):
            target.copy_(source, non_blocking=True)

    def _copy(self, times: int) -> None:
        """Begin both copies; on the CPU, where nothing goes on beside the host, do none."""
        if self._streams:
            torch.cuda.synchronize()
            copies = ([self._out], [self._back] * times)
            for stream, some in zip(self._streams, copies, strict=True):
                with torch.cuda.stream(stream):
                    for copy in some:
                        copy()

    def _of_ours(self, form: str) -> Iterator[Timing]:
        params = list(map(nn.Parameter, self._weights))
        for param, grad in zip(params, self._grads, strict=True):
            param.grad = grad
        optimizer = DeepSpeedCPUAdam(params, **NUMBERS, **FORMATS[form])
        yield self._time(optimizer.step, "cpu")
        for times in (1, 2):
            yield self._time(optimizer.step, "cpu", before=partial(self._copy, times))

    def _of_torch(self) -> Iterator[Timing]:
        params = [nn.Parameter(weight.float()) for weight in self._weights]
        for param, grad in zip(params, self._grads, strict=True):
            param.grad = grad.float()
        optimizer = torch.optim.AdamW(params, fused=True, **NUMBERS)
        yield self._time(optimizer.step, "cpu")

    def _of_stream(self) -> Iterator[Timing]:
        """What a byte takes that is only read or written."""
        contender = Stream("cpu").contender(_STREAM_BYTES, torch.get_num_threads())
        yield scaled(self._time(contender.run, "cpu"), 1 / _STREAM_BYTES)

    def _time(
        self, run: Callable[[], object], device: str, before: Callable[[], None] | None = None
    ) -> Timing:
        seconds_of = seconds_on_cuda if device == "cuda" else seconds_on_cpu
        seconds = []
        for _ in range(_WARM_UP + self._rounds):
            if before is not None:
                before()
            seconds.append(seconds_of(run))
        return Timing.of(seconds[_WARM_UP:])


def scaled(timing: Timing, factor: float) -> Timing:
    """Return how long it takes to do so many times as much."""
    return Timing(factor * timing.median, factor * timing.least, factor * timing.most)


def bound(busy: float, copies_and_step: Sequence[float], share: float) -> float:
    """Return the seconds that nobody can be faster than.

    Args:
        busy: what the device does meanwhile.
        copies_and_step: gradients out, weights in, and the host's step beside both.
        share: of the model, that leaves the device last: it has nothing to hide behind.
    """
    return max(busy, *copies_and_step) + share * sum(copies_and_step)


def _pinned_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return pinned host memory for each of these, in one piece."""
    memory = PinnedBuffer(sum(tensor.nbytes for tensor in tensors)).tensor()
    made, begin = [], 0
    for tensor in tensors:
        part = memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        # With a version counter of its own: a step that finds another looks at master weights.
        made.append(part.data)
        begin += tensor.nbytes
    return made

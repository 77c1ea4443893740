"""The picture of what each stage keeps and sends in a step of two micro-steps."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.offload_model import Size, make_data
from benchmarks.zero_contenders import ZeroWorkload, drop_garbage, ours, synchronize
from deepspeed_ext import zero
from deepspeed_ext.dtensors import local

_MICRO_STEPS = 2
_WARM_UP = 2
_COLLECTIVES = {  # of torch 2.11 and 2.13; the place and name of what is whole, times it is sent
    "all_gather_into_tensor": (0, "output_tensor", "gathered", 1),
    "all_gather_single": (0, "output", "gathered", 1),
    "reduce_scatter_tensor": (1, "input", "reduced", 1),
    "reduce_scatter_single": (1, "input", "reduced", 1),
    "all_reduce": (0, "tensor", "reduced", 2),
}
_COLORS = {"forward": "tab:blue", "backward": "tab:cyan", "step": "tab:green"}
_SENT = {"gathered": "tab:purple", "reduced": "tab:orange"}

Spans = list[tuple[str, float, float]]
Moments = list[tuple[float, int]]


class Recorded(NamedTuple):
    """A step, in seconds from its beginning.

    Attributes:
        spans: what went on: name, begin and end.
        memory: bytes of tensors at each moment when they change.
        kept: bytes between steps.
        sent: for "gathered" and "reduced" when it was asked for, and bytes sent till then.
    """

    spans: Spans
    memory: Moments
    kept: int
    sent: dict[str, Moments]


def draw(size: Size, device: str, path: Path, advance: Callable[[], object]) -> None:
    """Take steps in all stages and draw one of each; the first process does.

    Args:
        size: of model and batch.
        device: "cpu" or "cuda".
        path: of the picture.
        advance: is called for each stage.
    """
    recorded = []
    for stage in range(4):
        recorded.append(_record(stage, size, device))
        drop_garbage(device)
        advance()
    if dist.get_rank() > 0:
        return
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU, gloo"
    numel = recorded[0].kept // 12  # in float32, with two of state
    title = (
        f"{numel / 1e6:,.0f} M parameters, {dist.get_world_size()} processes ({where}), a step of"
        f" {_MICRO_STEPS} micro-steps"
    )
    _plot(recorded, title, path)


def _record(stage: int, size: Size, device: str) -> Recorded:
    made = ours(ZeroWorkload(stage), size, device)
    data = make_data(size, device)
    spans: Spans = []

    @contextmanager
    def span(name: str) -> Iterator[None]:
        begin = _now(device)
        yield
        spans.append((name, begin, _now(device)))

    def step() -> None:
        for _ in zero.accumulate(made.model, _MICRO_STEPS):
            with span("forward"):
                loss = made.model(*data)
            with span("backward"):
                loss.backward()
        with span("step"):
            made.step()

    for _ in range(_WARM_UP):
        step()
    spans.clear()
    states = [s for entry in made.optimizer.state.values() for s in entry.values()]
    kept = sum(local(t).nbytes for t in [*made.model.parameters(), *states])
    activities = [ProfilerActivity.CPU]
    synchronize(device)
    with _counted() as sent, profile(activities=activities, profile_memory=True) as profiled:
        begin = time.time()
        step()
        synchronize(device)
    kind = DeviceType.CUDA if device == "cuda" else DeviceType.CPU
    events = [
        (event.start_ns() / 1e9 - begin, event.nbytes())
        for event in profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
        if event.name() == "[memory]" and event.device_type() == kind
    ]
    sums = accumulate((change for _, change in sorted(events)), initial=kept)
    memory = list(zip([0.0, *sorted(moment for moment, _ in events)], sums, strict=True))
    return Recorded(
        [(name, first - begin, last - begin) for name, first, last in spans],
        memory,
        kept,
        {kind: [(moment - begin, n) for moment, n in each] for kind, each in sent.items()},
    )


@contextmanager
def _counted() -> Iterator[dict[str, Moments]]:
    """Note the bytes that this process sends."""
    sent: dict[str, Moments] = {name: [] for name in _SENT}
    real = {name: getattr(dist, name) for name in _COLLECTIVES if hasattr(dist, name)}
    share = (dist.get_world_size() - 1) / dist.get_world_size()

    def counting(name: str) -> Callable[..., Any]:
        place, keyword, kind, times = _COLLECTIVES[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            found = [value for key, value in kwargs.items() if key.startswith(keyword)]
            whole = found[0] if found else args[place]
            so_far = sent[kind][-1][1] if sent[kind] else 0
            sent[kind].append((time.time(), so_far + int(whole.nbytes * share * times)))
            return real[name](*args, **kwargs)

        return call

    for name in real:
        setattr(dist, name, counting(name))
    try:
        yield sent
    finally:
        for name, function in real.items():
            setattr(dist, name, function)


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.time()


def _plot(recorded: list[Recorded], title: str, path: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    figure = Figure(figsize=(12, 5.5), layout="constrained")
    figure.suptitle(title)
    rows = figure.subplots(2, len(recorded), sharey="row", sharex="col")
    for stage, step in enumerate(recorded):
        above, below = rows[:, stage]
        for axes in (above, below):
            for name, begin, end in step.spans:
                axes.axvspan(1e3 * begin, 1e3 * end, color=_COLORS[name], alpha=0.15, lw=0)
            axes.grid(axis="y", alpha=0.3)
        times, sizes = zip(*step.memory, strict=True)
        above.step([1e3 * t for t in times], [n / 2**20 for n in sizes], "k", where="post", lw=1)
        above.axhline(step.kept / 2**20, color="tab:red", ls="--", lw=1)
        above.set(title=f"stage {stage}", ylim=(0, None))
        end = step.spans[-1][2]
        for kind, moments in step.sent.items():
            points = [(0.0, 0), *moments, (end, moments[-1][1] if moments else 0)]
            times, sizes = zip(*points, strict=True)
            line = [n / 2**20 for n in sizes]
            below.step([1e3 * t for t in times], line, _SENT[kind], where="post", label=kind)
        below.set(xlabel="milliseconds", xlim=(0, 1e3 * end), ylim=(0, None))
    rows[0][0].set_ylabel("MiB that a process has")
    rows[1][0].set_ylabel("MiB that it has sent")
    rows[1][0].legend(loc="upper left")
    patches = [Patch(color=color, alpha=0.15, label=name) for name, color in _COLORS.items()]
    kept = Line2D([], [], color="tab:red", ls="--", lw=1, label="kept between steps")
    rows[0][0].legend(handles=[*patches, kept], loc="lower left")
    figure.savefig(path, dpi=110)

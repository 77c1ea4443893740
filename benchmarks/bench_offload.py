"""Whole steps with the optimizer's state in host memory: `python -m benchmarks.bench_offload`.

A model of 2.26 B parameters in bfloat16 (benchmarks/offload_model.py) takes steps of 16,384 tokens.
Their optimizers do not fit side by side in host memory, so they are measured one after another, and
forward and backward alone before each: the spread of those shows what has changed meanwhile. A
bound is computed of terms that are measured in the same run: nobody is faster than the slowest of
forward and backward, either copy, and the host's step beside both copies; and what leaves the
device last, a block, has nothing to hide its copies and step behind. Weights that are streamed come
twice, for forward and for backward.
"""

import argparse
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks import offload_picture
from benchmarks.offload_contenders import (
    ALONE,
    ALWAYS,
    FORMATS,
    SESSIONS,
    Phase,
    Session,
    drop_garbage,
    process_group,
)
from benchmarks.offload_model import Size, make_data, make_model, time_steps
from benchmarks.offload_rows import BOUND, ROWS, Row, brings, measures_of, terms_of
from benchmarks.offload_terms import (
    BACK,
    BYTES,
    OUT,
    STREAM,
    TORCH,
    Terms,
    beside,
    bound,
    host,
    scaled,
)
from benchmarks.results import Result, Timing, add_option, introduced, keep, show

STEPS = 12
_WARM_UP = 3
FORWARD = "of which forward"
TERMS = {OUT, BACK, STREAM, TORCH, *map(host, FORMATS)}
TERMS |= {beside(form, times) for form in FORMATS for times in (1, 2)}


class Bench:
    """Measures what some rows need, each of it once.

    Args:
        size: of model and batch.
        device: "cpu" or "cuda".
        allowed: GiB of the GPU that torch may have once an optimizer is made; 0: all.
        steps: how many are timed of each.
        wanted: names of what to measure.
        folder: on a disk, for what rests there; None: there is none.
        progress: advanced by one for each step, and for each term.
    """

    def __init__(
        self,
        size: Size,
        device: str,
        allowed: float,
        steps: int,
        wanted: set[str],
        folder: str | None,
        progress: "tqdm[None]",
    ) -> None:
        self._size, self._device, self._steps = size, device, steps
        self._allowed, self._folder = allowed, folder
        self._wanted, self._progress = wanted, progress
        self._data = make_data(size, device)
        self._alone: list[float] = []
        self._forward: list[float] = []
        self.timings: dict[str, Timing] = {}
        self.notes: dict[str, list[str]] = {}
        self.numel = 0
        self.share = 0.0

    def run(self) -> None:
        """Measure all of it."""
        model = self._make_model(torch.bfloat16)
        self.numel = sum(p.numel() for p in model.parameters())
        blocks = sum(p.numel() for p in model.blocks.parameters())
        self.share = blocks / len(model.blocks) / self.numel
        for session in SESSIONS:
            if not session.own_model:
                self._take(session, model)
        if ALONE in self._wanted:
            self._time_alone(model)
        if self._wanted & TERMS:
            terms = Terms(model, self._device, self._steps)
            self.timings |= terms.measure(self._wanted, self._progress.update)
            del terms
        del model
        drop_garbage()
        for session in SESSIONS:
            if session.own_model:
                self._take(session, None)

    def _make_model(self, dtype: torch.dtype) -> nn.Module:
        return make_model(self._size, self._device, dtype)

    def _take(self, session: Session, model: nn.Module | None) -> None:
        """Measure an optimizer in all the ways that are wanted."""
        phases = {name: phase for name, phase in session.phases.items() if name in self._wanted}
        if not phases:
            return
        why_not = session.why_not(self._device)
        if session.wants_folder and self._folder is None:
            why_not = "--nvme-path names no folder"
        if why_not:
            tqdm.write(f"\n{', '.join(phases)}: skipped, {why_not}")
            self._progress.update(sum(steps_of(phase, self._steps) for phase in phases.values()))
            return
        with process_group(self._device) if session.wants_group else nullcontext():
            if model is None:
                model = self._make_model(session.dtype)
            elif ALONE in self._wanted:
                self._time_alone(model)
            before = _allocated()
            optimizer = session.make(model, *[self._folder] * session.wants_folder)
            _allow(self._allowed)
            for name, phase in phases.items():
                self._time_phase(name, phase, model, optimizer)
                held = _allocated() - before
                texts = [f"{_peak() / 2**30:.1f} GiB of the GPU at the most"]
                if not session.own_model:
                    texts.insert(0, f"{held / 2**30:.2f} between steps more than without it")
                self.notes[name].insert(0, ", ".join(texts))
            if hasattr(optimizer, "close"):
                optimizer.close()
            del optimizer, model
        _allow(0)
        drop_garbage()

    def _time_phase(self, name: str, phase: Phase, model: nn.Module, optimizer: Any) -> None:
        if hasattr(optimizer, "max_grad_norm"):
            optimizer.max_grad_norm = phase.max_norm

        def finish() -> None:
            optimizer.step()
            optimizer.zero_grad()

        counts = _stats(optimizer)
        called = getattr(optimizer, "engine", model)
        self.timings[name] = Timing.of(self._time(called, finish, phase)[0])
        text = ", ".join(
            f"{key} {value - counts[key]:.4g}" for key, value in _stats(optimizer).items()
        )
        self.notes[name] = [text] if text else []

    def _time_alone(self, model: nn.Module) -> None:
        def finish() -> None:
            for param in model.parameters():
                param.grad = None

        whole, forward = self._time(model, finish, Phase())
        self._alone += whole
        self._forward += forward
        self.timings[ALONE] = Timing.of(self._alone)
        self.timings[FORWARD] = Timing.of(self._forward)

    def _time(
        self, model: nn.Module, finish: Any, phase: Phase
    ) -> tuple[Sequence[float], Sequence[float]]:
        tokens, targets = self._data

        def forward() -> Tensor:
            loss: Tensor = model(tokens, targets)
            return loss

        if self._device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        steps, warm_up = _counts(phase, self._steps)
        times = time_steps(
            self._device, forward, finish, steps, warm_up, phase.accumulate, self._progress.update
        )
        return times.whole, times.forward


def _counts(phase: Phase, steps: int) -> tuple[int, int]:
    """Return how many steps are timed, and how many go before."""
    few = phase.accumulate > 1  # they are long
    return (max(2, steps // 4), 2) if few else (steps, _WARM_UP)


def steps_of(phase: Phase, steps: int) -> int:
    """Return how many steps a phase takes in all."""
    return sum(_counts(phase, steps))


def _total(wanted: Iterable[str], steps: int) -> int:
    """Return how often the bar advances."""
    names = set(wanted)
    total = len(names & TERMS)
    alone = steps_of(Phase(), steps) if ALONE in names else 0
    for session in SESSIONS:
        taken = [phase for name, phase in session.phases.items() if name in names]
        total += sum(steps_of(phase, steps) for phase in taken)
        total += alone if taken and not session.own_model else 0
    return total + alone


def _stats(optimizer: Any) -> Mapping[str, float]:
    """Return what an optimizer has counted, if it does."""
    found: Mapping[str, Any] = optimizer.stats() if hasattr(optimizer, "stats") else {}
    return {key: found[key] for key in found if key not in ("threads", "processors")}


def _allocated() -> int:
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def _allow(gib: float) -> None:
    """Let torch have so much of the GPU, or all of it."""
    if torch.cuda.is_available():
        drop_garbage()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(gib * 2**30 / total if gib else 1.0)


def _peak() -> int:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def result_of(row: Row, bench: Bench, threads: int) -> Result | None:
    """Return a row, or None if what is ours of it was not measured."""
    found = bench.timings
    if row.names[0] not in found:
        return None
    notes = list(bench.notes.get(row.names[0], []))
    timings: dict[str, Timing] = {}
    bytes_moved = bench.numel * BYTES[row.form] if row.is_host else 0
    for name in row.names:
        if name == BOUND and terms_of(row) <= found.keys():
            timings[name] = _bound_of(row, bench, notes)
        elif name == STREAM and name in found:
            timings[name] = scaled(found[name], bytes_moved)
        elif name == TORCH and name in found:  # as if it were as many bytes as ours
            timings[name] = scaled(found[name], BYTES[row.form] / BYTES["fp32"])
        elif name in found:
            timings[name] = found[name]
    result = Result(
        row.work, threads, bench.numel * row.is_host, bytes_moved, timings, row.ceilings
    )
    notes += [f"ours takes {1 / times:.3f} of {name}" for name, times in result.times.items()]
    return replace(result, notes=notes)


def _bound_of(row: Row, bench: Bench, notes: list[str]) -> Timing:
    """Compute what the steps of a row cannot be faster than; the notes get what it is made of."""
    names = [OUT, BACK, beside(row.form, brings(row))]
    terms = [bench.timings[name].median for name in names]
    terms[1] *= brings(row)
    whole, forward = bench.timings[ALONE].median, bench.timings[FORWARD].median
    if ALWAYS in row.names[0]:  # known after backward only, and besides the next forward
        seconds = whole - forward + bound(forward, terms, bench.share)
    else:
        seconds = bound(whole, terms, bench.share)
    shown = dict(zip([ALONE, FORWARD, *names], [whole, forward, *terms], strict=True))
    notes += [f"{name}: {1e3 * value:.1f} ms" for name, value in shown.items()]
    return Timing.of([seconds])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    has_cuda = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if has_cuda else "cpu")
    parser.add_argument(
        "--rows", default=",".join(ROWS), help=f"such as step,host-fp32; all are {', '.join(ROWS)}"
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="how many are timed of each")
    threads = len(os.sched_getaffinity(0))
    parser.add_argument("--gpu-gib", type=float, default=0, help="that torch may have; 0: all")
    parser.add_argument("--threads", type=int, default=threads, help="of the host's step")
    for name, value in vars(Size()).items():
        parser.add_argument(f"--{name}", type=int, default=value, help="default: %(default)s")
    parser.add_argument("--timeline", type=Path, metavar="PATH", help="draw one step, no more")
    parser.add_argument("--state", choices=FORMATS, default="fp32", help="of the timeline")
    parser.add_argument("--nvme-path", metavar="DIR", help="for what rests on a disk")
    parser.add_argument("--memory-budget", default="1GiB", help="of the timeline's state on a disk")
    add_option(parser)
    options = parser.parse_args(arguments)
    wanted = options.rows.split(",")
    unknown = [word for word in wanted if not any(name.startswith(word) for name in ROWS)]
    if unknown:
        parser.error(f"rows are {unknown}, expected some of {', '.join(ROWS)}")
    torch.set_num_threads(options.threads)
    size = replace(Size(), **{name: getattr(options, name) for name in vars(Size())})
    described = introduced(options.device, model=f"{size}")
    if options.timeline is not None:
        where = {}
        if options.nvme_path is not None:
            where = {"device": "nvme", "nvme_path": options.nvme_path, "nvme_fraction": 1.0}
            where |= {"memory_budget": options.memory_budget}
        with tqdm(total=offload_picture.STEPS, desc="steps", disable=None) as progress:
            drawn = (options.state, options.timeline, progress.update)
            offload_picture.draw(size, options.device, *drawn, where)
        print(f"drawn: {options.timeline}")
        return 0
    rows = [ROWS[name] for name in ROWS if name.startswith(tuple(wanted))]
    names = set().union(*map(measures_of, rows))
    with tqdm(total=_total(names, options.steps), desc="steps", disable=None) as progress:
        given = (options.steps, names, options.nvme_path)
        bench = Bench(size, options.device, options.gpu_gib, *given, progress)
        try:
            bench.run()
        finally:  # what is measured is shown and kept, whatever fails after it
            results = [result_of(row, bench, options.threads) for row in rows]
            found = [result for result in results if result is not None]
            for result in found:
                show(result)
            keep(options.save, found, described)
    return 0


if __name__ == "__main__":
    sys.exit(main())

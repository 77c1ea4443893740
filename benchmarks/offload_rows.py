"""The rows of the offloading benchmark: what stands beside what."""

from dataclasses import dataclass

from benchmarks.offload_contenders import (
    ACCUMULATED,
    ALL_ON_DISK,
    ALONE,
    ALWAYS,
    DEEPSPEED,
    FORMATS,
    FREED,
    FROM_DISK,
    NEVER,
    STREAMED,
    TORCHAO,
    ZERO_3,
    fsdp,
    on_gpu,
    ours,
)
from benchmarks.offload_terms import BACK, OUT, STREAM, TORCH, beside, host

BOUND = "bound by the terms"


@dataclass(frozen=True)
class Row:
    """A line of the results.

    Attributes:
        work: what it is called.
        names: of what is measured, ours first; BOUND is computed.
        form: of our state.
        ceilings: those of the names that are no contenders.
        is_host: whether it is the host's step alone, of which bytes are known.
    """

    work: str
    names: tuple[str, ...]
    form: str
    ceilings: tuple[str, ...] = ()
    is_host: bool = False


def _rows() -> dict[str, Row]:
    found: dict[str, Row] = {}
    for form in FORMATS:
        state = f"{form} state"
        names = (host(form), TORCH, STREAM)
        found[f"host-{form}"] = Row(f"host step, {state}", names, form, (STREAM,), is_host=True)
        names = (ours(form), BOUND, ALONE, on_gpu(form))
        found[f"step-{form}"] = Row(f"step, {state}", names, form, (BOUND,))
        names = (ours(form, NEVER), ours(form))
        found[f"never-{form}"] = Row(f"step, {state}, {NEVER}", names, form)
        names = (ours(form, ALWAYS), BOUND, ours(form))
        found[f"always-{form}"] = Row(f"step, {state}, {ALWAYS}", names, form, (BOUND,))
        names = (ours(form, FREED), ours(form))
        found[f"freed-{form}"] = Row(f"step, {state}, {FREED}", names, form)
        names = (ours(form, STREAMED), BOUND, ours(form), ALONE, fsdp("bf16"), ZERO_3)
        found[f"streamed-{form}"] = Row(f"step, {state}, {STREAMED}", names, form, (BOUND,))
        names = (ours(form), TORCHAO, DEEPSPEED, fsdp("bf16"), fsdp("fp32"))
        found[f"others-{form}"] = Row(f"step, {state}, beside others", names, form)
        # For models whose state fits nowhere else: --rows only-compact --layers 40 --width 5120
        found[f"only-{form}"] = Row(f"step, {state}, beside nothing", (ours(form),), form)
        # And on a small GPU: only-streamed-compact --gpu-gib 24 --layers 43 --width 5120 --batch 1
        names = (ours(form, STREAMED),)
        found[f"only-streamed-{form}"] = Row(f"step, {state}, {STREAMED}, alone", names, form)
        names = (ours(form, FROM_DISK), ours(form, STREAMED))
        found[f"nvme-{form}"] = Row(f"step, {state}, {FROM_DISK}", names, form)
        # On a small host, too: only-streamed-nvme-compact, likewise, with --nvme-path
        names = (ours(form, FROM_DISK),)
        found[f"only-streamed-nvme-{form}"] = Row(f"step, {state}, {FROM_DISK}, alone", names, form)
        names = (ours(form, ALL_ON_DISK), ours(form, FROM_DISK), ours(form, STREAMED))
        found[f"all-nvme-{form}"] = Row(f"step, {state}, {ALL_ON_DISK}", names, form)
        names = (ours(form, ALL_ON_DISK),)
        found[f"only-nvme-{form}"] = Row(f"step, {state}, {ALL_ON_DISK}, alone", names, form)
        names = (ours(form, ACCUMULATED), on_gpu(form, ACCUMULATED))
        found[f"accumulate-{form}"] = Row(f"step, {state}, {ACCUMULATED}", names, form)
    return found


ROWS = _rows()


def brings(row: Row) -> int:
    """Return how often weights come to the device in a step of ours."""
    return 2 if STREAMED in row.names[0] else 1


def terms_of(row: Row) -> set[str]:
    """Return the names of what a row's bound is computed of."""
    return {ALONE, OUT, BACK, beside(row.form, brings(row))} if BOUND in row.names else set()


def measures_of(row: Row) -> set[str]:
    """Return the names of all that has to be measured for a row."""
    return {*row.names, *terms_of(row)} - {BOUND}

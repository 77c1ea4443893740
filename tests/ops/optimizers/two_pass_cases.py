"""The step ops that come in two, LAMB and LARS, and inputs for their tests.

Run as a program, it prints a digest of all results of each step op, also of the others.
"""

import ctypes
import hashlib
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import step_cases
import tolerance
import torch
from step_cases import (
    DTYPES,
    F32,
    FEW_DTYPES,
    SIZES,
    STEPS,
    Arguments,
    Dtypes,
    Step,
    in_memory_order,
    make,
    options,
    written,
)
from torch import Tensor

from deepspeed_ext import ops
from deepspeed_ext.ops.optimizers import lamb, lars
from deepspeed_ext.ops.optimizers.state_formats import decode_blocks, encode_blocks, split_float32

CHUNK = 65536  # elements that the CPU adds up at once


def call(name: str, known: dict[str, Any]) -> Any:
    """Call the function of that name with those of these arguments that it knows."""
    function = getattr(ops, name)
    names = inspect.signature(function).parameters
    return function(**{key: value for key, value in known.items() if key in names})


def reference_of(name: str) -> str:
    return name.removesuffix("_") + "_ref" + "_" * name.endswith("_")


@dataclass(frozen=True, eq=False)
class TwoPass(Step):
    """A step op that comes in two, with what a test has to know of it.

    Args:
        first: the op that measures; `errors` are of what it writes.
        factors: what makes coefficients of the squares.
        second: the op that updates.
        apply_errors: bounds the error of the second op.
        measured: the value whose squares come second, and how far it may be off.
    """

    first: str = ""
    factors: str = ""
    second: str = ""
    apply_errors: Callable[..., dict[str, Tensor]] = tolerance.lamb_apply_errors
    measured: Callable[..., tuple[Tensor, Tensor]] = tolerance.lamb_update

    @property
    def ops(self) -> tuple[str, ...]:
        return self.first, self.second

    def __call__(self, **known: Any) -> Tensor:
        return self.both(known, {})

    def measure(self, arguments: Arguments, numbers: dict[str, Any]) -> Tensor:
        squares: Tensor = call(self.first, arguments | numbers)
        return squares

    def measure_reference(self, arguments: Arguments, numbers: dict[str, Any]) -> Tensor:
        squares: Tensor = call(reference_of(self.first), arguments | numbers)
        return squares

    def coefficients(self, squares: Tensor, numbers: dict[str, Any]) -> Tensor:
        coefficients: Tensor = call(self.factors, numbers | dict(squares=squares))
        return coefficients

    def apply(self, arguments: Arguments, coefficients: Tensor, numbers: dict[str, Any]) -> None:
        call(self.second, arguments | numbers | dict(coefficients=coefficients))

    def apply_reference(
        self, arguments: Arguments, coefficients: Tensor, numbers: dict[str, Any]
    ) -> None:
        call(reference_of(self.second), arguments | numbers | dict(coefficients=coefficients))

    def both(self, arguments: Arguments, numbers: dict[str, Any]) -> Tensor:
        """Take the whole step; return the squares."""
        squares = self.measure(arguments, numbers)
        self.apply(arguments, self.coefficients(squares, numbers), numbers)
        return squares


def gradient(
    tensors: dict[str, Tensor], step: float, numbers: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """The gradient that LARS measures: off by the roundings of a factor and a product."""
    grad = tensors["grads"] / float(numbers.get("grad_scale", 1))
    return grad, grad.abs() * 2**-23


LAMB = TwoPass(
    "lamb",
    lamb.LAMB_MOMENTS,
    dict(lr=0.1, betas=(0.9, 0.99), eps=1e-3, weight_decay=0.1),
    [
        {},
        dict(weight_decay=0.0),
        dict(eps_inside_sqrt=True),
        dict(maximize=True, grad_scale=8.0),
        dict(bias_correction=False, eps_inside_sqrt=True, grad_scale=0.3),
        dict(bias_correction=False, betas=(0.0, 0.5), eps=0.7, lr_dtype=F32),
        dict(lr=1 / 3, lr_dtype=torch.float64, eps=1e-8, betas=(0.9, 0.999)),
    ],
    tolerance.lamb_errors,
    DTYPES,
    first="lamb_moments_",
    factors="lamb_coefficients",
    second="lamb_apply_",
)
LARS = TwoPass(
    "lars",
    lars.LARS_APPLY,
    dict(lr=0.1, momentum=0.9, weight_decay=0.1),
    [
        {},
        dict(weight_decay=0.0, lr=1 / 3, lr_dtype=torch.float64),
        dict(maximize=True, grad_scale=8.0),
        dict(grad_scale=0.3, momentum=0.0, lr_dtype=F32),
        dict(states=(), momentum=0.0),
    ],
    lambda *_: {},
    FEW_DTYPES,
    first="lars_norms",
    factors="lars_coefficients",
    second="lars_apply_",
    apply_errors=tolerance.lars_apply_errors,
    measured=gradient,
)
TWO_PASS = [LAMB, LARS]
each_step_op = pytest.mark.parametrize("step", [*STEPS, *TWO_PASS], ids=str)
each_two_pass = pytest.mark.parametrize("step", TWO_PASS, ids=str)
EACH_DTYPES = [(step, dtypes) for step in TWO_PASS for dtypes in step.dtypes]
each_with_dtypes = pytest.mark.parametrize(
    ("step", "dtypes"), EACH_DTYPES, ids=[f"{step}-{dtypes}" for step, dtypes in EACH_DTYPES]
)


def coded(step: TwoPass, arguments: Arguments) -> Arguments:
    """The same step with state in 8-bit codes."""
    changed: Arguments = {}
    scales: list[Tensor] = []
    for name in step.states:
        pairs = [encode_blocks(t.float(), signed=name in step.signed) for t in arguments[name]]
        changed[name] = [codes for codes, _ in pairs]
        scales += [scale for _, scale in pairs]
    return arguments | changed | dict(scales=scales)


def decoded(step: TwoPass, arguments: Arguments) -> Arguments:
    """The same step with state in float32, whatever it is stored as."""
    changed: Arguments = {}
    n = len(arguments["params"])
    for j, name in enumerate(step.states):
        scales = arguments.get("scales", [])[j * n : (j + 1) * n] or [None] * n
        changed[name] = [
            t.float() if scale is None else decode_blocks(t, scale, signed=name in step.signed)
            for t, scale in zip(arguments[name], scales, strict=True)
        ]
    kept = {name: value for name, value in arguments.items() if name not in ("scales", "noise")}
    return kept | changed


def halved(arguments: Arguments) -> Arguments:
    """The same step on bfloat16 params and the lower halves of its masters."""
    pairs = [split_float32(master) for master in arguments["master_params"]]
    params = [upper for upper, _ in pairs]
    return arguments | dict(params=params, master_params=[lower for _, lower in pairs])


def noise_for(arguments: Arguments) -> Tensor:
    """Keys that differ, and first indices as of shards."""
    return torch.tensor([[77 * i + 5, 1000 * i] for i in range(len(arguments["params"]))])


def results(step: TwoPass) -> Iterator[Tensor]:
    """Every tensor that the ops write or return on the CPU, in all cases."""
    sizes = [*SIZES, CHUNK - 1, CHUNK + 1, 2 * CHUNK + 77]
    cases = itertools.product(step.dtypes, step.changes[:3])
    for (dtypes, change), shift in zip(cases, itertools.cycle((0, 1)), strict=False):
        some = sizes if change == step.changes[0] else SIZES
        arguments = make(step, some, dtypes, states=change.get("states"), shift=shift)
        yield step.both(arguments, options(step, change))
        yield from (t for name in written(arguments) for t in arguments[name])
    masters = make(step, sizes, Dtypes(torch.bfloat16, torch.bfloat16, F32, True))
    for arguments in (coded(step, masters), coded(step, halved(masters))):
        arguments["noise"] = noise_for(arguments)
        yield step.both(arguments, step.base)
        yield from (t for name in (*written(arguments), "scales") for t in arguments[name])


def digest(step: TwoPass) -> str:
    """A hash of all results of both ops: equal digests mean equal bits."""
    state = hashlib.sha256()
    for tensor in results(step):
        flat = in_memory_order(tensor)
        state.update(ctypes.string_at(flat.data_ptr(), flat.nbytes))
    return f"{step} {state.hexdigest()}"


def digests() -> list[str]:
    """Return those of all step ops, of these two and of the others."""
    return [*map(step_cases.digest, STEPS), *map(digest, TWO_PASS)]


if __name__ == "__main__":
    print("\n".join(digests()))

"""The table of elementwise step ops that their tests share, and inputs for them."""

import ctypes
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import tolerance
import torch
from torch import Tensor

from deepspeed_ext import ops
from deepspeed_ext.ops.optimizers import adagrad, adam, lion, rmsprop, sgd
from deepspeed_ext.ops.optimizers.state_formats import (
    decode_blocks,
    encode_blocks,
    join_float32,
    split_float32,
)
from deepspeed_ext.ops.optimizers.step_op import StepOp

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
Arguments = dict[str, Any]  # keyword arguments of an op that hold lists of tensors
Shape = int | tuple[int, ...]


class Dtypes(NamedTuple):
    """The storage types of one call."""

    param: torch.dtype = F32
    grad: torch.dtype = F32
    state: torch.dtype = F32
    master: bool = False

    def __str__(self) -> str:
        names = [str(dtype).removeprefix("torch.") for dtype in self[:3]]
        return "-".join(names) + "-master" * self.master


# Every combination that the ops take; and for ops that share the loops of another, one for each
# kind of loop, with masters and without.
DTYPES = [Dtypes(F32, grad) for grad in (F32, BF16, F16)] + [
    Dtypes(param, grad, state, master)
    for param, grad, master in itertools.product((BF16, F16), (F32, BF16, F16), (False, True))
    for state in (F32, param)
]
FEW_DTYPES = [Dtypes(F32, grad) for grad in (F32, BF16, F16)] + [
    Dtypes(BF16, BF16, BF16),
    Dtypes(BF16, BF16, F32, True),
    Dtypes(F16, F32, F16, True),
]
# Around every vector width and chunk.
SIZES = [0, 1, 7, 8, 15, 16, 17, 31, 33, 1000, 4095, 4096, 4097, 8193]
Change = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Step:
    """An op, with what a test has to know of it.

    Args:
        name: its file, without suffix.
        op: what is known of it; of a step in two, of the op that has all states.
        base: numbers for a call.
        changes: of `base`, which together reach every branch. A number of grad_scale, or of lr with
            lr_dtype, becomes a tensor in `options`; "states" replaces the usual states.
        dtypes: combinations to go through.
        errors: bounds the error of one step; see tolerance.py.
        usual: its state arguments in most calls, if they are not those that most calls have.
    """

    name: str
    op: StepOp
    base: dict[str, Any]
    changes: list[Change]
    errors: Callable[..., dict[str, Tensor]]
    dtypes: list[Dtypes]
    usual: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name

    @property
    def states(self) -> tuple[str, ...]:
        """Its state arguments, those of most calls."""
        return self.usual or tuple(state.argument for state in self.op.usual_states)

    @property
    def signed(self) -> frozenset[str]:
        """Those of its state arguments that may be negative."""
        return frozenset(state.argument for state in self.op.states if state.signed)

    @property
    def title(self) -> str:
        """The name of the op in errors."""
        return f"{self.name}_step_"

    @property
    def ops(self) -> tuple[str, ...]:
        """The names of its ops, in their order."""
        return (self.title,)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor | None:
        getattr(ops, self.title)(*args, **kwargs)
        return None

    def reference(self, **kwargs: Any) -> None:
        getattr(ops, f"{self.name}_step_ref_")(**kwargs)

    @property
    def most_states(self) -> tuple[str, ...]:
        """Every state that a call may have."""
        return max((change.get("states", self.states) for change in self.changes), key=len)

    def options_of_most_states(self) -> dict[str, Any]:
        """Options for a call with `most_states`."""
        change = next(c for c in self.changes if c.get("states", self.states) == self.most_states)
        return options(self, change)


AMSGRAD = tuple(state.argument for state in adam.ADAM.states)
ADAM = Step(
    "adam",
    adam.ADAM,
    dict(lr=0.1, betas=(0.9, 0.99), eps=1e-3, weight_decay=0.1),
    [
        {},
        dict(decoupled=False),
        dict(weight_decay=0.0),
        dict(maximize=True, grad_scale=8.0),
        dict(bias_correction=False),
        dict(states=AMSGRAD),
        dict(states=AMSGRAD, decoupled=False, maximize=True, grad_scale=0.3, bias_correction=False),
        dict(betas=(0.0, 0.5), eps=0.7, lr_dtype=F32),
        dict(lr=1 / 3, lr_dtype=torch.float64, eps=1e-8, betas=(0.9, 0.999)),
    ],
    tolerance.adam_errors,
    DTYPES,
)
LION = Step(
    "lion",
    lion.LION,
    dict(lr=0.1, betas=(0.9, 0.99), weight_decay=0.1),
    [
        {},
        dict(weight_decay=0.0, lr=1 / 3, lr_dtype=torch.float64),
        dict(maximize=True, grad_scale=0.3, betas=(0.0, 0.5), lr_dtype=F32),
    ],
    tolerance.lion_errors,
    FEW_DTYPES,
)
ADAGRAD = Step(
    "adagrad",
    adagrad.ADAGRAD,
    dict(lr=0.1, lr_decay=0.01, eps=1e-3, weight_decay=0.1),
    [
        {},
        dict(weight_decay=0.0, lr_decay=0.0, eps=1e-10, lr=1 / 3, lr_dtype=torch.float64),
        dict(maximize=True, grad_scale=0.3, eps=0.7, lr_dtype=F32),
    ],
    tolerance.adagrad_errors,
    FEW_DTYPES,
)
SGD = Step(
    "sgd",
    sgd.SGD,
    dict(lr=0.1, momentum=0.9, dampening=0.25, weight_decay=0.1),
    [
        {},
        dict(states=(), momentum=0.0, nesterov=True),
        dict(nesterov=True, dampening=0.0, lr=1 / 3, lr_dtype=torch.float64),
        dict(wd_after_momentum=True, nesterov=True, momentum=0.3),
        dict(weight_decay=0.0, maximize=True, grad_scale=0.3, lr_dtype=F32),
        dict(states=(), momentum=0.0, wd_after_momentum=True, maximize=True, grad_scale=8.0),
    ],
    tolerance.sgd_errors,
    FEW_DTYPES,
)
RMSPROP = Step(
    "rmsprop",
    rmsprop.RMSPROP,
    dict(lr=0.1, alpha=0.9, eps=1e-3, momentum=0.9, weight_decay=0.1),
    [
        {},
        dict(states=("square_avgs",), momentum=0.0),
        dict(states=("square_avgs", "momentum_buffers"), weight_decay=0.0, lr_dtype=F32),
        dict(states=("square_avgs", "grad_avgs"), momentum=0.0, maximize=True, grad_scale=0.3),
        dict(momentum=0.3, alpha=0.0, grad_scale=8.0, lr=1 / 3, lr_dtype=torch.float64),
    ],
    tolerance.rmsprop_errors,
    FEW_DTYPES,
    usual=tuple(state.argument for state in rmsprop.RMSPROP.states),
)
STEPS = [ADAM, LION, ADAGRAD, SGD, RMSPROP]
each_step = pytest.mark.parametrize("step", STEPS, ids=str)


def each_step_and_dtypes(*dtypes: Dtypes) -> pytest.MarkDecorator:
    """Go through the ops, and the given dtypes or else those of the op."""
    cases = [(step, one) for step in STEPS for one in dtypes or step.dtypes]
    return pytest.mark.parametrize(
        ("step", "dtypes"), cases, ids=[f"{step}-{one}" for step, one in cases]
    )


def make(
    step: Step,
    shapes: Sequence[Shape],
    dtypes: Dtypes = Dtypes(),
    device: str = "cpu",
    states: Sequence[str] | None = None,
    shift: int = 0,
) -> Arguments:
    """Tensors for one step, the same on every device; each begins `shift` elements into memory."""
    generator = torch.Generator().manual_seed(0)

    def draw(dtype: torch.dtype, scale: float, random: Callable[..., Tensor]) -> list[Tensor]:
        made = []
        for shape in shapes:
            size = torch.Size([shape] if isinstance(shape, int) else shape)
            full = random(shift + size.numel(), generator=generator) * scale
            made.append(full.to(device, dtype)[shift:].view(size))
        return made

    arguments: Arguments = dict(
        params=draw(dtypes.param, 1, torch.randn), grads=draw(dtypes.grad, 1, torch.randn)
    )
    for name in step.states if states is None else states:
        random = torch.randn if name in step.signed else torch.rand
        arguments[name] = draw(dtypes.state, 0.1 * (1 + name.startswith("max_")), random)
    arguments["master_params"] = draw(F32, 1, torch.randn) if dtypes.master else []
    # 0, 37, 74 ... 222, 0 ... of no dimension and of one in turn
    arguments["steps"] = [
        torch.full((1,) * (i % 2), 37.0 * (i % 7), device=device) for i in range(len(shapes))
    ]
    for param, master in zip(arguments["params"], arguments["master_params"], strict=False):
        param.copy_(master)
    return arguments


def options(step: Step, change: Change, device: str = "cpu") -> dict[str, Any]:
    """Its numbers with a change, in tensors where the change asks for that."""
    made = step.base | {name: value for name, value in change.items() if name != "states"}
    lr_dtype = made.pop("lr_dtype", None)
    if lr_dtype is not None:
        made["lr"] = torch.tensor(made["lr"], dtype=lr_dtype, device=device)
    if "grad_scale" in made:
        made["grad_scale"] = torch.tensor(made["grad_scale"], device=device)
    return made


def states_of(arguments: Arguments) -> list[str]:
    """Names of the arguments that have an element for every element of a parameter."""
    others = ("params", "grads", "scales", "steps", "offsets", "slots", "noise")
    return [name for name in arguments if name not in others]


def written(arguments: Arguments) -> list[str]:
    """Names of the arguments that a step updates."""
    return ["params", *states_of(arguments), "steps"]


def map_tensors(function: Callable[[Tensor], Tensor], arguments: Arguments) -> Arguments:
    """The same arguments with `function` applied to every tensor."""
    return {
        name: value if name in ("offsets", "slots") else [function(tensor) for tensor in value]
        for name, value in arguments.items()
    }


def clone(arguments: Arguments) -> Arguments:
    """A copy in memory of its own, in the same layouts."""
    return map_tensors(torch.Tensor.clone, arguments)


def assert_same(got: Arguments, want: Arguments) -> None:
    """Compare what a step updates, bit for bit."""
    for name in written(want):
        for i, (a, b) in enumerate(zip(got[name], want[name], strict=True)):
            assert torch.equal(a.flatten(), b.flatten()), f"{name}[{i}]"


def compact(step: Step, arguments: Arguments) -> Arguments:
    """The same step with state in 8-bit codes and float32 masters in two halves."""
    names = [name for name in states_of(arguments) if name != "master_params"]
    pairs = {
        name: [encode_blocks(t, signed=name in step.signed) for t in arguments[name]]
        for name in names
    }
    halves = [split_float32(master) for master in arguments["master_params"]]
    changed = {name: [codes for codes, _ in pairs[name]] for name in names}
    changed["params"] = [upper for upper, _ in halves]
    changed["master_params"] = [lower for _, lower in halves]
    return arguments | changed | dict(scales=[scale for name in names for _, scale in pairs[name]])


def expanded(step: Step, arguments: Arguments) -> Arguments:
    """The step in float32 that `compact` makes this of."""
    changed = {}
    scales = iter(arguments["scales"])
    for name in [name for name in states_of(arguments) if name != "master_params"]:
        signed = name in step.signed
        changed[name] = [decode_blocks(t, next(scales), signed=signed) for t in arguments[name]]
    halves = zip(arguments["params"], arguments["master_params"], strict=True)
    changed["params"] = [join_float32(upper, lower) for upper, lower in halves]
    return arguments | changed | dict(master_params=[], scales=[])


def in_memory_order(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor as they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def integers(values: list[int]) -> Tensor:
    """Offsets or slots as the op takes them."""
    return torch.tensor(values, dtype=torch.int64)


def as_buffers(arguments: Arguments, gap: int = 0) -> Arguments:
    """The same step with all state in flat buffers, `gap` elements between parameters."""
    numels = [param.numel() for param in arguments["params"]]
    offsets = [sum(numels[:i]) + i * gap for i in range(len(numels))]
    slots = [i * (gap + 1) for i in range(len(numels))]

    def buffer(tensors: list[Tensor], places: list[int]) -> list[Tensor]:
        if not tensors:
            return []
        made = tensors[0].new_full([places[-1] + tensors[-1].numel()], 3)
        for place, tensor in zip(places, tensors, strict=True):
            made[place : place + tensor.numel()] = in_memory_order(tensor)
        return [made]

    state = {name: buffer(arguments[name], offsets) for name in states_of(arguments)}
    steps = buffer(arguments["steps"], slots)
    places = dict(offsets=integers(offsets), slots=integers(slots))
    return arguments | state | dict(steps=steps) | places


def as_lists(arguments: Arguments) -> Arguments:
    """The lists of tensors that the flat buffers of `as_slabs` were made from."""
    params, offsets, slots = (arguments[name] for name in ("params", "offsets", "slots"))
    state = {
        name: [
            arguments[name][0].as_strided(param.shape, param.stride(), offset)
            for param, offset in zip(params, offsets.tolist(), strict=True)
            if arguments[name]
        ]
        for name in states_of(arguments)
    }
    steps = [arguments["steps"][0][slot] for slot in slots]
    lists = {name: arguments[name] for name in ("params", "grads")}
    return lists | state | dict(steps=steps)


def results(step: Step, device: str = "cpu") -> Iterator[tuple[str, Tensor]]:
    """Every tensor that the op writes, with its name, in all cases; any NaN as the same one."""
    special = torch.tensor([7e4, 1e-7, 1e-30, -0.0, float("inf"), -float("inf"), float("nan")])
    forms = [*step.dtypes, "compact"]
    cases = itertools.product(forms, step.changes)
    for (dtypes, change), shift in zip(cases, itertools.cycle((0, 1)), strict=False):
        plain = Dtypes(BF16, BF16, F32, True) if isinstance(dtypes, str) else dtypes
        arguments = make(step, SIZES, plain, device, change.get("states"), shift)
        for name in {"params", "grads", "master_params", *step.signed}.intersection(arguments):
            for at, tensor in enumerate(arguments[name][-5:]):
                tensor[100 * at : 100 * at + 7] = special.to(device)
        numbers = options(step, change, device)
        if dtypes == "compact":
            arguments = compact(step, arguments)
            numbers["noise"] = torch.arange(2 * len(SIZES)).view(-1, 2) if shift else None
        step(**arguments, **numbers)
        if dtypes == "compact":  # the bits of a NaN may be any
            arguments = expanded(step, arguments)
        for name in [name for name in arguments if name not in ("grads", "noise")]:
            for i, tensor in enumerate(arguments[name]):
                same_nan = torch.where(tensor.isnan(), float("nan"), tensor).cpu()
                yield f"{name}[{i}] of {step}, {dtypes}, {change}, shift {shift}", same_nan


def digest(step: Step, device: str = "cpu") -> str:
    """A hash of all results of an op: equal digests mean equal bits."""
    state = hashlib.sha256()
    for _, tensor in results(step, device):
        state.update(ctypes.string_at(tensor.data_ptr(), tensor.nbytes))
    return f"{step} {state.hexdigest()}"

"""Inputs that the Adam tests share. Run as a program, it prints a digest of all results."""

import ctypes
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepspeed_ext.ops import adam_step_

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
Arguments = dict[str, Any]  # keyword arguments of adam_step_ that hold lists of tensors
Shape = int | tuple[int, ...]


class Dtypes(NamedTuple):
    """The storage types of one call."""

    param: torch.dtype = F32
    grad: torch.dtype = F32
    moment: torch.dtype = F32
    master: bool = False

    def __str__(self) -> str:
        names = [str(dtype).removeprefix("torch.") for dtype in self[:3]]
        return "-".join(names) + "-master" * self.master


# Every combination that the op takes.
DTYPES = [Dtypes(F32, grad) for grad in (F32, BF16, F16)] + [
    Dtypes(param, grad, moment, master)
    for param, grad, master in itertools.product((BF16, F16), (F32, BF16, F16), (False, True))
    for moment in (F32, param)
]
# Around every vector width and chunk.
SIZES = [0, 1, 7, 8, 15, 16, 17, 31, 33, 1000, 4095, 4096, 4097, 8193]
STATE = ["exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "master_params"]
WRITTEN = ["params", *STATE, "steps"]
BASE: dict[str, Any] = dict(lr=0.1, betas=(0.9, 0.99), eps=1e-3, weight_decay=0.1)
# Changes of BASE; a number of grad_scale, or of lr with lr_dtype, becomes a tensor in `options`.
OPTIONS: list[dict[str, Any]] = [
    {},
    dict(decoupled=False),
    dict(weight_decay=0.0),
    dict(maximize=True, grad_scale=8.0),
    dict(bias_correction=False),
    dict(amsgrad=True),
    dict(amsgrad=True, decoupled=False, maximize=True, grad_scale=0.3, bias_correction=False),
    dict(betas=(0.0, 0.5), eps=0.7, lr_dtype=F32),
    dict(lr=1 / 3, lr_dtype=torch.float64, eps=1e-8, betas=(0.9, 0.999)),
]


def make(
    shapes: Sequence[Shape],
    dtypes: Dtypes = Dtypes(),
    device: str = "cpu",
    amsgrad: bool = False,
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
        params=draw(dtypes.param, 1, torch.randn),
        grads=draw(dtypes.grad, 1, torch.randn),
        exp_avgs=draw(dtypes.moment, 0.1, torch.randn),
        exp_avg_sqs=draw(dtypes.moment, 0.1, torch.rand),
        max_exp_avg_sqs=draw(dtypes.moment, 0.2, torch.rand) if amsgrad else [],
        master_params=draw(F32, 1, torch.randn) if dtypes.master else [],
        # 0, 37, 74 ... of no dimension and of one in turn
        steps=[torch.full((1,) * (i % 2), 37.0 * i, device=device) for i in range(len(shapes))],
    )
    for param, master in zip(arguments["params"], arguments["master_params"], strict=False):
        param.copy_(master)
    return arguments


def options(change: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    """BASE with a change, its numbers in tensors where the change asks for that."""
    made = BASE | {name: value for name, value in change.items() if name != "amsgrad"}
    lr_dtype = made.pop("lr_dtype", None)
    if lr_dtype is not None:
        made["lr"] = torch.tensor(made["lr"], dtype=lr_dtype, device=device)
    if "grad_scale" in made:
        made["grad_scale"] = torch.tensor(made["grad_scale"], device=device)
    return made


def map_tensors(function: Callable[[Tensor], Tensor], arguments: Arguments) -> Arguments:
    """The same arguments with `function` applied to every tensor."""
    return {
        name: value if name in ("offsets", "slots") else [function(tensor) for tensor in value]
        for name, value in arguments.items()
    }


def clone(arguments: Arguments) -> Arguments:
    """A copy in memory of its own, in the same layouts."""
    return map_tensors(torch.Tensor.clone, arguments)


def in_memory_order(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor as they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def integers(values: list[int]) -> Tensor:
    """Offsets or slots as the op takes them."""
    return torch.tensor(values, dtype=torch.int64)


def as_slabs(arguments: Arguments, gap: int = 0) -> Arguments:
    """The same step with all state in slabs, `gap` elements between parameters."""
    numels = [param.numel() for param in arguments["params"]]
    offsets = [sum(numels[:i]) + i * gap for i in range(len(numels))]
    slots = [i * (gap + 1) for i in range(len(numels))]

    def slab(tensors: list[Tensor], places: list[int]) -> list[Tensor]:
        if not tensors:
            return []
        made = tensors[0].new_full([places[-1] + tensors[-1].numel()], 3)
        for place, tensor in zip(places, tensors, strict=True):
            made[place : place + tensor.numel()] = in_memory_order(tensor)
        return [made]

    state = {name: slab(arguments[name], offsets) for name in STATE}
    steps = slab(arguments["steps"], slots)
    places = dict(offsets=integers(offsets), slots=integers(slots))
    return arguments | state | dict(steps=steps) | places


def as_lists(arguments: Arguments) -> Arguments:
    """The lists of tensors that the slabs of `as_slabs` were made from."""
    params, offsets, slots = (arguments[name] for name in ("params", "offsets", "slots"))
    state = {
        name: [
            arguments[name][0].as_strided(param.shape, param.stride(), offset)
            for param, offset in zip(params, offsets.tolist(), strict=True)
            if arguments[name]
        ]
        for name in STATE
    }
    steps = [arguments["steps"][0][slot] for slot in slots]
    lists = {name: arguments[name] for name in ("params", "grads")}
    return lists | state | dict(steps=steps)


def results(device: str = "cpu") -> Iterator[tuple[str, Tensor]]:
    """Every tensor that adam_step_ writes, with its name, in all cases; any NaN as the same one."""
    special = torch.tensor([7e4, 1e-7, 1e-30, -0.0, float("inf"), -float("inf"), float("nan")])
    for dtypes, change, shift in itertools.product(DTYPES, OPTIONS, (0, 1)):
        arguments = make(SIZES, dtypes, device, change.get("amsgrad", False), shift)
        for name in ("params", "grads", "exp_avgs", "master_params"):
            for at, tensor in enumerate(arguments[name][-5:]):
                tensor[100 * at : 100 * at + 7] = special.to(device)
        adam_step_(**arguments, **options(change, device))
        for name in WRITTEN:
            for i, tensor in enumerate(arguments[name]):
                same_nan = torch.where(tensor.isnan(), float("nan"), tensor).cpu()
                yield f"{name}[{i}] of {dtypes}, {change}, shift {shift}", same_nan


def digest(device: str = "cpu") -> str:
    """A hash of all results: equal digests mean equal bits."""
    state = hashlib.sha256()
    for _, tensor in results(device):
        state.update(ctypes.string_at(tensor.data_ptr(), tensor.nbytes))
    return state.hexdigest()


if __name__ == "__main__":
    print(digest())

"""Adam steps on compact state, for the tests of its forms; as a program it prints a digest."""

import ctypes
import hashlib
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.ops import adam_step_
from deepspeed_ext.ops.optimizers.state_formats import (
    blocks_of,
    encode_blocks,
    in_memory_order,
    split_float32,
)

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SIZES = [0, 1, 7, 255, 256, 257, 4096, 5000, (3, 100), (16, 700)]
NUMBERS: dict[str, Any] = dict(lr=0.1, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1)
STATES = ("exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs")
Arguments = dict[str, Any]


def plain(
    sizes: list[Any] = SIZES, param: torch.dtype = F32, grad: torch.dtype = F32, device: str = "cpu"
) -> Arguments:
    """A step with all state in float32, of values that span many binades."""
    generator = torch.Generator().manual_seed(7)

    def draw(shape: Any) -> Tensor:
        size = torch.Size([shape] if isinstance(shape, int) else shape)
        values = torch.randn(size, generator=generator)
        return values * 10 ** (4 * torch.rand(size, generator=generator) - 3)

    made: Arguments = dict(
        params=[draw(size).to(device, param) for size in sizes],
        grads=[draw(size).to(device, grad) for size in sizes],
        exp_avgs=[draw(size).to(device) for size in sizes],
        exp_avg_sqs=[draw(size).to(device) ** 2 for size in sizes],
        max_exp_avg_sqs=[draw(size).to(device) ** 2 for size in sizes],
        steps=[torch.full((), 3.0 * i, device=device) for i in range(len(sizes))],
    )
    if len(made["params"]) == len(SIZES):
        for tensors in made.values():  # one transposed parameter
            tensors[-1] = tensors[-1].t().contiguous().t() if tensors[-1].dim() else tensors[-1]
        for name in STATES:
            made[name][4].zero_()  # a block of zeros
    return made


def coded(arguments: Arguments) -> Arguments:
    """The same step with state in 8-bit codes."""
    scales = []
    changed = {}
    for name in STATES:
        if arguments[name]:
            pairs = [encode_blocks(t, signed=name == "exp_avgs") for t in arguments[name]]
            changed[name] = [codes for codes, _ in pairs]
            scales += [scale for _, scale in pairs]
    return arguments | changed | dict(scales=scales)


def halved(arguments: Arguments, masters: list[Tensor]) -> Arguments:
    """The same step on bfloat16 params and the lower halves of these masters."""
    pairs = [split_float32(master) for master in masters]
    params = [upper for upper, _ in pairs]
    return arguments | dict(params=params, master_params=[lower for _, lower in pairs])


def buffers(arguments: Arguments) -> Arguments:
    """The same coded step with all state in flat buffers, parameters at multiples of 256."""
    numels = [param.numel() for param in arguments["params"]]
    offsets = [256 * sum(map(blocks_of, numels[:i])) for i in range(len(numels))]
    end = 256 * sum(map(blocks_of, numels))

    def buffer(tensors: list[Tensor]) -> list[Tensor]:
        if not tensors:
            return []
        made = tensors[0].new_zeros(end)
        for offset, tensor in zip(offsets, tensors, strict=True):
            made[offset : offset + tensor.numel()] = in_memory_order(tensor)
        return [made]

    changed = {name: buffer(arguments.get(name, [])) for name in (*STATES, "master_params")}
    n, scales = len(numels), []
    for j in range(len(arguments["scales"]) // n):
        scales.append(torch.cat(arguments["scales"][j * n : (j + 1) * n]))
    return (
        arguments
        | changed
        | dict(
            scales=scales,
            steps=[torch.stack(arguments["steps"])],
            offsets=torch.tensor(offsets),
            slots=torch.arange(n),
        )
    )


def noise_for(arguments: Arguments, seed: int = 1) -> Tensor:
    """Keys that differ, and first indices as of shards."""
    rows = [[seed * 1_000_003 + 77 * i, 1000 * i] for i in range(len(arguments["params"]))]
    return torch.tensor(rows)


def random_bits(key: int, step: float, first: int, numel: int) -> Tensor:
    """The 32 random bits of each element, as csrc/optimizers says, in int64."""
    full = (1 << 64) - 1
    x = (key + int(step) * 0x9E3779B97F4A7C15) & full
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & full
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & full
    x ^= x >> 31
    mask = 0xFFFFFFFF
    bits = ((torch.arange(numel) + first) * 0x9E3779B9 + (x & mask)) & mask
    bits = bits ^ (bits >> 16) ^ (x >> 32)
    return (bits * 0x85EBCA6B) & mask


def rounded(values: Tensor, random: Tensor, j: int) -> Tensor:
    """Float32 values of state tensor j as bfloat16, rounded with these bits."""
    part = random & 0xFFFF if j % 2 == 0 else random >> 16
    bits = ((values.view(torch.int32).long() & 0xFFFFFFFF) + part) >> 16
    return (bits - ((bits & 0x8000) << 1)).to(torch.int16).view(BF16)


def everything() -> list[Arguments]:
    """Steps of every compact form, with and without noise."""
    with_max = plain(param=BF16, grad=F16)
    usual = {**plain(param=BF16, grad=BF16), "max_exp_avg_sqs": []}
    masters = [param.float() * 1.001 for param in usual["params"]]
    low = {name: [t.to(BF16) for t in usual[name]] for name in STATES}
    steps = [
        coded(with_max),
        coded(usual),
        coded(halved(usual, masters)),
        buffers(coded(halved(usual, masters))),
        halved(usual, masters),
        usual | low,
        {**plain(grad=BF16), **low},
    ]
    return steps + [{**step, "noise": noise_for(step)} for step in steps]


def written(arguments: Arguments) -> list[Tensor]:
    """All tensors that a step writes."""
    names = ("params", *STATES, "scales", "master_params", "steps")
    return [tensor for name in names for tensor in arguments.get(name, [])]


def to(device: str, arguments: Arguments) -> Arguments:
    """A copy on a device, in the same layouts."""
    on_host = ("offsets", "slots", "noise")
    return {
        name: value if name in on_host else [t.clone().to(device) for t in value]
        for name, value in arguments.items()
    }


def digest() -> str:
    """A hash of the results of everything."""
    state = hashlib.sha256()
    for arguments in everything():
        made = to("cpu", arguments)
        adam_step_(**made, **NUMBERS)
        for tensor in written(made):
            state.update(ctypes.string_at(tensor.data_ptr(), tensor.nbytes))
    return state.hexdigest()


if __name__ == "__main__":
    print(digest())

"""grouped_linear of few tokens and F.grouped_mm: `python -m benchmarks.bench_grouped_linear`.

Bytes are those of the weights of the experts that are chosen, each read once. Calls choose others
in turn, on the CPU all that there are, so that no cache has them.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.functional import forward_contender
from benchmarks.harness import Contender
from benchmarks.workloads import BF16, F32, Shapes, Workload, main
from deepspeed_ext.ops import (
    PackedWeight,
    grouped_linear,
    grouped_quantized_linear,
    moe_assign,
    pack_weight,
    quantize,
)

GROUP = 128  # elements that share a scale
Form = dict[str, object]
SWIGLU: Form = dict(activation="silu", gated=True)


class Layer(NamedTuple):
    """Products of a layer of experts.

    Args:
        experts: how many there are.
        k: how many a token chooses.
        rows: of each one's weight.
        length: of these rows.
        form: what grouped_linear is called with.
    """

    experts: int
    k: int
    rows: int
    length: int
    form: Form

    def choices(self, tokens: int) -> Tensor:
        """Return random choices, always the same ones."""
        generator = torch.Generator().manual_seed(0)
        return torch.rand(tokens, self.experts, generator=generator).argsort(1)[:, : self.k]

    def name(self, tokens: int) -> str:
        sizes = f"{self.experts} experts of {self.rows:,} x {self.length:,}, {self.k} chosen"
        return f"{'swiglu, ' * bool(self.form)}{tokens} tokens, {sizes}"


def torchs(layer: Layer, x: Tensor, weight: Tensor, slots: Tensor, offsets: Tensor) -> Tensor:
    """Do so as models of transformers do, with the order of rows known."""
    rows = x.index_select(0, slots.flatten().argsort() // layer.k)
    out = F.grouped_mm(rows, weight.transpose(1, 2), offs=offsets)
    if not layer.form:
        return out
    gate, up = out.chunk(2, -1)
    return F.silu(gate) * up


def ours(layer: Layer, x: Tensor, weight: Tensor, slots: Tensor, offsets: Tensor) -> Tensor:
    return grouped_linear(x, weight, offsets, slots=slots, **layer.form)  # type: ignore[arg-type]


def of_codes(layer: Layer, weight: PackedWeight, input_format: str | None) -> Callable[..., Tensor]:
    def run(x: Tensor, slots: Tensor, offsets: Tensor) -> Tensor:
        form: dict[str, object] = dict(slots=slots, input_format=input_format, **layer.form)
        return grouped_quantized_linear(x, weight, offsets, **form)  # type: ignore[arg-type]

    return run


def operands_of(layer: Layer, tokens: int, dtype: torch.dtype, device: str) -> list[list[Tensor]]:
    """Return tokens, slots and offsets, of calls that choose other experts each."""
    made = []
    for begin in range(0, layer.experts, layer.k):
        experts = (layer.choices(tokens) + begin) % layer.experts
        weights = torch.ones(experts.shape)
        routing = moe_assign(experts.to(device), weights.to(device), layer.experts)
        x = torch.randn(tokens, layer.length, device=device).to(dtype)
        made.append([x, routing.slots, routing.offsets])
    return made


def each_of(
    ways: dict[str, Callable[..., Tensor]], operands: list[list[Tensor]], calls: int, device: str
) -> list[Contender]:
    """Return a contender for each way: with operands in turn, on the CPU with all in each call."""

    def all_in_turn(way: Callable[..., Tensor]) -> Callable[..., object]:
        def run(*operands: list[Tensor]) -> None:
            for each in operands:
                way(*each)

        return run

    if device == "cpu":
        given = {name: all_in_turn(way) for name, way in ways.items()}
        return [forward_contender(name, way, [operands], device, 1) for name, way in given.items()]
    return [forward_contender(name, way, operands, device, calls) for name, way in ways.items()]


def contenders(
    layer: Layer, tokens: int, dtype: torch.dtype, calls: int, shapes: Shapes, device: str
) -> list[Contender]:
    shape = (layer.experts, layer.rows, layer.length)
    weight = torch.empty(shape, dtype=dtype, device=device).normal_().div_(layer.length**0.5)
    operands = [[x, weight, *o] for x, *o in operands_of(layer, tokens, dtype, device)]
    ways: dict[str, Callable[..., Tensor]] = {"grouped_linear": partial(ours, layer)}
    if device == "cpu" or dtype == BF16:
        ways["torch, F.grouped_mm"] = partial(torchs, layer)
    return each_of(ways, operands, calls, device)


def contenders_of_codes(
    layer: Layer, tokens: int, format: str, calls: int, shapes: Shapes, device: str
) -> list[Contender]:
    floats = torch.randn(layer.experts * layer.rows, layer.length, device=device)
    codes = quantize(floats, format, group_size=GROUP)
    weight = pack_weight(*codes, format=format, group_size=GROUP)
    ways = {
        "grouped_quantized_linear": of_codes(layer, weight, None),
        "the same, x as int8": of_codes(layer, weight, "int8"),
    }
    return each_of(ways, operands_of(layer, tokens, BF16, device), calls, device)


def made(layer: Layer, tokens: int, kind: torch.dtype | str, calls: int = 0) -> Workload:
    """Return the work of one layer, whose weights are of a dtype or of codes.

    Args:
        calls: in a graph; on the CPU 0: as many as choose all experts.
    """
    calls = calls or layer.experts // layer.k
    chosen = len(layer.choices(tokens).unique())
    if isinstance(kind, torch.dtype):
        row, name = layer.length * kind.itemsize, str(kind).partition(".")[2]
        make = partial(contenders, layer, tokens, kind, calls)
    else:
        row = layer.length // (2 if kind == "int4" else 1) + 4 * layer.length // GROUP
        make, name = partial(contenders_of_codes, layer, tokens, kind, calls), kind
    name = f"{name}, {layer.name(tokens)}, {calls} times"
    return Workload(name, [(chosen * layer.rows, row)], calls, make, only_reads=True)


SMALL = (Layer(64, 8, 1024, 2048, SWIGLU), Layer(64, 8, 2048, 512, {}))  # 0.4 B in 16 layers
MIXTRAL, QWEN = Layer(8, 2, 28672, 4096, SWIGLU), Layer(128, 8, 1536, 2048, SWIGLU)
WORKLOADS = {
    "cpu": [
        *[made(layer, tokens, BF16) for layer in SMALL for tokens in (1, 8)],
        made(SMALL[0], 1, F32),
        *[made(SMALL[0], tokens, kind) for kind in ("int8", "int4") for tokens in (1, 8)],
    ],
    "cuda": [
        *[made(MIXTRAL, tokens, BF16, 20) for tokens in (1, 4, 16, 32)],
        *[made(QWEN, tokens, BF16, 20) for tokens in (1, 8, 32)],
        *[made(QWEN, tokens, kind, 20) for kind in ("int8", "int4") for tokens in (1, 8, 32)],
    ],
}

if __name__ == "__main__":
    main(__doc__, WORKLOADS)

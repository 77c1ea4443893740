"""quantize_model beside its bytes: `python -m benchmarks.bench_quantize_model --device cuda`.

The linear layers of an 8 B Llama in bf16, on the CPU of one block of it, each time anew. Bytes are
those of the floats, which are read, and of int8 codes, which are written; of int4 the floats alone.
"""

from collections.abc import Callable

import torch
from torch import nn

from benchmarks.harness import Contender
from benchmarks.workloads import BF16, Shapes, Workload, llama, main
from deepspeed_ext.quantization import quantize_model


def to(format: str) -> Callable[[Shapes, str], list[Contender]]:
    """Return what makes the contender for a format."""

    def contenders(shapes: Shapes, device: str) -> list[Contender]:
        layers = [nn.Linear(k, n, bias=False, device="meta") for n, k in shapes]
        for layer in layers:
            values = torch.empty(layer.weight.shape, dtype=BF16, device=device).normal_()
            layer.weight = nn.Parameter(values)
        # The layers stay in the list, so that they are floats at the next call too.
        return [Contender("quantize_model", lambda: quantize_model(nn.ModuleList(layers), format))]

    return contenders


def linear_layers(blocks: int) -> Shapes:
    return [shape for shape in llama(blocks, embedding=False) if len(shape) == 2]


WORKLOADS = {
    device: [
        Workload(f"to int8, {blocks} Llama blocks", linear_layers(blocks), 3, to("int8")),
        Workload(f"to int4, {blocks} Llama blocks", linear_layers(blocks), 2, to("int4")),
    ]
    for device, blocks in (("cpu", 1), ("cuda", 32))
}

if __name__ == "__main__":
    main(__doc__, WORKLOADS)

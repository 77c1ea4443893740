"""A layer of BERT-large in training, there and back: `python -m benchmarks.bench_layer`.

DeepSpeedTransformerLayer, eager and compiled, beside the same in plain torch, of the same weights:
the result, and the gradients of hidden states and of all parameters, with dropout of 0.1 or none.
On CUDA once more as graphs, where only the device counts: a layer of this size is shorter than what
the host takes for its calls. The ceiling is the products alone. The stream moves what has to be
moved beside them.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.functional import captured
from benchmarks.harness import Contender
from benchmarks.workloads import BF16, F32, Shapes, Workload, main
from deepspeed_ext.ops import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer


class Plain(nn.Module):
    """The same with torch's functions."""

    def __init__(self, layer: DeepSpeedTransformerLayer) -> None:
        super().__init__()
        self.weights = nn.ParameterDict(dict(layer.named_parameters()))
        self.heads, self.p = layer.config.heads, layer.config.hidden_dropout_ratio

    def forward(self, x: Tensor) -> Tensor:
        w = self.weights
        normed = F.layer_norm(x, x.shape[-1:], w["norm_w"], w["norm_b"], 1e-12)
        joined = F.linear(normed, w["attn_qkvw"], w["attn_qkvb"])
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in joined.chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p)
        out = F.linear(out.transpose(1, 2).flatten(2), w["attn_ow"], w["attn_ob"])
        total = F.dropout(out, self.p) + x
        normed = F.layer_norm(total, x.shape[-1:], w["attn_nw"], w["attn_nb"], 1e-12)
        inner = F.gelu(F.linear(normed, w["inter_w"], w["inter_b"]), approximate="tanh")
        return F.dropout(F.linear(inner, w["output_w"], w["output_b"]), self.p) + total


def there_and_back(
    module: Callable[[Tensor], Tensor], leaves: list[Tensor]
) -> Callable[[], object]:
    grad = torch.randn_like(leaves[0])

    def run() -> object:
        out = module(leaves[0])
        return out, *torch.autograd.grad(out, leaves, grad)

    return run


def products(x: Tensor, hidden: int) -> Callable[[], object]:
    """Return what does nothing but multiply, there and twice back."""
    rows = x.detach().reshape(-1, hidden)
    like = dict(device=x.device, dtype=x.dtype)
    shapes = [(3 * hidden, hidden), (hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden)]
    made = [
        (torch.randn(out, n, **like), torch.randn(len(rows), n, **like),
         torch.randn(len(rows), out, **like)) for out, n in shapes
    ]  # fmt: skip

    def run() -> None:
        for weight, given, grad in made:
            F.linear(given, weight)
            grad @ weight
            grad.t() @ given

    return run


def contenders(
    shapes: Shapes, device: str, heads: int, p: float, dtype: torch.dtype, as_graphs: bool
) -> list[Contender]:
    (shape,) = shapes
    config = DeepSpeedTransformerConfig(
        hidden_size=shape[-1],
        heads=heads,
        attn_dropout_ratio=p,
        hidden_dropout_ratio=p,
        num_hidden_layers=24,
        initializer_range=0.02,
    )
    layer = DeepSpeedTransformerLayer(config).to(device, dtype)
    plain = Plain(layer).to(device, dtype)
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "deepspeed_ext": layer,
        "deepspeed_ext, compiled": torch.compile(layer, dynamic=False),
        "torch, compiled": torch.compile(plain, dynamic=False),
        "torch": plain,
    }
    x = torch.randn(shape, device=device, dtype=dtype).requires_grad_()
    leaves = [x, *layer.parameters()]
    runs = {name: there_and_back(way, leaves) for name, way in ways.items()}
    if as_graphs:
        runs = {name: captured(device, lambda run=run: run, 1) for name, run in runs.items()}
    made = [Contender(name, run) for name, run in runs.items()]
    alone = Contender("torch, the products alone", products(x, shape[-1]), is_ceiling=True)
    return [*made, alone]


def work(
    shape: tuple[int, int, int], heads: int, p: float, dtype: torch.dtype, as_graphs: bool = False
) -> Workload:
    kind = str(dtype).partition(".")[2]
    tokens, hidden = shape[0] * shape[1], shape[2]
    flops = 3 * 2 * tokens * (12 * hidden * hidden + 2 * shape[1] * hidden)
    name = f"{kind}, {shape[0]} x {shape[1]} x {hidden:,}, dropout {p}, {flops / 1e12:.3g} TFLOP"
    name += ", as graphs" * as_graphs
    made = partial(contenders, heads=heads, p=p, dtype=dtype, as_graphs=as_graphs)
    return Workload(name, [shape], 60 * dtype.itemsize, made, tokens=tokens)


WORKLOADS = {
    "cpu": [work((1, 128, 1024), 16, p, F32) for p in (0.1, 0.0)],
    "cuda": [
        work(shape, 16, p, BF16, as_graphs)
        for shape in ((32, 128, 1024), (8, 512, 1024))
        for p in (0.1, 0.0)
        for as_graphs in (True, False)
    ],
}

if __name__ == "__main__":
    main(__doc__, WORKLOADS)

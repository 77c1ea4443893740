"""Experts of transformers' models, there and back: `python -m benchmarks.bench_moe_layer`.

The experts of one layer with random choices, in training: the result, and the gradients of hidden
states, of the weights of choices and of all parameters. Rivals are what transformers does by
default, and its loop. The ceiling is torch's grouped products and nothing else, of rows that are in
order already: two forward, four backward. The stream moves what has to be moved beside them: tokens
to the rows of experts and back, activations and their gradients, each read and written once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from benchmarks.harness import Contender
from benchmarks.workloads import BF16, F32, Shapes, Workload, main
from deepspeed_ext.moe import register_with_transformers
from deepspeed_ext.ops import moe_assign, moe_permute

RIVALS = {
    "deepspeed_ext": "deepspeed_ext",
    "transformers, grouped_mm": "grouped_mm",
    "transformers, eager": "eager",
}


@dataclass(frozen=True)
class Layer:
    """Sizes of experts: how many, of which a token has k; their width outside and inside."""

    experts: int
    k: int
    n: int
    inner: int

    def flops(self, tokens: int) -> int:
        """Return those of all products, there and back: gate, up and down, three times each."""
        return 2 * 3 * 3 * tokens * self.k * self.n * self.inner

    def bytes_each(self, dtype: torch.dtype) -> int:
        """Return what is moved beside the products for each element of the hidden states."""
        of_tokens = 4 + 5 * self.k  # permute, unpermute, and the same back with gradients of y
        return dtype.itemsize * (of_tokens * self.n + 8 * self.k * self.inner) // self.n


def chosen(layer: Layer, tokens: int, device: str) -> tuple[Tensor, Tensor]:
    """Return random choices, and weights as routers make them."""
    scores = torch.rand(tokens, layer.experts, device=device).softmax(-1)
    weights, indices = scores.topk(layer.k)
    return indices, (weights / weights.sum(-1, keepdim=True)).requires_grad_()


def experts_of(layer: Layer, name: str, device: str, dtype: torch.dtype) -> MixtralExperts:
    config = MixtralConfig(
        hidden_size=layer.n,
        intermediate_size=layer.inner,
        num_local_experts=layer.experts,
        num_experts_per_tok=layer.k,
    )
    config._experts_implementation = name
    with torch.device(device):
        made = MixtralExperts(config).to(dtype)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=layer.n**-0.5)
    return made


def there_and_back(
    layer: Layer, name: str, hidden: Tensor, indices: Tensor, weights: Tensor
) -> Callable[[], object]:
    torch.manual_seed(1)  # the same parameters for all
    experts = experts_of(layer, name, str(hidden.device), hidden.dtype)
    leaves = [hidden.clone().requires_grad_(), weights, *experts.parameters()]
    grad = torch.randn_like(hidden)

    def run() -> object:
        out = experts(leaves[0], indices, weights)
        return out, *torch.autograd.grad(out, leaves, grad)

    return run


def products(layer: Layer, hidden: Tensor, indices: Tensor, weights: Tensor) -> Contender:
    """Return the one that does nothing but multiply."""
    routing = moe_assign(indices, weights, layer.experts)
    offs = routing.offsets
    like = dict(device=hidden.device, dtype=hidden.dtype)
    with torch.no_grad():
        rows = moe_permute(hidden, routing)
        up = torch.randn(layer.experts, 2 * layer.inner, layer.n, **like)
        down = torch.randn(layer.experts, layer.n, layer.inner, **like)
        inner = torch.randn(len(rows), layer.inner, **like)
        grad, grad_up = torch.randn_like(rows), torch.randn(len(rows), 2 * layer.inner, **like)

    def run() -> None:
        F.grouped_mm(rows, up.transpose(1, 2), offs=offs)
        F.grouped_mm(inner, down.transpose(1, 2), offs=offs)
        F.grouped_mm(grad, down, offs=offs)
        F.grouped_mm(grad.t(), inner, offs=offs)
        F.grouped_mm(grad_up, up, offs=offs)
        F.grouped_mm(grad_up.t(), rows, offs=offs)

    return Contender("torch, the products alone", run, is_ceiling=True)


def contenders(shapes: Shapes, device: str, layer: Layer, dtype: torch.dtype) -> list[Contender]:
    register_with_transformers()
    (shape,) = shapes
    hidden = torch.randn(shape, device=device, dtype=dtype)
    choices = chosen(layer, shape[0], device)
    made = [
        Contender(title, there_and_back(layer, name, hidden, *choices))
        for title, name in RIVALS.items()
    ]
    return [*made, products(layer, hidden, *choices)]


def work(name: str, layer: Layer, tokens: int, dtype: torch.dtype) -> Workload:
    kind, flops = str(dtype).partition(".")[2], layer.flops(tokens) / 1e12
    return Workload(
        f"{name}, {kind}, {tokens:,} tokens, {flops:.3g} TFLOP",
        [(tokens, layer.n)],
        layer.bytes_each(dtype),
        partial(contenders, layer=layer, dtype=dtype),
        tokens=tokens,
    )


MIXTRAL = Layer(experts=8, k=2, n=4096, inner=14_336)
QWEN3 = Layer(experts=128, k=8, n=2048, inner=768)  # 30B-A3B
SMALL = Layer(experts=8, k=2, n=256, inner=896)
WORKLOADS = {
    "cpu": [work("a sixteenth of Mixtral's width", SMALL, 256, F32)],
    "cuda": [
        work("Mixtral", MIXTRAL, 16_384, BF16),
        work("Qwen 3 30B-A3B", QWEN3, 16_384, BF16),
    ],
}

if __name__ == "__main__":
    main(__doc__, WORKLOADS)

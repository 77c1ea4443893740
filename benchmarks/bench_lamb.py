"""LAMB steps of deepspeed_ext and of torch: `python -m benchmarks.bench_lamb --device cpu`.

Torch has no LAMB: its contender is the same formula in foreach functions, with as few passes over
memory as they allow.
"""

import torch
from torch import Tensor

from benchmarks.harness import Contender
from benchmarks.workloads import BIG, F32, Shapes, Workload, leaves, main
from deepspeed_ext.optim import FusedLamb

LR, BETAS, EPS, DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.01
BYTES = 40  # per element: reads p, g, m, v and writes m, v; then reads p, m, v and writes p


class ForeachLamb:
    """LAMB in torch's foreach functions. Constant factors of the update are left to the end."""

    def __init__(self, params: list[Tensor]) -> None:
        self.params = params
        self.exp_avgs = [torch.zeros_like(param) for param in params]
        self.exp_avg_sqs = [torch.zeros_like(param) for param in params]
        self.step_number = 0

    @torch.no_grad()
    def step(self) -> None:
        self.step_number += 1
        grads = [param.grad for param in self.params]
        torch._foreach_lerp_(self.exp_avgs, grads, 1 - BETAS[0])
        torch._foreach_mul_(self.exp_avg_sqs, BETAS[1])
        torch._foreach_addcmul_(self.exp_avg_sqs, grads, grads, 1 - BETAS[1])
        root = (1 - BETAS[1] ** self.step_number) ** 0.5
        factor = root / (1 - BETAS[0] ** self.step_number)
        updates = torch._foreach_sqrt(self.exp_avg_sqs)
        torch._foreach_add_(updates, EPS * root)
        updates = torch._foreach_div(self.exp_avgs, updates)
        torch._foreach_add_(updates, self.params, alpha=DECAY / factor)
        norms = torch.stack(torch._foreach_norm(self.params))
        ratios = norms / (torch.stack(torch._foreach_norm(updates)) * factor)
        ratios = torch.where(ratios.isfinite() & (norms > 0), ratios.clamp(0.01, 10), 1)
        # Numbers on the host: with those on the device, there would be a launch for each tensor.
        torch._foreach_mul_(updates, (ratios * (-LR * factor)).tolist())
        torch._foreach_add_(self.params, updates)


def bert_large() -> Shapes:
    """The shapes of BERT-large with its heads: 336 M elements in 398 tensors."""
    width, hidden, vocabulary = 1024, 4096, 30522
    dense, norm = [(width, width), (width,)], [(width,), (width,)]
    feed_forward = [(hidden, width), (hidden,), (width, hidden), (width,)]
    layer = [*dense * 4, *norm, *feed_forward, *norm]
    embeddings = [(vocabulary, width), (512, width), (2, width), *norm]
    heads = [*dense, *dense, *norm, (vocabulary,), (2, width), (2,)]
    return [*embeddings, *layer * 24, *heads]


def lamb(shapes: Shapes, device: str) -> list[Contender]:
    numbers = dict(lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    ours = FusedLamb(leaves(shapes, F32, device), **numbers)
    theirs = ForeachLamb(leaves(shapes, F32, device))
    return [Contender("FusedLamb.step()", ours.step), Contender("torch, foreach", theirs.step)]


WORKLOADS = {
    "cpu": [Workload("fp32, 64 x 1,048,576", BIG, BYTES, lamb)],
    "cuda": [
        Workload("fp32, BERT-large shapes", bert_large(), BYTES, lamb),
        Workload("fp32, one tensor of 1,073,741,824", [(1 << 30,)], BYTES, lamb),
    ],
}

if __name__ == "__main__":
    main(__doc__, WORKLOADS)

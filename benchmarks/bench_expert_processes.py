"""A layer of experts shared out over processes.

`torchrun --nproc-per-node 2 -m benchmarks.bench_expert_processes`, a GPU for each process, runs MoE
of Mixtral's shape, two experts for each token, forward and backward. Ours has its experts shared
out over all processes, which exchange tokens; the other contenders are what that can be compared
with: a layer whose experts are all here, with as many tokens, and an exchange of as many bytes and
nothing else, there and back, twice. The bound is the sum of these two. All take turns; a turn is
over when all processes have ended it.
"""

import argparse
import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks.results import Result, Timing, add_option, introduced, keep, show
from deepspeed_ext.moe import MoE

OURS, ALONE, EXCHANGE = "deepspeed_ext", "all experts here", "exchange of as many bytes"
EXPERTS, CHOICES = 8, 2
WARM_UP, IN_A_ROW = 3, 3
Run = Callable[[], object]


class Expert(nn.Module):
    """As Mixtral's."""

    expert_form = ("gate", F.silu, "up", "down")

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the expert makes of x."""
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


def layer(x: Tensor, inner: int, ep_size: int) -> Run:
    """Return a forward and backward of a layer, in the dtype of x."""
    torch.manual_seed(0)
    with torch.device(x.device):
        expert = Expert(x.shape[1], inner).to(x.dtype)
        made = MoE(x.shape[1], expert, EXPERTS, ep_size, CHOICES, drop_tokens=False)
    leaves = [x.clone().requires_grad_(), *made.to(x.dtype).parameters()]
    grad = torch.randn_like(x)

    def run() -> object:
        out, loss, _ = made(leaves[0])
        return torch.autograd.grad([out, loss], leaves, [grad, torch.ones_like(loss)])

    return run


def exchange(x: Tensor) -> Run:
    """Return an exchange of all copies of tokens, and back, and the same of gradients."""
    world = dist.get_world_size()
    rows = x.repeat_interleave(CHOICES, 0)
    rows = rows[: len(rows) // world * world]
    into = torch.empty_like(rows)

    def run() -> None:
        for _ in range(4):
            dist.all_to_all_single(into, rows)

    return run


def measured(options: argparse.Namespace, device: str) -> Result:
    """Let all take turns; another one begins each round."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(dist.get_rank())
    x = torch.randn(options.tokens, options.width, device=device, dtype=dtype)
    contenders = {
        OURS: layer(x, options.inner, dist.get_world_size()),
        ALONE: layer(x, options.inner, 1),
        EXCHANGE: exchange(x),
    }
    name = f"{options.tokens:,} tokens, {dist.get_world_size()} processes"
    found: dict[str, list[float]] = {each: [] for each in contenders}
    names = list(contenders)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for i in tqdm(range(-WARM_UP, options.rounds), desc=name, disable=dist.get_rank() > 0 or None):
        for each in (*names[i % 3 :], *names[: i % 3]):
            wait()
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(IN_A_ROW):
                contenders[each]()
            wait()
            dist.barrier()
            if i >= 0:
                found[each].append((time.perf_counter() - begin) / IN_A_ROW)
    timings = {each: Timing.of(seconds) for each, seconds in found.items()}
    bound = timings[ALONE].median + timings[EXCHANGE].median
    notes = [f"{timings[OURS].median / bound:.3f} of the time of the other two together"]
    return Result(name, 0, x.numel(), 0, timings, notes=notes)


def main() -> None:
    """Measure, and let the first process print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16_384, help="of each process")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--inner", type=int, default=14_336, help="width of an expert inside")
    parser.add_argument("--rounds", type=int, default=11)
    add_option(parser)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    is_first = dist.get_rank() == 0
    described = introduced(device) if is_first else {}
    result = measured(options, device)
    if is_first:
        show(result)
        keep(options.save, [result], described)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

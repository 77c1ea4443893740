"""Saved tensors in host memory beside on the device: `python -m benchmarks.bench_saved_tensors`.

A step is forward and backward through blocks of attention and feed-forward layers in bfloat16:

- checkpointed, with inputs on the device (torch) and in host memory. Their bytes should be gone
  from the peak, but for those on their way.
- not checkpointed, with all that is saved on the device, and with as many bytes of it in host
  memory as the link carries while forward runs. What the copies take should be hidden.
"""

import argparse
import gc
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from benchmarks.harness import Contender, measure
from benchmarks.results import Timing
from deepspeed_ext import offload

HEAD = 128
Call = Callable[[nn.Module, Tensor], Tensor]


class Block(nn.Module):
    """A layer of a transformer, causal."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return as many tokens."""
        heads = self.qkv(self.norm1(x)).unflatten(-1, (-1, HEAD)).transpose(1, 2)
        y = scaled_dot_product_attention(*heads.chunk(3, 1), is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norm2(x))))


class Bench:
    """Blocks and an input, and steps of them."""

    def __init__(self, blocks: int, samples: int, tokens: int, width: int, device: str) -> None:
        torch.manual_seed(0)
        self.device = device
        self.min_bytes = 1 << 20 if device == "cuda" else 1 << 10
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks)).to(device, torch.bfloat16)
        self.x = torch.randn(samples, tokens, width, device=device, dtype=torch.bfloat16)
        for param in self.blocks.parameters():
            param.grad = torch.zeros_like(param)  # so that all steps have the same memory

    def forward(self, call: Call) -> Tensor:
        """Return the loss."""
        # As of an embedding: of the first input, too, there is no other copy.
        x = self.x.detach().requires_grad_() * 1
        for block in self.blocks:
            x = call(block, x)
        return x.float().square().mean()

    def step(self, call: Call) -> None:
        """Go through once."""
        self.forward(call).backward()

    def peak(self, run: Callable[[], object]) -> int:
        """Return bytes of the device at the most, in a second call, beside what is there."""
        if self.device != "cuda":
            return 0
        run()
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def forward_seconds(self) -> float:
        """Return what forward takes, of three times the shortest."""
        found = []
        for _ in range(4):
            self._wait()
            begin = time.perf_counter()
            loss = self.forward(plainly)
            self._wait()
            found.append(time.perf_counter() - begin)
            del loss
        return min(found[1:])

    def link_rate(self, nbytes: int = 1 << 28) -> float:
        """Return bytes a second of copies to pinned memory."""
        source = torch.empty(nbytes if self.device == "cuda" else 1 << 22, device=self.device)
        target = torch.empty_like(source, device="cpu", pin_memory=self.device == "cuda")
        found = []
        for _ in range(4):
            self._wait()
            begin = time.perf_counter()
            target.copy_(source, non_blocking=True)
            self._wait()
            found.append(time.perf_counter() - begin)
        return source.nbytes / min(found[1:])

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def plainly(block: nn.Module, x: Tensor) -> Tensor:
    """Call a block."""
    y: Tensor = block(x)
    return y


def checkpointed(block: nn.Module, x: Tensor) -> Tensor:
    """Call a block as torch's checkpoint does."""
    y: Tensor = checkpoint(block, x, use_reentrant=False)
    return y


def compare(bench: Bench, runs: dict[str, Callable[[], None]], rounds: int) -> dict[str, Timing]:
    """Print time and peak of each, and return the times."""
    contenders = [Contender(name, run) for name, run in runs.items()]
    with tqdm(total=rounds, leave=False) as progress:
        timings = measure(contenders, bench.device, rounds, progress)
    first = next(iter(timings.values())).median
    for name, run in runs.items():
        seconds = timings[name].median
        print(
            f"  {name:34} {seconds * 1e3:9.1f} ms  {seconds / first:6.3f} x"
            f"  peak {bench.peak(run) / 2**20:9.0f} MiB"
        )
    return timings


def inputs_out(bench: Bench, rounds: int) -> None:
    """Compare checkpointed blocks."""
    saved = offload.saved_tensors(min_bytes=bench.min_bytes)
    runs = {
        "torch's checkpoint": lambda: bench.step(checkpointed),
        "offload.checkpoint": lambda: bench.step(
            lambda block, x: offload.checkpoint(block, x, device=saved)
        ),
    }
    print("checkpointed blocks")
    compare(bench, runs, rounds)
    theirs, ours = map(bench.peak, runs.values())
    inputs = len(bench.blocks) * bench.x.nbytes
    print(
        f"  inputs {inputs / 2**20:.0f} MiB, gone {(theirs - ours) / inputs:.3f}; {saved.stats()}"
    )


def budgeted(bench: Bench, rounds: int) -> None:
    """Compare blocks without checkpoints."""
    rate, forward = bench.link_rate(), bench.forward_seconds()
    budget = int(rate * forward)
    saved = offload.saved_tensors(budget=budget, min_bytes=bench.min_bytes)

    def ours() -> None:
        with saved:
            loss = bench.forward(plainly)
        loss.backward()

    runs = {"on the device": lambda: bench.step(plainly), "budgeted": ours}
    print(f"blocks as they are; forward {forward * 1e3:.1f} ms, link {rate / 1e9:.1f} GB/s")
    times = compare(bench, runs, rounds)
    plain, with_copies = (timing.median for timing in times.values())
    away = saved.stats()["peak"]
    hidden = 1 - (with_copies - plain) / (2 * away / rate)
    one_way = 1 - (with_copies - plain) / (away / rate)
    print(
        f"  away {away / 2**20:.0f} MiB; of copies both ways {hidden:.3f} is hidden, {one_way:.3f}"
        f" if all the rest is of one way; {saved.stats()}"
    )


PARTS = {"checkpointed": inputs_out, "budgeted": budgeted}


def main() -> None:
    """Run what the command line says."""
    on_cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if on_cuda else "cpu")
    parser.add_argument("--blocks", type=int, default=8 if on_cuda else 3)
    parser.add_argument("--samples", type=int, default=8 if on_cuda else 1)
    parser.add_argument("--tokens", type=int, default=4096 if on_cuda else 256, help="of a sample")
    parser.add_argument("--width", type=int, default=4096 if on_cuda else 256)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    options = parser.parse_args()
    sizes = (options.blocks, options.samples, options.tokens, options.width)
    what = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    sides = dict(zip(("blocks", "samples", "tokens", "width"), sizes, strict=True))
    print(f"{what}, torch {torch.__version__}, {sides}")
    bench = Bench(*sizes, options.device)
    for part in options.parts:
        PARTS[part](bench, options.rounds)


if __name__ == "__main__":
    main()

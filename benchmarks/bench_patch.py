"""A training step of a Llama with our ops in it: `python -m benchmarks.bench_patch --device cuda`.

Forward, backward and a step of AdamW, of one model for each contender: patched, as transformers has
it, and with Liger's kernels if they can be imported. On CUDA Llama of 1 B in bfloat16, 8 rows of
2,048 tokens; on the CPU a small one. Beside the times stands what a step has in memory at most,
less what lies there between steps.
"""

import argparse
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness import ROUNDS, Contender, measure
from deepspeed_ext import patch

LARGE = dict(
    vocab_size=128_256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    tie_word_embeddings=True,
)
SMALL = LARGE | dict(
    vocab_size=16_384, hidden_size=256, intermediate_size=1024, num_hidden_layers=2
)
SMALL |= dict(num_attention_heads=8, num_key_value_heads=2)


def with_liger(model: nn.Module) -> None:
    """Put Liger's kernels into one model."""
    liger: Any = importlib.import_module("liger_kernel.transformers.monkey_patch")
    liger._apply_liger_kernel_to_instance(model=model)


WAYS: dict[str, Callable[[nn.Module], object]] = {
    "patched": patch,
    "transformers": lambda model: None,
    "Liger": with_liger,
}


def step_of(way: str, device: str, rows: int, length: int) -> Callable[[], object]:
    """Return a training step of a new model."""
    torch.manual_seed(0)
    is_large = device == "cuda"
    config = LlamaConfig(**(LARGE if is_large else SMALL), max_position_embeddings=length)
    with torch.device(device):
        model = LlamaForCausalLM(config).train()
    model = model.bfloat16() if is_large else model
    WAYS[way](model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    tokens = torch.randint(config.vocab_size, (rows, length), device=device)

    def step() -> object:
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def peak_of(step: Callable[[], object]) -> float:
    """Return the GiB that a step has at most, beside what lies there before it."""
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def main(arguments: list[str] | None = None) -> None:
    """Measure, and print a line for each contender."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--rows", type=int, default=0, help="0: 8 on CUDA, 1 on the CPU")
    parser.add_argument("--length", type=int, default=0, help="0: 2,048 on CUDA, 256 on the CPU")
    options = parser.parse_args(arguments)
    is_large = options.device == "cuda"
    sizes = options.rows or (8 if is_large else 1), options.length or (2048 if is_large else 256)
    name = torch.cuda.get_device_name() if is_large else f"CPU, {torch.get_num_threads()} threads"
    print(f"torch {torch.__version__}, {name}; {sizes[0]} x {sizes[1]:,} tokens")
    made = []
    for way in WAYS:
        try:
            made.append(Contender(way, step_of(way, options.device, *sizes)))
        except ImportError as error:
            print(f"{way}: {error}", file=sys.stderr)
    losses = {each.name: float(each.run()) for each in made}  # type: ignore[arg-type]
    peaks = {each.name: peak_of(each.run) for each in made} if is_large else {}
    with tqdm(total=options.rounds, desc="rounds") as progress:
        timings = measure(made, options.device, options.rounds, progress)
    ours = timings["patched"].median
    for way, timing in timings.items():
        peak = f", {peaks[way]:.2f} GiB at most" if peaks else ""
        print(
            f"{way:14} {timing.median * 1e3:9.2f} ms, {timing.median / ours:5.3f} of patched"
            f"{peak}, first loss {losses[way]:.5f}"
        )


if __name__ == "__main__":
    main()

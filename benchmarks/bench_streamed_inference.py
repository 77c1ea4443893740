"""Layers from host memory or a disk: `python -m benchmarks.bench_streamed_inference`.

An engine whose layers rest elsewhere writes some tokens after short prompts. They all come by for
each, so the ceiling copies as many bytes from pinned memory. Beside it accelerate does the same
with the model of transformers in bfloat16, whose weights are pinned, too, or with --pageable lie
in memory as it leaves them. torch may have a quarter of the bytes of the weights of the device's
memory.

The model has the shapes of an 8 B Llama with more layers and a smaller vocabulary. All layers are
one in the memory of who makes it, and of accelerate; the engine has each of its own.
"""

import argparse
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from benchmarks.harness import Contender, measure
from benchmarks.results import Result, Timing, add_option, introduced, keep, show
from deepspeed_ext.inference import InferenceEngine, init_inference

_PROMPT = 16  # tokens
_PIECE_BYTES = 64 << 20  # of copies of the ceiling; layers are longer
_LINK, _ACCELERATE = "copies from pinned memory", "accelerate, bf16"


def module(layers: int, hidden: int, pins: bool) -> nn.Module:
    """Return transformers' model on the host, whose layers have their tensors together."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 128,
        num_key_value_heads=max(hidden // 512, 1),
        intermediate_size=hidden * 7 // 2,
        vocab_size=32000,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
    )
    config.dtype = torch.bfloat16
    with torch.device("meta"):
        made = LlamaForCausalLM(config).to(torch.bfloat16)
    made.model.rotary_emb = type(made.model.rotary_emb)(config)  # it has buffers
    first = made.model.layers[0]
    for module in (first, made.model.embed_tokens, made.model.norm):
        for name, param in list(module.named_parameters()):
            owner = module.get_submodule(name.rpartition(".")[0])
            values = torch.randn(1 << 20).mul_(0.02 if param.dim() > 1 else 0.0).to(param.dtype)
            whole = values.repeat(-(-param.numel() // len(values)))[: param.numel()]
            if param.dim() == 1:
                whole.fill_(1.0)
            if pins:
                whole = whole.pin_memory()
            tensor = nn.Parameter(whole.view(param.shape), requires_grad=False)
            setattr(owner, name.rpartition(".")[2], tensor)
    for layer in made.model.layers[1:]:
        for name, param in first.named_parameters():
            owner = layer.get_submodule(name.rpartition(".")[0])
            setattr(owner, name.rpartition(".")[2], param)
    made.tie_weights()
    made.generation_config.eos_token_id = None
    return made.eval()


def link(nbytes: int, device: torch.device) -> Contender:
    """Return what copies as many bytes to the device."""
    is_cuda = device.type == "cuda"
    source = torch.zeros(_PIECE_BYTES, dtype=torch.uint8, pin_memory=is_cuda)
    target = torch.empty_like(source, device=device)

    def run() -> None:
        for _ in range(nbytes // _PIECE_BYTES):
            target.copy_(source, non_blocking=True)
        target[: nbytes % _PIECE_BYTES].copy_(source[: nbytes % _PIECE_BYTES], non_blocking=True)

    return Contender(_LINK, run, is_ceiling=True)


def accelerated(made: nn.Module, batch: int, count: int, device: torch.device) -> Contender | None:
    """Return accelerate's way, if it is installed; it changes the model."""
    try:
        from accelerate import cpu_offload
    except ImportError:
        return None
    if not hasattr(made, "_hf_hook"):
        cpu_offload(made, device, state_dict=dict(made.state_dict()))

    def run() -> object:
        prompts = torch.randint(0, 1000, (batch, _PROMPT), device=device)
        mask = torch.ones_like(prompts)
        with torch.inference_mode():
            return made.generate(
                prompts, attention_mask=mask, max_new_tokens=count, do_sample=False
            ).tolist()

    return Contender(_ACCELERATE, run)


@contextmanager
def limited(device: torch.device, nbytes: int) -> Iterator[None]:
    """Let torch have no more of the device's memory."""
    if device.type != "cuda":
        yield
        return
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(nbytes / total, device)
    torch.cuda.reset_peak_memory_stats(device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def engine_of(made: nn.Module, options: argparse.Namespace, kind: str) -> InferenceEngine:
    """Return an engine that streams; prompts share passes."""
    found = init_inference(
        made,
        quantize=None if kind == "bf16" else kind,
        max_batch=max(options.batch),
        max_tokens=_PROMPT + options.tokens,
        device=options.device,
        pack_prefill=True,
        offload="cpu" if options.nvme_path is None else "nvme",
        **({} if options.nvme_path is None else {"nvme_path": options.nvme_path}),
    )
    assert isinstance(found, InferenceEngine)
    return found


def weight_bytes(made: nn.Module, kind: str) -> int:
    """Return about how many bytes all weights of an engine take."""
    layers = sum(p.numel() for layer in made.model.layers for p in layer.parameters())
    return int(layers * (2 if kind == "bf16" else 0.5 + 4 / 128)) + made.lm_head.weight.nbytes


def rows(
    make: Callable[[], nn.Module], kind: str, options: argparse.Namespace, theirs: dict[int, Timing]
) -> Iterator[Result]:
    """Measure an engine of one kind of weights, for each batch.

    Args:
        theirs: what accelerate took for each batch; filled with bf16.
    """
    device, count, made = torch.device(options.device, 0), options.tokens, make()
    allowed = weight_bytes(made, kind) // 4
    with limited(device, allowed), engine_of(made, options, kind) as engine:
        assert engine.decoder.stream is not None
        moved = engine.decoder.stream.nbytes * count  # the first token takes a pass, too
        for batch in options.batch:
            prompts = torch.randint(0, 1000, (batch, _PROMPT)).tolist()
            ours = partial(engine.generate, prompts, max_new_tokens=count)
            some = [Contender("deepspeed_ext", ours), link(moved, device)]
            rival = accelerated(made, batch, count, device) if kind == "bf16" else None
            if rival is not None and options.rivals:
                some.append(rival)
            with tqdm(total=options.rounds, desc="rounds", disable=None) as bar:
                found = measure(some, device.type, options.rounds, bar, warm_up=1)
            if _ACCELERATE in found:
                theirs[batch] = found[_ACCELERATE]
            elif batch in theirs:
                found = {**found, _ACCELERATE: theirs[batch]}
            share = found[_LINK].median / found["deepspeed_ext"].median
            notes = [f"{share:.3f} of the link's rate; {allowed / 1e9:.2f} GB allowed"]
            if device.type == "cuda":
                peak = torch.cuda.max_memory_allocated(device) / 1e9
                notes.append(f"{peak:.2f} GB of the device at most, all contenders together")
            where = "" if options.nvme_path is None else ", from a disk"
            work = f"{options.layers} layers, {kind}, batch {batch}, {count} tokens{where}"
            yield Result(work, 0, 0, moved, found, [_LINK], notes=notes)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[1])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=8, help="new ones, each a pass")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kinds", nargs="*", default=["bf16", "int4"])
    parser.add_argument("--batch", nargs="*", type=int, default=[1, 32])
    parser.add_argument("--nvme-path", help="let layers rest in a file in this folder")
    parser.add_argument("--pageable", action="store_true", help="leave accelerate's weights so")
    parser.add_argument("--no-rivals", dest="rivals", action="store_false")
    add_option(parser)
    options = parser.parse_args()
    described, results = introduced(options.device), list[Result]()
    theirs: dict[int, Any] = {}
    pins = torch.cuda.is_available() and not options.pageable
    make = partial(module, options.layers, options.hidden, pins)
    try:
        for kind in options.kinds:
            for result in rows(make, kind, options, theirs):
                results.append(result)
                show(result)
            gc.collect()
    finally:
        keep(options.save, results, described)


if __name__ == "__main__":
    sys.exit(main())

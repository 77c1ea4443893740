"""Decoding of mixtures of experts beside reading alone: `python -m benchmarks.bench_experts`.

Models have the shapes of real ones and random weights, drawn where they are to be. A work is so
many steps of so many requests, each after a prompt of one token. The ceiling reads as many bytes:
the experts that the tokens of a step choose, each once, as counted in some steps of the engine
itself, and all other weights. Keys and values are few, and do not count.
"""

import argparse
import gc
import math
from collections.abc import Iterator, Mapping
from functools import partial
from unittest import mock

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.harness import ROUNDS, Contender
from benchmarks.results import Result, add_option, introduced, keep, show
from benchmarks.stream import Stream
from benchmarks.workloads import BF16, Shapes, Workload, bench, keep_memory
from deepspeed_ext.inference import InferenceEngine
from deepspeed_ext.inference.execution import experts
from deepspeed_ext.inference.execution.decoder import Decoder
from deepspeed_ext.inference.model.architecture import architecture_of
from deepspeed_ext.inference.model.policies import policy_of
from deepspeed_ext.inference.serving.roofline import bytes_of_experts
from deepspeed_ext.inference.weights.host_memory import WeightMemory
from deepspeed_ext.inference.weights.loader import Taker
from deepspeed_ext.inference.weights.quantize_on_load import Quantizer, bytes_of, with_input_format
from deepspeed_ext.ops import Routing, moe_route

_QWEN3 = dict(
    model_type="qwen3_moe",
    hidden_act="silu",
    rms_norm_eps=1e-6,
    norm_topk_prob=True,
    num_key_value_heads=4,
    num_experts_per_tok=8,
    vocab_size=151936,
    max_position_embeddings=4096,
)
MODELS = {
    "30 B, 3 B active": _QWEN3  # as Qwen 3 30B-A3B
    | dict(
        hidden_size=2048,
        num_hidden_layers=48,
        num_attention_heads=32,
        head_dim=128,
        num_experts=128,
        moe_intermediate_size=768,
    ),
    "1.4 B, 0.5 B active": _QWEN3
    | dict(
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        head_dim=64,
        num_experts=32,
        moe_intermediate_size=512,
        tie_word_embeddings=True,
    ),
    "2 M": _QWEN3
    | dict(
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        head_dim=16,
        num_experts=16,
        moe_intermediate_size=64,
        vocab_size=4096,
        tie_word_embeddings=True,
    ),
}
# Of each device the model, and how many steps are taken at a time.
WORKS = {"cpu": ("1.4 B, 0.5 B active", 16), "cuda": ("30 B, 3 B active", 128)}


class RandomTensors(Mapping[str, Tensor]):
    """The tensors of a model of this family, each drawn when it is asked for."""

    def __init__(self, config: Mapping[str, int], device: str) -> None:
        self._device = device
        hidden, width, heads = (
            config[n] for n in ("hidden_size", "head_dim", "num_attention_heads")
        )
        kv, count = config["num_key_value_heads"], config["num_experts"]
        inner = config["moe_intermediate_size"]
        shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (config["vocab_size"], hidden)}
        for i in range(config["num_hidden_layers"]):
            at = f"layers.{i}."
            shapes |= {f"{at}{n}_layernorm": (hidden,) for n in ("input", "post_attention")}
            shapes |= {f"{at}self_attn.{n}_norm": (width,) for n in "qk"}
            shapes |= {f"{at}self_attn.{n}_proj": (kv * width, hidden) for n in "kv"}
            shapes[f"{at}self_attn.q_proj"] = heads * width, hidden
            shapes[f"{at}self_attn.o_proj"] = hidden, heads * width
            shapes[f"{at}mlp.gate"] = count, hidden
            shapes[f"{at}mlp.experts.gate_up_proj"] = count, 2 * inner, hidden
            shapes[f"{at}mlp.experts.down_proj"] = count, hidden, inner
        shapes["norm"] = (hidden,)
        self._shapes = {
            f"model.{name}" + ".weight" * (len(shape) < 3): shape for name, shape in shapes.items()
        }
        if not config.get("tie_word_embeddings"):
            self._shapes["lm_head.weight"] = config["vocab_size"], hidden

    def __getitem__(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, device=self._device, dtype=BF16)
        drawn = torch.randn(shape, device=self._device, dtype=BF16)
        return drawn.mul_(1.0 if "embed" in name else 1 / math.sqrt(shape[-1]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def decoder_of(model: str, kind: str | None, device: str) -> Decoder:
    """Return a model, its weights and head in bfloat16 or quantized; on a CPU x is, too."""
    config = MODELS[model]
    policy = policy_of(config)
    of, place = architecture_of(policy, config), torch.device(device)
    memory = WeightMemory() if device == "cpu" else None
    quantize = [None if kind is None else Quantizer(kind, None, place, memory=memory)] * 2
    tensors = RandomTensors(config, device)
    with torch.no_grad():
        taker = Taker(policy, config, of, tensors, place, BF16, *quantize, memory=memory)
        weights = taker.take()
        if kind is not None and device == "cpu":
            weights = with_input_format(weights, "int8")
        return Decoder(of, weights)


def bytes_of_step(decoder: Decoder, batch: int) -> tuple[int, float]:
    """Return the bytes that a step reads, and how many experts of a layer that are on average."""
    counted: list[Tensor] = []

    def noting(logits: Tensor, *args: object, **options: object) -> Routing:
        routing: Routing = moe_route(logits, *args, **options)  # type: ignore[arg-type]
        if len(logits) == batch:
            counted.append((routing.counts > 0).sum())
        return routing

    with mock.patch.object(experts, "moe_route", noting):  # steps that nothing records
        steps_of(decoder, batch, 3, cuda_graphs=False)()
    chosen = float(torch.stack(counted).double().mean())
    weights, of = decoder.weights, decoder.of
    all_experts = sum(map(bytes_of_experts, weights.layers))
    assert of.experts is not None
    rest = bytes_of([weights.layers, weights.final_norm, weights.head]) - all_experts
    return rest + round(all_experts * chosen / of.experts.count), chosen


def steps_of(decoder: Decoder, batch: int, steps: int, **options: bool) -> partial[object]:
    """Return a call that takes steps of so many requests, which begin together."""
    sizes = dict(max_batch=batch, max_tokens=steps + 1)
    engine = InferenceEngine(decoder, **sizes, pack_prefill=True, **options)
    prompts = [[1 + 31 * i] for i in range(batch)]
    return partial(engine.generate, prompts, max_new_tokens=steps, stop_tokens=())


def contenders(
    decoder: Decoder, batch: int, steps: int, shapes: Shapes, device: str
) -> list[Contender]:
    """Return ours."""
    return [Contender("deepspeed_ext", steps_of(decoder, batch, steps))]


def works(device: str, only: str, model: str, steps: int) -> Iterator[Workload]:
    """Yield the pieces of work, a model at a time."""
    of_codes = "int4, int8 activations" if device == "cpu" else "int4"
    for kind in (None, "int4"):
        what = "bf16" if kind is None else of_codes
        names = {batch: f"{model}, {what}, batch {batch}" for batch in (1, 32)}
        names = {batch: name for batch, name in names.items() if only in name}
        if not names:
            continue
        decoder = decoder_of(model, kind, device)
        for batch, name in names.items():
            nbytes, chosen = bytes_of_step(decoder, batch)
            tqdm.write(f"{name}: {chosen:.1f} experts of a layer are read in a step")
            make, tokens = partial(contenders, decoder, batch, steps), steps * batch
            yield Workload(
                name, [(nbytes,)], 1, make, only_reads=True, times=steps, tokens=tokens, warm_up=1
            )
        del decoder
        gc.collect()
        torch.cuda.empty_cache()


def main() -> None:
    """Read the command line, measure what it asks for, and show it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=sorted(WORKS), default="cpu")
    parser.add_argument("--threads", default="2", help="thread counts on the CPU, such as 1,2")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", default="", help="works whose name has this text in it")
    parser.add_argument("--model", choices=MODELS, help="another than the device's")
    add_option(parser)
    options = parser.parse_args()
    if options.device == "cpu":
        keep_memory()
    threads = [0] if options.device == "cuda" else [int(n) for n in options.threads.split(",")]
    described, results = introduced(options.device), list[Result]()
    stream = Stream(options.device)
    model, steps = WORKS[options.device]
    try:
        with tqdm(desc="rounds") as progress:
            for work in works(options.device, options.only, options.model or model, steps):
                for count in threads:
                    results.append(bench(work, stream, count, options.rounds, progress))
                    show(results[-1])
                    if results[-1].only:
                        raise KeyboardInterrupt
    finally:  # what is measured is kept, whatever fails after it
        keep(options.save, results, described)


if __name__ == "__main__":
    main()

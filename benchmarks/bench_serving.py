"""Many requests, and long prompts, beside compiled torch: `python -m benchmarks.bench_serving`.

Models have the shapes of real ones and random weights. Requests ask for different numbers of
tokens after prompts of different lengths, both drawn evenly. Ours flow through the slots of one
engine in the order in which they come. Compiled torch takes batches of as many as there are
slots, padded to the longest prompt, which go on until the last of the batch is done: sorted by the
lengths of prompts; and by those of what is asked for, which nobody knows beforehand in real life.
Tokens that nobody asked for do not count. The ceiling reads all weights once for each
token of each slot, as if all slots were full to the end and prompts were for nothing.

The other work is one long prompt and a token; there a ceiling multiplies alone.
"""

import gc
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from benchmarks.bench_encoder import multiplications
from benchmarks.bench_generate import module, shapes_of
from benchmarks.harness import Contender
from benchmarks.plain_llama import Parts, PlainLlama
from benchmarks.workloads import BF16, Shapes, Workload, main
from deepspeed_ext.inference import InferenceEngine, SamplingOptions, init_inference


class Request(NamedTuple):
    """A prompt, and how many tokens are wanted after it."""

    prompt: list[int]
    count: int


class Load(NamedTuple):
    """Requests of many kinds; the least and the most tokens of prompts, and of what follows."""

    requests: int
    slots: int
    prompts: tuple[int, int]
    counts: tuple[int, int]

    @property
    def tokens(self) -> int:
        """The most that a request has."""
        return self.prompts[1] + self.counts[1]

    def drawn(self) -> list[Request]:
        """Return the requests, always the same."""
        draw = random.Random(0)
        sizes = [
            (draw.randint(*self.prompts), draw.randint(*self.counts)) for _ in range(self.requests)
        ]
        return [Request(draw.choices(range(1000), k=size), count) for size, count in sizes]


def parts_of(engine: InferenceEngine) -> Parts:
    """Return the weights of an engine, which has the same ones as one."""
    of = engine.decoder.weights
    layers: list[dict[str, Any]] = [
        {
            "qkv": layer.qkv.weight,
            "out": layer.out.weight,
            "up": layer.up.weight,
            "down": layer.down.weight,
            "input": layer.attention_norm and layer.attention_norm.weight,
            "post": layer.mlp_norm and layer.mlp_norm.weight,
        }
        for layer in of.layers
    ]
    head: Any = of.head and of.head.weight
    norm: Any = of.final_norm and of.final_norm.weight
    return Parts(of.embedding, head, norm, layers)


def by_ours(engine: InferenceEngine, load: Load) -> Callable[[], object]:
    """Return a call that lets all requests flow through an engine, which is warm."""
    some = load.drawn()
    prompts = [request.prompt for request in some]

    def run(counts: Sequence[int]) -> object:
        wanted = [SamplingOptions(max_new_tokens=count, stop_tokens=()) for count in counts]
        return engine.generate(prompts, wanted)

    run([2 + i % 8 for i in range(load.requests)])  # all numbers of rows, twice
    return partial(run, [request.count for request in some])


def by_torch(plain: PlainLlama, load: Load, key: Callable[[Request], int]) -> Callable[[], object]:
    """Return a call that takes requests in the order of a key, as many as there are slots."""
    device, some = plain.token.device, sorted(load.drawn(), key=key)
    batches = []
    for i in range(0, load.requests, load.slots):
        batch = some[i : i + load.slots]
        most = max(len(request.prompt) for request in batch)
        ids = [request.prompt + [0] * (most - len(request.prompt)) for request in batch]
        lengths = [len(request.prompt) for request in batch]
        sent = torch.tensor(ids, device=device), torch.tensor(lengths, device=device)
        batches.append((*sent, max(request.count for request in batch)))
    for ids, lengths, _ in (batches[0], batches[-1]):  # of two widths, as compilers want to see
        plain.generate(ids, 3, lengths)

    def run() -> object:
        return [plain.generate(ids, count, lengths).tolist() for ids, lengths, count in batches]

    return run


def of_requests(model: str, load: Load, shapes: Shapes, device: str) -> list[Contender]:
    made = module(model, device)
    sizes = dict(max_batch=load.slots, max_tokens=load.tokens)
    engine = init_inference(made, **sizes)
    config = made.config
    del made  # all have the weights of the engine
    gc.collect()
    packing = InferenceEngine(engine.decoder, **sizes, pack_prefill=True)
    plain = PlainLlama(parts_of(engine), config, load.tokens, load.slots, True)
    ways = {
        "deepspeed_ext": by_ours(engine, load),
        "deepspeed_ext, pack_prefill": by_ours(packing, load),
        "torch compiled, sorted by prompts": by_torch(plain, load, lambda one: len(one.prompt)),
        "torch compiled, sorted by futures": by_torch(plain, load, lambda one: one.count),
    }
    return [Contender(name, way) for name, way in ways.items()]


def of_prompt(model: str, tokens: int, shapes: Shapes, device: str) -> list[Contender]:
    made = module(model, device)
    engine = init_inference(made, max_batch=1, max_tokens=tokens + 1)
    plain = PlainLlama(parts_of(engine), made.config, tokens + 1, 1, True)
    ids = torch.randint(0, 1000, (1, tokens), device=device)
    prompt = ids[0].tolist()

    def transformers(forward: Callable[..., Any]) -> object:
        with torch.inference_mode():
            return forward(ids, use_cache=True, logits_to_keep=1).logits.argmax(-1).tolist()

    ways = {
        "deepspeed_ext": partial(engine.generate, prompt, max_new_tokens=1, stop_tokens=()),
        "torch compiled": lambda: plain.generate(ids, 1).tolist(),
        "transformers compiled": partial(transformers, torch.compile(made, dynamic=False)),
        "transformers": partial(transformers, made),
    }
    alone = multiplications(tokens, shapes_of(model)[:-1], BF16, device)
    found = [Contender(name, way) for name, way in ways.items()]
    return [*found, Contender("multiplications alone", alone, is_ceiling=True)]


def requests(model: str, load: Load) -> Workload:
    name = f"{model}, {load.requests} requests, {load.slots} slots"
    tokens = sum(request.count for request in load.drawn())
    make = partial(of_requests, model, load)
    times = tokens // load.slots
    return Workload(
        name, shapes_of(model), 2, make, only_reads=True, times=times, tokens=tokens, warm_up=0
    )


def prompt(model: str, tokens: int) -> Workload:
    make = partial(of_prompt, model, tokens)
    name = f"{model}, prefill {tokens:,}"
    return Workload(name, shapes_of(model), 2, make, only_reads=True, warm_up=1)


WORKLOADS = {
    "cpu": [
        requests("4 M", Load(32, 8, (16, 64), (4, 32))),
        prompt("4 M", 2048),
    ],
    "cuda": [
        requests("8 B", Load(256, 32, (128, 1024), (32, 256))),
        prompt("8 B", 8192),
    ],
}

if __name__ == "__main__":
    main(__doc__, WORKLOADS)

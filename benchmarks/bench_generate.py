"""The engine beside compiled torch and transformers: `python -m benchmarks.bench_generate`.

Models have the shapes of real ones and random weights. A work is so many tokens after a prompt,
one at a time: all weights are read for each, so the ceiling reads as many bytes. Its
shapes are those of the weights. Of int4 the ceiling reads the bytes of bfloat16 as well:
what counts there is the ratio to our bfloat16.
"""

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.harness import Contender
from benchmarks.plain_llama import Parts, PlainLlama
from benchmarks.workloads import BF16, Shapes, Workload, main
from deepspeed_ext.inference import init_inference

PROMPT = {"cpu": 8, "cuda": 128}  # tokens; a CPU takes long ones in at a fraction of this rate
# hidden, layers, heads, heads of keys, intermediate, vocabulary, whether the head is the embedding
MODELS = {
    "8 B": (4096, 32, 32, 8, 14336, 128256, False),
    "1 B": (2048, 16, 32, 8, 8192, 128256, True),
    "0.5 B": (896, 24, 14, 2, 4864, 151936, True),
    "4 M": (256, 4, 8, 2, 704, 4096, True),
}


def shapes_of(model: str) -> Shapes:
    """Return the shapes of what is read for a token."""
    hidden, layers, heads, kv, wide, vocabulary, _ = MODELS[model]
    width = hidden // heads
    layer = [((heads + 2 * kv) * width, hidden), (hidden, hidden), (3 * wide, hidden)]
    return [*layer * layers, (vocabulary, hidden)]


def module(model: str, device: str) -> torch.nn.Module:
    """Return transformers' model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, layers, heads, kv, wide, vocabulary, tied = MODELS[model]
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        intermediate_size=wide,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=8192,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(BF16)
    try:
        with torch.device(device):
            made = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    made.generation_config.eos_token_id = None
    return made.eval()


def contenders(
    model: str, count: int, rivals: tuple[str, ...], shapes: Shapes, device: str
) -> list[Contender]:
    """Return ours, with some options, and others."""
    made = module(model, device)
    prompts = torch.randint(0, 1000, (1, PROMPT[device]), device=device)
    tokens = PROMPT[device] + count

    def ours(**options: str) -> Callable[[], object]:
        engine = init_inference(made, max_batch=1, max_tokens=tokens, **options)
        return partial(engine.generate, prompts.tolist(), max_new_tokens=count)

    def plain(compiled: bool) -> Callable[[], object]:
        parts = Parts.of(made.state_dict(), made.config.num_hidden_layers)
        of = PlainLlama(parts, made.config, tokens, 1, compiled)
        return lambda: of.generate(prompts, count).tolist()

    def transformers() -> object:
        with torch.inference_mode():
            mask = torch.ones_like(prompts)
            return made.generate(
                prompts, attention_mask=mask, max_new_tokens=count, do_sample=False
            ).tolist()

    ways: dict[str, Callable[[], Callable[[], object]]] = {
        "deepspeed_ext": ours,
        "deepspeed_ext int8": partial(ours, quantize="int8"),
        "deepspeed_ext int4": partial(ours, quantize="int4"),
        "deepspeed_ext int4, int8 activations": partial(
            ours, quantize="int4", quantize_head="int4", input_format="int8"
        ),
        "torch compiled": partial(plain, True),
        "transformers": lambda: transformers,
    }
    return [Contender(name, ways[name]()) for name in ("deepspeed_ext", *rivals)]


def work(model: str, count: int, *rivals: str) -> Workload:
    name = f"{model}, {count} tokens"
    make = partial(contenders, model, count, rivals)
    return Workload(name, shapes_of(model), 2, make, only_reads=True, times=count, warm_up=1)


WORKLOADS = {
    "cpu": [
        work("0.5 B", 32, "deepspeed_ext int4, int8 activations", "torch compiled", "transformers")
    ],
    "cuda": [
        work("8 B", 512, "deepspeed_ext int4", "torch compiled", "transformers"),
        work("1 B", 512, "deepspeed_ext int4", "torch compiled", "transformers"),
    ],
}

if __name__ == "__main__":
    main(__doc__, WORKLOADS)

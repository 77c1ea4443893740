"""What becomes of a model's tensors: each is copied once, to its place, or refused by name."""

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
import torch
from family_cases import CASES, cache_for, decoder_of, model_of, run
from torch import Tensor

from deepspeed_ext.inference.model.architecture import architecture_of
from deepspeed_ext.inference.model.policies import policy_of
from deepspeed_ext.inference.model.policies.gpt_neox import GPT_NEOX
from deepspeed_ext.inference.model.policies.llama import LLAMA
from deepspeed_ext.inference.model.policy import Policy
from deepspeed_ext.inference.weights.loader import Taker, Weights

EACH = pytest.mark.parametrize("case", CASES)
State = dict[str, Tensor]


def taken(case: str, state: Mapping[str, Tensor], policy: Policy | None = None) -> Weights:
    config = model_of(case).config.to_dict()
    policy = policy or policy_of(config)
    architecture = architecture_of(policy, config)
    place = torch.device("cpu")
    return Taker(policy, config, architecture, state, place, torch.float32).take()


def refuse(case: str, state: State, text: str, policy: Policy | None = None) -> None:
    with pytest.raises(ValueError, match="^init_inference: " + re.escape(text)):
        taken(case, state, policy)


def state_of(case: str) -> State:
    return dict(model_of(case).state_dict())


class Counted(Mapping[str, Tensor]):
    """A state dict that counts how often each tensor is read."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self.state, self.reads = state, dict.fromkeys(state, 0)

    def __getitem__(self, name: str) -> Tensor:
        self.reads[name] += 1
        return self.state[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.state)

    def __len__(self) -> int:
        return len(self.state)


@EACH
def test_each_tensor_is_read_once(case: str) -> None:
    """But for those of images, which a model of text has no use for."""
    tensors = Counted(state_of(case))
    taken(case, tensors)
    unused = {n for n, reads in tensors.reads.items() if reads == 0}
    assert all("vision_tower." in n or "multi_modal_projector." in n for n in unused)
    assert max(tensors.reads.values()) == 1


@EACH
def test_nothing_is_shared_with_the_model(case: str) -> None:
    state = state_of(case)
    theirs = {t.untyped_storage().data_ptr() for t in state.values()}
    before = {name: tensor.clone() for name, tensor in state.items()}
    weights = taken(case, state)
    assert not theirs & {t.untyped_storage().data_ptr() for t in tensors_of(weights)}
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.items())
    assert not any(t.requires_grad for t in tensors_of(weights))


def tensors_of(entry: object) -> Iterator[Tensor]:
    if isinstance(entry, Tensor):
        yield entry
    elif isinstance(entry, list):
        for each in entry:
            yield from tensors_of(each)
    elif hasattr(entry, "__dict__"):
        for each in vars(entry).values():
            yield from tensors_of(each)


def test_training_the_model_does_not_reach_the_decoder() -> None:
    model = copy.deepcopy(model_of("mistral")).train()
    tokens = list(range(20))
    decoder = decoder_of(model.config.to_dict(), model.state_dict(), torch.float32)
    before = run(decoder, tokens, ())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        ids = torch.tensor([tokens])
        model(ids, labels=ids).loss.backward()
        assert torch.equal(run(decoder, tokens, ()), before)
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(run(decoder, tokens, ()), before)
    after = decoder_of(model.config.to_dict(), model.state_dict(), torch.float32)
    assert not torch.equal(run(after, tokens, ()), before)


def test_a_head_that_is_tied_takes_no_memory() -> None:
    for case in ("gpt2", "gemma2", "bloom", "opt"):
        weights = taken(case, state_of(case))
        assert weights.head is not None and weights.head.weight is weights.embedding
        alone = {n: t for n, t in state_of(case).items() if n != "lm_head.weight"}
        assert taken(case, alone).head is not None
    weights = taken("mistral", state_of("mistral"))
    assert weights.head is not None and weights.head.weight is not weights.embedding


def test_models_without_their_head_and_prefix() -> None:
    """As GPT-2's own files are."""
    short = {n.removeprefix("transformer."): t for n, t in state_of("gpt2").items()}
    short = {n: t for n, t in short.items() if n != "lm_head.weight"}
    short |= {f"h.{i}.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.bool) for i in range(3)}
    got, want = taken("gpt2", short), taken("gpt2", state_of("gpt2"))
    assert all(map(torch.equal, tensors_of(got), tensors_of(want)))


@pytest.mark.parametrize(
    ("case", "older"),
    [("gpt_neox", "embed_out"), ("gemma3-with-images", "language_model.lm_head")],
)
def test_heads_that_have_an_older_name(case: str, older: str) -> None:
    state = state_of(case)
    state[f"{older}.weight"] = state.pop("lm_head.weight")
    got, want = taken(case, state), taken(case, state_of(case))
    assert all(map(torch.equal, tensors_of(got), tensors_of(want)))


def test_a_quantizer_gets_each_weight_of_a_block_once() -> None:
    shapes: list[tuple[int, ...]] = []

    def quantize(weight: Tensor) -> Tensor:
        assert weight.is_contiguous() and weight.dtype == torch.bfloat16
        shapes.append(tuple(weight.shape))
        return weight

    config = model_of("qwen3").config.to_dict()
    policy = policy_of(config)
    architecture = architecture_of(policy, config)
    where = torch.device("cpu"), torch.bfloat16
    Taker(policy, config, architecture, state_of("qwen3"), *where, quantize).take()
    assert shapes == [(192, 64), (64, 96), (192, 64), (64, 96)] * 3


def test_refused_tensors() -> None:
    state, layer = state_of("llama"), "model.layers.1.self_attn.k_proj.weight"
    missing = {n: t for n, t in state.items() if n != layer}
    refuse("llama", missing, f"model has no tensor {layer!r}, expected it for model_type 'llama'")
    refuse(
        "llama",
        state | {layer: torch.zeros(64, 32)},
        f"{layer} has shape [64, 32], expected [32, 64]",
    )
    refuse(
        "llama",
        state | {layer: torch.zeros(32, 64, dtype=torch.int8)},
        f"{layer} has dtype torch.int8, expected floats",
    )
    refuse(
        "llama",
        state | {layer: torch.zeros(32, 64, device="meta")},
        f"{layer} is on meta, expected a tensor with elements",
    )
    refuse(
        "llama",
        state | {layer + "_scale": torch.zeros(1)},
        f"model has {layer + '_scale'!r}, expected no tensor of this name for model_type 'llama'",
    )
    refuse("llama", {}, "model has no tensor model.embed_tokens.weight or embed_tokens.weight, exp")
    within = {f"_orig_mod.{n}": t for n, t in state.items()}  # as of what torch.compile returns
    text = "expected it for model_type 'llama'; it has '_orig_mod.model.embed_tokens.weight', as of"
    looked = "model has no tensor model.embed_tokens.weight or embed_tokens.weight"
    refuse("llama", within, f"{looked}, {text}")
    headless = {n: t for n, t in state.items() if n != "lm_head.weight"}
    refuse("llama", headless, "model has no tensor 'lm_head.weight', expected it for model_type")
    position = "transformer.wpe.weight"
    refuse(
        "gpt2",
        state_of("gpt2") | {position: torch.zeros(256, 52)},
        f"{position} has shape [256, 52], expected [256, 51]",
    )
    refuse(
        "gpt2",
        state_of("gpt2") | {"lm_head.weight": torch.zeros(97, 51)},
        "lm_head.weight is other than transformer.wte.weight, expected the same, as config ties",
    )


def test_tables_whose_names_do_not_fit() -> None:
    two = replace(LLAMA, names=replace(LLAMA.names, qkv=("self_attn.q_proj", "self_attn.k_proj")))
    at = "model.layers.0.self_attn.q_proj"
    refuse("llama", state_of("llama"), f"the table has 2 names of what lies in {at}, exp", two)
    three = replace(GPT_NEOX, names=replace(GPT_NEOX.names, qkv=("q", "k", "v")))
    text = "the table has 3 names of what lies in gpt_neox.layers.0.q, expected 1"
    refuse("gpt_neox", state_of("gpt_neox"), text, three)


def test_more_tokens_than_positions() -> None:
    for case, most in (("gpt2", 256), ("opt", 256)):
        model = model_of(case)
        decoder = decoder_of(model.config.to_dict(), model.state_dict(), torch.float32)
        tokens, slots = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
        cache = cache_for(decoder, capacity=most + 1)
        cache.reserve(0, 1)
        text = f"decoder: the cache has capacity {most + 1}, expected at most {most}, as many as"
        with pytest.raises(ValueError, match=re.escape(text)):
            decoder.hidden(tokens, cache, slots)
        run(decoder, list(range(80)), ())


def test_the_most_memory_is_one_tensor_more() -> None:
    """Of a model that is read bit by bit: what is taken is made as it is to be, and filled."""
    state = state_of("qwen3")

    class Read(Counted):
        def __getitem__(self, name: str) -> Tensor:
            return self.state[name].clone()  # as from a file

    config = model_of("qwen3").config.to_dict()
    architecture = architecture_of(policy_of(config), config)
    where = torch.device("cpu"), torch.float32
    taker = Taker(policy_of(config), config, architecture, Read(state), *where)
    with torch.profiler.profile(profile_memory=True) as profile:
        weights = taker.take()
    held = sum(t.untyped_storage().nbytes() for t in tensors_of(weights))
    peak, now = 0, 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    assert held <= peak <= held + max(t.untyped_storage().nbytes() for t in state.values())

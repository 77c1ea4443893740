"""Encoders: hidden states against transformers, masks of all kinds, and no work for padding."""

import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from encoder_cases import LENGTHS, gated_encoder, make, texts
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from deepspeed_ext.inference.execution.encoder import Encoder
from deepspeed_ext.inference.execution.varlen_batch import batch_of
from deepspeed_ext.inference.initialize import init_inference
from deepspeed_ext.inference.model.architecture import architecture_of
from deepspeed_ext.inference.model.policies import policy_of
from deepspeed_ext.inference.serving import encoder_engine
from deepspeed_ext.inference.serving.encoder_engine import Encoded, EncoderEngine
from deepspeed_ext.inference.weights.loader import Taker
from deepspeed_ext.io import save
from deepspeed_ext.ops import PackedWeight, pack_weight, quantize, unpack_weight

_NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
ON_BOTH = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=_NEEDS_GPU)])
FAMILIES = pytest.mark.parametrize("family", ["bert", "roberta"])


@torch.no_grad()
def states_of(model: Any, batch: dict[str, Tensor]) -> list[Tensor]:
    """Return what goes into each layer of transformers' model and out of the last, in float64.

    Tokens that do not count are 0.
    """
    found = model(**batch, output_hidden_states=True).hidden_states
    return [states.double() * batch["attention_mask"].unsqueeze(-1) for states in found]


@torch.no_grad()
def our_states(engine: EncoderEngine, batch: dict[str, Tensor]) -> Iterator[Tensor]:
    """Yield the same of ours."""
    encoder = engine.encoder
    laid = batch_of(*batch.values(), encoder.limits)
    (part,) = laid.parts(10**6, engine.device)
    x = encoder.embedded(part)
    for layer in (None, *encoder.weights.layers):
        x = x if layer is None else encoder.block(layer, x, part)
        states = torch.zeros(batch["input_ids"].numel(), x.shape[1], dtype=torch.float64)
        states[part.places.cpu()] = x.double().cpu()
        yield states.view(*laid.shape, -1)


def furthest(got: Tensor, want: Tensor) -> float:
    return float((got - want).abs().max())


@ON_BOTH
@FAMILIES
@pytest.mark.parametrize("side", ["right", "left", "holes"])
def test_states_layer_by_layer(family: str, side: str, device: str) -> None:
    """No further from float64 than twice what transformers' float32 is, element by element."""
    model = make(family)
    batch = texts(model, side)
    engine = init_inference(copy.deepcopy(model).to(device))
    theirs = states_of(model, batch)
    exact = states_of(model.double(), batch)
    for got, single, want in zip(our_states(engine, batch), theirs, exact, strict=True):
        assert furthest(got, want) < 2 * furthest(single, want) < 1e-4
    whole = engine(**batch).last_hidden_state
    assert torch.equal(whole.cpu().double(), got)


@ON_BOTH
@FAMILIES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_16_bits_are_as_good_as_those_of_transformers(
    family: str, dtype: torch.dtype, device: str
) -> None:
    """By the root of the mean square over 64 texts, as single elements differ by chance."""
    model = make(family).to(dtype)
    several = [texts(model, seed=seed) for seed in range(8)]
    batch = {name: torch.cat([each[name] for each in several]) for name in several[0]}
    engine = init_inference(copy.deepcopy(model).to(device))
    theirs = states_of(model, batch)
    exact = states_of(model.double(), batch)
    for got, half, want in zip(our_states(engine, batch), theirs, exact, strict=True):
        off, usual = ((states - want).square().mean().sqrt() for states in (got, half))
        assert off <= usual


@pytest.mark.parametrize("family", ["xlm-roberta", "camembert"])
def test_what_is_built_like_roberta(family: str) -> None:
    model = make(family)
    batch = texts(model)
    engine, want = init_inference(model), states_of(model.double(), batch)[-1]
    assert furthest(engine(**batch).last_hidden_state.double(), want) < 1e-5


@ON_BOTH
@FAMILIES
def test_pooled_states(family: str, device: str) -> None:
    model = make(family)
    batch = texts(model)
    got = init_inference(copy.deepcopy(model).to(device))(**batch)
    assert isinstance(got, Encoded) and got[1] is got.pooler_output
    with torch.no_grad():
        want = model.double()(**batch).pooler_output
    has_tokens = torch.tensor(LENGTHS) > 0
    assert got.pooler_output is not None
    pooled = got.pooler_output.cpu()
    assert furthest(pooled[has_tokens], want[has_tokens]) < 1e-5
    assert not pooled[~has_tokens].any()


def test_the_pooled_state_is_that_of_the_first_token_that_counts() -> None:
    model = make("bert")
    engine = init_inference(model)
    left, alone = texts(model, "left"), engine(torch.tensor([[9, 8, 7]]))
    left["input_ids"][1, -3:] = torch.tensor([9, 8, 7])
    got = engine(left["input_ids"], left["attention_mask"])
    where = left["attention_mask"].argmax(1)
    states = got.last_hidden_state[torch.arange(len(where)), where]
    pooled = engine.encoder.pooled(states)
    assert got.pooler_output is not None and pooled is not None and alone.pooler_output is not None
    has_tokens = torch.tensor(LENGTHS) > 0
    assert torch.equal(got.pooler_output[has_tokens], pooled[has_tokens])


@ON_BOTH
def test_the_batch_and_padding_change_nothing_but_rounding(device: str) -> None:
    model = make("bert")
    batch = texts(model)
    engine = init_inference(model.to(device))
    together = engine(**batch).last_hidden_state
    for i, length in enumerate(LENGTHS):
        alone = engine(*(tensor[i : i + 1, :length] for tensor in batch.values()))
        assert alone.last_hidden_state.shape == (1, length, 64)
        if length:
            assert furthest(together[i, :length], alone.last_hidden_state[0]) < 1e-5
        assert not together[i, length:].any()


@ON_BOTH
def test_what_does_not_count_is_not_looked_at(device: str) -> None:
    model = make("bert")
    batch = texts(model, "holes")
    engine = init_inference(model.to(device))
    want = engine(**batch)
    for name in ("input_ids", "token_type_ids"):
        batch[name][batch["attention_mask"] == 0] = -100
    got = engine(**batch)
    assert torch.equal(got.last_hidden_state, want.last_hidden_state)


def test_padding_is_not_computed_with() -> None:
    engine = init_inference(make("bert"))
    batch = texts(make("bert"))

    def flops(*inputs: Tensor) -> int:
        with FlopCounterMode(display=False) as counter:
            engine(*inputs)
        return counter.get_total_flops()

    alone = [
        flops(*(tensor[i : i + 1, :length] for tensor in batch.values()))
        for i, length in enumerate(LENGTHS)
    ]
    pooling = flops(*(tensor[:, :0] for tensor in batch.values()))
    assert flops(*batch.values()) == sum(alone) > 10 * pooling


@ON_BOTH
def test_batches_are_cut_into_parts(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("roberta")
    batch = texts(model)
    engine = init_inference(model.to(device))
    want = engine(**batch).last_hidden_state
    seen = []
    inside = engine.encoder.hidden
    monkeypatch.setattr(
        engine.encoder, "hidden", lambda part: seen.append(part.groups) or inside(part)
    )
    monkeypatch.setattr(encoder_engine, "TOKENS", 30)
    got = engine(**batch).last_hidden_state
    assert seen == [((1, 1), (1, 2), (1, 7), (1, 20)), ((1, 33),), ((1, 33),), ((1, 40),)]
    assert furthest(got, want) < 1e-5


class Configured(torch.nn.Module):
    """Tensors under their names, and a configuration."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.config, self._tensors = config, tensors

    def state_dict(self, *_: Any, **__: Any) -> Any:
        return self._tensors


@ON_BOTH
@pytest.mark.parametrize("keys", [4, 2])
def test_other_choices_than_those_of_bert(keys: int, device: str) -> None:
    """A gate, norms without a mean, no positions, no biases, and heads that share keys."""
    policy, config, tensors = gated_encoder(4, keys)
    engine = init_inference(Configured(config, tensors), policy=policy, device=device)
    ids = torch.arange(1, 15).view(2, 7)
    w = {name.removeprefix("encoder.layer.0."): each.double() for name, each in tensors.items()}

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w[f"{name}.weight"]

    def heads(x: Tensor, name: str) -> Tensor:
        found = (x @ w[f"attention.self.{name}.weight"].t()).unflatten(-1, (-1, 16)).transpose(1, 2)
        return found.repeat_interleave(4 // found.shape[1], 1)

    x = norm(w["embeddings.word_embeddings.weight"][ids], "embeddings.LayerNorm")
    q, k, v = (heads(x, name) for name in ("query", "key", "value"))
    mixed = ((q @ k.transpose(2, 3) / 4).softmax(-1) @ v).transpose(1, 2).flatten(2)
    x = norm(x + mixed @ w["attention.output.dense.weight"].t(), "attention.output.LayerNorm")
    wide = torch.nn.functional.silu(x @ w["gate.weight"].t()) * (
        x @ w["intermediate.dense.weight"].t()
    )
    want = norm(x + wide @ w["output.dense.weight"].t(), "output.LayerNorm")
    got = engine(ids).last_hidden_state.cpu().double()
    many = engine(ids.repeat(9, 1)).last_hidden_state.cpu().double()  # for other multiplications
    assert furthest(got, want) < 1e-5 and furthest(many, want.repeat(9, 1, 1)) < 1e-5


@ON_BOTH
@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
def test_nothing_is_a_batch(shape: tuple[int, int], device: str) -> None:
    got = init_inference(make("bert").to(device))(torch.zeros(shape, dtype=torch.int64))
    assert got.last_hidden_state.shape == (*shape, 64)
    assert got.pooler_output is not None and got.pooler_output.shape == (shape[0], 64)
    assert not got.pooler_output.any()


def test_inputs_of_any_layout() -> None:
    model = make("bert")
    engine, batch = init_inference(model), texts(model)
    ids, mask, types = batch.values()
    want = engine(ids, mask, types).last_hidden_state
    turned = [tensor.t().contiguous().t() for tensor in (ids.int(), mask, types.int())]
    for other in (mask.bool(), mask.float(), mask.int()):
        got = engine(turned[0], other.t().contiguous().t(), turned[2])
        assert torch.equal(got.last_hidden_state, want)
    whole = engine(ids, torch.ones(()).expand(ids.shape), types[:1].expand(ids.shape))
    assert torch.equal(
        whole.last_hidden_state, engine(ids, None, types[:1].repeat(8, 1)).last_hidden_state
    )


@pytest.mark.parametrize("family", ["bert", "roberta"])
@pytest.mark.parametrize("kind", ["ModelForMaskedLM", "ModelForSequenceClassification"])
def test_heads_are_passed_over(family: str, kind: str) -> None:
    model = make(family, kind)
    batch = texts(model)
    got = init_inference(model)(**batch)
    base = init_inference(model.base_model)(**batch)
    assert torch.equal(got.last_hidden_state, base.last_hidden_state)
    assert (got.pooler_output is None) == (model.base_model.pooler is None)


@pytest.mark.parametrize("activation", ["gelu_new", "relu", "silu"])
def test_activations(activation: str) -> None:
    model = make("bert", hidden_act=activation)
    batch = texts(model)
    engine, want = init_inference(model), states_of(model.double(), batch)[-1]
    assert furthest(engine(**batch).last_hidden_state.double(), want) < 1e-5


@pytest.mark.parametrize("input_format", [None, "int8"])
def test_quantized(input_format: str | None) -> None:
    """The weights are those that the codes stand for, and nothing else differs."""
    model = make("roberta")
    batch = texts(model)
    seen = []

    def packed(weight: Tensor) -> PackedWeight:
        codes, scales, _ = quantize(weight, "int8", group_size=32)
        seen.append(pack_weight(codes, scales, format="int8", group_size=32))
        return seen[-1]

    config = model.config.to_dict()
    policy = policy_of(config)
    of = architecture_of(policy, config)
    tensors = model.state_dict()
    taker = Taker(policy, config, of, tensors, torch.device("cpu"), torch.float32, packed)
    got = EncoderEngine(Encoder(of, taker.take()))(**batch).last_hidden_state
    assert len(seen) == 4 * 3
    weights = iter(unpack_weight(each, torch.float32) for each in seen)
    with torch.no_grad():
        for layer in model.encoder.layer:
            mixing = layer.attention.self
            of_qkv = next(weights).chunk(3)
            for linear, weight in zip(
                (mixing.query, mixing.key, mixing.value), of_qkv, strict=True
            ):
                linear.weight.copy_(weight)
            for linear in (layer.attention.output, layer.intermediate, layer.output):
                linear.dense.weight.copy_(next(weights))
    want = states_of(model.double(), batch)[-1]
    assert furthest(got.double(), want) < 1e-5


@ON_BOTH
@FAMILIES
def test_a_folder_is_as_good_as_its_model(family: str, device: str, tmp_path: Path) -> None:
    model = make(family)
    batch = texts(model)
    model.save_pretrained(tmp_path)
    want = init_inference(model, device=device)(**batch)
    got = init_inference(tmp_path, device=device)(**batch)
    assert torch.equal(got.last_hidden_state, want.last_hidden_state)
    assert got.pooler_output is not None and want.pooler_output is not None
    assert torch.equal(got.pooler_output, want.pooler_output)
    few = init_inference(tmp_path, device=device, quantize="int8")
    assert len(few.report.layers) == 4 * 3
    close = init_inference(model, device=device, quantize="int8")(**batch).last_hidden_state
    assert torch.equal(few(**batch).last_hidden_state, close)


def test_norms_may_have_the_names_of_older_files(tmp_path: Path) -> None:
    """Those of bert-base-uncased do; transformers reads both."""
    model = make("bert", "ModelForMaskedLM")
    batch = texts(model)
    model.save_pretrained(tmp_path)
    tensors = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("Norm.bias", "Norm.beta"): each
        for name, each in model.state_dict().items()
        if not name.startswith("cls.predictions.decoder")
    }
    save(tensors, tmp_path / "model.safetensors", durable=False)
    got = init_inference(tmp_path, device="cpu")(**batch).last_hidden_state
    assert torch.equal(got, init_inference(model, device="cpu")(**batch).last_hidden_state)
    tensors["bert.embeddings.LayerNorm.weight"] = tensors["bert.embeddings.LayerNorm.gamma"]
    save(tensors, tmp_path / "model.safetensors", durable=False)
    with pytest.raises(ValueError, match=r"has 'bert.embeddings.LayerNorm.weight', expected"):
        init_inference(tmp_path)


def test_engines_stand_alone() -> None:
    """Next to training of the same model, on two threads, as a copy, and under autocast."""
    model = make("bert")
    batch = texts(model)
    engine, other = init_inference(model), init_inference(make("bert", hidden_act="relu"))
    want = engine(**batch).last_hidden_state
    others = other(**batch).last_hidden_state
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(each, **batch) for each in (engine, other) * 8]
    for i, job in enumerate(jobs):
        assert torch.equal(job.result().last_hidden_state, others if i % 2 else want)
    assert torch.equal(copy.deepcopy(engine)(**batch).last_hidden_state, want)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(engine(**batch).last_hidden_state, want)
    head = torch.nn.Linear(64, 2)
    head(engine(**batch).last_hidden_state).sum().backward()
    assert head.weight.grad is not None

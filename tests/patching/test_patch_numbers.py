"""patch: loss, logits and gradients of each family, beside those of the model as it is."""

import copy
from typing import Any

import pytest
import torch
from patch_cases import MODELS, batch, errors, exact, model_of, numbers_of

from deepspeed_ext import patch

EPS = torch.finfo(torch.float32).eps
WHAT: dict[str, dict[str, int]] = {  # how many modules call each op
    "Llama": dict(rms_norm=5, gated_activation=2, rope=3, softmax=2, linear_cross_entropy=1),
    "Gemma2": dict(rms_norm=9, gated_activation=2, rope=3, softmax=2, linear_cross_entropy=1),
    "Phi3": dict(rms_norm=5, gated_activation=2, rope=3, softmax=2, linear_cross_entropy=1),
    "Mixtral": dict(rms_norm=5, moe_assign=2, rope=3, softmax=2, linear_cross_entropy=1),
    "GPT2": dict(layer_norm=5, bias_activation=2, softmax=2, linear_cross_entropy=1),
    "Bloom": dict(layer_norm=6, linear_cross_entropy=1),
}


def assert_no_further(model: Any, **inputs: Any) -> None:
    """Compare a patched copy with float64: no further than twice what the model itself is off.

    A number that happens to be right there may be off by some units here, of the largest gradient's
    thousandth where all are noise.
    """
    right = numbers_of(exact(model), **inputs)
    before = errors(numbers_of(copy.deepcopy(model), **inputs), right)
    patched = copy.deepcopy(model)
    patch(patched)
    assert patched(**inputs).logits is None
    after = errors(numbers_of(patched, **inputs), right)
    most = max(float(value.abs().max()) for name, value in right.items() if name != "logits")
    for name, value in right.items():
        size = max(float(value.abs().max()), most / 1000)
        assert after[name] <= 2 * before[name] + 8 * EPS * size, name


@pytest.mark.parametrize("family", MODELS)
def test_numbers(family: str) -> None:
    assert_no_further(model_of(family), **batch())


@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_numbers_of_other_attention_and_positions(family: str) -> None:
    """Attention that is not fused, with gradients of scores by our op; positions of one's own."""
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [5, 6, 7, 8, 9, 30, 31, 32, 33]])
    model = model_of(family, attn_implementation="eager")
    assert_no_further(model, **batch(), position_ids=positions)


def test_numbers_with_scaled_frequencies() -> None:
    rules = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16)
    model = model_of("Qwen3", rope_parameters=rules)
    scaling = model.model.rotary_emb.attention_scaling
    assert scaling != 1
    patched, ids = copy.deepcopy(model), batch()["input_ids"]
    patch(patched)
    torch.testing.assert_close(patched(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", WHAT)
def test_report(family: str) -> None:
    model = model_of(family)
    report = patch(model)
    calls = [op for ops in report.replaced.values() for op in ops]
    assert {op: calls.count(op) for op in WHAT[family]} == WHAT[family]
    text = str(report)
    assert f"{type(model).__name__}" in text and "linear_cross_entropy" in text
    if family == "Bloom":
        assert "left: it calls neither apply_rotary_pos_emb nor" in text
    else:
        assert not report.left


def test_bfloat16_and_autocast() -> None:
    """Results have the dtypes that they had, and are as near."""
    for family in ("Qwen3", "Gemma2", "GPT2"):
        model, inputs = model_of(family), batch()
        right = model(**inputs).loss.item()
        low, patched = copy.deepcopy(model).bfloat16(), copy.deepcopy(model).bfloat16()
        patch(patched)
        assert abs(patched(**inputs).loss.item() - right) < 0.03
        ids = inputs["input_ids"]
        assert patched(ids).logits.dtype == low(ids).logits.dtype == torch.bfloat16
        patched = copy.deepcopy(model)
        patch(patched)
        want, found = (dtypes_of_norms(each, **inputs) for each in (model, patched))
        assert found == want
        with torch.autocast("cpu", torch.bfloat16):
            loss = patched(**inputs).loss
        loss.backward()
        assert abs(loss.item() - right) < 0.03


def dtypes_of_norms(model: Any, **inputs: Any) -> list[torch.dtype]:
    """Return what norms give under autocast."""
    seen: list[torch.dtype] = []

    def see(module: Any, args: Any, out: torch.Tensor) -> None:
        seen.append(out.dtype)

    norms = [module for module in model.modules() if type(module).__name__.endswith("Norm")]
    hooks = [norm.register_forward_hook(see) for norm in norms]
    with torch.autocast("cpu", torch.bfloat16):
        model(**inputs)
    for hook in hooks:
        hook.remove()
    return seen

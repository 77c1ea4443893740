"""Engines of folders whose weights come quantized: log-probabilities are those of the weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases import InDouble, run
from published_cases import METHODS, Published
from torch import Tensor

from deepspeed_ext.inference.initialize import init_inference
from deepspeed_ext.inference.weights.linear import Linear, Stack

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_GPU)]
TOKENS = [int(each) for each in torch.randint(97, (75,), generator=torch.manual_seed(1))]
CUTS: tuple[tuple[int, ...], ...] = ((), (32, *range(70, 75)))  # over 64 rows at once; and few
SHARED = {"llama": 0, "phi3": 0, "qwen3": 0, "gpt2": 0, "gpt_neox": 0, "bloom": 0, "opt": 0}


@torch.no_grad()
def log_probabilities(of: Published) -> Tensor:
    with InDouble():
        logits: Tensor = of.exact()(torch.tensor([TOKENS]), use_cache=False).logits[0]
    assert logits.dtype == torch.float64
    return logits.log_softmax(-1)


def assert_is_exact(of: Published, device: str = "cpu", **options: Any) -> list[Linear]:
    """Compare all log-probabilities; return the layers of blocks."""
    engine = init_inference(of.folder, device=device, **options)
    want = log_probabilities(of)
    for cuts in CUTS:
        logits = engine.decoder.logits(run(engine.decoder, TOKENS, cuts))
        got = logits.double().cpu().log_softmax(-1)
        assert float((got - want).abs().max()) < 2e-3
    layers = engine.decoder.weights.layers
    return [part for each in layers for part in (each.qkv, each.out, each.up, each.down)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", METHODS)
def test_each_method(method: str, device: str, tmp_path: Path) -> None:
    of = Published(tmp_path, "llama", METHODS[method])
    linears = assert_is_exact(of, device)
    assert not any(isinstance(each.weight, Tensor | Stack) for each in linears)
    assert any(each.order is not None for each in linears) == METHODS[method].mixed


@pytest.mark.parametrize("method", ["gptq-act-order", "awq", "pack-8-zeros"])
@pytest.mark.parametrize("case", ["phi3", "qwen3", "gpt2", "gpt_neox", "bloom", "opt", "gemma3"])
def test_each_family(case: str, method: str, tmp_path: Path) -> None:
    assert_is_exact(Published(tmp_path, case, METHODS[method]))

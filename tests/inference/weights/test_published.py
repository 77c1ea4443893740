"""Engines of folders whose weights come quantized: log-probabilities are those of the weights."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases import InDouble, run
from published_cases import METHODS, Published
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed_ext.inference.execution import memory_budget
from deepspeed_ext.inference.initialize import init_inference
from deepspeed_ext.inference.weights.linear import Linear, Stack
from deepspeed_ext.inference.weights.packed_layers import are_alike, linear_of
from deepspeed_ext.inference.weights.quantize_on_load import bytes_of
from deepspeed_ext.io import load, save
from deepspeed_ext.quantization import stored_weight
from deepspeed_ext.quantization.published import packing_of

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_GPU)]
TOKENS = [int(each) for each in torch.randint(97, (75,), generator=torch.manual_seed(1))]
CUTS: tuple[tuple[int, ...], ...] = ((), (32, *range(70, 75)))  # over 64 rows at once; and few


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


@pytest.mark.parametrize("rows", [296, 520])
@pytest.mark.parametrize("method", METHODS)
def test_rows_cut_for_threads(method: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread writes its rows and no others."""
    of = METHODS[method]
    n = rows - 1 if method.startswith("pack") else rows  # the last word is not full
    tensors = of.write(of.source(n, 80, 3, 7))
    packing = packing_of("test", of.config)
    stored = packing.stored("test", tensors, 80)
    whole = stored.tensors()
    threads = set[int]()
    real = stored_weight.StoredWeight._write_rows

    def noted(self: Any, into: Any, begin: int, end: int) -> None:
        threads.add(threading.get_ident())
        real(self, into, begin, end)

    monkeypatch.setattr(stored_weight, "_ALONE_BYTES", 1)
    monkeypatch.setattr(stored_weight.StoredWeight, "_write_rows", noted)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    cut = stored.tensors()
    assert cut.keys() == whole.keys() and threading.get_ident() not in threads
    assert all(torch.equal(cut[name], whole[name]) for name in whole)


def test_an_error_in_a_thread_is_raised() -> None:
    done: list[int] = []

    def fail() -> None:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        stored_weight.in_threads([fail, *(lambda: done.append(1) for _ in range(5))])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("method", METHODS)
def test_cuda_is_never_waited_for(method: str) -> None:
    """Values that are looked at lie on the host."""
    of = METHODS[method]
    packing = packing_of("test", of.config)
    layers = [of.write(of.source(64, 80, seed, 7)) for seed in range(3)]
    there = [
        {n: t if n in packing.on_host else t.cuda() for n, t in each.items()} for each in layers
    ]
    torch.cuda.set_sync_debug_mode("error")
    try:
        weights = [packing.stored("test", each, 80) for each in there]
        assert are_alike(weights)
        made = linear_of(weights, torch.device("cuda"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    want = linear_of([packing.stored("test", each, 80) for each in layers], torch.device("cpu"))
    assert torch.equal(made.weight.codes.cpu(), want.weight.codes)
    assert torch.equal(made.weight.scales.cpu(), want.weight.scales)


@pytest.mark.parametrize("method", ["gptq-act-order", "awq", "pack-8-zeros"])
@pytest.mark.parametrize("case", ["phi3", "qwen3", "gpt2", "gpt_neox", "bloom", "opt", "gemma3"])
def test_each_family(case: str, method: str, tmp_path: Path) -> None:
    assert_is_exact(Published(tmp_path, case, METHODS[method]))


@pytest.mark.parametrize("method", ["gptq-act-order", "pack-8-act-order"])
def test_orders_that_differ_stay_apart(method: str, tmp_path: Path) -> None:
    of = Published(tmp_path, "llama", METHODS[method], shares_order=False)
    qkv, out, up, down = assert_is_exact(of)[:4]
    assert isinstance(qkv.weight, Stack) and isinstance(up.weight, Stack)
    assert all(part.order is not None for part in qkv.weight.parts)
    assert out.order is not None and down.order is not None
    engine = init_inference(tmp_path, device="cpu")
    alone = [engine.generate([TOKENS[:n]], max_new_tokens=9)[0].tokens for n in (3, 70)]
    both = engine.generate([TOKENS[:3], TOKENS[:70]], max_new_tokens=9)
    assert [each.tokens for each in both] == alone


@pytest.mark.parametrize("method", ["gptq-act-order", "pack-4"])
def test_some_layers_as_floats(method: str, tmp_path: Path) -> None:
    """As modules_to_not_convert and ignore leave them."""
    of = Published(tmp_path, "llama", METHODS[method], floats=("k_proj", "up_proj", "1.mlp.down"))
    linears = assert_is_exact(of)
    assert isinstance(linears[0].weight, Stack) and isinstance(linears[7].weight, Tensor)
    assert isinstance(linears[0].weight.parts[1].weight, Tensor)


def test_zeros_for_biases_that_no_layer_has(tmp_path: Path) -> None:
    """GPTQ's packages have written them; what is not zero is not left out."""
    of = Published(tmp_path, "llama", METHODS["gptq"], attention_bias=False, mlp_bias=False)
    saved = load(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.bias"
    assert name not in saved
    save(saved | {name: torch.zeros(96)}, tmp_path / "model.safetensors")
    assert_is_exact(of)
    save(saved | {name: torch.ones(96)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"model has '{name}', expected no tensor .*, or zeros"):
        init_inference(tmp_path, device="cpu")


def test_older_settings(tmp_path: Path) -> None:
    """In a file of their own."""
    of = Published(tmp_path, "llama", METHODS["gptq"])
    config = json.loads((tmp_path / "config.json").read_text())
    settings = config.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "quantize_config.json").write_text(json.dumps(settings))
    assert_is_exact(of)


def test_the_head_and_integers(tmp_path: Path) -> None:
    """The head stays as it is, unless it is asked for; x may be rounded."""
    of = Published(tmp_path, "llama", METHODS["gptq"])
    engine = init_inference(tmp_path, device="cpu")
    assert isinstance(engine.decoder.weights.head.weight, Tensor) and engine.report is None
    options: dict[str, Any] = dict(quantize_head="int8", input_format="int8")
    rounded = init_inference(tmp_path, device="cpu", **options)
    assert rounded.report is not None and list(rounded.report.layers) == ["head"]
    weights = rounded.decoder.weights
    assert weights.head.input_format == weights.layers[0].qkv.input_format == "int8"
    got = rounded.decoder.logits(run(rounded.decoder, TOKENS, ())).double()
    want = log_probabilities(of)
    assert 2e-3 < float((got.log_softmax(-1) - want).abs().max()) < 0.7
    with pytest.raises(ValueError, match="quantize is 'int8', expected None, as the weights come"):
        init_inference(tmp_path, quantize="int8")
    with pytest.raises(ValueError, match="input_format is 'int3', expected None or 'int8'"):
        init_inference(tmp_path, input_format="int3")


SHAPES = {(64, 64), (32, 64), (128, 64), (96, 64), (64, 96), (192, 64)}


class NoFloats(TorchDispatchMode):
    """Refuses to make floats of the shapes of weights."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.is_floating_point() and not out.is_meta:
            shape = tuple(out.shape)
            assert shape not in SHAPES and shape[::-1] not in SHAPES, func
        return out


@pytest.mark.parametrize("method", METHODS)
def test_never_as_floats_and_bytes_are_known_before(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Published(tmp_path, "llama", METHODS[method])
    found: list[Any] = []
    monkeypatch.setattr(
        "deepspeed_ext.inference.initialize.check_capacity",
        lambda *args: found.append((args[4](None), args[5])),
    )
    with NoFloats():
        engine = init_inference(tmp_path, device="cpu")
    [(budget, kinds)] = found
    assert budget.weights == bytes_of(engine.decoder.weights) and kinds == ()


def test_what_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other values of quantize do not."""
    Published(tmp_path, "llama", METHODS["gptq"])
    monkeypatch.setattr(memory_budget, "free_bytes", lambda device: 1_400_000)
    with pytest.raises(MemoryError, match=r"; what fits is max_batch=\d+ and max_tokens=\d+$"):
        init_inference(tmp_path, device="cpu")
    monkeypatch.setattr(memory_budget, "free_bytes", lambda device: 1000)
    with pytest.raises(MemoryError, match=r"; nothing fits$"):
        init_inference(tmp_path, device="cpu")


def test_a_layer_at_a_time(tmp_path: Path) -> None:
    sizes = dict(hidden_size=512, intermediate_size=1024, num_hidden_layers=24)
    Published(tmp_path / "large", "llama", METHODS["gptq-act-order"], **sizes)
    Published(tmp_path / "small", "llama", METHODS["gptq-act-order"])
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", MEMORY, tmp_path / "small", tmp_path / "large"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    peak, result = map(int, done.stdout.split())
    file = (tmp_path / "large" / "model.safetensors").stat().st_size
    # Two layers of 24 lie about, and what is as much with 12 layers.
    assert peak < result + 4 * file / 24 + (24 << 20)


MEMORY = """
import re, sys
from pathlib import Path
from deepspeed_ext.inference.initialize import init_inference
from deepspeed_ext.inference.weights.quantize_on_load import bytes_of

def memory(name):
    return int(re.search(name + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

small, large = sys.argv[1:]
init_inference(small, device="cpu")  # libraries, and memory that threads keep
before = memory("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
engine = init_inference(large, max_batch=1, max_tokens=64, device="cpu")
print(memory("VmHWM") - before, bytes_of(engine.decoder.weights))
"""


def test_refuses_tensors_that_do_not_fit(tmp_path: Path) -> None:
    """Names the layer and the folder, before anything is read where shapes tell."""
    Published(tmp_path, "llama", METHODS["gptq"])
    saved = load(tmp_path / "model.safetensors")
    at = "model.layers.1.mlp.up_proj"

    def refused(tensors: dict[str, Tensor], text: str) -> None:
        save(tensors, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=f"^init_inference: {text}"):
            init_inference(tmp_path, device="cpu")

    without = {name: t for name, t in saved.items() if name != f"{at}.qzeros"}
    refused(without, f"{at} of .* has no qzeros, expected it beside qweight")
    refused(saved | {f"{at}.qweight": saved[f"{at}.qweight"][:-1]}, f"{at} of .* has rows of 56 el")
    changed = saved[f"{at}.g_idx"].clone()
    changed[3] = 2
    refused(saved | {f"{at}.g_idx": changed}, f"{at} of .* has g_idx with groups of other sizes")
    floats = {name: t for name, t in saved.items() if not name.endswith("qweight")}
    refused(floats, ".* has no tensor named qweight, expected one for each layer, as its config")
    refused(saved | {f"{at}.weight": torch.ones(96, 64)}, f"model has '{at}.weight', expected no t")

"""The parts of the training example: its model, text, schedule and optimizers."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deepspeed_ext.inference import KVCache
from deepspeed_ext.op_builder import BuildError
from examples import text
from examples.gpt import GPT, generate
from examples.gpt_engine import engine_of, write_on
from examples.optimizers import MasterAdamW, make_optimizer, weights
from examples.options import UserError, parse, settings_of
from examples.text import Text, batch, standard_library
from examples.trainer import Settings, Trainer


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(width=64, layers=2, context=16)


@pytest.fixture
def source() -> Text:
    return Text(torch.zeros(99, dtype=torch.uint8), torch.zeros(99, dtype=torch.uint8), 1, "")


def test_model_does_not_look_ahead(model: GPT) -> None:
    tokens = torch.randint(256, (2, 16))
    changed = tokens.clone()
    changed[:, 10] ^= 1
    before, after = model(tokens), model(changed)
    assert before.shape == (2, 16, 256)
    torch.testing.assert_close(before[:, :10], after[:, :10], rtol=0, atol=0)
    assert (before[:, 10:] != after[:, 10:]).any(dim=2).all()


def test_model_sees_the_order_of_bytes() -> None:
    """In one layer, where it cannot tell from what earlier positions have seen."""
    torch.manual_seed(0)
    one, other = GPT(width=64, layers=1, context=16)(torch.tensor([[1, 2, 3], [2, 1, 3]]))
    assert not torch.allclose(one[2], other[2])


def test_model_depends_on_distances_only(model: GPT) -> None:
    """Rotated queries and keys: shifting all positions by one changes nothing."""
    tokens = torch.randint(256, (1, 8))
    shifted = GPT(width=64, layers=2, context=16)
    shifted.load_state_dict(model.state_dict())
    shifted.rotation = model.rotation.roll(-1, dims=1)
    torch.testing.assert_close(model(tokens), shifted(tokens))


def test_generates_the_same_from_the_same_seed(model: GPT) -> None:
    texts = [generate(model, b"class ", 40, 0.7, seed) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert all(len(t) == 46 and t.startswith(b"class ") for t in texts)


def test_generates_what_was_learned() -> None:
    torch.manual_seed(0)
    model = GPT(width=32, layers=1, context=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.tensor([list(b"abcdabcda")])
    for _ in range(60):
        optimizer.zero_grad()
        logits = model(tokens[:, :-1]).flatten(0, 1)
        torch.nn.functional.cross_entropy(logits, tokens[0, 1:]).backward()
        optimizer.step()
    assert generate(model, b"ab", 10, temperature=0.1, seed=0) == b"abcdabcdabcd"


def test_an_engine_computes_what_the_model_does() -> None:
    """By the table of its own: logits as far as the context goes, and the likeliest bytes."""
    torch.manual_seed(0)
    model = GPT(width=64, layers=2, context=48)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = 0.2 * torch.randn_like(parameter)
            parameter.copy_(noise + 1 if name.endswith("norm.weight") else noise)
    engine = engine_of(model, max_tokens=64)
    decoder, tokens = engine.decoder, torch.randint(256, (1, 48))
    cache = KVCache(1, 64, 2, 32, layers=2, dtype=torch.float32)
    cache.reserve(0, 48)
    with torch.no_grad():
        hidden = decoder.hidden(tokens, cache, torch.zeros(1, dtype=torch.int32))
        torch.testing.assert_close(decoder.logits(hidden), model(tokens), rtol=1e-4, atol=1e-4)
    texts = generate(model, b"class", 43, 1e-6, 0), write_on(engine, b"class", 43, 0.0, 0)
    assert texts[0] == texts[1]
    assert decoder.of.windows == (48, 48)


def test_text_is_the_library_without_its_tests(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("b/z.py", "a.py", "b/y.py", "test/t.py", "b/tests/t.py", "site-packages/s.py",
                 "b/notes.txt", "_sysconfigdata_x.py"):  # fmt: skip
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name + "\n")
    monkeypatch.setattr(text.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(text, "_VALIDATION_EVERY", 3)
    library = standard_library(context=4)
    assert bytes(library.training).split() == [b"a.py", b"b/y.py"]
    assert bytes(library.validation).split() == [b"b/z.py"]
    assert library.files == 3
    (tmp_path / "a.py").write_text("A.py\n")
    assert standard_library(context=4).digest != library.digest
    with pytest.raises(FileNotFoundError, match=r"has 3 source files, expected the standard"):
        standard_library(context=7)


def test_text_is_python() -> None:
    library = standard_library(128)
    assert b"def __init__(self" in library.training.numpy().tobytes()
    assert b"\ndef " in library.validation.numpy().tobytes()
    assert library.digest == standard_library(128).digest


def test_batches_are_a_function_of_the_seed() -> None:
    source = torch.arange(200, dtype=torch.uint8)
    inputs, targets = batch(source, size=64, context=150, seed=1)
    assert inputs.shape == targets.shape == (64, 150)
    assert torch.equal(inputs + 1, targets)
    assert {0, 49} <= set(inputs[:, 0].tolist()) <= set(range(50))  # the first and the last place
    assert torch.equal(inputs, batch(source, 64, 150, seed=1)[0])
    assert not torch.equal(inputs, batch(source, 64, 150, seed=2)[0])


def test_seed_decides_the_weights(source: Text) -> None:
    one, same, other = (
        Trainer(Settings(width=32, layers=1, optimizer="torch", seed=seed), source).model
        for seed in (0, 0, 1)
    )
    assert torch.equal(one.head.weight, same.head.weight)
    assert not torch.equal(one.head.weight, other.head.weight)


def test_learning_rate_rises_then_falls(source: Text) -> None:
    trainer = Trainer(Settings(steps=100, width=32, layers=1, lr=1.0, optimizer="torch"), source)
    rates = [trainer.lr(number) for number in range(1, 101)]
    assert rates[:10] == pytest.approx([i / 10 for i in range(1, 11)])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[54] == pytest.approx(0.525)  # half way down
    assert rates[-1] == pytest.approx(0.05)
    assert Trainer(replace(trainer.settings, steps=1), source).lr(1) == 1.0


def test_master_weights_keep_what_16_bits_lose(model: GPT) -> None:
    """A hundred steps, each too small for a bfloat16 weight, add up in float32 and arrive."""
    model.bfloat16()
    optimizer = make_optimizer("torch", model, lr=1e-4)
    assert isinstance(optimizer, MasterAdamW)
    optimizer.param_groups[0]["weight_decay"] = 0.0
    weight = model.norm.weight  # ones, next to which bfloat16 resolves 2^-8
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    optimizer.zero_grad()
    assert weight.grad is None
    index = [p is weight for p in model.parameters()].index(True)
    assert weights(model, optimizer)[index].mean().item() == pytest.approx(0.99, abs=1e-4)
    assert torch.equal(weight, weights(model, optimizer)[index].bfloat16())
    assert weight.float().mean().item() == pytest.approx(0.99, abs=2**-9)

    twin = make_optimizer("torch", model, lr=1e-4)
    twin.load_state_dict(optimizer.state_dict())
    assert all(map(torch.equal, weights(model, twin), weights(model, optimizer)))


@pytest.mark.parametrize(
    ("gpu", "arguments", "device", "optimizer"),
    [
        (False, "", "cpu", "cpu_adam"),
        (False, "--optimizer torch", "cpu", "torch"),
        (True, "", "cuda", "fused_adam"),
        (True, "--device auto --optimizer auto", "cuda", "fused_adam"),
        (True, "--optimizer torch", "cuda", "torch"),
        (True, "--optimizer cpu_adam", "cpu", "cpu_adam"),
        (True, "--device cpu", "cpu", "cpu_adam"),
    ],
)
def test_chooses_device_and_optimizer(
    gpu: bool, arguments: str, device: str, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr("examples.options.load", lambda name: None)
    settings = settings_of(parse(arguments.split()), saved=None)
    assert (settings.device, settings.optimizer) == (device, optimizer)


def test_uses_the_cpu_when_the_gpu_op_cannot_be_built(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(name: str) -> None:
        raise BuildError(name, "there is no nvcc", "install the CUDA toolkit")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("examples.options.load", fail)
    assert settings_of(parse([]), saved=None).device == "cpu"
    printed = capsys.readouterr().out
    assert "so the CPU is used" in printed
    assert "fused_adam: there is no nvcc; install the CUDA toolkit" in printed
    with pytest.raises(UserError, match="expected fused_adam or torch"):
        settings_of(parse(["--device", "cuda", "--optimizer", "cpu_adam"]), saved=None)

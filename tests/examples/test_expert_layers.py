"""The training example with experts: what they compute, also in an engine, and their load."""

from pathlib import Path

import pytest
import torch
from matplotlib import image

from deepspeed_ext.inference import KVCache
from deepspeed_ext.moe import MoE
from examples import gpt_engine, train_gpt
from examples.expert_load import extremes, load_figure, shares
from examples.gpt import GPT, Block, generate
from examples.gpt_engine import engine_of, write_on
from examples.options import parse, settings_of
from examples.text import Text
from examples.trainer import Settings, Trainer

TINY = ["--device", "cpu", "--steps", "3", "--batch-size", "2"]
TINY += ["--context", "16", "--width", "32", "--layers", "2"]


def scattered(experts: int, top_k: int) -> GPT:
    """Return a model whose weights are far from those that training begins with."""
    torch.manual_seed(0)
    model = GPT(width=64, layers=2, context=32, experts=experts, top_k=top_k)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = 0.2 * torch.randn_like(parameter)
            parameter.copy_(noise + 1 if name.endswith("norm.weight") else noise)
    return model


def first_layer(model: GPT) -> MoE:
    """Return the experts of the first layer."""
    block = model.blocks[0]
    assert isinstance(block, Block)
    return block.moe


def test_experts_begin_apart() -> None:
    experts = first_layer(GPT(width=32, layers=1, context=8, experts=4, top_k=2)).experts
    up, down = experts.get_parameter("up.weight"), experts.get_parameter("down.weight")
    assert up.shape == (4, 128, 32) and down.shape == (4, 32, 128)
    assert not torch.equal(up[0], up[1])
    assert up.std().item() == pytest.approx(0.02, rel=0.1)
    assert down.std().item() == pytest.approx(0.02 / 2**0.5, rel=0.1)


@pytest.mark.parametrize(("experts", "top_k"), [(4, 2), (3, 1), (1, 1)])
def test_an_engine_computes_what_experts_do(experts: int, top_k: int) -> None:
    """By the table of its own, weights of one choice not divided by their sum."""
    model = scattered(experts, top_k)
    engine = engine_of(model, max_tokens=48)
    decoder, tokens = engine.decoder, torch.randint(256, (1, 32))
    cache = KVCache(1, 48, 2, 32, layers=2, dtype=torch.float32)
    cache.reserve(0, 32)
    with torch.no_grad():
        hidden = decoder.hidden(tokens, cache, torch.zeros(1, dtype=torch.int32))
        torch.testing.assert_close(decoder.logits(hidden), model(tokens), rtol=1e-4, atol=1e-4)
    texts = generate(model, b"class", 27, 1e-6, 0), write_on(engine, b"class", 27, 0.0, 0)
    assert texts[0] == texts[1]


def test_a_text_depends_on_no_other() -> None:
    """All of one batch may go to one expert: none is dropped, in training neither."""
    model = scattered(4, 2)
    first_layer(model).gate.weight.data.zero_()  # ties: all choose the first two
    tokens = torch.randint(256, (8, 16))
    both = model(tokens)
    assert model.blocks[0].counts.tolist() == [128, 128, 0, 0]
    torch.testing.assert_close(model(tokens[3:4]), both[3:4], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model(tokens[3:4, :9]), both[3:4, :9], rtol=1e-4, atol=1e-4)


def test_experts_are_told_to_share_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss that is shown is without what balances; gradients of routers are with it."""
    text = Text(torch.randint(256, (99,)).byte(), torch.zeros(99, dtype=torch.uint8), 1, "")
    made = dict(width=32, layers=1, context=16, batch_size=2, optimizer="torch", experts=4, top_k=2)
    losses, routers = [], []
    for part in (0.0, 1.0):
        monkeypatch.setattr("examples.trainer._BALANCE", part)
        trainer = Trainer(Settings(**made), text)
        losses.append(trainer.step(1))
        routers.append(first_layer(trainer.model).gate.weight.grad)
    assert losses[0] == losses[1]
    assert routers[0] is not None and routers[1] is not None
    assert not torch.allclose(*routers)
    assert sum(trainer.expert_load()[0]) == 2 * 16 * 2


def test_a_run_on_disk_shows_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train_gpt, "_SAMPLE_BYTES", 40)
    monkeypatch.setattr(gpt_engine, "_ROUNDS", 1)
    monkeypatch.setattr(gpt_engine, "_BYTES", 4)
    where = ["--offload", "nvme", "--nvme-path", str(tmp_path), "--memory-budget", "4MiB"]
    out = tmp_path / "out"
    assert train_gpt.main(["--out", str(out), *TINY, *where, "--experts", "8"]) == 0
    printed = capsys.readouterr().out
    assert "load: of its layer's choices, expert " in printed and "even is 12.5%" in printed
    assert f"wrote {out}/experts.png" in printed
    assert image.imread(out / "experts.png").shape[1] == 960
    checkpoint = torch.load(out / "checkpoint.pt", weights_only=True)
    assert checkpoint["settings"]["top_k"] == 2
    for entry in checkpoint["history"]:
        assert [sum(layer) for layer in entry["expert_load"]] == [64, 64]


def test_the_load_is_drawn_by_layer_and_expert() -> None:
    even, one = [[8, 8, 8, 8], [8, 8, 8, 8]], [[8, 8, 8, 8], [2, 26, 4, 0]]
    loads = [even] * 200 + [one] * 200
    assert shares([one]).tolist() == [[[0.25] * 4, [0.0625, 0.8125, 0.125, 0.0]]]
    figure = load_figure(loads, "title")
    first, second, _ = figure.axes  # and the bar of colors
    assert first.get_title() == "title"
    assert (first.images[0].get_array() == 1).all()
    drawn = second.images[0].get_array()
    assert drawn is not None and drawn.shape == (4, 150)
    assert drawn[:, 0].tolist() == [1] * 4 and drawn[:, -1].tolist() == [0.25, 3.25, 0.5, 0]
    assert extremes(loads) == (
        "load: of its layer's choices, expert 3 of layer 1 12.5% (least) and expert 1 of layer 1"
        " 53.1% (most); even is 25.0%"
    )


def test_settings_of_experts() -> None:
    def top_k(*arguments: str) -> int:
        return settings_of(parse(["--device", "cpu", *arguments]), saved=None).top_k

    assert [top_k(), top_k("--experts", "1"), top_k("--experts", "8")] == [0, 1, 2]
    assert top_k("--experts", "8", "--top-k", "8") == 8

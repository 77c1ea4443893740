"""The picture of a step: what is recorded, when, and that nothing is once it is over."""

from pathlib import Path

import pytest
import torch
from matplotlib.image import imread
from torch import nn

from deepspeed_ext.offload import OffloadOptimizer, Timeline, param_table
from deepspeed_ext.offload.timeline import Span

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    ),
]


def model_on(device: str) -> nn.Module:
    return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4))).to(device)


def take_steps(model: nn.Module, optimizer: OffloadOptimizer, timeline: Timeline, n: int) -> None:
    device = next(model.parameters()).device
    for _ in range(n):
        with timeline.span("forward"):
            loss = model(torch.ones(2, 64, device=device)).sum()
        with timeline.span("backward"):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def recorded(device: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Timeline, list[Span]]:
    monkeypatch.setattr(param_table, "BUCKET", 64 * 64 + 64)  # a bucket for each parameter
    model = model_on(device)
    with OffloadOptimizer(model.parameters(), model=model) as optimizer:
        take_steps(model, optimizer, Timeline(optimizer), 2)
        with Timeline(optimizer) as timeline:
            take_steps(model, optimizer, timeline, 2)
        found = timeline.spans()
        take_steps(model, optimizer, Timeline(optimizer), 1)
        assert timeline.spans() == found
    return timeline, found


@pytest.mark.parametrize("device", DEVICES)
def test_a_record_has_all_that_went_on(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, spans = recorded(device, monkeypatch)
    counts = {name: [s.name for s in spans].count(name) for name in {s.name for s in spans}}
    stepped = counts.pop("speculative steps", 0) + counts.pop("requested steps", 0)
    assert stepped >= 8  # more, if some were thrown away
    assert counts == {"forward": 2, "backward": 2, "gradients out": 8, "weights in": 8}
    assert all(0 <= span.begin <= span.end for span in spans)
    assert spans == sorted(spans, key=lambda span: span.begin)


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_a_record_has_each_transfer_of_a_disk(device: str, durable: bool, tmp_path: Path) -> None:
    """A piece is read, stepped by, and written, in this order; other pieces are, meanwhile."""
    model = model_on(device)
    where = {"device": "nvme", "nvme_path": tmp_path, "memory_budget": 2 << 20, "durable": durable}
    with OffloadOptimizer(model.parameters(), model=model, nvme_fraction=1.0, **where) as optimizer:
        take_steps(model, optimizer, Timeline(optimizer), 2)
        before = optimizer.stats()
        with Timeline(optimizer) as timeline:
            take_steps(model, optimizer, timeline, 2)
        spans, stats = timeline.spans(), optimizer.stats()
    named = {name: [s for s in spans if s.name == name] for name in {s.name for s in spans}}
    written, steps = named["state to disk"], named["requested steps"]
    assert len(written) == len(steps) == 2
    assert stats["bytes_written"] > before["bytes_written"]
    for number, step in enumerate(steps):
        assert step.end <= written[number].begin
    assert all(span.begin <= span.end for span in spans)
    # Its end is noted when somebody looks, which may be after the step has begun.
    assert any(span.begin <= steps[1].begin for span in named["state from disk"])


@pytest.mark.parametrize("device", DEVICES)
def test_times_of_host_and_device_go_together(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient leaves after backward has begun, is then stepped by, and the weight returns."""
    _, spans = recorded(device, monkeypatch)
    backward = next(span for span in spans if span.name == "backward")
    out = next(span for span in spans if span.name == "gradients out")
    steps = [span for span in spans if span.name in ("speculative steps", "requested steps")]
    back = next(span for span in spans if span.name == "weights in")
    slack = 0.0 if device == "cpu" else 1e-3  # the two clocks are compared once
    assert backward.begin <= out.begin
    assert out.end <= steps[0].begin + slack
    assert min(step.end for step in steps) <= back.begin + slack


def test_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timeline, spans = recorded("cpu", monkeypatch)
    timeline.draw(tmp_path / "all.png", "a title")
    timeline.draw(tmp_path / "none.png", "a title", window=(1e3, 2e3))
    some, none = (imread(tmp_path / name) for name in ("all.png", "none.png"))
    assert some.shape == none.shape
    green = torch.tensor([0x2C, 0xA0, 0x2C]) / 255  # speculative steps
    has_green = [
        (torch.from_numpy(p[..., :3].copy()) - green).abs().amax(-1) < 0.01 for p in (some, none)
    ]
    assert has_green[0].any() == any(span.name == "speculative steps" for span in spans)
    assert not has_green[1].any()

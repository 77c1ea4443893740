"""What a training run leaves in its folder: checkpoint, metrics, picture and sample."""

import io
import itertools
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from examples.expert_load import load_figure


class RunFolder:
    """The files of one run; each is at any moment the whole old one or the whole new one."""

    is_shown = True  # to whoever started the run

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoint = path / "checkpoint.pt"
        self.metrics = path / "metrics.jsonl"
        self.picture = path / "loss.png"
        self.load_picture = path / "experts.png"
        self.sample = path / "sample.txt"

    def make(self) -> None:
        """Make the folder, or raise OSError when nothing can be written there."""
        self.path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self.path):
            pass  # better now than after an hour of training

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Write the checkpoint: tensors and plain values, so that it loads with weights_only."""
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        _replace(self.checkpoint, buffer.getbuffer())

    def load(self) -> dict[str, Any]:
        """Return the checkpoint, its tensors on the CPU."""
        checkpoint: dict[str, Any] = torch.load(
            self.checkpoint, map_location="cpu", weights_only=True
        )
        return checkpoint

    def write_metrics(self, history: list[dict[str, Any]]) -> None:
        """Write the metrics anew: one line of JSON for each step."""
        _replace(self.metrics, "".join(map(_line, history)).encode())

    def append_metrics(self, entry: dict[str, Any]) -> None:
        """Add the line of one more step."""
        with self.metrics.open("a") as file:
            file.write(_line(entry))

    def write_sample(self, text: bytes) -> None:
        """Write generated text; bytes that are not UTF-8 are kept as they are."""
        _replace(self.sample, text)

    def draw(self, history: list[dict[str, Any]], title: str) -> None:
        """Draw the loss over the steps as a picture."""
        steps = [entry["step"] for entry in history]
        losses = [entry["loss"] for entry in history]
        validated = [entry for entry in history if "validation_loss" in entry]
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.subplots()
        axes.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8)
        axes.plot(steps, _smooth(losses), color="tab:blue", label="training, mean of nearby steps")
        axes.plot(
            [entry["step"] for entry in validated],
            [entry["validation_loss"] for entry in validated],
            color="tab:orange",
            marker="o",
            label="validation, on other files",
        )
        if validated:
            last = validated[-1]
            axes.annotate(
                f"{last['validation_loss']:.2f}",
                (last["step"], last["validation_loss"]),
                xytext=(0, 8),
                textcoords="offset points",
                ha="center",
            )
        axes.set(title=title, xlabel="step", ylabel="loss (nats per byte)")
        axes.grid(alpha=0.3)
        axes.legend()
        _save(figure, self.picture)

    def draw_load(self, history: list[dict[str, Any]], title: str) -> None:
        """Draw the load of experts over the steps as a picture."""
        _save(load_figure([entry["expert_load"] for entry in history], title), self.load_picture)


def _save(figure: Figure, path: Path) -> None:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    _replace(path, buffer.getbuffer())


def _line(entry: dict[str, Any]) -> str:
    return json.dumps(entry) + "\n"


def _smooth(values: list[float]) -> list[float]:
    """Return the means over a fiftieth of the values around each; fewer near both ends."""
    sums = [0.0, *itertools.accumulate(values)]
    means = []
    for i in range(len(values)):
        reach = min(len(values) // 100, i, len(values) - 1 - i)
        means.append((sums[i + reach + 1] - sums[i - reach]) / (2 * reach + 1))
    return means


def _replace(path: Path, content: bytes | memoryview) -> None:
    """Put a whole new file in the place of an old one."""
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise

"""What a training run leaves in its folder: checkpoint, metrics, picture and sample."""

import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure


class RunFolder:
    """The files of one run; each is at any moment the whole old one or the whole new one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoint = path / "checkpoint.pt"
        self.metrics = path / "metrics.jsonl"
        self.picture = path / "loss.png"
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

    def write_metrics(self, history: list[dict[str, float]]) -> None:
        """Write the metrics anew: one line of JSON for each step."""
        _replace(self.metrics, "".join(map(_line, history)).encode())

    def append_metrics(self, entry: dict[str, float]) -> None:
        """Add the line of one more step."""
        with self.metrics.open("a") as file:
            file.write(_line(entry))

    def write_sample(self, text: bytes) -> None:
        """Write generated text; bytes that are not UTF-8 are kept as they are."""
        _replace(self.sample, text)

    def draw(self, history: list[dict[str, float]], title: str) -> None:
        """Draw the loss over the steps as a picture."""
        steps = [entry["step"] for entry in history]
        losses = [entry["loss"] for entry in history]
        validated = [entry for entry in history if "validation_loss" in entry]
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.subplots()
        axes.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8)
        axes.plot(steps, _smooth(losses), color="tab:blue", label="training (mean of recent steps)")
        axes.plot(
            [entry["step"] for entry in validated],
            [entry["validation_loss"] for entry in validated],
            color="tab:orange",
            marker="o",
            label="validation",
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
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=120)
        _replace(self.picture, buffer.getbuffer())


def _line(entry: dict[str, float]) -> str:
    return json.dumps(entry) + "\n"


def _smooth(values: list[float]) -> list[float]:
    """Return the exponential moving average over about a fiftieth of the values."""
    keep = 1 - 1 / max(1, len(values) / 50)
    smooth: list[float] = []
    for value in values:
        smooth.append(keep * smooth[-1] + (1 - keep) * value if smooth else value)
    return smooth


def _replace(path: Path, content: bytes | memoryview) -> None:
    """Put a whole new file in the place of an old one."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise

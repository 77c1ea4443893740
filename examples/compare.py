"""Trains with torch.optim.AdamW in lockstep and says how far the two runs drift apart."""

from dataclasses import dataclass, replace

import torch

from examples.optimizers import weights
from examples.trainer import Trainer

_NOTE = """\
Differences are the largest so far. The first rows show the arithmetic. Later ones show how training
amplifies rounding: the last two columns are torch.optim.AdamW against itself with fused=True."""


@dataclass
class Drift:
    """The largest differences so far between two trainers that take the same steps."""

    loss: float = 0.0
    weights: float = 0.0

    def measure(self, one: Trainer, other: Trainer, losses: tuple[float, float]) -> None:
        """Take in the step that both have just taken."""
        self.loss = max(self.loss, abs(losses[0] - losses[1]))
        mine, others = (weights(trainer.model, trainer.optimizer) for trainer in (one, other))
        differences = [(a - b).abs().max() for a, b in zip(mine, others, strict=True)]
        self.weights = max(self.weights, torch.stack(differences).max().item())


class Comparison:
    """Two more trainers, which take every step after the first one has.

    One has torch's AdamW, the other torch's AdamW with fused=True, as a measure of what is usual.
    """

    def __init__(self, trainer: Trainer) -> None:
        def other(optimizer: str) -> Trainer:
            settings = replace(trainer.settings, optimizer=optimizer, offload="none")
            return Trainer(settings, trainer.text)

        self.trainer = trainer
        self.torch = other("torch")
        self.fused = other("torch_fused")
        self.ours = Drift()
        self.usual = Drift()
        self.rows: list[str] = []
        self._last = ""

    def step(self, number: int, loss: float) -> None:
        """Take step `number` too; `loss` is the one of the first trainer."""
        loss_torch = self.torch.step(number)
        loss_fused = self.fused.step(number)
        self.ours.measure(self.trainer, self.torch, (loss, loss_torch))
        self.usual.measure(self.fused, self.torch, (loss_fused, loss_torch))
        self._last = (
            f"{number:>8}{loss:>10.5f}{loss_torch:>10.5f}"
            f"{self.ours.loss:>12.1e}{self.ours.weights:>12.1e}"
            f"{self.usual.loss:>16.1e}{self.usual.weights:>12.1e}"
        )
        if str(number).rstrip("0") in ("1", "2", "5"):
            self.rows.append(self._last)

    def table(self) -> str:
        """Return the comparison as text: steps 1, 2, 5, 10, ... and the last."""
        ours = type(self.trainer.optimizer).__name__
        own = "difference, torch's own"
        on_gpu = self.trainer.settings.device == "cuda"
        note = ["(torch on float32 master weights of the bfloat16 ones; the former are compared)"]
        return "\n".join(
            [
                f"\n{ours} and torch.optim.AdamW, from equal weights, with equal batches",
                *(note if on_gpu else []),
                f"{'':8}{'loss':>10}{'loss':>10}{'difference, ours':>24}{own:>28}",
                f"{'step':>8}{'ours':>10}{'torch':>10}{'loss':>12}{'weights':>12}"
                f"{'loss':>16}{'weights':>12}",
                *self.rows,
                *([self._last] if self._last not in self.rows else []),
                _NOTE,
            ]
        )

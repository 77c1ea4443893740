"""Trains the same model with torch.optim.AdamW in lockstep and says how far the two drift apart."""

from dataclasses import dataclass, replace

import torch

from deepspeed_ext.examples.optimizers import weights
from deepspeed_ext.examples.trainer import Trainer


@dataclass
class Row:
    """The state of the comparison after a step; differences are the largest so far."""

    step: int
    loss: float
    loss_torch: float
    loss_difference: float
    weight_difference: float
    weight_name: str


class Comparison:
    """A second trainer, with torch's AdamW, that takes every step after the first one has."""

    def __init__(self, trainer: Trainer) -> None:
        self.ours = trainer
        self.torch = Trainer(replace(trainer.settings, optimizer="torch"), trainer.text)
        self.rows: list[Row] = []
        self._loss_difference = 0.0
        self._weight_difference = 0.0
        self._weight_name = "none"

    def step(self, number: int, loss: float) -> None:
        """Take step `number` too; `loss` is the one of the first trainer."""
        loss_torch = self.torch.step(number)
        self._loss_difference = max(self._loss_difference, abs(loss - loss_torch))
        mine = weights(self.ours.model, self.ours.optimizer)
        others = weights(self.torch.model, self.torch.optimizer)
        differences = [(mine[name] - others[name]).abs().max() for name in mine]
        largest, index = torch.stack(differences).max(dim=0)
        if largest > self._weight_difference:
            self._weight_difference = largest.item()
            self._weight_name = list(mine)[index]
        self.rows.append(
            Row(
                number,
                loss,
                loss_torch,
                self._loss_difference,
                self._weight_difference,
                self._weight_name,
            )
        )

    def table(self) -> str:
        """Return the comparison as text: steps 1, 2, 5, 10, ... and the last."""
        ours = type(self.ours.optimizer).__name__
        theirs = "torch.optim.AdamW"
        if self.ours.settings.device == "cuda":
            theirs += " on float32 masters of the bfloat16 weights; weights means the masters"
        lines = [
            f"{ours} and {theirs}: same first weights, same batches",
            "                                      largest difference so far",
            f"{'step':>8}{'loss':>10}{'with torch':>14}{'loss':>12}{'weights':>12}",
        ]
        for row in self.rows:
            if row is self.rows[-1] or str(row.step).rstrip("0") in ("1", "2", "5"):
                lines.append(
                    f"{row.step:>8}{row.loss:>10.5f}{row.loss_torch:>14.5f}"
                    f"{row.loss_difference:>12.1e}{row.weight_difference:>12.1e}"
                )
        lines.append(
            "The first rows show the arithmetic; later ones how training amplifies rounding."
        )
        return "\n".join(lines)

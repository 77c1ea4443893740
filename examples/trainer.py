"""Training step by step: what a step does follows from the settings and its number alone."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from examples.gpt import GPT, Block
from examples.optimizers import STATES, clip_and_step, make_optimizer
from examples.run_folder import RunFolder
from examples.text import Text, batch

_WARM_UP = 0.1  # part of the steps in which the learning rate rises
_LAST_LR = 0.05  # part of the learning rate that is left at the end
_MAX_GRAD_NORM = 1.0
_VALIDATION_BATCHES = 16
_BALANCE = 0.01  # of the loss that is least when all experts have as much to do


@dataclass(frozen=True)
class Settings:
    """What decides the result of a run; the defaults take about a minute on two cores."""

    steps: int = 1500
    batch_size: int = 8
    context: int = 128
    width: int = 128
    layers: int = 4
    lr: float = 4e-3
    seed: int = 0
    device: str = "cpu"
    optimizer: str = "cpu_adam"
    state: str = "float32"
    offload: str = "none"
    nvme_path: str | None = None
    memory_budget: str | None = None
    zero_stage: int | None = None
    experts: int = 0
    top_k: int = 0

    @property
    def tokens(self) -> int:
        """How many bytes a step trains on."""
        return self.batch_size * self.context


class Trainer:
    """Trains one model. Nothing random is carried from step to step, so any step can be resumed."""

    def __init__(self, settings: Settings, text: Text) -> None:
        self.settings = settings
        self.text = text
        torch.manual_seed(settings.seed)
        s = settings
        self.model = self._prepared(GPT(s.width, s.layers, s.context, s.experts, s.top_k))
        self.optimizer = make_optimizer(
            settings.optimizer,
            self.model,
            settings.lr,
            settings.state,
            settings.offload,
            nvme_path=settings.nvme_path,
            memory_budget=settings.memory_budget,
        )

    def _prepared(self, model: GPT) -> GPT:
        """Return the model as it is trained."""
        model.to(self.settings.device)
        if self.settings.device == "cuda" or "master" in STATES[self.settings.state]:
            model.bfloat16()  # the optimizer keeps float32 master weights
        return model

    def step(self, number: int) -> float:
        """Take training step `number`, which counts from 1, and return its loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr(number)
        self.optimizer.zero_grad()
        loss = self._loss(self.text.training, number)
        whole = loss
        if self.settings.experts:
            whole = loss + _BALANCE * torch.stack([block.l_aux for block in self._blocks()]).sum()
        whole.backward()
        clip_and_step(self.model, self.optimizer, _MAX_GRAD_NORM)
        return self._mean(loss).item()

    def expert_load(self) -> list[list[int]]:
        """Return how many choices of the last forward each expert of each layer was."""
        return self._sum(torch.stack([block.counts for block in self._blocks()])).tolist()

    def _blocks(self) -> list[Block]:
        return [block for block in self.model.blocks if isinstance(block, Block)]

    @torch.no_grad()
    def validate(self) -> float:
        """Return the mean loss over examples of the validation text, each time the same ones."""
        losses = [self._loss(self.text.validation, i) for i in range(_VALIDATION_BATCHES)]
        return self._mean(torch.stack(losses).mean()).item()

    def lr(self, number: int) -> float:
        """Return the learning rate of a step: a line up, then half a cosine down."""
        warm_up = math.ceil(_WARM_UP * self.settings.steps)
        if number <= warm_up:
            return self.settings.lr * number / warm_up
        progress = (number - warm_up) / (self.settings.steps - warm_up)
        falling = (1 + math.cos(math.pi * progress)) / 2
        return self.settings.lr * (_LAST_LR + (1 - _LAST_LR) * falling)

    def _loss(self, text: Tensor, number: int) -> Tensor:
        """Return the mean cross-entropy, in nats per byte, on the batch with this number."""
        s = self.settings
        inputs, targets = batch(text, s.batch_size, s.context, s.seed * 1_000_003 + number)
        inputs, targets = self._share(inputs), self._share(targets)
        logits = self.model(inputs.to(s.device)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.to(s.device).flatten())

    def _share(self, examples: Tensor) -> Tensor:
        """Return the examples of a batch that this process trains on."""
        return examples

    def _mean(self, loss: Tensor) -> Tensor:
        """Return the mean over all processes."""
        return loss.detach()

    def _sum(self, counts: Tensor) -> Tensor:
        """Return the sum over all processes."""
        return counts

    def any_process(self, flag: bool) -> bool:
        """Return whether this is true in any process."""
        return flag

    def save(self, folder: RunFolder, content: dict[str, Any]) -> None:
        """Save what goes on with the next step, and what else there is."""
        folder.save({**content, "trainer": self.state_dict()})

    def load(self, folder: RunFolder, content: dict[str, Any]) -> None:
        """Continue from what a folder had saved."""
        self.load_state_dict(content["trainer"])

    def state_dict(self) -> dict[str, Any]:
        """Return what has to be saved, tensors and plain values only."""
        optimizer = self.optimizer.state_dict()  # first: it waits for weights that are on their way
        return {"model": self.model.state_dict(), "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` of a trainer with the same settings returned."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

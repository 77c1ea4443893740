"""The optimizers that the example can train with, made from their names."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from deepspeed_ext.offload import OffloadOptimizer
from deepspeed_ext.op_builder import load
from deepspeed_ext.optim import DeepSpeedCPUAdam, FusedAdam

BETAS = (0.9, 0.99)
WEIGHT_DECAY = 0.1
STATES: dict[str, dict[str, Any]] = {  # how our optimizers store their state
    "float32": {},
    "bfloat16": {"state_dtype": torch.bfloat16},
    "8bit": {"state_dtype": torch.uint8},
    "remainder": {"master": "remainder"},
    "compact": {"state_dtype": torch.uint8, "master": "remainder"},
}
DEVICES = {
    "cpu_adam": ("cpu",),
    "fused_adam": ("cuda",),
    "torch": ("cpu", "cuda"),
    "torch_fused": ("cpu", "cuda"),
}
OFFLOADED = {"cpu_adam": ("cpu", "cuda")}  # likewise, where state is in host memory


class Optimizer(Protocol):
    """What the training loop uses of an optimizer."""

    param_groups: list[dict[str, Any]]

    def step(self) -> object: ...
    def zero_grad(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class MasterAdamW:
    """torch.optim.AdamW on float32 master weights: mixed precision in plain torch."""

    def __init__(self, parameters: Iterable[nn.Parameter], **options: Any) -> None:
        self.parameters = list(parameters)
        self.master_weights = [parameter.detach().float() for parameter in self.parameters]
        self.adamw = torch.optim.AdamW(self.master_weights, **options)
        self.param_groups = self.adamw.param_groups

    @torch.no_grad()
    def step(self) -> None:
        for parameter, master in zip(self.parameters, self.master_weights, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        self.adamw.step()
        for parameter, master in zip(self.parameters, self.master_weights, strict=True):
            parameter.copy_(master)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"masters": self.master_weights, "adamw": self.adamw.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for master, saved in zip(self.master_weights, state_dict["masters"], strict=True):
            master.copy_(saved)
        self.adamw.load_state_dict(state_dict["adamw"])


def make_optimizer(
    name: str,
    model: nn.Module,
    lr: float,
    state: str = "float32",
    offload: str = "none",
    **where: str | None,
) -> Optimizer:
    """Return the optimizer of this name; its native op is loaded, or compiled, first.

    Args:
        name: a key of DEVICES; with offload, of OFFLOADED.
        model: what to optimize; for 16-bit parameters the optimizer keeps float32 master weights,
            as they are or split.
        lr: learning rate.
        state: a key of STATES, for the optimizers of this package.
        offload: "cpu": the state is in host memory, and stepped there, wherever the model is;
            "nvme": what memory does not hold of it rests on disk.
        where: nvme_path and memory_budget of OffloadOptimizer.

    Raises:
        BuildError: the native op cannot be had; the text says why.
    """
    options: dict[str, Any] = {"lr": lr, "betas": BETAS, "weight_decay": WEIGHT_DECAY}
    if name in ("torch", "torch_fused"):
        options["fused"] = name == "torch_fused"
        low_precision = next(model.parameters()).dtype != torch.float32
        make: Callable[..., Optimizer] = MasterAdamW if low_precision else torch.optim.AdamW
        return make(model.parameters(), **options)
    load(name)  # now, so that the wait for a compiler is not taken for a slow first step
    options |= {"master": "float32"} | STATES[state]
    if offload != "none":
        options |= {"model": model, "device": offload, **where}
        return OffloadOptimizer(model.parameters(), DeepSpeedCPUAdam, **options)
    if name == "cpu_adam":
        return DeepSpeedCPUAdam(model.parameters(), **options)
    return FusedAdam(model.parameters(), **options)


def clip_and_step(model: nn.Module, optimizer: Optimizer, max_norm: float) -> None:
    """Clip the gradients of a model by their global norm, and step."""
    if isinstance(optimizer, OffloadOptimizer):  # which has the norms before it has the gradients
        optimizer.clip_and_step(max_norm)
        return
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()


def weights(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """Return the float32 weights: the master weights where the optimizer keeps some."""
    if isinstance(optimizer, MasterAdamW):
        return optimizer.master_weights
    state: dict[Tensor, dict[str, Tensor]] = getattr(optimizer, "state", {})
    return [state.get(p, {}).get("master_param", p).detach() for p in model.parameters()]

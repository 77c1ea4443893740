"""The table of optimizers that the tests of all of them share, each with one to compare with."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from optim_cases import adam, torch_adam

from deepspeed_ext.optim import (
    DeepSpeedCPUAdagrad,
    DeepSpeedCPULion,
    FusedAdagrad,
    FusedLion,
    FusedRMSprop,
    FusedSGD,
    HybridAdam,
)


class PlainLion(torch.optim.Optimizer):
    """Lion as its paper writes it, an element-wise loop in plain torch."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0, maximize=False):
        defaults = dict(lr=lr, betas=betas, weight_decay=weight_decay, maximize=maximize)
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=torch.tensor(0.0), exp_avg=torch.zeros_like(p))
                state["step"] += 1
                grad = -p.grad if group["maximize"] else p.grad
                update = (beta1 * state["exp_avg"] + (1 - beta1) * grad).sign()
                p -= group["lr"] * (update + group["weight_decay"] * p)
                state["exp_avg"].mul_(beta2).add_((1 - beta2) * grad)


def lion(params, device="cpu", **options):
    return (DeepSpeedCPULion if device == "cpu" else FusedLion)(params, **options)


def adagrad(params, device="cpu", **options):
    return (DeepSpeedCPUAdagrad if device == "cpu" else FusedAdagrad)(params, **options)


def hybrid(params, device="cpu", decoupled=None, **options):
    mode = {} if decoupled is None else {"adamw_mode": decoupled}
    return HybridAdam(params, **mode, **options)


def sgd(params, device="cpu", **options):
    return FusedSGD(params, **options)


def rmsprop(params, device="cpu", **options):
    return FusedRMSprop(params, **options)


class TorchAdagrad(torch.optim.Adagrad):
    """Torch's Adagrad; up to 2.12 it fails with parameters of groups that were added later."""

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        if "sum" in next(iter(self.state.values()), {}):
            for p in self.param_groups[-1]["params"]:
                value = self.param_groups[-1]["initial_accumulator_value"]
                self.state[p].setdefault("step", torch.tensor(0.0))
                self.state[p].setdefault("sum", torch.full_like(p, value))


@dataclass(frozen=True, eq=False)
class Kind:
    """An optimizer.

    Args:
        make: ours, from parameters, a device and options.
        reference: one that does the same in the dtype of the parameters.
        state: keys of its state that have the shape of the parameter.
        options: sets of options to try; the first are those of most tests.
        routes: other ways in which torch's does the same, by the option that takes them.
    """

    make: Callable
    reference: Callable
    state: tuple[str, ...]
    options: dict[str, dict]
    routes: tuple[str, ...] = field(default=())

    @property
    def usual(self):
        return next(iter(self.options.values()))


KINDS = {
    "adam": Kind(
        adam,
        torch_adam,
        ("exp_avg", "exp_avg_sq"),
        {
            "decay": {"weight_decay": 0.1},
            "defaults": {},
            "l2": {"weight_decay": 0.1, "decoupled": False},
            "amsgrad": {"amsgrad": True, "weight_decay": 0.01},
            "maximize": {"maximize": True, "decoupled": False, "weight_decay": 0.01},
            "betas": {"betas": (0.5, 0.9), "eps": 1e-3},
        },
        routes=("fused", "foreach"),
    ),
    "hybrid": Kind(
        hybrid,
        torch_adam,
        ("exp_avg", "exp_avg_sq"),
        {"decay": {"weight_decay": 0.1}, "l2": {"weight_decay": 0.1, "decoupled": False}},
    ),
    "lion": Kind(
        lion,
        PlainLion,
        ("exp_avg",),
        {
            "decay": {"weight_decay": 0.1, "betas": (0.9, 0.99)},
            "defaults": {},
            "maximize": {"maximize": True, "weight_decay": 0.01},
        },
    ),
    "adagrad": Kind(
        adagrad,
        TorchAdagrad,
        ("sum",),
        {
            "decay": {"weight_decay": 0.1, "lr_decay": 0.01, "initial_accumulator_value": 0.1},
            "defaults": {},
            "maximize": {"maximize": True, "eps": 1e-3},
        },
        routes=("fused", "foreach"),
    ),
    "sgd": Kind(
        sgd,
        torch.optim.SGD,
        ("momentum_buffer",),
        {
            "dampening": {"weight_decay": 0.1, "momentum": 0.9, "dampening": 0.3},
            "defaults": {},
            "nesterov": {"momentum": 0.8, "nesterov": True, "weight_decay": 0.01},
            "maximize": {"momentum": 0.5, "maximize": True},
            "decay only": {"weight_decay": 0.1},
        },
        routes=("foreach",),  # fused fails where only some parameters have a buffer
    ),
    "rmsprop": Kind(
        rmsprop,
        torch.optim.RMSprop,
        ("square_avg",),
        {
            "decay": {"weight_decay": 0.1, "alpha": 0.9, "eps": 1e-3},
            "defaults": {},
            "momentum": {"momentum": 0.8, "eps": 1e-3},
            "centered": {"centered": True, "maximize": True, "eps": 1e-3},
            "both": {"centered": True, "momentum": 0.5, "weight_decay": 0.01, "eps": 1e-2},
        },
        routes=("foreach",),
    ),
}
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
OPTIONS = [(kind, kind.options[name]) for kind in KINDS.values() for name in kind.options]
each_kind_and_options = pytest.mark.parametrize(
    ("kind", "options"),
    OPTIONS,
    ids=[f"{title}-{name}" for title, kind in KINDS.items() for name in kind.options],
)

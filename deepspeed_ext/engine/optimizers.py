"""The optimizer of an engine: by its name in the config, or the one that the user has made."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed_ext import optim
from deepspeed_ext.config.classes import IN_HOST, Group
from deepspeed_ext.offload import OffloadOptimizer
from deepspeed_ext.optim.base import FlatStateOptimizer
from deepspeed_ext.optim.formats import StateFormat

_OP = "initialize"
_log = logging.getLogger("deepspeed_ext")

# Whose groups have all options of DeepSpeedCPUAdam; ours have formats of state beside them.
_LIKE_ADAM = (torch.optim.AdamW, torch.optim.Adam)


class Renamed:
    """Which parameter stands where another one stood before the model was sharded.

    Args:
        model: that is not sharded yet.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names = {id(p): n for n, p in model.named_parameters(remove_duplicate=False)}
        self._before = list(model.parameters())  # so that no other object gets one's id

    def checked_groups(self, params: object, is_stepped: bool) -> list[Group]:
        """Return groups of parameters of the model, of what `model_parameters` may be.

        Args:
            params: tensors or groups; None: all that require a gradient.
            is_stepped: there will be an optimizer; else Lightning gives none of them.

        Raises:
            ValueError: one is not of the model, or there is none to step.
        """
        if params is None:
            return [{"params": [p for p in self._model.parameters() if p.requires_grad]}]
        if isinstance(params, Tensor):
            params = [params]
        given = list(params)  # type: ignore[call-overload]  # a generator, too
        if not given and is_stepped:
            raise ValueError(f"{_OP}: model_parameters has none, expected some of the model")
        groups = given if given and isinstance(given[0], dict) else [{"params": given}]
        made = [{**group, "params": list(_each(group["params"]))} for group in groups]
        for param in (p for group in made for p in group["params"]):
            self.name_of(param, "model_parameters")
        return made

    def name_of(self, param: Tensor, argument: str) -> str:
        """Return the name of a parameter of the model.

        Raises:
            ValueError: there is no such one.
        """
        if id(param) not in self._names:
            raise ValueError(
                f"{_OP}: {argument} has a tensor of shape {list(param.shape)} that is not in model,"
                " expected parameters of this model only"
            )
        return self._names[id(param)]

    def now(self, params: Iterable[Tensor]) -> list[nn.Parameter]:
        """Return what stands in the places of parameters."""
        shards = dict(self._model.named_parameters(remove_duplicate=False))
        return [shards[self._names[id(param)]] for param in params]


def _each(params: object) -> Iterable[Tensor]:
    if isinstance(params, Tensor):
        return [params]
    # As torch's optimizers, named_parameters too.
    return [p[1] if isinstance(p, tuple) else p for p in params]  # type: ignore[attr-defined]


def check_given(
    optimizer: torch.optim.Optimizer, renamed: Renamed, offloads: bool, rests: bool
) -> None:
    """Refuse an optimizer of the user that cannot step shards, before anything is sharded.

    Args:
        optimizer: of the user.
        renamed: knows the parameters.
        offloads: OffloadOptimizer is to stand in for it.
        rests: shards rest in host memory.

    Raises:
        ValueError: it has stepped, knows its parameters by more than their groups, has others than
            those of the model, or cannot be offloaded.
    """
    if optimizer.state or isinstance(optimizer, OffloadOptimizer):
        what = "that has state" if optimizer.state else "of parameters that are not sharded"
        raise ValueError(
            f"{_OP}: optimizer is a {type(optimizer).__name__} {what}, expected one that has"
            " not stepped, or a function that makes one of parameters"
        )
    for group in optimizer.param_groups:
        for param in group["params"]:
            renamed.name_of(param, "optimizer")
    spec = optimizer.spec if isinstance(optimizer, FlatStateOptimizer) else None
    if offloads:
        _in_host(optimizer)
    elif rests and spec is not None and "cpu" not in spec.devices:
        raise ValueError(
            f"{_OP}: optimizer is a {type(optimizer).__name__} with offload_param, expected one"
            f" that steps in host memory, such as {spec.elsewhere.get('cpu')}"
        )


def placed(
    optimizer: torch.optim.Optimizer, renamed: Renamed, offload: Mapping[str, Any] | None
) -> torch.optim.Optimizer:
    """Let an optimizer that was checked step the shards in the places of its parameters.

    Its group dicts stay the same objects, so that a scheduler that was made before goes on.
    """
    for group in optimizer.param_groups:
        group["params"] = renamed.now(group["params"])
    if offload is None:
        return optimizer
    return _offloaded(optimizer, offload)


def _offloaded(
    optimizer: torch.optim.Optimizer, offload: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """Return what steps the groups of an optimizer in host memory; they stay the same objects."""
    cls, names, options = _in_host(optimizer)
    groups = [{k: v for k, v in group.items() if k in names} for group in optimizer.param_groups]
    stands_in = OffloadOptimizer(groups, cls, **options, **offload)
    for i, theirs in enumerate(optimizer.param_groups):
        theirs.update({k: v for k, v in stands_in.param_groups[i].items() if k not in theirs})
        stands_in.param_groups[i] = theirs
    _log.info("initialize: OffloadOptimizer stands in for %s", type(optimizer).__name__)
    return stands_in


def _in_host(
    optimizer: torch.optim.Optimizer,
) -> tuple[type[FlatStateOptimizer], set[str], dict[str, Any]]:
    """Return by what OffloadOptimizer may stand in for an optimizer.

    Returns:
        A class; the keys of groups that it takes; arguments for all groups.

    Raises:
        ValueError: it may not.
    """
    if type(optimizer) in IN_HOST:
        assert isinstance(optimizer, FlatStateOptimizer)
        if optimizer.state_format == StateFormat():
            return type(optimizer), {"params", *optimizer.defaults}, {}
    if not isinstance(optimizer, _LIKE_ADAM) or any(
        g.get("amsgrad") for g in optimizer.param_groups
    ):
        raise ValueError(
            f"{_OP}: optimizer is a {type(optimizer).__name__} with offload_optimizer, expected"
            " torch's Adam or AdamW without amsgrad, or DeepSpeedCPUAdam and others that step in"
            " host memory, with plain state; or a function that makes an OffloadOptimizer of"
            " parameters, or the optimizer of the config"
        )
    decoupled = isinstance(optimizer, torch.optim.AdamW)
    modes = {bool(g.get("decoupled_weight_decay", decoupled)) for g in optimizer.param_groups}
    if len(modes) > 1:
        raise ValueError(
            f"{_OP}: optimizer has groups with and without decoupled_weight_decay, expected one"
            " kind"
        )
    names = {"params", "lr", "betas", "eps", "weight_decay", "maximize"}
    return optim.DeepSpeedCPUAdam, names, {"adamw_mode": modes.pop()}

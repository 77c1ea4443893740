"""The optimizer of an engine: by its name in the config, or the one that the user has made."""

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed_ext import optim
from deepspeed_ext.offload import OffloadOptimizer
from deepspeed_ext.optim.base import FlatStateOptimizer
from deepspeed_ext.optim.formats import StateFormat

_OP = "initialize"
_log = logging.getLogger("deepspeed_ext")

Group = dict[str, Any]
Make = Callable[..., torch.optim.Optimizer]

# By the name in a config, in small letters: the class for parameters on CUDA, the one for those on
# the CPU, and, where offload takes it, the one that steps in host memory.
_BY_NAME: dict[str, tuple[Make, Make, type[FlatStateOptimizer] | None]] = {
    "adam": (optim.FusedAdam, optim.DeepSpeedCPUAdam, optim.DeepSpeedCPUAdam),
    "adamw": (optim.FusedAdam, optim.DeepSpeedCPUAdam, optim.DeepSpeedCPUAdam),
    "adagrad": (optim.FusedAdagrad, optim.DeepSpeedCPUAdagrad, optim.DeepSpeedCPUAdagrad),
    "lion": (optim.FusedLion, optim.DeepSpeedCPULion, optim.DeepSpeedCPULion),
    "lamb": (optim.FusedLamb, optim.FusedLamb, None),
    "sgd": (optim.FusedSGD, optim.FusedSGD, optim.FusedSGD),
}
_SO_ANYWAY = ("cuda_aware", "comm_backend_name")
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

    def checked_groups(self, params: object) -> list[Group]:
        """Return groups of parameters of the model, of what `model_parameters` may be.

        Raises:
            ValueError: one is not of the model.
        """
        if params is None:
            return [{"params": [p for p in self._model.parameters() if p.requires_grad]}]
        if isinstance(params, Tensor):
            params = [params]
        given = list(params)  # type: ignore[call-overload]  # a generator, too
        if not given:
            raise ValueError(f"{_OP}: model_parameters has none, expected some of the model")
        groups = given if isinstance(given[0], dict) else [{"params": given}]
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


class Named:
    """The optimizer that a config names.

    Args:
        name: "Adam", ... or a class of torch.optim.
        options: its `params` in the config.
        device: "cpu" or "cuda", where parameters are.
        offloads: whether it steps in host memory.

    Raises:
        ValueError: there is no such class, or offload does not take it, or it has no such option.
    """

    def __init__(self, name: str, options: Mapping[str, Any], device: str, offloads: bool) -> None:
        options = {key: value for key, value in options.items() if key not in _SO_ANYWAY}
        if options.pop("torch_adam", False):
            is_decoupled = _is_decoupled(name, options)
            name = "AdamW" if is_decoupled else "Adam"
            options = {k: v for k, v in options.items() if k != "adam_w_mode"}
            known = None
        else:
            known = _BY_NAME.get(name.lower())
        on_cuda, on_cpu, in_host = known or _of_torch(name)
        if on_cuda is optim.FusedAdam:
            is_fused = device == "cuda" and not offloads
            mode = {"adam_w_mode" if is_fused else "adamw_mode": _is_decoupled(name, options)}
            options = {k: v for k, v in options.items() if k != "adam_w_mode"} | mode
        if "max_grad_norm" in options:
            raise ValueError(
                f"{_OP}: optimizer.params.max_grad_norm is {options['max_grad_norm']}, expected"
                " none; clip by gradient_clipping"
            )
        for key in ("betas", "eps"):
            if isinstance(options.get(key), list):
                options[key] = tuple(options[key])
        if offloads and in_host is None:
            takes = ", ".join(key for key, row in _BY_NAME.items() if row[2] is not None)
            raise ValueError(
                f"{_OP}: optimizer.type is {name!r} with offload_optimizer, expected one that steps"
                f" in host memory: {takes}"
            )
        self._options = options
        self._make = on_cuda if device == "cuda" else on_cpu
        self._in_host = in_host if offloads else None
        self._device = "cpu" if offloads else device

    def tried(self, groups: list[Group]) -> torch.optim.Optimizer:
        """Return one of small parameters in the places of others, so that errors come early.

        Raises:
            ValueError: an option has no such value, or there is none of this name.
        """
        own = inspect.signature(OffloadOptimizer).parameters if self._in_host is not None else ()
        options = {name: value for name, value in self._options.items() if name not in own}
        small = [
            {**group, "params": [nn.Parameter(torch.zeros(1, device=self._device))]}
            for group in groups
        ]
        return self._called(self._in_host or self._make, small, options)

    def made(self, groups: list[Group], offload: Mapping[str, Any] | None) -> torch.optim.Optimizer:
        """Return the optimizer.

        Args:
            groups: of shards.
            offload: options of OffloadOptimizer; None: the state is where the parameters are.
        """
        if self._in_host is None or offload is None:
            return self._called(self._make, groups, self._options)
        make = partial(OffloadOptimizer, optimizer_class=self._in_host, **offload)
        return self._called(make, groups, self._options)

    def _called(self, make: Make, groups: list[Group], options: Group) -> torch.optim.Optimizer:
        try:
            return make(groups, **options)
        except TypeError as error:
            raise ValueError(f"{_OP}: optimizer.params is {options}: {error}") from error


def _of_torch(name: str) -> tuple[Make, Make, None]:
    cls = getattr(torch.optim, name, None)
    if not isinstance(cls, type) or not issubclass(cls, torch.optim.Optimizer):
        names = ", ".join(sorted(_BY_NAME))
        raise ValueError(
            f"{_OP}: optimizer.type is {name!r}, expected one of {names}, or a class of torch.optim"
        )
    return cls, cls, None


def _is_decoupled(name: str, options: Mapping[str, Any]) -> bool:
    """Tell the kind of weight decay: DeepSpeed's "Adam" is AdamW but with adam_w_mode false."""
    return bool(options.get("adam_w_mode", True)) or name.lower() == "adamw"


def check_given(optimizer: torch.optim.Optimizer, renamed: Renamed, offloads: bool) -> None:
    """Refuse an optimizer of the user that cannot step shards, before anything is sharded.

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
    if offloads:
        _in_host(optimizer)


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
    if any(type(optimizer) is row[2] for row in _BY_NAME.values()):
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

"""Norms: RMS norms of transformers' models, in whatever form they keep the weight, and torch's."""

from typing import Any

import torch
from torch import Tensor, nn

from deepspeed_ext.ops import layer_norm, rms_norm, rms_norm_ref
from deepspeed_ext.patching.recognition import (
    Unlike,
    check_forward,
    check_same,
    class_of,
    samples,
    stub_of,
)
from deepspeed_ext.patching.replaced import Replaced, are_ours

_EPS = ("variance_epsilon", "eps")  # what classes call it
_OFFSETS = (0.0, 1.0)  # that models add to the weight


class _RMSNorm(Replaced):
    """Args:
    module: that it is for.
    eps: what the module calls the number that is added to the mean of the squares.
    offset: added to the weight.
    widens: the result has the dtype of the weight where that is the wider one.
    """

    by = ("rms_norm",)

    def __init__(self, module: nn.Module, eps: str, offset: float, widens: bool) -> None:
        super().__init__(module)
        self.eps, self.offset, self.widens = eps, offset, widens

    def run(self, x: Tensor) -> Tensor:
        module: Any = self.module
        weight = module.weight
        if not are_ours(x, weight):
            return self.own(x)  # type: ignore[no-any-return]
        if self.widens and weight.dtype != x.dtype:
            x = x.to(torch.promote_types(x.dtype, weight.dtype))
        eps = getattr(module, self.eps)
        eps = torch.finfo(torch.float32).eps if eps is None else eps  # of torch's
        return rms_norm(x, weight, eps=eps, weight_offset=self.offset)


class _LayerNorm(Replaced):
    by = ("layer_norm",)

    def run(self, x: Tensor) -> Tensor:
        module: Any = self.module
        weight, bias = module.weight, module.bias
        if not are_ours(x, weight, bias) or len(module.normalized_shape) != 1:
            return self.own(x)  # type: ignore[no-any-return]
        if x.is_cuda and torch.is_autocast_enabled("cuda"):  # torch's own gives float32 then
            x = x.float()
        return layer_norm(x, weight, bias, eps=module.eps)


def norm_of(module: nn.Module) -> Replaced | None:
    """Return what replaces a norm; None: it is none.

    Raises:
        Unlike: it is one, and not one that our ops compute.
    """
    kind = class_of(module)
    if not kind.__name__.endswith("Norm"):
        return None
    if kind is nn.LayerNorm:
        check_forward(module)
        return _LayerNorm(module)
    if kind is nn.RMSNorm:
        check_forward(module)
        return _torch_rms_norm_of(module)
    if kind.__module__.startswith("torch."):
        return None
    check_forward(module)
    return _rms_norm_of(module)


def _torch_rms_norm_of(module: Any) -> Replaced:
    if len(module.normalized_shape) != 1 or module.weight is None:
        raise Unlike("it has no weight of one dimension")
    return _RMSNorm(module, "eps", 0.0, widens=False)


def _rms_norm_of(module: nn.Module) -> Replaced:
    name = next((name for name in _EPS if name in vars(module)), "")
    eps = vars(module).get(name)
    names = [name for name, _ in module.named_parameters(recurse=False)]
    weight: Any = getattr(module, "weight", None)
    if names != ["weight"] or weight.dim() != 1 or type(eps) is not float:
        raise Unlike("it is no RMS norm with a weight of one dimension")
    x, drawn = samples((3, len(weight)), (len(weight),))
    x = x * 0.1  # so that eps counts
    offset = _offset_of(module, x, drawn, eps)
    with torch.no_grad():
        mixed = _call(module, x.bfloat16(), drawn)
    return _RMSNorm(module, name, offset, widens=mixed.dtype == torch.float32)


def _call(module: nn.Module, x: Tensor, weight: Tensor) -> Tensor:
    forward: Any = class_of(module).forward
    found: Tensor = forward(stub_of(module, weight=nn.Parameter(weight)), x)
    return found


def _offset_of(module: nn.Module, x: Tensor, weight: Tensor, eps: float) -> float:
    """Return what a norm adds to its weight.

    Raises:
        Unlike: it does something else.
    """
    for offset in _OFFSETS:
        want = rms_norm_ref(x, weight, eps=eps, weight_offset=offset)
        assert isinstance(want, Tensor)
        try:
            check_same("its forward", lambda: _call(module, x, weight), want)
        except Unlike as error:
            problem = error
        else:
            return offset
    raise problem

"""SGD with momentum as an optimizer: FusedSGD, for parameters on the CPU and on CUDA."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from deepspeed_ext.ops.optimizers.sgd import SGD, sgd_step_
from deepspeed_ext.optim.base import FlatStateOptimizer
from deepspeed_ext.optim.buckets import STEP
from deepspeed_ext.optim.checks import check_value
from deepspeed_ext.optim.formats import FormatOptions
from deepspeed_ext.optim.spec import Group, OptimizerSpec

_BUFFER = "momentum_buffer"


def _completed(group: Group, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Tell from the buffer whether its first step is over, as torch's SGD does."""
    if group["momentum"] == 0:
        return values
    if values.get(_BUFFER) is None:
        return {**values, STEP: 0}
    return values if values.get(STEP) is not None else {**values, STEP: 1}


class FusedSGD(FlatStateOptimizer):
    """SGD with momentum for parameters on the CPU and on CUDA: one pass over memory.

    A plain torch optimizer with the arguments of Apex's and the state of `torch.optim.SGD`; state
    dicts load from and into that. State costs 4 bytes per element with momentum, none without, and
    4 more for each 16-bit element with master_weights. On CUDA the step never waits for the
    device; for CUDA graphs see FusedAdam.

    Args:
        params: float32, bfloat16 or float16 tensors on the CPU or on CUDA, dense; or groups, or
            (name, parameter) pairs. Parameters may be on meta until the first step.
        lr: learning rate, at least 0; a number or a tensor of one float32 or float64.
        momentum: decay rate of the sum of gradients per step, at least 0.
        dampening: the part of a gradient that the sum leaves out, but at its first step.
        weight_decay: factor of the L2 penalty, at least 0.
        nesterov: Nesterov's momentum; needs a momentum and no dampening.
        wd_after_momentum: the penalty acts on the step only, and not through the sum.
        maximize: step up the gradient instead of down.
        master_weights: keep float32 originals of 16-bit parameters; see DeepSpeedCPUAdam.
        fp32_optimizer_states: keep the sum in float32, else in the dtype of the parameter.

    Raises:
        ValueError: an option or a parameter is out of range, named in the text.
        TypeError: a parameter wraps other tensors and is no DTensor.

    See: Sutskever et al., "On the importance of initialization and momentum in deep learning",
    2013, Equations 3 and 4. The formula is that of `deepspeed_ext.ops.sgd_step_`.
    """

    spec = OptimizerSpec(SGD, unsaved=frozenset({STEP}), completed=_completed)
    _call_op = staticmethod(sgd_step_)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        *,
        maximize: bool = False,
        **formats: Unpack[FormatOptions],
    ) -> None:
        super().__init__(params, self.spec.defaults(locals()), **formats)

    def _check_group(self, group: Group) -> None:
        super()._check_group(group)
        momentum, dampening = group["momentum"], group["dampening"]
        fits = momentum > 0 and dampening == 0
        want = "False without momentum or with dampening"
        check_value(self, "nesterov", group["nesterov"], fits or not group["nesterov"], want)

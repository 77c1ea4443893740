"""RMSprop as an optimizer: FusedRMSprop, for parameters on the CPU and on CUDA."""

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from deepspeed_ext.ops.optimizers.rmsprop import RMSPROP, rmsprop_step_
from deepspeed_ext.ops.optimizers.step_op import Flag
from deepspeed_ext.optim.base import FlatStateOptimizer
from deepspeed_ext.optim.checks import check_value
from deepspeed_ext.optim.formats import FormatOptions
from deepspeed_ext.optim.spec import Group, OptimizerSpec


class FusedRMSprop(FlatStateOptimizer):
    """RMSprop for parameters on the CPU and on CUDA: one pass over memory.

    A plain torch optimizer with the arguments and the state of `torch.optim.RMSprop`; state dicts
    load from and into that. State costs 4 bytes per element, 4 more each with momentum and when
    centered, and 4 more for each 16-bit element with master_weights. On CUDA the step never waits
    for the device; for CUDA graphs see FusedAdam.

    Args:
        params: float32, bfloat16 or float16 tensors on the CPU or on CUDA, dense; or groups, or
            (name, parameter) pairs. Parameters may be on meta until the first step.
        lr: learning rate, at least 0; a number or a tensor of one float32 or float64.
        alpha: decay rate of the running means per step, in [0, 1).
        eps: added to the denominator, at least 0.
        weight_decay: factor of the L2 penalty, at least 0.
        momentum: decay rate of the sum of quotients per step, at least 0.
        centered: divide by the root of the variance of gradients, not of their mean square. State
            is in float32 then: two means whose difference is small have to be exact. A variance
            below 2^-22 of the mean square counts as that; torch's is NaN if it is below 0.
        maximize: step up the gradient instead of down.
        master_weights: keep float32 originals of 16-bit parameters; see DeepSpeedCPUAdam.
        fp32_optimizer_states: keep state in float32, else in the dtype of the parameter.

    Raises:
        ValueError: an option or a parameter is out of range, named in the text.
        TypeError: a parameter wraps other tensors and is no DTensor.

    See: Tieleman & Hinton, "Neural Networks for Machine Learning", 2012, lecture 6.5. The formula
    is that of `deepspeed_ext.ops.rmsprop_step_`.
    """

    spec = OptimizerSpec(RMSPROP, options=(Flag("centered"),))
    _call_op = staticmethod(rmsprop_step_)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
        *,
        maximize: bool = False,
        **formats: Unpack[FormatOptions],
    ) -> None:
        super().__init__(params, self.spec.defaults(locals()), **formats)

    def _check_group(self, group: Group) -> None:
        super()._check_group(group)
        stored = self.state_format.state_dtype or torch.float32
        exact = stored == torch.float32 and self.state_format.fp32_optimizer_states
        want = "False without state in float32"
        check_value(self, "centered", group["centered"], exact or not group["centered"], want)

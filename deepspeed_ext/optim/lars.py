"""LARS as an optimizer: Lars, for parameters on the CPU and on CUDA."""

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from deepspeed_ext.dtensors import sum_over_shards
from deepspeed_ext.ops.optimizers.lars import (
    LARS_APPLY,
    LARS_NORMS,
    lars_apply_,
    lars_coefficients,
    lars_norms,
)
from deepspeed_ext.ops.optimizers.step_op import Number
from deepspeed_ext.optim.base import FlatStateOptimizer
from deepspeed_ext.optim.buckets import BucketView
from deepspeed_ext.optim.clipping import Scalars
from deepspeed_ext.optim.formats import FormatOptions
from deepspeed_ext.optim.spec import Group, OptimizerSpec


class Lars(FlatStateOptimizer):
    """LARS for parameters on the CPU and on CUDA: two passes over memory, a few launches per step.

    A plain torch optimizer. Each parameter moves at a learning rate of its own: lr times eeta * |w|
    / (|g| + weight_decay * |w| + epsilon), where |w| and |g| are the norms of the parameter and of
    its gradient; where either is 0, at lr. Of DTensor parameters, these are norms of the whole, so
    every process that holds shards calls step(). State costs 4 bytes per element with momentum,
    none without, and 4 more for each 16-bit element with master_weights. On CUDA the step never
    waits for the device; for CUDA graphs see FusedAdam.

    Args:
        params: float32, bfloat16 or float16 tensors on the CPU or on CUDA, dense; or groups, or
            (name, parameter) pairs. Parameters may be on meta until the first step.
        lr: learning rate, at least 0; a number or a tensor of one float32 or float64.
        momentum: decay rate per step of the sum of what was subtracted, in [0, 1). The learning
            rate is part of that sum, as in the paper, not a factor of it, as in torch's SGD.
        eeta: how far a parameter may move for its size, in one step at lr 1; at least 0.
        weight_decay: factor of the L2 penalty, at least 0.
        epsilon: added to the divisor, at least 0.
        maximize: step up the gradient instead of down.
        master_weights: keep float32 originals of 16-bit parameters; see DeepSpeedCPUAdam.
        fp32_optimizer_states: keep the sum in float32, else in the dtype of the parameter.

    Raises:
        ValueError: an option or a parameter is out of range, named in the text.
        TypeError: a parameter wraps other tensors and is no DTensor.

    See: You, Gitman & Ginsburg, "Large Batch Training of Convolutional Networks", 2017,
    Algorithm 1. The formula is that of `deepspeed_ext.ops.lars_norms` and `lars_apply_`.
    """

    spec = OptimizerSpec(LARS_APPLY, options=(Number("eeta", least=0), Number("epsilon", least=0)))

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        eeta: float = 1e-3,
        weight_decay: float = 0.0,
        epsilon: float = 0.0,
        *,
        maximize: bool = False,
        **formats: Unpack[FormatOptions],
    ) -> None:
        super().__init__(params, self.spec.defaults(locals()), **formats)

    def _apply(self, group: Group, view: BucketView, scalars: Scalars) -> None:
        arguments = self._arguments(group, view, scalars)
        squares = lars_norms(**LARS_NORMS.taken_from(arguments))
        squares = sum_over_shards(squares, view.owners)
        coefficients = lars_coefficients(
            squares, group["eeta"], group["weight_decay"], group["epsilon"]
        )
        lars_apply_(**arguments, coefficients=coefficients)

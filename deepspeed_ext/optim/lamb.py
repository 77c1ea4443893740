"""LAMB as an optimizer: FusedLamb, for parameters on the CPU and on CUDA."""

from collections.abc import Sequence

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from deepspeed_ext.dtensors import sum_over_shards
from deepspeed_ext.ops.optimizers.clip import checked_norm
from deepspeed_ext.ops.optimizers.lamb import (
    LAMB_APPLY,
    LAMB_MOMENTS,
    lamb_apply_,
    lamb_coefficients,
    lamb_moments_,
)
from deepspeed_ext.ops.optimizers.step_op import Number
from deepspeed_ext.optim.base import FlatStateOptimizer
from deepspeed_ext.optim.buckets import BucketView
from deepspeed_ext.optim.checks import check_flags, check_value
from deepspeed_ext.optim.clipping import Scalars, Scaling, moved
from deepspeed_ext.optim.formats import FormatOptions
from deepspeed_ext.optim.spec import Group, OptimizerSpec


class FusedLamb(FlatStateOptimizer):
    """LAMB for parameters on the CPU and on CUDA: two passes over memory, a few launches per step.

    A plain torch optimizer with the arguments of DeepSpeed's. Each parameter moves at a learning
    rate of its own: lr times its coefficient, the norm of the parameter divided by that of its
    update, within bounds. Of DTensor parameters, these are norms of the whole, so every process
    that holds shards calls step(). State costs 8 bytes per element (fp32 moments) and 4 more for
    each 16-bit element with master_weights. On CUDA the step never waits for the device; for CUDA
    graphs see FusedAdam.

    Args:
        params: float32, bfloat16 or float16 tensors on the CPU or on CUDA, dense; or groups, or
            (name, parameter) pairs. Parameters may be on meta until the first step.
        lr: learning rate, at least 0; a number or a tensor of one float32 or float64.
        bias_correction: divide the moments by 1 - beta^step, as the paper does. (DeepSpeed's
            scales the learning rate instead, which its clamped coefficients do not see.)
        betas: decay rates of the two moments per step, each in [0, 1).
        eps: added to the denominator, at least 0.
        eps_inside_sqrt: add eps to the second moment, before the root is taken.
        weight_decay: the part of the parameter that is added to its update, at least 0.
        max_grad_norm: above 0: step() clips the gradients of all groups by their global norm, as
            clip_and_step does, and inf or NaN in any of them leaves everything as it was; see
            skipped_steps.
        max_coeff: the largest coefficient.
        min_coeff: the least coefficient; with min_coeff = max_coeff = 1 in a group, its parameters
            move at lr, as is usual for biases and norms.
        amsgrad: must be False: LAMB has no such form.
        maximize: step up the gradient instead of down.
        master_weights: keep float32 originals of 16-bit parameters; see DeepSpeedCPUAdam.
        fp32_optimizer_states: keep moments in float32, else in the dtype of the parameter.

    Raises:
        ValueError: an option or a parameter is out of range, named in the text.
        TypeError: a parameter wraps other tensors and is no DTensor.

    See: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes",
    2020, Algorithm 2. The formula is that of `deepspeed_ext.ops.lamb_moments_` and `lamb_apply_`.
    """

    spec = OptimizerSpec(LAMB_MOMENTS, options=(Number("max_coeff"), Number("min_coeff", least=0)))
    _settings = (*FlatStateOptimizer._settings, "max_grad_norm")
    # Of the last step: for each call of the ops the parameters, and a tensor of coefficients.
    _coefficients: Sequence[tuple[list[Tensor], Tensor]] = ()

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        **formats: Unpack[FormatOptions],
    ) -> None:
        check_flags(self, {"amsgrad": amsgrad})
        check_value(self, "amsgrad", amsgrad, not amsgrad, "False")
        self.max_grad_norm = max_grad_norm
        self._checked_max_grad_norm()
        super().__init__(params, self.spec.defaults(locals()), **formats)

    def get_lamb_coeffs(self) -> list[float]:
        """Return the coefficients of the last step, in the order of the parameters stepped in it.

        Waits for the device.
        """
        found = {
            id(owner): value
            for owners, tensor in self._coefficients
            for owner, value in zip(owners, tensor.tolist(), strict=True)
        }
        params = [param for group in self.param_groups for param in group["params"]]
        return [found[id(param)] for param in params if id(param) in found]

    def _check_group(self, group: Group) -> None:
        super()._check_group(group)
        check_value(
            self,
            "max_grad_norm",
            "an option of a group",
            "max_grad_norm" not in group,
            "an argument of the constructor: gradients are clipped together",
        )
        least, most = group["min_coeff"], group["max_coeff"]
        check_value(self, "max_coeff", most, most >= least, f"at least min_coeff, {least}")

    def _begin(self, scaling: Scaling) -> Scaling:
        self._coefficients = []
        max_norm = self._checked_max_grad_norm()
        if max_norm == 0:
            return scaling
        clipped = self._clip(scaling, max_norm)
        found, given = clipped.found_inf, moved(scaling.found_inf, clipped.found_inf.device)
        if given is not None:  # whoever has set it counts what it says
            found = found.masked_fill(given.reshape(()).ne(0), 0)
        self._count_skip(found)
        return Scaling(clipped.divisor, clipped.found_inf)

    def _checked_max_grad_norm(self) -> float:
        title, value = type(self).__name__, self.max_grad_norm  # which anybody may have set
        return checked_norm(title, "max_grad_norm", value, or_zero=True)

    def _apply(self, group: Group, view: BucketView, scalars: Scalars) -> None:
        arguments = self._arguments(group, view, scalars)
        squares = lamb_moments_(**LAMB_MOMENTS.taken_from(arguments))
        squares = sum_over_shards(squares, view.owners)
        coefficients = lamb_coefficients(squares, group["min_coeff"], group["max_coeff"])
        lamb_apply_(**LAMB_APPLY.taken_from(arguments), coefficients=coefficients)
        self._coefficients = [*self._coefficients, (view.owners, coefficients)]

"""Lion as an optimizer: DeepSpeedCPULion for parameters on the CPU, FusedLion on CUDA."""

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from deepspeed_ext.ops.optimizers.lion import LION, lion_step_
from deepspeed_ext.optim.base import FlatStateOptimizer
from deepspeed_ext.optim.checks import check_flags
from deepspeed_ext.optim.formats import CompactOptions, FormatOptions
from deepspeed_ext.optim.set_grad_none import SetGradNone
from deepspeed_ext.optim.spec import OptimizerSpec


class _Lion(FlatStateOptimizer):
    """Lion on the devices that a subclass names."""

    _call_op = staticmethod(lion_step_)


class DeepSpeedCPULion(_Lion):
    """Lion for parameters in host memory, at the speed of that memory.

    A plain torch optimizer with the arguments of DeepSpeed's. State costs 4 bytes per element, 4
    more for each 16-bit element with master_weights. Every element changes by lr in every step, so
    lr is to be several times smaller, and weight_decay larger, than for Adam.

    Args:
        model_params: float32, bfloat16 or float16 tensors on the CPU, dense; or groups, or
            (name, parameter) pairs. Parameters may be on meta until the first step.
        lr: learning rate, at least 0; a number or a tensor of one float32 or float64.
        betas: weight of the running mean in the direction of a step, and its decay rate per step;
            each in [0, 1).
        weight_decay: decay rate per unit of lr, decoupled, at least 0.
        fp32_optimizer_states: keep the running mean in float32, else in the dtype of the parameter.
        maximize: step up the gradient instead of down.
        master_weights: keep float32 originals of 16-bit parameters; see DeepSpeedCPUAdam.

    Raises:
        ValueError: an option or a parameter is out of range, named in the text.
        TypeError: a parameter wraps other tensors and is no DTensor.

    See: Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, Algorithm 2. The
    formula is that of `deepspeed_ext.ops.lion_step_`.
    """

    spec = OptimizerSpec(LION, devices=("cpu",), elsewhere={"cuda": "FusedLion"})

    def __init__(
        self,
        model_params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
        *,
        maximize: bool = False,
        **formats: Unpack[CompactOptions],
    ) -> None:
        defaults = self.spec.defaults(locals())
        super().__init__(
            model_params, defaults, fp32_optimizer_states=fp32_optimizer_states, **formats
        )


class FusedLion(SetGradNone, _Lion):
    """Lion for parameters on CUDA devices: one pass over memory, a few launches per step.

    A plain torch optimizer with the arguments of DeepSpeed's. The step never waits for the device;
    for CUDA graphs see FusedAdam.

    Args:
        params: float32, bfloat16 or float16 tensors on CUDA, dense; or groups, or
            (name, parameter) pairs. Parameters may be on meta until the first step.
        lr: see DeepSpeedCPULion, as for all that is not listed here.
        betas: see there.
        weight_decay: see there.
        set_grad_none: zero_grad() drops gradients instead of filling them with zeros.
        maximize: see there.
        master_weights: see there.
        fp32_optimizer_states: see there.

    Raises:
        ValueError: an option or a parameter is out of range, named in the text.
        TypeError: a parameter wraps other tensors and is no DTensor.
    """

    spec = OptimizerSpec(LION, devices=("cuda",), elsewhere={"cpu": "DeepSpeedCPULion"})

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        *,
        maximize: bool = False,
        **formats: Unpack[FormatOptions],
    ) -> None:
        check_flags(self, {"set_grad_none": set_grad_none})
        self.set_grad_none = set_grad_none
        defaults = self.spec.defaults(locals())
        super().__init__(params, defaults, **formats)

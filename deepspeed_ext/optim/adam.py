"""Adam and AdamW as optimizers: for parameters on the CPU, on CUDA, or on both."""

import math
from collections.abc import Callable
from dataclasses import replace
from numbers import Real
from typing import overload

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from deepspeed_ext.ops.optimizers.adam import ADAM, adam_step_
from deepspeed_ext.ops.optimizers.step_op import Flag
from deepspeed_ext.optim.base import FlatStateOptimizer
from deepspeed_ext.optim.checks import check_flags, check_value
from deepspeed_ext.optim.formats import CompactOptions, FormatOptions
from deepspeed_ext.optim.set_grad_none import SetGradNone
from deepspeed_ext.optim.spec import OptimizerSpec
from deepspeed_ext.torch_internals.compiler import untraced

_TRAITS = OptimizerSpec(ADAM, options=(Flag("amsgrad"),))
_SMALLEST_SCALE = 2.0**-126  # its inverse, and that of all above, is a normal float32


class _Adam(FlatStateOptimizer):
    """Adam and AdamW on the devices that a subclass names."""

    _call_op = staticmethod(adam_step_)

    @property
    def adam_w_mode(self) -> bool:
        """Whether weight decay is decoupled, in every group."""
        return all(group["decoupled_weight_decay"] for group in self.param_groups)

    @overload
    def step(self, closure: None = None, div_scale: float = -1) -> None: ...

    @overload
    def step(self, closure: Callable[[], float], div_scale: float = -1) -> float: ...

    @untraced
    def step(
        self, closure: Callable[[], float] | None = None, div_scale: float = -1
    ) -> float | None:
        """Update every parameter that has a gradient; see `FlatStateOptimizer.step`.

        Args:
            closure: computes the loss anew, and the gradients.
            div_scale: gradients are divided by it first, after `grad_scale` if that is set, too:
                above 0 (as float32); or -1, not to divide.

        Returns:
            What the closure returned.

        Raises:
            ValueError: as `FlatStateOptimizer.step`, and if div_scale is something else.
            TypeError: div_scale is no number.
        """
        if isinstance(div_scale, bool) or not isinstance(div_scale, Real):
            raise TypeError(
                f"{type(self).__name__}: div_scale is {div_scale!r}, expected a number; "
                "set the attribute grad_scale to divide by a tensor"
            )
        if div_scale == -1:
            return self._step(closure)
        ok = _SMALLEST_SCALE <= div_scale < math.inf
        want = "above 0 (2**-126 to below inf), or -1 not to divide"
        check_value(self, "div_scale", div_scale, ok, want)
        return self._step(closure, float(div_scale))


class DeepSpeedCPUAdam(_Adam):
    """Adam or AdamW for parameters in host memory, at the speed of that memory.

    A plain torch optimizer with the arguments of DeepSpeed's and the state of `torch.optim.AdamW`;
    state dicts load from and into that. State costs 8 bytes per element (fp32 moments), 4 more with
    amsgrad, and more or less in other formats.

    Args:
        model_params: float32, bfloat16 or float16 tensors on the CPU, dense; or groups, or
            (name, parameter) pairs. Parameters may be on meta until the first step.
        lr: learning rate, at least 0; a number or a tensor of one float32 or float64.
        bias_correction: divide the moments by 1 - beta^step, as the papers do.
        betas: decay rates of the two moments per step, each in [0, 1).
        eps: added to the denominator, at least 0.
        weight_decay: at least 0; unlike torch.optim.AdamW's, the default is 0.
        amsgrad: divide by the largest second moment so far.
        adamw_mode: True for AdamW (decoupled decay), False for Adam (L2 penalty).
        fp32_optimizer_states: keep moments in float32, else in the dtype of the parameter.
        maximize: step up the gradient instead of down.
        formats: state_dtype, master, master_weights, seed: how state is stored; see
            `FlatStateOptimizer`.

    Raises:
        ValueError: an option or a parameter is out of range, named in the text.
        TypeError: a parameter wraps other tensors and is no DTensor.

    See: Kingma & Ba, "Adam", 2015, Algorithm 1; Loshchilov & Hutter, "Decoupled Weight Decay
    Regularization", 2019, Algorithm 2. The formula is that of `deepspeed_ext.ops.adam_step_`.
    """

    spec = replace(_TRAITS, devices=("cpu",), elsewhere={"cuda": "FusedAdam"})

    def __init__(
        self,
        model_params: ParamsT,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
        *,
        maximize: bool = False,
        **formats: Unpack[CompactOptions],
    ) -> None:
        check_flags(self, {"adamw_mode": adamw_mode})
        defaults = self.spec.defaults(locals(), decoupled_weight_decay=adamw_mode)
        super().__init__(
            model_params, defaults, fp32_optimizer_states=fp32_optimizer_states, **formats
        )


class FusedAdam(SetGradNone, _Adam):
    """Adam or AdamW for parameters on CUDA devices: one pass over memory, a few launches per step.

    A plain torch optimizer with the arguments of DeepSpeed's and the state of `torch.optim.AdamW`.
    The step never waits for the device and can be captured in a CUDA graph once a first step has
    created the state; lr must then be a tensor on the device if it is to change between replays.
    Capture again after a parameter got its first gradient, or state was loaded or replaced: state
    then moves, which a graph does not notice.

    Args:
        params: float32, bfloat16 or float16 tensors on CUDA, dense; or groups, or
            (name, parameter) pairs. Parameters may be on meta until the first step.
        lr: see DeepSpeedCPUAdam, as for all that is not listed here.
        bias_correction: see there.
        betas: see there.
        eps: see there.
        adam_w_mode: True for AdamW (decoupled decay), False for Adam (L2 penalty).
        weight_decay: see there.
        amsgrad: see there.
        set_grad_none: zero_grad() drops gradients instead of filling them with zeros.
        maximize: see there.
        formats: fp32_optimizer_states, state_dtype, master, master_weights, seed; see there.

    Raises:
        ValueError: an option or a parameter is out of range, named in the text.
        TypeError: a parameter wraps other tensors and is no DTensor.
    """

    spec = replace(_TRAITS, devices=("cuda",), elsewhere={"cpu": "DeepSpeedCPUAdam"})

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        *,
        maximize: bool = False,
        **formats: Unpack[FormatOptions],
    ) -> None:
        check_flags(self, {"adam_w_mode": adam_w_mode, "set_grad_none": set_grad_none})
        self.set_grad_none = set_grad_none
        defaults = self.spec.defaults(locals(), decoupled_weight_decay=adam_w_mode)
        super().__init__(params, defaults, **formats)


class HybridAdam(_Adam):
    """Adam or AdamW for parameters on the CPU and on CUDA, in one optimizer and in one group.

    Parameters are stepped where they are, with the ops of DeepSpeedCPUAdam and FusedAdam, so that
    some of a model can be offloaded. The arguments are those of Colossal-AI's, the state is that of
    `torch.optim.AdamW`. A parameter may move to another device between steps; its state follows.
    clip_and_step waits for the CUDA devices once, as the CPU has to know the norm.

    Args:
        model_params: float32, bfloat16 or float16 tensors on the CPU or on CUDA, dense; or groups,
            or (name, parameter) pairs. Parameters may be on meta until the first step.
        lr: see DeepSpeedCPUAdam, as for all that is not listed here.
        bias_correction: see there.
        betas: see there.
        eps: see there.
        weight_decay: see there.
        adamw_mode: True for AdamW (decoupled decay), False for Adam (L2 penalty).
        nvme_offload_fraction: 0; it stands here, as the next one does, because Colossal-AI's class
            has it.
        nvme_offload_dir: not used.
        amsgrad: see there.
        maximize: see there.
        formats: fp32_optimizer_states, state_dtype, master, master_weights, seed; see there.

    Raises:
        ValueError: an option or a parameter is out of range, named in the text.
        TypeError: a parameter wraps other tensors and is no DTensor.
    """

    spec = _TRAITS

    def __init__(
        self,
        model_params: ParamsT,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adamw_mode: bool = True,
        nvme_offload_fraction: float = 0.0,
        nvme_offload_dir: str | None = None,
        *,
        amsgrad: bool = False,
        maximize: bool = False,
        **formats: Unpack[FormatOptions],
    ) -> None:
        check_flags(self, {"adamw_mode": adamw_mode})
        check_value(
            self,
            "nvme_offload_fraction",
            nvme_offload_fraction,
            nvme_offload_fraction == 0,
            "0; state_dtype=torch.uint8 makes state smaller, and "
            "deepspeed_ext.io.TensorStore keeps tensors on disk",
        )
        defaults = self.spec.defaults(locals(), decoupled_weight_decay=adamw_mode)
        super().__init__(model_params, defaults, **formats)


class CPUAdam(HybridAdam):
    """HybridAdam under another name: that of Colossal-AI's CPUAdam, which takes CUDA tensors too.

    For parameters on the CPU alone, DeepSpeedCPUAdam is the same and refuses others.
    """

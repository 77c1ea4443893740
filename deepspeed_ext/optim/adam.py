"""Adam and AdamW as optimizers: DeepSpeedCPUAdam for parameters on the CPU, FusedAdam on CUDA."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from deepspeed_ext.ops.adam import adam_step_
from deepspeed_ext.optim.base import Group, Scalars, SlabOptimizer
from deepspeed_ext.optim.checks import check_value
from deepspeed_ext.optim.slabs import MASTER, STEP, Work


class _Adam(SlabOptimizer):
    """Adam and AdamW on the devices that a subclass names."""

    _optional_state = SlabOptimizer._optional_state | {"max_exp_avg_sq"}

    def _check_group(self, group: Group) -> None:
        super()._check_group(group)
        check_value(self, "eps", group["eps"], group["eps"] >= 0, "at least 0")
        group["betas"] = tuple(map(float, group["betas"]))
        check_value(self, "betas", group["betas"], len(group["betas"]) == 2, "two numbers")
        for i, beta in enumerate(group["betas"]):
            check_value(self, f"betas[{i}]", beta, 0 <= beta < 1, "at least 0 and below 1")

    def _state_dtypes(self, group: Group, param_dtype: torch.dtype) -> dict[str, torch.dtype]:
        dtype = torch.float32 if self.fp32_optimizer_states else param_dtype
        moments = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
        return dict.fromkeys(moments if group["amsgrad"] else moments[:2], dtype)

    def _apply(self, group: Group, work: Work, scalars: Scalars) -> None:
        slabs = work.slabs
        adam_step_(
            work.params,
            work.grads,
            slabs["exp_avg"],
            slabs["exp_avg_sq"],
            slabs[STEP],
            max_exp_avg_sqs=slabs.get("max_exp_avg_sq", ()),
            master_params=slabs.get(MASTER, ()),
            offsets=work.offsets,
            slots=work.slots,
            lr=scalars.lr,
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=group["decoupled_weight_decay"],
            maximize=group["maximize"],
            bias_correction=group["bias_correction"],
            grad_scale=scalars.grad_scale,
            found_inf=scalars.found_inf,
        )


class DeepSpeedCPUAdam(_Adam):
    """Adam or AdamW for parameters in host memory, at the speed of that memory.

    A plain torch optimizer with the arguments of DeepSpeed's and the state of `torch.optim.AdamW`;
    state dicts load from and into that. State costs 8 bytes per element (fp32 moments), 4 more with
    amsgrad, 4 more for each 16-bit element with master_weights.

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
        master_weights: keep float32 originals of 16-bit parameters, as state `master_param`, step
            on those, and round into the parameters. A parameter that is written between steps
            gets a new original; see reset_master for writes that cannot be noticed.

    Raises:
        ValueError: an option or a parameter is out of range, named in the text.
        TypeError: a parameter is a DTensor or another wrapper of tensors.

    See: Kingma & Ba, "Adam", 2015, Algorithm 1; Loshchilov & Hutter, "Decoupled Weight Decay
    Regularization", 2019, Algorithm 2. The formula is that of `deepspeed_ext.ops.adam_step_`.
    """

    _devices = ("cpu",)
    _elsewhere: ClassVar[Mapping[str, str]] = {"cuda": "FusedAdam"}

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
        master_weights: bool = False,
    ) -> None:
        defaults = dict(
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            maximize=maximize,
            decoupled_weight_decay=adamw_mode,
            bias_correction=bias_correction,
        )
        super().__init__(
            model_params,
            defaults,
            fp32_optimizer_states=fp32_optimizer_states,
            master_weights=master_weights,
        )


class FusedAdam(_Adam):
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
        master_weights: see there.
        fp32_optimizer_states: see there.

    Raises:
        ValueError: an option or a parameter is out of range, named in the text.
        TypeError: a parameter is a DTensor or another wrapper of tensors.
    """

    _devices = ("cuda",)
    _elsewhere: ClassVar[Mapping[str, str]] = {"cpu": "DeepSpeedCPUAdam"}
    _settings = (*SlabOptimizer._settings, "set_grad_none")

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
        master_weights: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        self.set_grad_none = set_grad_none
        defaults = dict(
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            maximize=maximize,
            decoupled_weight_decay=adam_w_mode,
            bias_correction=bias_correction,
        )
        super().__init__(
            params,
            defaults,
            fp32_optimizer_states=fp32_optimizer_states,
            master_weights=master_weights,
        )

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop the gradients, or fill them with zeros.

        Args:
            set_to_none: drop them; by default what set_grad_none says.
        """
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

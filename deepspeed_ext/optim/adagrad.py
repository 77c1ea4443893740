"""Adagrad as an optimizer: DeepSpeedCPUAdagrad for parameters on the CPU, FusedAdagrad on CUDA."""

from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from deepspeed_ext.dtensors import local
from deepspeed_ext.ops.optimizers.adagrad import ADAGRAD, adagrad_step_
from deepspeed_ext.ops.optimizers.step_op import Number
from deepspeed_ext.optim.base import FlatStateOptimizer
from deepspeed_ext.optim.buckets import STEP, BucketView
from deepspeed_ext.optim.checks import check_flags, check_value, explain
from deepspeed_ext.optim.clipping import Scalars
from deepspeed_ext.optim.formats import CompactOptions, FormatOptions, master_weights_in
from deepspeed_ext.optim.plans import dtypes_of
from deepspeed_ext.optim.set_grad_none import SetGradNone
from deepspeed_ext.optim.spec import Group, OptimizerSpec

_is_sparse = attrgetter("is_sparse")


def _completed(group: Group, values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**values, "sum": values.get("sum", group["initial_accumulator_value"])}


_TRAITS = OptimizerSpec(
    ADAGRAD, options=(Number("initial_accumulator_value", least=0),), completed=_completed
)


class _Adagrad(FlatStateOptimizer):
    """Adagrad on the devices that a subclass names."""

    _call_op = staticmethod(adagrad_step_)

    def state_dict(self) -> dict[str, Any]:
        """Return options and state as torch's optimizers do: parameters numbered, plain dicts.

        As in torch.optim.Adagrad, every parameter has state, also those without a gradient so far.
        The tensors are those of the optimizer, parts of its flat buffers: torch.save writes each
        flat buffer once, but writes all of it even for one tensor; clone what you want to save by
        itself.
        """
        packed = super().state_dict()
        for group, packed_group in zip(self.param_groups, packed["param_groups"], strict=True):
            for param, number in zip(group["params"], packed_group["params"], strict=True):
                if number not in packed["state"] and not (param.is_meta or is_lazy(param)):
                    packed["state"][number] = self._initial_entry(group, param)
        return packed

    def _initial_entry(self, group: Group, param: Tensor) -> dict[str, Tensor]:
        value = group["initial_accumulator_value"]
        dtype = dtypes_of(self, group, param.dtype)["sum"]
        if not dtype.is_floating_point:  # a code for the same value: it loads all the same
            dtype = torch.float32
        return {
            STEP: torch.zeros((), device=local(param).device, dtype=torch.float32),
            "sum": torch.full_like(param.detach(), value, dtype=dtype),
        }


class DeepSpeedCPUAdagrad(_Adagrad):
    """Adagrad for parameters in host memory, at the speed of that memory.

    A plain torch optimizer with the arguments of DeepSpeed's and the state of
    `torch.optim.Adagrad`; state dicts load from and into that. State costs 4 bytes per element, 4
    more for each 16-bit element with master_weights. Of a parameter with a sparse gradient (COO,
    as of an Embedding with sparse=True), only the rows in the gradient are read and updated.

    Args:
        model_params: float32, bfloat16 or float16 tensors on the CPU, dense; or groups, or
            (name, parameter) pairs. Parameters may be on meta until the first step.
        lr: learning rate, at least 0; a number or a tensor of one float32 or float64.
        eps: added to the denominator, at least 0.
        weight_decay: factor of the L2 penalty, at least 0; 0 with sparse gradients.
        amsgrad: False; it stands here because DeepSpeed's class has it, where it does nothing.
        fp32_optimizer_states: keep the sum in float32, else in the dtype of the parameter.
        lr_decay: step t, the first being 1, takes lr / (1 + (t - 1) * lr_decay); at least 0.
        initial_accumulator_value: what sums begin with, at least 0.
        maximize: step up the gradient instead of down.
        master_weights: keep float32 originals of 16-bit parameters; see DeepSpeedCPUAdam.

    Raises:
        ValueError: an option or a parameter is out of range, named in the text.
        TypeError: a parameter wraps other tensors and is no DTensor.

    See: Duchi, Hazan & Singer, "Adaptive Subgradient Methods", 2011, Figure 1 (diagonal matrices).
    The formula is that of `deepspeed_ext.ops.adagrad_step_`.
    """

    spec = replace(
        _TRAITS,
        devices=("cpu",),
        elsewhere={"cuda": "FusedAdagrad"},
        grad_layouts=(torch.strided, torch.sparse_coo),
    )

    def __init__(
        self,
        model_params: ParamsT,
        lr: float | Tensor = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
        *,
        lr_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        maximize: bool = False,
        **formats: Unpack[CompactOptions],
    ) -> None:
        check_flags(self, {"amsgrad": amsgrad})
        check_value(self, "amsgrad", amsgrad, not amsgrad, "False: Adagrad has no such variant")
        defaults = self.spec.defaults(locals())
        super().__init__(
            model_params, defaults, fp32_optimizer_states=fp32_optimizer_states, **formats
        )

    def _apply(self, group: Group, view: BucketView, scalars: Scalars) -> None:
        is_sparse = list(map(_is_sparse, view.grads))
        if not any(is_sparse):
            super()._apply(group, view, scalars)
            return
        numbers = range(len(is_sparse))
        sparse = view.part([i for i in numbers if is_sparse[i]])
        self._check_sparse(group, sparse)
        dense = view.part([i for i in numbers if not is_sparse[i]])
        for part in dense.split_by_grad_dtype():
            self._apply_part(group, part, scalars)
        for part in sparse.split_by_grad_dtype():
            self._step_rows(group, part, scalars)

    def _check_sparse(self, group: Group, view: BucketView) -> None:
        """Raise ValueError if there is a reason why rows cannot be stepped."""
        decay = group["weight_decay"]
        check_value(self, "weight_decay", decay, decay == 0, "0 with sparse gradients")
        stored = self.state_format.state_dtype
        ok = stored in (None, torch.float32)
        check_value(self, "state_dtype", stored, ok, "float32 or None with sparse gradients")
        explain(self, view, ValueError("a gradient does not fit its parameter"))

    def _step_rows(self, group: Group, view: BucketView, scalars: Scalars) -> None:
        """Step the rows that sparse gradients have, on copies that then go back to their places."""
        grads = [grad.coalesce() for grad in view.grads]
        rows = [tuple(grad.indices()) for grad in grads]
        keys = [key for key in view.buffers if key != STEP]
        wholes = {key: _views(view, key) for key in keys}
        wholes["params"] = view.params
        taken = {
            key: [whole[index].contiguous() for whole, index in zip(tensors, rows, strict=True)]
            for key, tensors in wholes.items()
        }
        steps = [view.buffers[STEP][0][slot] for slot in view.slots.tolist()]
        values = [grad.values() for grad in grads]
        arguments = dict(
            params=taken["params"],
            grads=values,
            sums=taken["sum"],
            steps=steps,
            master_params=master_weights_in(taken),
            offsets=None,
            slots=None,
        )
        self._call_op(**{**self._arguments(group, view, scalars), **arguments})
        for key, tensors in wholes.items():
            for whole, index, part in zip(tensors, rows, taken[key], strict=True):
                whole[index] = part


def _views(view: BucketView, key: str) -> list[Tensor]:
    """Return the parts of a flat buffer that belong to the parameters, in their shapes."""
    return [
        view.buffers[key][0].as_strided(param.shape, param.stride(), offset)
        for param, offset in zip(view.params, view.offsets.tolist(), strict=True)
    ]


class FusedAdagrad(SetGradNone, _Adagrad):
    """Adagrad for parameters on CUDA devices: one pass over memory, a few launches per step.

    A plain torch optimizer with the state of `torch.optim.Adagrad`; state dicts load from and into
    that. The step never waits for the device; for CUDA graphs see FusedAdam. Gradients are dense.

    Args:
        params: float32, bfloat16 or float16 tensors on CUDA, dense; or groups, or
            (name, parameter) pairs. Parameters may be on meta until the first step.
        lr: see DeepSpeedCPUAdagrad, as for all that is not listed here.
        eps: see there.
        weight_decay: see there.
        set_grad_none: zero_grad() drops gradients instead of filling them with zeros.
        lr_decay: see there.
        initial_accumulator_value: see there.
        maximize: see there.
        master_weights: see there.
        fp32_optimizer_states: see there.

    Raises:
        ValueError: an option or a parameter is out of range, named in the text.
        TypeError: a parameter wraps other tensors and is no DTensor.
    """

    spec = replace(_TRAITS, devices=("cuda",), elsewhere={"cpu": "DeepSpeedCPUAdagrad"})

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        *,
        lr_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        maximize: bool = False,
        **formats: Unpack[FormatOptions],
    ) -> None:
        check_flags(self, {"set_grad_none": set_grad_none})
        self.set_grad_none = set_grad_none
        defaults = self.spec.defaults(locals())
        super().__init__(params, defaults, **formats)

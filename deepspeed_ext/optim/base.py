"""The optimizer base: everything but the formula. Stepping, groups, checkpoints; state in slabs."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # torch.compiler.disable: imports the compiler, 0.8 s
from torch.optim.optimizer import ParamsT

from deepspeed_ext.optim.checkpoint import hide_values, show_values
from deepspeed_ext.optim.checks import check_once, check_param, check_value, explain
from deepspeed_ext.optim.entry import Entry
from deepspeed_ext.optim.plans import Plans
from deepspeed_ext.optim.slabs import MASTER, Bucket, Work

Group = dict[str, Any]


class Scalars(NamedTuple):
    """The numbers of a step that may be on the device."""

    lr: float | Tensor
    grad_scale: Tensor | None
    found_inf: Tensor | None


class SlabOptimizer(torch.optim.Optimizer):
    """Base of the optimizers here. A subclass says what state it keeps and calls its op.

    `state` is the truth, as in every torch optimizer: `state[p]` is a dict of tensors, which here
    are views of slabs. It may be read and written from outside, and values may be replaced; the
    next step notices. Only a tensor that gets other memory through `.data =` or `set_` leaves the
    slab unnoticed: put another tensor in its place instead.

    A subclass defines `_devices`, `_state_dtypes` and `_apply`, and the rest where it needs to.

    Args:
        params: parameters, groups, or (name, parameter) pairs.
        defaults: options of groups that do not give their own.
        fp32_optimizer_states: keep state in float32, else in the dtype of the parameter.
        master_weights: keep float32 originals of 16-bit parameters.
    """

    _devices: ClassVar[tuple[str, ...]]  # device types that this class takes
    _elsewhere: ClassVar[Mapping[str, str]] = {}  # device type: the class that takes it
    _optional_state: ClassVar[frozenset[str]] = frozenset({MASTER})  # may miss in a checkpoint
    _settings: ClassVar[tuple[str, ...]] = ("fp32_optimizer_states", "master_weights")
    _step_supports_amp_scaling = True  # tells GradScaler to hand over grad_scale and found_inf

    def __init__(
        self,
        params: ParamsT,
        defaults: Group,
        *,
        fp32_optimizer_states: bool = True,
        master_weights: bool = False,
    ) -> None:
        self.fp32_optimizer_states = fp32_optimizer_states
        self.master_weights = master_weights
        self._plans = Plans()
        super().__init__(params, defaults)

    def _state_dtypes(self, group: Group, param_dtype: torch.dtype) -> dict[str, torch.dtype]:
        """Return the dtype of each state tensor that has an element for each of the parameter's."""
        raise NotImplementedError

    def _apply(self, group: Group, work: Work, scalars: Scalars) -> None:
        """Call the op. It must refuse bad arguments before it writes anything."""
        raise NotImplementedError

    def _check_group(self, group: Group) -> None:
        """Raise ValueError unless the options of this group make sense."""
        lr, decay = group["lr"], group["weight_decay"]
        if isinstance(lr, Tensor):
            check_value(self, "lr", f"a tensor of {lr.numel()} elements", lr.numel() == 1, "one")
        check_value(self, "lr", lr, lr >= 0, "at least 0")
        check_value(self, "weight_decay", decay, decay >= 0, "at least 0")

    def _dtypes(self, group: Group, param_dtype: torch.dtype) -> dict[str, torch.dtype]:
        """Return the dtype of each slab except that of steps."""
        dtypes = self._state_dtypes(group, param_dtype)
        if self.master_weights and param_dtype != torch.float32:
            dtypes[MASTER] = torch.float32
        return dtypes

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @_disable_dynamo
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient.

        Args:
            closure: computes the loss anew, and the gradients.

        Returns:
            What the closure returned.

        Raises:
            ValueError: a parameter, gradient or state tensor is not as it must be; the text says
                which. It has not been changed then, but parameters before it may have been stepped.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            stepped: list[Tensor] = []
            while not self._step_others(stepped):
                self._plans.rebuild(self)
        return loss

    def _step_others(self, stepped: list[Tensor]) -> bool:
        """Step all parameters but those in the list, which grows; stop where plans are outdated.

        A bucket is looked at right before its step, so that its parameters are still in the cache.
        """
        done = frozenset(map(id, stepped))
        for group, plan in zip(self.param_groups, self._plans.current(self), strict=True):
            for bucket in plan.buckets:
                if not bucket.fits():
                    return False
                self._step_bucket(group, bucket, done)
                stepped += bucket.params
        return True

    def _step_bucket(self, group: Group, bucket: Bucket, done: frozenset[int]) -> None:
        work = bucket.gather(done)
        if work is None:
            return
        scalars = self._scalars(group, bucket.device)
        bucket.refresh_masters()
        try:
            self._apply(group, work, scalars)
        except (ValueError, TypeError, RuntimeError) as error:
            explain(self, work, error)
            parts = work.split_by_grad_dtype()  # an op takes one, and has not written anything yet
            if len(parts) == 1:
                raise
            for part in parts:
                self._apply(group, part, scalars)
        bucket.note_own_write()

    def _scalars(self, group: Group, device: torch.device) -> Scalars:
        lr = group["lr"]
        if isinstance(lr, Tensor) and lr.device != device:
            lr = float(lr) if "cpu" in (lr.device.type, device.type) else _moved(lr, device)
        return Scalars(
            lr if isinstance(lr, Tensor) else float(lr),
            _moved(getattr(self, "grad_scale", None), device),
            _moved(getattr(self, "found_inf", None), device),
        )

    def reset_master(self) -> None:
        """Make the fp32 masters exact copies of the parameters.

        A step does so by itself for elements that somebody has written since the last one, if the
        version counter or the address of the parameter tells; a write through `param.data` and a
        replayed CUDA graph leave both as they are.
        """
        with torch.no_grad():
            plans = self._plans.current(self)
            if not all(bucket.fits() for plan in plans for bucket in plan.buckets):
                self._plans.rebuild(self)
                plans = self._plans.current(self)
            for plan in plans:
                for bucket in plan.buckets:
                    bucket.reset_masters()

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters with options of their own; options that are not given have the default.

        Raises:
            ValueError: an option or a parameter is not as it must be; nothing was added.
            TypeError: a parameter is a DTensor or another wrapper of tensors; nothing was added.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_group(group)
            check_once(self, group["params"])
            for param in group["params"]:
                check_param(self, param, or_meta=True)
        except Exception:
            self.param_groups.pop()
            raise
        self._plans.add_group(group)

    def state_dict(self) -> dict[str, Any]:
        """Return options and state as torch's optimizers do: parameters numbered, plain dicts.

        The tensors are those of the optimizer, parts of its slabs: torch.save writes each slab
        once, but writes all of it even for one tensor; clone what you want to save by itself.
        """
        packed = super().state_dict()
        packed["state"] = {
            key: dict(value) if isinstance(value, Entry) else value
            for key, value in packed["state"].items()
        }
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what state_dict of this class or of its torch counterpart returned.

        Values are copied, to the device of the parameter and in the dtype that this optimizer was
        made with (torch would cast moments to the dtype of the parameter). Missing options have
        their defaults, unknown ones are kept. If something does not fit, nothing is changed.

        Raises:
            ValueError: groups, shapes or keys are not those of this optimizer.
        """
        hook = self.register_load_state_dict_pre_hook(hide_values)  # after those of the user
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()

    def __getstate__(self) -> dict[str, Any]:
        settings = {name: getattr(self, name) for name in self._settings}
        state: defaultdict[Any, Any] = defaultdict(dict)
        state.update((k, dict(v) if isinstance(v, Entry) else v) for k, v in self.state.items())
        return {**super().__getstate__(), **settings, "state": state}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what a pickle, deepcopy or torch's load_state_dict holds, or change nothing."""
        before = dict(self.__dict__)
        self.__dict__.setdefault("_plans", Plans())
        try:
            super().__setstate__({**state, "state": show_values(state["state"])})
            self.defaults.pop("differentiable", None)  # which torch adds
            for group in self.param_groups:
                for key, value in self.defaults.items():
                    group.setdefault(key, value)
            with torch.no_grad():
                self._plans.rebuild(self)
        except Exception:
            self.__dict__.clear()
            self.__dict__.update(before)
            raise


def _moved(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    if tensor is None or tensor.device == device:
        return tensor
    return tensor.to(device, non_blocking=device.type != "cpu")  # the host must not read too early

"""The optimizer base, all but the formula: stepping, groups, checkpoints; state in flat buffers."""

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from deepspeed_ext.dtensors import Agreement, all_zero, is_partial
from deepspeed_ext.ops.optimizers.clip import checked_norm
from deepspeed_ext.optim.buckets import STEP, Bucket, BucketView
from deepspeed_ext.optim.checks import (
    check_flags,
    check_group_keys,
    check_kind,
    check_no_capture,
    check_once,
    check_options,
    check_param,
    check_shards,
    explain,
    name_refused,
)
from deepspeed_ext.optim.clipping import Clip, Scalars, Scaling, SquareSum, clip, scalars_of
from deepspeed_ext.optim.formats import FormatOptions, StateFormat, is_of_format
from deepspeed_ext.optim.plans import Change, Plans, dtypes_of, follow_shapes, is_state
from deepspeed_ext.optim.spec import Group, OptimizerSpec
from deepspeed_ext.optim.state_dict import hide_entries, portable_state, show_entries
from deepspeed_ext.optim.state_entry import StateEntry
from deepspeed_ext.torch_internals.compiler import untraced


class FlatStateOptimizer(torch.optim.Optimizer):
    """Base of the optimizers here. A subclass says what state it keeps and calls its op.

    `state` is the truth, as in every torch optimizer: `state[p]` is a dict of tensors, which here
    are views of flat buffers. It may be read and written from outside, and values may be replaced;
    the next step notices. Only a tensor that gets other memory through `.data =` or `set_` leaves
    the flat buffer unnoticed: put another tensor in its place instead.

    All take these keyword arguments, which say how state is stored. Bytes are for each element of
    a parameter and state tensor; Adam has two of these, Lion, Adagrad and momentum one.

        fp32_optimizer_states: True: state in float32, 4 bytes; False: in the dtype of the
            parameter, rounded to the nearest, 2 bytes with 16-bit parameters.
        state_dtype: None: as fp32_optimizer_states says. torch.float32: 4 bytes. torch.bfloat16:
            2 bytes, rounded at random with the exact expected value. torch.uint8: 1 byte and 1/64:
            8-bit codes with a scale for each block of 256 elements, rounded likewise; the state
            dict has the codes, uint8, and their scales, `<key>_scale`.
        master: "float32": keep master weights, float32 originals of 16-bit parameters, state
            `master_param`, 4 bytes; step on those and round into the parameters. A parameter that
            is written between steps gets a new original where its version counter or address tells
            of that, as it does of most writes; what they do not, the next step undoes: see
            `reset_master`.
            "remainder": split them: the upper 16 bits are the bfloat16 parameter, the lower ones
            state `master_remainder`, 2 bytes: together they are the original, bit for bit. It is
            rounded half up, not half to even. Each step reads the parameters, so it sees every
            write to them. None: step on the parameters.
        master_weights: True: the same as master="float32".
        seed: of the random rounding, which depends on it, the number of the parameter, its step,
            and the index of the element, but not on how a DTensor is sharded (by rows, or not).

    A state dict of any format loads into any other of these classes. **Torch's classes load float
    state only: they take 8-bit codes for moments, in silence.** For them make float32 state of it
    first: load it into an optimizer without state_dtype, and take the state dict of that. The lower
    bits of split master weights are made of float32 ones for the weight that is there: load the
    model first. Of DTensors, codes are float32 in a state dict and lower bits int32, which any
    other sharding, and torch, can load.

    Groups have the options of the class; these arguments hold for all groups, and one in a group is
    refused.

    A subclass defines `spec`, `_call_op` or `_apply`, and the rest where it needs to.

    Args:
        params: parameters, groups, or (name, parameter) pairs.
        defaults: options of groups that do not give their own.
        formats: see above.
    """

    spec: ClassVar[OptimizerSpec]  # what the class takes and keeps
    _call_op: ClassVar[Callable[..., None]]  # refuses bad arguments before it writes anything
    _settings: ClassVar[tuple[str, ...]] = ("state_format",)
    _agreement: Agreement | None = None  # of the processes while they load
    _step_supports_amp_scaling = True  # tells GradScaler to hand over grad_scale and found_inf

    def __init__(self, params: ParamsT, defaults: Group, **formats: Unpack[FormatOptions]) -> None:
        flags = ("fp32_optimizer_states", "master_weights")
        check_flags(self, {name: value for name, value in formats.items() if name in flags})
        self.state_format = StateFormat.of(type(self).__name__, formats)
        self._plans = Plans()
        self._skipped: dict[torch.device, Tensor] = {}
        super().__init__(params, defaults)

    def _apply(self, group: Group, view: BucketView, scalars: Scalars) -> None:
        """Step parameters of one bucket."""
        self._call_op(**self._arguments(group, view, scalars))

    def _arguments(self, group: Group, view: BucketView, scalars: Scalars) -> dict[str, Any]:
        """Return all that a step may need by the names that the arguments of ops have."""
        op = self.spec.op
        return {
            "params": view.params,
            "grads": view.grads,
            **{name: view.buffers.get(key, ()) for name, key in op.state_keys.items()},
            "steps": view.buffers[STEP],
            **view.places,
            **{name: group[key] for name, key in op.option_keys.items()},
            "maximize": group["maximize"],
            **scalars._asdict(),
        }

    def _check_group(self, group: Group) -> None:
        """Raise TypeError or ValueError unless the options of this group make sense."""
        check_options(self, group)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @untraced
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient.

        An optimizer without state whose lr and gradients are all 0 makes its state and does not
        count that as a step: so torch.distributed.checkpoint, which steps it like this, changes
        nothing. Gradients of DTensors in other placements than theirs are redistributed.

        Args:
            closure: computes the loss anew, and the gradients.

        Returns:
            What the closure returned.

        Raises:
            ValueError: a parameter, gradient or state tensor is not as it must be; the text says
                which. It has not been changed then, but parameters before it may have been stepped.
        """
        return self._step(closure)

    def _step(
        self, closure: Callable[[], float] | None, div_scale: float | None = None
    ) -> float | None:
        """Do what step() does, with gradients divided by a number, too."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            if not self.state and self._is_dry_step():
                return loss
            scaling = self._begin(self._scaling(div_scale))
            stepped: list[Tensor] = []
            while not self._step_others(stepped, scaling):
                self._plans.rebuild(self)
        return loss

    def _scaling(self, div_scale: float | None = None) -> Scaling:
        """Return what GradScaler has set, if it has: the only values that are not passed on."""
        return Scaling(
            getattr(self, "grad_scale", None), getattr(self, "found_inf", None), div_scale
        )

    def _begin(self, scaling: Scaling) -> Scaling:
        """Prepare a step, and return how its gradients are scaled."""
        return scaling

    def _is_dry_step(self) -> bool:
        """Make the state, and return whether there is nothing else to do in this first step.

        With lr 0 and gradients of zeros, torch.distributed.checkpoint steps an optimizer without
        state before it saves or loads. Counted as a step, that would spoil the bias correction of
        the first real one.
        """
        self._plans.current(self)
        return self._changes_nothing([p for group in self.param_groups for p in group["params"]])

    def _changes_nothing(self, params: Sequence[Tensor]) -> bool:
        """Return whether learning rates and gradients are all 0, on the host as far as rates go."""
        lrs = [group["lr"] for group in self.param_groups]
        if any((isinstance(lr, Tensor) and lr.device.type != "cpu") or lr != 0 for lr in lrs):
            return False
        grads = [param.grad for param in params if param.grad is not None]
        if any(grad.layout is not torch.strided or is_partial(grad) for grad in grads):
            return False
        return all_zero(grads)

    def _step_others(self, stepped: list[Tensor], scaling: Scaling) -> bool:
        """Step all parameters but those in the list, which grows; stop where plans are outdated.

        A bucket is looked at right before its step, so that its parameters are still in the cache.
        """
        done = frozenset(map(id, stepped))
        for group, plan in zip(self.param_groups, self._plans.current(self), strict=True):
            for bucket in plan.buckets:
                change = self._plans.changes(self, bucket)
                if change is Change.LOOKS:
                    return False
                view = self._gather(bucket, done)
                if view is not None:
                    if change is Change.WEIGHTS:
                        bucket.refresh_master_weights()
                    self._step_bucket(group, bucket, view, scaling)
                stepped += bucket.params
        return True

    def _step_bucket(
        self, group: Group, bucket: Bucket, view: BucketView, scaling: Scaling
    ) -> None:
        scalars = scalars_of(group, bucket.device, scaling)
        try:
            self._apply(group, view, scalars)
        except (ValueError, TypeError, RuntimeError) as error:
            explain(self, view, error)
            parts = view.split_by_grad_dtype()  # an op takes one, and has not written anything yet
            if len(parts) == 1:
                name_refused(self, view, error)
                raise
            for part in parts:
                self._apply_part(group, part, scalars)
        if bucket.is_sharded:  # ops count their writes, but of the local parts
            torch.autograd.graph.increment_version(view.owners)
        bucket.note_own_write()

    def _apply_part(self, group: Group, view: BucketView, scalars: Scalars) -> None:
        """Call the op for some of the parameters of a bucket, which errors are to name."""
        try:
            self._apply(group, view, scalars)
        except (ValueError, TypeError, RuntimeError) as error:
            name_refused(self, view, error)
            raise

    def _gather(self, bucket: Bucket, done: frozenset[int] = frozenset()) -> BucketView | None:
        """Return the parameters of a bucket that have a gradient; of DTensors, the parts here."""
        view = bucket.gather(done)
        if view is not None and bucket.is_sharded:
            check_shards(self, view)
            view = view.of_this_process()
        return view

    @untraced
    def clip_and_step(self, max_norm: float) -> Tensor:
        """Clip the gradients by their global norm and step, reading each gradient only twice.

        The same as unscaling, `torch.nn.utils.clip_grad_norm_` and step(), but that gradients are
        left as they are, the arithmetic of the norm is in float64, and inf or NaN in any gradient,
        on any device or, with DTensors, in any process, leaves everything everywhere as it was;
        see `skipped_steps`. Gradients that are DTensors count whole, so every process that holds
        shards calls this. With the attributes `grad_scale` and `found_inf`, which GradScaler sets,
        gradients are unscaled too. Nothing waits for the device, and it can be captured in a CUDA
        graph after a first call, unless there are parameters on the CPU and on CUDA: then one value
        is read by the host.

        Args:
            max_norm: the largest norm to leave as it is, above 0; inf to measure only.

        Returns:
            The norm of the unscaled gradients before clipping: float32, no dimension, on the device
            of the gradients (the CPU if some are there, or if there are none). It is inf or NaN if
            and only if the step was skipped: a gradient has that, `found_inf` is not 0, or
            `grad_scale` is 0, inf, NaN, or so small that gradients divided by it are too large for
            float32. A norm that itself is too large for float32 is the largest number there is.

        Raises:
            ValueError: as step(), and if max_norm is not above 0.
            TypeError: max_norm is no number.

        See: Pascanu, Mikolov & Bengio, "On the difficulty of training recurrent neural networks",
        2013, Algorithm 1.
        """
        max_norm = checked_norm(type(self).__name__, "max_norm", max_norm)
        with torch.no_grad():
            clipped = self._clip(self._scaling(), max_norm)
            self._count_skip(clipped.found_inf)
        # As GradScaler does it: step() may have been wrapped by what knows no other arguments.
        given = {k: v for k, v in self.__dict__.items() if k in ("grad_scale", "found_inf")}
        self.grad_scale, self.found_inf = clipped.divisor, clipped.found_inf
        try:
            self.step()
        finally:
            del self.grad_scale, self.found_inf
            self.__dict__.update(given)
        return clipped.norm

    def _clip(self, scaling: Scaling, max_norm: float) -> Clip:
        """Return what makes the global norm of the gradients at most max_norm."""
        squares = SquareSum()
        for bucket in self._fitting_buckets():
            view = self._gather(bucket)
            if view is None:
                continue
            try:
                squares.add(view)
            except (ValueError, TypeError, RuntimeError) as error:
                explain(self, view, error)
                if not any(grad.is_sparse for grad in view.grads):
                    name_refused(self, view, error)
                squares.add_sparse(view)
        return clip(squares.total(), max_norm, scaling)

    @property
    def skipped_steps(self) -> int:
        """How often clip_and_step has stepped nothing and returned inf or NaN.

        Waits for the device. It is not part of the state dict.
        """
        return sum(int(count) for count in self._skipped.values())

    def _count_skip(self, found_inf: Tensor) -> None:
        device = found_inf.device
        if device not in self._skipped:
            check_no_capture(self, device, "call of clip_and_step before, which makes its counter")
            self._skipped[device] = torch.zeros((), dtype=torch.float64, device=device)
        self._skipped[device] += found_inf

    def reset_master(self) -> None:
        """Make master weights exact copies of the parameters.

        A step does so by itself with those whose parameters somebody has written since the last
        one, if the version counter or the address of the parameter tells. These leave both as they
        are, so that the next step would undo what they wrote; call this between them and that:

            a write in place through `param.data`, or to memory that was taken from it;
            a collective, such as `dist.broadcast(param, 0)` or `dist.all_reduce(param)`;
            a torch._foreach function on a DTensor;
            a kernel of somebody else's, and a replayed CUDA graph.

        With master="remainder" none of that matters: parameters are read in each step, and the
        lower bits that a written one has are those of the weight before, at most half a unit of its
        last place, until this makes them zeros. To look for such writes a step with float32 ones
        would read 2 bytes more for each element: of 28, with 16-bit gradients and state in float32.
        """
        with torch.no_grad():
            for bucket in self._fitting_buckets():
                bucket.reset_master_weights()

    def _fitting_buckets(self) -> list[Bucket]:
        """Return buckets that hold all parameters with a gradient or with state, as they are."""
        buckets = [bucket for plan in self._plans.current(self) for bucket in plan.buckets]
        if not all(bucket.fits() for bucket in buckets):
            self._plans.rebuild(self)
            buckets = [bucket for plan in self._plans.current(self) for bucket in plan.buckets]
        return buckets

    def give_state(self, params: Sequence[Tensor]) -> None:
        """Make state for parameters that have none, as a first step does."""
        fresh = [p for p in params if p not in self.state and p.grad is None]
        for param in fresh:
            param.grad = param.detach()  # only what has a gradient gets state
        try:
            self._plans.current(self)
        finally:
            for param in fresh:
                param.grad = None

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters with options of their own; options that are not given have the default.

        Raises:
            ValueError: an option or a parameter is not as it must be; nothing was added.
            TypeError: a parameter wraps other tensors and is no DTensor, or the group has an
                argument of the constructor that is no option of groups; nothing was added.
        """
        if isinstance(param_group, dict):
            check_group_keys(self, param_group)
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

        The tensors are those of the optimizer, parts of its flat buffers: torch.save writes each of
        these once, but all of it even for one tensor; clone what you want to save by itself.
        """
        follow_shapes(self)
        return portable_state(super().state_dict(), self.spec.signed)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what state_dict of this class or of its torch counterpart returned.

        Values are copied, to the device of the parameter and in the dtype that this optimizer was
        made with (torch would cast moments to the dtype of the parameter). Missing options have
        their defaults, unknown ones are kept, and so is state under keys of your own, but not under
        those of other classes here or in torch: a state dict names no class but by them. If
        something does not fit, nothing is changed. State that is this optimizer's own, where it
        lies, is checked and not copied: so what was read into the tensors of state_dict is loaded.

        A mean or sum of squares, or a block of 8-bit codes, that has become NaN is saved as it is,
        as looking would wait for the device. It is not loaded, as steps would go on with it in
        silence. The error says so: load an earlier state.

        With parameters that are DTensors, every process that holds parts of them calls this: they
        wait for each other, and what one of them refuses none takes.

        Raises:
            ValueError: groups, shapes or keys are not those of this optimizer, or numbers would
                destroy, such as a step below 0; or another process refuses what it was given.
            TypeError: an option of a group is of a wrong type, or state_dict is no dict.
        """
        params = [param for group in self.param_groups for param in group["params"]]
        self._agreement = Agreement(params, stages=2)
        hook = self.register_load_state_dict_pre_hook(hide_entries)  # after those of the user
        try:
            if not isinstance(state_dict, dict):
                title, got = type(self).__name__, type(state_dict).__name__
                raise TypeError(f"{title}: state_dict is a {got}, expected a dict")
            super().load_state_dict(state_dict)
        except Exception:
            self._agreement.refuse()
            raise
        finally:
            del self._agreement
            hook.remove()

    def check_given(self, state: Mapping[Tensor, dict[str, Any]], options: Sequence[Group]) -> None:
        """Raise what load_state_dict would of keys, shapes, dtypes and options, before all is read.

        Args:
            state: of parameters; tensors may be on meta.
            options: of each group.
        """
        for group, given in zip(self.param_groups, options, strict=True):
            changed = {**self.defaults, **given}
            self._check_group(changed)
            for param in group["params"]:
                entry = state.get(param, {})
                is_state(self, changed, param, entry, or_meta=True)
                check_kind(self, param, entry)

    def __getstate__(self) -> dict[str, Any]:
        follow_shapes(self)
        settings = {name: getattr(self, name) for name in self._settings}
        state: defaultdict[Any, Any] = defaultdict(dict)
        state.update(
            (k, dict(v) if isinstance(v, StateEntry) else v) for k, v in self.state.items()
        )
        return {**super().__getstate__(), **settings, "state": state}

    def __deepcopy__(self, memo: dict[int, Any]) -> "FlatStateOptimizer":
        """Copy as by way of a pickle, but state once only, by __setstate__ into flat buffers."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        contents = self.__getstate__()
        kept = contents.pop("state")
        copied = copy.deepcopy(contents, memo)
        state = {}
        for group in self.param_groups:
            for param in group["params"]:
                entry = kept.get(param)
                if isinstance(self.state.get(param), StateEntry):
                    del kept[param]
                    dtypes = dtypes_of(self, group, param.dtype)
                    state[copy.deepcopy(param, memo)] = {
                        k: v if k == STEP or is_of_format(k, dtypes) else copy.deepcopy(v, memo)
                        for k, v in entry.items()
                    }
        state.update(copy.deepcopy(kept, memo))
        made.__setstate__({**copied, "state": state})
        return made

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what a pickle, deepcopy or torch's load_state_dict holds, or change nothing."""
        before = dict(self.__dict__)
        self._plans = Plans()  # the old ones stay as they are, in case that something is wrong
        old = before.get("_plans", self._plans)
        self.__dict__.setdefault("_skipped", {})
        try:
            super().__setstate__({**state, "state": show_entries(state["state"])})
            self.defaults.pop("differentiable", None)  # which torch adds
            for group in self.param_groups:
                for key, value in self.defaults.items():
                    group.setdefault(key, value)
                self._check_group(group)
            with torch.no_grad():
                if self._agreement is None:
                    self._plans.rebuild(self)
                else:
                    self._plans.load(self, self._agreement, old)
        except Exception:
            self.__dict__.clear()
            self.__dict__.update(before)
            raise

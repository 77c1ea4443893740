"""An optimizer whose state lives, and is stepped, in host memory, while the model is elsewhere."""

import itertools
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from deepspeed_ext.collector import await_collected
from deepspeed_ext.dtensors import rests_on_host
from deepspeed_ext.offload.bucket_states import OffloadedBucket
from deepspeed_ext.offload.copies import Recorder
from deepspeed_ext.offload.copying import copied, rebuilt
from deepspeed_ext.offload.disk import Disk, commit, folder_of, restore_options, turn
from deepspeed_ext.offload.hooks import Remove, before_forward, check_model, let_go, watch
from deepspeed_ext.offload.host_optimizer import offloaded
from deepspeed_ext.offload.memory_budget import common_budget
from deepspeed_ext.offload.memory_estimate import bytes_of, estimate, kept_on_device
from deepspeed_ext.offload.param_table import ParamTable, weakly
from deepspeed_ext.offload.pipeline import Pipeline
from deepspeed_ext.offload.state_intake import StateIntake
from deepspeed_ext.offload.state_of_params import State
from deepspeed_ext.offload.tiers.contents import bytes_beside
from deepspeed_ext.offload.tiers.room import bytes_in
from deepspeed_ext.ops.optimizers.clip import checked_norm
from deepspeed_ext.optim import DeepSpeedCPUAdam
from deepspeed_ext.optim.base import FlatStateOptimizer
from deepspeed_ext.optim.buckets import Bucket
from deepspeed_ext.optim.checks import check_group_keys, check_once
from deepspeed_ext.optim.clipping import Scaling
from deepspeed_ext.optim.formats import Parts
from deepspeed_ext.optim.state_dict import portable_state, portable_state_in_parts
from deepspeed_ext.processors import check_threads, share_here
from deepspeed_ext.torch_internals.compiler import untraced
from deepspeed_ext.torch_internals.modules import load_hooks_of
from deepspeed_ext.torch_internals.tensors import past_torch_function

Group = dict[str, Any]
_rebuilt = rebuilt  # as pickles name it that were made before it had a module of its own


class OffloadOptimizer(torch.optim.Optimizer):
    """Keep an optimizer's state in host memory and step there, beside backward and forward.

    Numbers, state dicts and options are those of the optimizer class, bit for bit. Gradients leave
    the device while backward makes more of them, each bucket is stepped by a thread as soon as it
    is there, and the weights return in the order in which forward wants them. A step that is taken
    before step() is called is speculative, and written to shadow buffers: step() commits it if
    gradients, weights, state and options are still what they were then, and otherwise discards it
    and steps anew.

    Gradients and weights are compared by fingerprints of all their bits, as much writes to them
    without counting a version: torch's clip_grad_norm_ and `_foreach_*` on DTensors, collectives,
    `.data`. What is written before step() counts, with master weights too, which are made anew from
    weights that were written; the optimizer class by itself sees counted writes to those only. So
    is state, in steps in which it is read: tensors of it are to be read anew after each step().
    Not seen is what others still write to gradients and weights while step() is called, such as a
    collective that nobody has waited for.

    Shards that rest in host memory, by `zero.shard(..., offload="cpu")` or FSDP2's
    CPUOffloadPolicy, are stepped there, by all threads, in step(), without copies; so are those
    that gpu_fraction keeps, on their device. Of these all is as the optimizer class has it.

    Args:
        params: float32, bfloat16 or float16 tensors on the CPU or on CUDA, DTensors among them; or
            groups, or (name, parameter) pairs.
        optimizer_class: DeepSpeedCPUAdam, DeepSpeedCPUAdagrad, DeepSpeedCPULion, FusedSGD or
            FusedRMSprop.
        model: step() returns at once. Whoever touches a weight from Python waits for it, in
            whatever way: forward, state_dict, `weight.data`, deepcopy, collectives; modules of this
            model wait for theirs as they begin. Until then `type(weight)` is a class of its own.
            What torch asks no class about is not seen, such as CUDA graphs, views that were there
            before, `torch.tensor(weight)`, C++ and modules that torch.jit.script has made of this
            one: it comes after synchronize(). None: step() returns when all weights are ordered
            before the current stream.
        max_grad_norm: step() clips the gradients to this global norm, as clip_and_step does; None:
            it does not.
        device: where state rests: "cpu", in host memory; "nvme", on disk as far as memory_budget
            does not hold it. What is on disk is cut into pieces; step() reads each once and writes
            it once, through a ring of memory, while it steps others. Its numbers are the same.
        nvme_path: a folder on the disk to use, for "nvme". The file there has no name and goes with
            the process, unless it is durable.
        nvme_fraction: this share of the bytes of parameters, the last ones, has its state on disk,
            also where the budget would hold more; from 0 to 1.
        durable: `commit` keeps weights, state and options in nvme_path, which must have none yet.
            It has room for two then, and checksums. Each process has a folder of its own there.
        resume: go on from the last commit, bit for bit, if there is one: the constructor gives
            parameters, model, options and state what they were then. With several processes it is
            the newest that all of them have.
        memory_budget: most bytes of host memory for weights, state, gradients and speculative
            steps, as a number or as "2GiB"; None: three quarters of what there is beside weights
            and state go to the latter two, and processes that torchrun has started on one host
            share it evenly. With "nvme" None is three quarters of such a share, and the least of
            all processes counts where parameters are DTensors.
        free_grads: gradients are added up in host memory, in float32, and leave the device as soon
            as they are there. `p.grad` is a placeholder without memory then, until step(): who
            drops it or writes zeros does so to the sum, who reads it, as torch's clip_grad_norm_
            and GradScaler do, is told to use max_grad_norm. zero_grad(set_to_none=False) leaves
            None, too, and a step without a new gradient does nothing then. What others write to a
            gradient after it has left is lost; where a process group is there, as DDP does that,
            only DTensors leave before step(), and in one process models that stream. False: they
            stay on the device, as in torch.
        gpu_fraction: this share of the bytes of parameters, the first ones, is kept on the device:
            it is stepped there, and has its state there; from 0 to 1. What rests in host memory
            stays there.
        threads: that step in host memory. None: one on each processor that this process may use;
            processes that torchrun has started divide those of their host, and keep to their part.
            Fewer if torch.get_num_threads() is less, but for the 1 that torchrun sets. See
            `deepspeed_ext.processors`.
        kwargs: of the optimizer class: lr, betas, weight_decay, state_dtype, master ...

    Raises:
        ValueError: an option or a parameter is out of range, named in the text; or memory_budget
            does not hold weights and state.
        MemoryError: host memory does not hold them; the text has the numbers of `estimate`.
        TypeError: optimizer_class needs norms of whole tensors, as LAMB does, or is none of ours;
            or model is, or has in it, what torch.jit.script returned.

    See: Ren et al., "ZeRO-Offload", 2021; Lian et al., "SuperOffload", 2025, section 4.
    """

    _pipeline: Pipeline
    _max_norm: float | None = None  # of the call that is under way, if it has one of its own
    _step_supports_amp_scaling = True  # tells GradScaler to hand over grad_scale and found_inf

    def __init__(
        self,
        params: ParamsT,
        optimizer_class: type[FlatStateOptimizer] = DeepSpeedCPUAdam,
        *,
        model: torch.nn.Module | None = None,
        max_grad_norm: float | None = None,
        device: str = "cpu",
        nvme_path: str | os.PathLike[str] | None = None,
        nvme_fraction: float | None = None,
        durable: bool = False,
        resume: bool = False,
        memory_budget: int | str | None = None,
        free_grads: bool = False,
        gpu_fraction: float = 0.0,
        threads: int | None = None,
        **kwargs: Any,
    ) -> None:
        name = type(self).__name__
        if max_grad_norm is not None:
            max_grad_norm = checked_norm(name, "max_grad_norm", max_grad_norm)
        if not 0 <= gpu_fraction <= 1:
            raise ValueError(f"{name}: gpu_fraction is {gpu_fraction}, expected 0 to 1")
        check_threads(name, threads)
        check_model(name, model)
        self.max_grad_norm = max_grad_norm
        self.grad_norm: Tensor | None = None
        planned = {
            "optimizer_class": optimizer_class,
            "device": device,
            "nvme_fraction": nvme_fraction,
            "durable": durable,
            "memory_budget": bytes_in(f"{name}: memory_budget", memory_budget),
            "free_grads": free_grads,
            "gpu_fraction": gpu_fraction,
            **kwargs,
        }
        nvme_path = folder_of(name, device, nvme_path, nvme_fraction, durable, resume)
        # Those of a copy, which cannot have the same folder.
        scratch = {"threads": threads, "nvme_path": nvme_path, "durable": False}
        self._settings = {**planned, **scratch}
        self._hooks: dict[Tensor, Remove] = {}
        table = ParamTable[OffloadedBucket](share_here(threads))
        super().__init__(params, {})  # which makes groups of them
        self._bytes_to_keep = gpu_fraction * sum(map(bytes_of, self._params()))
        for group in self.param_groups:
            check_once(self, group["params"])
        await_collected()  # which may have the memory, and the folder
        budget = common_budget(device, planned["memory_budget"], self._params())
        planned["memory_budget"] = budget
        needs = estimate(self.param_groups, **planned)
        needs.check(name)
        disk = None
        if needs.ring is not None and nvme_path is not None:
            params = list(self._params())
            beside = 2 * bytes_beside(model, params) if durable else 0
            disk = Disk(name, nvme_path, needs.disk_bytes + beside, needs.ring, durable, resume)
            table.put_on_disk(params[i] for i in needs.on_disk)
        self._disk = disk
        bucket = Bucket if disk is None else disk.maker(table)
        made = offloaded(optimizer_class, weakly(table), table.share, bucket)
        host_groups = [self._host_group(group, table) for group in self.param_groups]
        table.has_disk = disk is not None
        own = self._host_optimizer = made(host_groups, **kwargs)
        self.defaults = dict(own.defaults)
        ring = None if disk is None else disk.ring
        self._pipeline = Pipeline(own, self.param_groups, table, needs.memory, free_grads, ring)
        self._take_options()
        self._model = model
        self._waiting = [] if model is None else before_forward(model, self._pipeline.before_use)
        self._end = weakref.finalize(self, let_go, self._pipeline, self._hooks, self._waiting)
        self._watch()
        if disk is not None:
            try:
                disk.restore(self._pipeline, self.param_groups, model, self._load)
            except BaseException:
                self._end()
                raise

    def _params(self) -> Iterable[Tensor]:
        return itertools.chain.from_iterable(group["params"] for group in self.param_groups)

    def _host_group(self, group: Group, table: ParamTable[OffloadedBucket]) -> Group:
        """Return a group of host copies, and of parameters that are kept on the device."""
        check_once(self, group["params"])
        kept, self._bytes_to_keep = kept_on_device(group["params"], self._bytes_to_keep)
        both = zip(group["params"], kept, strict=True)
        table.keep_on_device(p for p, is_kept in both if is_kept and not rests_on_host(p))
        return {**group, "params": table.copies_of(group["params"])}

    def _watch(self) -> None:
        """See that all parameters tell of their gradients, those added or thawed since too."""
        freed, has_disk = self._settings["free_grads"], self._disk is not None
        watch(self._hooks, self._params(), self._pipeline, freed, has_disk)

    def _take_options(self, first: int = 0) -> None:
        """Give groups, from one on, the options that those in host memory have."""
        both = zip(self.param_groups, self._host_optimizer.param_groups, strict=True)
        for group, host_group in itertools.islice(both, first, None):
            group.update((key, value) for key, value in host_group.items() if key != "params")

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @untraced
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient, as a step of the optimizer class does.

        Clips to max_grad_norm if that is given; `grad_norm` is the norm then. With a model the step
        goes on after the call, and an error in it is raised by whatever waits for it next.

        Args:
            closure: computes the loss anew, and the gradients.

        Returns:
            What the closure returned.

        Raises:
            ValueError: a parameter, gradient or state tensor is not as it must be; the text says
                which. It has not been changed then, but others may have been stepped.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scaling = Scaling(getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
        if self._settings["free_grads"] and scaling.found_inf is not None:
            raise ValueError(
                f"{type(self).__name__}: free_grads is True, expected False with GradScaler, which "
                "looks at the gradients; zero.LossScaler does not"
            )
        with torch.no_grad(), turn(self._disk):
            self._pipeline.finish()
            self._watch()
            if not self._host_optimizer.state and self._pipeline.is_dry_step():
                return loss
            max_norm = self.max_grad_norm if self._max_norm is None else self._max_norm
            self.grad_norm = self._pipeline.step(scaling, max_norm)
            if self._model is None:
                self._pipeline.finish()
        return loss

    @untraced
    def clip_and_step(self, max_norm: float) -> Tensor:
        """Clip the gradients by their global norm and step; see `FlatStateOptimizer.clip_and_step`.

        Args:
            max_norm: the largest norm to leave as it is, above 0; inf to measure only.

        Returns:
            The norm before clipping, as `grad_norm`: inf or NaN if and only if nothing was stepped.
        """
        self._max_norm = checked_norm(type(self).__name__, "max_norm", max_norm)
        try:
            self.step()  # which may have been wrapped by what knows no other arguments
        finally:
            self._max_norm = None
        return torch.zeros(()) if self.grad_norm is None else self.grad_norm

    @property
    def skipped_steps(self) -> int:
        """How often a step that clips has stepped nothing, as a gradient was inf or NaN."""
        return self._pipeline.counts["skipped"]

    def synchronize(self) -> None:
        """Wait until the last step is over, and let the current stream wait for its weights.

        Raises:
            RuntimeError: state of it did not get to the disk.
        """
        self._pipeline.finish()
        self._pipeline.finish_disk()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or fill them with zeros, and discard speculative steps."""
        self._pipeline.forget_gradients()
        with past_torch_function():  # it waits for no weight
            super().zero_grad(set_to_none)

    def stats(self) -> dict[str, Any]:
        """Return what was done so far, and by what.

        Returns:
            `early` buckets whose gradients left before step(), and `late` ones; speculative steps,
            `ahead`, some of them `committed`, others `discarded`; `bytes_out`
            and `bytes_back` between device and host; `step_seconds` in host memory; the number of
            `threads` that step there, and the list of `processors` that these may run on. With
            state on disk, `bytes_read` and `bytes_written` by steps, `bytes_written_per_day`, and
            `read_ahead`, the share of pieces that were there, or on their way, when they were
            wanted; where it is durable, `bytes_committed`, which commits have written beside.
        """
        commits = None if self._disk is None else self._disk.commits
        beside = {} if commits is None else {"bytes_committed": commits.nbytes}
        return self._pipeline.stats() | beside

    def _record(self, recorder: Recorder | None) -> None:
        self._pipeline.record(recorder)

    def close(self) -> None:
        """Wait for the last step, end the thread, and let go of parameters and model.

        The optimizer can be read and saved afterwards, but cannot step.
        """
        try:
            if not self._pipeline.worker.is_foreign():
                self._pipeline.finish()
                self._pipeline.finish_disk()
        finally:
            self._end()

    def __enter__(self) -> "OffloadOptimizer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # State

    @property  # type: ignore[override]  # torch says defaultdict, and uses it as a mapping
    def state(self) -> MutableMapping[Tensor, Any]:
        """The state of each parameter, in host memory. Waits for the last step.

        Tensors of it are to be read anew after a step: a speculative step lies elsewhere.
        """
        self._pipeline.finish()
        return State(self._pipeline)

    @state.setter
    def state(self, state: MutableMapping[Tensor, Any]) -> None:
        if "_pipeline" in self.__dict__:  # else torch begins with none
            own, given = State(self._pipeline), dict(state)  # it may be its own
            own.clear()
            own.update(given)

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters with options of their own; options that are not given have the default.

        Raises:
            ValueError: an option or a parameter is not as it must be; nothing was added.
            TypeError: the group has an argument of the constructor that is no option of groups.
        """
        if isinstance(param_group, dict):
            check_group_keys(self, param_group)
        super().add_param_group(param_group)
        if "_pipeline" not in self.__dict__:
            return
        group = self.param_groups[-1]
        try:
            self._pipeline.finish()
            self._host_optimizer.add_param_group(self._host_group(group, self._pipeline.table))
        except Exception:
            self.param_groups.pop()
            raise
        self._take_options(len(self.param_groups) - 1)
        self._watch()

    def state_dict(self) -> dict[str, Any]:
        """Return options and state as the optimizer class does; tensors are in host memory.

        They are those of the optimizer itself: nothing is copied.
        """
        return portable_state(super().state_dict(), self._host_optimizer.spec.signed)

    def state_dict_in_parts(self) -> tuple[dict[str, Any], dict[tuple[int, str], Parts]]:
        """Return the state dict, with tensors that it would make of others on meta.

        Returns:
            The state dict; and, by number and key, what makes those tensors part by part.
        """
        return portable_state_in_parts(super().state_dict(), self._host_optimizer.spec.signed)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what state_dict of this class, the optimizer class or torch's counterpart returned.

        See `FlatStateOptimizer.load_state_dict`.
        """
        self._pipeline.finish()
        before, after = load_hooks_of(self)
        for hook in before:
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        self._load(state_dict)
        for told in after:
            told(self)

    def _load(self, state_dict: dict[str, Any]) -> None:
        self._pipeline.update_copies()
        self._host_optimizer.load_state_dict(state_dict)
        self._pipeline.follow_buckets()  # who is shown state now may write to it
        self._take_options()

    @untraced
    def commit(self, **extra: Any) -> None:
        """Keep weights, state, options and `extra` of this step on the disk, as a whole.

        Returns when the disk has them. It writes what is not there yet: weights, the rest of the
        model's state dict, and state that rests in memory. Whatever happens until it returns, the
        commit before is still there. Gradients are no part of it: it comes after step(). All
        processes call it, as they resume from one that all have.

        Args:
            extra: numbers, text, tensors, and lists and dicts of these: what else the training goes
                on with. `committed` has them when it resumes.

        Raises:
            RuntimeError: durable is False, or the optimizer closed; a step on disk has failed; or
                another process could not commit.
            TypeError: extra has an object of another kind.
            OSError: the disk refuses. The commit before is still there, or if the very end failed,
                this one: `committed` says which.
        """
        title, groups = type(self).__name__, self.param_groups
        commit(title, self._disk, self._pipeline, groups, self._model, extra)

    def restore_options(self) -> None:
        """Give groups the options with which it was resumed: to make a scheduler changes them."""
        restore_options(self._disk, self.param_groups)

    @property
    def committed(self) -> dict[str, Any] | None:
        """What was given to the last `commit`, also by the process before; None: there is none."""
        commits = None if self._disk is None else self._disk.commits
        return None if commits is None or commits.extra is None else dict(commits.extra)

    def check_given(
        self, state: Mapping[Tensor, dict[str, Any]], options: Sequence[dict[str, Any]]
    ) -> None:
        """See `FlatStateOptimizer.check_given`."""
        self._pipeline.finish()
        self._pipeline.update_copies()
        table = self._pipeline.table
        of_copies = {table[param].copy: entry for param, entry in state.items()}
        self._host_optimizer.check_given(of_copies, options)

    def give_state(self, params: Sequence[Tensor]) -> None:
        """Make state for parameters that have none, as a first step does."""
        self._pipeline.finish()
        self._pipeline.update_copies()
        self._host_optimizer.give_state([self._pipeline.table[param].copy for param in params])
        self._pipeline.follow_buckets()

    def state_intake(self) -> StateIntake:
        """Return what takes state of one parameter after another, of those that have some."""
        self._pipeline.finish()
        return StateIntake(self._host_optimizer, self._pipeline.table)

    def reset_master(self) -> None:
        """Make master weights copies of the parameters; see `FlatStateOptimizer.reset_master`."""
        self._pipeline.finish()
        self._pipeline.update_copies()
        self._host_optimizer.reset_master()

    def __deepcopy__(self, memo: dict[int, Any]) -> "OffloadOptimizer":
        self._pipeline.finish()
        groups, model = copied(self.param_groups, self._model, memo)
        settings = (self.max_grad_norm, model, self._settings)
        made: OffloadOptimizer = rebuilt(type(self), groups, *settings, self.state_dict())
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        self._pipeline.finish()
        settings = (self.max_grad_norm, self._model, self._settings)
        return rebuilt, (type(self), self.param_groups, *settings, self.state_dict())

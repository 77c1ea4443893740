"""What is remembered of a sharded model: its stage, its blocks, and when weights stay gathered."""

import logging
import sys
import weakref
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from deepspeed_ext.torch_internals.compiler import untraced
from deepspeed_ext.torch_internals.dispatch import (
    current_backward,
    is_in_backward,
    queue_callback,
)
from deepspeed_ext.torch_internals.fully_shard import (
    after_backward,
    allow_whole_loads,
    before_reduction,
    forget_step,
    gather_alone,
    groups_of,
    has_all_weights,
    has_partial_sum,
    has_unreduced,
    interruption,
    is_in_forward,
    is_settled,
    is_unreduced,
    keep_for_backward,
    know_dtypes,
    know_whole_parameters,
    settle,
    shards_of,
    show_kept,
    show_shards,
    written,
)
from deepspeed_ext.zero.agreement import check_agreement
from deepspeed_ext.zero.borrowing import name_borrowed
from deepspeed_ext.zero.calls import Backward, Loop, calls_of
from deepspeed_ext.zero.kinds_of_parameters import (
    NAME,
    check_all_sharded,
    is_whole,
    save_pretrained,
)
from deepspeed_ext.zero.step_hook import call_before_steps
from deepspeed_ext.zero.unreduced import Marks

_log = logging.getLogger("deepspeed_ext")


class Sharding:
    """How a model is sharded; `sharding_of` finds it.

    Args:
        model: on which fully_shard was called.
        stage: 0 to 3.
        mesh: that it was sharded on.
        blocks: names of modules with a group of their own, beside the model.
        reduces_unused: unused parameters get gradients of 0.
        param_dtype: that weights are used in; None: their own.
        has_experts: shared out over processes, so that others gather their weights.
    """

    def __init__(
        self,
        model: nn.Module,
        stage: int,
        mesh: DeviceMesh,
        blocks: tuple[str, ...],
        reduces_unused: bool = False,
        param_dtype: torch.dtype | None = None,
        has_experts: bool = False,
    ) -> None:
        self.stage = stage
        self.mesh = mesh
        self.blocks = blocks
        self.param_dtype = param_dtype
        self.shown: list[bool] = []  # of each GatheredParameters around: all are whole, or some
        self._reduces_unused = reduces_unused
        self.has_experts = has_experts
        self._model = weakref.ref(model)
        self._loop: Loop | None = None  # micro-steps that are declared
        self._marks: dict[Any, Marks] = {}  # of groups that had gradients between micro-steps
        self._summed: dict[Any, set[int]] = {}  # ids of shards in sums that replicas wait with
        self._backward = -1  # the number of the last backward
        self._settled = -1  # of the last one of which an error does not count any more
        self._stopped = ""  # what an error has ended, if other processes were not asked yet
        self._known: dict[str, int] | None = None  # ids of parameters by name
        self.saving: Any = None  # a checkpoint that is under way
        self.staging: torch.Tensor | None = None  # memory for its copies, kept for the next one
        self.saves_by: Any = None  # what it talks by, made when it is wanted

    def attach(self) -> None:
        """Stand by the model: whatever a forward leaves gathered, the next one does not trust."""
        model, me = self.model, weakref.ref(self)
        object.__setattr__(model, NAME, self)
        model.register_forward_pre_hook(_before_forward, prepend=True)
        model.register_forward_hook(_after_forward, always_call=True)
        for block in map(model.get_submodule, self.blocks):
            block.register_forward_hook(partial(_after_block, me), always_call=True)
        before_reduction(model, partial(_call, me, "before_reduction"))
        after_backward(model, partial(_call, me, "after_backward"))
        keep_for_backward(model, partial(_call, me, "in_backward"))
        allow_whole_loads(model)
        if hasattr(model, "save_pretrained"):  # of transformers, diffusers, peft
            object.__setattr__(model, "save_pretrained", partial(save_pretrained, self._model))
        # Torch knows no other way to hear of the steps of an optimizer that is made later.
        call_before_steps(self.before_step)

    @property
    def model(self) -> nn.Module:
        """The model."""
        model = self._model()
        assert model is not None
        return model

    def reshard(self) -> None:
        """Let go of all gathered weights: parameters are shards."""
        for group in groups_of(self.model):
            group.reshard()

    def check_idle(self, op: str) -> None:
        """Refuse what needs all parameters to be shards, between micro-steps."""
        if self._loop is not None:
            raise RuntimeError(
                f"{op}: model is between micro-steps of zero.accumulate, expected the end of them"
            )
        self.reshard()

    # Micro-steps

    def begin(self, loop: Loop) -> None:
        """Declare that micro-steps come.

        Raises:
            RuntimeError: others are not over.
        """
        self._end_left_loop()
        if self._loop is not None:
            raise RuntimeError(
                "zero.accumulate: model is between the micro-steps of another accumulate, expected"
                " one at a time; if that loop was left, close() its iterator"
            )
        self.reshard()  # what a forward has left may have been stepped since
        self._loop = loop

    def micro_step(self, loop: Loop, at: int) -> None:
        """Say which micro-step comes.

        Raises:
            RuntimeError: the loop was ended since.
        """
        if self._loop is not loop:
            raise RuntimeError(
                f"zero.accumulate: {loop} was left and its gradients dropped, expected another loop"
            )
        loop.at = at
        self._set_backward(loop, loop.is_last)

    def is_broken(self) -> bool:
        """Tell whether an error has ended a backward, of which parts are left."""
        return not is_in_backward() and self.stopped() == "backward"

    def watch(self, output: object) -> None:
        """Do nothing: fully_shard hears of backwards."""

    def stopped(self) -> str:
        """Tell what an error has ended, a "forward" or "backward", or nothing."""
        return interruption(self.model)

    def settle(self) -> None:
        """Drop what an error has left; gradients stay."""
        settle(self.model)

    def forget(self) -> None:
        """Drop all gradients, and what an error has left."""
        forget_step(self.model)

    def end(self, loop: Loop, is_whole: bool) -> None:
        """End micro-steps; without a backward in the last one there are no gradients.

        Args:
            loop: that was declared; nothing happens if it was ended since.
            is_whole: the loop has come to its end, and was not left.

        Raises:
            RuntimeError: it is whole, and only micro-steps before the last one had a backward.
        """
        if self._loop is not loop or self._model() is None:
            return
        self._loop = None
        self._release_marks()
        self._set_backward(loop, is_last=True)
        # Other processes are asked before the next forward: here they may be elsewhere.
        self._stopped = stopped = self.stopped()
        has_begun = stopped == "backward" or loop.last_backward is not None
        if stopped != "backward" and (loop.is_done or (is_whole and not has_begun)):
            self.settle()
            return
        self.forget()
        if is_whole:
            what = "ended in an error" if stopped == "backward" else "is missing"
            raise RuntimeError(
                f"zero.accumulate: the backward of {loop} {what}, expected one there, which reduces"
                " the gradients of all of them; they are dropped. Leave the loop by break and step"
                " nothing, or let that loss be 0 times what the model returned"
            )
        if not is_whole:
            _log.warning("zero.accumulate: left in %s; its gradients are dropped", loop)

    def _end_left_loop(self) -> None:
        """End micro-steps whose function has ended while something, as a traceback, keeps them."""
        if self._loop is not None and self._loop.is_left():
            self.end(self._loop, is_whole=False)

    def _set_backward(self, loop: Loop, is_last: bool) -> None:
        """Set what the next backward does with gradients and gathered weights."""
        if loop.is_set_to == is_last:
            return  # each call goes through all modules
        loop.is_set_to = is_last
        root: Any = self.model
        root.set_reshard_after_backward(is_last or self.stage == 3)
        root.set_requires_gradient_sync(is_last or self.stage > 1)
        if self.mesh.ndim == 2 and self.stage > 1:  # replicas add up once a step
            root.set_requires_all_reduce(is_last)

    def _collect_marks(self) -> None:
        """See what gradients of earlier micro-steps were dropped, before others join them.

        Raises:
            RuntimeError: replicas have added up some of them with others that were not.
        """
        is_last = self._loop is None or self._loop.is_last
        for marks in self._marks.values():
            if dropped := marks.collect(is_last):
                raise RuntimeError(
                    f"zero.accumulate: gradients of {self._names(dropped)} are dropped and others"
                    " of its block not, expected all or none, as on a mesh of replicas they are one"
                    " sum"
                )

    def before_reduction(self, group: Any) -> None:
        """Refuse to add gradients to a sum of others, which has no places for them."""
        has_sums = self._reduces_unused or (self.mesh.ndim == 2 and self.stage > 1)
        if not has_sums:
            return
        have = {
            id(param.sharded_param)
            for param in group.fsdp_params
            if is_unreduced(param) or (self._reduces_unused and param.sharded_param.requires_grad)
        }
        loop = self._loop
        adds_unused = self._reduces_unused and self.stage < 2
        is_later = loop is not None and loop.last_backward is not None
        is_fixed = has_partial_sum(group) or (adds_unused and is_later)
        if is_fixed and (others := have ^ self._summed[group]):
            raise RuntimeError(
                f"zero.accumulate: {self._names(others)} have gradients in some micro-steps only,"
                " expected all or none, as those of a block are one sum, on a mesh of replicas and"
                " with reduce_unused"
            )
        self._summed[group] = have

    def after_backward(self) -> None:
        """Take note that a backward is over; between micro-steps show shards, and marks."""
        loop = self._loop
        if loop is None:
            return
        loop.last_backward = loop.at
        if not loop.is_done:
            show_shards(self.model)
            for group in groups_of(self.model):
                if group not in self._marks:
                    self._marks[group] = Marks(group)
                self._marks[group].place()

    def _release_marks(self) -> None:
        for marks in self._marks.values():
            marks.release()

    def _names(self, ids: set[int]) -> list[str]:
        return [name for name, known in (self._known or {}).items() if known in ids]

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse a step that would not see the gradients that there are.

        Raises:
            RuntimeError: the optimizer has parameters of this model, and it is inside of a loop or
                left to be reduced.
        """
        model = self._model()  # held here, as others may let go of it now
        if model is None:
            return
        self._end_left_loop()
        loop = self._loop
        if loop is None or loop.is_done:
            params = (param for group in optimizer.param_groups for param in group["params"])
            if any(param.grad is not None for param in params) or not has_unreduced(model):
                return
        shards = set(map(id, shards_of(model)))
        if not any(id(p) in shards for group in optimizer.param_groups for p in group["params"]):
            return
        name = type(optimizer).__name__
        if loop is None or loop.is_done:
            raise RuntimeError(
                f"zero: {name} finds no gradient, as those of the last backward are not reduced,"
                " expected a backward with set_requires_gradient_sync(True) before the step"
            )
        raise RuntimeError(
            f"zero.accumulate: {name} is stepped in {loop}, expected the backward of the last one"
            " before; if that loop was left, close() its iterator"
        )

    # Forwards

    def before_forward(self) -> None:
        """Look whether the model is what was sharded; gather anew what may have been stepped."""
        if is_in_backward() or calls_of(self.model) > 1 or is_whole(self.shown):
            return
        self._end_left_loop()
        self._settle()
        self._settled = self._backward
        must_gather = self._must_gather()
        known = {name: id(p) for name, p in self.model.named_parameters(remove_duplicate=False)}
        know_dtypes(self.model)
        if must_gather:  # asked late, as a GPU has nothing to do between this and the first block
            self.reshard()
        if self._known is None:
            # After the first forward: fully_shard lets parameters be replaced before it.
            check_all_sharded(self.model)
            self._known = known
            if self._reduces_unused or torch.is_inference_mode_enabled():
                know_whole_parameters(self.model)
        elif known != self._known:
            self._refuse_change(known)
        show_kept(self.model)

    def _must_gather(self) -> torch.Tensor | bool:
        """Tell whether what an earlier micro-step has gathered is not what is there now.

        Nothing waits for it before it is read.
        """
        loop = self._loop
        if loop is None or loop.is_done or self.stage == 3 or not torch.is_grad_enabled():
            return True
        if has_all_weights(self.model):
            return not gather_alone(self.model)
        was_written = written(self.model)
        if was_written is None:
            return True
        anywhere = was_written.int()
        for dimension in range(0 if self.has_experts else self.mesh.ndim - 1, self.mesh.ndim):
            dist.all_reduce(anywhere, dist.ReduceOp.MAX, self.mesh.get_group(dimension))
        return anywhere

    def after_forward(self) -> None:
        """Leave no gathered weights behind where no backward will come, else keep them for it."""
        if self.shown or is_in_backward() or calls_of(self.model) > 1:
            return
        if not torch.is_grad_enabled():
            self.reshard()
        else:
            show_shards(self.model)

    def after_block(self, has_failed: bool) -> None:
        """Do the same after a block that was called by itself."""
        if calls_of(self.model) > 0:
            return
        if not is_in_forward(self.model):
            self.after_forward()
        elif has_failed:
            self.after_error()

    def after_error(self) -> None:
        """Show shards after a forward with an error; gradients of backwards before it stay."""
        if self.shown or is_in_backward() or calls_of(self.model) > 1:
            return
        stopped = interruption(self.model)
        if not stopped:  # the error is one that the caller handles
            self.after_forward()
            return
        self._stopped = self._stopped or stopped
        settle(self.model)

    def in_backward(self) -> None:
        """Begin a backward, if it has not begun, and have it known how it ends."""
        number = current_backward()
        if number != self._backward:
            self._backward = number
            self._collect_marks()
            queue_callback(Backward(partial(self._show_after_error, number)))

    def _show_after_error(self, number: int) -> None:
        """Show shards after that backward, unless a forward has come: a GPU's thread is late."""
        if number > self._settled:
            show_shards(self.model)

    def _settle(self) -> None:
        """See that nothing is left of a forward or backward that an error has ended.

        Gradients of backwards before a forward with an error are whole and stay. One that a
        backward has left is not, nor can it be told from those that it was added to.
        """
        stopped = interruption(self.model)
        if stopped or self._stopped:
            self._check_all_stopped(stopped or self._stopped)
            self._stopped = ""
        if stopped == "backward":
            _log.warning("zero: an error ended the step before this one; its gradients are dropped")
            self._release_marks()
            forget_step(self.model)
        elif stopped or not is_settled(self.model):
            settle(self.model)

    def _check_all_stopped(self, stopped: str) -> None:
        """Refuse to go on where others wait for what this process has not sent.

        What one process alone sends now does not fit what the others wait for, which is an error.
        """
        if self.mesh.size() > 1:
            try:
                check_agreement("zero", [f"an error that ended a {stopped}"], self.mesh)
            except (ValueError, RuntimeError) as error:
                raise RuntimeError(
                    f"zero: an error ended a {stopped} here and not in all processes, expected it"
                    " in all or none, as the others wait; let it end the process"
                ) from error

    def _refuse_change(self, known: dict[str, int]) -> None:
        assert self._known is not None
        for name in (*known, *self._known):
            if known.get(name) != self._known.get(name):
                what = "a new one" if name not in self._known else "gone or another one"
                raise RuntimeError(
                    f"zero: parameter {name!r} is {what}, expected the parameters that were"
                    " sharded; change the model before zero.shard"
                )


def sharding_of(op: str, model: nn.Module) -> Sharding:
    """Return how a model is sharded, also if it was compiled since.

    Raises:
        ValueError: zero.shard was not called on this model.
    """
    found = getattr(model, NAME, None)
    if not isinstance(found, Sharding):
        raise ValueError(
            f"{op}: model is a {type(model).__name__} that is not sharded, expected one that"
            " zero.shard was called on"
        )
    return found


@untraced
def _before_forward(model: nn.Module, _: object) -> None:
    sharding_of("zero", model).before_forward()


@untraced
def _after_forward(model: nn.Module, _inputs: object, output: object) -> None:
    sharding = sharding_of("zero", model)
    error = sys.exc_info()[1]  # of this forward, or of what a caller handles
    if output is not None or error is None:
        sharding.after_forward()
    else:
        try:
            name_borrowed(error, model, sharding.blocks)
        finally:
            sharding.after_error()


@untraced
def _after_block(
    sharding: "weakref.ref[Sharding]", block: nn.Module, inputs: object, output: object
) -> None:
    found = sharding()
    if found is not None and found._model() is not None:
        found.after_block(output is None and sys.exc_info()[1] is not None)


def _call(sharding: "weakref.ref[Sharding]", name: str, *arguments: Any) -> None:
    """Call a method, if the model is still there."""
    found = sharding()
    if found is not None:
        getattr(found, name)(*arguments)

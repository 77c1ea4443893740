"""What is remembered of a sharded model: its stage, its blocks, and when weights stay gathered."""

import logging
import sys
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.distributed.device_mesh import DeviceMesh

from deepspeed_ext.dtensors import is_dtensor
from deepspeed_ext.zero.inside import forget_step, groups_of, is_in_backward, was_interrupted

_log = logging.getLogger("deepspeed_ext")
_NAME = "_deepspeed_ext_sharding"


class Sharding:
    """How a model is sharded; `sharding_of` finds it.

    Args:
        model: on which fully_shard was called.
        stage: 0 to 3.
        mesh: that it was sharded on.
        blocks: names of modules with a group of their own, beside the model.
    """

    def __init__(
        self, model: nn.Module, stage: int, mesh: DeviceMesh, blocks: tuple[str, ...]
    ) -> None:
        self.stage = stage
        self.mesh = mesh
        self.blocks = blocks
        self._model = weakref.ref(model)
        self._keeps_gathered = False  # between two declared micro-steps
        self._declared = False
        self._known: dict[str, int] | None = None  # ids of parameters by name
        self.saving: Future[None] | None = None  # a checkpoint that is under way
        self.staging: torch.Tensor | None = None  # memory for its copies, kept for the next one
        self.saves_by: Any = None  # what it talks by, made when it is wanted

    def attach(self) -> None:
        """Stand by the model: whatever a forward leaves gathered, the next one does not trust."""
        model = self.model
        object.__setattr__(model, _NAME, self)
        model.register_forward_pre_hook(_before_forward, prepend=True)
        model.register_forward_hook(_after_forward, always_call=True)

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
        if self._declared:
            raise RuntimeError(
                f"{op}: model is between micro-steps of zero.accumulate, expected the end of them"
            )
        self.reshard()

    @contextmanager
    def declared(self) -> Iterator[None]:
        """Declare that micro-steps come; each says with `micro_step` whether it is the last."""
        if self._declared:
            raise RuntimeError(
                "zero.accumulate: model is between the micro-steps of another accumulate, expected"
                " one at a time"
            )
        self._declared = True
        try:
            yield
        finally:
            self._declared = False
            self.micro_step(is_last=True)
            self.reshard()

    def micro_step(self, is_last: bool) -> None:
        """Set what the next backward does with gradients and gathered weights."""
        root: Any = self.model
        self._keeps_gathered = self._declared and self.stage < 3
        root.set_reshard_after_backward(is_last or self.stage == 3)
        root.set_requires_gradient_sync(is_last or self.stage > 1)
        if self.mesh.ndim == 2 and self.stage > 1:  # replicas add up once a step
            root.set_requires_all_reduce(is_last)

    def drop_gradients(self) -> None:
        """Forget the gradients of micro-steps, those that were not reduced too."""
        forget_step(self.model)

    def before_forward(self) -> None:
        """Look whether the model is what was sharded; gather anew what may have been stepped."""
        if self._keeps_gathered or is_in_backward():
            return
        if was_interrupted(self.model):
            _log.warning("zero: an error ended the step before this one; its gradients are dropped")
            self.drop_gradients()
        self.reshard()
        known = {name: id(p) for name, p in self.model.named_parameters(remove_duplicate=False)}
        if self._known is None:
            # After the first forward: fully_shard lets parameters be replaced before it.
            _check_all_sharded(self.model)
            self._known = known
        elif known != self._known:
            self._refuse_change(known)

    def after_forward(self) -> None:
        """Leave no gathered weights behind where no backward will come."""
        if not torch.is_grad_enabled() and not is_in_backward():
            self.reshard()

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
    found = getattr(model, _NAME, None)
    if not isinstance(found, Sharding):
        raise ValueError(
            f"{op}: model is a {type(model).__name__} that is not sharded, expected one that"
            " zero.shard was called on"
        )
    return found


@_disable_dynamo
def _before_forward(model: nn.Module, _: object) -> None:
    sharding_of("zero", model).before_forward()


@_disable_dynamo
def _after_forward(model: nn.Module, _inputs: object, output: object) -> None:
    sharding = sharding_of("zero", model)
    error = sys.exc_info()[1]  # of this forward, or of what a caller handles
    if output is not None or error is None:
        sharding.after_forward()
    elif "mixed torch.Tensor and DTensor" in str(error) and hasattr(error, "add_note"):
        error.add_note(  # Python 3.11
            "zero: a module has used a parameter of a block that was not gathered, expected the"
            f" block itself to use it; leave its block out of the blocks {list(sharding.blocks)},"
            " and it is gathered with the model"
        )


def _check_all_sharded(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        if not is_dtensor(param):
            raise RuntimeError(
                f"zero: parameter {name!r} is a plain tensor, expected a shard: it came after"
                " zero.shard; change the model before"
            )

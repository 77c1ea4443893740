"""What TRL takes off a model around generation in stage 3: hooks, of which there are none here."""

import weakref
from typing import Any

from torch import Tensor, nn


class ParameterOffload:
    """Stands on an optimizer where DeepSpeed's keeps the hooks of its model.

    Args:
        model: that is sharded.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []
        object.__setattr__(model, "ds_external_parameters", no_parameters)

    def __reduce__(self) -> Any:
        return _of_no_model, ()  # a copy of the optimizer is of no model

    @property
    def module(self) -> nn.Module | None:
        """The model."""
        return self._model()

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """Do nothing: what GatheredParameters shows needs no hooks."""


def _of_no_model() -> None:
    return None


def no_parameters() -> tuple[tuple[str, Tensor], ...]:
    """Return the parameters that were registered as external: none are to be."""
    return ()

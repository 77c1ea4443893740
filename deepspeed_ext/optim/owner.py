"""What the parts of an optimizer know of it: four attributes, so that none of them knows the class.

Checks name parameters and say what is refused, plans put state into buckets: all of them are below
the class that calls them, and are given it as an `Owner`.
"""

from collections.abc import MutableMapping
from typing import Any, Protocol

from torch import Tensor

from deepspeed_ext.optim.formats import StateFormat
from deepspeed_ext.optim.spec import OptimizerSpec


class Owner(Protocol):
    """An optimizer, as far as its parts use it.

    Attributes:
        spec: what its class takes and keeps.
        state_format: how it stores state.
        param_groups: the options and parameters of each group, as in every torch optimizer.
        state: of each parameter, a dict; may be read and written by users.
    """

    @property
    def spec(self) -> OptimizerSpec: ...

    @property
    def state_format(self) -> StateFormat: ...

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...

    @property
    def state(self) -> MutableMapping[Tensor, Any]: ...

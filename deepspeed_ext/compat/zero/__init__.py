"""deepspeed.zero by its names: models built in rows, whole parameters for a while.

- Init: each process keeps its rows of each parameter as a model is built.
- GatheredParameters: whole parameters for a while, of such a model or of a sharded one.
- ZeroParamStatus: what ds_status says.
- know: what GatheredParameters is to find, and ds_* to be on, of a model that initialize sharded.
- register_external_parameter, unregister_external_parameter: nothing is to be registered here.
"""

from torch import Tensor, nn

from deepspeed_ext.compat.zero.gathered import GatheredParameters
from deepspeed_ext.compat.zero.init import Init
from deepspeed_ext.compat.zero.parameters import ZeroParamStatus, know

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "know",
    "register_external_parameter",
    "unregister_external_parameter",
]


def register_external_parameter(module: nn.Module, parameter: Tensor) -> None:
    """Do nothing: parameters of the block that uses them, or of no block, are gathered for it.

    A block that uses one of another block ends in an error that names it, and what to do.
    """


def unregister_external_parameter(module: nn.Module, parameter: Tensor) -> None:
    """Do nothing; see `register_external_parameter`."""

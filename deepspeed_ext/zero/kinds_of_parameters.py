"""Which models are sharded; errors where shards have to be whole, or the other way round."""

import weakref
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from deepspeed_ext.dtensors import is_dtensor

NAME = "_deepspeed_ext_sharding"  # the attribute of a model that says how it is sharded


def is_sharded(module: nn.Module) -> bool:
    """Tell whether a module is sharded, by whomever, or kept whole in the place of such a one."""
    return isinstance(module, FSDPModule) or vars(module).get(NAME) is not None


def check_all_sharded(model: nn.Module) -> None:
    """Refuse a model that has got plain parameters since it was sharded."""
    for name, param in model.named_parameters():
        if not is_dtensor(param):
            raise RuntimeError(
                f"zero: parameter {name!r} is a plain tensor, expected a shard: it came after"
                " zero.shard; change the model before"
            )


def save_pretrained(of: "weakref.ref[nn.Module]", *args: Any, **kwargs: Any) -> Any:
    """Save a model, or a state, that is whole; of shards safetensors says "invalid storage"."""
    model: Any = of()
    state = kwargs.get("state_dict")
    if any(map(is_dtensor, model.parameters() if state is None else state.values())):
        raise RuntimeError(
            f"save_pretrained: {type(model).__name__} has shards, expected whole parameters; call"
            " it inside of zero.GatheredParameters(model), or use zero.save and zero.consolidate"
        )
    return type(model).save_pretrained(model, *args, **kwargs)


def is_whole(shown: list[bool]) -> bool:
    """Tell whether a model that is called has whole parameters in all places of shards.

    Args:
        shown: of each GatheredParameters around, whether all are whole, or some.

    Raises:
        RuntimeError: some are.
    """
    if shown and not shown[-1]:
        raise RuntimeError(
            "zero: the model is called inside of GatheredParameters of some of its parameters,"
            " expected all of them there, or none"
        )
    return bool(shown)

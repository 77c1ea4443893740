"""Experts of transformers' mixtures, which have one tensor of all of them for each matrix."""

from typing import Any

from torch import Tensor, nn

from deepspeed_ext.moe.transformers_models import experts_forward
from deepspeed_ext.patching.recognition import Unlike, class_of, is_of_transformers
from deepspeed_ext.patching.replaced import Replaced, are_ours

_SWITCH = "experts_interface"  # what the forward of a class looks experts up in


class _Experts(Replaced):
    by = ("moe_assign", "grouped_linear", "moe_unpermute")

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.compute = experts_forward()

    def run(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
        weights = self.module.parameters(recurse=False)
        if not are_ours(hidden_states, *weights):
            return self.own(hidden_states, top_k_index, top_k_weights)
        return self.compute(self.module, hidden_states, top_k_index, top_k_weights)


def experts_of(module: nn.Module) -> Replaced | None:
    """Return what replaces experts; None: these are none.

    Raises:
        Unlike: they cannot be switched.
    """
    if not is_of_transformers(module) or not class_of(module).__name__.endswith("Experts"):
        return None
    if "forward" in vars(module):
        raise Unlike("its forward has been replaced by another")
    code = getattr(class_of(module).forward, "__code__", None)
    if code is None or _SWITCH not in code.co_freevars:
        raise Unlike("it is not made with transformers' use_experts_implementation")
    if getattr(module, "_is_expert_parallel", False):
        raise Unlike("it has some of the experts only")
    return _Experts(module)

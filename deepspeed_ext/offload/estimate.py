"""How much memory an offloaded optimizer takes, before anything of it is allocated."""

from deepspeed_ext.dtensors import local
from deepspeed_ext.offload.pipeline import Memory
from deepspeed_ext.op_builder.toolchain import free_memory
from deepspeed_ext.ops.optimizers.state_formats import blocks_of
from deepspeed_ext.optim.base import SlabOptimizer


def memory_for(name: str, inner: SlabOptimizer, memory_budget: int | None) -> Memory:
    """Return how much host memory gradients and steps ahead may take.

    Raises:
        ValueError: the budget does not hold weights and state.
    """
    if memory_budget is None:
        return Memory(spare=free_memory() // 2)
    needed = host_bytes(inner)
    if memory_budget < needed:
        raise ValueError(
            f"{name}: memory_budget is {memory_budget}, expected at least {needed} for weights and"
            " state; compact state takes less: state_dtype=torch.uint8, master='remainder'"
        )
    left = memory_budget - needed
    return Memory(spare=left // 2, gradients=left - left // 2)


def host_bytes(inner: SlabOptimizer) -> int:
    """Return the bytes of weights and state of the parameters that are stepped in host memory."""
    total = 0
    for group in inner.param_groups:
        for param in group["params"]:
            part = local(param)
            dtypes = inner.state_format.dtypes(inner.traits.state_keys(group), part.dtype)
            coded = sum(dtype.itemsize == 1 for dtype in dtypes.values())
            each = part.element_size() + sum(dtype.itemsize for dtype in dtypes.values())
            total += part.numel() * each + 4 * (1 + coded * blocks_of(part.numel()))
    return total

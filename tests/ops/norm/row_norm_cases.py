"""Inputs of rms_norm and layer_norm for the tests, and both of what comes of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from samples import make
from torch import Tensor

from deepspeed_ext import ops

# Around the vectors, the running sums, and what a warp, four, sixteen of them hold in registers.
LENGTHS = [1, 2, 7, 8, 16, 31, 32, 33, 129, 256, 264, 512, 1000, 1024, 1032, 4096, 4100]
# And around what registers, then shared memory, have room for.
LONG = [16384, 16392, 40_001, 106_504, 262_144]
# And around what two, four and eight blocks of a cluster have of a row of 16 bits.
IN_CLUSTERS = [16_385, 24_576, 32_768, 32_776, 49_160, 65_536, 65_544]
IN_CLUSTERS += [131_064, 131_071, 131_072, 131_080]


@dataclass(frozen=True)
class Kind:
    """One of the norms.

    Args:
        name: of the op.
        centered: whether the mean is taken away first.
        vectors: the arguments that are vectors, without a residual.
    """

    name: str
    centered: bool
    vectors: tuple[str, ...]

    @property
    def op(self) -> Callable[..., Any]:
        return getattr(ops, self.name)

    @property
    def ref(self) -> Callable[..., Any]:
        return getattr(ops, f"{self.name}_ref")

    def arguments(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: str = "cpu",
        residual: torch.dtype | None = None,
        vectors: torch.dtype | None = None,
    ) -> dict[str, Tensor]:
        """Return one of each that the op takes; with a residual if that has a dtype."""
        made = {"x": make(shape, dtype, 0, device)}
        names = list(self.vectors)
        if residual is not None:
            made["residual"] = make(shape, residual, 1, device)
            names.append("x_bias")
        for i, name in enumerate(names):
            made[name] = make(shape[-1:], vectors or dtype, 2 + i, device)
        return made


RMS = Kind("rms_norm", False, ("weight",))
LAYER = Kind("layer_norm", True, ("weight", "bias"))
KINDS = [RMS, LAYER]


def results_and_gradients(
    function: Callable[..., Any], arguments: dict[str, Tensor], grads: list[Tensor], **options: Any
) -> dict[str, Tensor]:
    """Return the results, "out" and "sum", and the gradients of all arguments by their names."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in arguments.items()}
    results = function(**leaves, **options)
    results = (results,) if isinstance(results, Tensor) else results
    wanted = [g.to(r.dtype) for g, r in zip(grads, results, strict=False)]
    found = torch.autograd.grad(results, list(leaves.values()), wanted)
    named = zip(("out", "sum"), results, strict=False)
    return {name: result.detach() for name, result in named} | dict(zip(leaves, found, strict=True))

"""Layer norm as Colossal-AI's kernels have it."""

from collections.abc import Sequence
from numbers import Integral

import torch
from torch import Tensor

from deepspeed_ext.ops.norm.layer_norm import FusedLayerNorm


class LayerNorm(FusedLayerNorm):
    """``FusedLayerNorm`` with Colossal-AI's order of arguments, always with weight and bias.

    Under autocast the input is cast to float32, as theirs does, and so is the result.

    Args:
        normalized_shape: the last dimensions, which are normalized as one.
        eps: added to the variance.
        device: of the parameters.
        dtype: of the parameters.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        whole = isinstance(normalized_shape, Integral)  # as those of numpy are
        shape = [int(normalized_shape)] if whole else [*normalized_shape]  # type: ignore
        super().__init__(shape, eps, device=device, dtype=dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Return the input normalized over its last dimensions."""
        is_cast = torch.is_autocast_enabled(input.device.type)
        return super().forward(input.float() if is_cast else input)

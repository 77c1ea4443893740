"""What the tests of norms between linear layers share: layers of every kind, and their bounds."""

from dataclasses import dataclass
from typing import Any

import skinny_linear_cases
import torch
import torch.nn.functional as F
from activation_cases import ROUNDING
from quantized_linear_cases import on_cpu, rounded_rows, weight_of
from samples import BF16, F32, make
from torch import Tensor

from deepspeed_ext.ops import (
    NextNorm,
    PackedWeight,
    Undivided,
    quantized_linear,
    quantized_linear_norm,
    quantized_linear_norm_ref,
    quantized_linear_ref,
    skinny_linear,
    skinny_linear_norm,
    skinny_linear_norm_ref,
    skinny_linear_ref,
    unpack_weight_ref,
)
from deepspeed_ext.ops.linear.norms_around import divided_ref

__all__ = ["BF16", "EVERYTHING", "F32", "LAYERS", "Layer", "layer_of", "norm_of", "undivided"]
EVERYTHING = skinny_linear_cases.EVERYTHING


@dataclass(frozen=True)
class Layer:
    """A linear layer of one kind, whatever its weight is stored as.

    Args:
        kind: None for floats; else format, whether there are offsets, group, and `input_format`.
        weight: of that kind.
    """

    kind: tuple[str, bool, int, str | None] | None
    weight: Any

    def _call(self, plain: Any, packed: Any, x: Any, options: dict[str, Any]) -> Any:
        if self.kind is None:
            return plain(x, self.weight, **options)
        return packed(x, self.weight, **options, input_format=self.kind[3])

    def __call__(self, x: Tensor | Undivided, **options: Any) -> Tensor:
        out: Tensor = self._call(skinny_linear, quantized_linear, x, options)
        return out

    def norm(self, x: Tensor | Undivided, **options: Any) -> tuple[Tensor, Undivided]:
        """Do the same with a norm after it."""
        found: tuple[Tensor, Undivided] = self._call(
            skinny_linear_norm, quantized_linear_norm, x, options
        )
        return found

    def ref(self, x: Tensor | Undivided, **options: Any) -> Tensor:
        """Do it in float64, on the CPU."""
        return Layer(self.kind, self.far_weight())._call(
            skinny_linear_ref, quantized_linear_ref, *_far(x, options)
        )

    def norm_ref(self, x: Tensor | Undivided, **options: Any) -> tuple[Tensor, Undivided]:
        """Do it with a norm after it in float64, on the CPU."""
        return Layer(self.kind, self.far_weight())._call(
            skinny_linear_norm_ref, quantized_linear_norm_ref, *_far(x, options)
        )

    def far_weight(self) -> Any:
        """Return the weight on the CPU."""
        return on_cpu(self.weight) if self.kind is not None else self.weight.cpu()

    def assert_right(self, x: Undivided, options: dict[str, Any]) -> Tensor:
        """Compare with the reference, and return the result.

        Terms are rounded as without a norm, see the cases of either op. The division is by the root
        of a sum of k / 8 positive terms, each rounded in up to k / 256 + 10 additions; the root
        halves what that is off by, and has two roundings of its own, as has the product with it.
        """
        got = self(x, **options)
        wide = {key: v.cpu().double() if isinstance(v, Tensor) else v for key, v in options.items()}
        near = Undivided(x.x.cpu(), x.squares.cpu(), x.eps)
        k = x.x.shape[-1]
        if self.kind is None:
            factors = self.far_weight().double()
            magnitude, roundings = factors.abs(), min(k, 4096) / 16 + k / 4096 + 24
        else:
            if self.kind[3] is not None:  # to the nearest code, of which there may be two
                codes, scale = rounded_rows(near.x)
                near = near._replace(x=codes.double() * scale.double())
            factors, magnitude = unpack_weight_ref(self.far_weight()), _magnitude(self.far_weight())
            roundings = k / 32 + 32
        far = divided_ref(near)
        plain = Layer(self.kind and (*self.kind[:3], None), self.weight)
        want = plain.ref(near, **wide)
        error = ROUNDING * (roundings + k / 256 + 20) * F.linear(far.abs(), magnitude)
        assert got.dtype == x.x.dtype
        sums = F.linear(far, factors, wide["bias"])
        skinny_linear_cases.assert_finished(got, want, sums, error, options)
        return got


def _far(x: Tensor | Undivided, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    def far(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.cpu().double()
        if isinstance(value, (NextNorm, Undivided)):
            return type(value)(*map(far, value))
        return value

    return far(x), {key: far(value) for key, value in options.items()}


def _magnitude(weight: PackedWeight) -> Tensor:
    magnitude = unpack_weight_ref(weight).abs()
    if weight.offsets is not None:
        offsets = weight.offsets[:, : magnitude.shape[0]].t().double().abs()
        magnitude += 2 * offsets.repeat_interleave(weight.group_size, 1)[:, : weight.length]
    return magnitude


# Floats; codes by tensor cores, in any order, and by integers in both ways.
LAYERS: dict[str, tuple[str, bool, int, str | None] | None] = {
    "floats": None,
    "int4": ("int4", False, 32, None),
    "int4 with offsets": ("int4", True, 64, None),
    "int8": ("int8", False, 1 << 20, None),
    "nf4": ("nf4", False, 32, None),
    "int8 in odd groups": ("int8", True, 20, None),
    "int4 by integers": ("int4", True, 32, "int8"),
    "int8 by integers": ("int8", False, 128, "int8"),
    "int8 by integers in odd groups": ("int8", False, 20, "int8"),
}


def layer_of(
    name: str, n: int, k: int, dtype: torch.dtype, device: str = "cpu", seed: int = 1
) -> Layer:
    """Return a layer with random weights, for results of a few units."""
    kind = LAYERS[name]
    if kind is None:
        weight = make((n, k), F32, seed) / max(1, k) ** 0.5
        return Layer(kind, weight.to(device, dtype))
    return Layer(kind, weight_of(n, k, *kind[:2], min(kind[2], max(1, k)), device, seed))


def norm_of(n: int, dtype: torch.dtype, device: str = "cpu") -> NextNorm:
    """Return a norm whose weights are around 1, but for what is added to them."""
    return NextNorm((make((n,), F32, 7) / 4).to(device, dtype), 1e-5, 1.0)


def undivided(rows: int, k: int, dtype: torch.dtype, device: str = "cpu") -> Undivided:
    """Return rows on their way through a norm, some of them large and some small."""
    h = make((rows, k), F32, 5, device) * torch.logspace(-2, 2, rows, device=device)[:, None]
    h, (weight, eps, offset) = h.to(dtype), norm_of(k, dtype, device)
    squares = h.float().square().unflatten(-1, (-1, 8)).sum(-1)
    return Undivided((h.float() * (weight.float() + offset)).to(dtype), squares, eps)


def options_of(
    rows: int,
    n: int,
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    bias: bool = False,
    residual: bool = False,
    activation: str | None = None,
    gated: bool = False,
) -> dict[str, Any]:
    """Return the options of a call with n columns of results."""
    of_weight = 2 * n if gated else n
    return dict(
        bias=make((of_weight,), dtype, 2, device) if bias else None,
        residual=make((rows, n), dtype, 3, device) if residual else None,
        activation=activation,
        gated=gated,
    )

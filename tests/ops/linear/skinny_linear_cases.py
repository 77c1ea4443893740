"""What the tests of skinny_linear share: random arguments, and how far a result may be off."""

from typing import Any

import torch
import torch.nn.functional as F
from activation_cases import ROUNDING, errors_of
from samples import make
from tolerance import assert_within
from torch import Tensor

from deepspeed_ext.ops import skinny_linear, skinny_linear_ref

EVERYTHING: dict[str, Any] = dict(bias=True, residual=True, activation="silu", gated=True)


def arguments(
    rows: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    bias: bool = False,
    residual: bool = False,
    activation: str | None = None,
    gated: bool = False,
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return x, a weight, and the options, for results of a few units."""
    of_weight = (2 * n if gated else n, k)
    options = dict(
        bias=make(of_weight[:1], dtype, 2, device) if bias else None,
        residual=make((rows, n), dtype, 3, device) if residual else None,
        activation=activation,
        gated=gated,
    )
    weight = make(of_weight, torch.float32, 1) / max(1, k) ** 0.5
    return make((rows, k), dtype, 0, device), weight.to(device, dtype), options


def assert_right(x: Tensor, weight: Tensor, options: dict[str, Any]) -> Tensor:
    """Compare with the reference, and return the result.

    Each term goes into a sixteenth of the sum at most and comes to the result by a few additions
    more; tensor cores may round towards 0, by twice as much.
    """
    got = skinny_linear(x, weight, **options)
    wide = {key: v.cpu().double() if isinstance(v, Tensor) else v for key, v in options.items()}
    want = skinny_linear_ref(x.cpu(), weight.cpu(), **wide)
    far, factors = x.cpu().double(), weight.cpu().double()
    roundings = min(x.shape[-1], 4096) / 16 + x.shape[-1] / 4096 + 24
    error = ROUNDING * roundings * F.linear(far.abs(), factors.abs())
    assert got.dtype == x.dtype
    assert_finished(got, want, F.linear(far, factors, wide["bias"]), error, options)
    return got


def assert_finished(
    got: Tensor, want: Tensor, sums: Tensor, error: Tensor, options: dict[str, Any]
) -> None:
    """Compare results whose sums, with their bias, are off by so much without what bias adds."""
    assert got.shape == want.shape and got.is_contiguous()
    error = error + ROUNDING * sums.abs()
    if options["gated"]:
        (sums, up), (error, of_up) = sums.chunk(2, -1), error.chunk(2, -1)
    if options["activation"] is not None:  # whose slope is up to 1.13, of quick gelu 1.1
        value = errors_of(options["activation"], sums)[0]
        activated = skinny_linear_ref(
            sums, torch.eye(sums.shape[-1]), activation=options["activation"]
        )
        error = value + 1.2 * error
        if options["gated"]:
            error = error * (up.abs() + of_up) + activated.abs() * of_up
    assert_within("out", got.cpu(), want, 2 * error + 8 * ROUNDING * (want.abs() + 1e-30))

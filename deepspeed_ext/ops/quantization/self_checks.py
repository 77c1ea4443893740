"""Quick runs of quantize and its kin against their references, for ds_report."""

from typing import Any

import torch

from deepspeed_ext import ops
from deepspeed_ext.ops._compare import compare


def quantizer(device: str) -> None:
    """Run every format, there and back, and in place.

    Raises:
        RuntimeError: a result is not what the reference says.
    """
    x = torch.randn(5, 300, generator=torch.Generator().manual_seed(0))
    for format, symmetric in (
        *(("int8", True), ("int8", False), ("int4", True), ("int4", False)),
        *(("nf4", True), ("fp8_e4m3", True), ("fp8_e5m2", True)),
    ):
        options: dict[str, Any] = dict(format=format, group_size=70)
        made = ops.quantize(x.to(device), **options, symmetric=symmetric)
        floats = ops.dequantize(*made, **options, length=300)
        want = ops.fake_quantize_ref(x, **options, symmetric=symmetric)
        compare(f"quantizer: {format} on {device}", floats, want, 1e-6, of_largest=1e-6)
        fake = ops.fake_quantize(x.to(device), **options, symmetric=symmetric)
        if not torch.equal(fake, floats):
            raise RuntimeError(f"quantizer: fake_quantize differs for {format} on {device}")
        if not format.startswith("fp8"):
            _check_packed(x.to(device), made, options)
    copy = x.to(device)
    want = ops.fake_quantize_ref(x.view(3, 500)).view(5, 300)
    compare(f"quantizer: in place on {device}", ops.ds_quantizer(copy, 3), want, 1e-6, 1e-6)


def _check_packed(x: torch.Tensor, made: ops.Quantized, options: dict[str, Any]) -> None:
    want = ops.pack_weight(*made, **options, length=x.shape[1])
    weight = want._replace(
        codes=torch.empty_like(want.codes),
        scales=torch.empty_like(want.scales),
        offsets=None if want.offsets is None else torch.empty_like(want.offsets),
    )
    ops.quantize_packed_(x, weight)
    for got, expected in zip(weight[:3], want[:3], strict=True):
        if got is not None and expected is not None and not torch.equal(got, expected):
            raise RuntimeError(
                f"quantizer: quantize_packed_ differs for {options['format']} on {x.device.type}"
            )

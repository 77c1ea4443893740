"""Many rows of experts as CUDA multiplies them, in blocks of one expert each, on the CPU."""

from typing import Any

import pytest
import torch
from grouped_rows_cases import tokens_of
from quantized_linear_cases import WEIGHTS, weight_of
from samples import make

from deepspeed_ext.ops.linear import grouped_products, grouped_quantized_products
from deepspeed_ext.ops.quantization.formats import number_of

SIZES = [(1, 1, 1, 33), (40, 2, 3, 5), (300, 2, 7, 20), (65, 3, 40, 64)]  # tokens, k, experts, n


@pytest.mark.parametrize("workspace", [1, 1 << 20])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("size", SIZES)
def test_codes(
    size: tuple[int, ...],
    kind: tuple[str, bool],
    transposed: bool,
    workspace: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Floats are those of each block's expert, however few blocks there is room for."""
    monkeypatch.setattr(grouped_products, "_WORKSPACE", workspace)
    tokens, k, experts, n = size
    length = 72
    weight = weight_of(experts * n, length, *kind, 32)
    given = tokens_of(tokens, k, experts, n if transposed else length, torch.float32)
    x = torch.cat([given.rows, make((3, given.rows.shape[1]), torch.float32, 1)])  # 3 of nobody
    bias = None if transposed else make((experts, n), torch.float32, 2)
    call: dict[str, Any] = dict(
        format=number_of("", weight.format), group_size=weight.group_size, length=weight.length
    )
    found, want = (
        products(x, *weight[:3], given.offsets, bias, **call, transposed=transposed)
        for products in (
            grouped_quantized_products.products_cuda,
            grouped_quantized_products.products_cpu,
        )
    )
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-4)
    assert not found[int(given.offsets[-1]) :].any()

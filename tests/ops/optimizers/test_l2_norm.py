"""squared_norms and l2_norm: the right numbers, for every dtype, size, layout and magnitude."""

import pytest
import torch
from l2_norm_cases import CHUNK, DTYPES, SCALES, make
from torch import Tensor

from deepspeed_ext.ops import l2_norm, l2_norm_ref, squared_norms, squared_norms_ref

# A square and its sums with up to seven others are rounded to float32 three or four times.
BOUND = 2.01 * torch.finfo(torch.float32).eps
BAD = [float("inf"), -float("inf"), float("nan")]


def assert_squares(got: Tensor, tensors: list[Tensor], bound: float = BOUND) -> None:
    want = squared_norms_ref([tensor.cpu() for tensor in tensors])
    assert got.dtype == torch.float64 and got.shape == want.shape
    torch.testing.assert_close(got.cpu(), want, rtol=bound, atol=0, equal_nan=True)


@pytest.mark.parametrize("shift", [0, 1, 3])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values(dtype: torch.dtype, scale: str, shift: int, device: str) -> None:
    """Also where the squares of floats overflow or vanish; float16 has infinity or 0 there."""
    tensors = make(dtype, SCALES[scale], device, shift)
    before = [tensor.clone() for tensor in tensors]
    assert_squares(squared_norms(tensors), tensors)
    for tensor, value in zip(tensors, before, strict=True):
        torch.testing.assert_close(tensor, value, rtol=0, atol=0)


def test_mixed_dtypes_in_one_call(device: str) -> None:
    tensors = [tensor for dtype in DTYPES for tensor in make(dtype, device=device)[::3]]
    assert_squares(squared_norms(tensors), tensors)
    assert_squares(squared_norms(tensors[::-1]), tensors[::-1])


def test_more_tensors_than_a_launch_takes(device: str) -> None:
    tensors = [torch.full((i % 5,), float(i), device=device) for i in range(9001)]
    assert_squares(squared_norms(tensors), tensors)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_extremes_beside_ordinary_values(dtype: torch.dtype, device: str) -> None:
    for value in (3e38, 1e-25):
        tensor = torch.zeros(3 * CHUNK, dtype=dtype, device=device)
        tensor[CHUNK + 5] = value
        assert_squares(squared_norms([tensor]), [tensor])
        tensor[::7] = 1.5
        assert_squares(squared_norms([tensor]), [tensor])
    largest = torch.full((CHUNK,), torch.finfo(dtype).max, dtype=dtype, device=device)
    assert_squares(squared_norms([largest, -largest]), [largest, -largest], 1e-12)


@pytest.mark.parametrize("bad", BAD, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_not_finite_anywhere(dtype: torch.dtype, bad: float, device: str) -> None:
    for n, at in ((1, 0), (17, 16), (2049, 2048), (CHUNK + 9, 127), (CHUNK + 9, CHUNK + 8)):
        for rest in (0.0, 1.0):
            tensor = torch.full((n,), rest, dtype=dtype, device=device)
            clean = tensor.clone()
            tensor[at] = bad
            assert squared_norms([clean, tensor]).isfinite().tolist() == [True, False]
            norm, per_tensor, found_inf = l2_norm([clean, tensor])
            assert found_inf.item() == 1 and not norm.isfinite()
            assert per_tensor.isfinite().tolist() == [True, False]
            assert l2_norm([clean]).found_inf.item() == 0


def test_l2_norm(device: str) -> None:
    tensors = [tensor for dtype in DTYPES for tensor in make(dtype, device=device)]
    got, want = l2_norm(tensors), l2_norm_ref([tensor.cpu() for tensor in tensors])
    for name in got._fields:
        value = getattr(got, name)
        assert value.dtype == torch.float32 and value.device == tensors[0].device
        torch.testing.assert_close(value.cpu().double(), getattr(want, name), rtol=BOUND, atol=0)


def test_a_norm_beyond_float32_is_no_inf_of_the_input(device: str) -> None:
    norm, _, found_inf = l2_norm([torch.full((4,), 3e38, device=device)])
    assert norm.item() == float("inf") and found_inf.item() == 0


def test_any_layout(device: str) -> None:
    """Dense ones are read as they lie; expanded, sliced and overlapping ones count every index."""
    base = torch.randn(6, 10, 7, device=device)
    tensors = [
        base.permute(2, 0, 1),
        base.reshape(6, 10, 7, 1).to(memory_format=torch.channels_last),
        base[:, ::2],
        base[..., 3:5],
        base[0, 0, :1].expand(50_000),
        base[:1].expand(5, 10, 7),
        base.flatten().as_strided((100, 50), (2, 1)),
        base[2, 3, 4],
        base[:0],
        base.half()[:, 1:],
    ]
    assert_squares(squared_norms(tensors), tensors)


def test_nothing_to_add(device: str) -> None:
    empty = squared_norms([])
    assert empty.shape == (0,) and empty.dtype == torch.float64
    norm, per_tensor, found_inf = l2_norm([])
    assert norm.item() == 0 and per_tensor.shape == (0,) and found_inf.item() == 0
    tensors = [torch.empty(0, device=device), torch.empty(3, 0, device=device)]
    assert squared_norms(tensors).tolist() == [0, 0]
    assert squared_norms_ref([]).shape == (0,)

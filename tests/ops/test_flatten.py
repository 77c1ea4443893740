"""flatten and unflatten: there and back, views, and what they refuse."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from deepspeed_ext.ops import flatten, unflatten

SHAPES = [(2, 3), (), (0,), (4, 0), (1,), (3, 1, 2)]


def tensors(device: str = "cpu") -> list[Tensor]:
    made = [torch.randn(shape, device=device) for shape in SHAPES]
    return [*made, torch.randn(4, 6, device=device).t(), torch.randn(5, device=device).expand(2, 5)]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool], ids=str
)
def test_there_and_back(dtype: torch.dtype, device: str) -> None:
    given = [tensor.to(dtype) for tensor in tensors(device)]
    flat = flatten(given)
    assert flat.dtype == dtype and flat.device == given[0].device
    assert flat.tolist() == [element for tensor in given for element in tensor.flatten().tolist()]
    assert all(map(torch.equal, unflatten(flat, given), given))


def test_flatten_is_new_memory_and_unflatten_are_views() -> None:
    for given in ([torch.zeros(4)], [torch.zeros(2), torch.zeros(3, 2)]):
        flat = flatten(given)
        flat += 1
        assert all(tensor.eq(0).all() for tensor in given)
        views = unflatten(flat, given)
        for view in views:
            view += 1
        assert flat.eq(2).all() and all(view.is_contiguous() for view in views)


def test_only_shapes_count_to_unflatten() -> None:
    like = [torch.empty(2, 3, dtype=torch.int8), torch.empty(4, device="meta")]
    views = unflatten(torch.arange(10), like)
    assert [view.tolist() for view in views] == [[[0, 1, 2], [3, 4, 5]], [6, 7, 8, 9]]


def test_of_nothing() -> None:
    flat = flatten([])
    assert flat.shape == (0,) and flat.dtype == torch.float32
    assert unflatten(flat, []) == []
    assert unflatten(flat, [torch.ones(0, 3)])[0].shape == (0, 3)


def test_gradients_flow_back() -> None:
    given = [torch.ones(2, requires_grad=True), torch.ones(1, 2, requires_grad=True)]
    (unflatten(flatten(given), given)[1] * torch.tensor([3.0, 4.0])).sum().backward()
    assert given[0].grad is not None and given[0].grad.tolist() == [0, 0]
    assert given[1].grad is not None and given[1].grad.tolist() == [[3, 4]]


REFUSED: dict[str, Callable[[], object]] = {
    "flatten: tensors[1] is bfloat16, expected float32":
        lambda: flatten([torch.ones(2), torch.ones(2).bfloat16()]),
    "flatten: tensors[2] is on meta, expected cpu":
        lambda: flatten([*torch.ones(2, 2), torch.ones(2, device="meta")]),
    "unflatten: flat has shape [2, 2], expected one dimension":
        lambda: unflatten(torch.ones(2, 2), [torch.ones(4)]),
    "unflatten: flat has 5 elements, expected 7":
        lambda: unflatten(torch.ones(5), [torch.ones(2, 3), torch.ones(())]),
    "unflatten: flat has 1 elements, expected 0": lambda: unflatten(torch.ones(1), []),
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_refuses(text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        REFUSED[text]()

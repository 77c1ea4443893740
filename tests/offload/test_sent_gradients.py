"""What stands for a gradient in host memory: what is done to it is noted, or refused."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed_ext.offload.sent_gradients import SentGradient, placeholder, sent

BF16 = torch.bfloat16


def gradient(param: Tensor | None = None) -> SentGradient:
    made = placeholder(torch.rand(2, 3) if param is None else param, object())
    assert isinstance(made, SentGradient) and not made.is_touched()
    return made


def added(grad: Tensor) -> Tensor:
    found = sent(grad)
    assert found is not None and found.is_touched()
    value = found.added()
    assert value is not None and value.shape == grad.shape
    return value


@pytest.mark.parametrize(
    "other", [torch.arange(6.0).view(2, 3), torch.arange(3.0), torch.tensor(2.0), 4], ids=str
)
@pytest.mark.parametrize("alpha", [1, 3])
def test_what_is_added_in_any_shape(alpha: int, other: Any) -> None:
    """As torch does it, it is spread over the gradient, the first time as well."""
    grad = gradient()
    grad.add_(other, alpha=alpha)
    assert torch.equal(added(grad), torch.zeros(2, 3).add_(other, alpha=alpha))
    grad.add_(torch.ones(2, 3))
    assert torch.equal(added(grad), torch.ones(2, 3).add_(other, alpha=alpha))


@pytest.mark.parametrize("is_first", [True, False])
def test_sums_with_another_gradient(is_first: bool) -> None:
    """A backward that makes a graph adds either to the other."""
    grad, other = gradient(), torch.rand(2, 3)
    whole = grad + other if is_first else other + grad
    assert sent(whole) is not None and sent(whole).since is grad.since
    assert torch.equal(added(grad), other)
    if is_first:
        torch.add(grad, other, alpha=2)
        assert torch.equal(added(grad), other.clone().add_(other, alpha=2))


REFUSED = {  # who would need them, and how
    "twice what has left": ("add", lambda grad: torch.add(torch.ones(2, 3), grad, alpha=2)),
    "added to itself": ("add_", lambda grad: grad.add_(grad)),
    "added to one of another": ("add_", lambda grad: gradient().add_(grad)),
    "a copy of another": ("copy_", lambda grad: grad.copy_(gradient())),
    "copied to one of another": ("copy_", lambda grad: gradient().copy_(grad)),
    "added to a plain one": ("add_", lambda grad: torch.ones(2, 3).add_(grad)),
    "copied to a plain one": ("copy_", lambda grad: torch.ones(2, 3).copy_(grad)),
}


@pytest.mark.parametrize("op, read", REFUSED.values(), ids=REFUSED)
def test_what_would_need_its_values_is_refused(op: str, read: Any) -> None:
    grad = gradient()
    text = rf"^OffloadOptimizer: p\.grad is in host memory, .*, expected one that {op} can read;"
    with pytest.raises(RuntimeError, match=text):
        read(grad)
    assert not grad.is_touched()


def test_copies_of_a_parameter_have_no_gradient() -> None:
    """The sum is of the parameter itself."""
    param = torch.nn.Parameter(torch.rand(2, 3))
    param.grad = gradient(param)
    assert copy.deepcopy(param.grad) is None and copy.deepcopy([param.grad]) == [None]


LAYOUTS = {
    "rows": torch.rand(2, 3),
    "columns": torch.rand(3, 2).t(),
    "a part": torch.rand(4, 6)[::2, ::2],
    "channels last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("param", LAYOUTS.values(), ids=LAYOUTS)
def test_it_lies_as_its_parameter_does(param: Tensor) -> None:
    """Autograd looks at strides before it adds."""
    grad = gradient(param)
    for made in (grad, grad.detach(), grad.zeros()):
        assert made.stride() == param.stride() and made.shape == param.shape


@pytest.mark.parametrize(
    "how",
    [
        {"dtype": BF16},
        {"device": "meta"},
        {"device": "meta", "dtype": BF16},
        {"memory_format": torch.channels_last},
        {"memory_format": torch.channels_last, "dtype": BF16},
    ],
    ids=str,
)
def test_it_follows_a_model_that_moves(how: dict[str, Any]) -> None:
    """What is added then goes to the same sum."""
    param = torch.rand(2, 3, 4, 5)
    grad, moved = gradient(param), param.to(**how)
    other = grad.to(**how)
    assert isinstance(other, SentGradient) and other.since is grad.since
    assert (other.dtype, other.device) == (moved.dtype, moved.device)
    assert other.stride() == moved.stride()

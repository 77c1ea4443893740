"""define: what an op promises to autograd and to torch, before any native code is there."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed_ext.ops import _library, squared_norms
from deepspeed_ext.ops._library import define


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the libraries that were asked for; asking for one registers kernels in Python."""
    asked: list[str] = []
    with torch.library._scoped_library("deepspeed_ext", "FRAGMENT") as kernels:

        def load(name: str) -> None:
            asked.append(name)
            op, _, function = name.partition("=")
            kernels.impl(op, eval(function), "CPU")

        monkeypatch.setattr(_library, "load", load)
        yield asked


def test_keyword_only_arguments_overloads_and_several_results(loaded: list[str]) -> None:
    """The call that loads the library, those after it, and those that leave out a default."""
    library = (
        "test_define.two=lambda a, b=None, *, factor=2.0:"
        " (a * factor, a.clone() if b is None else a + b)"
    )
    op = define(
        "test_define.two(Tensor a, Tensor? b=None, *, float factor=2.0) -> (Tensor, Tensor)",
        {"cpu": library},
        fake=lambda a, b=None, *, factor=2.0: (torch.empty_like(a), torch.empty_like(a)),
    )
    a, b = torch.ones(3), torch.full((3,), 5.0)
    for _ in range(2):
        assert [t[0].item() for t in op(a, b, factor=3.0)] == [3, 6]
    assert [t[0].item() for t in op(a)] == [2, 1]
    assert loaded == [library]
    assert op is torch.ops.deepspeed_ext.test_define.two
    for arguments, options in (((a, b), {"factor": 3.0}), ((a,), {})):
        checked = torch.library.opcheck(op, arguments, options)
        assert set(checked.values()) == {"SUCCESS"}


def test_an_op_without_backward_says_so_when_a_gradient_is_wanted(loaded: list[str]) -> None:
    op = define(
        "test_no_gradient(Tensor a, Tensor b) -> Tensor",
        {"cpu": "test_no_gradient=lambda a, b: a + b"},
        fake=lambda a, b: torch.empty_like(a),
    )
    a, b = torch.ones(3, requires_grad=True), torch.ones(3)
    assert not op(a.detach(), b).requires_grad
    with torch.no_grad():
        assert not op(a, b).requires_grad
    for name, result in (("a", op(a, b)), ("b", op(b, a))):
        assert result.tolist() == [2, 2, 2]
        with pytest.raises(RuntimeError) as raised:
            (result + a).sum().backward()
        assert str(raised.value) == (
            f"test_no_gradient: the gradient of {name} is wanted, expected no use of it, as the op"
            " has none;"
            " call the op under torch.no_grad(), or detach what it takes"
        )


def test_a_gradient_never_vanishes_from_an_op_over_a_list() -> None:
    tensor = torch.ones(4, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"^squared_norms: the gradient of tensors\[1\] is "):
        squared_norms([tensor.detach(), tensor * 1.0]).sum().backward()
    assert not squared_norms([tensor.detach()]).requires_grad


def test_a_backward_is_told_what_nothing_depends_on(loaded: list[str]) -> None:
    seen: list[tuple[Tensor | None, ...]] = []

    def backward(ctx: Any, *grads: Tensor | None) -> Tensor | None:
        seen.append(grads)
        assert ctx.factor == 3.0
        return grads[0] if grads[1] is None else grads[1] * ctx.factor

    def save(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
        ctx.factor = keyword_only_inputs["factor"]

    op = define(
        "test_backward(Tensor a, *, float factor) -> (Tensor, Tensor)",
        {"cpu": "test_backward=lambda a, *, factor: (a.clone(), a * factor)"},
        fake=lambda a, *, factor: (torch.empty_like(a), torch.empty_like(a)),
        backward=backward,
        setup_context=save,
    )
    a = torch.ones(3, requires_grad=True)
    op(a, factor=3.0)[1].sum().backward()
    assert a.grad is not None and a.grad.tolist() == [3, 3, 3]
    assert seen[0][0] is None


def test_a_fake_checks_devices_whatever_the_op_says() -> None:
    define(
        "test_devices(Tensor a, Tensor[] b, Tensor? host=None) -> Tensor",
        {"cpu": "none"},
        fake=lambda a, b, host=None: torch.empty_like(a),
        on_host=("host",),
    )
    meta, cpu = torch.ones(3, device="meta"), torch.ones(3)
    op = torch.ops.deepspeed_ext.test_devices
    assert op(meta, [meta], cpu).is_meta
    with pytest.raises(ValueError, match=r"^test_devices: b\[1\] is on cpu, expected meta$"):
        op(meta, [meta, cpu])


def test_results_need_a_fake() -> None:
    text = "test_no_fake: fake is None, expected a function, as it returns something"
    with pytest.raises(TypeError, match=f"^{text}$"):
        define("test_no_fake(Tensor a) -> Tensor", {"cpu": "none"})
    assert not hasattr(torch.ops.deepspeed_ext, "test_no_fake")


def test_a_kernel_in_python() -> None:
    """Asks for no library, whatever the call is; gradients and refusals are those of any op."""
    op = define(
        "test_define_python(Tensor a, Tensor b) -> Tensor",
        {"cpu": lambda a, b: a + 2 * b},
        fake=lambda a, b: torch.empty_like(a),
        backward=lambda ctx, grad: (grad, 2 * grad),
    )
    a, b = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    assert torch.equal(op(a, b), torch.full((3,), 3.0))
    assert set(torch.library.opcheck(op, (a, b)).values()) == {"SUCCESS"}
    text = r"^test_define_python: a is torch.sparse_coo, expected torch.strided$"
    with pytest.raises(ValueError, match=text):
        op(a.detach().to_sparse(), b.detach())

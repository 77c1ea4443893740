"""Quick runs of each op and its gradient against the reference, for ds_report."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext import ops
from deepspeed_ext.ops._activations import NAMES
from deepspeed_ext.ops._compare import compare

Function = Callable[..., Tensor | tuple[Tensor, ...]]


def rms_norm(device: str) -> None:
    """Run `_check` on rms_norm with everything that it takes, and with nothing but a weight."""
    _check_norm("rms_norm", device, ops.rms_norm, ops.rms_norm_ref, 1)


def layer_norm(device: str) -> None:
    """Do the same for layer_norm."""
    _check_norm("layer_norm", device, ops.layer_norm, ops.layer_norm_ref, 2)


def _check_norm(name: str, device: str, op: Function, reference: Function, vectors: int) -> None:
    def whole(function: Function) -> Function:
        def run(x: Tensor, residual: Tensor, x_bias: Tensor, *others: Tensor) -> Any:
            options = dict(residual=residual, x_bias=x_bias, weight_offset=1.0)
            return function(x, *others, **options)

        return run

    def plain(function: Function) -> Function:  # with x added, as little of its gradient is left
        return lambda x, *others: x + function(x, *others)

    shapes = [(300,)] * vectors
    _check(name, device, whole(op), whole(reference), [(5, 300), (5, 300), (300,), *shapes])
    _check(name, device, plain(op), plain(reference), [(5, 300), *shapes])


def bias_activation(device: str) -> None:
    """Run `_check` on every activation with a bias, and on one without."""
    for activation in NAMES:
        op = partial(ops.bias_activation, activation=activation)
        reference = partial(ops.bias_activation_ref, activation=activation)
        _check("bias_activation", device, op, reference, [(5, 300), (300,)])
    _check("bias_activation", device, ops.bias_activation, ops.bias_activation_ref, [(5, 300)])


def gated_activation(device: str) -> None:
    """Run `_check` on both forms of gated_activation, and on every activation."""
    for activation in NAMES:
        op = partial(ops.gated_activation, activation=activation)
        reference = partial(ops.gated_activation_ref, activation=activation)
        for shapes in ([(5, 300), (5, 300)], [(5, 300)]):
            _check("gated_activation", device, op, reference, shapes)


def nhwc_bias_add(device: str) -> None:
    """Run `_check` on nhwc_bias_add with everything that it takes."""
    shapes = [(5, 300), (300,)] * 2
    _check("nhwc_bias_add", device, ops.nhwc_bias_add, ops.nhwc_bias_add_ref, shapes)


def rope(device: str) -> None:
    """Run `_check` on both layouts of pairs, at positions that float32 cannot turn to."""
    positions = torch.tensor([-3, 0, 1_000_000, 1_000_003], device=device)
    frequencies = ops.rope_frequencies(40)
    for interleaved in (False, True):
        options = dict(interleaved=interleaved, scale=0.5)

        def op(q: Tensor, k: Tensor, options: dict[str, Any] = options) -> tuple[Tensor, ...]:
            return ops.rope(q, k, positions, frequencies.to(device), **options)

        def reference(
            q: Tensor, k: Tensor, options: dict[str, Any] = options
        ) -> Tensor | tuple[Tensor, ...]:
            return ops.rope_ref(q, k, positions.cpu(), frequencies, **options)

        _check("rope", device, op, reference, [(2, 4, 3, 48), (2, 4, 1, 48)])


def softmax(device: str) -> None:
    """Run `_check` on softmax with an additive mask, causality, a cap and slopes."""

    def checked(function: Function) -> Function:
        def run(x: Tensor, mask: Tensor) -> Tensor | tuple[Tensor, ...]:
            slopes = torch.tensor([0.5, 0.25], device=x.device)
            return function(x, mask, alibi_slopes=slopes, causal=True, softcap=3.0)

        return run

    shapes = [(2, 7, 40), (7, 40)]
    _check("softmax", device, checked(ops.softmax), checked(ops.softmax_ref), shapes)


def skinny_linear(device: str) -> None:
    """Run `_check` on skinny_linear with everything that it takes, and with nothing."""

    def gated(function: Function) -> Function:
        def run(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Any:
            options = dict(activation="silu", gated=True, residual=residual)
            return function(x, weight / 50, bias, **options)

        return run

    op, reference = ops.skinny_linear, ops.skinny_linear_ref
    shapes = [(5, 300), (80, 300), (80,), (5, 40)]
    _check("skinny_linear", device, gated(op), gated(reference), shapes)
    _check("skinny_linear", device, op, reference, [(19, 77), (33, 77)])
    _check_norm_between(device)


def _check_norm_between(device: str) -> None:
    """Compare a norm that two layers do between them with the same in float64.

    Raises:
        RuntimeError: a result is not what the reference says.
        BuildError: the native library could not be built or loaded.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 300), (40, 300), (19, 40), (40,)]
    values = [torch.rand(shape, generator=generator) + 0.5 for shape in shapes]

    def results(
        first: Callable[..., Any], second: Callable[..., Tensor], values: list[Tensor]
    ) -> Tensor:
        x, wide, narrow, weight = values
        out, normed = first(x, wide, norm=ops.NextNorm(weight))
        return torch.cat([out, second(normed, narrow)], -1)

    got = results(ops.skinny_linear_norm, ops.skinny_linear, [v.to(device) for v in values])
    want = results(ops.skinny_linear_norm_ref, ops.skinny_linear_ref, values)
    compare(f"skinny_linear_norm: result on {device}", got, want, 1e-5)


def cross_entropy(device: str) -> None:
    """Run `_check` on cross_entropy, with inplace and without."""

    def checked(function: Function, inplace: bool) -> Function:
        def run(logits: Tensor) -> Tensor | tuple[Tensor, ...]:
            target = torch.tensor([3, -100, 0, 299, 7], device=logits.device)
            options = {"label_smoothing": 0.1, "z_loss": 0.01, "inplace": inplace}
            return function(logits * 2, target, **options)

        return run

    for inplace in (False, True):
        op, reference = (checked(f, inplace) for f in (ops.cross_entropy, ops.cross_entropy_ref))
        _check("cross_entropy", device, op, reference, [(5, 300)])


def _check(
    name: str,
    device: str,
    op: Function,
    reference: Function,
    shapes: Sequence[tuple[int, ...]],
) -> None:
    """Compare all results and gradients of an op with those of its reference, in float32.

    Args:
        name: what the error calls it.
        device: "cpu" or "cuda".
        op: takes a tensor of each shape.
        reference: the same in float64.
        shapes: of the arguments.

    Raises:
        RuntimeError: a result is not what the reference says.
        BuildError: the native library could not be built or loaded.
    """
    generator = torch.Generator().manual_seed(0)
    values = [torch.rand(shape, generator=generator) + 0.5 for shape in shapes]
    got = _results_and_gradients(op, [value.to(device) for value in values])
    want = _results_and_gradients(reference, [value.double() for value in values])
    eps = torch.finfo(torch.float32).eps
    for i, (value, expected) in enumerate(zip(got, want, strict=True)):
        what = f"{name}: {i} of results and gradients on {device}"
        compare(what, value, expected, 100 * eps, of_largest=1000 * eps)  # as much cancels


def _results_and_gradients(function: Function, values: list[Tensor]) -> list[Tensor]:
    leaves = [value.requires_grad_() for value in values]
    with torch.enable_grad():
        outputs = function(*leaves)
    results = (outputs,) if isinstance(outputs, Tensor) else outputs
    grads = [
        torch.linspace(1, 2, result.numel(), dtype=torch.float64).view(result.shape).to(result)
        for result in results
    ]
    found = torch.autograd.grad(results, leaves, grads)
    return [tensor.detach() for tensor in (*results, *found)]

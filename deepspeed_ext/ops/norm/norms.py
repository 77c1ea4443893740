"""What rms_norm and layer_norm share: ops in torch's registry, parts of references and modules."""

from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.ops._library import check_numbers, define

_OPTIONS = "*, float eps, float weight_offset"


class Norm:
    """The ops of one norm; a call of it calls the one that does what the arguments ask for.

    Args:
        name: "rms_norm" or "layer_norm".

    Attributes:
        op: without a residual.
        backward_op: returns all gradients.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        libraries = {"cpu": f"cpu_{name}", "cuda": f"fused_{name}"}
        self.backward_op = define(
            f"{name}_backward(Tensor grad_out, Tensor? grad_sum, Tensor x, Tensor? weight,"
            f" Tensor? bias, Tensor? x_bias, {_OPTIONS}, bool needs_grad_weight)"
            " -> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias, Tensor grad_x_bias)",
            libraries,
            fake=_backward_fake,
        )
        self.op = define(
            f"{name}(Tensor x, Tensor? weight, Tensor? bias, {_OPTIONS}) -> Tensor",
            libraries,
            fake=lambda x, weight, bias, **options: x.new_empty(x.shape),
            backward=self._backward,
            setup_context=self._save,
        )
        self._residual_op = define(
            f"{name}.residual(Tensor x, Tensor residual, Tensor? x_bias, Tensor? weight,"
            f" Tensor? bias, {_OPTIONS}, bool needs_sum) -> (Tensor out, Tensor sum)",
            libraries,
            fake=_residual_fake,
            backward=self._backward_of_sum,
            setup_context=self._save_sum,
        )

    def __call__(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        x_bias: Tensor | None,
        return_sum: bool,
        options: dict[str, float],
    ) -> Any:
        """Return the normed tensor; with a residual and `return_sum` also what was normalized."""
        if type(options["eps"]) is not float or type(options["weight_offset"]) is not float:
            check_numbers(self._name, **options)
        if residual is None:
            if x_bias is not None:
                raise ValueError(f"{self._name}: x_bias is given, expected a residual beside it")
            return self.op(x, weight, bias, **options)
        inputs = (x, residual, x_bias, weight, bias)
        needs_sum = return_sum or (
            torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
        )
        both = self._residual_op(*inputs, **options, needs_sum=needs_sum)
        return both if return_sum else both[0]

    def _save(
        self, ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: Tensor
    ) -> None:
        ctx.save_for_backward(*inputs)
        ctx.options = dict(keyword_only_inputs)

    def _backward(self, ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        _, needs_weight, needs_bias = ctx.needs_input_grad
        grads = self._gradients(ctx, grad_out, None, x, (weight, bias, None), needs_weight)
        return grads[0], grads[1] if needs_weight else None, grads[2] if needs_bias else None

    def _save_sum(
        self,
        ctx: Any,
        inputs: tuple[Any, ...],
        keyword_only_inputs: Any,
        output: tuple[Tensor, Tensor],
    ) -> None:
        x, _, x_bias, weight, bias = inputs
        ctx.options = dict(keyword_only_inputs)
        if not ctx.options.pop("needs_sum") and any(ctx.needs_input_grad):
            raise RuntimeError(
                f"{self._name}: needs_sum is False, expected True where a gradient is wanted"
            )
        ctx.save_for_backward(output[1], weight, bias, x_bias)
        ctx.x_dtype = x.dtype

    def _backward_of_sum(
        self, ctx: Any, grad_out: Tensor | None, grad_sum: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        total, weight, bias, x_bias = ctx.saved_tensors
        _, _, needs_x_bias, needs_weight, needs_bias = ctx.needs_input_grad
        if grad_out is None:  # only the sum is used
            needs_weight = needs_bias = False
            if grad_sum is None or not needs_x_bias:
                grad = None if grad_sum is None else grad_sum.to(ctx.x_dtype)
                return grad, grad_sum, None, None, None
            grad_out = torch.zeros_like(total)
        vectors = (weight, bias if needs_bias else None, x_bias if needs_x_bias else None)
        grad, grad_weight, grad_bias, grad_x_bias = self._gradients(
            ctx, grad_out, grad_sum, total, vectors, needs_weight
        )
        return (
            grad.to(ctx.x_dtype),
            grad,
            grad_x_bias if needs_x_bias else None,
            grad_weight if needs_weight else None,
            grad_bias if needs_bias else None,
        )

    def _gradients(
        self,
        ctx: Any,
        grad_out: Tensor,
        grad_sum: Tensor | None,
        x: Tensor,
        vectors: tuple[Tensor | None, Tensor | None, Tensor | None],
        needs_grad_weight: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        grads: tuple[Tensor, Tensor, Tensor, Tensor] = self.backward_op(
            grad_out, grad_sum, x, *vectors, **ctx.options, needs_grad_weight=needs_grad_weight
        )
        return grads


def _backward_fake(
    grad_out: Tensor,
    grad_sum: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    x_bias: Tensor | None,
    **options: Any,
) -> tuple[Tensor, ...]:
    def gradient(vector: Tensor | None, wanted: bool) -> Tensor:
        if vector is None or not wanted:
            return x.new_empty(0, dtype=torch.float32 if vector is None else vector.dtype)
        return vector.new_empty(vector.shape)

    of_weight = gradient(weight, options["needs_grad_weight"])
    return x.new_empty(x.shape), of_weight, gradient(bias, True), gradient(x_bias, True)


def _residual_fake(
    x: Tensor, residual: Tensor, *vectors: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    shape = residual.shape if options["needs_sum"] else (0,)
    return x.new_empty(x.shape), residual.new_empty(shape)


def total_ref(x: Tensor, residual: Tensor | None, x_bias: Tensor | None) -> Tensor:
    """Return what is normalized, in float64."""
    total = x.double()
    for added in (x_bias, residual):
        total = total if added is None else total + added.double()
    return total


def affine_ref(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, weight_offset: float
) -> Tensor:
    """Return x * (weight + weight_offset) + bias, in float64."""
    if weight is None:
        scaled = x
    else:
        scaled = x * (weight.double() + weight_offset if weight_offset else weight.double())
    return scaled if bias is None else scaled + bias.double()


def flat(vector: Tensor | None) -> Tensor | None:
    """Return a vector that has as many dimensions as a module's normalized_shape as one."""
    return None if vector is None else vector.flatten()


def rows_of(name: str, x: Tensor, normalized_shape: tuple[int, ...]) -> Tensor:
    """Return x with the dimensions that are normalized as one.

    Raises:
        ValueError: x ends in other dimensions.
    """
    dims = len(normalized_shape)
    if tuple(x.shape[-dims:]) != tuple(normalized_shape):
        raise ValueError(
            f"{name}: x has shape {list(x.shape)}, expected its last dimensions to be"
            f" {list(normalized_shape)}"
        )
    return x if dims == 1 else x.flatten(-dims)

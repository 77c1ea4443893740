"""Quick runs of each op against its reference, for ds_report; they raise when an op is wrong."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from deepspeed_ext.dtypes import DTYPES
from deepspeed_ext.ops._compare import compare
from deepspeed_ext.ops.optimizers.adagrad import ADAGRAD, adagrad_step_, adagrad_step_ref_
from deepspeed_ext.ops.optimizers.adam import ADAM, adam_step_, adam_step_ref_
from deepspeed_ext.ops.optimizers.fingerprint import fingerprints, fingerprints_ref
from deepspeed_ext.ops.optimizers.l2_norm import squared_norms, squared_norms_ref
from deepspeed_ext.ops.optimizers.lamb import (
    LAMB_MOMENTS,
    lamb_apply_,
    lamb_apply_ref_,
    lamb_coefficients,
    lamb_moments_,
    lamb_moments_ref_,
)
from deepspeed_ext.ops.optimizers.lars import (
    LARS_APPLY,
    lars_apply_,
    lars_apply_ref_,
    lars_coefficients,
    lars_norms,
    lars_norms_ref,
)
from deepspeed_ext.ops.optimizers.lion import LION, lion_step_, lion_step_ref_
from deepspeed_ext.ops.optimizers.rmsprop import RMSPROP, rmsprop_step_, rmsprop_step_ref_
from deepspeed_ext.ops.optimizers.sgd import SGD, sgd_step_, sgd_step_ref_
from deepspeed_ext.ops.optimizers.step_op import StepOp


def adagrad(device: str) -> None:
    """Run `_check_step` on adagrad_step_."""
    _check_step(device, adagrad_step_, adagrad_step_ref_, ADAGRAD)


def adam(device: str) -> None:
    """Run `_check_step` on adam_step_."""
    _check_step(device, adam_step_, adam_step_ref_, ADAM)


def lamb(device: str) -> None:
    """Run `_check_step` on lamb_moments_ and lamb_apply_, one after the other."""

    def lamb_step(grads: Any, lr: float, **arguments: Any) -> None:
        coefficients = lamb_coefficients(lamb_moments_(grads=grads, **arguments))
        lamb_apply_(coefficients=coefficients, lr=lr, **arguments)

    def reference(grads: Any, lr: float, **arguments: Any) -> None:
        coefficients = lamb_coefficients(lamb_moments_ref_(grads=grads, **arguments))
        lamb_apply_ref_(coefficients=coefficients, lr=lr, **arguments)

    # In bfloat16 the second op would see other moments than the reference, which rounds nothing.
    _check_step(device, lamb_step, reference, LAMB_MOMENTS, (torch.float32,), eps=1e-3)


def lars(device: str) -> None:
    """Run `_check_step` on lars_norms and lars_apply_, one after the other."""

    def lars_step(params: Any, grads: Any, **arguments: Any) -> None:
        coefficients = lars_coefficients(lars_norms(params, grads), eeta=0.1)
        lars_apply_(params, grads, coefficients=coefficients, momentum=0.2, **arguments)

    def reference(params: Any, grads: Any, **arguments: Any) -> None:
        coefficients = lars_coefficients(lars_norms_ref(params, grads), eeta=0.1)
        lars_apply_ref_(params, grads, coefficients=coefficients, momentum=0.2, **arguments)

    _check_step(device, lars_step, reference, LARS_APPLY)


def lion(device: str) -> None:
    """Run `_check_step` on lion_step_."""
    _check_step(device, lion_step_, lion_step_ref_, LION)


def rmsprop(device: str) -> None:
    """Run `_check_step` on rmsprop_step_."""
    _check_step(device, rmsprop_step_, rmsprop_step_ref_, RMSPROP)


def sgd(device: str) -> None:
    """Run `_check_step` on sgd_step_."""
    _check_step(device, sgd_step_, sgd_step_ref_, SGD, momentum=0.9)


def _check_step(
    device: str,
    op: Callable[..., None],
    reference: Callable[..., None],
    table: StepOp,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    **options: float,
) -> None:
    """Take one step with an op and with its reference, and compare every element.

    Args:
        device: "cpu" or "cuda".
        op: takes the step.
        reference: the same in float64.
        table: what is known of it.
        dtypes: of params, gradients and state, in turn.
        options: other numbers that it needs.

    Raises:
        RuntimeError: a result is not what the reference says.
    """
    generator = torch.Generator().manual_seed(0)
    states = [state.argument for state in table.usual_states]
    for dtype in dtypes:
        got: dict[str, Any] = {
            name: [(torch.rand(n, generator=generator) + 0.5).to(device, dtype) for n in (1, 3000)]
            for name in ("params", "grads", *states)
        }
        got["steps"] = [torch.full((), 9.0, device=device) for _ in range(2)]
        want: dict[str, Any] = {
            name: [t.cpu().double() for t in tensors] for name, tensors in got.items()
        }
        op(**got, lr=0.1, weight_decay=0.1, **options)
        reference(**want, lr=0.1, weight_decay=0.1, **options)
        # One rounding to the stored type, and a few of float32. Nothing here is small, and what
        # cancels leaves at least a tenth.
        bound = torch.finfo(dtype).eps / 2 + 64 * torch.finfo(torch.float32).eps
        for name, tensors in got.items():
            for i, tensor in enumerate(tensors):
                title = f"{op.__name__}: {name}[{i}] on {device}"
                compare(title, tensor, want[name][i], bound)


def sums_of_squares(device: str) -> None:
    """Compare squared_norms with its reference, for each dtype, and beyond float32.

    Args:
        device: "cpu" or "cuda".

    Raises:
        RuntimeError: a result is not what the reference says.
    """
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(70_000, generator=generator).to(device, dtype) for dtype in DTYPES]
    tensors += [torch.ones(1, device=device), torch.full((3,), 3e38, device=device)]
    want = squared_norms_ref([tensor.cpu() for tensor in tensors])
    bound = 4 * torch.finfo(torch.float32).eps  # a few roundings, of squares and short sums
    compare(f"squared_norms: result on {device}", squared_norms(tensors), want, bound)


def fingerprint(device: str) -> None:
    """Compare fingerprints with its reference: of whole rows and others, at odd addresses.

    Args:
        device: "cpu" or "cuda".

    Raises:
        RuntimeError: a fingerprint is not what the reference says.
    """
    numbers = torch.arange(70_000)
    tensors = [(numbers % 251).byte(), (numbers * 77 % 509).bfloat16()[1:], numbers[:3], numbers]
    got = fingerprints([tensor.to(device) for tensor in tensors]).cpu()
    for i, (value, want) in enumerate(zip(got, fingerprints_ref(tensors), strict=True)):
        if value != want:
            raise RuntimeError(f"fingerprints: result[{i}] on {device} is {value}, expected {want}")


def l2_norm(device: str) -> None:
    """Run `sums_of_squares` and `fingerprint`, which have a library together."""
    sums_of_squares(device)
    fingerprint(device)

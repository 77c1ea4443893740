"""Quick runs of each op against its reference, for ds_report; they raise when an op is wrong."""

from typing import Any

import torch

from deepspeed_ext.ops.adam import adam_step_, adam_step_ref_


def adam(device: str) -> None:
    """Take one step with adam_step_ and with its reference, and compare every element.

    Args:
        device: "cpu" or "cuda".

    Raises:
        RuntimeError: a result is not what the reference says.
        BuildError: the native library could not be built or loaded.
    """
    generator = torch.Generator().manual_seed(0)
    names = ("params", "grads", "exp_avgs", "exp_avg_sqs")
    for dtype in (torch.float32, torch.bfloat16):
        got: dict[str, Any] = {
            name: [(torch.rand(n, generator=generator) + 0.5).to(device, dtype) for n in (1, 3000)]
            for name in names
        }
        got["steps"] = [torch.full((), 9.0, device=device) for _ in range(2)]
        want: dict[str, Any] = {
            name: [t.cpu().double() for t in tensors] for name, tensors in got.items()
        }
        adam_step_(**got, lr=0.1, weight_decay=0.1)
        adam_step_ref_(**want, lr=0.1, weight_decay=0.1)
        # One rounding to the stored type, and a few of float32. Nothing here is small or cancels.
        bound = torch.finfo(dtype).eps / 2 + 16 * torch.finfo(torch.float32).eps
        for name, tensors in got.items():
            for i, tensor in enumerate(tensors):
                _compare(f"{name}[{i}] on {device}", tensor, want[name][i], bound)


def _compare(what: str, got: torch.Tensor, want: torch.Tensor, bound: float) -> None:
    """Raise unless each element is within a relative error of `bound`."""
    found = got.cpu().double().flatten()
    wrong = ~((found - want.flatten()).abs() <= bound * want.flatten().abs())
    if wrong.any():
        i = int(wrong.nonzero()[0])
        raise RuntimeError(
            f"adam_step_: {what} has {found[i].item()!r} at {i},"
            f" expected {want.flatten()[i].item()!r}"
        )

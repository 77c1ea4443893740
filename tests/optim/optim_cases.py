"""What the optimizer tests share: devices, parameters of every layout, gradients, comparison."""

import copy

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from deepspeed_ext.optim import DeepSpeedCPUAdam, FusedAdam

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
on_each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])


def adam(params, device="cpu", decoupled=True, **options):
    """The class for this device, under one set of argument names."""
    if device == "cpu":
        return DeepSpeedCPUAdam(params, adamw_mode=decoupled, **options)
    return FusedAdam(params, adam_w_mode=decoupled, **options)


def torch_adam(params, decoupled=True, **options):
    """The same optimizer in torch, with the same defaults."""
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    return kind(params, **{"weight_decay": 0.0} | options)


def make_params(device="cpu", dtype=F32, seed=0):
    """Contiguous, transposed, permuted, channels_last; scalar, of one element, empty, long."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(device, dtype)

    return [
        Parameter(tensor)
        for tensor in (
            draw(3, 5),
            draw(4, 6).t(),
            draw(2, 3, 4, 5).to(memory_format=torch.channels_last),
            draw(3, 4, 5).permute(1, 2, 0),
            draw(6).as_strided((3, 1, 2), (1, 100, 3)),
            draw(),
            draw(1),
            draw(0),
            draw(257),
        )
    ]


def twins(params, dtype=None):
    """The same values again, as contiguous parameters of another optimizer."""
    return [Parameter(p.detach().clone().contiguous().to(dtype or p.dtype)) for p in params]


def give_grads(generator, *models, missing=0.0, factor=1.0):
    """Give the like parameters of several models the same gradients, or the same lack of one."""
    for params in zip(*models, strict=True):
        present = torch.rand((), generator=generator) >= missing
        grad = torch.randn(params[0].shape, generator=generator) * factor
        for param in params:
            param.grad = grad.to(param.device, param.dtype) if present else None


def assert_close(actual, expected, steps=1, dtype=F32):
    """Compare element by element; every step may round a few times at the size of the value."""
    tolerance = 4 * steps * torch.finfo(dtype).eps
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        torch.testing.assert_close(
            a.detach().double().cpu(),
            e.detach().double().cpu(),
            rtol=tolerance,
            atol=tolerance * 0.1,
            msg=lambda text, i=i: f"item {i}: {text}",
        )


def assert_same_bits(actual, expected):
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert a.dtype == e.dtype and a.shape == e.shape, f"item {i}"
        assert torch.equal(a.detach(), e.detach().to(a.device)), f"item {i}"


def snapshot(optimizer):
    """A copy of the state dict that shares no memory with the optimizer."""
    return copy.deepcopy(optimizer.state_dict())


def state_tensors(optimizer):
    """All state of all parameters, in a fixed order."""
    return [
        value
        for entry in optimizer.state_dict()["state"].values()
        for _, value in sorted(entry.items())
        if isinstance(value, Tensor)
    ]


def assert_in_buffers(optimizer):
    """What users see in the state is what the next step reads and writes."""
    plans = optimizer._plans.current(optimizer)
    for bucket in (bucket for plan in plans for bucket in plan.buckets):
        for i, param in enumerate(bucket.params):
            for key, view in bucket.views(i).items():
                seen = optimizer.state[param][key]
                assert seen.data_ptr() == view.data_ptr() and seen.stride() == view.stride(), key

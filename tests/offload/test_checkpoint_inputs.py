"""checkpoint: torch's own, with inputs that leave the device."""

import gc

import pytest
import torch
from late_lanes import be_late
from optim_cases import assert_same_bits, needs_cuda
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from deepspeed_ext import offload

WIDTH, BLOCKS = 16, 6


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=needs_cuda)])
def device(request):
    return request.param


@pytest.fixture(params=["cpu", "nvme"])
def saved(request, device, monkeypatch, tmp_path):
    failures, _ = be_late(monkeypatch, device)
    path = {"nvme_path": tmp_path} if request.param == "nvme" else {}
    yield offload.saved_tensors(request.param, min_bytes=0, **path)
    gc.collect()
    assert failures == []


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, scale=None):
        y = self.down(nn.functional.dropout(nn.functional.gelu(self.up(x)), 0.2))
        return x + (y if scale is None else y * scale)


def blocks_on(device):
    torch.manual_seed(0)
    return nn.ModuleList(Block() for _ in range(BLOCKS)).to(device)


def step(blocks, x, call):
    """Return gradients of a step."""
    blocks.zero_grad()
    torch.manual_seed(1)
    for block in blocks:
        x = call(block, x)
    x.square().mean().backward()
    return [p.grad.clone() for p in blocks.parameters()]


def test_inputs_leave_and_come_back(device, saved):
    blocks, x = blocks_on(device), torch.randn(8, WIDTH).to(device)
    plain = step(blocks, x, lambda block, x: block(x))
    for _ in range(2):
        found = step(blocks, x, lambda b, x: offload.checkpoint(b, x, device=saved))
        assert_same_bits(found, plain)
    stats = saved.stats()
    assert stats["bytes"] == 0 and stats["peak"] == BLOCKS * x.nbytes  # nothing but inputs
    assert stats["on_demand"] <= 2
    with saved:  # what is around them leaves too
        assert_same_bits(
            step(blocks, x, lambda b, x: torch_checkpoint(b, x, use_reentrant=False)), plain
        )


def test_what_is_passed_on(device, saved):
    """Arguments that are no tensors, keywords of the function and of torch's."""
    block, x = blocks_on(device)[0], torch.randn(8, WIDTH).to(device)
    scale = torch.full((), 3.0, device=device, requires_grad=True)
    found = offload.checkpoint(
        block, x, scale=scale, device=saved, preserve_rng_state=True, determinism_check="default"
    )
    found.sum().backward()
    assert scale.grad is not None and saved.stats()["bytes_out"] == x.nbytes
    with torch.no_grad():
        offload.checkpoint(block, x, None, device=saved)
    assert saved.stats()["bytes_out"] == x.nbytes


def test_errors(device, saved):
    block, x = blocks_on(device)[0], torch.randn(8, WIDTH).to(device)
    text = "checkpoint: device is 'cpu', expected what offload.saved_tensors returns"
    with pytest.raises(TypeError, match=text):
        offload.checkpoint(block, x, device="cpu")
    with pytest.raises(ValueError, match="use_reentrant is True, expected False"):
        offload.checkpoint(block, x, device=saved, use_reentrant=True)

    class Stop(Exception):
        pass

    def fail(x):
        if torch.is_grad_enabled() and fail.armed:
            raise Stop
        return block(x)

    for fail.armed in (True, False):
        try:
            y = offload.checkpoint(fail, x * 1, device=saved).sum()
            fail.armed = True
            with pytest.raises(Stop):
                y.backward()
            del y
        except Stop:
            pass
        gc.collect()
        assert saved.stats()["bytes"] == 0
    y = x.requires_grad_() * 1
    z = offload.checkpoint(block, y, device=saved).sum()
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()

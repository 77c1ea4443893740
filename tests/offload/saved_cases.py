"""What the tests of saved tensors share: late copies, a model of many layouts, its gradients."""

import gc

import pytest
import torch
from late_lanes import be_late
from optim_cases import needs_cuda
from torch import nn
from torch.nn import functional

from deepspeed_ext import offload

WIDTH = 24


@pytest.fixture(name="device", params=["cpu", pytest.param("cuda", marks=needs_cuda)])
def each_device(request):
    return request.param


@pytest.fixture(name="failures")
def none_fails(device, monkeypatch):
    """Copies are late; whatever goes wrong with one fails the test."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    found, _ = be_late(monkeypatch, device)
    yield found
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
    assert found == []


@pytest.fixture(name="saved", params=["cpu", "nvme"])
def all_leaves(request, failures, tmp_path):
    """All that may leave does."""
    path = {"nvme_path": tmp_path} if request.param == "nvme" else {}
    return offload.saved_tensors(request.param, min_bytes=0, **path)


class Attention(nn.Module):
    """Chunks, transposed views, an expanded mask, softmax, dropout, a residual."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        heads = (
            t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1)
        )
        q, k, v = heads
        mask = (
            torch.ones(x.shape[1], x.shape[1], device=x.device).tril().expand(x.shape[0], 4, -1, -1)
        )
        scores = (q @ k.transpose(-1, -2)) * mask
        y = functional.dropout(scores.softmax(-1), 0.1) @ v
        return x + self.out(y.transpose(1, 2).flatten(2))


class Mixed(nn.Module):
    """Layouts: channels_last, complex and conjugate, a gather, shared weights, in-place ops."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, padding=1).to(memory_format=torch.channels_last)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        image = x.unsqueeze(1).contiguous(memory_format=torch.channels_last)
        x = functional.relu_(self.conv(image).mean(1) + x)
        wave = torch.fft.fft(x.float())  # autocast leaves this to us, on CUDA
        x = (wave * wave.conj()).real + x[:, :, :1].expand_as(x) * x[:, :1]
        x = self.linear(functional.gelu(self.linear(x)))
        return x * torch.sigmoid(x.flip(-1))


def net_on(device, dtype=torch.float32):
    torch.manual_seed(0)
    blocks = [Attention(), Mixed(), Attention(), Mixed(), Attention()]
    return nn.Sequential(*blocks).to(device, dtype)


def gradients(net, x, context=None, backward=torch.Tensor.backward):
    """Gradients of a step, and what forward gave."""
    for param in net.parameters():
        param.grad = None
    torch.manual_seed(1)
    if context is None:
        y = net(x)
    else:
        with context:
            y = net(x)
    backward(y.square().mean())
    return [y, *(p.grad.clone() for p in net.parameters())]


def inputs(device, *shape):
    generator = torch.Generator().manual_seed(7)
    return torch.randn(*(shape or (2, 6, WIDTH)), generator=generator).to(device)

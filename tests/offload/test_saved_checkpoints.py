"""Checkpoints of all kinds within saved tensors, and in each other: the same bits."""

from functools import partial
from itertools import product

import pytest
import torch
from optim_cases import assert_same_bits
from saved_cases import (
    WIDTH,
    all_leaves as all_leaves,
    each_device as each_device,
    gradients,
    inputs,
    net_on,
    none_fails as none_fails,
)
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint as torch_checkpoint,
    create_selective_checkpoint_contexts,
)

from deepspeed_ext import offload


class Called(nn.Module):
    """Calls the blocks of a net in some way; the first one gives the rest a graph."""

    def __init__(self, net, how):
        super().__init__()
        self.net, self.how = net, how

    def forward(self, x):
        x = self.net[0](x)
        return self.how(self.net[1:], x)


def each(call):
    def in_a_row(blocks, x):
        for block in blocks:
            x = call(block, x)
        return x

    return in_a_row


def keep_products(ctx, op, *args, **kwargs):
    products = (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = partial(create_selective_checkpoint_contexts, keep_products)
OF_TORCH = {
    kind: partial(torch_checkpoint, use_reentrant=kind == "reentrant")
    for kind in ("reentrant", "plain")
}


@pytest.mark.parametrize(
    ("outer", "inner"),
    [("selective", "none"), *product(["reentrant", "plain", "ours"], [*OF_TORCH, "ours", "none"])],
)
def test_checkpoints_in_each_other(device, failures, outer, inner):
    net, x = net_on(device), inputs(device)
    saved = offload.saved_tensors(min_bytes=0)
    ours = partial(offload.checkpoint, device=saved)
    calls = {**OF_TORCH, "ours": ours, "selective": partial(ours, context_fn=SELECTIVE)}

    def in_it(block, x):
        return block(x) if inner == "none" else calls[inner](block, x)

    called = Called(net, each(lambda block, x: calls[outer](partial(in_it, block), x)))
    with torch.autocast(device, torch.bfloat16, enabled=inner == "none"):
        plain = gradients(net, x)
        for _ in range(2):
            assert_same_bits(gradients(called, x, saved), plain)
    assert saved.stats()["bytes"] == 0 < saved.stats()["bytes_out"]


def test_inputs_of_checkpoints_alone(device, failures):
    """What is around checkpoints stays, whoever calls them."""
    net, x = net_on(device), inputs(device)
    plain = gradients(net, x)
    for kind, call in OF_TORCH.items():
        saved = offload.saved_tensors(min_bytes=0)
        called = Called(net, each(call))
        with saved.of_checkpoints():
            torch.manual_seed(1)
            y = called(x)
        assert saved.stats()["bytes"] == 4 * x.nbytes, kind
        net.zero_grad()
        y.square().mean().backward()
        assert_same_bits([y, *(p.grad for p in net.parameters())], plain)
        assert saved.stats()["bytes"] == 0
    y = x.clone().requires_grad_() * 1
    with saved.of_checkpoints():
        z = y.exp() * y
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_odd_ways(device, saved):
    """Anomaly mode, another default device, graphs in turns, a storage that is given up."""
    net, x = net_on(device), inputs(device)
    plain = gradients(net, x)
    with torch.autograd.set_detect_anomaly(True):
        assert_same_bits(gradients(net, x, saved), plain)
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    losses = [[], []]
    for leaf, found in zip(leaves, losses, strict=True):
        with torch.device("meta"), saved if found is losses[1] else torch.enable_grad():
            found += [(leaf * k).exp().sin().sum() for k in range(9)]
        with torch.device("meta"):
            for loss in found[::2] + found[1::2]:
                loss.backward()
    assert_same_bits([leaves[1].grad], [leaves[0].grad])
    with saved:
        kept = x.clone().requires_grad_() * 1
        y = kept.exp().log()
        for _ in range(9):
            inputs(device).requires_grad_().exp()
    kept.untyped_storage().resize_(0)
    before = saved.stats()["bytes"]
    del y
    assert saved.stats()["bytes"] == 0 < before  # nothing waits for a collection


@pytest.mark.long
@pytest.mark.parametrize("outside", [False, True])
def test_compiled_blocks(outside):
    saved, block = offload.saved_tensors(min_bytes=0), nn.Linear(WIDTH, WIDTH)
    x = inputs("cpu").requires_grad_()
    grads = torch.autograd.grad(block(x.sin()).sum(), (x, block.weight))
    compiled = torch.compile(block, backend="aot_eager")

    def call(x):
        return offload.checkpoint(block if outside else compiled, x.sin(), device=saved)

    y = (torch.compile(call, backend="aot_eager") if outside else call)(x)
    assert saved.stats()["bytes"] >= x.nbytes
    torch.testing.assert_close(torch.autograd.grad(y.sum(), (x, block.weight)), grads)
    assert saved.stats()["bytes"] == 0

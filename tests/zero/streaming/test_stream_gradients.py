"""Streamed models have the gradients of models in memory, bit for bit, however they are asked."""

import copy
from functools import partial

import pytest
import torch
from stream_cases import Block, Model, assert_equal_models, loss_of, pair, some_ids
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepspeed_ext import offload, zero


def run(model, device, seeds=(0,), ask=lambda loss: loss.backward()):
    for seed in seeds:
        ask(loss_of(model, some_ids(device, seed)))


KINDS = {
    "plain": {},
    "unused": {"unused": True},
    "shared": {"shared": True},
    "bf16": {"dtype": torch.bfloat16},
}
CHANGES = {
    "as it is": lambda model: None,
    "frozen": lambda model: model.layers[1].requires_grad_(False),
    "only norms": lambda model: [p.requires_grad_(p.numel() <= 16) for p in model.parameters()],
    "twice": lambda model: setattr(model, "calls", [0, 1, 1, 0, 3]),
    "not all": lambda model: setattr(model, "calls", [3, 1]),
    "transposed": lambda model: setattr(
        model.layers[0].up,
        "weight",
        nn.Parameter(model.layers[1].up.weight.detach().t().clone().t()),
    ),
    "checkpoint": lambda model: setattr(
        model, "wrap", lambda block, x: checkpoint(block, x, use_reentrant=False)
    ),
    "reentrant": lambda model: setattr(
        model, "wrap", lambda block, x: checkpoint(block, x, use_reentrant=True)
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("micro_steps", [1, 3])
def test_of_a_backward(device, kind, change, micro_steps):
    streamed, kept, handle = pair(device, CHANGES[change], **KINDS[kind])
    for model in (streamed, kept):
        run(model, device, range(micro_steps))
    assert_equal_models(streamed, kept, gradients=True)
    assert handle.stats()["ahead"] > 0 or change == "not all"
    assert not handle._held and not handle._ahead and not handle._windows.open


def test_in_a_block_that_is_checkpointed_inside(device):
    class Inside(Block):
        def forward(self, x):
            y = checkpoint(self.up, self.norm(x), use_reentrant=False)
            return x + checkpoint(self.down, y.relu(), use_reentrant=False)

    def change(model):
        model.layers = nn.ModuleList(Inside() for _ in range(3))
        model.calls = [0, 1, 2]

    streamed, kept, _ = pair(device, change)
    for model in (streamed, kept):
        run(model, device, [0, 1])
    assert_equal_models(streamed, kept, gradients=True)


def test_with_hooks_that_change_or_read_them(device):
    streamed, kept, _ = pair(device)
    seen = {}
    for model in (streamed, kept):
        names = seen[model] = []
        a, b, c = (model.layers[i].up.weight for i in range(3))
        a.register_hook(lambda grad: grad * 2)
        b.register_post_accumulate_grad_hook(lambda p, n=names: n.append(p.grad.cpu().clone()))
        torch.autograd.graph.register_multi_grad_hook(
            [b, c], lambda g, n=names: n.extend(one.cpu().clone() for one in g)
        )
        run(model, device, [0, 1])
    assert_equal_models(streamed, kept, gradients=True)
    both = list(zip(seen[streamed], seen[kept], strict=True))
    assert len(both) == 6 and all(torch.equal(a, b) for a, b in both)


def test_by_autograd_grad(device):
    streamed, kept, _ = pair(device)
    found = []
    for model in (streamed, kept):
        params = [*model.parameters()]
        found.append(torch.autograd.grad(loss_of(model, some_ids(device, 0)), params))
        assert all(param.grad is None for param in params)
    for param, a, b in zip(streamed.parameters(), *found, strict=True):
        assert a.device == param.device and torch.equal(a.cpu(), b.cpu())


def test_of_some_inputs_only(device):
    streamed, kept, _ = pair(device)
    for model in (streamed, kept):
        wanted = [model.layers[0].up.weight, model.layers[2].down.bias]
        run(model, device, [0, 1], lambda loss, w=wanted: loss.backward(inputs=w))
    assert_equal_models(streamed, kept, gradients=True)
    assert streamed.layers[1].up.weight.grad is None


def test_of_gradients(device):
    streamed, kept, _ = pair(device)
    for model in (streamed, kept):
        params = [*model.parameters()]
        loss = loss_of(model, some_ids(device, 0))
        grads = torch.autograd.grad(loss, params, create_graph=True)
        sum(grad.square().sum().to(device) for grad in grads).backward()
    both = zip(streamed.parameters(), kept.parameters(), strict=True)
    for param, other in both:
        torch.testing.assert_close(param.grad.cpu(), other.grad.cpu())


def test_of_an_input_alone(device):
    streamed, kept, _ = pair(device, lambda model: model.requires_grad_(False))
    found = []
    for model in (streamed, kept):
        x = torch.linspace(-1, 1, 32, device=device).reshape(2, 16).requires_grad_()
        y = x
        for block in model.layers:
            y = block(y)
        y.square().sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)


def test_of_a_graph_that_is_kept(device):
    streamed, kept, _ = pair(device)
    for model in (streamed, kept):
        loss = loss_of(model, some_ids(device, 0))
        loss.backward(retain_graph=True)
        loss.backward()
    assert_equal_models(streamed, kept, gradients=True)


def test_of_two_forwards_whose_backwards_come_in_any_order(device):
    streamed, kept, _ = pair(device)
    for model in (streamed, kept):
        first, second = (loss_of(model, some_ids(device, seed)) for seed in (0, 1))
        first.backward()
        second.backward()
    assert_equal_models(streamed, kept, gradients=True)


def test_a_graph_of_weights_that_were_written_is_an_error(device):
    streamed, _, _ = pair(device)
    loss = loss_of(streamed, some_ids(device, 0))
    with torch.no_grad():
        streamed.layers[2].down.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_with_autocast(device):
    streamed, kept, _ = pair(device)
    for model in (streamed, kept):
        with torch.autocast(device, torch.bfloat16):
            loss = loss_of(model, some_ids(device, 0))
        loss.backward()
    assert_equal_models(streamed, kept, gradients=True)


def test_of_saved_tensors_hooks_around(device):
    """Hooks of others pack all else, and weights are not among it."""
    streamed, kept, _ = pair(device)
    numbers = []
    for model in (streamed, kept):
        packed = []

        def pack(tensor, packed=packed):
            packed.append(tensor.shape)
            return tensor.cpu()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor.to(device)):
            loss = loss_of(model, some_ids(device, 0))
        loss.backward()
        numbers.append(len(packed))
    assert_equal_models(streamed, kept, gradients=True)
    assert numbers[0] < numbers[1]


def test_lstm(device):
    def change(model):
        class Recurrent(nn.Module):
            def __init__(self):
                super().__init__()
                self.rnn = nn.LSTM(16, 16, batch_first=True)

            def forward(self, x):
                return x + self.rnn(x)[0]

        model.layers = nn.ModuleList(Recurrent() for _ in range(2))
        model.calls = [0, 1]

    streamed, kept, _ = pair(device, change)
    for model in (streamed, kept):
        run(model, device, [0, 1])
    assert_equal_models(streamed, kept, gradients=True)


def test_attention_of_torch_trained_and_not(device):
    def change(model):
        torch.manual_seed(1)
        model.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True) for _ in range(3)
        )
        model.calls = [0, 1, 2]

    streamed, kept, _ = pair(device, change)
    for model in (streamed, kept):
        run(model, device)
    assert_equal_models(streamed, kept, gradients=True)
    with torch.no_grad():
        a, b = (model.eval()(some_ids(device, 3)) for model in (streamed, kept))
    torch.testing.assert_close(a, b)


def test_copies_stream_too_and_are_apart(device):
    streamed, kept, _ = pair(device)
    twin, plain = copy.deepcopy(streamed), copy.deepcopy(kept)
    with torch.no_grad():
        for model in (streamed, kept):
            model.layers[0].up.weight.zero_()
    for model in (twin, plain, streamed, kept):
        run(model, device)
    assert_equal_models(twin, plain, gradients=True)
    assert_equal_models(streamed, kept, gradients=True)


def test_as_torch_stream_is_public():
    model = Model()
    assert zero.stream(model, to="cpu").stats()["resting_bytes"] > 0


@pytest.mark.parametrize("how", ["around", "checkpoint"])
def test_with_saved_tensors(device, how):
    streamed, kept, _ = pair(device)
    for model in (streamed, kept):
        saved = offload.saved_tensors(min_bytes=0)
        for seed in range(2):
            if how == "checkpoint":
                model.wrap = partial(offload.checkpoint, device=saved)
                loss = loss_of(model, some_ids(device, seed))
            else:
                with saved:
                    loss = loss_of(model, some_ids(device, seed))
            loss.backward()
        assert saved.stats()["bytes_out"] > 0
    assert_equal_models(streamed, kept, gradients=True)


@pytest.mark.long
@pytest.mark.parametrize("what", ["blocks", "wrapped", "model"])
def test_compiled(device, what):
    streamed, kept, handle = pair(device)
    for model in (streamed, kept):
        if what == "model":
            model.compile()
        elif what == "wrapped":
            model.layers = nn.ModuleList(map(torch.compile, model.layers))
        else:
            for block in model.layers:
                block.compile()
        run(model, device, range(3))
    for param, other in zip(streamed.parameters(), kept.parameters(), strict=True):
        torch.testing.assert_close(param.grad.cpu(), other.grad.cpu())
    assert handle.stats()["ahead"] > 0
    torch.compiler.reset()

"""What autograd saves leaves and comes back: the same gradients, bit for bit, and less memory."""

import gc
import threading

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
from torch.multiprocessing.reductions import StorageWeakRef

from deepspeed_ext import offload


def test_a_step_has_the_same_bits(device, saved):
    net, x = net_on(device), inputs(device)
    plain = gradients(net, x)
    for number in range(3):
        assert_same_bits(gradients(net, x, saved), plain)
        stats = saved.stats()
        assert stats["bytes"] == 0 and stats["bytes_out"] == (number + 1) * stats["peak"] > 0
    assert stats["ahead"] > stats["on_demand"]
    with torch.autocast(device, torch.bfloat16):
        plain = gradients(net, x)
        assert_same_bits(gradients(net, x, saved), plain)


@pytest.mark.parametrize("budget", [0, 3000, "20KiB"])
def test_a_budget_is_kept(device, failures, budget):
    net, x = net_on(device), inputs(device)
    plain = gradients(net, x)
    saved = offload.saved_tensors(budget=budget, min_bytes=0)
    for _ in range(2):
        assert_same_bits(gradients(net, x, saved), plain)
    stats, most = saved.stats(), 20480 if budget == "20KiB" else budget
    assert stats["bytes"] == 0 and stats["stayed"] > 0
    assert most - 10000 < stats["peak"] <= most


def test_memory_leaves_the_device(device, saved):
    """Behind forward nothing holds what has left, and what is small stays."""
    x = inputs(device).requires_grad_()
    with saved:
        y = x * 2
        storage = StorageWeakRef(y.untyped_storage())
        y = y.exp().sin().cos()
    for _ in range(9):  # what is under way is let go of behind others
        with saved:
            inputs(device).requires_grad_().exp()
    assert storage.expired()
    y.sum().backward()
    plain = torch.autograd.grad((x * 2).exp().sin().cos().sum(), x)
    assert_same_bits([x.grad], plain)
    more = offload.saved_tensors(min_bytes=x.nbytes + 1)
    with more:
        x.exp()
    assert more.stats()["bytes_out"] == 0


class Look(torch.autograd.Function):
    """Saves tensors, and keeps what they look like in backward."""

    @staticmethod
    def forward(ctx, seen, *tensors):
        ctx.save_for_backward(*tensors)
        ctx.seen = seen
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(ctx, grad):
        ctx.seen[:] = ctx.saved_tensors
        return (None, *(torch.zeros_like(t.resolve_neg()) for t in ctx.saved_tensors))


def test_tensors_keep_their_form(device, saved):
    flat = inputs(device, 512)
    wave = torch.view_as_complex(inputs(device, 8, 4, 2))
    views = [
        flat[3:20],
        flat.view(torch.complex64)[2:9],  # in what has left of the one before
        flat,
        flat[3:9],
        flat[8:400].view(8, 49)[:, ::2],
        flat.view(16, 32).t(),
        flat[5:6].expand(7, 3),
        flat.as_strided((10, 8), (2, 1), 11),
        flat.view(torch.bfloat16)[6:90],
        flat[4:].view(torch.float64),
        flat.view(torch.complex64)[1:],
        wave,
        wave.conj(),
        wave.imag,
        wave.conj().imag,
        flat[0],
        flat[:0],
        flat.to(torch.bfloat16),
        flat > 0,
        (flat * 100).to(torch.int16)[::3],
    ]
    seen = []
    leaf = torch.zeros((), device=device, requires_grad=True)
    with saved:
        y = Look.apply(seen, leaf, *views)
    assert saved.stats()["bytes_out"] < 5 * flat.nbytes
    y.backward()
    assert len(seen) == len(views) + 1
    for view, back in zip(views, seen[1:], strict=True):
        assert (back.dtype, back.shape, back.stride()) == (view.dtype, view.shape, view.stride())
        assert (back.is_conj(), back.is_neg()) == (view.is_conj(), view.is_neg())
        assert back.device == view.device and torch.equal(back, view)


def test_a_storage_leaves_once(device, saved):
    x = inputs(device).requires_grad_()
    layers = [nn.Linear(WIDTH, WIDTH, bias=False, device=device) for _ in range(3)]
    with saved:
        y = x * 1
        z = sum(layer(y.view(-1, WIDTH)) for layer in layers)
    stats = saved.stats()
    assert stats["bytes"] == y.nbytes  # neither weights, nor views of them, nor the leaf
    z.sum().backward()
    assert saved.stats()["on_demand"] + saved.stats()["ahead"] <= 1


def test_an_address_is_used_again(device, saved):
    leaf = torch.ones((), device=device, requires_grad=True)
    total = torch.zeros((), device=device)
    with saved:
        for number in range(50):
            total = total + (leaf * torch.full((300,), float(number), device=device)).sum()
    total.backward()
    assert leaf.grad == 300 * sum(range(50))


def test_a_version_leaves_by_itself(device, saved):
    """What is saved, written and saved again is two things."""
    leaf = torch.ones((), device=device, requires_grad=True)
    seen, more = [], []
    with saved:
        x = torch.full((300,), 1.0, device=device)
        first = Look.apply(seen, leaf, x)
        x.add_(1)
        second = Look.apply(more, leaf, x, x[10:])
    second.backward()
    assert more[1].unique().tolist() == [2] and more[2].shape == (290,)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.backward()


@pytest.mark.parametrize("what", ["input", "output", "view", "base", "parameter", "small"])
def test_what_was_written_since_is_an_error(device, saved, what):
    """As it is without us: the same cases, and the same kind of error."""
    for context in (None, saved):
        weight = nn.Parameter(inputs(device, WIDTH, WIDTH))
        x = inputs(device).requires_grad_() * 1
        with (
            offload.saved_tensors(min_bytes=10**6)
            if context and what == "small"
            else (context or torch.enable_grad())
        ):
            y = (x @ weight.t()).exp()
            z = y[0] * y[1]
        with torch.no_grad():
            {
                "input": x,
                "output": y,
                "view": x.view(-1)[3:],
                "base": y[0][0],
                "parameter": weight,
                "small": x,
            }[what].add_(1)
        with pytest.raises(
            RuntimeError, match=r"modified by an inplace operation.*is at version 1"
        ):
            z.sum().backward()


def test_a_graph_that_is_retained(device, saved):
    net, x = net_on(device), inputs(device)
    plain = gradients(net, x)[1:]
    torch.manual_seed(1)
    with saved:
        loss = net(x).square().mean()
    before = saved.stats()["bytes"]
    for _ in range(3):
        found = torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)
        assert_same_bits(found, plain)
        assert saved.stats()["bytes"] == before > 0
    del loss, found
    gc.collect()
    assert saved.stats()["bytes"] == 0


def test_a_graph_that_goes_half_way(device, saved):
    """Of two losses one goes through backward, of another graph nothing does."""
    net, x = net_on(device), inputs(device)
    for _ in range(2):
        with saved:
            middle = net[:3](x)
            dropped = net[3:](middle).sum()
            loss = net[4](middle).sum()
        before = saved.stats()["bytes"]
        torch.autograd.grad(loss, middle)
        assert 0 < saved.stats()["bytes"] < before
        middle.sum().backward()
        with pytest.raises(RuntimeError, match="second time"):
            dropped.backward()
        del dropped, middle, loss
        assert saved.stats()["bytes"] == 0


def test_double_backward(device, saved):
    torch.manual_seed(0)
    weight = torch.randn(5, 4, dtype=torch.float64, device=device, requires_grad=True)
    x = torch.randn(3, 4, dtype=torch.float64, device=device, requires_grad=True)

    def call(x, weight):
        with saved:
            y = torch.tanh(x @ weight.t()).square()
            return y.softmax(-1) * y

    assert torch.autograd.gradcheck(call, (x, weight))
    assert torch.autograd.gradgradcheck(call, (x, weight))

    def penalty(context):
        with context:
            grads = torch.autograd.grad(call(x, weight).sum(), (x, weight), create_graph=True)
            return torch.autograd.grad(sum(g.square().sum() for g in grads), (x, weight))

    assert_same_bits(penalty(saved), penalty(torch.enable_grad()))
    gc.collect()
    assert saved.stats()["bytes"] == 0


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("in backward")


def test_exceptions(device, saved):
    net, x = net_on(device), inputs(device)
    plain = gradients(net, x)

    def fail(*_):
        raise ArithmeticError("in forward")

    hook = net[3].register_forward_pre_hook(fail)
    with pytest.raises(ArithmeticError, match="in forward"), saved:
        net(x)
    hook.remove()
    gc.collect()
    assert saved.stats()["bytes"] == 0
    with saved:
        y = net[3:](Fails.apply(net[:3](x)))
    with pytest.raises(ArithmeticError, match="in backward"):
        y.sum().backward()
    del y
    gc.collect()
    assert saved.stats()["bytes"] == 0
    assert_same_bits(gradients(net, x, saved), plain)


class WritesToSaved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x.mul_(2)


def test_a_backward_that_writes_to_what_it_has_saved(device, failures):
    """Others that have saved the same do not see it."""
    saved = offload.saved_tensors(min_bytes=0)
    x = inputs(device).requires_grad_()
    with saved:
        y = x * 1
        z = y.sin() + WritesToSaved.apply(y)
        for _ in range(9):
            z = z.exp().log()
    z.sum().backward()
    again = x.detach().requires_grad_()
    y = again * 1
    z = y.sin() + y * y
    for _ in range(9):
        z = z.exp().log()
    z.sum().backward()
    torch.testing.assert_close(x.grad, again.grad)


def test_threads_share_one(device, failures):
    saved = offload.saved_tensors(min_bytes=0)
    x = inputs(device)
    nets = [nn.Sequential(*net_on(device)[1::2]) for _ in range(4)]  # which draw no numbers
    plain = gradients(nets[0], x)
    wrong = []

    def train(net):
        for _ in range(4):
            try:
                assert_same_bits(gradients(net, x, saved), plain)
            except BaseException as error:
                wrong.append(error)

    threads = [threading.Thread(target=train, args=(net,)) for net in nets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    gc.collect()
    assert saved.stats()["bytes"] == 0


def test_hooks_of_others_inside_and_outside(device, saved):
    """The inner ones count, as torch has it."""
    x = inputs(device).requires_grad_()
    got = []
    mine = torch.autograd.graph.saved_tensors_hooks(
        lambda t: got.append(t) or t.detach(), lambda t: t
    )
    with mine, saved:
        y = (x * 1).exp()
    assert got == []
    with saved, mine:
        y = y.exp()
    assert len(got) == 1
    y.sum().backward()

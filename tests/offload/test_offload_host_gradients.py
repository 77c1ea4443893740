"""free_grads: gradients that leave the device and are added up in host memory, in float32."""

import copy

import pytest
import torch
from offload_cases import FORMATS, Gate, Pair, Summed, await_speculation, small_parts
from optim_cases import BF16, F16, F32, assert_same_bits, make_params, on_each_device
from torch import nn

from deepspeed_ext.offload.sent_gradients import sent

STEPS = 12


@on_each_device
@pytest.mark.parametrize("times", [1, 2, 4])
@pytest.mark.parametrize("name", ["float32", "master", "compact"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_sums(device, dtype, name, times):
    pair = Summed(device, params=make_params(device, dtype), **FORMATS[name])
    pair.train(1)
    pair.train(STEPS - 1, times=times)
    stats = pair.ours.stats()
    assert stats["committed"] >= STEPS - 3 and stats["discarded"] <= 1


@on_each_device
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_first_gradients_leave_too(device, dtype):
    """Before any step: a model that fits only without gradients has to get through that."""
    pair = Summed(device, params=make_params(device, dtype), master="float32")
    pair.backward(times=3)
    assert all(sent(p.grad) is not None for p in pair.params)
    pair.step()
    pair.check()


@on_each_device
@pytest.mark.parametrize("kind", ["sgd", "lion", "adagrad", "rmsprop"])
def test_sums_for_each_class(device, kind, monkeypatch):
    small_parts(monkeypatch, piece=256, most=512)
    pair = Summed(device, kind, make_params(device, BF16), master="float32")
    pair.train(1)
    pair.train(STEPS - 1, times=2)
    assert pair.ours.stats()["committed"] >= STEPS - 3


@on_each_device
def test_another_number_of_gradients_each_time(device, monkeypatch):
    small_parts(monkeypatch, most=192)
    pair = Summed(device, params=make_params(device, F16), master="float32")
    for times in (1, 1, 3, 3, 1, 2, 2, 4, 1, 1):
        pair.train(1, times=times, missing=0.1)
    assert pair.ours.stats()["discarded"] > 0


@on_each_device
@pytest.mark.parametrize("max_norm", [0.1, 1e9])
def test_clipping(device, max_norm):
    """The norm is that of the sums, which are in host memory: its last bit may differ on CUDA."""
    pair = Summed(device, params=make_params(device, BF16), max_grad_norm=max_norm)
    for step in range(STEPS):
        pair.backward(times=2 if step else 1)
        pair.give()
        await_speculation(pair.ours)
        norm = pair.ours.clip_and_step(max_norm)
        expected = pair.plain.clip_and_step(max_norm)
        torch.testing.assert_close(norm.cpu(), expected.cpu(), rtol=1e-6, atol=0)
        pair.zero_grad()
        if device == "cpu":
            pair.check()
    assert bool(pair.ours.stats()["committed"]) == (max_norm > 1)


@on_each_device
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_inf_and_nan_step_nothing(device, bad):
    pair = Summed(device, params=make_params(device, BF16), max_grad_norm=1e9)
    for step in range(8):
        pair.backward()
        if step in (2, 4, 5):
            grad = torch.full_like(pair.params[8], bad)
            torch.autograd.backward([pair.params[8]], [grad])
            pair.sums[8] = pair.sums[8] + grad.float()
        pair.step(max_norm=1e9)
        pair.check()
    assert pair.ours.stats()["discarded"] > 0


@on_each_device
def test_zero_grad_instead_of_step(device):
    pair = Summed(device)
    pair.train(4)
    for _ in range(2):
        pair.backward(times=2)
        await_speculation(pair.ours)
        pair.zero_grad()
        pair.train(2)
    pair.backward()
    pair.zero_grad()
    pair.step()  # no gradient, so no step
    pair.check()
    pair.train(2)


@on_each_device
def test_gradients_set_by_hand(device):
    """They take the place of those that have left, as in torch, or are added, and go too."""
    pair = Summed(device)
    pair.train(3)
    for after_backward in (False, True):
        if after_backward:
            pair.backward()
            await_speculation(pair.ours)
        for i in (3, 8, 2, 7):
            grad = pair.draw(pair.params[i])
            if pair.sums[i] is not None and i in (2, 7):
                pair.params[i].grad += grad
                pair.sums[i] = pair.sums[i] + grad
            else:
                pair.params[i].grad = grad.clone()
                pair.sums[i] = grad
        pair.step()
        assert all(p.grad is None for p in pair.params)
        pair.check()
        pair.train(3)


def of_optimizer(pair, params):
    pair.ours.zero_grad()


def of_model(pair, params):
    nn.ParameterList(params).zero_grad()


def by_hand(pair, params):
    for param in params:
        param.grad = None


@on_each_device
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("drop", [of_optimizer, of_model, by_hand], ids=lambda f: f.__name__)
def test_gradients_that_are_dropped_do_not_come_back(device, drop, times, waits, monkeypatch):
    small_parts(monkeypatch, most=192)
    pair = Summed(device)
    for _ in range(2):  # before the first step, and where steps are speculative
        for _ in range(2):
            pair.backward(times=times)
            if waits:
                await_speculation(pair.ours)
            drop(pair, pair.params)
            pair.sums = [None] * 9
            pair.step()  # by nothing
            pair.check()
            pair.backward(times=times)
            drop(pair, pair.params)
            pair.sums = [None] * 9
            pair.train(1, times=2, missing=0.3)
        pair.train(4)
    pair.backward()
    if waits:
        await_speculation(pair.ours)
    some = pair.params[2:5] if drop is not of_optimizer else pair.params
    drop(pair, some)
    for i, param in enumerate(pair.params):
        pair.sums[i] = None if any(param is p for p in some) else pair.sums[i]
    pair.step()
    pair.check()
    pair.train(3)


@on_each_device
@pytest.mark.parametrize("then", [True, False])
def test_gradients_that_are_filled_with_zeros(device, then):
    """A step by zeros is one: of decay and moments."""
    pair = Summed(device)
    for _ in range(2):
        pair.train(4)
        pair.backward(times=2)
        nn.ParameterList(pair.params).zero_grad(set_to_none=False)
        pair.sums = [torch.zeros_like(p) for p in pair.params]
        if then:
            pair.backward()
        pair.step()
        pair.check()


@on_each_device
def test_gradients_that_are_overwritten(device):
    pair = Summed(device)
    pair.train(3)
    pair.backward()
    await_speculation(pair.ours)
    pair.sums[8] = pair.draw(pair.params[8])
    pair.params[8].grad.copy_(pair.sums[8])
    pair.step()
    pair.check()
    pair.train(3)


@on_each_device
@pytest.mark.parametrize("alpha", [1, 2])
def test_gradients_that_are_added_to_by_hand(device, alpha):
    """What is added is copied, as others hold it."""
    pair = Summed(device)
    pair.train(3)
    pair.backward()
    await_speculation(pair.ours)
    others = [pair.draw(p) for p in pair.params]
    before = [other.clone() for other in others]
    for i, (param, other) in enumerate(zip(pair.params, others, strict=True)):
        param.grad.add_(other, alpha=alpha)
        param.grad.add_(other, alpha=-3)
        pair.sums[i] = pair.sums[i] + (other * alpha).add_(other, alpha=-3)
    assert_same_bits(others, before)
    pair.step()
    pair.check()
    pair.train(3)


@on_each_device
@pytest.mark.parametrize(
    "fill", [torch._foreach_zero_, lambda grads: [grad.zero_() for grad in grads]]
)
def test_gradients_that_are_added_to_and_filled_with_zeros(device, fill):
    pair = Summed(device)
    pair.train(3)
    pair.backward()
    for param in pair.params:
        param.grad.add_(pair.draw(param))
    fill([param.grad for param in pair.params])
    pair.sums = [torch.zeros_like(p) for p in pair.params]
    pair.step()
    pair.check()
    pair.train(3)


READS = {
    "norm": lambda grad: grad.norm(),
    "scaled": lambda grad: grad.mul_(2),
    "element": lambda grad: grad[0].item(),
    "foreach": lambda grad: torch._foreach_norm([grad]),
    "to the other": lambda grad: torch.zeros_like(grad, device="cpu").copy_(grad),
    "added to": lambda grad: torch.zeros(grad.shape, device=grad.device).add_(grad),
}


@on_each_device
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_who_reads_a_gradient_that_has_left_is_told(device, read):
    pair = Summed(device)
    pair.backward()
    with pytest.raises(RuntimeError, match="max_grad_norm or clip_and_step"):
        read(pair.params[8].grad)
    with pytest.raises(RuntimeError, match="max_grad_norm or clip_and_step"):
        nn.utils.clip_grad_norm_(pair.params, 1.0)
    assert "in host memory" in repr(pair.params[8].grad)
    pair.step()
    pair.check()


@on_each_device
def test_gradients_that_were_kept_and_are_put_back(device):
    """Their sum is gone: that is said, and nothing is stepped by what came since."""
    pair = Summed(device)
    pair.train(3)
    pair.backward()
    kept = [p.grad for p in pair.params]
    pair.zero_grad()
    pair.backward()
    for param, grad in zip(pair.params, kept, strict=True):
        param.grad = grad
    with pytest.raises(RuntimeError, match="cannot be kept and put back"):
        pair.ours.step()
    pair.zero_grad()
    pair.check()
    pair.train(3)
    pair.backward()
    kept = pair.params[4].grad
    pair.params[4].grad = None
    pair.params[4].grad = kept  # before anybody could see
    pair.step()
    pair.check()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@on_each_device
def test_a_backward_that_makes_a_graph(device):
    pair = Summed(device)
    pair.train(2)
    grads = [pair.draw(p) for p in pair.params]
    for _ in range(2):
        torch.autograd.backward(pair.params, grads, create_graph=True)
    pair.sums = [grad + grad for grad in grads]
    pair.step()
    pair.check()


@on_each_device
def test_gradients_that_others_hold_and_write_to(device):
    """What was given to backward is copied before that goes on."""
    pair = Summed(device)
    pair.train(2)
    for _ in range(3):
        grads = [pair.draw(p) for p in pair.params]
        torch.autograd.backward(pair.params, grads)
        for i, grad in enumerate(grads):
            pair.sums[i] = grad.clone() if pair.sums[i] is None else pair.sums[i] + grad
            grad.fill_(9.0)
    pair.step()
    pair.check()


@on_each_device
def test_a_model_that_gets_another_dtype_between_two_backwards(device):
    net = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 6)).to(device)
    pair = Summed(device, params=net.parameters())
    pair.train(3)
    pair.backward()
    for model in (net, nn.ParameterList(pair.twins)):
        for param in model.parameters():
            param.grad = None if model is not net else param.grad
        model.to(BF16)
    pair.backward()
    pair.step()
    pair.check()


@on_each_device
def test_a_backward_while_the_last_step_is_under_way(device, monkeypatch):
    """Its gradients wait until the step has read the sums, those of buckets behind it too."""
    small_parts(monkeypatch, most=192)
    model = nn.ParameterList(make_params(device))
    pair = Summed(device, params=model.parameters(), model=model)
    pair.train(4)
    pair.backward(times=2)  # more than expected
    pair.give()
    gate = Gate(monkeypatch, "step")
    pair.ours.step()
    gate.await_thread()
    pair.plain.step()
    pair.sums = [None] * 9
    gate.open_soon()
    pair.backward(times=2)
    pair.give()
    pair.ours.step()
    pair.plain.step()
    pair.zero_grad()
    pair.check()
    pair.train(3)


@on_each_device
def test_gradients_of_a_model(device):
    """As in training: the device keeps none of them, whatever the number of micro-batches is."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6)).to(device, BF16)
    pair = Summed(device, params=net.parameters(), model=net, master="float32")
    x = torch.randn(4, 6, generator=pair.generator).to(device, BF16)
    for step in range(8):
        for _ in range(3 if step else 1):
            loss = net(x).square().sum()
            grads = torch.autograd.grad(loss, pair.params, retain_graph=True)
            loss.backward()
            assert all(sent(p.grad) is not None for p in pair.params)
            for i, grad in enumerate(grads):
                had = pair.sums[i]
                pair.sums[i] = grad.float() if had is None else had + grad.float()
        pair.step()
    pair.check()
    assert pair.ours.stats()["committed"] >= 5


@on_each_device
def test_the_share_that_stays_keeps_its_gradients(device):
    pair = Pair(device, free_grads=True, gpu_fraction=1)
    pair.train(4)
    pair.backward()
    assert all(p.grad is not None for p in pair.params)


def thawed(pair):
    for i in (1, 4):
        pair.params[i].requires_grad_()
        grad = pair.draw(pair.params[i])
        torch.autograd.backward([pair.params[i]], [grad.clone()])
        pair.sums[i] = grad


def replaced_state(pair):
    for optimizer, params in pair.both():
        entry = optimizer.state[params[8]]
        entry["exp_avg"] = entry["exp_avg"] * 2


def loaded(pair):
    for optimizer, _ in pair.both():
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def added(pair):
    for optimizer, params in pair.both():
        new = make_params(params[0].device, seed=5)
        optimizer.add_param_group({"params": new})
        params += new
    pair.sums += [None] * 9


def with_another_layout(pair):
    for _, params in pair.both():
        params[0].data = params[0].data.clone()
        params[2].data = params[2].data.contiguous()


@on_each_device
@pytest.mark.parametrize(
    "change", [thawed, replaced_state, loaded, added, with_another_layout], ids=lambda f: f.__name__
)
def test_buckets_made_anew_between_backward_and_step(device, change):
    """Gradients that have left are not lost."""
    params = make_params(device)
    if change is thawed:
        for i in (1, 4):
            params[i].requires_grad_(False)
    pair = Summed(device, params=params)
    pair.train(3)
    pair.backward(times=2)
    await_speculation(pair.ours)
    change(pair)
    pair.step()
    pair.check()
    pair.train(3)

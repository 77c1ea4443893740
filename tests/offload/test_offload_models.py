"""Models: weights that are waited for module by module; tied, compiled, checkpointed, copied."""

import copy

import pytest
import torch
from offload_cases import WARM, Gate, Pair, await_speculation, small_parts
from optim_cases import BF16, assert_same_bits, on_each_device
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepspeed_ext.offload.bucket import HostBucket

STEPS = 8


class Net(nn.Module):
    """An embedding that is the head too, a norm, a weight that is used without a module."""

    def __init__(self, device="cpu", recompute=None, layers=3):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(17, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))
        self.norm = nn.LayerNorm(8)
        self.scale = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 17, bias=False)
        self.head.weight = self.embedding.weight
        self.recompute = recompute
        self.to(device)

    def forward(self, tokens):
        x = self.embedding(tokens) * self.scale
        for layer in self.layers:
            if self.recompute is None:
                x = x + torch.tanh(layer(x))
            else:
                run = lambda x, layer=layer: x + torch.tanh(layer(x))  # noqa: E731
                x = checkpoint(run, x, use_reentrant=self.recompute)
        return self.head(self.norm(x))


def train(pair, net, steps=STEPS, times=1):
    """Steps on losses of the net, whose gradients the twins get."""
    for _ in range(steps):
        for _ in range(times):
            tokens = torch.randint(0, 17, (3, 5), generator=pair.generator)
            tokens = tokens.to(pair.params[0].device)
            nn.functional.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten()).backward()
        pair.step()
    pair.check()


def pair_of(net, device="cpu", **settings):
    """A pair for a net whose modules find the weights that the plain class has."""
    pair = Pair(device, params=net.parameters(), **settings)
    twins = dict(zip(map(id, pair.params), pair.twins, strict=True))

    @torch.compiler.disable
    def look(module, args):
        own = [p for p in module.parameters(recurse=False) if id(p) in twins]
        assert_same_bits(own, [twins[id(p)] for p in own])

    for module in net.modules():
        module.register_forward_pre_hook(look)
    return pair


@on_each_device
@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("waits", [False, True])
def test_a_model_with_tied_weights(device, waits, times, monkeypatch):
    small_parts(monkeypatch, most=256)
    net = Net(device)
    pair = pair_of(net, device, **({"model": net} if waits else {}))
    train(pair, net, times=times)
    pair.check_speculated(STEPS, len(pair.ours._pipeline._buckets))


@on_each_device
@pytest.mark.parametrize("recompute", [False, True])
def test_recomputed_blocks(device, recompute, monkeypatch):
    small_parts(monkeypatch, most=256)
    net = Net(device, recompute)
    pair = pair_of(net, device, model=net)
    train(pair, net)
    assert pair.ours.stats()["committed"] >= 3 * (STEPS - 3)


@on_each_device
def test_a_weight_that_several_reentrant_checkpoints_share(device):
    """Its hook runs once for each of them: the first gradient is not all of it."""
    net = Net(device, recompute=True)
    net.layers = nn.ModuleList([net.layers[0]] * 3)
    pair = pair_of(net, device)
    train(pair, net)


@on_each_device
@pytest.mark.parametrize("way", ["wrapped", "in place", "wrapped afterwards"])
def test_compiled_models(device, way):
    net = Net(device)
    if way == "in place":
        net.compile(backend="eager")
    watched = torch.compile(net, backend="eager") if way == "wrapped" else net
    pair = pair_of(net, device, model=watched)
    if way == "wrapped afterwards":
        watched = torch.compile(net, backend="eager")
    train(pair, watched)
    pair.check_speculated(STEPS)


@on_each_device
def test_a_step_within_compiled_code(device):
    net = Net(device)
    pair = pair_of(net, device)
    graphs = []
    step = torch.compile(
        lambda: pair.ours.step(), backend=lambda graph, _: graphs.append(graph) or graph.forward
    )
    for _ in range(5):
        pair.backward()
        pair.give()
        await_speculation(pair.ours)
        step()
        pair.plain.step()
        pair.zero_grad()
        pair.check()
    assert not graphs
    pair.check_speculated(5)


@pytest.mark.parametrize("opaque", [False, True])
def test_forward_waits_module_by_module(opaque, monkeypatch):
    """The first layers run while the worker is held before the last one's weights."""
    small_parts(monkeypatch, most=128)
    layers = [nn.Linear(8, 8) for _ in range(4)]
    model = nn.Sequential(*layers)
    watched = torch.compile(model, backend="eager") if opaque else model
    pair = Pair(params=model.parameters(), model=watched)
    pair.train(WARM)
    held = pair.ours._pipeline.table[layers[3].weight].bucket
    seen = []
    for i, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda *_, i=i: seen.append((i, held.task is None)))
    gate = Gate(monkeypatch, "adopt", only=held)
    pair.backward()
    pair.give()
    await_speculation(pair.ours)
    pair.ours.step()
    gate.await_thread()
    layers[2].register_forward_hook(lambda *_: gate.open())
    if opaque:
        gate.open()
    watched(torch.ones(1, 8))
    assert [i for i, _ in seen] == [0, 1, 2, 3]
    assert [is_there for _, is_there in seen] == ([True] * 4 if opaque else [False] * 3 + [True])
    pair.plain.step()
    pair.check()


def test_state_dict_of_the_model_waits(monkeypatch):
    net = Net()
    pair = pair_of(net, model=net)
    pair.train(WARM)
    gate = Gate(monkeypatch, "adopt")
    pair.backward()
    pair.give()
    await_speculation(pair.ours)
    pair.ours.step()
    gate.await_thread()
    gate.open_soon()
    saved = {name: value.clone() for name, value in net.state_dict().items()}
    pair.plain.step()
    for (name, _), twin in zip(net.named_parameters(), pair.twins, strict=True):
        assert torch.equal(saved[name], twin), name


def test_weights_return_in_the_order_in_which_forward_wants_them(monkeypatch):
    """Whatever the order of the parameters is."""
    small_parts(monkeypatch, most=128)
    layers = [nn.Linear(8, 8) for _ in range(4)]
    model = nn.Sequential(*layers)
    params = [
        p for layer in (layers[2], layers[0], layers[3], layers[1]) for p in layer.parameters()
    ]
    pair = Pair(params=params, model=model)
    x = torch.ones(2, 8)

    def step():
        model(x).square().mean().backward()
        pair.step()

    for _ in range(WARM):
        step()
    sent = []
    original = HostBucket.adopt

    def noted(bucket, *args):
        sent.append(bucket)
        return original(bucket, *args)

    monkeypatch.setattr(HostBucket, "adopt", noted)
    with pytest.MonkeyPatch.context() as patch:
        blocker = Gate(patch, "step_speculatively")
        model(x).square().mean().backward()
        pair.give()
        blocker.await_thread()
        blocker.open_soon()
        pair.ours.step()
        pair.ours.synchronize()
    where = {id(p): i for i, layer in enumerate(layers) for p in layer.parameters()}
    first_use = [min(where[id(p)] for p in bucket.owners) for bucket in sent]
    assert first_use == sorted(first_use)


@on_each_device
def test_an_embedding_with_gradients_of_many_rows(device):
    """Backward of float16 under autocast: gradients have the dtype of the weights."""
    net = Net(device)
    pair = pair_of(net, device)
    for _ in range(5):
        tokens = torch.randint(0, 17, (3, 5), generator=pair.generator).to(device)
        with torch.autocast(device, dtype=BF16):
            loss = nn.functional.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        pair.step()
        pair.check()
    pair.check_speculated(5)


@on_each_device
def test_gradients_of_gradients(device):
    """With create_graph gradients are part of a graph, and are taken as they are."""
    params = [nn.Parameter(torch.randn(5, 3).to(device)) for _ in range(3)]
    pair = Pair(device, params=params, max_grad_norm=1e9)
    for _ in range(5):
        loss = sum(p.pow(3).sum() for p in params)
        loss.backward(create_graph=True)
        pair.step(max_norm=1e9)
        pair.check()
    pair.check_speculated(5)


@on_each_device
def test_two_models_and_optimizers_side_by_side(device):
    nets = [Net(device), Net(device, layers=2)]
    pairs = [pair_of(net, device, model=net) for net in nets]
    for _ in range(STEPS):
        for pair, net in zip(pairs, nets, strict=True):
            train(pair, net, 1)
    for pair in pairs:
        pair.check_speculated(STEPS)


@on_each_device
def test_two_optimizers_of_one_model(device):
    net = Net(device)
    parts = [net.layers.parameters(), [*net.norm.parameters(), net.scale, net.head.weight]]
    pairs = [
        Pair(device, kind, params, model=net)
        for kind, params in zip(("adam", "lion"), parts, strict=True)
    ]
    for _ in range(STEPS):
        tokens = torch.randint(0, 17, (3, 5), generator=pairs[0].generator).to(device)
        nn.functional.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten()).backward()
        for pair in pairs:
            pair.step()
            pair.check()
    for pair in pairs:
        pair.check_speculated(STEPS)


@on_each_device
def test_copies_of_a_watched_model_are_watched_by_nobody(device):
    net = Net(device)
    pair = pair_of(net, device, model=net)
    train(pair, net, 3)
    before = pair.ours.stats()
    other = copy.deepcopy(net)
    other(torch.zeros(1, 2, dtype=torch.long, device=device)).sum().backward()
    assert pair.ours.stats() == before
    train(pair, net, 3)

"""Twenty steps of a streamed model are those of a model in memory, bit for bit."""

import copy
import pickle
import threading

import pytest
import torch
import torch.distributed as dist
from offload_cases import await_speculation, small_parts
from stream_cases import (
    Model,
    assert_equal_models,
    loss_of,
    on_disk,
    pair,
    some_ids,
)
from torch import nn

from deepspeed_ext import offload, zero
from deepspeed_ext.offload import bucket
from deepspeed_ext.offload.streamed import is_beside
from deepspeed_ext.offload.worker import Task, Urgency
from deepspeed_ext.optim import DeepSpeedCPUAdam

STEPS = 20
FORMATS = {
    "float32": {},
    "bf16 moments": {"state_dtype": torch.bfloat16},
    "compact": {"state_dtype": torch.uint8, "master": "remainder"},
    "masters": {"master_weights": True},
}


def train(model, optimizer, device, micro_steps=1, each=lambda step: None, max_norm=None):
    for step in range(STEPS):
        each(step)
        for micro in range(micro_steps):
            loss_of(model, some_ids(device, 100 * step + micro)).backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.long
@pytest.mark.parametrize("state", FORMATS)
@pytest.mark.parametrize("micro_steps", [1, 3])
@pytest.mark.parametrize("kind", ["offload", "free_grads", "free_grads from disk"])
@pytest.mark.parametrize("max_norm", [None, 1e-3])
def test_with_offload_optimizer(device, state, micro_steps, kind, max_norm, tmp_path):
    if device == "cuda" and max_norm and kind == "offload":
        pytest.skip("a norm of gradients on a GPU has other last bits")
    dtype = torch.float32 if state in ("float32", "bf16 moments") else torch.bfloat16
    rest = on_disk(tmp_path) if "disk" in kind else None
    streamed, kept, handle = pair(device, rest=rest, dtype=dtype, unused=True, shared=True)
    for model in (streamed, kept):
        with offload.OffloadOptimizer(
            model.parameters(),
            model=model,
            lr=1e-2,
            free_grads="free_grads" in kind,
            max_grad_norm=max_norm,
            **FORMATS[state],
        ) as optimizer:
            train(model, optimizer, device, micro_steps)
            optimizer.synchronize()
            assert max_norm is None or optimizer.grad_norm > max_norm  # it bites
    assert_equal_models(streamed, kept)
    check_disk(handle, rest)


def test_it_is_stepped_where_it_rests_and_ahead(device, rest):
    streamed, kept, handle = pair(device, rest=rest, shared=True)
    found = []
    for model in (streamed, kept):
        with offload.OffloadOptimizer(
            model.parameters(), model=model, lr=1e-2, free_grads=True
        ) as optimizer:
            for step in range(6):
                loss_of(model, some_ids(device, step)).backward()
                await_speculation(optimizer)
                if step == 3:  # by hand, past version counters
                    for param in model.parameters():
                        param.data.mul_(0.9)
                optimizer.step()
                if rest and model is streamed:
                    optimizer.synchronize()
                    check_disk(handle, rest)
            optimizer.synchronize()
            found.append(optimizer.stats())
            if model is streamed:
                table = optimizer._pipeline.table
                for param in model.layers.parameters():
                    if param.ndim > 1:
                        assert table[param].copy.data_ptr() == param.data_ptr()
    assert_equal_models(streamed, kept)
    ours, theirs = found
    assert ours["committed"] > 0 and theirs["committed"] > 0
    assert ours["bytes_back"] < theirs["bytes_back"]
    check_disk(handle, rest)


def test_what_is_wanted_first_is_stepped_first(device, monkeypatch):
    """Of what rests, a step that was not taken ahead does not wait for all that were."""
    small_parts(monkeypatch)
    model, order, gate = Model(), [], threading.Event()
    zero.stream(model, to=device)
    with offload.OffloadOptimizer(
        model.layers.parameters(), model=model, lr=1e-2, free_grads=True
    ) as optimizer:
        for step in range(3):
            loss_of(model, some_ids(device, step)).backward()
            await_speculation(optimizer)
            if step == 2:
                resting = [b for b in optimizer._pipeline._buckets if b.is_at_rest()]
                resting[0].discard()
                for name in ("step", "adopt"):
                    way = getattr(bucket.HostBucket, name)
                    monkeypatch.setattr(
                        bucket.HostBucket,
                        name,
                        lambda b, *more, way=way, name=name: (
                            order.append((b.place, name)),
                            way(b, *more),
                        ),
                    )
                optimizer._pipeline.worker.submit(Task(gate.wait, Urgency.ADD))
            optimizer.step()
            gate.set() if step == 2 else None
            optimizer.zero_grad()
        optimizer.synchronize()
    assert len(resting) > 2 and order[0] == (resting[0].place, "step")
    places = [place for place, _ in order if place in {b.place for b in resting}]
    assert places == sorted(places) and ("adopt" in {name for _, name in order})


def test_it_is_stepped_ahead_beside_a_process_group_of_one(device):
    """What does not stream leaves early, too, or no bucket that has any of it would be stepped."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        streamed, kept, handle = pair(device, dtype=torch.bfloat16)
        copies = copy.deepcopy(streamed), pickle.loads(pickle.dumps(streamed))
        for model in (streamed, kept):
            with offload.OffloadOptimizer(
                model.parameters(), model=model, lr=1e-2, free_grads=True, **FORMATS["compact"]
            ) as optimizer:
                for step in range(4):
                    for micro in range(2):
                        loss_of(model, some_ids(device, 2 * step + micro)).backward()
                    await_speculation(optimizer)
                    optimizer.step()
                    optimizer.zero_grad()
                optimizer.synchronize()
                assert (optimizer.stats()["committed"] > 0) == (model is streamed)
        assert all(map(is_beside, streamed.parameters()))
        assert not any(is_beside(param) for model in copies for param in model.parameters())
        handle.close()
        assert not any(map(is_beside, streamed.parameters()))
    finally:
        dist.destroy_process_group()


def test_a_forward_right_before_a_step_has_the_old_weights(device, rest):
    """Its copies are behind all that the device has to do, and the step may be soon done."""
    streamed, kept, _ = pair(device, rest=rest)
    found = []
    for model in (streamed, kept):
        with offload.OffloadOptimizer(
            model.parameters(), model=model, lr=1e-2, free_grads=True
        ) as optimizer:
            for step in range(4):
                loss_of(model, some_ids(device, step)).backward()
                await_speculation(optimizer)
                if device == "cuda":
                    torch.cuda.synchronize()
                    torch.cuda._sleep(200_000_000)
                found.append(loss_of(model, some_ids(device, 9)).detach())
                optimizer.step()
                optimizer.zero_grad()
    losses = [loss.item() for loss in found]
    assert losses[:4] == losses[4:]
    assert_equal_models(streamed, kept)


@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("form", ["compact", "masters"])
def test_writes_past_version_counters_where_all_weights_rest(form, max_norm, device):
    """The worker finds them, before it commits what it has stepped ahead, or steps."""
    if device == "cuda" and max_norm:
        pytest.skip("a norm of gradients on a GPU has other last bits")
    kept = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(3)))
    kept = kept.to(device, torch.bfloat16)
    streamed = copy.deepcopy(kept)
    zero.stream(streamed, to=device, blocks=["0", "1", "2"])
    stats = {}
    for model in (streamed, kept):
        with offload.OffloadOptimizer(
            model.parameters(), model=model, lr=1e-2, free_grads=True, **FORMATS[form]
        ) as optimizer:
            for step in range(9):
                x = torch.linspace(-1, 1, 64, device=device).bfloat16().view(4, 16) + step
                model(x).square().sum().backward()
                await_speculation(optimizer)
                if step % 3 == 2:
                    with torch.no_grad():
                        model[1].weight.data.mul_(0.9)
                        if step == 5:  # this counts
                            model[0].weight.mul_(0.9)
                optimizer.step() if max_norm is None else optimizer.clip_and_step(max_norm)
            optimizer.synchronize()
            stats[model] = optimizer.stats()
    assert_equal_models(streamed, kept)
    if max_norm is None:
        assert stats[streamed]["committed"] > 0 < stats[streamed]["discarded"]


@pytest.mark.parametrize("where", ["data", "dtype", "load"])
def test_weights_that_get_other_memory_are_stepped_there(device, rest, where):
    streamed, kept, handle = pair(device, rest=rest)
    for model in (streamed, kept):
        with offload.OffloadOptimizer(
            model.parameters(), model=model, lr=1e-2, free_grads=True
        ) as optimizer:
            for step in range(5):
                loss_of(model, some_ids(device, step)).backward()
                if step == 2 and where == "data":
                    for param in model.parameters():
                        param.data = param.data * 0.5
                if step == 3 and where == "load":
                    state = {key: value * 0.5 for key, value in model.state_dict().items()}
                    model.load_state_dict(state)
                optimizer.step()
                if step == 2 and where == "dtype":
                    model.to(torch.bfloat16)
            optimizer.synchronize()
    assert_equal_models(streamed, kept)
    check_disk(handle, rest)


def check_disk(handle, rest):
    """Weights that rest in a file are there again, whoever has stepped them."""
    stats = handle.stats()
    assert stats["disk_bytes"] == (stats["resting_bytes"] if rest else 0)


@pytest.mark.parametrize("micro_steps", [1, 3])
def test_with_state_on_disk(device, micro_steps, tmp_path):
    streamed, kept, _ = pair(device, rest=on_disk(tmp_path) if micro_steps > 1 else None)
    for model in (streamed, kept):
        with offload.OffloadOptimizer(
            model.parameters(),
            model=model,
            lr=1e-2,
            device="nvme",
            nvme_path=tmp_path,
            nvme_fraction=1.0,
        ) as optimizer:
            train(model, optimizer, device, micro_steps)
            optimizer.synchronize()
    assert_equal_models(streamed, kept)


@pytest.mark.parametrize("free", [False, True])
def test_commits(device, rest, free, tmp_path):
    """A commit copies weights that rest, and a model that streams goes on from it, in place."""
    wanted, _, handle = pair(device, rest=rest, dtype=torch.bfloat16)
    resumed = Model(dtype=torch.bfloat16)
    with torch.no_grad():
        for param in resumed.parameters():
            param.zero_()
    where = {"device": "nvme", "nvme_path": tmp_path / "run", "durable": True, "free_grads": free}
    for model in (wanted, resumed):
        if model is resumed:
            handle = zero.stream(model, to=device, **rest)
        places = [param.data_ptr() for param in model.parameters()]
        with offload.OffloadOptimizer(
            model.parameters(), model=model, lr=1e-2, resume=True, **where, **FORMATS["compact"]
        ) as optimizer:
            first = 0 if optimizer.committed is None else optimizer.committed["step"]
            assert (first > 0) == (model is resumed)
            for step in range(first, 8):
                loss_of(model, some_ids(device, step)).backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 3:
                    optimizer.commit(step=step + 1)
        assert [param.data_ptr() for param in model.parameters()] == places or not rest
        check_disk(handle, rest)
    assert_equal_models(resumed, wanted)


@pytest.mark.parametrize("state", FORMATS)
def test_with_a_cpu_optimizer_that_clips(state):
    dtype = torch.float32 if state in ("float32", "bf16 moments") else torch.bfloat16
    streamed, kept, _ = pair("cpu", dtype=dtype, unused=True)
    for model in (streamed, kept):
        optimizer = DeepSpeedCPUAdam(model.parameters(), lr=1e-2, **FORMATS[state])
        train(model, optimizer, "cpu", 3, max_norm=0.05)
    assert_equal_models(streamed, kept)


STEPPED = {
    "torch's": lambda model, params: torch.optim.AdamW(params, lr=1e-2),
    "offload": lambda model, params: offload.OffloadOptimizer(params, model=model, lr=1e-2),
    "free_grads": lambda model, params: offload.OffloadOptimizer(
        params, model=model, lr=1e-2, free_grads=True, max_grad_norm=1e-2
    ),
}


@pytest.mark.parametrize("kind", STEPPED)
def test_frozen_thawed_and_added_later(device, rest, kind):
    if device == "cuda" and kind == "torch's":
        pytest.skip("steps of torch on the CPU have other last bits than those on a GPU")
    streamed, kept, _ = pair(device, lambda model: model.layers[1].requires_grad_(False), rest)
    for model in (streamed, kept):
        late = set(map(id, model.layers[2].parameters()))
        first = [p for p in model.parameters() if id(p) not in late]
        optimizer = STEPPED[kind](model, first)

        def change(step, model=model, optimizer=optimizer):
            if step == 5:
                model.layers[1].requires_grad_(True)
            if step == 8:
                optimizer.add_param_group({"params": model.layers[2].parameters(), "lr": 1e-3})
            if step == 11:
                model.layers[0].up.requires_grad_(False)

        train(model, optimizer, device, 2, each=change)
    assert_equal_models(streamed, kept)


class Adapted(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.full((2, base.in_features), 0.1))
        self.b = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x):
        return self.base(x) + x @ self.a.t() @ self.b.t()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["sgd", "free_grads"])
def test_adapters(device, rest, when, kind):
    def adapt(model):
        model.requires_grad_(False)
        for block in model.layers:
            block.up = Adapted(block.up).to(next(model.words.parameters()).device)

    change = adapt if when == "before" else lambda model: None
    streamed, kept, handle = pair(device, change, rest)
    if when == "after":
        adapt(streamed), adapt(kept)
    for model in (streamed, kept):
        params = [p for p in model.parameters() if p.requires_grad]
        made = STEPPED.get(kind, lambda _, params: torch.optim.SGD(params, lr=0.1))
        optimizer = made(model, params)
        if (device, when) == ("cuda", "before") and kind == "free_grads":
            optimizer.max_grad_norm = None  # small ones in memory have theirs from the GPU
        train(model, optimizer, device, 2)
    assert_equal_models(streamed, kept)
    if when == "after":  # those before are not small beside such a narrow block
        assert streamed.layers[0].up.a.device.type == device
        assert handle.stats()["bytes_out"] == 0 or device == "cpu"


def test_an_optimizer_that_was_made_before(device):
    kept = Model()
    streamed = copy.deepcopy(kept)
    optimizers = {
        model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        for model in (streamed, kept)
    }
    handle = zero.stream(streamed, to=device)
    kept.to(device)
    for model, optimizer in optimizers.items():
        train(model, optimizer, device)
    both = zip(streamed.parameters(), kept.parameters(), strict=True)
    for param, other in both:
        torch.testing.assert_close(param.cpu(), other.cpu())
    assert handle.stats()["ahead"] > 0

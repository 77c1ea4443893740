"""State dicts: those of the plain classes and of torch, both ways; distributed checkpoint."""

import copy
import io

import pytest
import torch
import torch.distributed.checkpoint as dcp
from offload_cases import (
    FORMATS,
    KINDS,
    Pair,
    assert_same_state,
    await_speculation,
    small_parts,
    warm,
)
from optim_cases import (
    BF16,
    F32,
    assert_same_bits,
    make_params,
    on_each_device,
    snapshot,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from deepspeed_ext.offload import OffloadOptimizer
from deepspeed_ext.optim import DeepSpeedCPUAdam


def clones(params):
    return copy.deepcopy(list(params))


@on_each_device
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_plain_class_goes_on_from_an_offloaded_one_and_back(device, kind, name):
    if kind == "centered" and FORMATS[name].get("state_dtype"):
        pytest.skip("centered needs state in float32")
    pair = warm(device, kind=kind, params=make_params(device, BF16), **FORMATS[name])
    saved = snapshot(pair.ours), snapshot(pair.plain)
    other = Pair(device, kind, clones(pair.params), **FORMATS[name])
    other.ours.load_state_dict(saved[1])
    other.plain.load_state_dict(saved[0])
    other.check()
    other.train(4)


@on_each_device
@pytest.mark.parametrize("fraction", [0, 0.5, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_options_that_change_after_a_load(device, kind, fraction):
    """As a scheduler changes them; a load makes new groups of options, and may keep all else."""
    pair = warm(device, kind=kind, gpu_fraction=fraction)
    for optimizer, _ in pair.both():
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.param_groups[0]["lr"] *= 100
    pair.train(3)


@on_each_device
@pytest.mark.parametrize(("before", "after"), [("float32", "compact"), ("compact", "master")])
def test_from_one_format_to_another(device, before, after):
    """Codes and halves of master weights are made from float32, and the other way round."""
    old = warm(device, params=make_params(device, BF16), **FORMATS[before])
    new = Pair(device, params=clones(old.params), **FORMATS[after])
    for optimizer, source in ((new.ours, old.ours), (new.plain, old.plain)):
        optimizer.load_state_dict(snapshot(source))
    new.check()
    new.train(4)


@on_each_device
@pytest.mark.parametrize("route", [{}, {"foreach": True}, {"fused": True}, {"capturable": True}])
def test_torch_adamw_both_ways(device, route):
    if device == "cpu" and "capturable" in route:
        pytest.skip("torch has it for CUDA")
    params = make_params(device)
    theirs = torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, **route)
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        for param in params:
            # In its layout: torch's fused step on CUDA takes no other.
            param.grad = torch.empty_like(param)
            param.grad.copy_(torch.randn(param.shape, generator=generator))
        theirs.step()
    saved = snapshot(theirs)
    pair = Pair(device, params=clones(params))
    for param in pair.params:
        param.grad = None
    for optimizer, _ in pair.both():
        optimizer.load_state_dict(copy.deepcopy(saved))
    pair.train(4)
    back = torch.optim.AdamW(clones(pair.params), **route)
    back.load_state_dict(copy.deepcopy(pair.ours.state_dict()))
    for param in back.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    back.step()
    for i, param in enumerate(pair.params):
        assert back.state_dict()["state"][i]["step"] == 8
        param.grad = torch.ones_like(param)
    pair.ours.step()
    for mine, its in zip(pair.params, back.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-7)


@on_each_device
def test_a_state_dict_is_a_view_and_costs_no_copy(device):
    pair = warm(device)
    saved = pair.ours.state_dict()
    for i, param in enumerate(pair.params):
        for key, value in pair.ours.state[param].items():
            assert saved["state"][i][key].data_ptr() == value.data_ptr()
            assert value.device.type == "cpu"


def test_a_file_has_each_byte_once(monkeypatch):
    small_parts(monkeypatch)
    pair = warm(params=[nn.Parameter(torch.randn(1000)) for _ in range(5)])
    sizes = []
    for optimizer, params in pair.both():
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        sizes.append(file.tell())
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        assert torch.equal(saved["state"][3]["exp_avg"], optimizer.state[params[3]]["exp_avg"])
    assert sizes[0] < 1.2 * sizes[1]


@on_each_device
def test_options_come_with_the_state(device):
    pair = warm(device)
    saved = snapshot(pair.plain)
    saved["param_groups"][0].update(lr=0.7, betas=(0.1, 0.2), own="kept", foreach=None)
    for optimizer, _ in pair.both():
        optimizer.load_state_dict(copy.deepcopy(saved))
    assert pair.ours.param_groups[0]["lr"] == 0.7
    pair.train(4)


@on_each_device
def test_a_refused_state_dict_changes_nothing(device):
    pair = warm(device)
    pair.backward()
    await_speculation(pair.ours)
    good = snapshot(pair.plain)
    wrong = {
        "exp_avg_sq has the value -1": lambda s: s["state"][8]["exp_avg_sq"].fill_(-1),
        "has shape": lambda s: s["state"][8].update(exp_avg=torch.ones(4)),
        "expected exp_avg among them": lambda s: s["state"][8].pop("exp_avg"),
        "doesn't match the size": lambda s: s["param_groups"][0]["params"].pop(),
        "lr is -1": lambda s: s["param_groups"][0].update(lr=-1),
    }
    for text, spoil in wrong.items():
        saved = copy.deepcopy(good)
        spoil(saved)
        with pytest.raises(ValueError, match=text):
            pair.ours.load_state_dict(saved)
        assert_same_state(pair.ours, pair.plain)
    for saved, kind, text in (
        ([], TypeError, "state_dict is a list"),
        ({}, ValueError, "has keys"),
    ):
        with pytest.raises(kind, match=f"OffloadOptimizer: .*{text}"):
            pair.ours.load_state_dict(saved)
    pair.step()
    pair.check()
    pair.train(3)


@on_each_device
def test_hooks_of_loading_and_saving(device):
    pair = warm(device)
    seen = []
    pair.ours.register_state_dict_pre_hook(lambda o: seen.append("before saving"))
    pair.ours.register_state_dict_post_hook(lambda o, s: seen.append("after saving"))
    pair.ours.register_load_state_dict_pre_hook(
        lambda o, s: seen.append("before") or s | {"note": 1}
    )
    pair.ours.register_load_state_dict_post_hook(lambda o: seen.append("after"))
    pair.ours.load_state_dict(copy.deepcopy(pair.ours.state_dict()))
    assert seen == ["before saving", "after saving", "before", "after"]
    pair.train(2)


@on_each_device
def test_state_replaced_as_a_whole(device):
    """As some libraries do: they set `state` or write to it."""
    pair = warm(device)
    for optimizer, params in pair.both():
        entries = {p: {k: v.clone() for k, v in optimizer.state[p].items()} for p in params}
        entries[params[0]]["exp_avg"].mul_(2)
        optimizer.state = entries
    pair.train(3)
    for optimizer, _ in pair.both():
        optimizer.state.clear()
    pair.train(3)
    assert pair.ours.state[pair.params[0]]["step"] == 3
    assert pair.ours.state.get(nn.Parameter(torch.ones(1))) is None
    assert len(pair.ours.state) == len(list(pair.ours.state)) == 9


# Distributed checkpoint, in one process without a group


class Net(nn.Module):
    def __init__(self, dtype=F32):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 5, dtype=dtype), nn.Linear(5, 3, dtype=dtype)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


def net_and_pair(device, dtype=F32, **settings):
    net, twin = Net(dtype).to(device), Net(dtype).to(device)
    pair = Pair(device, params=net.parameters(), **settings)
    pair.twins[:] = []
    plain = KINDS["adam"].offloaded if device == "cpu" else KINDS["adam"].on_cuda
    settings.pop("model", None)
    pair.twins, pair.plain = (
        list(twin.parameters()),
        plain(twin.parameters(), **KINDS["adam"].options | settings),
    )
    return net, twin, pair


@on_each_device
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_dry_step_of_distributed_checkpoint_is_none(device, dtype):
    """It steps an optimizer without state, with lr 0 and gradients of zeros, before it saves."""
    net, twin, pair = net_and_pair(device, dtype, master="float32")
    before = [p.detach().clone() for p in pair.params]
    mine = get_optimizer_state_dict(net, pair.ours)["state"]
    theirs = get_optimizer_state_dict(twin, pair.plain)["state"]
    assert_same_bits(pair.params, before)
    assert mine.keys() == theirs.keys()
    for name, entry in mine.items():
        assert entry["step"] == theirs[name]["step"] == 0, name
        assert not entry["exp_avg"].any()
    pair.train(4)


@on_each_device
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("name", ["float32", "master", "remainder"])
def test_distributed_checkpoint(device, flat, name, tmp_path):
    net, _, pair = net_and_pair(device, BF16, **FORMATS[name])
    pair.train(4)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = get_optimizer_state_dict(net, pair.ours, options=options)
    dcp.save({"optimizer": state}, checkpoint_id=tmp_path / "saved", no_dist=True)

    other_net, other_twin, other = net_and_pair(device, BF16, **FORMATS[name])
    for params in (other.params, other.twins):
        for param, value in zip(params, pair.params, strict=True):
            param.data.copy_(value.detach())
    for its, optimizer in ((other_net, other.ours), (other_twin, other.plain)):
        content = {"optimizer": get_optimizer_state_dict(its, optimizer, options=options)}
        dcp.load(content, checkpoint_id=tmp_path / "saved", no_dist=True)
        set_optimizer_state_dict(its, optimizer, content["optimizer"], options=options)
    other.check()
    other.train(4)


@on_each_device
def test_a_full_state_dict_by_names_while_a_step_is_under_way(device):
    net, twin, pair = net_and_pair(device, model=None)
    pair.train(4)
    pair.backward()
    pair.give()
    await_speculation(pair.ours)
    pair.ours.step()
    pair.plain.step()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    mine = get_optimizer_state_dict(net, pair.ours, options=options)
    theirs = get_optimizer_state_dict(twin, pair.plain, options=options)
    for name, entry in theirs["state"].items():
        for key, value in entry.items():
            assert torch.equal(mine["state"][name][key].cpu(), value.cpu()), (name, key)
    assert mine["param_groups"] == theirs["param_groups"]


def test_a_state_dict_of_many_parameters_says_which_they_are():
    params = make_params()
    optimizer = OffloadOptimizer([{"params": params[:4]}, {"params": params[4:]}])
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    saved = optimizer.state_dict()
    assert [group["params"] for group in saved["param_groups"]] == [[0, 1, 2, 3], [4, 5, 6, 7, 8]]
    for i, param in enumerate(params):
        assert saved["state"][i]["exp_avg"].shape == param.shape
        assert saved["state"][i]["exp_avg"].stride() == param.stride()


@pytest.mark.parametrize("master", ("float32", "remainder"))
def test_state_that_comes_after_other_weights_fits_them(master):
    """Host copies of an optimizer that has not stepped yet follow weights that were loaded."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(64).bfloat16()) for _ in range(2)]
    options = {"lr": 0.1, "master": master}
    saved = OffloadOptimizer(params[:1], **options)
    params[0].grad = torch.randn(64).bfloat16()
    saved.step()
    for other in ("float32", "remainder"):
        loaded = OffloadOptimizer(params[1:], **options | {"master": other})
        with torch.no_grad():
            params[1].copy_(params[0])
        loaded.load_state_dict(copy.deepcopy(saved.state_dict()))
        params[1].grad = torch.ones(64).bfloat16()
        plain = DeepSpeedCPUAdam([twin := nn.Parameter(params[0].detach().clone())], **options)
        plain.load_state_dict(copy.deepcopy(saved.state_dict()))
        twin.grad = torch.ones(64).bfloat16()
        plain.step()
        loaded.step()
        assert torch.equal(twin, params[1])
        entries = plain.state[twin], loaded.state[params[1]]
        for key in entries[0].keys() & entries[1].keys():
            assert torch.equal(entries[0][key], entries[1][key]), key
        with torch.no_grad():
            params[1].normal_()

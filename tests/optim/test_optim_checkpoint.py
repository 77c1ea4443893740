"""Saving and loading: both ways with torch, to the bit with itself, dtypes and hooks kept."""

import copy
import io
import pickle

import pytest
import torch
from kinds import KINDS, each_kind
from optim_cases import (
    BF16,
    F32,
    adam,
    assert_close,
    assert_in_buffers,
    assert_same_bits,
    give_grads,
    make_params,
    on_each_device,
    snapshot,
    state_tensors,
    twins,
)
from torch.nn import Parameter

from deepspeed_ext.optim import DeepSpeedCPUAdagrad, FusedSGD

OPTIONS = {"lr": 1e-2, "weight_decay": 0.1}


def train(generator, optimizers, models, steps, missing=0.3):
    for _ in range(steps):
        give_grads(generator, *models, missing=missing)
        for optimizer in optimizers:
            optimizer.step()


EXCHANGED = [
    pytest.param(kind, options, route, id=f"{title}-{name}-{route}")
    for title, kind in KINDS.items()
    for name, options in kind.options.items()
    for route in (None, *kind.routes * (options is kind.usual))
]


@on_each_device
@pytest.mark.parametrize(("kind", "options", "route"), EXCHANGED)
def test_exchange_with_torch_at_step_50(device, kind, options, route):
    if device == "cuda" and kind is KINDS["adagrad"] and route == "fused":
        pytest.skip("torch has no fused Adagrad on CUDA")
    options = {"lr": 1e-2} | options
    taken = {route: True} if route else {}
    decoupled = {"decoupled": options["decoupled"]} if "decoupled" in options else {}
    # Contiguous parameters only: fused AdamW updates others wrongly on the CPU.
    first, second = twins(make_params(device)), twins(make_params(device))
    exact = twins(first, torch.float64)
    reference = kind.reference(exact, **options)
    ours = kind.make(first, device, **options)
    theirs = kind.reference(second, **options, **taken)
    generator = torch.Generator().manual_seed(1)
    later = [model[1:] for model in (first, second, exact)]  # the first parameter is frozen
    train(generator, [ours, theirs, reference], later, 50)

    ours_then, theirs_then = snapshot(ours), snapshot(theirs)
    ours = kind.make(first, device)
    ours.load_state_dict(theirs_then)
    theirs = kind.reference(second, **taken, **decoupled)
    theirs.load_state_dict(ours_then)
    train(generator, [ours, theirs, reference], [first, second, exact], 50)
    assert_close(first, exact, 100)
    assert_close(second, exact, 100)
    assert ours.param_groups[0].keys() >= ours.defaults.keys()
    assert ours.param_groups[0].get("fused") in (taken.get("fused"), False)
    assert_in_buffers(ours)


@on_each_device
@each_kind
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("way", ["memory", "file", "warm"])
def test_resumes_to_the_same_bits(device, kind, dtype, way):
    options = {"lr": 1e-2, "master_weights": True} | kind.usual
    options |= {"amsgrad": True} if kind is KINDS["adam"] else {}
    params = make_params(device, dtype)
    optimizer = kind.make(params, device, **options)
    generator = torch.Generator().manual_seed(2)
    train(generator, [optimizer], [params], 5)

    saved = {"model": [p.detach() for p in params], "optimizer": optimizer.state_dict()}
    if way == "file":
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True, map_location="cpu")
    else:
        saved = copy.deepcopy(saved)
    resumed_params = make_params(device, dtype, seed=9)
    resumed = kind.make(resumed_params, device, **options)
    if way == "warm":
        train(generator, [resumed], [resumed_params], 2)
    resumed.load_state_dict(saved["optimizer"])  # before the model: the order must not matter
    with torch.no_grad():
        for p, value in zip(resumed_params, saved["model"], strict=True):
            p.copy_(value)

    train(generator, [optimizer, resumed], [params, resumed_params], 5)
    assert_same_bits(resumed_params, params)
    assert_same_bits(state_tensors(resumed), state_tensors(optimizer))
    assert_in_buffers(resumed)


@pytest.mark.parametrize("empty", [{}, {"momentum_buffer": None}, {"step": 4.0}], ids=str)
def test_sgd_without_a_buffer_begins_one_as_torch_does(empty):
    options = dict(lr=0.1, momentum=0.9, dampening=0.5)
    first, second = make_params(), make_params()
    ours, theirs = FusedSGD(first, **options), torch.optim.SGD(second, **options)
    saved = theirs.state_dict() | {"state": {i: dict(empty) for i in range(len(first))}}
    ours.load_state_dict(saved)
    theirs.load_state_dict(saved)
    train(torch.Generator().manual_seed(3), [ours, theirs], [first, second], 3)
    assert_close(first, second, 3)


@on_each_device
def test_sgd_whose_momentum_comes_and_goes(device):
    first, second = make_params(device), make_params(device)
    options = dict(lr=0.1, dampening=0.5)
    ours, theirs = FusedSGD(first, **options), torch.optim.SGD(second, **options)
    generator = torch.Generator().manual_seed(3)
    for momentum in (0.0, 0.9, 0.0, 0.8):
        for optimizer in (ours, theirs):
            optimizer.param_groups[0]["momentum"] = momentum
        train(generator, [ours, theirs], [first, second], 3)
    assert_close(first, second, 12)
    assert_in_buffers(ours)


def test_adagrad_gives_torch_the_state_of_parameters_without_gradients():
    params = make_params()
    optimizer = DeepSpeedCPUAdagrad(params, initial_accumulator_value=0.5)
    params[1].grad = torch.ones_like(params[1])
    optimizer.step()
    state = optimizer.state_dict()["state"]
    assert sorted(state) == list(range(len(params)))
    for i, param in enumerate(params):
        assert state[i]["step"].item() == (i == 1)
        assert torch.equal(state[i]["sum"], torch.full_like(param, 0.5 + (i == 1)))
    assert list(optimizer.state) == [params[1]]


@on_each_device
def test_state_keeps_its_dtype(device):
    params = make_params(device, BF16)
    optimizer = adam(params, device)
    train(torch.Generator().manual_seed(3), [optimizer], [params], 2, missing=0)
    saved = snapshot(optimizer)
    optimizer.load_state_dict(saved)
    assert {t.dtype for t in state_tensors(optimizer)} == {F32}
    assert_same_bits(state_tensors(optimizer), state_tensors(adam_with(saved, params, device)))
    for entry in saved["state"].values():
        entry["exp_avg"] = entry["exp_avg"].bfloat16()
    optimizer.load_state_dict(saved)
    assert {t.dtype for t in state_tensors(optimizer)} == {F32}


def adam_with(saved, params, device):
    optimizer = adam(params, device)
    optimizer.load_state_dict(saved)
    return optimizer


@on_each_device
def test_loading_leaves_earlier_state_dicts_alone(device):
    params = make_params(device)
    optimizer = adam(params, device)
    generator = torch.Generator().manual_seed(4)
    train(generator, [optimizer], [params], 1, missing=0)
    first = optimizer.state_dict()
    train(generator, [optimizer], [params], 1, missing=0)
    values = copy.deepcopy(first)  # a state dict is live until something else is loaded
    other = adam(make_params(device), device)
    optimizer.load_state_dict(other.state_dict())
    train(generator, [optimizer], [params], 1, missing=0)
    assert_same_bits(list(first["state"][0].values()), list(values["state"][0].values()))


def test_loading_its_own_live_state_in_another_order():
    params = [Parameter(torch.randn(3)) for _ in range(2)]
    optimizer = adam(params)
    train(torch.Generator().manual_seed(5), [optimizer], [params], 1, missing=0)
    first, second = (optimizer.state[p]["exp_avg"].clone() for p in params)
    live = optimizer.state_dict()
    live["state"] = {0: live["state"][1], 1: live["state"][0]}
    optimizer.load_state_dict(live)
    assert torch.equal(optimizer.state[params[0]]["exp_avg"], second)
    assert torch.equal(optimizer.state[params[1]]["exp_avg"], first)


def test_loading_an_empty_state_starts_anew():
    params = make_params()
    fresh_params = twins(params)
    optimizer = adam(params)
    untouched = snapshot(optimizer)
    train(torch.Generator().manual_seed(6), [optimizer], [params], 3, missing=0)
    optimizer.load_state_dict(untouched)
    assert optimizer.state_dict()["state"] == {}
    with torch.no_grad():
        for p, fresh in zip(params, fresh_params, strict=True):
            p.copy_(fresh)
    fresh = adam(fresh_params)
    train(torch.Generator().manual_seed(7), [optimizer, fresh], [params, fresh_params], 3)
    assert_same_bits(params, fresh_params)


def test_steps_as_numbers_and_state_of_unknown_keys():
    params = [Parameter(torch.ones(3))]
    optimizer = adam(params)
    train(torch.Generator().manual_seed(8), [optimizer], [params], 1, missing=0)
    saved = snapshot(optimizer)
    saved["state"][0] |= {"step": 41, "note": "kept"}
    saved["state"]["other"] = torch.ones(2)
    del saved["param_groups"][0]["bias_correction"]
    optimizer.load_state_dict(saved)
    params[0].grad = torch.ones(3)
    optimizer.step()
    assert optimizer.state[params[0]]["step"].item() == 42
    assert optimizer.state[params[0]]["note"] == "kept"
    assert torch.equal(optimizer.state["other"], torch.ones(2))
    assert snapshot(optimizer)["state"][0]["step"].dtype == F32


def test_amsgrad_switched_on_later_starts_from_zero():
    params = make_params()
    optimizer = adam(params, amsgrad=False)
    generator = torch.Generator().manual_seed(9)
    train(generator, [optimizer], [params], 2, missing=0)
    optimizer.param_groups[0]["amsgrad"] = True
    train(generator, [optimizer], [params], 1, missing=0)
    for p in params:
        assert torch.equal(optimizer.state[p]["max_exp_avg_sq"], optimizer.state[p]["exp_avg_sq"])


def test_amsgrad_state_that_a_checkpoint_lacks_starts_from_zero():
    params = make_params()
    optimizer = adam(params, amsgrad=True)
    train(torch.Generator().manual_seed(9), [optimizer], [params], 2, missing=0)
    saved = snapshot(optimizer)
    for entry in saved["state"].values():
        del entry["max_exp_avg_sq"]
    optimizer.load_state_dict(saved)
    for p in params:
        assert torch.equal(optimizer.state[p]["max_exp_avg_sq"], torch.zeros_like(p))


def test_hooks_of_the_user_see_tensors():
    params = make_params()
    optimizer = adam(params)
    train(torch.Generator().manual_seed(10), [optimizer], [params], 1, missing=0)
    seen = []

    def before_load(_, state_dict):
        seen.append(type(state_dict["state"][0]["exp_avg"]))
        for entry in state_dict["state"].values():
            entry["step"] = torch.tensor(7.0)

    optimizer.register_load_state_dict_pre_hook(before_load)
    optimizer.register_load_state_dict_post_hook(
        lambda o: seen.append(o.state[params[0]]["step"].item())
    )
    optimizer.register_state_dict_post_hook(lambda _, state_dict: state_dict | {"extra": 1})
    saved = optimizer.state_dict()
    assert saved["extra"] == 1
    optimizer.load_state_dict(saved)
    assert seen == [torch.Tensor, 7.0]
    optimizer.load_state_dict(saved)  # nothing of the first time is left behind
    assert len(seen) == 4


@on_each_device
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "save"])
def test_copies_are_independent(device, way):
    params = make_params(device, BF16)
    optimizer = adam(params, device, **OPTIONS, master_weights=True)
    generator = torch.Generator().manual_seed(11)
    train(generator, [optimizer], [params], 2)
    pair = (params, optimizer)
    if way == "deepcopy":
        params2, optimizer2 = copy.deepcopy(pair)
    elif way == "pickle":
        params2, optimizer2 = pickle.loads(pickle.dumps(pair))
    else:
        file = io.BytesIO()
        torch.save(pair, file)
        file.seek(0)
        params2, optimizer2 = torch.load(file, weights_only=False)
    assert optimizer2.state_format == optimizer.state_format
    before = [p.detach().clone() for p in params2]
    train(generator, [optimizer], [params], 2, missing=0)
    assert_same_bits(params2, before)

    optimizer.load_state_dict(optimizer2.state_dict())
    with torch.no_grad():
        for p, q in zip(params, params2, strict=True):
            p.copy_(q)
    train(generator, [optimizer, optimizer2], [params, params2], 3)
    assert_same_bits(params2, params)
    assert_same_bits(state_tensors(optimizer2), state_tensors(optimizer))
    assert_in_buffers(optimizer2)


def test_a_state_dict_is_made_of_plain_dicts():
    params = make_params()
    optimizer = adam(params)
    train(torch.Generator().manual_seed(12), [optimizer], [params], 1)
    assert {type(entry) for entry in optimizer.state_dict()["state"].values()} == {dict}
    assert type(copy.deepcopy(optimizer.state[params[0]])) is dict


def test_a_saved_file_holds_no_more_than_the_state():
    params = [Parameter(torch.randn(1000)) for _ in range(100)]
    optimizer = adam(params)
    train(torch.Generator().manual_seed(13), [optimizer], [params], 1, missing=0)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    assert file.tell() < 1.1 * 2 * 4 * 100 * 1000


def test_loading_something_else_changes_nothing():
    params = make_params()
    optimizer = adam(params)
    train(torch.Generator().manual_seed(14), [optimizer], [params], 1, missing=0)
    good = snapshot(optimizer)
    bad_shape, bad_keys, bad_groups = (copy.deepcopy(good) for _ in range(3))
    bad_shape["state"][2]["exp_avg"] = torch.ones(2)
    bad_keys["state"][1] = {"step": 1, "sum": torch.ones(6, 4)}
    bad_groups["param_groups"][0]["params"].pop()
    for bad, text in (
        (bad_shape, r"state of params\[2\]: exp_avg has shape \[2\], expected \[2, 3, 4, 5\]"),
        (bad_keys, r"state of params\[1\] has keys \['step', 'sum'\], expected exp_avg among them"),
        (bad_groups, "doesn't match the size"),
    ):
        bad["param_groups"][0]["lr"] = 7.0
        with pytest.raises(ValueError, match=text):
            optimizer.load_state_dict(bad)
    assert optimizer.param_groups[0]["lr"] == 1e-3
    assert_same_bits(state_tensors(optimizer), state_tensors(adam_with(good, params, "cpu")))
    assert_in_buffers(optimizer)


@on_each_device
def test_loading_what_was_saved_adds_no_options(device):
    optimizer = adam(make_params(device), device, **OPTIONS)
    before = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state_dict()["param_groups"] == before
    assert copy.deepcopy(optimizer).state_dict()["param_groups"] == before


@on_each_device
@each_kind
def test_state_that_is_in_its_place_is_not_copied(device, kind):
    """What was read into the tensors of a state dict is checked and taken, with the options."""
    models = [twins(make_params(device)) for _ in range(2)]
    ours, other = (kind.make(params, device, lr=1e-2, **kind.usual) for params in models)
    generator = torch.Generator().manual_seed(3)
    train(generator, [ours], models[:1], 2, missing=0)
    train(generator, [other], models[1:], 3, missing=0)
    with torch.no_grad():
        for mine, theirs in zip(*models, strict=True):
            mine.copy_(theirs)
            for key, value in ours.state[mine].items():
                value.copy_(other.state[theirs][key])
    packed = ours.state_dict()
    packed["param_groups"][0]["lr"] = other.param_groups[0]["lr"] = 0.5
    places = [t.data_ptr() for t in state_tensors(ours)]
    ours.load_state_dict(packed)
    assert [t.data_ptr() for t in state_tensors(ours)] == places
    assert_in_buffers(ours)
    give_grads(generator, *models, missing=0)
    ours.step()
    other.step()
    assert_same_bits(*models)
    assert_same_bits(state_tensors(ours), state_tensors(other))
    # One tensor of somebody else's, and all of its flat buffer is new.
    packed = ours.state_dict()
    packed["state"][0] = {key: t.clone() for key, t in packed["state"][0].items()}
    before = [t.clone() for t in state_tensors(ours)]
    ours.load_state_dict(packed)
    assert state_tensors(ours)[0].data_ptr() not in places
    assert_same_bits(state_tensors(ours), before)
    ours.state[models[0][0]]["step"].fill_(-1.0)
    with pytest.raises(ValueError, match="step"):
        ours.load_state_dict(ours.state_dict())

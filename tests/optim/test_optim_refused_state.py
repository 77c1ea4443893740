"""State dicts that would destroy: refused by name, and nothing has changed."""

import copy
import math
import re

import pytest
import torch
from optim_cases import BF16, F32, assert_same_bits, state_tensors
from test_optim_formats import CLASSES, U8, each_class, needs_cuda

from deepspeed_ext import dtensors
from deepspeed_ext.optim import FusedRMSprop, FusedSGD, Lars

INF, NAN = float("inf"), float("nan")
GONE_WRONG = "; it was so when it was saved: load an earlier one"
COUNT = "expected a finite number, at least 0"


def trained(name="DeepSpeedCPUAdam", dtype=F32, **options):
    kind, device, more = CLASSES[name]
    generator = torch.Generator().manual_seed(3)
    params = [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype))
        for shape in ((40, 30), (7,), (300,))
    ]
    optimizer = kind(params, **more, **options)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    return params, optimizer


def assert_refused(params, optimizer, saved, text):
    """Nothing but the error: same options, same tensors with the same values, same next step."""
    title = type(optimizer).__name__
    saved["param_groups"][0]["lr"] = 7.0
    twin_params, twin = copy.deepcopy((params, optimizer))
    for param, copied in zip(params, twin_params, strict=True):
        copied.grad = param.grad.clone()
    entries = {id(param): dict(entry) for param, entry in optimizer.state.items()}
    lr = optimizer.param_groups[0]["lr"]
    with pytest.raises(ValueError) as raised:
        optimizer.load_state_dict(saved)
    assert str(raised.value) == f"{title}: state of params[1]{text}"
    assert optimizer.param_groups[0]["lr"] == lr
    for param in params:
        now = optimizer.state[param]
        assert all(now[key] is value for key, value in entries[id(param)].items())
    optimizer.step()
    twin.step()
    assert_same_bits(params, twin_params)
    assert_same_bits(state_tensors(optimizer), state_tensors(twin))
    for param in params:  # nothing was made again: a captured graph goes on to work
        assert all(optimizer.state[param][k] is v for k, v in entries[id(param)].items())


@pytest.mark.parametrize(
    ("entry", "kind"), [([], "list"), ([1, 2], "list"), (None, "NoneType"), ("x", "str"),
                        (torch.ones(7), "Tensor")], ids=str
)  # fmt: skip
@each_class
def test_an_entry_that_is_no_dict(name, entry, kind):
    params, optimizer = trained(name)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][1] = entry
    assert_refused(params, optimizer, saved, f" is a {kind}, expected a dict")


def state_of_torch(kind, **options):
    param = torch.nn.Parameter(torch.ones(4, 7))
    param.grad = torch.ones(4, 7)
    optimizer = kind([param], lr=0.1, **options)
    optimizer.step()
    return {key: torch.ones(7) for key in optimizer.state[param]}


OF_TORCH = {
    **{kind: {} for kind in ("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax")},
    **{kind: {} for kind in ("NAdam", "RMSprop", "Rprop")},
    "SGD": {"momentum": 0.9},
}


@pytest.mark.parametrize("theirs", OF_TORCH)
@each_class
def test_state_of_another_class(name, theirs):
    """Also where all that this one needs is there, as Lion's is in Adam's, or nothing is needed."""
    params, optimizer = trained(name)
    saved = copy.deepcopy(optimizer.state_dict())
    own, entry = saved["state"][1], state_of_torch(getattr(torch.optim, theirs), **OF_TORCH[theirs])
    if entry.keys() <= own.keys():
        return  # Adam's is LAMB's too
    entry["step"] = torch.tensor(1.0)
    for state in (entry, {**entry, **own}):
        saved["state"][1] = state
        refused = r" has keys \[.*\], expected (none of \[.*\], which ano|\w+ among them)"
        with pytest.raises(ValueError, match=rf"state of params\[1\]{refused}"):
            optimizer.load_state_dict(saved)
    foreign = sorted(entry.keys() - own.keys())
    saved["state"][1] = {**entry, **own}
    text = f"{sorted(saved['state'][1])}, expected none of {foreign}, which another class"
    text += " of optimizers keeps; load it into the one that saved it"
    assert_refused(params, optimizer, saved, f" has keys {text}")


@each_class
def test_momentum_alone(name):
    """It is all that torch's SGD has, and would be none of these."""
    if CLASSES[name][0] in (FusedSGD, Lars):
        return
    _, optimizer = trained(name)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"] = {i: {"momentum_buffer": torch.ones(s)} for i, s in enumerate(((40, 30), 7))}
    with pytest.raises(ValueError, match=r"params\[0\] has keys \['momentum_buffer'\], expected"):
        optimizer.load_state_dict(saved)


@each_class
def test_state_of_a_user_is_kept(name):
    """Also under what is a name of other state elsewhere, but not alone."""
    _, optimizer = trained(name)
    saved = copy.deepcopy(optimizer.state_dict())
    mine = {"mine": 3, "prev": torch.ones(7), "mu": 0.5, "mask": None}
    saved["state"][1] |= mine
    optimizer.load_state_dict(saved)
    entry = optimizer.state_dict()["state"][1]
    assert mine.items() <= {**entry, "prev": mine["prev"]}.items()
    assert torch.equal(entry["prev"], mine["prev"])


@pytest.mark.parametrize("as_tensor", [True, False])
@pytest.mark.parametrize("step", [-1.0, -5.0, NAN, INF, -INF])
@each_class
def test_a_step_that_is_none(name, step, as_tensor):
    params, optimizer = trained(name)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][1]["step"] = torch.tensor(step) if as_tensor else step
    got = f"has the value {step:g}" if as_tensor else f"is {step}"
    assert_refused(params, optimizer, saved, f": step {got}, {COUNT}")


def test_a_step_too_large_for_its_tensor():
    params, optimizer = trained()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][1]["step"] = 10**60
    assert_refused(params, optimizer, saved, f": step is {10**60}, {COUNT}")


SECOND = [(name, "exp_avg_sq") for name in ("DeepSpeedCPUAdam", "HybridAdam", "FusedLamb")] + [
    ("amsgrad", "max_exp_avg_sq"),
    ("DeepSpeedCPUAdagrad", "sum"),
    ("FusedRMSprop", "square_avg"),
]


@pytest.mark.parametrize("state_dtype", [F32, BF16, U8], ids=str)
@pytest.mark.parametrize("value", [-1.0, NAN])
@pytest.mark.parametrize(("name", "key"), SECOND)
def test_second_moments_below_zero(name, key, value, state_dtype):
    _, source = trained(name)
    params, optimizer = trained(name, state_dtype=state_dtype)
    saved = copy.deepcopy(source.state_dict())
    saved["state"][1][key][6] = value
    text = f": {key} has the value {value:g}, expected none below 0"
    text += GONE_WRONG if value != value else ""
    assert_refused(params, optimizer, saved, text)


def test_means_and_sums_below_zero_are_right():
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = FusedRMSprop([param], centered=True, momentum=0.5)
    param.grad = -torch.ones(3)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    assert (saved["state"][0]["grad_avg"] < 0).all()
    assert (saved["state"][0]["momentum_buffer"] < 0).all()
    optimizer.load_state_dict(saved)
    for key, value in saved["state"][0].items():
        assert torch.equal(optimizer.state[param][key], value), key


@pytest.mark.parametrize("state_dtype", [F32, U8], ids=str)
@pytest.mark.parametrize("value", [-1.0, NAN, INF, 3.0, 2.0**-130])
@each_class
def test_scales_that_are_no_powers_of_two(name, value, state_dtype):
    _, source = trained(name, state_dtype=U8)
    params, optimizer = trained(name, state_dtype=state_dtype)
    saved = copy.deepcopy(source.state_dict())
    key = next(key for key in saved["state"][1] if key.endswith("_scale"))
    saved["state"][1][key][0] = value
    text = f": {key} has the value {value:g}, expected 0 or a power of two"
    text += "" if math.isfinite(value) else GONE_WRONG
    assert_refused(params, optimizer, saved, text)


@pytest.mark.parametrize("value", [0.0, 1.0, 2.0**-126, 2.0**126])
def test_other_scales_are_right(value):
    _, optimizer = trained(state_dtype=U8)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][1]["exp_avg_scale"][0] = value
    optimizer.load_state_dict(saved)
    assert optimizer.state_dict()["state"][1]["exp_avg_scale"][0] == value


FLOATS = "expected a floating dtype"
KINDS = [
    ("exp_avg", torch.ones(7, dtype=torch.complex64), f"is torch.complex64, {FLOATS}"),
    ("exp_avg_sq", torch.ones(7, dtype=torch.complex64), f"is torch.complex64, {FLOATS}"),
    ("exp_avg_sq", torch.ones(7, dtype=torch.int64), f"is torch.int64, {FLOATS}"),
    ("step", torch.tensor(1j), "is torch.complex64, expected a real number"),
    ("exp_avg", torch.ones(7).to_sparse(), "is sparse, expected dense"),
    ("step", torch.tensor([1.0]).to_sparse(), "is sparse, expected dense"),
    ("exp_avg", torch.ones(7, device="meta"), "is on meta, expected a device with memory"),
    ("step", torch.tensor(1.0, device="meta"), "is on meta, expected a device with memory"),
    ("master_param", torch.ones(7, dtype=torch.uint8), f"is torch.uint8, {FLOATS}"),
    ("master_remainder", torch.ones(7), "is torch.float32, expected int16"),
]


@pytest.mark.parametrize(("key", "value", "text"), KINDS)
def test_tensors_of_another_kind(key, value, text):
    params, optimizer = trained(dtype=BF16, master_weights=True)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][1][key] = value
    assert_refused(params, optimizer, saved, f": {key} {text}")
    if key != "master_remainder":
        optimizer.state[params[1]][key] = value  # the same in the step
        with pytest.raises(ValueError, match=re.escape(f"params[1]: {key} {text}")):
            optimizer.step()


def test_a_tensor_whose_memory_is_gone():
    params, optimizer = trained()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][1]["exp_avg"] = torch.ones(7)
    saved["state"][1]["exp_avg"].untyped_storage().resize_(0)
    assert_refused(params, optimizer, saved, ": exp_avg has no memory, expected 7 elements")


def test_a_remainder_of_more_than_16_bits():
    params, optimizer = trained(dtype=BF16, master="remainder")
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][1]["master_remainder"] = torch.tensor([0, 1, 2, 3, 4, 5, 2**15]).int()
    text = ": master_remainder has the value 32768, expected 16 bits"
    assert_refused(params, optimizer, saved, text)


def test_scales_of_another_kind():
    params, optimizer = trained(state_dtype=U8)
    for scales, text in (
        (torch.ones(1, device="meta"), "is on meta, expected a device with memory"),
        (torch.ones(1, dtype=torch.int32), "is torch.int32, expected float32"),
        ([1.0], "has shape None, expected [1]"),
    ):
        saved = copy.deepcopy(optimizer.state_dict())
        saved["state"][1]["exp_avg_scale"] = scales
        assert_refused(params, optimizer, saved, f": exp_avg_scale {text}")


def test_a_copy_of_what_went_wrong_is_a_copy():
    """Only what is loaded is looked at: a diverged optimizer can still be copied."""
    params, optimizer = trained()
    optimizer.state[params[1]]["exp_avg_sq"].fill_(NAN)
    _, copied = copy.deepcopy((params, optimizer))
    assert state_tensors(copied)[4].isnan().all()


@needs_cuda
def test_one_read_for_all_on_cuda():
    params, optimizer = trained("FusedAdam")
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][1]["exp_avg_sq"][3] = -1.0
    text = ": exp_avg_sq has the value -1, expected none below 0"
    assert_refused(params, optimizer, saved, text)


def test_processes_that_cannot_be_reached_are_not_asked_again(monkeypatch):
    """That would hide the cause behind one more timeout."""
    asked = []

    def unreachable(values, tensors):
        asked.append(tensors)
        raise RuntimeError("connection closed")

    monkeypatch.setattr(dtensors, "sum_over_meshes", unreachable)
    monkeypatch.setattr(dtensors, "is_dtensor", lambda tensor: True)
    agreement = dtensors.Agreement([torch.ones(1)], stages=2)
    with pytest.raises(RuntimeError, match="connection closed"):
        agreement.go_on()
    agreement.refuse()
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("state_dict", "kind", "text"),
    [
        (None, TypeError, "state_dict is a NoneType, expected a dict"),
        ([1], TypeError, "state_dict is a list, expected a dict"),
        ({}, ValueError, "state_dict has keys [], expected state among them"),
        (
            {"state": {}},
            ValueError,
            "state_dict has keys ['state'], expected param_groups among them",
        ),
    ],
    ids=["None", "list", "empty", "no groups"],
)
def test_what_is_no_state_dict(state_dict, kind, text):
    _, optimizer = trained()
    before = [tensor.clone() for tensor in state_tensors(optimizer)]
    with pytest.raises(kind, match=f"^DeepSpeedCPUAdam: {re.escape(text)}$"):
        optimizer.load_state_dict(state_dict)
    assert_same_bits(state_tensors(optimizer), before)


def test_a_hook_may_make_a_state_dict_of_another_one():
    _, optimizer = trained()
    whole = copy.deepcopy(optimizer.state_dict())
    optimizer.register_load_state_dict_pre_hook(lambda _, given: given["optimizer"])
    optimizer.load_state_dict({"optimizer": whole})
    assert optimizer.state_dict().keys() == whole.keys()


def test_state_of_training_that_went_wrong_is_saved_and_refused_with_the_reason():
    params, optimizer = trained(state_dtype=U8)
    params[0].grad.fill_(NAN)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    text = "exp_avg_scale has the value nan, expected 0 or a power of two" + GONE_WRONG
    with pytest.raises(ValueError, match=re.escape(text)):
        optimizer.load_state_dict(saved)

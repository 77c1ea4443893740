"""State in compact formats, in every class: training, saving, loading, changing into others."""

import copy
from typing import Any

import pytest
import torch
from optim_cases import (
    BF16,
    F32,
    adam,
    assert_same_bits,
    give_grads,
    make_params,
    needs_cuda,
    on_each_device,
    snapshot,
    state_tensors,
    twins,
)
from torch.nn import Parameter

from deepspeed_ext import optim
from deepspeed_ext.ops.optimizers.state_formats import decode_blocks, join_float32, split_float32
from deepspeed_ext.optim import (
    CPUAdam,
    DeepSpeedCPUAdagrad,
    DeepSpeedCPUAdam,
    DeepSpeedCPULion,
    FusedAdagrad,
    FusedAdam,
    FusedLamb,
    FusedLion,
    FusedRMSprop,
    FusedSGD,
    HybridAdam,
    Lars,
)

U8 = torch.uint8
FORMATS: dict[str, dict[str, Any]] = {
    "bfloat16": {"state_dtype": BF16},
    "codes": {"state_dtype": U8},
    "remainder": {"master": "remainder"},
    "master weights": {"master": "float32"},
    "codes and remainder": {"state_dtype": U8, "master": "remainder"},
    "bfloat16 and master weights": {"state_dtype": BF16, "master": "float32"},
}
CLASSES: dict[str, tuple[type, str, dict[str, Any]]] = {
    "DeepSpeedCPUAdam": (DeepSpeedCPUAdam, "cpu", {"lr": 0.05, "weight_decay": 0.01}),
    "amsgrad": (DeepSpeedCPUAdam, "cpu", {"lr": 0.05, "amsgrad": True}),
    "DeepSpeedCPULion": (DeepSpeedCPULion, "cpu", {"lr": 0.02}),
    "DeepSpeedCPUAdagrad": (DeepSpeedCPUAdagrad, "cpu", {"lr": 0.3}),
    "FusedSGD": (FusedSGD, "cpu", {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "FusedRMSprop": (FusedRMSprop, "cpu", {"lr": 0.02, "momentum": 0.5, "eps": 1e-3}),
    "FusedLamb": (FusedLamb, "cpu", {"lr": 0.05}),
    "Lars": (Lars, "cpu", {"lr": 5.0, "momentum": 0.9, "eeta": 0.01}),
    "HybridAdam": (HybridAdam, "cpu", {"lr": 0.05}),
    "FusedAdam": (FusedAdam, "cuda", {"lr": 0.05}),
    "FusedLion": (FusedLion, "cuda", {"lr": 0.02}),
    "FusedAdagrad": (FusedAdagrad, "cuda", {"lr": 0.3}),
    "FusedSGD on CUDA": (FusedSGD, "cuda", {"lr": 0.05, "momentum": 0.9}),
    "FusedRMSprop on CUDA": (FusedRMSprop, "cuda", {"lr": 0.02, "momentum": 0.5, "eps": 1e-3}),
    "FusedLamb on CUDA": (FusedLamb, "cuda", {"lr": 0.05}),
    "Lars on CUDA": (Lars, "cuda", {"lr": 5.0, "momentum": 0.9, "eeta": 0.01}),
}
each_class = pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[needs_cuda] * (c[1] == "cuda")) for n, c in CLASSES.items()],
)
each_format = pytest.mark.parametrize("form", FORMATS)


def make(name: str, form: str, **more: Any) -> tuple[list[Parameter], torch.optim.Optimizer]:
    kind, device, options = CLASSES[name]
    dtype = BF16 if "master" in FORMATS[form] else F32
    generator = torch.Generator().manual_seed(3)
    params = [
        Parameter(torch.randn(shape, generator=generator).to(device, dtype))
        for shape in ((40, 30), (7,), (300,))
    ]
    return params, kind(params, **options, **FORMATS[form], **more)


def descend(params: list[Parameter], optimizer: torch.optim.Optimizer, steps: int) -> float:
    """Go towards zero, and return the mean square that is left."""
    for _ in range(steps):
        for param in params:
            param.grad = param.detach().clone()
        optimizer.step()
    return float(sum(param.detach().double().square().sum() for param in params))


@each_class
@each_format
def test_trains_as_in_float32(name: str, form: str) -> None:
    params, optimizer = make(name, form)
    kind, _, options = CLASSES[name]
    plain = twins(params, F32)
    start, exact = descend(plain, kind(plain, **options), 0), kind(plain, **options)
    want = descend(plain, exact, 40)
    got = descend(params, optimizer, 40)
    assert want < 0.7 * start
    assert abs(got - want) < 0.05 * start, (start, want, got)


@each_class
@each_format
def test_state_dicts_continue_bit_for_bit(name: str, form: str) -> None:
    params, optimizer = make(name, form)
    descend(params, optimizer, 3)
    others, other = make(name, form)
    for mine, source in zip(others, params, strict=True):
        mine.data.copy_(source.detach())
    other.load_state_dict(snapshot(optimizer))
    assert_same_bits(state_tensors(other), state_tensors(optimizer))
    descend(params, optimizer, 3)
    descend(others, other, 3)
    assert_same_bits(others, params)
    assert_same_bits(state_tensors(other), state_tensors(optimizer))
    copied = copy.deepcopy(optimizer)
    assert copied.state_format == optimizer.state_format
    assert_same_bits(state_tensors(copied), state_tensors(optimizer))


@on_each_device
def test_what_state_looks_like_and_costs(device: str) -> None:
    param = Parameter(torch.randn(8192, device=device).to(BF16))
    bytes_each = {}
    for form, options in {"float32": {}, **FORMATS}.items():
        optimizer = adam([param], device, **options)
        param.grad = torch.ones_like(param)
        optimizer.step()
        entry = optimizer.state[param]
        stored = {t.untyped_storage().data_ptr(): t for t in entry.values() if t.numel() > 1}
        size = sum(t.untyped_storage().nbytes() for t in stored.values())
        bytes_each[form] = size / param.numel()
        if form == "codes and remainder":
            assert {key: value.dtype for key, value in entry.items()} == {
                "step": F32,
                "exp_avg": U8,
                "exp_avg_sq": U8,
                "exp_avg_scale": F32,
                "exp_avg_sq_scale": F32,
                "master_remainder": torch.int16,
            }
            assert entry["exp_avg"].shape == param.shape and entry["exp_avg_scale"].shape == (32,)
    assert bytes_each == {
        "float32": 8,
        "bfloat16": 4,
        "codes": 2 + 1 / 32,
        "remainder": 10,
        "master weights": 12,
        "codes and remainder": 4 + 1 / 32,
        "bfloat16 and master weights": 8,
    }


@on_each_device
def test_a_remainder_is_a_master(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    one, two = make_params(device, BF16), make_params(device, BF16)
    with_master = adam(one, device, lr=1e-3, weight_decay=0.1, master="float32")
    with_remainder = adam(two, device, lr=1e-3, weight_decay=0.1, master="remainder")
    for _ in range(10):
        give_grads(generator, one, two)
        with_master.step()
        with_remainder.step()
    for a, b in zip(one, two, strict=True):
        master = with_master.state[a]["master_param"]
        restored = join_float32(b.detach(), with_remainder.state[b]["master_remainder"])
        assert torch.equal(restored, master)
        assert torch.equal(b, split_float32(master)[0])


def test_a_master_half_way_between_two_parameters() -> None:
    param = Parameter(torch.tensor([1.0, 1.0]).to(BF16))
    optimizer = DeepSpeedCPUAdam([param], master="remainder")
    entry = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(2), "exp_avg_sq": torch.zeros(2)}
    entry["master_param"] = torch.tensor([1.0 + 2**-8, 1.0 - 2**-10])  # the first: a tie
    packed = {"state": {0: entry}, "param_groups": optimizer.state_dict()["param_groups"]}
    optimizer.load_state_dict(packed)
    restored = original(param, optimizer.state[param])
    assert torch.equal(restored, torch.tensor([1.0 + 2**-8 - 2**-23, 1.0 - 2**-10]))


def test_options_that_come_and_go_keep_codes_and_scales_together() -> None:
    params, optimizer = make("FusedSGD", "codes")
    optimizer.state[params[0]]["my_scale"] = torch.ones(1)
    for momentum in (0.9, 0.0, 0.9):
        optimizer.param_groups[0].update(momentum=momentum, nesterov=False)
        descend(params, optimizer, 1)
    assert optimizer.state[params[0]]["my_scale"] == 1
    params, optimizer = make("amsgrad", "codes")
    for amsgrad in (True, False, True):
        optimizer.param_groups[0]["amsgrad"] = amsgrad
        descend(params, optimizer, 1)


def test_default_dtype_and_device_make_no_difference() -> None:
    params, optimizer = make("DeepSpeedCPUAdam", "codes")
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            descend(params, optimizer, 2)
            optimizer.load_state_dict(snapshot(optimizer))
            optimizer.clip_and_step(1.0)
    finally:
        torch.set_default_dtype(torch.float32)


@on_each_device
def test_every_format_loads_into_every_other(device: str) -> None:
    generator = torch.Generator().manual_seed(1)
    names = ["codes", "bfloat16", "remainder", "master weights", "codes and remainder"]
    for source in names:
        params = make_params(device, BF16)
        optimizer = adam(params, device, lr=1e-2, **FORMATS[source])
        for _ in range(3):
            give_grads(generator, params)
            optimizer.step()
        for target in names:
            others = twins(params)
            other = adam(others, device, lr=1e-2, **FORMATS[target])
            other.load_state_dict(snapshot(optimizer))
            for a, b in zip(params, others, strict=True):
                mine, its = optimizer.state[a], other.state[b]
                assert {k for k in its if "master" in k} == {
                    k for k in other.state[others[0]] if "master" in k
                }
                for key, signed in (("exp_avg", True), ("exp_avg_sq", False)):
                    got, want = values(its, key, signed), values(mine, key, signed)
                    bound = want.abs() / 15 + want.abs().max() / 1000 if want.numel() else want
                    assert ((got - want).abs() <= bound).all(), (source, target, key)
                if "master" in FORMATS[source] and "master" in FORMATS[target]:
                    assert torch.equal(original(b, its), original(a, mine)), (source, target)


def values(entry: dict[str, Any], key: str, signed: bool) -> torch.Tensor:
    value = entry[key]
    if value.dtype == U8:
        value = decode_blocks(value, entry[key + "_scale"], signed=signed)
    return value.float()


def original(param: Parameter, entry: dict[str, Any]) -> torch.Tensor:
    if "master_param" in entry:
        return entry["master_param"]
    return join_float32(param.detach(), entry["master_remainder"])


@on_each_device
def test_loads_from_torch_and_into_it(device: str) -> None:
    params = make_params(device)
    theirs = torch.optim.AdamW(params, lr=1e-2)
    give_grads(torch.Generator().manual_seed(2), params)
    theirs.step()
    for form in ("bfloat16", "codes"):
        ours = adam(twins(params), device, **FORMATS[form])
        ours.load_state_dict(theirs.state_dict())
        ours.step()  # without gradients: nothing happens
        for entry, its in zip(ours.state.values(), theirs.state.values(), strict=True):
            want = its["exp_avg_sq"].flatten().sort().values
            got = values(entry, "exp_avg_sq", False).flatten().sort().values
            assert torch.allclose(got, want, rtol=0.07, atol=float(its["exp_avg_sq"].max()) / 1e5
                                  if want.numel() else 0)  # fmt: skip
        portable = adam(twins(params), device)
        portable.load_state_dict(ours.state_dict())
        back = torch.optim.AdamW(twins(params))
        back.load_state_dict(portable.state_dict())  # torch's class would take codes for moments
        for entry, its in zip(ours.state.values(), back.state.values(), strict=True):
            for key, signed in (("exp_avg", True), ("exp_avg_sq", False)):
                assert torch.equal(its[key], values(entry, key, signed))
    exact = adam(params, device, state_dtype=F32)
    exact.load_state_dict(theirs.state_dict())
    torch.optim.AdamW(params).load_state_dict(exact.state_dict())


@each_class
def test_the_seed_decides_the_rounding(name: str) -> None:
    def run(seed: int) -> list[torch.Tensor]:
        params, optimizer = make(name, "bfloat16", seed=seed)
        descend(params, optimizer, 3)
        return state_tensors(optimizer)

    assert_same_bits(run(1), run(1))
    assert not all(map(torch.equal, run(1), run(2)))


@on_each_device
def test_rounding_does_not_depend_on_how_parameters_are_grouped(device: str) -> None:
    """Bits depend on the number of a parameter, not on buckets, which first gradients decide."""

    def run(first: int) -> list[torch.Tensor]:
        params = make_params(device)
        optimizer = adam(params, device, lr=1e-2, state_dtype=U8)
        grads = [torch.ones_like(param) * 0.3 for param in params]
        params[first].grad = grads[first]
        optimizer.step()
        for param, grad in zip(params, grads, strict=True):
            param.grad = None if param is params[first] else grad
        optimizer.step()
        entries = (optimizer.state[param] for param in params)
        return [value for entry in entries for _, value in sorted(entry.items())]

    state = [run(0), run(3)]
    assert_same_bits(*state)


@on_each_device
def test_a_parameter_written_between_steps(device: str) -> None:
    param = Parameter(torch.full((300,), 1.0, device=device, dtype=BF16))
    optimizer = adam([param], device, lr=1e-4, master="remainder")
    param.grad = torch.ones_like(param)
    optimizer.step()
    remainder = optimizer.state[param]["master_remainder"]
    assert remainder.ne(0).all()
    with torch.no_grad():
        param.fill_(2.0)
    restored = join_float32(param.detach(), remainder)
    assert torch.equal(split_float32(restored)[0], param)  # still rounds to what was written
    optimizer.reset_master()
    assert optimizer.state[param]["master_remainder"].eq(0).all()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"state_dtype": torch.float16}, "state_dtype is torch.float16, expected float32, bfloat16"
         " or uint8"),
        ({"master": "half"}, "master is 'half', expected 'float32', 'remainder' or None"),
        ({"master": "remainder", "master_weights": True}, "master_weights is True, expected False"
         " with master='remainder'"),
        ({"seed": -1}, "seed is -1, expected a whole number, 0 <= seed < 2**31"),
    ],
)  # fmt: skip
def test_refuses(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as raised:
        DeepSpeedCPUAdam([Parameter(torch.zeros(3))], **options)
    assert str(raised.value) == f"DeepSpeedCPUAdam: {text}"


def test_refuses_codes_without_their_scales() -> None:
    params, optimizer = make("DeepSpeedCPUAdam", "codes")
    descend(params, optimizer, 1)
    saved = snapshot(optimizer)
    del saved["state"][2]["exp_avg_scale"]
    with pytest.raises(ValueError, match=r"params\[2\]: exp_avg_scale has shape None, expected"):
        optimizer.load_state_dict(saved)


@each_class
def test_refuses_arguments_that_do_not_exist(name: str) -> None:
    with pytest.raises(TypeError, match="weight_dcay is no argument, expected one of"):
        make(name, "codes", weight_dcay=0.1)


def test_every_class_and_state_has_a_row() -> None:
    rows: dict[type, set[str]] = {}
    for kind, _, options in CLASSES.values():
        found = rows.setdefault(kind, set())
        found.update(
            state.key
            for state in kind.spec.op.states
            if state.when is None or options.get(state.when)
        )
    public = [getattr(optim, name) for name in optim.__all__]
    optimizers = {c for c in public if isinstance(c, type) and issubclass(c, torch.optim.Optimizer)}
    classes = optimizers - {CPUAdam}  # a name of HybridAdam
    assert set(rows) == classes
    by_op: dict[str, set[str]] = {}
    for kind, keys in rows.items():
        by_op.setdefault(kind.spec.op.name, set()).update(keys)
    for kind in rows:
        op = kind.spec.op
        in_float32 = {"grad_avg"}  # of which there are no codes
        assert by_op[op.name] == set(op.state_keys.values()) - in_float32


@each_class
@pytest.mark.parametrize("way", ["stepped", "loaded into float", "loaded into codes"])
def test_state_that_may_be_negative_has_a_sign_and_no_other_has(name: str, way: str) -> None:
    """The rule in C++, by which a step stores codes, and the table here, for loading, say the same.

    With a sign, a block spans 2^7, and without one 2^15, which small squares need.
    """
    kind, device, options = CLASSES[name]
    generator = torch.Generator().manual_seed(4)
    signs = torch.rand(300, generator=generator).sub(0.5).sign()
    grad = (signs * torch.rand(300, generator=generator).mul(-6).exp2()).to(device)

    def made(stored: torch.dtype) -> tuple[Parameter, torch.optim.Optimizer]:
        param = Parameter(torch.ones(300, device=device))
        param.grad = grad.clone()
        return param, kind([param], **options, state_dtype=stored)

    exact, reference = made(F32)
    reference.step()
    param, optimizer = made(U8)
    if way == "loaded into codes":
        optimizer.load_state_dict(snapshot(reference))
    else:
        optimizer.step()
    if way == "loaded into float":
        saved = snapshot(optimizer)
        param, optimizer = made(F32)
        optimizer.load_state_dict(saved)

    keys = [key for key, value in reference.state[exact].items() if value.dim()]
    assert keys
    for key in keys:
        want, signed = reference.state[exact][key], key in kind.spec.signed
        got = values(optimizer.state[param], key, signed)
        assert signed == bool((want < 0).any())
        floor = want.abs().max() * 1.04 * (2.0**-7 if signed else 2.0**-15)
        bound = (want.abs() + floor) / 16 * 1.001
        assert ((got - want).abs() <= bound).all(), key
        large = want.abs() > floor
        assert large.sum() > 200 and torch.equal(got[large].sign(), want[large].sign()), key

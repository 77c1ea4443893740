"""What the optimizers refuse, each text once, and that nothing was changed."""

import re

import pytest
import torch
from optim_cases import BF16, adam, needs_cuda
from torch.nn import Parameter

from deepspeed_ext.offload import OffloadOptimizer
from deepspeed_ext.optim import (
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


def refused(text, kind=ValueError):
    return pytest.raises(kind, match=f"^{re.escape(text)}$")


REFUSED = [
    *(
        (kind, options, text)
        for kind in (
            DeepSpeedCPUAdam,
            DeepSpeedCPULion,
            DeepSpeedCPUAdagrad,
            FusedSGD,
            FusedRMSprop,
        )
        for options, text in (
            ({"lr": -1.0}, "lr is -1.0, expected at least 0"),
            ({"lr": float("nan")}, "lr is nan, expected at least 0"),
            ({"lr": torch.ones(2)}, "lr is a tensor of 2 elements, expected one"),
            ({"weight_decay": -0.1}, "weight_decay is -0.1, expected at least 0"),
        )
    ),
    *(
        (kind, options, text)
        for kind in (DeepSpeedCPUAdam, DeepSpeedCPULion)
        for options, text in (
            ({"betas": (1.0, 0.9)}, "betas[0] is 1.0, expected at least 0 and below 1"),
            ({"betas": (0.9, -0.5)}, "betas[1] is -0.5, expected at least 0 and below 1"),
            ({"betas": (0.9,)}, "betas is (0.9,), expected two numbers"),
        )
    ),
    (DeepSpeedCPUAdam, {"eps": -1e-8}, "eps is -1e-08, expected at least 0"),
    (DeepSpeedCPUAdagrad, {"eps": -1e-8}, "eps is -1e-08, expected at least 0"),
    (DeepSpeedCPUAdagrad, {"lr_decay": -1}, "lr_decay is -1, expected at least 0"),
    (
        DeepSpeedCPUAdagrad,
        {"initial_accumulator_value": -0.5},
        "initial_accumulator_value is -0.5, expected at least 0",
    ),
    (FusedSGD, {"momentum": -0.5}, "momentum is -0.5, expected at least 0"),
    (FusedRMSprop, {"alpha": 1.0}, "alpha is 1.0, expected at least 0 and below 1"),
    (FusedRMSprop, {"alpha": -0.1}, "alpha is -0.1, expected at least 0 and below 1"),
    (FusedRMSprop, {"eps": -1e-8}, "eps is -1e-08, expected at least 0"),
    (FusedRMSprop, {"momentum": -0.5}, "momentum is -0.5, expected at least 0"),
    (FusedSGD, {"dampening": float("nan")}, "dampening is nan, expected a number"),
    (
        FusedSGD,
        {"nesterov": True},
        "nesterov is True, expected False without momentum or with dampening",
    ),
    (
        FusedSGD,
        {"nesterov": True, "momentum": 0.9, "dampening": 0.1},
        "nesterov is True, expected False without momentum or with dampening",
    ),
]


@pytest.mark.parametrize(("kind", "options", "text"), REFUSED)
def test_options(kind, options, text):
    title = kind.__name__
    with refused(f"{title}: {text}"):
        kind([Parameter(torch.ones(2))], **options)
    optimizer = kind([Parameter(torch.ones(2))])
    with refused(f"{title}: {text}"):
        optimizer.add_param_group({"params": [Parameter(torch.ones(2))], **options})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (DeepSpeedCPUAdam, {"lr": 0.0, "betas": (0.0, 0.0), "eps": 0.0, "weight_decay": 0.0}),
        (DeepSpeedCPUAdagrad, {"lr": 0, "lr_decay": 0, "eps": 0, "initial_accumulator_value": 0}),
        (FusedSGD, {"momentum": 0.0, "dampening": -1.0}),
        (FusedRMSprop, {"lr": 0.0, "alpha": 0.0, "eps": 0.0, "momentum": 0.0, "weight_decay": 0.0}),
    ],
)
def test_options_at_their_bounds(kind, options):
    (group,) = kind([Parameter(torch.ones(2))], **options).param_groups
    assert {key: group[key] for key in options} == options


@pytest.mark.parametrize("formats", [{"state_dtype": BF16}, {"fp32_optimizer_states": False}])
def test_centered_needs_exact_state(formats):
    param = Parameter(torch.ones(2, dtype=BF16))
    with refused("FusedRMSprop: centered is True, expected False without state in float32"):
        FusedRMSprop([param], centered=True, **formats)
    optimizer = FusedRMSprop([param], **formats)
    with refused("FusedRMSprop: centered is True, expected False without state in float32"):
        optimizer.add_param_group({"params": [Parameter(torch.ones(2))], "centered": True})
    assert FusedRMSprop([param], centered=True).param_groups[0]["centered"]


def test_amsgrad_is_no_option_of_adagrad():
    with refused(
        "DeepSpeedCPUAdagrad: amsgrad is True, expected False: Adagrad has no such variant"
    ):
        DeepSpeedCPUAdagrad([Parameter(torch.ones(2))], amsgrad=True)


IGNORED = [
    (DeepSpeedCPUAdam, "adamw_mode", False),
    (DeepSpeedCPUAdam, "adam_w_mode", False),
    (HybridAdam, "adamw_mode", True),
    (HybridAdam, "nvme_offload_fraction", 0.0),
    (DeepSpeedCPULion, "fp32_optimizer_states", False),
    (FusedSGD, "state_dtype", torch.uint8),
    (FusedRMSprop, "master", "float32"),
    (DeepSpeedCPUAdagrad, "master_weights", True),
    (DeepSpeedCPUAdam, "seed", 1),
    (OffloadOptimizer, "free_grads", True),
    (OffloadOptimizer, "state_dtype", torch.uint8),
    (OffloadOptimizer, "adamw_mode", False),
]


@pytest.mark.parametrize(("kind", "name", "value"), IGNORED)
def test_groups_take_no_arguments_that_hold_for_all(kind, name, value):
    """They would be ignored; what is the user's own is kept."""
    group = {"params": [Parameter(torch.ones(2))], name: value}
    text = (
        f"{kind.__name__}: param_group has {name}, expected it as an argument of {kind.__name__}, "
        "as it is for all groups"
    )
    optimizer = kind([{"params": [Parameter(torch.ones(2))], "of_user": 3}])
    for make in (lambda: kind([group]), lambda: optimizer.add_param_group(group)):
        with pytest.raises(TypeError) as raised:
            make()
        instead = "; give the group decoupled_weight_decay"
        assert str(raised.value) in (text, text + instead)
        assert (str(raised.value) == text) or name.startswith("adam")
    assert len(optimizer.param_groups) == 1 and optimizer.param_groups[0]["of_user"] == 3


def complex_param():
    return Parameter(torch.ones(2, dtype=torch.complex64))


def integer_param():
    return Parameter(torch.ones(2, dtype=torch.int32), requires_grad=False)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            complex_param,
            "is torch.complex64, expected float32, bfloat16 or float16; "
            "use torch.optim.AdamW for it",
        ),
        (
            lambda: Parameter(torch.ones(2).double()),
            "is torch.float64, expected float32, bfloat16 or float16; use torch.optim.AdamW for it",
        ),
        (
            lambda: Parameter(torch.eye(3).to_sparse()),
            "is sparse, torch.sparse_coo, expected dense; use param.to_dense()",
        ),
        (
            lambda: Parameter(torch.eye(3).to_sparse_csr()),
            "is sparse, torch.sparse_csr, expected dense; use param.to_dense()",
        ),
        (integer_param, "is torch.int32, expected float32, bfloat16 or float16"),
        (
            lambda: Parameter(torch.ones(4, 4)[:, ::2]),
            "has shape [4, 2] and strides [4, 2], expected no gaps or overlaps; "
            "use param.contiguous()",
        ),
        (
            lambda: Parameter(torch.ones(3, 1).expand(3, 2)),
            "has shape [3, 2] and strides [1, 0], expected no gaps or overlaps; "
            "use param.contiguous()",
        ),
    ],
)
def test_parameters(make, text):
    good = Parameter(torch.ones(2))
    with refused(f"DeepSpeedCPUAdam: params[1] {text}"):
        DeepSpeedCPUAdam([good, make()])
    optimizer = DeepSpeedCPUAdam([("good", good)])
    with refused(f"DeepSpeedCPUAdam: params[1] (bad) {text}"):
        optimizer.add_param_group({"params": [("bad", make())]})
    assert len(optimizer.param_groups) == 1


PAIRS = pytest.mark.parametrize(
    ("on_cpu", "on_cuda"),
    [
        (DeepSpeedCPUAdam, FusedAdam),
        (DeepSpeedCPULion, FusedLion),
        (DeepSpeedCPUAdagrad, FusedAdagrad),
    ],
)


@PAIRS
def test_wrong_class_for_the_device(on_cpu, on_cuda):
    with refused(
        f"{on_cuda.__name__}: params[0] is on cpu, expected cuda; "
        f"use {on_cpu.__name__} for CPU parameters"
    ):
        on_cuda([Parameter(torch.ones(2))])


@needs_cuda
@PAIRS
def test_wrong_class_for_a_cuda_device(on_cpu, on_cuda):
    with refused(
        f"{on_cpu.__name__}: params[1] is on cuda:0, expected cpu; "
        f"use {on_cuda.__name__} for CUDA parameters"
    ):
        on_cpu([Parameter(torch.ones(2)), Parameter(torch.ones(2, device="cuda"))])


def test_parameter_without_memory_at_the_step():
    param = Parameter(torch.ones(2, device="meta"))
    optimizer = DeepSpeedCPUAdam([param])
    optimizer.step()
    param.grad = torch.ones(2, device="meta")
    with refused(
        "DeepSpeedCPUAdam: params[0] is on meta, expected cpu; give it memory before the first step"
    ):
        optimizer.step()


class Wrapper(torch.Tensor):
    """As DTensor does it: a tensor whose memory belongs to other tensors."""

    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (2,), requires_grad=True)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError


def test_wrapper_subclass():
    with refused(
        "DeepSpeedCPUAdam: params[0] is a Wrapper, expected a plain tensor or a DTensor; "
        "use torch.optim.AdamW for it",
        TypeError,
    ):
        DeepSpeedCPUAdam([Wrapper()])


def test_parameter_twice_in_a_group():
    param = Parameter(torch.ones(2))
    with (
        pytest.warns(UserWarning, match="duplicate"),
        refused("DeepSpeedCPUAdam: params[0] is in its group twice, expected once"),
    ):
        DeepSpeedCPUAdam([param, param])


ON_OR_OFF = [
    (DeepSpeedCPUAdam, ("adamw_mode", "amsgrad", "bias_correction", "maximize",
                        "fp32_optimizer_states", "master_weights")),
    (HybridAdam, ("adamw_mode", "amsgrad", "maximize", "fp32_optimizer_states")),
    (FusedAdam, ("adam_w_mode", "amsgrad", "set_grad_none", "maximize", "bias_correction")),
    (DeepSpeedCPULion, ("maximize", "fp32_optimizer_states", "master_weights")),
    (FusedLion, ("maximize", "set_grad_none")),
    (DeepSpeedCPUAdagrad, ("amsgrad", "maximize", "master_weights")),
    (FusedAdagrad, ("maximize", "set_grad_none")),
    (FusedSGD, ("nesterov", "wd_after_momentum", "maximize", "master_weights")),
    (FusedLamb, ("amsgrad", "bias_correction", "eps_inside_sqrt", "maximize", "master_weights")),
    (Lars, ("maximize", "master_weights")),
]  # fmt: skip
FLAGS = [(kind, name) for kind, names in ON_OR_OFF for name in names]
IN_GROUPS = {"adamw_mode": "decoupled_weight_decay", "adam_w_mode": "decoupled_weight_decay"}


@pytest.mark.parametrize(("kind", "name"), FLAGS)
@pytest.mark.parametrize("value", ["no", "adam", None, 2, 0.0, torch.tensor(True)], ids=str)
def test_what_is_on_or_off(kind, name, value):
    """A text would count as on, whatever it says."""
    on_cuda = kind in (FusedAdam, FusedLion, FusedAdagrad)
    device = "meta" if on_cuda else "cpu"
    title = kind.__name__
    with refused(f"{title}: {name} is {value!r}, expected a bool", TypeError):
        kind([Parameter(torch.ones(2, device=device))], **{name: value})
    optimizer = kind([Parameter(torch.ones(2, device=device))])
    name = IN_GROUPS.get(name, name)
    if name in optimizer.defaults:
        error = refused(f"{title}: {name} is {value!r}, expected a bool", TypeError)
        before = optimizer.param_groups[0][name]
        saved = optimizer.state_dict()
        saved["param_groups"][0][name] = value
        with error:
            optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0][name] is before
        with error:
            optimizer.add_param_group({"params": [Parameter(torch.ones(2))], name: value})


@pytest.mark.parametrize("value", [0, 1])
def test_numbers_that_are_bools(value):
    DeepSpeedCPUAdam([Parameter(torch.ones(2))], amsgrad=value, adamw_mode=value).step()


def test_a_largest_norm_that_is_no_number():
    with refused("FusedLamb: max_grad_norm is '1', expected a number", TypeError):
        FusedLamb([Parameter(torch.ones(2))], max_grad_norm="1")


def with_grad(grad):
    """Two good parameters, and one whose gradient has been tampered with."""
    params = [Parameter(torch.ones(2)), Parameter(torch.ones(3)), Parameter(torch.ones(3))]
    for p in params:
        p.grad = torch.ones_like(p)
    params[1].grad = None  # so that the numbers of the op are not those of the user
    params[2].grad.data = grad
    return params


@pytest.mark.parametrize(
    ("grad", "text"),
    [
        (torch.ones(4), "has shape [4], expected [3]"),
        (torch.ones(3).double(), "is torch.float64, expected float32, bfloat16 or float16"),
    ],
)
def test_gradients(grad, text):
    params = with_grad(grad)
    optimizer = adam(params)
    with refused(f"DeepSpeedCPUAdam: gradient of params[2] {text}"):
        optimizer.step()
    assert torch.equal(params[0], torch.ones(2))


@pytest.mark.parametrize("kind", [DeepSpeedCPUAdam, DeepSpeedCPULion, FusedSGD])
def test_sparse_gradient(kind):
    embedding = torch.nn.Embedding(5, 2, sparse=True)
    before = embedding.weight.detach().clone()
    embedding(torch.tensor([1, 3])).sum().backward()
    with refused(
        f"{kind.__name__}: gradient of params[0] is sparse, expected dense; "
        "use torch.optim.SparseAdam for it"
    ):
        kind(embedding.parameters()).step()
    assert torch.equal(embedding.weight, before)


def test_strided_at_the_step():
    param = Parameter(torch.ones(3))
    optimizer = adam([param])
    param.grad = torch.ones(3)
    param.data = torch.ones(6)[::2]
    with refused(
        "DeepSpeedCPUAdam: params[0] has shape [3] and strides [2], "
        "expected no gaps or overlaps; use param.contiguous()"
    ):
        optimizer.step()
    assert torch.equal(param, torch.ones(3))
    param.data = torch.ones(3)
    optimizer.step()
    param.data = torch.ones(6)[::2]
    with refused(
        "DeepSpeedCPUAdam: params[0] has shape [3] and strides [2], "
        "expected no gaps or overlaps; use param.contiguous()"
    ):
        optimizer.step()
    assert optimizer.state[param]["step"].item() == 1


def test_state_that_is_no_tensor():
    param = Parameter(torch.ones(3))
    optimizer = adam([param])
    param.grad = torch.ones(3)
    optimizer.step()
    optimizer.state[param]["exp_avg"] = 0.5
    with refused("DeepSpeedCPUAdam: state of params[0]: exp_avg is 0.5, expected a tensor"):
        optimizer.step()


STEPPED = [DeepSpeedCPUAdam, DeepSpeedCPUAdagrad, DeepSpeedCPULion, FusedSGD, FusedLamb, Lars]


@pytest.mark.parametrize("kind", STEPPED)
@pytest.mark.parametrize("mixed", [False, True], ids=["", "mixed dtypes"])
@pytest.mark.parametrize("use", ["step", "clip_and_step"])
def test_a_gradient_whose_memory_is_not_its_own(kind, mixed, use):
    """An op counts what it is given, which is not all: errors name what users know."""

    def call():
        return optimizer.clip_and_step(1.0) if use == "clip_and_step" else optimizer.step()

    params = with_grad(torch.ones(3))
    if mixed:
        params.insert(0, Parameter(torch.ones(4)))
        params[0].grad = torch.ones(4)
        params[0].grad.data = torch.ones(4, dtype=torch.bfloat16)
    last = len(params) - 1
    optimizer = kind([(f"p{i}", param) for i, param in enumerate(params)])
    params[last].grad.untyped_storage().resize_(0)
    title = f"{kind.__name__}: gradient of params[{last}] (p{last})"
    with refused(f"{title} has no memory, expected 3 elements"):
        call()
    assert torch.equal(params[last], torch.ones(3))
    if use == "step":
        params[last].grad = params[last].detach()
        with refused(f"{title} is overlapping params[{last}] (p{last}), expected separate memory"):
            call()


def test_a_parameter_whose_memory_is_gone():
    params = with_grad(torch.ones(3))
    optimizer = DeepSpeedCPUAdam(params)
    params[2].data.untyped_storage().resize_(0)
    with refused("DeepSpeedCPUAdam: params[2] has no memory, expected 3 elements"):
        optimizer.step()


def test_gradients_beside_sparse_ones():
    """Sparse ones are stepped by themselves, so that an op counts fewer still."""
    params = with_grad(torch.ones(3))
    params[0].grad = torch.ones(2).to_sparse()
    params[2].grad.untyped_storage().resize_(0)
    optimizer = DeepSpeedCPUAdagrad(params)
    text = "gradient of params[2] has no memory, expected 3 elements"
    with refused(f"DeepSpeedCPUAdagrad: {text}"):
        optimizer.step()


def test_inference_tensors_cannot_have_master_weights():
    with torch.inference_mode():
        param = Parameter(torch.ones(3, dtype=torch.bfloat16))
    param.grad = torch.ones_like(param)
    with refused(
        "DeepSpeedCPUAdam: params[0] is an inference tensor, expected one that counts how often it "
        "is written, for its master; make it outside of torch.inference_mode()"
    ):
        DeepSpeedCPUAdam([param], master_weights=True)
    for options in ({}, {"master": "remainder"}):
        DeepSpeedCPUAdam([param], **options).step()

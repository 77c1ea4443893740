"""clip_and_step at the edges: norms at max_norm, scales and norms beyond what float32 holds."""

import copy
import math
import re

import pytest
import torch
from optim_cases import adam, assert_same_bits, needs_cuda, on_each_device, state_tensors
from torch.nn import Parameter

from deepspeed_ext.optim import DeepSpeedCPUAdagrad, FusedLamb, FusedSGD, Lars

INF, NAN = math.inf, math.nan
LARGEST = torch.finfo(torch.float32).max
SMALLEST = 2.0**-149  # of float32
TINY, HUGE = 5e-324, 1.7e308  # of float64


def outcome(optimizer, param, call, **attributes):
    """Return norm and stepped gradients of a call with these attributes, or None if it skipped.

    The optimizer has betas of 0, so that exp_avg is the gradient as it was stepped.
    """
    before = copy.deepcopy([param, *state_tensors(optimizer)])
    count = optimizer.skipped_steps
    for name, value in attributes.items():
        if value is not None:
            setattr(optimizer, name, torch.tensor(value, dtype=torch.float64, device=param.device))
    norm = call().item()
    for name, value in attributes.items():
        if value is not None:
            delattr(optimizer, name)
    after = [param, *state_tensors(optimizer)]
    if optimizer.skipped_steps > count:
        assert optimizer.skipped_steps == count + 1
        assert_same_bits(after, before)
        return norm, None
    assert optimizer.state[param]["step"].item() == 2
    return norm, optimizer.state[param]["exp_avg"]


def prepared(device, *values):
    """One parameter with state, its optimizer, and a gradient of these values."""
    param = Parameter(torch.ones(len(values), device=device))
    optimizer = adam([param], device, betas=(0.0, 0.999))
    param.grad = torch.ones_like(param)
    optimizer.step()
    param.grad = torch.tensor(values, device=device)
    return param, optimizer


RATIOS = [
    0.5, 0.999, 1 - 1e-6, 1 - 2e-7, math.nextafter(1, 0), 1.0, math.nextafter(1, 2), 1 + 2e-7,
    1 + 1e-6, 1 + 1e-5, 1.0001, 1.0005, math.nextafter(1.001, 0), 1.001, 1.0011, 1.01, 2.0, 1e6,
]  # fmt: skip


@on_each_device
@pytest.mark.parametrize("scale", [None, 0.25, 1.0, 65536.0])
@pytest.mark.parametrize("ratio", RATIOS)
def test_norms_around_max_norm(device, ratio, scale):
    """Every gradient is clipped whose norm is above max_norm, be it only by a little."""
    param, optimizer = prepared(device, 3.0 * (scale or 1), -4.0 * (scale or 1))
    max_norm = 5.0 / ratio
    norm, stepped = outcome(
        optimizer, param, lambda: optimizer.clip_and_step(max_norm), grad_scale=scale
    )
    exact = torch.tensor([3.0, -4.0], dtype=torch.float64, requires_grad=True)
    exact.grad = exact.detach().clone()
    torch.nn.utils.clip_grad_norm_(exact, max_norm)
    assert norm == 5
    torch.testing.assert_close(stepped.cpu().double(), exact.grad, rtol=1.2e-7, atol=0)
    left_alone = max_norm >= 5.0 + 1e-6
    assert torch.equal(stepped.cpu(), torch.tensor([3.0, -4.0])) == left_alone


def expected(grads, max_norm, scale):
    """Norm and gradients after unscaling and clipping, exact enough; None if not to be stepped."""
    if not (scale and math.isfinite(scale)):
        return None
    length = math.hypot(*grads)
    if not math.isfinite(length):
        return None
    divisor = max(abs(scale), (length + 1e-6 * abs(scale)) / max_norm)
    if abs(divisor) < 1 and max(length, 1) > divisor * LARGEST:
        return None
    unscaled = length / abs(scale) if length <= HUGE * abs(scale) else INF
    return min(unscaled, LARGEST), [math.copysign(1, scale) * (g / divisor) for g in grads]


GRADS = {
    "usual": (3.0, -4.0),
    "zero": (0.0, 0.0),
    "smallest": (SMALLEST, 0.0),
    "large": (1e20, 1.0),
    "squares overflow": (3e38, -3e38),
    "inf": (INF, 1.0),
    "nan": (NAN, 1.0),
}
SCALES = [
    None, 1.0, 65536.0, 0.5, -2.0, 0.0, -0.0, NAN, INF, -INF, SMALLEST, -SMALLEST, 1e-41, 1e-30,
    1e-19, 3e38, TINY, 1e-200, 1e200, HUGE,
]  # fmt: skip
MAX_NORMS = [1.0, 1e3, 1e-30, 1e-300, TINY, 1e30, 1e38, 4e38, 1e300, INF]


@on_each_device
@pytest.mark.parametrize("max_norm", MAX_NORMS)
@pytest.mark.parametrize("kind", GRADS)
def test_the_norm_is_not_finite_if_and_only_if_nothing_was_stepped(device, kind, max_norm):
    param, optimizer = prepared(device, *GRADS[kind])
    values = [float(grad) for grad in param.grad]  # rounded
    fresh = copy.deepcopy((param, optimizer.state_dict()))
    for scale in SCALES:
        title = f"scale {scale}"
        with torch.no_grad():
            param.copy_(fresh[0])
        optimizer.load_state_dict(copy.deepcopy(fresh[1]))
        call = lambda: optimizer.clip_and_step(max_norm)  # noqa: E731
        norm, stepped = outcome(optimizer, param, call, grad_scale=scale)
        want = expected(values, max_norm, 1.0 if scale is None else scale)
        assert math.isfinite(norm) == (stepped is not None) == (want is not None), title
        if want is not None:
            assert norm == pytest.approx(want[0], rel=1e-6, abs=SMALLEST), title
            assert stepped.isfinite().all(), title
            # The factor is a float32: where that is subnormal it has fewer digits.
            assert stepped.tolist() == pytest.approx(want[1], rel=3e-7, abs=2.0**-22), title
            if math.isfinite(max_norm) and max_norm < LARGEST:
                length = math.hypot(*stepped.tolist())
                assert length <= max_norm * (1 + 1e-6) + 2.0**-21, title


@on_each_device
@pytest.mark.parametrize("values", [(3.0, -4.0), (0.0, 0.0), (3e38, 3e38), (INF, 0.0)])
@pytest.mark.parametrize("scale", [None, 8.0])
@pytest.mark.parametrize("found", [1.0, -1.0, 0.5, NAN])
def test_found_inf_from_outside(device, values, scale, found):
    """Nothing is stepped, so the norm must say so, even if it is known and finite."""
    param, optimizer = prepared(device, *values)
    call = lambda: optimizer.clip_and_step(1.0)  # noqa: E731
    norm, stepped = outcome(optimizer, param, call, grad_scale=scale, found_inf=found)
    assert not math.isfinite(norm) and stepped is None
    assert norm == INF or math.hypot(*values) == 0
    if math.isfinite(math.hypot(*values)):  # else it is found here, too
        norm, stepped = outcome(optimizer, param, call, grad_scale=scale, found_inf=0.0)
        assert math.isfinite(norm) and stepped is not None


def test_without_gradients_there_is_nothing_to_skip():
    param = Parameter(torch.ones(2))
    optimizer = adam([param])
    for scale in (None, 2.0, -2.0):
        if scale:
            optimizer.grad_scale = torch.tensor(scale)
        assert optimizer.clip_and_step(1.0).item() == 0
    assert optimizer.skipped_steps == 0
    optimizer.grad_scale = torch.tensor(0.0)
    assert not optimizer.clip_and_step(1.0).isfinite()
    assert optimizer.skipped_steps == 1


OTHERS = {
    "Adagrad": lambda params: DeepSpeedCPUAdagrad(params, lr=0.1),
    "SGD": lambda params: FusedSGD(params, lr=0.1, momentum=0.9),
    "LAMB": lambda params: FusedLamb(params, lr=0.1),
    "LARS": lambda params: Lars(params, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("bad", [0.0, NAN, INF, 1e-46])
@pytest.mark.parametrize("name", OTHERS)
def test_no_optimizer_divides_by_such_a_scale(name, bad):
    param = Parameter(torch.ones(3))
    optimizer = OTHERS[name]([param])
    param.grad = torch.tensor([0.0, 1.0, -2.0])
    optimizer.step()
    before = copy.deepcopy([param, *state_tensors(optimizer)])
    optimizer.grad_scale = torch.tensor(bad, dtype=torch.float64)
    assert not optimizer.clip_and_step(INF).isfinite()
    assert optimizer.skipped_steps == 1
    assert_same_bits([param, *state_tensors(optimizer)], before)


def test_sparse_gradients_are_not_divided_by_such_a_scale():
    param = Parameter(torch.ones(4, 2))
    optimizer = DeepSpeedCPUAdagrad([param], lr=0.1)
    param.grad = torch.sparse_coo_tensor(torch.tensor([[1, 3]]), torch.ones(2, 2), (4, 2))
    optimizer.grad_scale = torch.tensor(0.0)
    assert not optimizer.clip_and_step(1.0).isfinite()
    assert torch.equal(param, torch.ones(4, 2)) and optimizer.skipped_steps == 1


@on_each_device
@pytest.mark.parametrize("values", [(3.0, -4.0), (3e38, -3e38), (INF, 1.0)])
@pytest.mark.parametrize("scale", [None, 0.0, NAN, INF, SMALLEST, -2.0, 65536.0])
def test_clipping_in_step_of_lamb(device, values, scale):
    """max_grad_norm: the same arithmetic, and every step that was left out is counted once."""
    params = [Parameter(torch.ones(2, device=device)) for _ in range(2)]
    ours, theirs = FusedLamb(params[:1], max_grad_norm=1.0), FusedLamb(params[1:])
    for found in (None, 0.0, 1.0):
        for optimizer in (ours, theirs):
            if scale is not None:
                optimizer.grad_scale = torch.tensor(scale, device=device)
            if found is not None:
                optimizer.found_inf = torch.tensor(found, device=device)
        for param in params:
            param.grad = torch.tensor(values, device=device)
        counts = ours.skipped_steps, theirs.skipped_steps
        ours.step()
        norm = theirs.clip_and_step(1.0)
        assert_same_bits(params[:1], params[1:])
        assert_same_bits(state_tensors(ours), state_tensors(theirs))
        assert norm.isfinite() == (theirs.skipped_steps == counts[1])
        by_itself = 0 if found else theirs.skipped_steps - counts[1]
        assert ours.skipped_steps == counts[0] + by_itself


def refused(text, kind):
    return pytest.raises(kind, match=f"^{re.escape(text)}$")


@pytest.mark.parametrize(
    ("wrong", "kind", "text"),
    [
        ("1", TypeError, "'1', expected a number"),
        (None, TypeError, "None, expected a number"),
        (True, TypeError, "True, expected a number"),
        (torch.tensor(1.0), TypeError, "tensor(1.), expected a number"),
        (1j, TypeError, "1j, expected a number"),
        (NAN, ValueError, "nan, expected above 0"),
        (-1, ValueError, "-1, expected above 0"),
        (0, ValueError, "0, expected above 0"),
        (-INF, ValueError, "-inf, expected above 0"),
    ],
)
def test_max_norm_is_a_number_above_0(wrong, kind, text):
    param, optimizer = prepared("cpu", 3.0, 4.0)
    before = copy.deepcopy([param, *state_tensors(optimizer)])
    with refused(f"DeepSpeedCPUAdam: max_norm is {text}", kind):
        optimizer.clip_and_step(wrong)
    lamb = FusedLamb([param], max_grad_norm=1.0)
    if wrong != 0:
        title = f"FusedLamb: max_grad_norm is {text.replace('above', 'at least')}"
        with refused(title, kind):
            FusedLamb([param], max_grad_norm=wrong)
        lamb.max_grad_norm = wrong  # as one who schedules it does
        with refused(title, kind):
            lamb.step()
    assert_same_bits([param, *state_tensors(optimizer)], before)


def test_max_norm_may_be_any_kind_of_number():
    numpy = pytest.importorskip("numpy")
    for one in (1, 1.0, numpy.float32(1), numpy.float64(1), numpy.int64(1)):
        param, optimizer = prepared("cpu", 3.0, 4.0)
        optimizer.clip_and_step(one)
        torch.testing.assert_close(
            optimizer.state[param]["exp_avg"], torch.tensor([0.6, 0.8]), rtol=1e-6, atol=0
        )


@on_each_device
@pytest.mark.parametrize("scale", [0.0, NAN, INF, -2.0, 0.5])
def test_step_divides_by_any_scale_as_torch_does(device, scale):
    """step() looks at nothing: without found_inf, gradients of inf or NaN are stepped, too."""
    ours, theirs = (Parameter(torch.ones(3, device=device)) for _ in range(2))
    pair = adam([ours], device), torch.optim.AdamW([theirs], weight_decay=0.0, fused=True)
    for param, optimizer in zip((ours, theirs), pair, strict=True):
        param.grad = torch.tensor([0.0, 1.0, -2.0], device=device)
        optimizer.grad_scale = torch.tensor(scale, device=device)
        optimizer.step()
    # On CUDA torch takes 1 - beta2 from beta2 in float32, which is off by 2e-5 of it.
    close = dict(rtol=1e-6 if device == "cpu" else 3e-5, atol=1e-7, equal_nan=True)
    torch.testing.assert_close(ours, theirs, **close)
    for key in ("exp_avg", "exp_avg_sq"):  # where one is inf, the other may be NaN
        got, want = (o.state[p][key] for o, p in zip(pair, (ours, theirs), strict=True))
        assert torch.equal(got.isfinite(), want.isfinite())
        torch.testing.assert_close(got[got.isfinite()], want[want.isfinite()], **close)
    assert pair[0].skipped_steps == 0


@needs_cuda
def test_nothing_waits_for_the_device_whatever_the_scale():
    _, optimizer = prepared("cuda", 3.0, 4.0)
    attributes = [torch.tensor(value, device="cuda") for value in (0.0, NAN, 65536.0)]
    optimizer.clip_and_step(1.0)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for scale in attributes:
            optimizer.grad_scale = scale
            optimizer.clip_and_step(1.0)
            optimizer.found_inf = attributes[0]
            optimizer.clip_and_step(1.0)
            del optimizer.found_inf
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert optimizer.skipped_steps == 4


@needs_cuda
def test_a_graph_reads_the_scale_anew():
    _, optimizer = prepared("cuda", 3.0, 4.0)
    optimizer.grad_scale = torch.ones((), device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        optimizer.clip_and_step(1.0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm = optimizer.clip_and_step(1.0)
    for scale, want in ((2.0, 2.5), (0.0, INF), (NAN, NAN), (SMALLEST, LARGEST), (0.5, 10.0)):
        optimizer.grad_scale.fill_(scale)
        graph.replay()
        assert norm.item() == pytest.approx(want, rel=1e-6, nan_ok=True)
    assert optimizer.skipped_steps == 2

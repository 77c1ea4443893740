"""LAMB and LARS: each of their ops against float64, element by element, and the norms."""

import itertools

import pytest
import torch
from step_cases import (
    BF16,
    F16,
    F32,
    SIZES,
    Arguments,
    Dtypes,
    as_buffers,
    as_lists,
    clone,
    make,
    map_tensors,
    options,
    states_of,
    written,
)
from test_steps import of
from tolerance import assert_within
from torch import Tensor
from two_pass_cases import (
    CHUNK,
    LAMB,
    LARS,
    TwoPass,
    coded,
    decoded,
    each_two_pass,
    each_with_dtypes,
    halved,
    noise_for,
)

from deepspeed_ext.ops import lamb_coefficients, lars_coefficients
from deepspeed_ext.ops.optimizers.state_formats import (
    BLOCK,
    decode_blocks,
    encode_blocks,
    join_float32,
)


def assert_squares(
    step: TwoPass, squares: Tensor, stored: Arguments, numbers: dict[str, object]
) -> None:
    """Compare sums with those of the squares of what is stored, which is in float64.

    An element that is off by d changes its square by 2 |u| d + d^2.
    """
    assert squares.dtype == torch.float64 and squares.shape == (len(stored["params"]), 2)
    for i, (of_param, of_other) in enumerate(squares.cpu()):
        tensors = of(stored, i)
        exact = tensors.get("master_params", tensors["params"]).square().sum().cpu()
        assert abs(of_param - exact) <= 1e-12 * exact, f"param {i}"
        value, error = step.measured(tensors, stored["steps"][i].item(), numbers)
        exact, slack = value.square().sum().cpu(), (2 * value.abs() * error + error**2).sum().cpu()
        assert abs(of_other - exact) <= slack + 1e-12 * exact, f"second of {i}"


@each_with_dtypes
def test_matches_reference(step: TwoPass, dtypes: Dtypes, device: str) -> None:
    for change, shift in zip(
        step.changes, itertools.cycle((0, 1)), strict=False
    ):  # 1: nothing is aligned
        got = make(step, SIZES, dtypes, device, change.get("states"), shift)
        numbers = options(step, change, device)
        before = map_tensors(torch.Tensor.double, got)
        want = clone(before)
        squares = step.measure(got, numbers)
        step.measure_reference(want, numbers)
        middle = map_tensors(torch.Tensor.double, got)
        assert_squares(step, squares, middle, options(step, change))
        changed = set(step.states) if step is LAMB else set()
        for name in ("params", "grads", *states_of(got)):
            assert name in changed or all(map(torch.equal, middle[name], before[name])), name

        coefficients = step.coefficients(squares, numbers)
        last = clone(middle)
        step.apply(got, coefficients, numbers)
        step.apply_reference(last, coefficients, numbers)
        for i in range(len(SIZES)):
            number = got["steps"][i].item()
            assert number == before["steps"][i].item() + 1
            text = f"[{i}] of {change}, shift {shift}"
            errors = step.errors(of(before, i), of(want, i), number, options(step, change))
            for name, error in errors.items():
                assert_within(name + text, middle[name][i].to(dtypes.state), want[name][i], error)
            factor = coefficients[i].item()
            errors = step.apply_errors(
                of(middle, i), of(last, i), number, factor, options(step, change)
            )
            for name in errors.keys() & of(got, i).keys():
                assert_within(name + text, got[name][i], last[name][i], errors[name])


@each_two_pass
def test_first_reference_returns_the_same_squares(step: TwoPass) -> None:
    for change in step.changes:
        got = make(step, [1, 1000], states=change.get("states"))
        want = map_tensors(torch.Tensor.double, got)
        numbers = options(step, change)
        torch.testing.assert_close(
            step.measure(got, numbers), step.measure_reference(want, numbers), rtol=1e-5, atol=0
        )


@each_two_pass
def test_sums_over_several_chunks(step: TwoPass, device: str) -> None:
    sizes = [CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 77]
    for dtypes in (Dtypes(), Dtypes(BF16, F16, BF16)):
        got = make(step, sizes, dtypes, device)
        squares = step.measure(got, step.base)
        assert_squares(step, squares, map_tensors(torch.Tensor.double, got), step.base)


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("form", ["codes", "bf16", "halves", "halves and codes"])
@each_two_pass
def test_compact_state(step: TwoPass, form: str, noisy: bool, device: str) -> None:
    """Compact forms change only what they round; squares are of what was stored."""
    wide = make(step, [0, 1, 255, 256, 257, 5000], Dtypes(BF16, BF16, F32, True), device)
    got = halved(wide) if "halves" in form else wide
    got = coded(step, got) if "codes" in form else got
    if form == "bf16":
        got |= {name: [t.to(BF16) for t in got[name]] for name in step.states}
    got = clone(got) | (dict(noise=noise_for(got)) if noisy else {})
    want = clone(decoded(step, got) | {name: wide[name] for name in ("params", "master_params")})
    squares = step.measure(got, step.base)
    step.measure(want, step.base)
    stored = clone(decoded(step, got) | {name: wide[name] for name in ("params", "master_params")})
    assert_squares(step, squares, map_tensors(torch.Tensor.double, stored), step.base)
    for name in step.states if step is LAMB else ():
        for a, b in zip(stored[name], want[name], strict=True):
            assert_stored(a, b, form, noisy, name in step.signed)

    coefficients = step.coefficients(squares, step.base)
    step.apply(got, coefficients, step.base)
    step.apply(stored, coefficients, step.base)
    for i, master in enumerate(stored["master_params"]):
        found = got["master_params"][i]
        found = join_float32(got["params"][i], found) if "halves" in form else found
        assert torch.equal(found, master)
        if step is LARS:
            state = decoded(step, got)["momentum_buffers"][i]
            assert_stored(state, stored["momentum_buffers"][i], form, noisy, True)


def assert_stored(found: Tensor, value: Tensor, form: str, noisy: bool, signed: bool) -> None:
    """What memory holds is the float32 value, rounded to the nearest or at random."""
    if form == "halves":
        assert torch.equal(found, value)
    elif form == "bf16":
        off = (found - value).abs()
        spacing = torch.finfo(BF16).eps * value.abs()
        assert torch.equal(found, value.to(BF16).float()) if not noisy else (off <= spacing).all()
    else:
        codes, scales = encode_blocks(value, signed=signed)
        if not noisy:
            assert torch.equal(found, decode_blocks(codes, scales, signed=signed))
        floor = scales.repeat_interleave(BLOCK)[: len(value)] * (2.0**-7 if signed else 2.0**-15)
        assert ((found - value).abs() <= (value.abs() + floor) / 16).all()


@each_two_pass
def test_coefficients_of_zero_norms(step: TwoPass, device: str) -> None:
    """1 where the parameter is all zeros, or what it is compared with."""
    numbers = step.base | dict(weight_decay=0.0)
    arguments = make(step, [5, 5, 0], device=device)
    arguments["params"][0].zero_()
    for name in ("grads", *step.states):
        arguments[name][1].zero_()
    squares = step.measure(arguments, numbers)
    assert (squares > 0).tolist() == [[False, True], [True, False], [False, False]]
    coefficients = step.coefficients(squares, numbers)
    assert coefficients.dtype == F32 and coefficients.tolist() == [1, 1, 1]


def test_coefficients_are_those_of_the_papers(device: str) -> None:
    squares = torch.tensor([[9.0, 4.0], [1e-8, 1.0], [1e6, 1.0], [float("inf"), 1.0]])
    squares = squares.double().to(device)
    assert lamb_coefficients(squares).tolist() == pytest.approx([1.5, 0.01, 10, 10])
    assert lamb_coefficients(squares, 0.2, 1.2).tolist() == pytest.approx([1.2, 0.2, 1.2, 1.2])
    got = lars_coefficients(squares[:2], 0.5, weight_decay=0.1, epsilon=0.7)
    want = [0.5 * 3 / (2 + 0.1 * 3 + 0.7), 0.5 * 1e-4 / (1 + 0.1 * 1e-4 + 0.7)]
    assert got.tolist() == pytest.approx(want)
    for coefficients in (lamb_coefficients, lars_coefficients):
        assert coefficients(squares[:0]).shape == (0,)
        assert coefficients(squares * float("nan")).isnan().all()


@each_two_pass
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_shows_in_the_squares(
    step: TwoPass, value: float, device: str
) -> None:
    arguments = make(step, [100, 100], device=device)
    arguments["grads"][0][50] = value
    squares = step.measure(arguments, step.base)
    assert squares.isfinite().tolist() == [[True, False], [True, True]]


@each_two_pass
def test_huge_params_and_tiny_ones_have_finite_squares(step: TwoPass, device: str) -> None:
    arguments = make(step, [100, 100], device=device)
    arguments["params"][0].fill_(3e38)
    arguments["params"][1].fill_(1e-40)
    squares = step.measure(arguments, step.base | dict(weight_decay=0.0))
    want = [100 * 3e38**2, 100 * 1e-40**2]
    assert squares[:, 0].tolist() == pytest.approx(want, rel=1e-5)


@each_with_dtypes
def test_buffers_as_lists(step: TwoPass, dtypes: Dtypes, device: str) -> None:
    for gap in (0, 3):
        lists = make(step, SIZES, dtypes, device)
        buffers = as_buffers(clone(lists), gap)
        squares = step.both(lists, step.base)
        assert torch.equal(step.both(buffers, step.base), squares)
        for name in written(lists):
            for a, b in zip(as_lists(buffers)[name], lists[name], strict=True):
                assert torch.equal(a.flatten(), b.flatten()), name


def test_coefficients_refuse_bounds_and_stay_finite() -> None:
    squares = torch.tensor([[4.0, 1e-88], [4.0, 1.0]], dtype=torch.float64)
    assert lars_coefficients(squares).isfinite().all()
    for bounds in ((5.0, 1.0), (-5.0, 1.0)):
        with pytest.raises(ValueError, match=r"min_coefficient is -?5\.0, expected"):
            lamb_coefficients(squares, *bounds)

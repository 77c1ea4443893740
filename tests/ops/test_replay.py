"""Calls of ops that are recorded and made again: as the calls themselves, or refused."""

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from deepspeed_ext.inference import KVCache
from deepspeed_ext.ops import (
    NextNorm,
    append_and_attend_,
    record,
    rms_norm,
    rope_,
    rope_frequencies,
    skinny_linear,
    skinny_linear_norm,
    swiglu,
)

_OP = torch.ops.deepspeed_ext.replay_.default


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def a_layer() -> tuple[Callable[[Tensor], Tensor], KVCache, Tensor]:
    """Return a step with all kinds of arguments and views, its cache and a weight of it."""
    cache = KVCache(2, 64, 1, 8, layers=2, dtype=torch.float32)
    cache.reserve([0, 1], 1)
    slots = torch.tensor([1, 0], dtype=torch.int32)
    frequencies = rope_frequencies(8)
    weights = [random(n, k, seed=n) for n, k in ((32, 16), (16, 16), (48, 16), (16, 24))]
    ones, bias = torch.ones(16), random(16, seed=5)

    def step(x: Tensor) -> Tensor:
        h = rms_norm(x, ones)
        for i in range(2):
            qkv = skinny_linear(h, weights[0]).view(2, 1, 4, 8)
            q, k, v = qkv.split((2, 1, 1), 2)
            mixed = append_and_attend_(
                q, k, v, cache.layer(i), frequencies, slots=slots, window=3 * i
            )
            assert isinstance(mixed, Tensor)
            x, state = skinny_linear_norm(
                mixed.view(2, 1, 16), weights[1], bias, norm=NextNorm(ones), residual=x
            )
            wide = skinny_linear(state, weights[2], activation="silu", gated=True)
            x, h = skinny_linear_norm(wide, weights[3], norm=NextNorm(ones, 1e-3), residual=x)
        return skinny_linear(h._replace(x=h.x[:, 0], squares=h.squares[:, 0]), weights[0])

    return step, cache, weights[2]


def test_as_the_calls_themselves() -> None:
    """For other inputs, after what is in weights and cache has changed, in any thread."""
    step, cache, weight = a_layer()
    plain, other, _ = a_layer()  # with a cache of its own
    result, recorded = record(step, random(2, 1, 16))
    assert recorded.problem is None
    assert torch.equal(result, plain(random(2, 1, 16)))
    for seed in range(1, 4):
        for each in (cache, other):
            each.reserve([0, 1], 1)
        x = random(2, 1, 16, seed=seed)
        assert torch.equal(recorded(x), plain(x))
    assert torch.equal(cache._keys[:, :, :, :4], other._keys[:, :, :, :4])
    before = recorded(x)
    weight *= 2
    after = recorded(x)
    assert torch.equal(before, plain(x))  # results have memory of their own
    assert torch.equal(after, step(x)) and not torch.equal(after, before)

    found: list[Tensor] = []
    threads = [threading.Thread(target=lambda: found.append(recorded(x))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and all(torch.equal(each, after) for each in found)


def test_under_inference_mode() -> None:
    step, _, _ = a_layer()
    with torch.inference_mode():
        x = random(2, 1, 16)
        _, recorded = record(step, x)
        assert torch.equal(recorded(x), step(x)) and recorded(x).is_inference()


def test_elements_are_selected_again() -> None:
    """As layers of mixed columns do it; what the order is may change."""
    ones, order = torch.ones(16), torch.randperm(16, generator=torch.manual_seed(0))
    rows = torch.tensor([1, 0, 1])

    def whole(x: Tensor) -> Tensor:
        return rms_norm(x.index_select(-1, order), ones).index_select(0, rows)

    _, recorded = record(whole, random(2, 16))
    assert recorded.problem is None
    x = random(2, 16, seed=1)
    assert torch.equal(recorded(x), whole(x))
    before = whole(x)
    order.copy_(order.flip(0))
    assert torch.equal(recorded(x), whole(x)) and not torch.equal(recorded(x), before)


def test_results_go_when_nobody_reads_them() -> None:
    ones = torch.ones(16)

    def chain(x: Tensor) -> Tensor:
        for _ in range(50):
            x = rms_norm(x.view(2, 16), ones)[None]
        return x

    _, recorded = record(chain, random(1, 2, 16))
    assert torch.equal(recorded(random(1, 2, 16, seed=1)), chain(random(1, 2, 16, seed=1)))
    places = [n for n in recorded._code.tolist() if -1000 < n < 0]
    assert min(places) >= -4


def test_whole_numbers_in_the_place_of_floats() -> None:
    ones = torch.ones(16)
    _, recorded = record(lambda x: rms_norm(x, ones, eps=1), random(2, 16))
    x = random(2, 16, seed=1)
    assert torch.equal(recorded(x), rms_norm(x, ones, eps=1.0))


def test_an_early_result_stays() -> None:
    ones = torch.ones(16)

    def early(x: Tensor) -> Tensor:
        first = rms_norm(x, ones)
        assert isinstance(first, Tensor)
        for _ in range(5):
            rms_norm(x, ones, eps=1.0)
        return first

    _, recorded = record(early, random(2, 16))
    x = random(2, 16, seed=1)
    assert torch.equal(recorded(x), early(x))


def test_a_view_of_an_input_can_be_the_result() -> None:
    for function in (lambda x: x, lambda x: x[0].t(), lambda x: x[1:, 2], lambda x: x[:, 1:][2:]):
        _, recorded = record(function, random(2, 5, 5))
        x = random(2, 5, 5, seed=1)
        assert torch.equal(recorded(x), function(x))


def _in_place(x: Tensor) -> Tensor:
    return x.add_(1)


def _all_in_place(x: Tensor) -> Tensor:
    torch._foreach_add_([x], 1)
    return x


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda x: x + 1, "it calls aten.add.Tensor"),
        (_in_place, "it calls aten.add_.Tensor"),
        (_all_in_place, "it calls aten._foreach_add_.Scalar"),  # which returns nothing
        (lambda x: rms_norm(x, x[0]) if x.sum().item() else x, "it calls aten.sum.default"),
        (lambda x: x.view(torch.int32).view(torch.float32), "it calls aten.view.dtype"),
        (lambda x: x.clone(), "it calls aten.clone.default"),
        (lambda x: torch.zeros(3), "it calls aten.zeros.default"),
        (torch._neg_view, "it calls aten._neg_view.default"),
    ],
)
def test_what_cannot_be_done_again_is_named(function: Any, text: str) -> None:
    _, recorded = record(function, random(2, 16))
    assert recorded.problem == text
    with pytest.raises(RuntimeError, match=f"replay_: {text}, expected what can be done again"):
        recorded(random(2, 16))


@pytest.mark.parametrize("begin", [0, 32])
def test_a_view_of_more_than_an_input_is_refused(begin: int) -> None:
    """Another input may be all that there is in its memory."""
    base = random(4, 16)
    _, recorded = record(lambda x: x.as_strided((2, 16), (16, 1), begin), base[1:2])
    text = "it calls aten.as_strided.default for elements beyond the tensor"
    assert recorded.problem == text


def test_an_input_may_be_given_twice_and_be_known_from_elsewhere() -> None:
    x, y, z = (random(2, 16, seed=seed) for seed in range(3))
    _, recorded = record(lambda a, b: swiglu(swiglu(a, x), b), x, x)
    assert torch.equal(recorded(y, z), swiglu(swiglu(y, x), z))
    with pytest.raises(ValueError, match=r"^replay_: inputs has 1 tensors, expected 2$"):
        recorded(y)


def test_a_result_from_elsewhere() -> None:
    given = random(3)
    _, recorded = record(lambda x: given, random(2, 16))
    assert recorded.problem == "it returns what no op that is called again has left"


@pytest.mark.parametrize(
    "other", [torch.zeros(3, 16), torch.zeros(16, 2).t(), torch.zeros(2, 16).double()]
)
def test_inputs_are_alike(other: Tensor) -> None:
    _, recorded = record(lambda x: rms_norm(x, x[0]), random(2, 16))
    with pytest.raises(ValueError, match=r"replay_: inputs\[0\] is .*, expected _Form\(shape=\(2,"):
        recorded(other)


def test_a_gradient_is_refused() -> None:
    weight = random(16).requires_grad_()
    _, recorded = record(lambda x: rms_norm(x, weight), random(2, 16))
    assert not recorded(random(2, 16)).requires_grad
    with torch.enable_grad(), pytest.raises(RuntimeError, match="replay_: a gradient is wanted"):
        recorded(random(2, 16))


def test_writes_are_counted() -> None:
    """To an input through a view, and to a tensor from elsewhere; what is read is not written."""
    positions, frequencies = torch.arange(2), torch.ones(4)
    elsewhere, read = random(2, 1, 8), random(2, 1, 8)

    def function(x: Tensor, other: Tensor) -> Tensor:
        rope_(x.view(2, 1, 8), elsewhere, positions, frequencies)
        return rms_norm(other.view(2, 8))

    x = random(2, 8)
    _, recorded = record(function, x, read)
    x = random(2, 8)
    tensors = (x, elsewhere, read, positions, frequencies)
    before = [tensor._version for tensor in tensors]
    recorded(x, read)
    assert [tensor._version for tensor in tensors] == [before[0] + 1, before[1] + 1, *before[2:]]


def test_ops_check_what_they_are_given() -> None:
    weight = random(8, 16)
    _, recorded = record(lambda x: skinny_linear(x, weight), random(2, 16))
    weight.resize_(8, 4)
    with pytest.raises(RuntimeError):
        recorded(random(2, 16))


def replayed(names: bytes, code: list[int], *given: Tensor) -> Tensor:
    data = torch.tensor(list(names), dtype=torch.uint8)
    out: Tensor = _OP(data, torch.tensor(code, dtype=torch.int64), list(given))
    return out


_NAME = b"deepspeed_ext::rms_norm\0\0"


@pytest.mark.parametrize(
    ("names", "code", "text"),
    [
        (_NAME, [], "code has 0 numbers, expected more"),
        (_NAME, [1], "code has place 1, expected that of a tensor"),
        (_NAME, [-1], "code has place -1, expected that of a tensor"),
        (_NAME, [0, 2], "code[1] is 2, expected 0 or 1"),
        (_NAME, [0, 0, 99, 1, 1], "code has name 99, expected a place in names"),
        (_NAME, [0, 0, -1, 1, 1], "code has name -1, expected a place in names"),
        (_NAME[:-1], [0, 0, 0, 1, 1], "names has no overload behind deepspeed_ext::rms_norm"),
        (b"deep", [0], "names has no zero at its end"),
        (b"", [0, 0, 0, 1, 1], "code has name 0, expected a place in names"),
        (_NAME, [0, 0, 0, 3, 1, 1, 0], "code has 7 numbers, expected more"),
        (_NAME, [0, 0, 0, -3, 1, 1, 0], "code has 7 numbers, expected more"),
        (_NAME, [0, 0, 0, 1, 1 << 40, 1, 0], "code has 7 numbers, expected more"),
        (_NAME, [0, 0, 0, 1, 1, 9, 0, -1], "code has an argument of kind 9, expected one of Kind"),
        (_NAME, [0, 1, 0, -2, 0, 0], "code has place -2 for a result, expected the next one"),
        (_NAME, [0, 1, 0, 3, 0, 0], "code has place 3 for a result, expected the next one"),
        (_NAME, [0, 1, 0, -1, 0, 1 << 62], "expected more"),
    ],
)
def test_code_is_checked(names: bytes, code: list[int], text: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=re.escape(text)):
        replayed(names, code, torch.ones(4))


def test_names_and_code_have_their_types() -> None:
    given = torch.ones(4)
    zeros = torch.zeros(4, dtype=torch.int64)
    with pytest.raises((ValueError, RuntimeError), match="expected uint8 and int64"):
        _OP(zeros, zeros, [given])
    with pytest.raises((ValueError, RuntimeError), match="have gaps, expected contiguous"):
        _OP(torch.zeros(4, dtype=torch.uint8), torch.zeros(8, dtype=torch.int64)[::2], [given])


def test_it_is_not_traced() -> None:
    _, recorded = record(lambda x: rms_norm(x, x[0]), random(2, 16))
    refused = pytest.raises(RuntimeError, match="replay_: given has fake tensors")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, refused:
        recorded(mode.from_tensor(random(2, 16)))

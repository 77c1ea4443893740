"""quantize and its kin: what has the same bits, what torch may do with it, and what it refuses."""

import hashlib
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from allocated import Taken, measured, share
from at_once import in_threads
from quantize_cases import CASES, INTEGERS, KINDS, options_of, same, values
from samples import BF16, DTYPES, F32
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from deepspeed_ext.ops import dequantize, ds_quantizer, fake_quantize, quantize
from deepspeed_ext.ops.quantization import self_checks
from deepspeed_ext.ops.quantization.formats import NAMES

OPS = torch.ops.deepspeed_ext
each_kind = pytest.mark.parametrize("kind", KINDS, ids=str)


def results(x: Tensor, kind: tuple[str, bool], case: tuple[Any, ...]) -> list[Tensor]:
    """Return all that the ops make of a tensor."""
    options = options_of(kind, case)
    others = {name: options[name] for name in ("format", "group_size", "group_rows")}
    found = []
    for seed in (None, 11) if kind in INTEGERS else (None,):
        made = quantize(x, **options, seed=seed)
        found += [part for part in made if part is not None]
        for dtype in DTYPES:
            found.append(dequantize(*made, **others, length=x.shape[-1], dtype=dtype))
        found.append(fake_quantize(x, **options, seed=seed))
    return found


def digest(device: str = "cpu") -> str:
    """Return a digest of the bits of results."""
    found = hashlib.sha256()
    for case in CASES:
        for kind in KINDS:
            x = values(case[0], DTYPES[len(case[0]) % 3], device)
            for result in results(x, kind, case):
                found.update(result.cpu().nan_to_num(0).view(torch.uint8).numpy().tobytes()
                             if result.element_size() > 1 and result.numel()
                             else result.cpu().view(torch.uint8).numpy().tobytes())  # fmt: skip
    return found.hexdigest()


@each_kind
def test_cuda_has_the_bits_of_the_cpu(kind: tuple[str, bool], cuda: str) -> None:
    for case in CASES:
        for dtype in DTYPES:
            x = values(case[0], dtype)
            if x.numel() > 20 and case[2] is not None:
                x.view(-1)[7], x.view(-1)[20] = torch.nan, -torch.inf
            for got, want in zip(
                results(x.to(cuda), kind, case), results(x, kind, case), strict=True
            ):
                assert same(got, want)


def test_two_threads(device: str) -> None:
    x = values((40, 256), BF16, device)
    want = results(x, ("int4", False), (None, 64, 1))
    call = partial(results, x, ("int4", False), (None, 64, 1))
    for found in in_threads(device, 10, call, call):
        assert all(same(a, b) for got in found for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("case", [((5, 41), None, 2), ((0, 8), 8, 1)], ids=str)
@each_kind
def test_opcheck(kind: tuple[str, bool], case: tuple[Any, ...], device: str) -> None:
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    checks += ["test_aot_dispatch_dynamic"]
    if kind[0].startswith("fp8"):
        del checks[0]  # it compares arguments by arithmetic, which torch has not for 8-bit floats
    x = values(case[0], BF16 if case[0][0] else F32, device)
    options = dict(
        format=NAMES.index(kind[0]),
        symmetric=kind[1],
        group_size=case[1],
        group_rows=case[2],
        seed=None,
    )
    made = OPS.quantize.default(x, **options)
    others = {name: options[name] for name in ("format", "group_size", "group_rows")}
    given = (*made[:2], None if kind[1] else made[2])
    back = dict(others, length=x.shape[-1], dtype=1)
    for op, arguments, named in (
        (OPS.quantize.default, (x,), options),
        (OPS.dequantize.default, given, back),
        (OPS.fake_quantize.default, (x.detach().requires_grad_(),), options),
        (OPS.fake_quantize_.default, (x.clone(),), options),
    ):
        checked = torch.library.opcheck(op, arguments, named, test_utils=checks)
        assert set(checked.values()) == {"SUCCESS"}


@pytest.mark.parametrize(
    ("kind", "dynamic"), [(kind, i % 2 == 1) for i, kind in enumerate(KINDS)], ids=str
)
def test_compiled(kind: tuple[str, bool], dynamic: bool, device: str) -> None:
    """In one graph, for sizes that are not known too, with the same bits and gradients."""
    torch.compiler.reset()

    def block(x: Tensor) -> tuple[Tensor, ...]:
        made = quantize(x.detach() * 2, kind[0], group_size=8, symmetric=kind[1])
        back = dequantize(*made, format=kind[0], group_size=8, length=x.shape[-1])
        fake = fake_quantize(x.sin(), kind[0], group_size=8, symmetric=kind[1])
        return back + 1, fake.cos()

    compiled = torch.compile(block, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for shape in ((5, 24), (3, 32)):
        found = []
        for function in (compiled, block):
            x = values(shape, F32, device).requires_grad_()
            parts = function(x)
            found.append([*(p.detach() for p in parts), *torch.autograd.grad(parts[1].sum(), x)])
        for got, want in zip(*found, strict=True):
            assert torch.equal(got, want)


def test_seeds_of_64_bits(device: str) -> None:
    """As torch.seed() returns them; -1 and 2^64 - 1 are the same 64 bits."""
    x = torch.linspace(-1, 1, 64, device=device)
    for op in (fake_quantize, lambda x, seed: quantize(x, seed=seed).codes):
        found = {seed: op(x, seed=seed) for seed in (2**63, 2**64 - 1, -1, -(2**63), 2**63 - 1)}
        assert torch.equal(found[2**64 - 1], found[-1])
        assert torch.equal(found[2**63], found[-(2**63)])
        assert not torch.equal(found[2**63], found[2**63 - 1])
    for seed in (2**64, -(2**63) - 1, 1.5, True, "1"):
        for function in (fake_quantize, quantize):
            text = f"{function.__name__}: seed is {seed!r}, expected a whole number, -2**63 to 2**"
            with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
                function(x, seed=seed)


@pytest.mark.parametrize("op", [fake_quantize, lambda x, seed: quantize(x, seed=seed).codes])
def test_a_new_seed_is_not_compiled_anew(op: Any) -> None:
    """But for the second one, by which torch finds that the number changes."""
    torch.compiler.reset()
    counter, x = CompileCounterWithBackend("aot_eager"), values((5, 40), F32)
    compiled = torch.compile(lambda x, seed: op(x, seed=seed), backend=counter, fullgraph=True)
    for seed in (3, 4, -5, 2**61):
        assert torch.equal(compiled(x, seed), op(x, seed=seed))
    assert counter.frame_count == 2


@each_kind
def test_graphs_and_streams(kind: tuple[str, bool], cuda: str) -> None:
    """Replayed with other values; waits for nothing but the stream."""
    for case in (((40, 256), 64, 1), ((40, 250), 7, 3), ((2, 20_000), None, 1)):
        x = values(case[0], BF16, cuda)
        other = values(case[0], BF16, cuda, seed=9)
        want = results(other, kind, case)
        results(x, kind, case)
        torch.cuda.synchronize()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.cuda.graph(graph, stream=stream):
                found = results(x, kind, case)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        x.copy_(other)
        graph.replay()
        torch.cuda.synchronize()
        assert all(same(a, b) for a, b in zip(found, want, strict=True))
        late = torch.zeros_like(x)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            late.copy_(x)
            found = results(late, kind, case)
        torch.cuda.synchronize()
        assert all(same(a, b) for a, b in zip(found, want, strict=True))


def calls_on(x: Tensor, options: dict[str, Any], with_fake: bool) -> list[Callable[[], Any]]:
    others = {name: options[name] for name in ("format", "group_size", "group_rows")}
    made = quantize(x, **options)
    calls: list[Callable[[], Any]] = [
        lambda: quantize(x, **options),
        lambda: [dequantize(*made, **others, length=x.shape[-1], dtype=BF16)],
    ]
    return [*calls, lambda: [fake_quantize(x, **options)]] if with_fake else calls


def beside_the_results(device: str, taken: Taken) -> list[float]:
    """Return what calls take beside their results, as shares of their operand."""
    found = []
    for kind in KINDS:
        for call in calls_on(values((8, 16), BF16, device), options_of(kind, (None, 8, 1)), True):
            call()  # what is made once
        for shape, group, rows in (
            ((1024, 2048), 128, 1),
            ((1024, 2048), 128, 128),
            ((500, 4100), 100, 1),
            ((8, 200_000), None, 1),
            ((500, 4100), None, None),
        ):
            x = values(shape, BF16, device)
            # Others have scales of groups for a while on CUDA.
            with_fake = device == "cpu" or group == 128
            for call in calls_on(x, options_of(kind, (None, group, rows)), with_fake):
                result, extra = taken(call)
                extra -= sum(p.untyped_storage().nbytes() for p in result if p is not None)
                found.append(share(extra, x.nbytes))
    return found


def test_takes_no_memory(device: str) -> None:
    found = measured(beside_the_results, device)
    calls = 15 if device == "cpu" else 12  # of a kind; with_fake leaves some out
    assert len(found) == calls * len(KINDS) and max(found) <= 0.01


X = torch.ones(3, 10)
REFUSED: dict[str, Callable[[], object]] = {
    "quantize: x has shape [], expected a dimension at least": lambda: quantize(torch.ones(())),
    "quantize: x is float64, expected float32, bfloat16 or float16": lambda: quantize(X.double()),
    "quantize: format is 'int3', expected one of int8, int4, nf4, fp8_e4m3, fp8_e5m2":
        lambda: quantize(X, "int3"),
    "fake_quantize: format is 'int3', expected one of int8, int4, nf4, fp8_e4m3, fp8_e5m2":
        lambda: fake_quantize(X, "int3"),
    "quantize: symmetric is False, expected True, as only int8 and int4 have offsets":
        lambda: quantize(X, "nf4", symmetric=False),
    "fake_quantize: seed is 0, expected None, as only int8 and int4 are rounded stochastically":
        lambda: fake_quantize(X, "fp8_e4m3", seed=0),
    "quantize: group_size is 0, expected 1 to 10, the length of a row":
        lambda: quantize(X, group_size=0),
    "quantize: group_size is 11, expected 1 to 10, the length of a row":
        lambda: quantize(X, group_size=11),
    "quantize: group_rows is 0, expected at least 1": lambda: quantize(X, group_rows=0),
    "dequantize: codes is int8, expected uint8":
        lambda: dequantize(X.char(), X[:, :1], X[:, :1]),
    "dequantize: codes is int8, expected float8_e4m3fn":
        lambda: dequantize(X.char(), X[:, :1], format="fp8_e4m3"),
    "dequantize: codes has shape [3, 10], expected 9 in the last dimension for length 9":
        lambda: dequantize(X.char(), X[:, :1], length=9),
    "dequantize: codes has shape [3, 10], expected 9 in the last dimension for length 18":
        lambda: dequantize(X.byte(), X[:, :1], format="int4", length=18),
    "dequantize: length is -1, expected at least 0":
        lambda: dequantize(X.char(), X[:, :1], length=-1),
    "dequantize: scales has shape [3, 2], expected [3, 1]":
        lambda: dequantize(X.char(), X[:, :2]),
    "dequantize: scales has shape [3, 1], expected [1, 3]":
        lambda: dequantize(X.char(), X[:, :1], group_size=4, group_rows=None),
    "dequantize: offsets has shape [3], expected [3, 1]":
        lambda: dequantize(X.byte(), X[:, :1], X[:, 0]),
    "dequantize: scales is float64, expected float32":
        lambda: dequantize(X.char(), X[:, :1].double()),
    "dequantize: scales is on meta, expected cpu":
        lambda: dequantize(X.char(), torch.ones(3, 1, device="meta")),
    "dequantize: dtype is torch.float64, expected float32, bfloat16 or float16":
        lambda: dequantize(X.char(), X[:, :1], dtype=torch.float64),
    "dequantize: symmetric is False, expected True, as only int8 and int4 have offsets":
        lambda: dequantize(X.byte(), X[:, :1], X[:, :1], format="nf4"),
    "dequantize: dtype is number 3, expected a number from 0 to 2":
        lambda: OPS.dequantize.default(X.char(), X[:, :1], None, format=0, group_size=None,
                                       group_rows=1, length=10, dtype=3),
    "quantize: format is 5, expected a number from 0 to 4":
        lambda: OPS.quantize.default(X, format=5, symmetric=True, group_size=None, group_rows=1,
                                     seed=None),
    "fake_quantize_: x has strides [1, 10] for shape [10, 3], expected a contiguous tensor":
        lambda: OPS.fake_quantize_.default(X.t(), format=0, symmetric=True, group_size=None,
                                           group_rows=1, seed=None),
    "ds_quantizer: bit_num is 3, expected 8 or 4": lambda: ds_quantizer(X.clone(), 1, 3),
    "ds_quantizer: input is float64, expected float32, bfloat16 or float16":
        lambda: ds_quantizer(X.double(), 1),
    "ds_quantizer: input is int64, expected float32, bfloat16 or float16":
        lambda: ds_quantizer(X.long(), 1),
    "ds_quantizer: groups is 4, expected a number that divides the 30 elements of input":
        lambda: ds_quantizer(X.clone(), 4),
    "ds_quantizer: groups is 0, expected a number that divides the 30 elements of input":
        lambda: ds_quantizer(X.clone(), 0),
    "ds_quantizer: input has strides [1, 10] for shape [10, 3], expected a contiguous tensor":
        lambda: ds_quantizer(X.clone().t(), 1),
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_refuses(text: str) -> None:
    dequantize(*quantize(X))  # loads the library, so that it is the one that refuses
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        REFUSED[text]()


def test_freed_memory_is_refused() -> None:
    x = torch.ones(3, 10)
    scales = torch.ones(3, 1)
    for tensor in (x, scales):
        tensor.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"^quantize: x has no memory, expected 30 elements$"):
        quantize(x)
    with pytest.raises(
        ValueError, match=r"^dequantize: scales has no memory, expected 3 elements$"
    ):
        dequantize(torch.ones(3, 10).char(), scales)


def test_what_is_refused_is_not_changed(device: str) -> None:
    x = values((4, 30), F32, device)
    before, version = x.clone(), x._version
    with pytest.raises(ValueError, match=r"^ds_quantizer: groups is 7"):
        ds_quantizer(x, 7)
    assert torch.equal(x, before) and x._version == version


def test_self_check_passes_and_finds_what_is_wrong(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    self_checks.quantizer(device)
    right = self_checks.ops.dequantize
    monkeypatch.setattr(self_checks.ops, "dequantize", lambda *a, **o: right(*a, **o) * 1.01)
    with pytest.raises(RuntimeError, match=rf"^quantizer: int8 on {device} has "):
        self_checks.quantizer(device)

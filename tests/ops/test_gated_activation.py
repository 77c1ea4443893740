"""swiglu: numbers and gradients against the reference, bits, refusals, and torch's demands."""

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from rms_norm_cases import BF16, DTYPES, F16, F32, make
from row_layouts import LAYOUTS
from tolerance import assert_within
from torch import Tensor

from deepspeed_ext.ops import swiglu, swiglu_ref
from deepspeed_ext.ops.transformer import self_checks

ROUNDING = torch.finfo(F32).eps / 2


def run(function: Callable[..., Tensor], grad: Tensor, *arguments: Tensor) -> list[Tensor]:
    """Return the result and the gradients, without copies of the arguments."""
    leaves = [argument.detach().requires_grad_() for argument in arguments]
    result = function(*leaves)
    return [result.detach(), *torch.autograd.grad(result, leaves, grad.to(result.dtype))]


def assert_right(gate: Tensor, up: Tensor, grad: Tensor) -> None:
    """Compare both forms with the reference.

    sigmoid is off by 5 units in the last place at most, the results by as much and a few more;
    where terms of a gradient cancel, magnitudes count. What is below 2^-126 may be 0.
    """
    wide = [tensor.cpu().double() for tensor in (grad, gate, up)]
    want = run(swiglu_ref, *wide)
    s = torch.sigmoid(wide[1])
    tiny = 2.0**-120 * (1 + wide[1].abs()) * (1 + wide[2].abs()) * (1 + wide[0].abs())
    of_gate = (wide[0] * wide[2]).abs() * (s + (wide[1] * s).abs())
    errors = [want[0].abs(), of_gate, want[2].abs()]
    got = run(swiglu, grad, gate, up)
    for name, value, expected, error in zip(["out", "gate", "up"], got, want, errors, strict=True):
        assert value.shape == expected.shape
        assert_within(name, value.cpu(), expected, 16 * ROUNDING * error + tiny)
    if gate.dtype == up.dtype and gate.dim() > 0:
        out, packed = run(swiglu, grad, torch.cat([gate, up], -1))
        assert torch.equal(out, got[0])
        assert torch.equal(packed, torch.cat(got[1:], -1))


@pytest.mark.parametrize("n", [1, 7, 8, 16, 33, 1000, 4104])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values(dtype: torch.dtype, n: int, device: str) -> None:
    gate, up, grad = (make((19, n), dtype, seed, device) for seed in range(3))
    assert_right(gate * 4, up, grad)


@pytest.mark.parametrize("shape", [(5,), (2, 3, 4, 8), (0, 8), (3, 0), (1, 1), (2, 0, 4)])
def test_shapes(shape: tuple[int, ...], device: str) -> None:
    assert_right(*(make(shape, F32, seed, device) for seed in range(3)))


def test_many_elements(device: str) -> None:
    assert_right(*(make((70, 5000), BF16, seed, device) for seed in range(3)))


@pytest.mark.parametrize("n", [40, 41])
@pytest.mark.parametrize("up", DTYPES, ids=str)
@pytest.mark.parametrize("gate", DTYPES, ids=str)
def test_mixtures(gate: torch.dtype, up: torch.dtype, n: int, device: str) -> None:
    tensors = (make((9, n), dtype, i, device) for i, dtype in enumerate((gate, up, gate)))
    assert_right(*tensors)


def test_extremes(device: str) -> None:
    gate = torch.tensor([0.0, -0.0, 50, -50, 88, -88, -90, -104, 3e38, -3e38], device=device)
    assert_right(gate, torch.full_like(gate, 0.5), torch.ones_like(gate))
    bad = torch.tensor([float("nan"), 1.0], device=device)
    one = torch.ones(2, device=device)
    for arguments in ((bad, one), (one, bad)):
        assert [value.isnan().item() for value in swiglu(*arguments)] == [True, False]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, dtype: torch.dtype, device: str) -> None:
    """Each argument in turn: the results are those of contiguous copies, bit for bit."""
    made = [LAYOUTS[layout](make((48, 200), dtype, seed, device)) for seed in range(3)]
    dense = [tensor.contiguous() for tensor in made]
    want = run(swiglu, *dense)
    for i in range(3):
        mixed = [*dense[:i], made[i], *dense[i + 1 :]]
        for got, expected in zip(run(swiglu, *mixed), want, strict=True):
            assert torch.equal(got, expected)
    if made[0].shape[-1] % 2 == 0:
        grad = made[1][..., : made[1].shape[-1] // 2]
        for got, expected in zip(
            run(swiglu, grad, made[0]), run(swiglu, grad.contiguous(), dense[0]), strict=True
        ):
            assert torch.equal(got, expected)


def test_halves_of_one_tensor_are_no_copies(cuda: str) -> None:
    both = torch.ones(1024, 8192, device=cuda, dtype=BF16)
    gate, up = both.chunk(2, -1)
    swiglu(gate, up)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = swiglu(gate, up)
    assert torch.cuda.max_memory_allocated() - before == out.numel() * 2


def digest(device: str = "cpu") -> str:
    """Return a digest of the bits of results and gradients."""
    found = hashlib.sha256()
    for dtype in DTYPES:
        for n in (1, 9, 64, 5001):
            tensors = [make((41, n), dtype, seed, device) for seed in range(3)]
            for tensor in run(swiglu, *tensors):
                found.update(tensor.cpu().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


expected = cache(digest)  # the bits of the widest ISA


@pytest.mark.parametrize("isa", ["scalar", "avx2", "avx512"], indirect=True)
def test_every_isa(isa: str) -> None:
    environment = os.environ | {"DSX_FORCE_ISA": isa}
    command = [sys.executable, str(Path(__file__))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == expected(), done.stderr


def test_any_thread_count() -> None:
    before, found = torch.get_num_threads(), set()
    try:
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            found.add(digest())
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1


def test_every_run_on_cuda(cuda: str) -> None:
    assert len({digest(cuda) for _ in range(3)}) == 1


REFUSED: dict[str, tuple[Tensor, ...]] = {
    "gate has shape [], expected a dimension at least": (torch.ones(()), torch.ones(())),
    "up has shape [4], expected [2, 4]": (torch.ones(2, 4), torch.ones(4)),
    "up is float64, expected float32, bfloat16 or float16": (
        torch.ones(2, 4),
        torch.ones(2, 4).double(),
    ),
    "gate_up has shape [2, 5], expected a last dimension of even length": (torch.ones(2, 5),),
    "up is on meta, expected cpu": (torch.ones(2, 4), torch.ones(2, 4, device="meta")),
}


@pytest.mark.parametrize("text", REFUSED)
def test_refuses(text: str) -> None:
    swiglu(torch.ones(4), torch.ones(4))  # loads the library, so that it is the one that refuses
    with pytest.raises(ValueError, match=f"^swiglu: {re.escape(text)}$"):
        swiglu(*REFUSED[text])


@pytest.mark.parametrize("shape", [(3, 40), (2, 0, 8)])
@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, F16)], ids=str)
def test_opcheck(dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...], device: str) -> None:
    ops = torch.ops.deepspeed_ext
    gate, up = (make(shape, dtype, 0, device) for dtype in dtypes)
    half = gate[..., : shape[-1] // 2]
    for needs_grad in (False, True):
        leaves = [tensor.clone().requires_grad_(needs_grad) for tensor in (gate, up)]
        for op, arguments in (
            (ops.swiglu.default, leaves),
            (ops.swiglu.packed, leaves[:1]),
            (ops.swiglu_backward.default, [gate, *leaves]),
            (ops.swiglu_backward.packed, [half, leaves[0]]),
        ):
            refused = needs_grad and "backward" in op.name()
            if not refused:  # a gradient of a gradient
                checked = torch.library.opcheck(op, tuple(arguments))
                assert set(checked.values()) == {"SUCCESS"}


def test_can_be_compiled(device: str) -> None:
    def block(x: Tensor) -> Tensor:
        gate, up = (x * 2).chunk(2, -1)
        return swiglu(gate, up) + swiglu(x * 3)

    torch.compiler.reset()
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (40, 98):
        x = make((5, n), F32, 0, device).requires_grad_()
        for got, want in zip(
            *((r, *torch.autograd.grad(r.sum(), x)) for r in (compiled(x), block(x))), strict=True
        ):
            assert torch.equal(got, want)


def test_reference_has_the_right_gradient() -> None:
    gate, up = (make((3, 6), F32, i).double().requires_grad_() for i in range(2))
    assert torch.autograd.gradcheck(swiglu_ref, (gate, up))
    assert torch.autograd.gradcheck(swiglu_ref, (gate,))


def test_self_check(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    self_checks.swiglu(device)
    monkeypatch.setattr(self_checks.ops, "swiglu", lambda *t: swiglu(*t) * 1.01)
    with pytest.raises(RuntimeError, match=r"^swiglu: 0 of results and gradients on "):
        self_checks.swiglu(device)


if __name__ == "__main__":
    print(digest())

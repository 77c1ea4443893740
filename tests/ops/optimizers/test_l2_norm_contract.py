"""squared_norms: the same bits everywhere, what it refuses, and what it promises to torch."""

import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import warm_python
from l2_norm_cases import CHUNK, DTYPES, digest, make
from torch import Tensor

from deepspeed_ext.ops import l2_norm, squared_norms
from deepspeed_ext.ops.optimizers import self_checks

expected = cache(digest)  # the bits of the widest ISA


def test_every_isa(isa: str) -> None:
    environment = os.environ | {"DSX_FORCE_ISA": isa}
    done = warm_python.run(Path(__file__).with_name("l2_norm_cases.py"), env=environment)
    assert done.stdout.strip() == expected(), done.stderr


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_thread_count(dtype: torch.dtype) -> None:
    tensors = [*make(dtype), torch.randn(5 * CHUNK + 3).to(dtype)]
    before, found = torch.get_num_threads(), []
    try:
        for count in (1, 3, 7):
            torch.set_num_threads(count)
            found.append((squared_norms(tensors), *l2_norm(tensors)))
    finally:
        torch.set_num_threads(before)
    for values in found[1:]:
        assert all(map(torch.equal, values, found[0]))


def test_together_as_alone(device: str) -> None:
    tensors = [tensor for dtype in DTYPES for tensor in make(dtype, device=device)]
    alone = torch.cat([squared_norms([tensor]) for tensor in tensors])
    assert torch.equal(squared_norms(tensors), alone)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_run_on_cuda(dtype: torch.dtype, cuda: str) -> None:
    tensors = [*make(dtype, device=cuda), torch.randn(1 << 24, device=cuda).to(dtype)]
    first = squared_norms(tensors)
    for _ in range(20):
        assert torch.equal(squared_norms(tensors), first)


def test_cuda_graph_reads_new_values(cuda: str) -> None:
    tensors = [torch.ones(n, device=cuda) for n in [1, 5000, 100_000] * 500]
    l2_norm(tensors)  # loads the library
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = l2_norm(tensors)
    for value in (2.0, 3.0, float("inf")):
        torch._foreach_mul_(tensors, value)
        graph.replay()
        for got, want in zip(result, l2_norm(tensors), strict=True):
            assert torch.equal(got, want)
    assert result.found_inf.item() == 1


def test_cuda_uses_the_current_stream(cuda: str) -> None:
    tensor = torch.ones(1 << 22, device=cuda)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        squares = squared_norms([tensor.mul_(2)])
    torch.cuda.current_stream().wait_stream(stream)
    assert squares.item() == 4 * (1 << 22)


def test_nothing_waits_for_cuda(cuda: str) -> None:
    tensors = [torch.ones(n, device=cuda) for n in (10, 100_000)]
    l2_norm(tensors)  # loads the library
    torch.cuda.set_sync_debug_mode("error")
    try:
        l2_norm(tensors)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def freed(tensor: Tensor) -> Tensor:
    """The tensor with its storage let go, as sharding wrappers do between forward passes."""
    tensor.untyped_storage().resize_(0)
    return tensor


REFUSED: dict[str, Callable[[], Tensor]] = {
    "is float64, expected float32, bfloat16 or float16": lambda: torch.ones(4).double(),
    "is int64, expected float32, bfloat16 or float16": lambda: torch.ones(4).long(),
    "is complex64, expected float32, bfloat16 or float16":
        lambda: torch.ones(4, dtype=torch.complex64),
    "is on meta, expected cpu": lambda: torch.ones(4, device="meta"),
    "is torch.sparse_coo, expected torch.strided": lambda: torch.ones(4).to_sparse(),
    "has no memory, expected 4 elements": lambda: freed(torch.ones(4)),
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_refuses(text: str) -> None:
    tensors = [torch.ones(4), REFUSED[text]()]
    with pytest.raises(ValueError, match=rf"^squared_norms: tensors\[1\] {re.escape(text)}$"):
        squared_norms(tensors)


def test_refuses_a_tensor_on_another_device(cuda: str) -> None:
    for first, second in (("cpu", "cuda:0"), ("cuda:0", "cpu")):
        tensors = [torch.ones(4, device=first), torch.ones(4, device=second)]
        text = f"squared_norms: tensors[1] is on {second}, expected {first}"
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            squared_norms(tensors)


def test_opcheck(device: str) -> None:
    op = torch.ops.deepspeed_ext.squared_norms.default
    tensors = [torch.ones(n, device=device, dtype=dtype) for n in (0, 17) for dtype in DTYPES]
    checked = torch.library.opcheck(op, (tensors,))
    assert list(checked.values()) == ["SUCCESS"] * 4


def test_can_be_compiled(device: str) -> None:
    def norm_of_scaled(tensors: list[Tensor]) -> tuple[Tensor, ...]:
        return tuple(l2_norm([tensor * 2 for tensor in tensors]))

    compiled = torch.compile(norm_of_scaled, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (17, 40_000):
        tensors = [torch.randn(n, 3, device=device), torch.randn(n, device=device).bfloat16()]
        for got, want in zip(compiled(tensors), norm_of_scaled(tensors), strict=True):
            assert torch.equal(got, want)


def test_an_imaginary_part_of_a_conjugate() -> None:
    negated = torch.view_as_complex(torch.ones(4, 2)).conj().imag
    assert negated.is_neg() and squared_norms([negated]).item() == 4


def test_all_on_meta_or_fake_is_legal() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    on_meta = squared_norms([torch.ones(4, device="meta")] * 2)
    assert on_meta.is_meta and on_meta.shape == (2,) and on_meta.dtype == torch.float64
    with FakeTensorMode():
        assert squared_norms([torch.ones(4)]).shape == (1,)


def test_self_check_passes(device: str) -> None:
    self_checks.sums_of_squares(device)


def test_self_check_finds_a_wrong_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        self_checks, "squared_norms", lambda tensors: squared_norms(tensors) * 1.001
    )
    with pytest.raises(RuntimeError, match=r"^squared_norms: result on cpu has .*, expected "):
        self_checks.sums_of_squares("cpu")


def test_a_gradient_is_refused_where_one_is_recorded(device: str) -> None:
    tensors = [torch.ones(3, device=device, requires_grad=True), torch.ones(2, device=device)]
    with torch.no_grad():
        want = squared_norms(tensors)
    got = squared_norms(tensors)
    assert torch.equal(got, want) and not want.requires_grad
    with pytest.raises(RuntimeError, match=r"^squared_norms: the gradient of tensors\[0\] is"):
        got.sum().backward()

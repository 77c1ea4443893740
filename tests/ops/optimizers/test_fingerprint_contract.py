"""fingerprints: the same bits everywhere, what it refuses, and what it promises to torch."""

import json
import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import warm_python
from fingerprint_cases import CHUNK, make, values
from torch import Tensor

from deepspeed_ext.ops import fingerprints
from deepspeed_ext.ops.optimizers import self_checks

expected = cache(values)  # of the widest ISA


def test_every_isa(isa: str) -> None:
    environment = os.environ | {"DSX_FORCE_ISA": isa}
    done = warm_python.run(Path(__file__).with_name("fingerprint_cases.py"), env=environment)
    assert json.loads(done.stdout or "null") == expected(), done.stderr


def test_any_thread_count() -> None:
    tensors = [*make(), torch.randint(256, (40 * CHUNK + 3,), dtype=torch.uint8)]
    before, found = torch.get_num_threads(), []
    try:
        for count in (1, 3, 7):
            torch.set_num_threads(count)
            found.append(fingerprints(tensors).tolist())
    finally:
        torch.set_num_threads(before)
    assert found[1:] == found[:1] * 2


def test_together_as_alone(device: str) -> None:
    tensors = make(device)
    alone = torch.cat([fingerprints([tensor]) for tensor in tensors])
    assert torch.equal(fingerprints(tensors), alone)
    assert torch.equal(fingerprints(tensors[::-1]), alone.flip(0))


def test_cuda_as_the_cpu_and_in_every_run(cuda: str) -> None:
    large = torch.randint(256, (1 << 26,), dtype=torch.uint8)
    want = fingerprints([large, *make()]).tolist()
    tensors = [large.to(cuda), *make(cuda)]
    for _ in range(20):
        assert fingerprints(tensors).tolist() == want


def test_cuda_graph_reads_new_values(cuda: str) -> None:
    tensors = [torch.ones(n, device=cuda) for n in [1, 5000, 100_000] * 500]
    fingerprints(tensors)  # loads the library
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = fingerprints(tensors)
    for value in (2.0, 3.0, float("inf")):
        torch._foreach_mul_(tensors, value)
        for _ in range(2):  # nothing of the last replay is left
            graph.replay()
            assert torch.equal(result, fingerprints(tensors))


def test_cuda_uses_the_current_stream(cuda: str) -> None:
    tensor = torch.ones(1 << 22, device=cuda)
    want = fingerprints([torch.full((1 << 22,), 2.0)])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        got = fingerprints([tensor.mul_(2)])
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(got.cpu(), want)


def test_nothing_waits_for_cuda(cuda: str) -> None:
    tensors = [torch.ones(n, device=cuda) for n in (10, 100_000)]
    fingerprints(tensors)  # loads the library
    torch.cuda.set_sync_debug_mode("error")
    try:
        fingerprints(tensors)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def freed(tensor: Tensor) -> Tensor:
    """The tensor with its storage let go, as sharding wrappers do between forward passes."""
    tensor.untyped_storage().resize_(0)
    return tensor


REFUSED: dict[str, Callable[[], Tensor]] = {
    "is complex128, expected at most 8 bytes an element":
        lambda: torch.ones(4, dtype=torch.complex128),
    "is on meta, expected cpu": lambda: torch.ones(4, device="meta"),
    "is torch.sparse_coo, expected torch.strided": lambda: torch.ones(4).to_sparse(),
    "has no memory, expected 4 elements": lambda: freed(torch.ones(4)),
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_refuses(text: str) -> None:
    tensors = [torch.ones(4), REFUSED[text]()]
    with pytest.raises(ValueError, match=rf"^fingerprints: tensors\[1\] {re.escape(text)}$"):
        fingerprints(tensors)


def test_refuses_a_tensor_on_another_device(cuda: str) -> None:
    for first, second in (("cpu", "cuda:0"), ("cuda:0", "cpu")):
        tensors = [torch.ones(4, device=first), torch.ones(4, device=second)]
        text = f"fingerprints: tensors[1] is on {second}, expected {first}"
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            fingerprints(tensors)


def test_opcheck(device: str) -> None:
    op = torch.ops.deepspeed_ext.fingerprints.default
    dtypes = (torch.float32, torch.bfloat16, torch.int8)
    tensors = [torch.ones(n, device=device, dtype=dtype) for n in (0, 17) for dtype in dtypes]
    checked = torch.library.opcheck(op, (tensors,))
    assert list(checked.values()) == ["SUCCESS"] * 4


def test_can_be_compiled(device: str) -> None:
    def of_scaled(tensors: list[Tensor]) -> Tensor:
        return fingerprints([tensor * 2 for tensor in tensors])

    compiled = torch.compile(of_scaled, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (17, 40_000):
        tensors = [torch.randn(n, 3, device=device), torch.randn(n, device=device).bfloat16()]
        assert torch.equal(compiled(tensors), of_scaled(tensors))


def test_all_on_meta_or_fake_is_legal() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    on_meta = fingerprints([torch.ones(4, device="meta")] * 2)
    assert on_meta.is_meta and on_meta.shape == (2,) and on_meta.dtype == torch.int64
    with FakeTensorMode():
        assert fingerprints([torch.ones(4)]).shape == (1,)


def test_self_check_passes(device: str) -> None:
    self_checks.l2_norm(device)


def test_self_check_finds_a_wrong_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_checks, "fingerprints", lambda tensors: fingerprints(tensors) + 1)
    text = r"^fingerprints: result\[0\] on cpu is -?\d+, expected -?\d+$"
    with pytest.raises(RuntimeError, match=text):
        self_checks.l2_norm("cpu")


def test_a_gradient_is_refused_where_one_is_recorded(device: str) -> None:
    """There is none to ask for: integers have none."""
    tensors = [torch.ones(3, device=device, requires_grad=True), torch.ones(2, device=device)]
    with torch.no_grad():
        want = fingerprints(tensors)
    assert torch.equal(fingerprints(tensors), want) and not want.requires_grad

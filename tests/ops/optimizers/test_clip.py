"""clip_grad_norm_: as torch's, on several devices, and over the processes of DTensors."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import warm_python
from l2_norm_cases import DTYPES
from torch import Tensor

from deepspeed_ext.ops import clip_grad_norm_, total_squared_norm

EPS = {dtype: torch.finfo(dtype).eps for dtype in DTYPES}


def make(dtype: torch.dtype, device: str = "cpu", scale: float = 1.0) -> list[Tensor]:
    """Parameters of every kind of shape and layout, with gradients but for the second."""
    generator = torch.Generator().manual_seed(0)
    params = []
    for i, shape in enumerate([(300, 70), (5,), (), (0,), (6, 5, 4), (17,)]):
        grad = (torch.randn(shape, generator=generator) * scale).to(device, dtype)
        param = torch.zeros_like(grad).requires_grad_()
        param.grad = None if i == 1 else grad
        params.append(param)
    params[4] = params[4].detach().transpose(0, 2).requires_grad_()
    params[4].grad = torch.ones_like(params[4]) * 2
    return params


def grads_of(params: list[Tensor]) -> list[Tensor]:
    return [param.grad for param in params if param.grad is not None]


@pytest.mark.parametrize("max_norm", [0.0, 0.5, 140.0, 1e4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_as_torch_in_float64(dtype: torch.dtype, max_norm: float, device: str) -> None:
    params = make(dtype, device)
    wide = [param.detach().double().cpu().requires_grad_() for param in params]
    for param, twin in zip(params, wide, strict=True):
        twin.grad = None if param.grad is None else param.grad.double().cpu()
    norm = clip_grad_norm_(params, max_norm)
    want = torch.nn.utils.clip_grad_norm_(wide, max_norm)
    assert norm.dtype == torch.float32 and norm.shape == () and norm.device == params[0].device
    torch.testing.assert_close(norm.cpu().double(), want, rtol=4 * EPS[torch.float32], atol=0)
    for got, expected in zip(grads_of(params), grads_of(wide), strict=True):
        factor = EPS[dtype] / 2 if device == "cuda" else 0  # torch rounds it there
        bound = factor + EPS[dtype] / 2 + 4 * EPS[torch.float32]
        smallest = torch.finfo(dtype).smallest_normal
        torch.testing.assert_close(
            got.cpu().double(), expected, rtol=bound, atol=EPS[dtype] * smallest
        )


def test_leaves_small_gradients_as_they_are(device: str) -> None:
    params = make(torch.bfloat16, device)
    before = [grad.clone() for grad in grads_of(params)]
    clip_grad_norm_(params, 1e6)
    assert all(map(torch.equal, grads_of(params), before))


def test_one_tensor_a_generator_and_nothing() -> None:
    for given in (lambda p: p, lambda p: (x for x in [p]), lambda p: {"w": p}.values()):
        param = torch.zeros(4, requires_grad=True)
        param.grad = torch.full((4,), 3.0)
        assert clip_grad_norm_(given(param), 3.0).item() == 6
        assert param.grad is not None
        torch.testing.assert_close(param.grad, torch.full((4,), 1.5))
    assert clip_grad_norm_([], 1.0).item() == 0
    assert clip_grad_norm_(torch.zeros(4, requires_grad=True), 1.0).item() == 0


def test_gradients_whose_squares_overflow_or_vanish(device: str) -> None:
    for scale in (1e36, 1e-25):
        params = make(torch.bfloat16, device, scale)[:3]
        norm = clip_grad_norm_(params, scale)
        total = sum(grad.double().square().sum() for grad in grads_of(params))
        assert norm.isfinite() and norm > 100 * scale
        assert total.sqrt().item() <= 1.01 * scale
        if scale > 1:
            assert total.sqrt().item() >= 0.99 * scale


RATIOS = [0.5, 0.999, 1 - 1e-6, 1 - 2**-53, 1.0, 1 + 2**-52, 1 + 1e-6, 1.0005, 1.001, 1.01, 2.0]


@pytest.mark.parametrize("ratio", RATIOS)
def test_norms_around_max_norm(ratio: float, device: str) -> None:
    """Every gradient is clipped whose norm is above max_norm, be it only by a little."""
    whole = torch.tensor([3.0, -4.0], dtype=torch.float64)
    param, exact = with_grad(whole.float().to(device)), with_grad(whole.clone())
    assert clip_grad_norm_(param, 5 / ratio).item() == 5
    torch.nn.utils.clip_grad_norm_(exact, 5 / ratio)
    [got], [want] = grads_of([param]), grads_of([exact])
    torch.testing.assert_close(got.cpu().double(), want, rtol=EPS[torch.float32], atol=0)
    assert torch.equal(got.cpu().double(), whole) == (5 / ratio >= 5 + 1e-6)


@pytest.mark.parametrize("max_norm", [0.0, 1.0, 1e30, float("inf")])
def test_the_norm_is_finite_where_gradients_are(max_norm: float, device: str) -> None:
    """Also a norm beyond float32: whoever skips steps for inf must not skip this one."""
    param = with_grad(torch.full((4,), 3e38, device=device))
    norm = clip_grad_norm_(param, max_norm, error_if_nonfinite=True)
    assert norm.item() == torch.finfo(torch.float32).max
    want = torch.full((4,), min(3e38, max_norm / 2))
    torch.testing.assert_close(grads_of([param])[0].cpu(), want, rtol=1e-5, atol=0)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")], ids=str)
def test_not_finite(bad: float, device: str) -> None:
    params, theirs = make(torch.float32, device), make(torch.float32, device)
    for made in (params, theirs):
        grads_of(made)[0][3, 5] = bad
    before = [grad.clone() for grad in grads_of(params)]
    text = f"clip_grad_norm_: the norm of the gradients is {bad}, expected a finite number"
    with pytest.raises(RuntimeError, match=f"^{re.escape(text)}; to clip anyway, leave out"):
        clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
    for grad, value in zip(grads_of(params), before, strict=True):
        torch.testing.assert_close(grad, value, rtol=0, atol=0, equal_nan=True)
    clip_grad_norm_(params, 1.0)
    torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    for got, want in zip(grads_of(params), grads_of(theirs), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_counts_its_writes(device: str) -> None:
    params = make(torch.float32, device)
    versions = [grad._version for grad in grads_of(params)]
    clip_grad_norm_(params, 1.0)
    assert all(g._version > v for g, v in zip(grads_of(params), versions, strict=True))


def test_several_devices_and_dtypes(cuda: str) -> None:
    params = [*make(torch.float32), *make(torch.bfloat16, cuda), *make(torch.float16)]
    want = sum(grad.double().cpu().square().sum() for grad in grads_of(params))
    total = total_squared_norm(grads_of(params))
    assert total.is_cpu
    torch.testing.assert_close(total, want, rtol=4 * EPS[torch.float32], atol=0)
    assert clip_grad_norm_(params[::-1], 2.0).is_cpu
    assert abs(total_squared_norm(grads_of(params)).sqrt().item() - 2) < 0.01


def test_nothing_waits_for_cuda(cuda: str) -> None:
    params = make(torch.bfloat16, cuda)
    clip_grad_norm_(params, 1.0)  # loads the library
    torch.cuda.set_sync_debug_mode("error")
    try:
        clip_grad_norm_(params, 0.5)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def with_grad(grad: Tensor) -> Tensor:
    param = torch.zeros_like(grad).requires_grad_()
    param.grad = grad
    return param


REFUSED: dict[str, Callable[[], object]] = {
    "clip_grad_norm_: max_norm is -1, expected at least 0":
        lambda: clip_grad_norm_([torch.ones(1)], -1),
    "clip_grad_norm_: max_norm is nan, expected at least 0":
        lambda: clip_grad_norm_([torch.ones(1)], float("nan")),
    "clip_grad_norm_: max_norm is '1', expected a number":
        lambda: clip_grad_norm_([torch.ones(1)], "1"),
    "clip_grad_norm_: max_norm is True, expected a number":
        lambda: clip_grad_norm_([torch.ones(1)], True),
    "clip_grad_norm_: max_norm is tensor(1.), expected a number":
        lambda: clip_grad_norm_([torch.ones(1)], torch.tensor(1.0)),
    "clip_grad_norm_: gradient of parameters[1] is float64, expected float32, bfloat16 or float16":
        lambda: clip_grad_norm_([with_grad(torch.ones(2)), with_grad(torch.ones(2).double())], 1),
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_refuses(text: str) -> None:
    kind = TypeError if "a number" in text else ValueError
    with pytest.raises(kind, match=f"^{re.escape(text)}$"):
        REFUSED[text]()


ROWS_ON_CPU = """
import sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from deepspeed_ext.dtensors import sum_over_shards
store = f"file://{sys.argv[2]}"
dist.init_process_group(sys.argv[1] or None, init_method=store, rank=0, world_size=1)
mesh = init_device_mesh("cuda", (1,))
rows = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
sums = sum_over_shards(rows, [distribute_tensor(torch.ones(4, device="cuda"), mesh, [Shard(0)])])
assert sums.is_cpu and torch.equal(sums, rows)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("backend", ["", "nccl", "gloo"])
def test_rows_on_the_cpu_of_a_mesh_on_cuda(backend: str, cuda: str, tmp_path: Path) -> None:
    """As with offloaded parameters; not every group can reduce on the CPU."""
    run = warm_python.run("-c", ROWS_ON_CPU, backend, tmp_path / "store")
    assert run.returncode == 0, run.stderr


@pytest.mark.long
@pytest.mark.long
def test_dtensors(tmp_path: Path) -> None:
    """Four real processes over gloo, in a row and in a grid; clip_worker.py is what they do."""
    processes = 4
    worker = str(Path(__file__).with_name("clip_worker.py"))
    running = [
        subprocess.Popen(
            [sys.executable, worker, str(rank), str(processes), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(processes)
    ]
    for process in running:
        output = process.communicate(timeout=120)[0]
        assert process.returncode == 0, output
        assert "all as expected" in output


@pytest.mark.parametrize("device", ["cpu"])
def test_errors_name_the_parameter(device: str) -> None:
    """Of those that have a gradient, the op sees some, and counts them from 0."""
    params = make(torch.float32, device)
    grad = params[3 - 1].grad = torch.ones(())
    grad.untyped_storage().resize_(0)
    text = r"^clip_grad_norm_: gradient of parameters\[2\] has no memory, expected 1 elements$"
    with pytest.raises(ValueError, match=text):
        clip_grad_norm_(iter(params), 1.0)
    with pytest.raises(ValueError, match=r"^squared_norms: tensors\[1\] has no memory"):
        total_squared_norm([torch.ones(2), grad])

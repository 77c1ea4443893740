"""Memory that saved tensors take on both sides, streams of CUDA, disks, arguments, copies."""

import copy
import pickle

import pytest
import torch
from late_lanes import be_late
from optim_cases import needs_cuda, on_each_device
from saved_cases import WIDTH, each_device as each_device, inputs, none_fails as none_fails
from torch import nn

from deepspeed_ext import offload


@needs_cuda
def test_streams(monkeypatch):
    """Forward on one stream; the same graph through backward of two."""
    be_late(monkeypatch, "cuda")
    x, saved = inputs("cuda", 1 << 20).requires_grad_(), offload.saved_tensors()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), saved:
        y = x.exp().sin().exp().sin().exp().sin().sum()
    torch.cuda.current_stream().wait_stream(side)
    (plain,) = torch.autograd.grad(x.exp().sin().exp().sin().exp().sin().sum(), x)
    for _ in range(5):
        (found,) = torch.autograd.grad(y, x, retain_graph=True)
        noise = [torch.full_like(x, float("nan")) for _ in range(4)]
        assert torch.equal(found, plain)
        del noise
    torch.cuda.synchronize()


@needs_cuda
def test_the_peak_of_a_device():
    """Of 40 storages three are there in forward, and what comes back ahead in backward."""
    x, saved = inputs("cuda", 4 << 20).requires_grad_(), offload.saved_tensors()
    for _ in range(2):
        x.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with saved:
            y = x * 1
            for _ in range(40):
                y = y.sin()
        y.sum().backward()
        del y
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - before <= 8 * x.nbytes
        assert torch.cuda.memory_allocated() - before <= 2 * x.nbytes  # the gradient


@needs_cuda
def test_a_capture_is_refused():
    x, saved = inputs("cuda").requires_grad_(), offload.saved_tensors(min_bytes=0)
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match="capturing a CUDA graph"),
        torch.cuda.graph(graph),
        saved,
    ):
        (x * 1).exp()


@on_each_device
def test_little_comes_back_ahead(device, monkeypatch):
    """Twice the largest storage, and with a budget as much as backward has let go of."""
    failures, lanes = be_late(monkeypatch, device, in_vain=0)
    x = inputs(device, 64, WIDTH).requires_grad_()
    for budget in (None, 40 * x.nbytes):
        saved = offload.saved_tensors(min_bytes=0, budget=budget)
        with saved:
            y = x * 1
            for _ in range(60):
                y = y.sin()
                if device == "cuda":
                    torch.cuda.synchronize()  # what is on its way out need not come back
        y.sum().backward()
        stats = saved.stats()
        assert stats["on_demand"] <= 1 and stats["ahead"] >= 39
    if device == "cpu":
        assert lanes[0].most_back <= 4 * x.nbytes  # one more is in use, and one is its gradient's
        assert lanes[1].most_back <= 22 * x.nbytes
    assert failures == []


def test_sizes_that_change_leave_no_memory_behind(failures, device):
    saved = offload.saved_tensors(min_bytes=0)
    for rows in range(1, 40):
        x = inputs(device, 4096 * (rows * 7 % 40 + 1)).requires_grad_()
        with saved:
            y = x.exp()
        y.sum().backward()
        del y
    (lane,) = saved._packing._place._lanes.values()
    stats = lane._pool.stats()
    assert stats["pinned_bytes"] <= 1.25 * saved.stats()["peak"] + 4096


def test_arguments(tmp_path):
    text = "saved_tensors: device is 'cuda', expected one of cpu, nvme"
    with pytest.raises(ValueError, match=text):
        offload.saved_tensors("cuda")
    with pytest.raises(ValueError, match="nvme_path is None, expected a folder on the disk"):
        offload.saved_tensors("nvme")
    with pytest.raises(ValueError, match="nvme_path is '/x', expected None with 'cpu'"):
        offload.saved_tensors("cpu", nvme_path="/x")
    for budget in ("much", 1.5, True, float("nan"), [1]):
        with pytest.raises(ValueError, match=r"^saved_tensors: budget is .*, expected bytes, as 2"):
            offload.saved_tensors(budget=budget)
    with pytest.raises(ValueError, match=r"^saved_tensors: min_bytes is 0.5, expected bytes"):
        offload.saved_tensors(min_bytes=0.5)
    assert offload.saved_tensors(budget=2e6) and offload.saved_tensors(budget="0.1KiB")
    with pytest.raises(ValueError, match="min_bytes is -1, expected bytes"):
        offload.saved_tensors(min_bytes=-1)
    text = r"saved_tensors: nvme_path is .*nowhere, expected a folder to write in: No such file"
    with pytest.raises(FileNotFoundError, match=text):
        offload.saved_tensors("nvme", nvme_path=tmp_path / "nowhere")
    for path, told in (("", "''"), ("/a\0b", r"'/a\\x00b'")):
        with pytest.raises(
            ValueError, match=rf"^saved_tensors: nvme_path is {told}, expected a fol"
        ):
            offload.saved_tensors("nvme", nvme_path=path)
    with pytest.raises(TypeError, match=r"^saved_tensors: nvme_path is int, expected a folder's"):
        offload.saved_tensors("nvme", nvme_path=5)
    with pytest.raises(OSError, match=r"needs .* bytes"):
        offload.saved_tensors("nvme", nvme_path=tmp_path, budget=1 << 60)


def test_a_disk_that_fails(tmp_path, monkeypatch):
    saved = offload.saved_tensors("nvme", nvme_path=tmp_path, min_bytes=0)
    store = saved._packing._place.store
    x = inputs("cpu").requires_grad_()

    def full(*_):
        raise OSError(28, "no space")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"), saved:
        patch.setattr(store, "put_async", full)
        (x * 1).exp()
    with saved:
        y = (x * 1).exp().sin().sin().sin()
    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
        patch.setattr(store, "get_async", full)
        y.sum().backward()
    y.sum().backward()
    assert saved.stats()["bytes"] == 0 and len(store) <= 4


def test_copies_are_new_ones():
    saved = offload.saved_tensors(budget=100, min_bytes=0)
    for made in (copy.deepcopy(saved), pickle.loads(pickle.dumps(saved))):
        assert made is not saved and made.stats()["bytes"] == 0
        x = torch.randn(50, requires_grad=True)
        with made:
            assert made.stats()["stayed"] == 0
            x.exp().sum().backward()
        assert made.stats()["stayed"] == 200


@pytest.mark.long
@pytest.mark.parametrize("inside", [False, True])
def test_compiled_functions(inside):
    saved, layer, x = offload.saved_tensors(min_bytes=0), nn.Linear(8, 8), torch.randn(4, 8)

    def call(x):
        return layer(x).exp().sum()

    def call_inside(x):
        with saved:
            return call(x)

    call(x).backward()
    plain, layer.weight.grad = layer.weight.grad, None
    compiled = torch.compile(call_inside if inside else call, backend="aot_eager")
    with saved:
        y = compiled(x)
    assert saved.stats()["bytes"] > 0
    y.backward()
    assert torch.equal(layer.weight.grad, plain) and saved.stats()["bytes"] == 0

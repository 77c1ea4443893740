"""cross_entropy: what it refuses, what it promises torch, memory and CUDA graphs."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from allocated import on_cuda
from row_layouts import LAYOUTS
from samples import BF16, F16, F32, make
from test_cross_entropy import OPTIONS, of_both, targets
from torch import Tensor

from deepspeed_ext.ops import cross_entropy, cross_entropy_ref

REFUSED: dict[str, Callable[[], dict[str, Any]]] = {
    "logits has shape [], expected a dimension at least":
        lambda: dict(logits=torch.ones(()), target=torch.tensor(0)),
    "logits has shape [2, 0], expected one class at least": lambda: dict(logits=torch.ones(2, 0)),
    "logits is float64, expected float32, bfloat16 or float16":
        lambda: dict(logits=torch.ones(2, 4).double()),
    "target is int32, expected int64": lambda: dict(target=torch.ones(2).int()),
    "target has shape [3], expected [2]": lambda: dict(target=torch.ones(3).long()),
    "target has shape [2, 1], expected [2]": lambda: dict(target=torch.ones(2, 1).long()),
    "target is on meta, expected cpu":
        lambda: dict(target=torch.ones(2, device="meta", dtype=torch.int64)),
    "target has 4 as its element number 1, expected 0 to 3, or -100 for a row that is ignored":
        lambda: dict(target=torch.tensor([0, 4])),
    "target has -1 as its element number 0, expected 0 to 3, or 7 for a row that is ignored":
        lambda: dict(target=torch.tensor([-1, 7]), ignore_index=7),
    "reduction is 'no', expected 'mean', 'sum' or 'none'": lambda: dict(reduction="no"),
    "label_smoothing is 1.5, expected a number from 0 to 1": lambda: dict(label_smoothing=1.5),
    "label_smoothing is nan, expected a number from 0 to 1":
        lambda: dict(label_smoothing=float("nan")),
    "z_loss is -1, expected 0 or more": lambda: dict(z_loss=-1.0),
    "z_loss is 1e+39, expected a finite float32": lambda: dict(z_loss=1e39),
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_refuses(text: str) -> None:
    arguments = dict(logits=torch.ones(2, 4), target=torch.tensor([0, 1]))
    cross_entropy(**arguments)  # loads the library, so that it is the one that refuses
    with pytest.raises(ValueError, match=f"^cross_entropy: {re.escape(text)}$"):
        cross_entropy(**(arguments | REFUSED[text]()))


def test_hooks_may_save_other_strides(device: str) -> None:
    leaf, target = make((5, 40), F32, 0, device).requires_grad_(), targets(5, 40, device)
    (want,) = torch.autograd.grad(cross_entropy(leaf, target), leaf)

    def turned(tensor: Tensor) -> Tensor:
        return tensor.t().contiguous().t() if tensor.dim() == 2 else tensor

    with torch.autograd.graph.saved_tensors_hooks(turned, lambda tensor: tensor):
        loss = cross_entropy(leaf, target)
    assert torch.equal(*torch.autograd.grad(loss, leaf), want)


@pytest.mark.parametrize("name", ["by columns", "one row for all", "every other element"])
def test_inplace_refuses_what_it_cannot_write_to(name: str) -> None:
    logits = LAYOUTS[name](make((48, 200), F32, 0))
    text = r"^cross_entropy_?: logits has strides .*, expected rows in one piece each, at equal "
    with pytest.raises(ValueError, match=text):
        cross_entropy(logits, targets(logits.shape[0], logits.shape[1], "cpu"), inplace=True)


@pytest.mark.parametrize("place", [0, 3, 79])
def test_inplace_refuses_a_target_within_the_logits(place: int) -> None:
    """Wherever it lies there; what lies between rows is another's memory."""
    room = torch.zeros(4, 160)
    within = room.view(-1).view(torch.int64).view(4, 80)[:, place]
    with pytest.raises(ValueError, match=r"^cross_entropy: target is overlapping logits, expected"):
        cross_entropy(room, within, inplace=True)
    assert (room == 0).all()
    room[:, :150] = make((4, 150), F32, 0)
    beside = room.view(-1).view(torch.int64).view(4, 80)[:, 78]
    want = cross_entropy(room[:, :150], torch.zeros(4).long())
    assert torch.equal(cross_entropy(room[:, :150], beside, inplace=True), want)


@pytest.mark.parametrize(("shape", "dtype"), [((2, 3, 8), F32), ((41,), F16)], ids=str)
def test_opcheck(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    ops = torch.ops.deepspeed_ext
    options: dict[str, Any] = dict(ignore_index=-100, label_smoothing=0.1, z_loss=1e-3)
    target = torch.zeros(shape[:-1], dtype=torch.int64, device=device)
    for reduction in (0, 1, 2):
        for needs_grad in (False, True):
            logits = make(shape, dtype, 0, device).requires_grad_(needs_grad)
            all_options = options | {"reduction": reduction}
            check = torch.library.opcheck(ops.cross_entropy.default, (logits, target), all_options)
            assert set(check.values()) == {"SUCCESS"}
        logits = make(shape, dtype, 0, device)
        loss, stats, divisor = ops.cross_entropy(logits, target, **all_options)
        check = torch.library.opcheck(ops.cross_entropy_.default, (logits, target), all_options)
        assert set(check.values()) == {"SUCCESS"}
        args = (loss, make(shape, dtype, 0, device), target, stats, divisor)
        check = torch.library.opcheck(ops.cross_entropy_backward.default, args, options)
        assert set(check.values()) == {"SUCCESS"}
        args = (logits, loss, torch.ones((), device=device))
        check = torch.library.opcheck(ops.cross_entropy_scale_.default, args)
        assert set(check.values()) == {"SUCCESS"}


def test_can_be_compiled_in_place(device: str) -> None:
    """In one graph with dynamic sizes, gradients too, and with the same bits."""

    def block(x: Tensor, target: Tensor, inplace: bool = True) -> Tensor:
        return cross_entropy(x * 2, target, label_smoothing=0.1, inplace=inplace)

    torch.compiler.reset()
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (40, 97):
        x, target = make((5, n), F32, 0, device).requires_grad_(), targets(5, n, device)
        want = block(x, target, inplace=False)
        got = compiled(x, target)
        assert torch.equal(got, want)
        pair = [torch.autograd.grad(loss, x)[0] for loss in (got, want)]
        assert torch.equal(*pair)


def test_reference_has_the_right_gradient() -> None:
    """By finite differences, so that comparing gradients with the reference's means something."""
    x = make((4, 6), F32, 0).double().requires_grad_()
    for options in OPTIONS.values():
        target = targets(4, 6, "cpu")
        options = options | {"ignore_index": -100}
        assert torch.autograd.gradcheck(
            lambda a, t=target, o=options: cross_entropy_ref(a, t, **o), x
        )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_as_torch_does(reduction: str, device: str) -> None:
    logits, target = make((50, 700), F32, 0, device), targets(50, 700, device)
    options = dict(reduction=reduction, label_smoothing=0.1)
    want = torch.nn.functional.cross_entropy(logits.double(), target, **options).float()
    torch.testing.assert_close(cross_entropy(logits, target, **options), want)


def gradient(inner: Tensor, target: Tensor, inplace: bool) -> Tensor:
    return torch.autograd.grad(cross_entropy(inner, target, inplace=inplace), inner)[0]


@pytest.mark.parametrize("n", [4096, 128_256])
def test_memory(n: int, cuda: str) -> None:
    """Without inplace, nothing but the gradient; with it, next to nothing."""
    logits = torch.ones(2**27 // n, n, device=cuda, dtype=BF16)
    target = torch.ones(logits.shape[0], device=cuda, dtype=torch.int64)
    cross_entropy(logits.clone(), target, inplace=True)
    for inplace, most in ((False, 1.01), (True, 0.01)):
        leaf = logits.clone().requires_grad_()
        inner = leaf * 1
        _, taken = on_cuda(gradient, inner, target, inplace)
        assert taken <= most * logits.nbytes


def test_cuda_graph_and_no_waiting_in_place(cuda: str) -> None:
    logits, target = make((64, 20_000), BF16, 0, cuda), targets(64, 20_000, cuda)
    room, one = logits.clone().requires_grad_(), torch.ones((), device=cuda)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            torch.autograd.grad(cross_entropy(room * 1, target, inplace=True), room, one)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            torch.autograd.grad(cross_entropy(room * 1, target, inplace=True), room, one)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            loss = cross_entropy(room * 1, target, inplace=True)
            (grad,) = torch.autograd.grad(loss, room, one)
    torch.cuda.synchronize()
    target.copy_(target.roll(1))
    graph.replay()
    want = of_both(logits, target, one)
    assert torch.equal(loss, want[0]) and torch.equal(grad, want[1])

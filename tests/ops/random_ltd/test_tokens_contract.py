"""What the ops on tokens promise to torch: compiled, on meta, in threads, graphs and few bytes."""

import hashlib
from typing import Any

import torch
from allocated import Taken, measured
from at_once import in_threads
from functional_cases import Recorder
from samples import BF16, F32, make
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from deepspeed_ext.ops import (
    mask_gather_bert,
    token_gather,
    token_scatter,
    token_scatter_,
    token_sort_,
)


def ids_of(samples: int, tokens: int, kept: int, device: str) -> Tensor:
    """Different tokens, in no order."""
    order = (torch.arange(kept) * 7919 + torch.arange(samples)[:, None]) % tokens
    return order.int().to(device)


def dropping(x: Tensor, ids: Tensor) -> list[Tensor]:
    """There, and back, each way."""
    part = token_gather(x, ids)
    whole = token_scatter(x * 2, part.sin(), ids)
    turned = token_gather(x.transpose(0, 1), ids, False)
    return [part, whole, token_scatter(whole, None, ids), turned]


def of_all(function: Any, x: Tensor, ids: Tensor) -> list[Tensor]:
    results = function(x, ids)
    grads = [make(tuple(t.shape), t.dtype, 9 + i, str(t.device)) for i, t in enumerate(results)]
    return [*(t.detach() for t in results), *torch.autograd.grad(results, x, grads)]


def leaf_of(tokens: int, n: int, dtype: torch.dtype, device: str) -> Tensor:
    return make((3, tokens, n), dtype, 0, device).requires_grad_()


def digest(device: str = "cpu") -> str:
    """Return a digest of the bits of all results and gradients, also past the cache."""
    found = hashlib.sha256()
    for dtype in (F32, BF16):
        past_cache = ((25, 65_536),) if dtype == F32 else ()
        for tokens, n in ((11, 8), (41, 9), (300, 264), *past_cache):
            x, ids = leaf_of(tokens, n, dtype, device), ids_of(3, tokens, tokens // 2, device)
            for t in of_all(dropping, x, ids):
                found.update(t.cpu().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def test_opcheck(device: str) -> None:
    for samples in (0, 3):
        x = make((samples, 7, 6), BF16, 0, device).requires_grad_()
        ids = ids_of(3, 7, 4, device)[:samples]
        with Recorder() as recorder:
            of_all(dropping, x, ids)
            token_scatter_(x.detach().clone(), x.detach()[:, :4].clone(), ids)
            token_sort_(ids.clone(), 7)
            mask_gather_bert(torch.ones(samples, 1, 7, 7, device=device), ids[None])
        assert len({op.name() for op, _, _ in recorder.calls}) == 6
        for op, given, options in recorder.calls:
            for needs_grad in (False, True):
                if needs_grad and (op._schema.is_mutable or "mask" in op.name()):
                    continue
                leaves = tuple(
                    each.detach().requires_grad_(needs_grad and each.is_floating_point())
                    if isinstance(each, Tensor)
                    else each
                    for each in given
                )
                checked = torch.library.opcheck(op, leaves, options)
                assert set(checked.values()) == {"SUCCESS"}


def test_can_be_compiled(device: str) -> None:
    """In one graph with dynamic sizes, gradients too, and with the same bits."""
    torch.compiler.reset()
    compiled = torch.compile(dropping, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens, n in ((5, 40), (9, 98)):
        x, ids = leaf_of(tokens, n, F32, device), ids_of(3, tokens, tokens // 2, device)
        got, want = (of_all(each, x, ids) for each in (compiled, dropping))
        assert all(map(torch.equal, got, want))


def test_on_meta_and_fake(device: str) -> None:
    """Results and gradients are as they would be, but for their values."""
    x, ids = leaf_of(7, 24, BF16, device), ids_of(3, 7, 3, device)

    def run(x: Tensor, ids: Tensor) -> list[Tensor]:
        results = dropping(x, ids)
        grads = torch.autograd.grad(results, x, [torch.ones_like(t) for t in results])
        masks = mask_gather_bert(x[:, None, :, :7], ids[None])
        return [*results, *grads, masks, mask_gather_bert(x[:, None, :1, :7], ids[None])]

    want, pretended = run(x, ids), []
    with torch.no_grad():
        masks = mask_gather_bert(x.detach()[:, None, :, :7], ids[None])
    assert masks.shape == (1, 3, 1, 3, 3)
    with FakeTensorMode() as mode:
        pretended.append(run(mode.from_tensor(x), mode.from_tensor(ids)))
    pretended.append(run(x.detach().to("meta").requires_grad_(), ids.to("meta")))
    for results in pretended:
        for got, expected in zip(results, want, strict=True):
            assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
            assert got.stride() == expected.stride()


def test_two_threads(device: str) -> None:
    """On CUDA each with a stream of its own."""
    both = [leaf_of(40 + 9 * i, 264, BF16, device) for i in range(2)]
    calls = [
        lambda x=x: of_all(dropping, x, ids_of(3, x.shape[1], 20, device)) for x in both
    ]  # fmt: skip
    wanted = [call() for call in calls]
    for found, want in zip(in_threads(device, 6, *calls), wanted, strict=True):
        for got in found:
            assert all(map(torch.equal, got, want))


def test_cuda_graph(cuda: str) -> None:
    """Forward and backward, replayed with other values and other ids; nothing waits."""
    x, ids = leaf_of(300, 264, BF16, cuda), ids_of(3, 300, 70, cuda)
    mask = make((3, 1, 300, 300), F32, 0, cuda)
    grads = [make(tuple(t.shape), t.dtype, 9, cuda) for t in dropping(x, ids)]

    def run() -> list[Tensor]:
        kept = token_sort_(ids.clone(), 300)
        results = dropping(x, kept)
        masks = mask_gather_bert(mask, kept[None])
        return [*results, *torch.autograd.grad(results, x, grads), masks]

    run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = run()
    with torch.no_grad():
        x.neg_()
        ids.copy_(299 - ids)
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, made, run()))


def measure(device: str, taken: Taken) -> dict[str, int]:
    """Return what each op has at most beside its results, in bytes."""
    x, ids = make((4, 500, 2048), F32, 0, device), ids_of(4, 500, 200, device)
    part, found = token_gather(x, ids), {}
    calls = {
        "token_gather": lambda: token_gather(x, ids),
        "token_scatter": lambda: token_scatter(x, part, ids),
        "token_scatter, zeros": lambda: token_scatter(x, None, ids),
        "token_scatter_": lambda: token_scatter_(x, part, ids),
        "backward": lambda: torch.autograd.grad(token_gather(leaf, ids), leaf, part)[0],
    }
    leaf = x.detach().requires_grad_()
    for name, call in calls.items():
        call()
        result, bytes_taken = taken(call)
        new = 0 if name == "token_scatter_" else result.nbytes
        found[name] = bytes_taken - new - (part.nbytes if name == "backward" else 0)
    return found


def test_nothing_but_results_is_made(device: str) -> None:
    """On the CPU which id names a token beside them, too."""
    assert max(measured(measure, device).values()) < 40_000

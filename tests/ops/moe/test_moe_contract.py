"""What the ops of mixture of experts promise to torch, and what they refuse."""

import hashlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from at_once import in_threads
from functional_cases import Recorder
from route_cases import SCORES, bias_of
from samples import BF16, DTYPES, F32, make
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from deepspeed_ext import ops
from deepspeed_ext.ops import Routing, moe_assign, moe_permute, moe_route, moe_unpermute

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "drops": dict(score="sigmoid", groups=4, topk_groups=2, normalize=True, capacity=9),
    "random": dict(score="softmax_topk", capacity=7, keep="random", seed=3),
}
each_option = pytest.mark.parametrize("name", OPTIONS)


def layer(logits: Tensor, x: Tensor, **options: Any) -> list[Tensor]:
    """There, and back."""
    routing = moe_route(logits, 3, **options)
    rows = moe_permute(x * 2, routing)
    out = moe_unpermute(rows.sin(), routing)
    return [
        out,
        rows,
        routing.weights,
        ops.moe_load_balancing_loss(routing),
        ops.moe_z_loss(routing),
    ]


def leaves_of(tokens: int, n: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    made = [make((tokens, 12), dtype, 0, device), make((tokens, n), dtype, 1, device)]
    return [t.requires_grad_() for t in made]


def of_all(
    function: Callable[..., list[Tensor]], leaves: list[Tensor], **options: Any
) -> list[Tensor]:
    """Return the results and the gradients."""
    results = function(*leaves, **options)
    grads = [make(tuple(t.shape), t.dtype, 9 + i, str(t.device)) for i, t in enumerate(results)]
    found = torch.autograd.grad(results, leaves, grads)
    return [*(result.detach() for result in results), *found]


def digest(device: str = "cpu") -> str:
    """Return a digest of the bits of all results and gradients."""
    found = hashlib.sha256()
    for dtype in DTYPES:
        for tokens, n in ((1, 8), (41, 9), (300, 264), (5, 4100)):
            for options in OPTIONS.values():
                for t in of_all(layer, leaves_of(tokens, n, dtype, device), **options):
                    found.update(t.cpu().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


@each_option
def test_opcheck(name: str, device: str) -> None:
    for tokens in (0, 7):
        leaves = leaves_of(tokens, 24, BF16, device)
        with Recorder() as recorder:
            of_all(layer, leaves, **OPTIONS[name])
        names = {op.name() for op, _, _ in recorder.calls}
        assert len(names) == 5
        for op, arguments, options in recorder.calls:
            has_gradient = "backward" not in op.name()
            for needs_grad in (False, True) if has_gradient else (False,):
                given = tuple(
                    each.detach().requires_grad_(needs_grad and each.is_floating_point())
                    if isinstance(each, Tensor)
                    else each
                    for each in arguments
                )
                checked = torch.library.opcheck(op, given, options)
                assert set(checked.values()) == {"SUCCESS"}


@each_option
def test_can_be_compiled(name: str, device: str) -> None:
    """In one graph with dynamic sizes, gradients too, and with the same bits."""
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens, n in ((5, 40), (9, 98), (30, 64)):
        leaves = leaves_of(tokens, n, F32, device)
        options = OPTIONS[name]
        if name == "random":  # a tensor, which is no constant of the graph
            options = options | dict(seed=torch.tensor(tokens, device=device), capacity=tokens)
        got, want = (of_all(each, leaves, **options) for each in (compiled, layer))
        assert all(map(torch.equal, got, want))


@each_option
def test_on_meta_and_fake(name: str, device: str) -> None:
    """Results and gradients are as they would be, but for their values."""
    leaves = leaves_of(7, 24, BF16, device)

    def all_results(logits: Tensor, x: Tensor) -> list[Tensor]:
        routing = moe_route(logits, 3, **OPTIONS[name])
        return [*(t for t in routing if isinstance(t, Tensor)), *layer(logits, x, **OPTIONS[name])]

    def run(leaves: list[Tensor]) -> list[Tensor]:
        results = all_results(*leaves)
        wanted = [t for t in results if t.requires_grad]
        return [
            *results,
            *torch.autograd.grad(wanted, leaves, [torch.ones_like(t) for t in wanted]),
        ]

    want, pretended = run(leaves), []
    with FakeTensorMode() as mode:
        pretended.append(run([mode.from_tensor(t) for t in leaves]))
    pretended.append(run([t.detach().to("meta").requires_grad_() for t in leaves]))
    for results in pretended:
        for got, expected in zip(results, want, strict=True):
            assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
            assert got.stride() == expected.stride()


def test_gradients_of_gradients(device: str) -> None:
    """Of permute, and of a sum without weights, there are some; others are refused by name."""
    logits, x = leaves_of(7, 24, F32, device)
    routing = moe_route(logits, 3)
    (grad,) = torch.autograd.grad(moe_permute(x, routing).pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x)
    torch.testing.assert_close(second, 18 * x.detach())
    rows = moe_permute(x, routing)
    for loss, wrt, op in (
        (moe_unpermute(rows, routing).square().sum(), x, "moe_unpermute"),
        (routing.weights.square().sum(), logits, "moe_route"),
    ):
        (grad,) = torch.autograd.grad(loss, wrt, create_graph=True)
        with pytest.raises(RuntimeError, match=f"^{op}_backward: the gradient of .* {op}_ref"):
            grad.sum().backward(retain_graph=True)


def test_one_gradient_alone(device: str) -> None:
    """Each is what it is among others, and a result that nothing depends on costs nothing."""
    logits, x = leaves_of(9, 24, F32, device)
    for score in SCORES:
        routing = moe_route(logits, 3, score=score, normalize=True)
        results = [routing.weights, routing.probability_sums, routing.z_sum]
        grads = [make(tuple(t.shape), F32, i, device) for i, t in enumerate(results)]
        apart = [torch.autograd.grad(t, logits, g, retain_graph=True)[0]
                 for t, g in zip(results, grads, strict=True)]  # fmt: skip
        together = torch.autograd.grad(results, logits, grads)[0]
        torch.testing.assert_close(sum(apart), together, rtol=1e-5, atol=1e-6)
    rows = moe_permute(x, routing).detach().requires_grad_()
    leaf = routing.weights.detach().requires_grad_()
    loss = moe_unpermute(rows, routing, leaf).sin().sum()
    both = torch.autograd.grad(loss, [rows, leaf], retain_graph=True)
    for i, wanted in enumerate((rows, leaf)):
        assert torch.equal(torch.autograd.grad(loss, wanted, retain_graph=True)[0], both[i])


def test_under_autocast_nothing_is_cast(device: str) -> None:
    leaves = leaves_of(9, 24, F32, device)
    want = of_all(layer, leaves)
    with torch.autocast(device, dtype=BF16):
        got = of_all(layer, leaves)
    assert all(map(torch.equal, got, want))


def test_two_threads(device: str) -> None:
    """On CUDA each with a stream of its own."""
    both = [leaves_of(40 + 9 * i, 264, BF16, device) for i in range(2)]
    calls = [lambda leaves=leaves: of_all(layer, leaves, **OPTIONS["random"]) for leaves in both]
    wanted = [call() for call in calls]
    for found, want in zip(in_threads(device, 6, *calls), wanted, strict=True):
        for got in found:
            assert all(map(torch.equal, got, want))


@each_option
def test_cuda_graph(name: str, cuda: str) -> None:
    """Forward and backward, replayed with other values; nothing waits for the device."""
    options = dict(OPTIONS[name])
    if "seed" in options:
        options["seed"] = torch.tensor(options["seed"], device=cuda)
    room = leaves_of(300, 264, BF16, cuda)
    grads = [make(tuple(t.shape), t.dtype, 9, cuda) for t in layer(*room, **options)]

    def run(leaves: list[Tensor]) -> list[Tensor]:
        results = layer(*leaves, **options)
        return [*results, *torch.autograd.grad(results, leaves, grads)]

    run(room)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(room)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(room)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            got = run(room)
    torch.cuda.synchronize()
    for scale in (2.0, -1.0):
        others = [(t.detach() * scale).requires_grad_() for t in leaves_of(300, 264, BF16, cuda)]
        if "seed" in options:
            options["seed"].fill_(int(scale) + 5)
        with torch.no_grad():
            for target, source in zip(room, others, strict=True):
                target.copy_(source)
        graph.replay()
        assert all(map(torch.equal, got, run(others)))


X = torch.ones(4, 8)
LOGITS = torch.ones(4, 6)
CHOSEN = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 1]])


def routing(**changes: Any) -> Routing:
    return moe_assign(CHOSEN, torch.ones(4, 2), 3)._replace(**changes)


def slots(**changes: int) -> Tensor:
    """Return slots with another number as element 1."""
    found = routing().slots.clone()
    found.view(-1)[1] = changes["second"]
    return found


WRONG: dict[str, Callable[[], Any]] = {
    "moe_route: k is 0, expected 1 to 6, the number of experts": lambda: moe_route(LOGITS, 0),
    "moe_route: k is 7, expected 1 to 6, the number of experts": lambda: moe_route(LOGITS, 7),
    "moe_route: score is 'tanh', expected 'softmax', 'sigmoid' or 'softmax_topk'": lambda: (
        moe_route(LOGITS, 2, score="tanh")
    ),
    "moe_route: groups is 4, expected a divisor of 6, the number of experts": lambda: moe_route(
        LOGITS, 2, groups=4
    ),
    "moe_route: groups is 0, expected a divisor of 6, the number of experts": lambda: moe_route(
        LOGITS, 2, groups=0
    ),
    "moe_route: topk_groups is 4, expected 1 to 3, the number of groups": lambda: moe_route(
        LOGITS, 2, groups=3, topk_groups=4
    ),
    "moe_route: k is 3, expected 1 to 2, the experts of topk_groups groups": lambda: moe_route(
        LOGITS, 3, groups=3
    ),
    "moe_route: scale is inf, expected a finite float32": lambda: moe_route(
        LOGITS, 2, scale=float("inf")
    ),
    "moe_route: bias has shape [5], expected [6]": lambda: moe_route(LOGITS, 2, bias=torch.ones(5)),
    "moe_route: logits is float64, expected float32, bfloat16 or float16": lambda: moe_route(
        LOGITS.double(), 2
    ),
    "moe_route: logits has shape [], expected a dimension at least": lambda: moe_route(
        torch.ones(()), 1
    ),
    "moe_route: logits has shape [2, 1025], expected 1 to 1024 experts": lambda: moe_route(
        torch.ones(2, 1025), 1
    ),
    "moe_route: logits has shape [2, 0], expected 1 to 1024 experts": lambda: moe_route(
        torch.ones(2, 0), 1
    ),
    "moe_route: capacity is -1, expected 0 or more, or None": lambda: moe_route(
        LOGITS, 2, capacity=-1
    ),
    "moe_route: keep is 'all', expected 'order' or 'random'": lambda: moe_route(
        LOGITS, 2, keep="all"
    ),
    "moe_route: seed has shape [2], expected one number": lambda: moe_route(
        LOGITS, 2, keep="random", seed=torch.tensor([1, 2])
    ),
    "moe_route: seed is float32, expected int64": lambda: moe_route(
        LOGITS, 2, keep="random", seed=torch.ones(())
    ),
    "moe_assign: experts is float32, expected int64": lambda: moe_assign(LOGITS, LOGITS, 3),
    "moe_route: seed is 18446744073709551616, expected a number of 64 bits": lambda: moe_route(
        LOGITS, 2, keep="random", seed=1 << 64
    ),
    "moe_assign: weights has shape [4, 1], expected [4, 2], that of experts": lambda: moe_assign(
        CHOSEN, torch.ones(4, 1), 3
    ),
    "moe_assign: num_experts is 0, expected 1 to 1024": lambda: moe_assign(CHOSEN, CHOSEN, 0),
    "moe_permute: x has shape [3, 8], expected [4, 8] beside those slots": lambda: moe_permute(
        X[:3], routing()
    ),
    "moe_permute: x has shape [8], expected [4, 8] beside those slots": lambda: moe_permute(
        X[0], routing()
    ),
    "moe_permute: slots is int32, expected int64": lambda: moe_permute(
        X, routing(slots=routing().slots.int())
    ),
    "moe_permute: offsets is int64, expected int32": lambda: moe_permute(
        X, routing(offsets=routing().offsets.long())
    ),
    "moe_permute: rows is -1, expected 0 or more": lambda: moe_permute(X, routing(rows=-1)),
    "moe_permute: offsets has 8 as its last element, expected 0 to 7, the number of rows": lambda: (
        moe_permute(X, routing(rows=7))
    ),
    "moe_permute: slots has 8 as its element number 1, expected a row before 8, the last of the"
    " offsets, or -1": lambda: moe_permute(X, routing(slots=slots(second=8))),
    "moe_permute: slots has -2 as its element number 1, expected a row before 8, the last of the"
    " offsets, or -1": lambda: moe_permute(X, routing(slots=slots(second=-2))),
    "moe_permute: slots has 0 as its element number 1, expected a row that no other element"
    " is": lambda: moe_permute(X, routing(slots=slots(second=0))),
    "moe_permute: slots has 7 rows, expected 8, the last of the offsets": lambda: moe_permute(
        X, routing(slots=slots(second=-1))
    ),
    "moe_unpermute: y has shape [8], expected rows and columns": lambda: moe_unpermute(
        torch.ones(8), routing()
    ),
    "moe_unpermute: weights has shape [4, 3], expected [4, 2]": lambda: moe_unpermute(
        torch.ones(8, 8), routing(), torch.ones(4, 3)
    ),
    "moe_unpermute: offsets has 8 as its last element, expected 0 to 6, the number of"
    " rows": lambda: moe_unpermute(torch.ones(6, 8), routing()),
    "moe_unpermute: weights is int64, expected float32, bfloat16 or float16": lambda: moe_unpermute(
        torch.ones(8, 8), routing(), CHOSEN
    ),
    "moe_load_balancing_loss: routing.probability_sums is None, expected that of"
    " moe_route": lambda: ops.moe_load_balancing_loss(routing()),
    "moe_z_loss: routing.z_sum is None, expected that of moe_route": lambda: ops.moe_z_loss(
        routing()
    ),
}
KINDS: dict[str, Callable[[], Any]] = {
    "moe_route: logits is None, expected a tensor": lambda: moe_route(None, 2),  # type: ignore[arg-type]
    "moe_route: k is 2.5, expected a whole number": lambda: moe_route(LOGITS, 2.5),  # type: ignore[arg-type]
    "moe_route: scale is 'x', expected a number": lambda: moe_route(LOGITS, 2, scale="x"),  # type: ignore[arg-type]
    "moe_route: seed is 2.5, expected a whole number": lambda: moe_route(
        LOGITS,
        2,
        keep="random",
        seed=2.5,  # type: ignore[arg-type]
    ),
    "moe_permute: routing is None, expected a Routing": lambda: moe_permute(X, None),  # type: ignore[arg-type]
    "moe_permute: x is None, expected a tensor": lambda: moe_permute(None, routing()),  # type: ignore[arg-type]
    "moe_unpermute: routing is 3, expected a Routing": lambda: moe_unpermute(X, 3),  # type: ignore[arg-type]
    "moe_z_loss: routing is None, expected a Routing": lambda: ops.moe_z_loss(None),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("text", WRONG)
def test_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        WRONG[text]()


@pytest.mark.parametrize("text", KINDS)
@pytest.mark.parametrize("is_recording", [True, False])
def test_refused_kinds(text: str, is_recording: bool) -> None:
    with (
        torch.set_grad_enabled(is_recording),
        pytest.raises(TypeError, match=f"^{re.escape(text)}$"),
    ):
        KINDS[text]()


def test_a_bias_has_no_gradient() -> None:
    bias = bias_of(6, "cpu").requires_grad_()
    with pytest.raises(RuntimeError, match=r"^moe_route: bias requires a gradient, expected none"):
        moe_route(LOGITS, 2, bias=bias)
    with torch.no_grad():
        moe_route(LOGITS, 2, bias=bias)
    moe_route(LOGITS.requires_grad_(False), 2, bias=bias.detach())


def test_other_devices(cuda: str) -> None:
    for text, call in {
        "moe_permute: slots is on cpu, expected cuda:0": lambda: moe_permute(X.to(cuda), routing()),
        "moe_route: bias is on cpu, expected cuda:0": lambda: moe_route(
            LOGITS.to(cuda), 2, bias=torch.ones(6)
        ),
        "moe_route: seed is on cpu, expected cuda:0": lambda: moe_route(
            LOGITS.to(cuda), 2, keep="random", seed=torch.tensor(3)
        ),
    }.items():
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            call()

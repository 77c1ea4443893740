"""Every gradient that is asked for of every op: it is right, or an error names op and argument."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from calls_of_all_ops import F32, Call, all_calls, forms, make_all
from kv_cases import make_kv, queries
from norms_around_cases import NextNorm
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed_ext import ops
from deepspeed_ext.ops._library import _tensors

# Steps are none of autograd's business: parameters require gradients, and are written to.
STEPS = ("adagrad", "adam", "lamb", "lars", "lion", "rmsprop", "sgd")
# Of which results are whole numbers, without gradients, as those of argmax in torch.
WHOLE = {"deepspeed_ext::fingerprints"}
# Of which there is a kernel for CUDA alone, with tests of its own; gradients go around it.
OF_CUDA = {"deepspeed_ext::quantized_product.w4", "deepspeed_ext::quantized_product.w8"}
# That a gradient goes straight through, as is documented; all others are compared with differences.
STRAIGHT = {"fake_quantize.x"}


torch.manual_seed(0)
CALLS = all_calls()


def is_step(op: Any) -> bool:
    return op.name().removeprefix("deepspeed_ext::").startswith(tuple(f"{s}_" for s in STEPS))


def test_every_tensor_of_every_op_is_in_some_call() -> None:
    """So that no argument is left out below; those are floating that are so in a call."""
    seen = {
        (op.name(), name.partition("[")[0]) for op, args, _ in CALLS for name, _ in forms(op, args)
    }
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith("deepspeed_ext::") or "test_" in name:
            continue
        packet, _, overload = name.removeprefix("deepspeed_ext::").partition(".")
        op = getattr(getattr(torch.ops.deepspeed_ext, packet), overload or "default")
        if is_step(op) or op.name() in OF_CUDA:
            continue
        for argument in op._schema.arguments:
            is_of_codes = argument.name in ("key_scales", "value_scales") and not overload
            if "Tensor" in str(argument.type) and not is_of_codes:
                assert (op.name(), argument.name) in seen, f"{name} {argument.name}"


def test_every_write_is_counted() -> None:
    """By the version of each tensor that a schema says is written, or a stale one is used later."""

    class Writes(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func.namespace == "deepspeed_ext":
                for argument, value in zip(func._schema.arguments, args, strict=False):
                    if argument.is_write and isinstance(value, Tensor):
                        seen.append((f"{func.name()} {argument.name}", value, value._version))
            return func(*args, **(kwargs or {}))

    seen: list[tuple[str, Tensor, int]] = []
    with Writes():
        make_all()
    assert {"rope_ k", "quantize_packed_ errors", "append_and_attend_.int8 value_scales"} <= {
        name.removeprefix("deepspeed_ext::") for name, _, _ in seen
    }
    assert [name for name, tensor, version in seen if tensor._version == version] == []


FLOATING = [
    pytest.param(call, name, id=f"{call[0].name().removeprefix('deepspeed_ext::')}-{name}")
    for call in CALLS
    for name, dtype in forms(call[0], call[1])
    if dtype.is_floating_point and call[0].name() not in WHOLE
]


def fresh(call: Call, chosen: str) -> tuple[partial[Any], Tensor, str]:
    """Return a call of copies, the argument that is chosen, and the name of the op."""
    op, args, keywords = call
    copies = [
        [t.detach().clone() for t in arg] if isinstance(arg, list)
        else arg.detach().clone() if isinstance(arg, Tensor) else arg
        for arg in args
    ]  # fmt: skip
    names = [argument.name for argument in op._schema.arguments]
    tensor = dict(_tensors(dict(zip(names, copies, strict=False))))[chosen]
    public = op.name().removeprefix("deepspeed_ext::").partition(".")[0]
    return partial(op, *copies, **keywords), tensor, public


class Nothing(torch.autograd.Function):
    """Has no gradient, and says so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        return None


def results_of(function: Callable[[], Any]) -> list[Tensor]:
    found = function()
    return [] if found is None else [found] if isinstance(found, Tensor) else list(found)


@pytest.mark.parametrize(("call", "name"), FLOATING)
def test_a_gradient_is_right_or_an_error_says_what_has_none(call: Call, name: str) -> None:
    function, tensor, public = fresh(call, name)
    tensor.requires_grad_()
    refusals = (
        f"{public}: {name} requires a gradient, expected none, ",
        f"{public}: the gradient of {name} is wanted, expected no use of it, ",
    )
    try:
        results = [r for r in results_of(function) if r.is_floating_point()]
        kept = [r for r in results if r.requires_grad]
        assert kept, "what depends on the argument does not require a gradient"
        weights = [torch.randn(r.shape).to(r.dtype) for r in kept]
        (grad,) = torch.autograd.grad(kept, tensor, weights)
    except RuntimeError as error:
        assert str(error).startswith(refusals), error
        with torch.no_grad():
            fresh(call, name)[0]()
        return
    if f"{public}.{name}" in STRAIGHT:
        assert torch.equal(grad, weights[0])
        return
    numbers = [i for i, r in enumerate(results) if r.requires_grad]
    with torch.no_grad():
        for i in range(tensor.numel()):
            sums = []
            for step in (0.01, -0.01):
                flat = tensor.detach().view(-1)
                before = flat[i].clone()
                flat[i] += step
                again = [r for r in results_of(function) if r.is_floating_point()]
                terms = [again[n] * w for n, w in zip(numbers, weights, strict=True)]
                sums.append(sum(term.double().sum() for term in terms))
                flat[i] = before
            torch.testing.assert_close(
                grad.view(-1)[i].double(), (sums[0] - sums[1]) / 0.02, rtol=0.02, atol=0.01
            )


@pytest.mark.parametrize(("call", "name"), FLOATING)
def test_what_comes_of_no_gradient_is_none(call: Call, name: str) -> None:
    """As in torch, where a later function returns None; also from ops that refuse a gradient."""
    function, tensor, public = fresh(call, name)
    tensor.requires_grad_()
    try:
        results = [r for r in results_of(function) if r.requires_grad]
    except RuntimeError as error:
        assert f"{public}: {name} requires a gradient" in str(error)
        return
    torch.autograd.backward([Nothing.apply(r).sum() for r in results])
    assert tensor.grad is None


@pytest.mark.parametrize(("call", "name"), FLOATING)
def test_transforms_are_told_what_to_do(call: Call, name: str) -> None:
    function, tensor, public = fresh(call, name)
    op, _, keywords = call

    def of(x: Tensor) -> Tensor:
        given = [
            [x if each is tensor else each for each in arg] if isinstance(arg, list)
            else x if arg is tensor else arg
            for arg in function.args
        ]  # fmt: skip
        found = op(*given, **keywords)
        return sum(r.sum() for r in ([found] if isinstance(found, Tensor) else found))

    allowed = (
        f"{public}: {name} is differentiated by a transform of torch.func, such as grad, vjp or",
        f"{public}: {name} requires a gradient, expected none, as the op has none for it; detach",
    )
    for transform in (torch.func.grad(of), torch.func.jacrev(of), lambda x: torch.func.vjp(of, x)):
        with pytest.raises(RuntimeError) as raised:
            transform(tensor)
        assert str(raised.value).startswith(allowed)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        each
        for each in FLOATING
        if dict(forms(each.values[0][0], each.values[0][1]))[each.values[1]].itemsize > 1
    ],
)
def test_a_negative_view_is_read_as_what_it_is(call: Call, name: str) -> None:
    """Or refused, where it is to be written."""
    function, tensor, public = fresh(call, name)
    op, _, keywords = call
    negative = torch._neg_view(-tensor)
    given = [
        [negative if each is tensor else each for each in arg] if isinstance(arg, list)
        else negative if arg is tensor else arg
        for arg in function.args
    ]  # fmt: skip
    written = {argument.name for argument in op._schema.arguments if argument.is_write}
    with torch.no_grad():
        if name.partition("[")[0] in written:
            text = f"^{public}: {re.escape(name)} is the negative of its memory, expected a tensor"
            with pytest.raises(ValueError, match=text):
                op(*given, **keywords)
            return
        got = results_of(lambda: op(*given, **keywords))
        want = results_of(fresh(call, name)[0])
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call[0].name())
def test_vmap_is_right_or_an_error_says_what_to_do(call: Call) -> None:
    op, args, keywords = call
    schema = op._schema
    function, *_ = fresh(call, forms(op, args)[0][0])
    stacked = [torch.stack([arg, arg]) if isinstance(arg, Tensor) else arg for arg in function.args]
    stacked = [
        [torch.stack([t, t]) for t in arg] if isinstance(arg, list) else arg for arg in stacked
    ]
    in_dims = tuple(None if arg is None or isinstance(arg, int) else 0 for arg in stacked)
    mapped = torch.func.vmap(lambda *given: op(*given, **keywords), in_dims=in_dims)
    if schema.is_mutable or any("List" in str(a.type) for a in schema.arguments):
        public = op.name().removeprefix("deepspeed_ext::").partition(".")[0]
        text = f"^{public}: an argument is mapped by torch.func.vmap, expected none, as the op "
        with pytest.raises(RuntimeError, match=text):
            mapped(*stacked)
        return
    for got, want in zip(results_of(lambda: mapped(*stacked)), results_of(function), strict=True):
        assert torch.equal(got.nan_to_num(), torch.stack([want, want]).nan_to_num())


X, Q, TARGET = torch.randn(3, 16), torch.randn(3, 2, 16), torch.arange(3)
NUMBERS: dict[str, Callable[..., Any]] = {
    "softmax scale": lambda n: ops.softmax(X, scale=n),
    "softmax softcap": lambda n: ops.softmax(X, softcap=n),
    "scaled_masked_softmax scale": lambda n: ops.scaled_masked_softmax(X, None, n),
    "softmax scale through another":
        lambda n: ops.scaled_upper_triang_masked_softmax(X, n),
    "bias_dropout_residual p": lambda n: ops.bias_dropout_residual(X, p=n),
    "dropout_activation p": lambda n: ops.dropout_activation(X, p=n),
    "dropout_attention p": lambda n: ops.dropout_attention(*[Q[None]] * 3, p=n),
    "cross_entropy label_smoothing": lambda n: ops.cross_entropy(X, TARGET, label_smoothing=n),
    "cross_entropy z_loss": lambda n: ops.cross_entropy(X.clone(), TARGET, z_loss=n, inplace=True),
    "rms_norm eps": lambda n: ops.rms_norm(X, eps=n),
    "rms_norm weight_offset": lambda n: ops.rms_norm(X, X[0], residual=X, weight_offset=n),
    "layer_norm eps": lambda n: ops.layer_norm(X, eps=n),
    "rope scale": lambda n: ops.rope(Q, None, TARGET, torch.ones(8), scale=n),
    "rope_ scale": lambda n: ops.rope_(Q.clone(), None, TARGET, torch.ones(8), scale=n),
    "block_sparse_attention scale":
        lambda n: ops.block_sparse_attention(
            *[Q[None]] * 3, torch.ones(1, 1, 1).long(), 16, scale=n
        ),
    "skinny_linear_norm weight_offset":
        lambda n: ops.skinny_linear_norm(
            X, Q.view(6, 16)[[0] * 8], norm=NextNorm(X[0, :8], weight_offset=n)
        ),
    **{
        f"{name} {argument}": lambda n, name=name, argument=argument: getattr(ops, name)(
            *[queries(2, 1, 2, 16, F32, "cpu") for _ in range(1 if name.endswith("n") else 3)],
            make_kv([5, 3], 2, 16, F32, "cpu"), **{argument: n},
        )
        for name, arguments in {
            "decode_attention": ("scale", "softcap"),
            "prefill_attention": ("scale", "softcap"),
            "rope_append_": ("scale", "eps", "weight_offset"),
            "append_and_attend_": ("scale", "softcap", "rotation_scale", "eps", "weight_offset"),
        }.items()
        for argument in arguments
    },
}  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
def test_a_tensor_in_place_of_a_number_loses_no_gradient(name: str) -> None:
    """Torch makes a float of it, without its gradient; what is no number is named."""
    call, (op, argument, *_) = NUMBERS[name], name.split()
    with pytest.raises(RuntimeError, match=f"^{op}: {argument} requires a gradient, expected a n"):
        call(torch.nn.Parameter(torch.tensor(0.5)))
    with pytest.raises(TypeError, match=f"^{op}: {argument} is 'x', expected a number$"):
        call("x")
    call(torch.tensor(0.5))
    call(1)
    with torch.no_grad():
        call(torch.nn.Parameter(torch.tensor(0.5)))


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda t: ops.split_float32(t), "split_float32: values"),
        (lambda t: ops.encode_blocks(t, signed=True), "encode_blocks: values"),
        (lambda t: ops.join_float32(t.bfloat16(), TARGET.short()), "join_float32: upper"),
    ],
)
def test_forms_of_state_lose_no_gradient(call: Callable[[Tensor], Any], name: str) -> None:
    leaf = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match=f"^{name} requires a gradient, expected none, as the "):
        call(leaf)
    with torch.no_grad():
        call(leaf)
    scales = torch.ones(1, requires_grad=True)
    codes = torch.full((3,), 90, dtype=torch.uint8)
    ops.decode_blocks(codes, scales, signed=True).sum().backward()
    assert scales.grad is not None and scales.grad.item() > 0


WEIGHT = torch.linspace(-1, 1, 32).view(4, 8)
OF_GRADIENTS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "skinny_linear": (
        lambda x: ops.skinny_linear(x, WEIGHT),
        lambda x: ops.skinny_linear_ref(x, WEIGHT),
    ),
    "quantized_linear": (
        lambda x: ops.quantized_linear(x, _packed()),
        lambda x: ops.quantized_linear_ref(x, _packed()),
    ),
    "rope": (
        lambda x: ops.rope(x[:, None, None], None, torch.tensor([3]), ops.rope_frequencies(8)),
        lambda x: ops.rope_ref(x[:, None, None], None, torch.tensor([3]), ops.rope_frequencies(8)),
    ),
}


def _packed() -> ops.PackedWeight:
    made = ops.quantize(WEIGHT, "int8", group_size=8)
    return ops.pack_weight(*made, format="int8", group_size=8)


@pytest.mark.parametrize("rows", [3, 100])
@pytest.mark.parametrize("name", OF_GRADIENTS)
def test_gradients_of_gradients(name: str, rows: int) -> None:
    """Of the ops that have them; the README says which."""
    values = torch.randn(rows, 8, generator=torch.Generator().manual_seed(0))
    twice = []
    for function, dtype in zip(OF_GRADIENTS[name], (torch.float32, torch.float64), strict=True):
        x = values.to(dtype).requires_grad_()
        out = function(x)
        loss = (out[0] if isinstance(out, tuple) else out).pow(3).sum()
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        (of_grad,) = torch.autograd.grad(grad.square().sum(), x)
        twice.append(of_grad.double())
    torch.testing.assert_close(*twice, rtol=1e-4, atol=1e-4 * float(twice[1].abs().max()))


@pytest.mark.parametrize("rows", [3, 100])
@pytest.mark.parametrize("name", ["skinny_linear", "quantized_linear"])
def test_a_backward_outside_of_autocast_casts_nothing(name: str, rows: int) -> None:
    values = torch.randn(rows, 8, generator=torch.Generator().manual_seed(0))
    grads = []
    for is_cast in (False, True):
        x = values.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
            out = OF_GRADIENTS[name][0](x)
        assert out.dtype == torch.float32
        grads += torch.autograd.grad(out.square().sum(), x)
    assert torch.equal(*grads)

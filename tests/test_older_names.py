"""The builders and native functions of older libraries: there, by what plain torch gives, or said
to come."""

from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed_ext import interfaces, op_builder
from deepspeed_ext.compat.fused_optim import multi_tensor_applier
from deepspeed_ext.op_builder import builders

# Builders that DeepSpeed or Colossal-AI has, and what callers use of what its load gives, as far as
# it is there under their name.
OLDER: dict[str, tuple[str, ...]] = {
    "AsyncIOBuilder": ("aio_handle",),
    "CPUAdagradBuilder": (),
    "CPUAdamBuilder": ("CPUAdamOptimizer",),
    "FusedAdamBuilder": ("multi_tensor_adam",),
    "FusedLambBuilder": (),
    "FusedOptimBuilder": tuple(
        f"multi_tensor_{name}" for name in ("scale", "sgd", "adam", "lamb", "l2norm")
    ),
    "InferenceBuilder": ("einsum_sec_sm_ecm", "moe_res_matmul"),
    "LayerNormBuilder": ("forward_affine", "backward_affine"),
    "MOEBuilder": ("MoeCombine", "MoeDispatch", "moe_cumsum"),
    "QuantizerBuilder": ("ds_quantizer",),
    "ScaledMaskedSoftmaxBuilder": ("forward", "backward", "get_batch_per_block"),
    "ScaledUpperTrainglemaskedSoftmaxBuilder": ("forward", "backward"),
    "SparseAttnBuilder": ("block_sparse_attention",),
    "SpatialInferenceBuilder": ("nhwc_bias_add",),
    "UtilsBuilder": ("flatten", "unflatten"),
}
COMING = {
    "MultiHeadAttnBuilder": "transformer",
    "RandomLTDBuilder": "random_ltd",
    "StochasticTransformerBuilder": "transformer",
    "TransformerBuilder": "transformer",
}


@pytest.mark.parametrize("name", [*OLDER, *COMING])
def test_every_builder_is_there_or_comes_with_an_op(name: str) -> None:
    if name in COMING:
        for module in (op_builder, builders):
            text = (
                f"has no attribute '{name}'; it comes with the op {COMING[name]}, which is not th"
            )
            with pytest.raises(AttributeError, match=text):
                getattr(module, name)
        return
    builder = getattr(op_builder, name)
    assert builder.__name__ == name and isinstance(builder().is_compatible(), bool)
    module = interfaces.interface_of(builder.NAME)
    assert set(OLDER[name]) <= set(dir(module))
    assert all(callable(getattr(module, each)) for each in OLDER[name])


@pytest.mark.parametrize("name", builders.INSTEAD)
def test_a_builder_that_does_not_come_says_what_to_use(name: str) -> None:
    for module in (op_builder, builders):
        text = f"has no attribute '{name}', as its ops are not here; use {builders.INSTEAD[name]}$"
        with pytest.raises(AttributeError, match=text):
            getattr(module, name)


def test_what_is_to_be_used_in_place_of_builders_is_there() -> None:
    """Of what is ours."""
    for use in builders.INSTEAD.values():
        place = use.split()[0].rstrip(",")
        if place.startswith("deepspeed_ext."):
            module, _, name = place.rpartition(".")
            assert callable(getattr(import_module(module), name)), use
        elif place.endswith("Builder"):
            assert place in builders.BUILDERS


def test_utils_need_nothing() -> None:
    assert op_builder.UtilsBuilder().is_compatible()
    utils = op_builder.UtilsBuilder().load(verbose=False)
    tensors = [torch.arange(6.0).view(2, 3), torch.ones(4), torch.zeros(())]
    flat = utils.flatten(tensors)
    assert torch.equal(flat, torch.cat([t.reshape(-1) for t in tensors]))
    parts = utils.unflatten(flat, tensors)
    assert all(torch.equal(a, b) for a, b in zip(parts, tensors, strict=True))
    parts[1].fill_(5)
    assert (flat[6:10] == 5).all()


OPTIM = interfaces.interface_of("fused_optim")
FLAG = torch.zeros(1, dtype=torch.int32)


def lists(count: int) -> list[list[Tensor]]:
    """Return so many lists of three tensors."""
    made = torch.Generator().manual_seed(0)
    shapes = ((3, 5), (70,), ())
    return [[torch.randn(shape, generator=made) for shape in shapes] for _ in range(count)]


def stepped(kind: Any, params: list[Tensor], all_grads: list[list[Tensor]], **options: Any) -> Any:
    """Return parameters after steps of an optimizer of torch's, in float64."""
    wide = [nn.Parameter(p.double()) for p in params]
    optimizer = kind(wide, **options)
    for grads in all_grads:
        for p, g in zip(wide, grads, strict=True):
            p.grad = g.double()
        optimizer.step()
    return [p.detach().float() for p in wide]


def assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("div_scale", [-1.0, 8.0])
@pytest.mark.parametrize("mode", [0, 1])
def test_adam(mode: int, div_scale: float) -> None:
    params, first, second = lists(3)
    kind = torch.optim.AdamW if mode else torch.optim.Adam
    want = stepped(kind, params, [first, second], lr=0.1, weight_decay=0.3, betas=(0.8, 0.9))
    state = [[torch.zeros_like(p) for p in params] for _ in range(2)]
    one = interfaces.interface_of("cpu_adam").CPUAdamOptimizer(0.1, 0.8, 0.9, 1e-8, 0.3, bool(mode))
    alone = [[t.clone() for t in some] for some in (params, *state)]
    factor = max(div_scale, 1.0)
    for step, grads in ((1, first), (2, second)):
        scaled = [g * factor for g in grads]
        numbers = 0.1, 0.8, 0.9, 1e-8, step, mode, 1, 0.3
        multi_tensor_applier(
            OPTIM.multi_tensor_adam, FLAG, [scaled, params, *state], *numbers, div_scale
        )
        for p, g, m, v in zip(alone[0], scaled, *alone[1:], strict=True):
            one.step(step, 0.1, 0.8, 0.9, 1e-8, 0.3, True, p, g, m, v, div_scale)
    assert_same(params, want)
    assert all(map(torch.equal, params, alone[0]))
    deepspeeds = interfaces.interface_of("fused_adam").multi_tensor_adam
    deepspeeds(2048 * 32, FLAG, [first, params, *state], *numbers)  # which has no div_scale


@pytest.mark.parametrize("options", [
    dict(momentum=0.9, nesterov=True), dict(momentum=0.9, dampening=0.2), dict()
])  # fmt: skip
def test_sgd(options: dict[str, Any]) -> None:
    params, first, second, buffers = lists(4)
    want = stepped(torch.optim.SGD, params, [first, second], lr=0.1, weight_decay=0.3, **options)
    numbers = 0.3, options.get("momentum", 0.0), options.get("dampening", 0.0), 0.1
    nesterov = options.get("nesterov", False)
    for is_first, grads in ((True, first), (False, second)):
        given = [[g * 4 for g in grads], params, buffers]
        OPTIM.multi_tensor_sgd(65536, FLAG, given, *numbers, nesterov, is_first, False, 0.25)
    assert_same(params, want)
    before = [p.clone() for p in params]
    OPTIM.multi_tensor_sgd(65536, FLAG + 1, given, *numbers, nesterov, False, False, 1.0)
    assert all(map(torch.equal, params, before))


@pytest.mark.parametrize(("decay", "nvlamb"), [(0.01, False), (0.0, False), (0.0, True)])
def test_lamb(decay: float, nvlamb: bool) -> None:
    """By the formula, with clipping: a norm of twice the bound halves gradients."""
    params, grads = lists(2)
    state = [[torch.zeros_like(p) for p in params] for _ in range(2)]
    want = []
    for p, g in zip(params, grads, strict=True):
        wide, half = p.double(), g.double() / 2
        update = half / (half.abs() + 1e-6) + decay * wide
        ratio = wide.norm() / update.norm() if nvlamb or decay else 1.0
        want.append((wide - 0.1 * ratio * update).float())
    numbers = 0.1, 0.9, 0.99, 1e-6, 1, True, decay, True, 1, torch.tensor([6.0]), 3.0, nvlamb
    OPTIM.multi_tensor_lamb(65536, FLAG, [grads, params, *state], *numbers)
    assert_same(params, want)
    with pytest.raises(ValueError, match=r"^multi_tensor_lamb: grad_averaging is False, expected"):
        OPTIM.multi_tensor_lamb(1, FLAG, [grads, params, *state], *numbers[:7], False, *numbers[8:])
    with pytest.raises(ValueError, match=r"^multi_tensor_lamb: mode is 0, expected 1 with weight_"):
        old = (*numbers[:6], 0.1, True, 0, *numbers[9:])
        OPTIM.multi_tensor_lamb(1, FLAG, [grads, params, *state], *old)


def test_norms_and_scaling() -> None:
    [tensors] = lists(1)
    flag = torch.zeros(1, dtype=torch.int32)
    norm, each = OPTIM.multi_tensor_l2norm(65536, flag, [tensors], True)
    want = torch.stack([t.double().norm() for t in tensors])
    torch.testing.assert_close(each.double(), want, rtol=1e-6, atol=0)
    torch.testing.assert_close(norm.double(), want.norm().view(1), rtol=1e-6, atol=0)
    assert OPTIM.multi_tensor_l2norm(65536, flag, [tensors])[1].numel() == 0 and flag.item() == 0
    halves = [torch.full((9,), 6e-8, dtype=torch.float16), torch.tensor([6e4], dtype=torch.float16)]
    out = [torch.empty(9), torch.empty(1)]
    OPTIM.multi_tensor_scale(65536, flag, [halves, out], 1 / 1024)
    assert all(torch.equal(o, h.float() / 1024) for o, h in zip(out, halves, strict=True))
    assert flag.item() == 0
    OPTIM.multi_tensor_scale(65536, flag, [out, halves], 1024.0)
    assert torch.equal(halves[1], torch.tensor([6e4], dtype=torch.float16))
    OPTIM.multi_tensor_scale(65536, flag, [halves, halves], 0.5)
    assert torch.equal(halves[1], torch.tensor([3e4], dtype=torch.float16))
    OPTIM.multi_tensor_scale(65536, flag, [[torch.tensor([1.0, torch.inf])], [torch.empty(2)]], 2.0)
    assert flag.item() == 1
    again = torch.zeros(1, dtype=torch.int32)
    OPTIM.multi_tensor_l2norm(65536, again, [[torch.tensor([torch.nan])]])
    assert again.item() == 1
    parameters = [nn.Parameter(t) for t in tensors]
    assert not OPTIM.multi_tensor_l2norm(65536, again, [parameters])[0].requires_grad
    OPTIM.multi_tensor_scale(65536, again, [parameters, parameters], 2.0)
    assert all(p.is_leaf and p.requires_grad for p in parameters)


def test_layernorm() -> None:
    module = interfaces.interface_of("layernorm")
    x, dy = torch.randn(4, 3, 6), torch.randn(4, 3, 6)
    gamma, beta = torch.randn(3, 6), torch.randn(3, 6)
    out, mean, invvar = module.forward_affine(x, (3, 6), gamma, beta, 1e-5)
    wide = [t.double().requires_grad_() for t in (x, gamma, beta)]
    want = F.layer_norm(wide[0], (3, 6), *wide[1:], 1e-5)
    torch.testing.assert_close(out.double(), want.detach(), rtol=1e-5, atol=1e-5)
    variance, right = torch.var_mean(x.double().flatten(1), -1, correction=0)
    torch.testing.assert_close(mean.double(), right, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(invvar.double(), (variance + 1e-5).rsqrt(), rtol=1e-5, atol=0)
    grads = module.backward_affine(dy, mean, invvar, x, (3, 6), gamma, beta, 1e-5)
    for got, right in zip(grads, torch.autograd.grad(want, wide, dy.double()), strict=True):
        torch.testing.assert_close(got.double(), right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_softmax(causal: bool) -> None:
    name = "upper_triangle_masked" if causal else "masked"
    module = interfaces.interface_of(f"scaled_{name}_softmax")
    shape = (6, 7, 7) if causal else (2, 3, 7, 7)
    x, dy = torch.randn(shape), torch.randn(shape)
    mask = torch.rand(2, 1, 7, 7) < 0.3
    mask[..., 0] = False
    args = (0.5,) if causal else (mask.to(torch.uint8), 0.5)
    left_out = torch.ones(7, 7).triu(1).bool() if causal else mask
    wide = x.double().requires_grad_()
    want = (wide * 0.5).masked_fill(left_out, -torch.inf).softmax(-1)
    out = module.forward(x, *args)
    torch.testing.assert_close(out.double(), want.detach(), rtol=1e-5, atol=1e-6)
    [right] = torch.autograd.grad(want, wide, dy.double())
    grad = module.backward(dy, out, torch.tensor(0.5))
    torch.testing.assert_close(grad.double(), right, rtol=1e-4, atol=1e-6)
    if not causal:
        assert module.get_batch_per_block(7, 7, 2, 3) == 1


def test_experts() -> None:
    """Tokens to a buffer with gaps and back, against einsum with masks, with gradients."""
    module, inference = map(interfaces.interface_of, ("moe", "transformer_inference"))
    tokens, experts, capacity, width = 7, 3, 2, 5
    made = torch.Generator().manual_seed(0)
    choice = torch.randint(experts, (2, tokens), generator=made)
    choice[1] = (choice[0] + 1) % experts
    one_hot = F.one_hot(choice, experts).int()
    places = module.moe_cumsum(one_hot.flatten(0, 1))
    assert places.dtype == torch.int32 and places[0].sum() == 1 - experts
    rank = (places.view_as(one_hot) * one_hot).sum(-1)
    mask, dest_idx = (rank < capacity).int(), (choice * capacity + rank).int()
    assert 0 < mask.sum() < mask.numel()
    sec = F.one_hot(dest_idx.long().where(mask > 0, 0), experts * capacity) * mask[..., None]
    sec = sec.sum(0).view(tokens, experts, capacity).float()
    x = torch.randn(tokens, width, generator=made).requires_grad_()
    weights = torch.rand(tokens, experts, generator=made).requires_grad_()
    rows = module.MoeDispatch.apply(x, mask, dest_idx, experts * capacity)
    want_rows = inference.einsum_sec_sm_ecm(sec, x).flatten(0, 1)
    assert torch.equal(rows, want_rows)
    back = module.MoeCombine.apply(rows.view(experts, capacity, width), weights, mask, dest_idx,
                                   experts * capacity)  # fmt: skip
    want = torch.einsum("sec,se,ecm->sm", sec, weights, want_rows.view(experts, capacity, width))
    torch.testing.assert_close(back, want)
    grads = (torch.autograd.grad(out.square().sum(), [x, weights]) for out in (back, want))
    for got, right in zip(*grads, strict=True):
        torch.testing.assert_close(got, right)
    output, coef = torch.randn(2, 3, width), torch.randn(1, 2 * width)
    moe_res = torch.randn(2, 3, width)
    want = moe_res * coef[0, :width] + output * coef[0, width:]
    assert inference.moe_res_matmul(moe_res, coef, output) is output
    torch.testing.assert_close(output, want)

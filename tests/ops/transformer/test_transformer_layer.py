"""DeepSpeedTransformerLayer against a plain layer in float64, and what it keeps for gradients."""

import copy
import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from samples import BF16, F32
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from deepspeed_ext.ops import dropout_attention_ref
from deepspeed_ext.ops._dropout import draw_seeds, kept_ref
from deepspeed_ext.ops.transformer import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer

FLAGS = (
    *("pre_layer_norm", "normalize_invertible", "gelu_checkpoint"),
    *("attn_dropout_checkpoint", "stochastic_mode"),
)
SIZES = dict(hidden_size=24, heads=3, num_hidden_layers=2, initializer_range=0.3)
NONE = dict(attn_dropout_ratio=0.0, hidden_dropout_ratio=0.0)


def made(device: str = "cpu", dtype: torch.dtype = F32, **options: Any) -> Any:
    """Return a layer, of which no weight of a norm is 1 and no bias 0."""
    torch.manual_seed(0)
    config = DeepSpeedTransformerConfig(**(SIZES | NONE | options))
    layer = DeepSpeedTransformerLayer(config)
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return layer.to(device, dtype)


def plain(layer: Any, x: Tensor, mask: Tensor | None, seeds: tuple[Any, ...] = (None,) * 3) -> Any:
    """Return what the layer is to make of x, and the leaves of that, in float64."""
    p = {name: value.detach().cpu().double().requires_grad_()
         for name, value in layer.named_parameters()}  # fmt: skip
    c, x = layer.config, x.detach().cpu().double().requires_grad_()
    mask = None if mask is None else mask.cpu()

    def norm(t: Tensor, name: str) -> Tensor:
        return F.layer_norm(t, t.shape[-1:], p[f"{name}w"], p[f"{name}b"], c.layer_norm_eps)

    def dropped(t: Tensor, seed: Tensor | None) -> Tensor:
        return t * kept_ref(seed, c.hidden_dropout_ratio, t)

    def attention(t: Tensor) -> Tensor:
        joined = F.linear(t, p["attn_qkvw"], p["attn_qkvb"])
        q, k, v = joined.view(*t.shape[:2], 3, c.heads, -1).permute(2, 0, 3, 1, 4)
        rate = 0 if seeds[0] is None else c.attn_dropout_ratio
        out = dropout_attention_ref(q, k, v, mask, p=rate, seed=seeds[0])
        out = out.transpose(1, 2).reshape(t.shape)
        return dropped(F.linear(out, p["attn_ow"], p["attn_ob"]), seeds[1])

    def feed_forward(t: Tensor) -> Tensor:
        inner = F.gelu(F.linear(t, p["inter_w"], p["inter_b"]), approximate="tanh")
        return dropped(F.linear(inner, p["output_w"], p["output_b"]), seeds[2])

    if c.pre_layer_norm:
        total = x + attention(norm(x, "norm_"))
        out = total + feed_forward(norm(total, "attn_n"))
    else:
        normed = norm(x + attention(x), "attn_n")
        out = norm(normed + feed_forward(normed), "norm_")
    return out, [x, *p.values()]


def assert_close(got: list[Tensor], want: list[Tensor], bound: float) -> None:
    """Each element within so much of the largest one."""
    for i, (value, expected) in enumerate(zip(got, want, strict=True)):
        off = (value.detach().cpu().double() - expected.detach()).abs().max()
        assert off <= bound * expected.abs().max() + 1e-30, (i, off, expected.abs().max())


def results(layer: Any, x: Tensor, mask: Tensor | None, grad: Tensor) -> list[Tensor]:
    leaf = x.detach().requires_grad_()
    out = layer(leaf, mask)
    return [out.detach(), *torch.autograd.grad(out, [leaf, *layer.parameters()], grad)]


def inputs(device: str, dtype: torch.dtype = F32, length: int = 7) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    x, grad = (torch.randn(2, length, 24, generator=generator) for _ in range(2))
    mask = torch.zeros(2, 1, 1, length)
    mask[1, ..., length // 2 :] = -10000
    return x.to(device, dtype), mask.to(device), grad.to(device, dtype)


def test_all_combinations_of_flags(device: str) -> None:
    """With a mask; the same bits where a flag is to change nothing."""
    x, mask, grad = inputs(device)
    found: dict[tuple[bool, ...], list[Tensor]] = {}
    for flags in itertools.product([False, True], repeat=len(FLAGS)):
        layer = made(device, **dict(zip(FLAGS, flags, strict=True)))
        got = results(layer, x, mask, grad)
        out, leaves = plain(layer, x, mask)
        want = [out, *torch.autograd.grad(out, leaves, grad.cpu().double())]
        assert_close(got, want, 2e-5)
        if device == "cpu":
            assert all(map(torch.equal, found.setdefault(flags[:3], got), got))


class Again(torch.nn.Module):
    """A layer whose forward is run anew for its gradients."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        return checkpoint(self.layer, x, mask, use_reentrant=False)


@pytest.mark.parametrize("pre_layer_norm", [False, True])
def test_dropout(pre_layer_norm: bool) -> None:
    """The masks are those of three seeds that one draw gives, also where backward makes them."""
    x, mask, grad = inputs("cpu")
    for keeps_less in (False, True):
        layer = made(pre_layer_norm=pre_layer_norm, normalize_invertible=keeps_less,
                     gelu_checkpoint=keeps_less, attn_dropout_ratio=0.3,
                     hidden_dropout_ratio=0.4)  # fmt: skip
        torch.manual_seed(3)
        seeds = draw_seeds(x.device, 3)
        after = torch.rand(1)
        torch.manual_seed(3)
        got = results(layer, x, mask, grad)
        assert torch.equal(torch.rand(1), after)
        out, leaves = plain(layer, x, mask, seeds)
        assert_close(got, [out, *torch.autograd.grad(out, leaves, grad.double())], 2e-5)
        torch.manual_seed(3)
        assert all(map(torch.equal, results(Again(layer), x, mask, grad), got))
        layer.eval()
        out, _ = plain(layer, x, mask)
        assert_close([layer(x, mask)], [out], 2e-5)


def test_dropout_on_cuda(cuda: str) -> None:
    """Of outputs alone, which are dropped as on the CPU."""
    x, mask, grad = inputs(cuda)
    layer = made(cuda, hidden_dropout_ratio=0.4)
    torch.manual_seed(3)
    seeds = [seed.cpu() for seed in draw_seeds(x.device, 3)]
    torch.manual_seed(3)
    got = results(layer, x, mask, grad)
    out, leaves = plain(layer, x, mask, tuple(seeds))
    assert_close(got, [out, *torch.autograd.grad(out, leaves, grad.cpu().double())], 2e-5)
    layer = made(cuda, attn_dropout_ratio=0.5, hidden_dropout_ratio=0.4)
    assert not torch.equal(layer(x), layer(x))
    assert torch.equal(layer.eval()(x), layer(x))


@pytest.mark.parametrize("pre_layer_norm", [False, True])
def test_low_precision_and_autocast(pre_layer_norm: bool, device: str) -> None:
    x, mask, grad = inputs(device, BF16)
    for keeps_less in (False, True):
        options = dict(pre_layer_norm=pre_layer_norm, normalize_invertible=keeps_less,
                       gelu_checkpoint=keeps_less)  # fmt: skip
        layer = made(device, BF16, **options)
        got = results(layer, x, mask, grad)
        assert all(value.dtype == BF16 for value in got)
        out, leaves = plain(layer, x, mask)
        assert_close(got, [out, *torch.autograd.grad(out, leaves, grad.cpu().double())], 0.06)
        layer = made(device, **options)
        with torch.autocast(device, dtype=BF16):
            out = layer(x.float(), mask)
        assert out.dtype == F32
        out.sum().backward()
        assert all(p.grad.dtype == F32 for p in layer.parameters())


def kept(layer: Any, x: Tensor) -> int:
    """Return the bytes that autograd keeps for gradients, but for parameters, each memory once."""
    storages: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in layer.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    alive = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        alive.append(layer(x))
    return sum(storages.values())


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_what_is_kept_for_gradients(p: float, device: str) -> None:
    """In arrays of (batch, length, hidden), 4 of which an inner one takes: each flag takes away
    what it names, and nothing is kept of masks and probabilities."""
    length = 128
    x = torch.randn(2, length, 24, device=device)
    array, row = x.nbytes, x.nbytes // 24
    for flags in itertools.product([False, True], repeat=len(FLAGS)):
        options = dict(zip(FLAGS, flags, strict=True))
        layer = made(device, **options, attn_dropout_ratio=p, hidden_dropout_ratio=p)
        # The input and, behind or before norms: x; q, k, v; attention; a norm's result; both inner.
        arrays = 1 + 3 + 1 + 1 + 4 + 4
        arrays += 2  # what norms were given: of one before, its result, as the input is counted
        if options["normalize_invertible"]:
            # Before: both inputs go. Behind: both do, but for the layer's own result.
            arrays -= 2 if options["pre_layer_norm"] else 1
        if options["gelu_checkpoint"]:
            arrays -= 4
        found = kept(layer, x.requires_grad_())
        assert abs(found - arrays * array) <= 12 * row + 100, (options, found / array, arrays)


def test_no_array_of_all_scores_is_made(device: str) -> None:
    """Of 2,048 tokens with dropout the peak is far below that of probabilities of all heads."""
    if device != "cpu":
        pytest.skip("torch has a fused form with dropout there")
    from torch.profiler import ProfilerActivity, profile

    layer = made(attn_dropout_ratio=0.1, hidden_dropout_ratio=0.1)
    x = torch.randn(1, 2048, 24, requires_grad=True)
    assert kept(layer, x) < 18 * x.nbytes
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        layer(x).sum().backward()
    largest = max(event.cpu_memory_usage for event in profiler.events())
    assert largest <= 2048 * 2048 * 4 * 3 // 2


@pytest.mark.parametrize("pre_layer_norm", [False, True])
def test_can_be_compiled(pre_layer_norm: bool) -> None:
    x, mask, grad = inputs("cpu")
    for p, keeps_less in ((0.0, True), (0.3, False)):
        layer = made(pre_layer_norm=pre_layer_norm, attn_dropout_ratio=p, hidden_dropout_ratio=p,
                     normalize_invertible=keeps_less, gelu_checkpoint=keeps_less)  # fmt: skip
        torch.compiler.reset()
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        found = []
        for function in (layer, compiled):
            torch.manual_seed(4)
            leaf = x.detach().requires_grad_()
            out = function(leaf, mask)
            found.append([out, *torch.autograd.grad(out, [leaf, *layer.parameters()], grad)])
        assert_close(found[1], [t.double() for t in found[0]], 1e-5)


def test_frozen_parameters_and_a_graph_that_is_kept(device: str) -> None:
    x, mask, grad = inputs(device)
    for pre_layer_norm in (False, True):
        layer = made(device, pre_layer_norm=pre_layer_norm, hidden_dropout_ratio=0.3)
        torch.manual_seed(2)
        want = results(layer, x, mask, grad)
        for frozen in (["attn_qkvw", "inter_w", "output_b"], ["attn_ow", "attn_qkvb", "norm_w"]):
            parameters = dict(layer.named_parameters())
            leaves = [p.requires_grad_(name not in frozen) for name, p in parameters.items()]
            torch.manual_seed(2)
            out = layer(x, mask)  # which wants no gradient, either
            out += 1  # it is no view of another tensor
            for _ in range(2):
                out.backward(grad, retain_graph=True)
            for leaf, of_leaf in zip(leaves, want[2:], strict=True):
                assert (leaf.grad is None) == (not leaf.requires_grad)
                if leaf.grad is not None:
                    assert_close([leaf.grad], [2 * of_leaf.cpu().double()], 1e-5)
                leaf.grad = None


def test_no_gradient_of_a_gradient(device: str) -> None:
    """An error that says so, also where another gradient would be left."""
    x, mask, _ = inputs(device)
    for pre_layer_norm in (False, True):
        layer = made(device, pre_layer_norm=pre_layer_norm)
        for leaf in (x.requires_grad_(), layer.inter_w):
            out = layer(x, mask).sum()
            [found] = torch.autograd.grad(out, leaf, create_graph=True)
            with pytest.raises(RuntimeError, match="Layer: the gradient of a gradient is wanted"):
                (out + found.square().sum()).backward()


def test_no_rows() -> None:
    layer = made(attn_dropout_ratio=0.1, hidden_dropout_ratio=0.1)
    for shape in ((0, 3, 24), (2, 0, 24)):
        x = torch.randn(shape, requires_grad=True)
        out = layer(x)
        out.sum().backward()
        assert out.shape == shape and not layer.attn_qkvw.grad.any()


def test_a_generator_of_its_own() -> None:
    x, mask, _ = inputs("cpu")
    options = dict(attn_dropout_ratio=0.3, hidden_dropout_ratio=0.3)
    layer, other = (made(seed=seed, **options) for seed in (7, 8))
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = [layer(x, mask) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(*first) and not torch.equal(other(x, mask), first[0])
    again = made(seed=7, **options)
    assert all(torch.equal(again(x, mask), want) for want in first)
    assert torch.equal(copy.deepcopy(again)(x, mask), again(x, mask))
    out = checkpoint(again, x.clone().requires_grad_(), use_reentrant=False)
    with pytest.raises(RuntimeError, match="seed is 7, expected -1 under activation checkpointing"):
        out.sum().backward()


def test_given_weights_and_biases() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(24, 24)] * 4 + [(24,), (96, 24), (24, 96), (24,)]
    weights = [torch.randn(shape, generator=generator) for shape in shapes]
    biases = [torch.randn(shape[0], generator=generator) for shape in shapes]
    config = DeepSpeedTransformerConfig(hidden_size=24, heads=3, **NONE)
    layer = DeepSpeedTransformerLayer(config, weights, biases)
    assert torch.equal(layer.attn_qkvw, torch.cat(weights[:3]))
    assert torch.equal(layer.attn_qkvb, torch.cat(biases[:3]))
    names = ("attn_o", "attn_n", "inter_", "output_", "norm_")
    for name, weight, bias in zip(names, weights[3:], biases[3:], strict=True):
        assert torch.equal(getattr(layer, f"{name}w"), weight)
        assert torch.equal(getattr(layer, f"{name}b"), bias)
    assert not DeepSpeedTransformerLayer(config, weights).output_b.any()
    with pytest.raises(ValueError, match="initial_weights has 7 tensors, expected 8"):
        DeepSpeedTransformerLayer(config, weights[1:])
    uneven = [torch.ones(16, 24), torch.ones(32, 24), *weights[2:]]  # as many rows in all
    with pytest.raises(ValueError, match=r"initial_weights\[0\] has shape \[16, 24\], expected"):
        DeepSpeedTransformerLayer(config, uneven)
    with pytest.raises(TypeError, match=r"initial_weights\[7\] is None, expected a tensor$"):
        DeepSpeedTransformerLayer(config, [*weights[:7], None])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"initial_biases has shape \[1\] for output_b, expected"):
        DeepSpeedTransformerLayer(config, weights, [*biases[:6], torch.ones(1), biases[7]])


def test_new_weights() -> None:
    config = DeepSpeedTransformerConfig(hidden_size=256, heads=4, num_hidden_layers=8, **NONE,
                                        initializer_range=0.5)  # fmt: skip
    layer = DeepSpeedTransformerLayer(config)
    for name, parameter in layer.named_parameters():
        if name.endswith("b"):
            assert not parameter.any()
        if name in ("attn_nw", "norm_w"):
            assert (parameter == 1).all()
    for name, want in dict(attn_qkvw=0.5, attn_ow=0.125, inter_w=0.5, output_w=0.125).items():
        assert abs(getattr(layer, name).detach().std() / want - 1) < 0.02


def test_configs(tmp_path: Path) -> None:
    config = DeepSpeedTransformerConfig()
    assert (config.layer_norm_eps, config.pre_layer_norm, config.adjust_init_range) == (1e-12, 1, 1)
    values = dict(hidden_size=64, heads=4, seed=3, layer_norm_eps=1e-6, vocab_size=11)
    want = DeepSpeedTransformerConfig.from_dict(values)
    assert want.intermediate_size == 256 and want.vocab_size == 11  # type: ignore[attr-defined]
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"):
        path = tmp_path / encoding
        path.write_text(json.dumps(values | {"name": "déjà"}, ensure_ascii=False), encoding)
        read = DeepSpeedTransformerConfig.from_json_file(path)
        assert read == want and read.name == "déjà"  # type: ignore[attr-defined]
    x = torch.randn(1, 3, 24)
    for name in ("return_tuple", "huggingface"):
        given = DeepSpeedTransformerConfig.from_dict(SIZES | NONE | {name: True, "training": False})
        layer = DeepSpeedTransformerLayer(given)
        out = layer(x)
        assert isinstance(out, tuple) and len(out) == 1 and not layer.training


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("hidden_size is -1, expected more than 0", dict(hidden_size=-1)),
        ("heads is 0, expected more than 0", dict(heads=0)),
        ("hidden_size is 24, expected a multiple of heads, 5", dict(heads=5)),
        ("attn_dropout_ratio is -1, expected a number from 0 to 1", dict(attn_dropout_ratio=-1)),
        ("hidden_dropout_ratio is 2, expected a number from 0 to 1", dict(hidden_dropout_ratio=2)),
        ("initializer_range is -1, expected more than 0", dict(initializer_range=-1)),
        ("num_hidden_layers is -1, expected more than 0", dict(num_hidden_layers=-1)),
        ("layer_norm_eps is -1, expected 0 or more", dict(layer_norm_eps=-1)),
        ("initializer_range is inf, expected a finite number", dict(initializer_range=math.inf)),
        ("heads is True, expected a whole number", dict(heads=True)),
        ("heads is 4.0, expected a whole number", dict(heads=4.0)),
        ("seed is 1.5, expected a whole number", dict(seed=1.5)),
        ("attn_dropout_ratio is '0.1', expected a number", dict(attn_dropout_ratio="0.1")),
        ("pre_layer_norm is 'false', expected True or False", dict(pre_layer_norm="false")),
    ],
)
def test_refuses(text: str, options: dict[str, Any]) -> None:
    config = DeepSpeedTransformerConfig(**(SIZES | NONE | options))
    with pytest.raises(
        (TypeError, ValueError), match=f"^DeepSpeedTransformerConfig: {re.escape(text)}$"
    ):
        DeepSpeedTransformerLayer(config)


def test_refuses_what_it_does_not_do() -> None:
    layer, x = made(), torch.randn(1, 3, 24)
    names = ("head_mask", "layer_head_mask", "encoder_hidden_states", "past_key_value", "grads")
    for name in (*names, "output_attentions"):
        with pytest.raises(ValueError, match=f": {name} is given, expected none, as the layer"):
            layer(x, **{name: True})
    layer(x, None, None, None, None, None, None, False)
    with pytest.raises(
        ValueError, match=r"^DeepSpeedTransformerLayer: hidden_states has shape \[3"
    ):
        layer(x[0])
    with pytest.raises(TypeError, match=r"^DeepSpeedTransformerLayer: config is {}, expected a D"):
        DeepSpeedTransformerLayer({})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^DeepSpeedTransformerConfig: json_object is \[\], expe"):
        DeepSpeedTransformerConfig.from_dict([])  # type: ignore[arg-type]


def test_empty_batches_and_numbers_of_numpy() -> None:
    options = dict(heads=np.int64(3), attn_dropout_ratio=np.float32(0.1))
    layer = DeepSpeedTransformerLayer(DeepSpeedTransformerConfig(**(SIZES | NONE | options)))
    for shape in ((0, 5, 24), (2, 0, 24), (2, 5, 24)):
        x = torch.randn(shape, requires_grad=True)
        layer(x, torch.zeros(shape[0], 1, 1, shape[1])).sum().backward()
        assert x.grad is not None and x.grad.shape == shape

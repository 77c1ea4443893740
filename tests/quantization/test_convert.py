"""quantize_model: which layers it replaces and which it keeps, its report, its memory."""

import functools
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from model_cases import Conv1D, Tied, rows
from torch import Tensor, nn

from deepspeed_ext.quantization import (
    QuantizedLinear,
    Report,
    convert,
    load_quantized,
    quantize_model,
    save_quantized,
)
from deepspeed_ext.quantization.packing import half_step

TOKENS = torch.arange(20).view(2, 10)


def tied() -> Tied:
    torch.manual_seed(0)
    return Tied()


def test_replaces_linear_layers(device: str) -> None:
    model = tied().to(device)
    want = model(TOKENS.to(device))
    report = quantize_model(model, "int8", group_size=16)
    kinds = {name: type(model.get_submodule(name)).__name__ for name in report.layers}
    assert kinds == dict.fromkeys(["layers.0", "layers.2", "gate"], "QuantizedLinear")
    assert report.kept == {"head": "shares its weight with embed.weight"}
    assert model.head.weight is model.embed.weight
    torch.testing.assert_close(model(TOKENS.to(device)), want, rtol=0, atol=0.2)


@pytest.mark.parametrize("format", ["int8", "int4", "nf4", "fp8_e4m3", "fp8_e5m2"])
def test_reports_bytes_and_errors(format: str) -> None:
    """Against the formula in float64, which knows nothing of blocks of rows."""
    model = tied()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    nbytes = sum(t.nbytes for t in (*before.values(), model.table))
    report = quantize_model(model, format, group_size=16)
    assert report.bytes_before == nbytes
    tensors = {t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers())}
    assert report.bytes_after == sum(tensors.values())
    for name, of_layer in report.layers.items():
        layer = model.get_submodule(name)
        assert isinstance(layer, QuantizedLinear)
        weight = before[f"{name}.weight"]
        weight = weight.t() if name == "layers.2" else weight
        n, length = weight.shape
        assert of_layer.shape == (n, length) and of_layer.bytes_before == 4 * n * length
        assert of_layer.bytes_after == sum(buffer.nbytes for buffer in layer.buffers())
        off = (layer.dequantize(torch.float32).double() - weight.double()).abs()
        scales = layer.scales.double()[:, :n].t()
        step = scales.repeat_interleave(layer.layout.group_size, 1)[:, :length]
        largest = (off / step).amax() / half_step(layer.layout.of_format)
        assert of_layer.largest_error == pytest.approx(float(largest), rel=1e-4)
        assert of_layer.rms_error == pytest.approx(float(off.square().mean().sqrt()), rel=1e-5)
        assert 0.2 < of_layer.largest_error < 1.0001


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_errors_are_of_what_codes_stand_for(format: str, device: str) -> None:
    """They keep to their bound where float32 has few numbers between elements."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 64))
    with torch.no_grad():
        model[0].weight.copy_(1 + 1e-5 * torch.randn(64, 256))
    report = quantize_model(model.to(device), format, symmetric=False)
    assert 0.9 < report.layers["0"].largest_error <= 1 + 2**-15


def test_half_steps() -> None:
    """Half of the widest step between codes, counted out."""
    from deepspeed_ext.ops.quantization.formats import FORMATS, NF4_LEVELS

    for format in FORMATS:
        if format.float8 is not None:
            codes = torch.arange(256).to(torch.uint8).view(format.float8).double()
            levels = codes[codes.isfinite()].unique()
        else:
            levels = torch.tensor(NF4_LEVELS if format.name == "nf4" else range(-7, 8)).double()
        assert half_step(format) == pytest.approx(float(levels.diff().max()) / 2)


def test_weights_that_are_not_finite_show() -> None:
    model = nn.Sequential(nn.Linear(8, 4))
    with torch.no_grad():
        model[0].weight[1, 2] = float("inf")
    report = quantize_model(model)
    assert "nan" in str(report)
    assert torch.isnan(model(rows((1, 8)))).tolist() == [[False, True, False, False]]


class Special(nn.Linear):
    """A layer of another class."""


def hooked(name: str) -> nn.Module:
    layer = nn.Linear(8, 8)
    getattr(layer, name)(lambda *values: None)
    return layer


def with_own_forward() -> nn.Module:
    layer = nn.Linear(8, 8)
    layer.forward = layer.forward  # type: ignore[method-assign]
    return layer


def parametrized() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))


def with_weight_norm_as_it_was() -> nn.Module:
    layer = nn.Linear(8, 8)
    weight = layer.weight
    del layer.weight
    layer.register_parameter("weight_v", weight)
    layer.weight = weight * 1  # type: ignore[assignment]
    return layer


def with_a_bias_of_its_own() -> nn.Module:
    layer = nn.Linear(8, 8)
    bias = layer.bias
    del layer.bias
    layer.bias = bias * 1  # type: ignore[assignment]
    return layer


def holding(name: str, part: Any) -> nn.Module:
    layer = nn.Linear(8, 8)
    setattr(layer, name, part)
    return layer


def with_a_buffer() -> nn.Module:
    layer = nn.Linear(8, 8)
    layer.register_buffer("scale", torch.ones(8), persistent=False)
    return layer


def with_hooked_weight(name: str) -> nn.Module:
    layer = nn.Linear(8, 8)
    getattr(layer.weight, name)(lambda grad: None)
    return layer


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Special(8, 8), "is a Special"),
        (lambda: nn.MultiheadAttention(8, 2).out_proj, "is a NonDynamicallyQuantizableLinear"),
        (lambda: hooked("register_forward_hook"), "has hooks"),
        (lambda: hooked("register_forward_pre_hook"), "has hooks"),
        (lambda: hooked("register_full_backward_hook"), "has hooks"),
        (lambda: hooked("register_state_dict_post_hook"), "has hooks"),
        (parametrized, "is a ParametrizedLinear"),
        (with_own_forward, "has a forward of its own"),
        (with_weight_norm_as_it_was, "has a weight that is no parameter"),
        (with_a_bias_of_its_own, "has a bias that is no parameter"),
        (lambda: with_hooked_weight("register_hook"), "has hooks on its weight"),
        (
            lambda: with_hooked_weight("register_post_accumulate_grad_hook"),
            "has hooks on its weight",
        ),
        (lambda: holding("drop", nn.Dropout()), "has the module 'drop'"),
        (lambda: holding("gain", nn.Parameter(torch.ones(8))), "has the parameter 'gain'"),
        (with_a_buffer, "has the buffer 'scale'"),
        (lambda: holding("scale", torch.ones(8)), "has the attribute 'scale'"),
        (lambda: holding("adapters", [nn.Linear(8, 8)]), "has the attribute 'adapters'"),
    ],
)
def test_keeps_what_others_rely_on(make: Any, reason: str) -> None:
    layer = make()
    model = nn.ModuleDict({"kept": layer, "other": nn.Linear(8, 8)})
    report = quantize_model(model)
    assert report.kept == {"kept": reason} and list(report.layers) == ["other"]
    assert model["kept"] is layer


def test_keeps_a_layer_that_holds_another() -> None:
    """As adapters are hung in by hand; what is held is quantized where it is."""
    model = nn.ModuleDict({"fc": holding("lora", nn.Linear(8, 2)), "other": nn.Linear(8, 8)})
    report = quantize_model(model)
    assert report.kept == {"fc": "has the module 'lora'"}
    assert list(report.layers) == ["fc.lora", "other"]
    assert type(model["fc"]) is nn.Linear
    assert isinstance(model.get_submodule("fc.lora"), QuantizedLinear)


class Hidden(nn.Module):
    """Calls a layer that is not only where modules are."""

    def __init__(self, hide: Any) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        vars(self)["hidden"] = hide(self.fc)


@pytest.mark.parametrize(
    "hide",
    [
        lambda layer: [nn.ReLU(), layer],
        lambda layer: (layer,),
        lambda layer: {"first": layer},
        lambda layer: {layer},
        lambda layer: layer,
        lambda layer: [{"deep": [layer]}],
        lambda layer: {layer: 1},
        lambda layer: layer.forward,
        lambda layer: functools.partial(map, layer),
    ],
)
def test_keeps_layers_that_are_in_lists(hide: Any) -> None:
    """What calls them there would go on with the floats, while the report says otherwise."""
    model = nn.Sequential(Hidden(hide), nn.Linear(8, 8))
    fc = model[0].fc
    report = quantize_model(model)
    assert report.kept == {"0.fc": "is in the attribute '0.hidden' too"}
    assert list(report.layers) == ["1"] and model[0].fc is fc


def test_files_are_refused_for_layers_that_are_in_lists(tmp_path: Path) -> None:
    """Where what is random would go on."""
    plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    quantize_model(plain)
    save_quantized(plain, tmp_path / "model")
    listed = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    vars(listed)["calls"] = [listed[1]]
    with pytest.raises(
        ValueError, match="1 of the model is in the attribute 'calls' too, expected"
    ):
        load_quantized(listed, tmp_path / "model")
    assert type(listed[0]) is nn.Linear


def test_keeps_layers_that_share_memory() -> None:
    flat = torch.randn(4 * 64)
    model = nn.ModuleDict({name: nn.Linear(8, 8) for name in "abcd"})
    for name, begin in (("a", 0), ("b", 64), ("c", 96)):
        model[name].weight = nn.Parameter(flat[begin : begin + 64].view(8, 8))
    last = torch.randn(200)
    model["e"], model["f"] = nn.Linear(8, 8), nn.Linear(8, 8)
    model["e"].weight = nn.Parameter(last.as_strided((8, 8), (16, 1)))  # reaches up to 120
    model["f"].weight = nn.Parameter(last[100:164].view(8, 8))
    report = quantize_model(model)
    assert report.kept == {
        "b": "shares its weight with c.weight",
        "c": "shares its weight with b.weight",
        "e": "shares its weight with f.weight",
        "f": "shares its weight with e.weight",
    }


def test_tensors_without_memory() -> None:
    """What has no shape yet, and what is made of other tensors, is left alone."""
    view = QuantizedLinear(8, 8).weight
    model = nn.Sequential(nn.Linear(8, 8), nn.LazyLinear(4))
    model.register_buffer("view", view)
    model.register_buffer("coo", torch.eye(4).to_sparse())
    model.register_buffer("csr", torch.eye(4).to_sparse_csr())
    assert quantize_model(model).kept == {"1": "is a LazyLinear"}


def test_gradients_pass_after_inference_mode() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    with torch.inference_mode():
        quantize_model(model)
    x = rows((2, 8)).requires_grad_()
    assert torch.autograd.grad(model(x).sum(), x)[0].abs().sum() > 0


def test_one_layer_in_several_places() -> None:
    shared = nn.Linear(8, 8)
    model = nn.ModuleDict({"first": shared, "rest": nn.Sequential(shared, nn.ReLU(), shared)})
    report = quantize_model(model)
    assert model["first"] is model["rest"][0] is model["rest"][2]
    assert isinstance(model["first"], QuantizedLinear)
    assert report.layers["first"].also == ("rest.0", "rest.2")
    assert "rest.2: is first" in report.table(80)


@pytest.mark.parametrize(
    ("skip", "kept"),
    [
        ((), []),
        (("up",), ["a.up", "b.up"]),
        (("a",), ["a.up", "a.down"]),
        (("a.up", "b.d*"), ["a.up", "b.down"]),
        (("*.up",), ["a.up", "b.up"]),
        (("lm_head", "up"), ["a.up", "b.up"]),
        (("ups",), None),
    ],
)
def test_skips(skip: tuple[str, ...], kept: list[str] | None) -> None:
    model = nn.ModuleDict(
        {
            name: nn.ModuleDict({"up": nn.Linear(8, 8), "down": nn.Linear(8, 8)})
            for name in ("a", "b")
        }
    )
    if kept is None:
        with pytest.raises(
            ValueError, match=r"^quantize_model: skip has 'ups', expected names in the model$"
        ):
            quantize_model(model, skip=skip)
        return
    assert list(quantize_model(model, skip=skip).kept) == kept


def test_skips_the_head_of_a_language_model() -> None:
    model = nn.ModuleDict({"body": nn.Linear(8, 8), "lm_head": nn.Linear(8, 8)})
    assert quantize_model(model).kept == {"lm_head": "skip has 'lm_head'"}


def test_releases_each_weight_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a layer is quantized only it and those that follow have their floats."""
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(5)))
    floats = []
    for layer in model:  # an array lives as long as the memory of the tensor that is made of it
        array = numpy.zeros((8, 8), numpy.float32)
        layer.weight = nn.Parameter(torch.from_numpy(array))
        floats.append(weakref.ref(array))
    del array, layer
    alive = []
    replace = convert._replace

    def counted(*args: Any) -> Any:
        alive.append(sum(weight() is not None for weight in floats))
        return replace(*args)

    monkeypatch.setattr(convert, "_replace", counted)
    quantize_model(model)
    assert alive == [5, 4, 3, 2, 1]
    assert not any(weight() is not None for weight in floats)


@pytest.mark.parametrize("format", ["int4", "nf4"])
def test_extra_memory_is_some_blocks_of_rows(
    format: str, cuda: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed_ext.quantization import packing

    monkeypatch.setattr(packing, "_BLOCK_ELEMENTS", 1 << 20)
    model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(3)))
    model.to(cuda, torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    quantize_model(model, format)
    packed = 4096 * 4096 * 5 // 8
    assert torch.cuda.max_memory_allocated() - before < packed + 24 * (1 << 20)


def half_way(model: nn.Module) -> dict[str, str]:
    return {name: type(module).__name__ for name, module in model.named_modules()}


def with_weight(weight: Tensor) -> nn.Module:
    layer = nn.Linear(8, 8)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def with_bias(bias: Tensor) -> nn.Module:
    layer = nn.Linear(8, 8)
    layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer


def of_two() -> nn.Module:
    """A layer with a weight that wraps others: each of them would be written over the last."""
    from torch.testing._internal.two_tensor import TwoTensor

    return with_weight(TwoTensor(torch.ones(8, 8), torch.zeros(8, 8)))


@pytest.mark.parametrize(
    ("last", "error", "text"),
    [
        (
            lambda: nn.Linear(8, 8).double(),
            TypeError,
            "last: weight has dtype torch.float64, expec",
        ),
        (lambda: nn.Linear(8, 8, device="meta"), ValueError, "last has a weight on meta, expected"),
        (of_two, TypeError, "last: weight is a TwoTensor, expected a plain tensor"),
        (
            lambda: with_weight(torch.eye(8).to_sparse()),
            TypeError,
            "last: weight is torch.sparse_coo, expected a plain tensor",
        ),
        (
            lambda: with_bias(torch.ones(8).to_sparse()),
            TypeError,
            "last: bias is torch.sparse_coo, expected a plain tensor",
        ),
        (
            lambda: with_bias(torch.ones(1)),
            ValueError,
            r"last: bias has shape \[1\], expected \[8\]",
        ),
    ],
)
def test_refuses_before_it_changes_anything(last: Any, error: type[Exception], text: str) -> None:
    model = nn.ModuleDict({"first": nn.Linear(8, 8), "last": last()})
    before = half_way(model)
    with pytest.raises(error, match=f"^quantize_model: {text}"):
        quantize_model(model)
    with pytest.raises(ValueError, match=r"^quantize_model: format is 'int2', expected one of"):
        quantize_model(model["first"] and nn.Sequential(nn.Linear(8, 8)), "int2")
    assert half_way(model) == before


def test_refuses_models() -> None:
    with pytest.raises(TypeError, match=r"^quantize_model: model is a Linear, expected a module t"):
        quantize_model(nn.Linear(8, 8))
    with pytest.raises(TypeError, match=r"^quantize_model: model is a int, expected an nn.Module$"):
        quantize_model(3)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"^quantize_model: skip is the string 'head', expected sev"
    ):
        quantize_model(tied(), skip="head")


def test_is_silent_but_for_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    quantize_model(tied())
    quantize_model(tied(), progress=True)
    assert capfd.readouterr() == ("", "")


def test_draws_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    quantize_model(tied(), progress=True)
    assert "to int8" in shown.getvalue()


@pytest.mark.parametrize("columns", [40, 60, 80, 200])
def test_table_fits(columns: int) -> None:
    model = nn.Module()
    holder: nn.Module = model
    for name in ("model", "language_model", "decoder", "layers"):
        holder.add_module(name, nn.Module())
        holder = holder.get_submodule(name)
    holder.add_module("a_projection_of_a_long_name", nn.Linear(8, 8))
    holder.add_module("another_with_an_even_longer_name", Special(8, 8))
    report = quantize_model(model)
    lines = report.table(columns).splitlines()
    assert max(map(len, lines)) <= max(columns, 60) and len(lines) == 5
    assert "a_projection_of_a_long_name" in report.table(200)
    assert (
        str(Report("int8", {}, {}, 0, 0)) == "0 layers quantized, 0 kept\nmodel 0 B to 0 B (100.0%)"
    )


def test_layers_of_torch_that_read_weights(device: str) -> None:
    """A layer of a transformer, whose fast path takes the weights of its linear layers."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval().to(device)
    x = rows((2, 7, 32), device)
    want = layer(x)
    quantize_model(layer, "int8", group_size=32)
    torch.testing.assert_close(layer(x), want, rtol=0, atol=0.02)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), want, rtol=0, atol=0.02)


def test_conv1d_is_replaced() -> None:
    model = nn.Sequential(Conv1D(16, 8))
    x = rows((3, 8))
    want = model(x)
    quantize_model(model)
    torch.testing.assert_close(model(x), want, rtol=0, atol=0.1)

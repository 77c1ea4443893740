"""load_int4_checkpoint: files packed as GPTQ and AWQ publish it give the reference's logits."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed_ext.io import load, save
from deepspeed_ext.quantization import (
    QuantizedLinear,
    load_int4_checkpoint,
    load_quantized,
    save_quantized,
)

pytest.importorskip("safetensors.torch", reason="needs the package safetensors to write files")
from int4_files import AWQ, GPTQ, Source, awq, gptq, write

N, LENGTH = 24, 64


class Model(nn.Module):
    """An embedding, two layers and a head that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, LENGTH)
        self.up = nn.Linear(LENGTH, N)
        self.down = nn.Linear(N, LENGTH, bias=False)
        self.head = nn.Linear(LENGTH, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.down(self.up(self.embed(tokens))))
        return out


def sources(**options: Any) -> dict[str, Source]:
    return {
        "up": Source(N, LENGTH, 16, seed=1, **options),
        "down": Source(LENGTH, N, 16, seed=2),
    }


def rest() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "embed.weight": torch.randn(10, LENGTH, generator=generator).half(),
        "up.bias": torch.randn(N, generator=generator).half(),
    }


def logits(of: dict[str, Source]) -> tuple[Tensor, Tensor]:
    """Return what comes of the weights in float64, and how far float32 may be off."""
    others = {name: tensor.double() for name, tensor in rest().items()}
    x = others["embed.weight"]
    y = x @ of["up"].weight().t() + others["up.bias"]
    out = y @ of["down"].weight().t() @ x.t()
    large = [
        of[name].weight().abs() + of[name].scales.double()[of[name].groups].t() * 15 for name in of
    ]
    reach = (x.abs() @ large[0].t() + others["up.bias"].abs()) @ large[1].t() @ x.abs().t()
    return out, reach * 4 * (LENGTH + 8) * 2.0**-24


def assert_gives_the_logits(model: nn.Module, of: dict[str, Source]) -> None:
    want, error = logits(of)
    got = model.float()(torch.arange(10)).double()
    assert bool(((got - want).abs() <= error).all())
    for name, source in of.items():
        layer = model.get_submodule(name)
        assert isinstance(layer, QuantizedLinear)
        assert torch.equal(layer.dequantize(torch.float32).double(), source.weight())


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("method", ["gptq", "gptq_v2", "without g_idx", "awq"])
def test_gives_the_logits(tmp_path: Path, method: str, files: int) -> None:
    of = sources()
    if method == "awq":
        of["down"] = Source(LENGTH, N, 8, seed=2)  # a row is whole groups there
        of["up"] = Source(N, LENGTH, 8, seed=1)
    packed = {
        "gptq": lambda source: gptq(source),
        "gptq_v2": lambda source: gptq(source, less=0),
        "without g_idx": lambda source: gptq(source, g_idx=False),
        "awq": awq,
    }[method]
    config = {"gptq_v2": GPTQ | {"checkpoint_format": "gptq_v2"}, "awq": AWQ | {"group_size": 8}}
    layers = {name: packed(source) for name, source in of.items()}
    write(tmp_path, layers, rest(), config.get(method, GPTQ), files=files)
    model = load_int4_checkpoint(Model, tmp_path)
    assert isinstance(model, Model) and model.head.weight is model.embed.weight
    assert model.up.weight.dtype == torch.float16
    assert_gives_the_logits(model, of)


class WithAngles(Model):
    """One with buffers that are in no state dict, and tensors that a file need not have."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.arange(8) / 8, persistent=False)
        self.rope = nn.Module()
        self.rope.register_buffer("inv_freq", 10.0 ** -torch.arange(0, 1, 0.25), persistent=False)


def test_what_makes_a_model_is_called_without_parameters(tmp_path: Path, device: str) -> None:
    """The buffers that it makes are there; its parameters never were."""
    of = sources()
    write(tmp_path, {name: gptq(source) for name, source in of.items()}, rest(), GPTQ)
    made: list[WithAngles] = []

    def make() -> WithAngles:
        made.append(WithAngles())
        assert all(parameter.is_meta for parameter in made[0].parameters())
        return made[0]

    model = load_int4_checkpoint(make, tmp_path, device=device)
    assert model is made[0] and len(made) == 1
    assert_gives_the_logits(model.cpu(), of)
    want = WithAngles()
    model = load_int4_checkpoint(WithAngles, tmp_path, device=device)
    for name, buffer in want.named_buffers():
        assert model.get_buffer(name).device.type == device
        assert torch.equal(model.get_buffer(name).cpu(), buffer)
    with torch.device("meta"):
        on_meta = WithAngles()
    with pytest.raises(
        ValueError, match="has no 'angles', which is on meta in the model, expected"
    ):
        load_int4_checkpoint(on_meta, tmp_path)


def test_a_model_of_transformers(tmp_path: Path) -> None:
    """Its rotary frequencies are in no file."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=1, vocab_size=50)
    config = LlamaConfig(**sizes, num_attention_heads=4, tie_word_embeddings=False)
    floats = LlamaForCausalLM(config)
    state, layers, of = floats.state_dict(), {}, {}
    for name, module in floats.model.layers.named_modules():
        if isinstance(module, nn.Linear):
            at = f"model.layers.{name}"
            of[at] = Source(*module.weight.shape, 16, seed=len(of))
            layers[at] = gptq(of[at])
            state[f"{at}.weight"] = of[at].weight().float()
    others = {n: t for n, t in state.items() if n.removesuffix(".weight") not in of}
    write(tmp_path, layers, others, GPTQ)
    model: Any = load_int4_checkpoint(lambda: LlamaForCausalLM(config), tmp_path).eval()
    floats.load_state_dict(state)
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, floats.eval()(tokens).logits)


def test_loads_to_a_device(tmp_path: Path, device: str) -> None:
    of = sources()
    write(tmp_path, {name: gptq(source) for name, source in of.items()}, rest(), GPTQ)
    model = load_int4_checkpoint(Model, tmp_path, device=device)
    assert model.get_submodule("up").get_buffer("codes").device.type == device
    assert_gives_the_logits(model.cpu(), of)


def test_act_order(tmp_path: Path, device: str) -> None:
    """The columns of a group lie anywhere; x is put in their order."""
    groups = (torch.arange(LENGTH) // 16)[torch.randperm(LENGTH, generator=torch.manual_seed(5))]
    of = sources(groups=groups)
    packed = {name: gptq(source) for name, source in of.items()}
    write(tmp_path, packed, rest(), GPTQ | {"desc_act": True})
    model = load_int4_checkpoint(Model, tmp_path, device=device)
    up, down = model.get_submodule("up"), model.get_submodule("down")
    assert isinstance(up, QuantizedLinear) and up.layout.act_order
    assert isinstance(down, QuantizedLinear) and not down.layout.act_order
    in_order = sorted(range(LENGTH), key=lambda column: (int(groups[column]), column))
    assert up.get_buffer("order").tolist() == in_order  # on all devices, for the same bits
    without = {name: gptq(source, g_idx=name == "down") for name, source in of.items()}
    with pytest.raises(ValueError, match=r"up of .* has no g_idx, expected it, as desc_act"):
        (tmp_path / "without").mkdir()
        write(tmp_path / "without", without, rest(), GPTQ | {"desc_act": True})
        load_int4_checkpoint(Model, tmp_path / "without")
    x = torch.randn(70, LENGTH, device=device)
    got, few = up(x), up(x[:3])
    want = x.double() @ of["up"].weight().t().to(device) + up.bias.double()  # type: ignore[union-attr]
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(few.double(), want[:3], rtol=1e-4, atol=1e-4)
    assert_gives_the_logits(model.cpu(), of)
    save_quantized(model, tmp_path / "ours")
    assert_gives_the_logits(load_quantized(Model, tmp_path / "ours"), of)
    state = load(tmp_path / "ours")
    state["up.order"][3] = LENGTH
    with pytest.raises(RuntimeError, match="order has other numbers than 0 to 63, expected each o"):
        model.load_state_dict(state)
    save(state, tmp_path / "bad")
    with pytest.raises(ValueError, match="layer 'up' of which order has other numbers than 0 to"):
        load_quantized(Model, tmp_path / "bad")


def test_zeros_for_biases_that_no_layer_has(tmp_path: Path) -> None:
    """Packages have written them; what is not zero is not left out."""
    of = sources()
    layers = {name: gptq(source) for name, source in of.items()}
    write(tmp_path, layers, rest() | {"down.bias": torch.zeros(LENGTH)}, GPTQ)
    assert_gives_the_logits(load_int4_checkpoint(Model, tmp_path), of)
    write(tmp_path, layers, rest() | {"down.bias": torch.ones(LENGTH)}, GPTQ)
    with pytest.raises(ValueError, match=r"has 'down.bias', expected names that the model has"):
        load_int4_checkpoint(Model, tmp_path)


@pytest.mark.parametrize("stored", [7, 8])
def test_symmetric_zeros_in_both_versions(tmp_path: Path, stored: int) -> None:
    """Files of the second version that name the first are about; sym says what zeros are."""
    of = sources()
    for source in of.values():
        source.zeros.fill_(8)
    packed = {name: gptq(source, less=8 - stored) for name, source in of.items()}
    write(tmp_path, packed, rest(), GPTQ | {"sym": True})
    assert_gives_the_logits(load_int4_checkpoint(Model, tmp_path), of)


@pytest.mark.parametrize("method", ["gptq", "gptq_v2"])
def test_zeros_of_0(tmp_path: Path, method: str) -> None:
    """In the first version they borrow from what is next to them, as all words are 1s less."""
    of = sources()
    of["up"].zeros.random_(16, generator=torch.manual_seed(4))
    of["down"].zeros.fill_(0)
    packed = {name: gptq(source, less=int(method == "gptq")) for name, source in of.items()}
    write(tmp_path, packed, rest(), GPTQ | {"checkpoint_format": method})
    assert_gives_the_logits(load_int4_checkpoint(Model, tmp_path), of)


def test_scales_in_float32(tmp_path: Path) -> None:
    """Exact if they use 20 bits; else to the rounding of zero * scale, and of the element."""
    rounding = 2.0**-24
    for used, factor in ((20, 0), (24, 1)):
        of = sources()
        for source in of.values():
            bits = torch.rand_like(source.scales, dtype=torch.float64).mul(2**used).floor() + 1
            source.scales = (bits * 2.0 ** -(used + 6)).float()
        write(tmp_path, {name: gptq(source) for name, source in of.items()}, rest(), GPTQ)
        model = load_int4_checkpoint(Model, tmp_path)
        for name, source in of.items():
            layer = model.get_submodule(name)
            assert isinstance(layer, QuantizedLinear)
            got, want = layer.dequantize(torch.float32).double(), source.weight()
            of_offset = (source.zeros * source.scales.double())[source.groups].t()
            off = (got - want).abs()
            assert bool((off <= factor * rounding * (of_offset + want.abs() + off)).all())
            is_zero = (source.codes == source.zeros[source.groups]).t()
            assert is_zero.any() and bool((off[is_zero] > 0).any()) == bool(factor)


def test_whole_rows_and_older_settings(tmp_path: Path) -> None:
    of = {"up": Source(N, LENGTH, LENGTH, seed=1), "down": Source(LENGTH, N, N, seed=2)}
    write(tmp_path, {name: gptq(source) for name, source in of.items()}, rest(), {})
    (tmp_path / "config.json").unlink()
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": -1}))
    assert_gives_the_logits(load_int4_checkpoint(Model, tmp_path), of)


def test_integers_for_x(tmp_path: Path) -> None:
    of = sources()
    write(tmp_path, {name: gptq(source) for name, source in of.items()}, rest(), GPTQ)
    model = load_int4_checkpoint(Model, tmp_path, input_format="int8").float()
    want = logits(of)[0]
    off = (model(torch.arange(10)).double() - want).abs()
    assert 0 < float(off.max()) < float(want.abs().max()) / 20


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (GPTQ | {"bits": 3}, "has bits 3, expected 4"),
        (GPTQ | {"bits": "4"}, "has bits '4', expected int"),
        ({"quant_method": "gptq"}, "has bits None, expected int"),
        (GPTQ | {"quant_method": "exl2"}, "has quant_method 'exl2', expected gptq or awq"),
        (
            GPTQ | {"checkpoint_format": "marlin"},
            "has checkpoint_format 'marlin', expected gptq or",
        ),
        (GPTQ | {"group_size": 0}, "has group_size 0, expected 1 or more, or -1"),
        (AWQ | {"version": "gemv"}, "has version 'gemv', expected gemm"),
        (AWQ | {"zero_point": False}, "has zero_point false, expected true"),
        ("gptq", "has the quantization_config 'gptq', expected an object"),
        (
            GPTQ | {"group_size": 24},
            "for groups of 24",
        ),
        (GPTQ | {"sym": True}, "expected all 7, or all 8, as sym is true"),
        (GPTQ | {"desc_act": None}, "has desc_act None, expected bool"),
    ],
)
def test_refuses_settings(tmp_path: Path, config: Any, text: str) -> None:
    layers = {name: gptq(source) for name, source in sources().items()}
    write(tmp_path, layers, rest(), config)
    with pytest.raises(ValueError) as error:
        load_int4_checkpoint(Model, tmp_path)
    assert str(error.value).startswith("load_int4_checkpoint: ") and text in str(error.value)


def changed(part: str, to: Any) -> Any:
    def change(layers: dict[str, dict[str, Tensor]]) -> None:
        if to is None:
            del layers["up"][part]
        else:
            layers["up"][part] = to(layers["up"][part])

    return change


def cut_rows(layer: dict[str, Tensor]) -> None:
    layer.update(qweight=layer["qweight"][:, :20], scales=layer["scales"][:, :20])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (changed("qweight", None), "up of {} has no qweight, expected it beside"),
        (changed("qzeros", None), "up of {} has no qzeros, expected it beside"),
        (changed("scales", None), "up of {} has no scales, expected it beside"),
        (
            changed("qweight", lambda t: t.float()),
            "has qweight as torch.float32 of shape [8, 24], exp",
        ),
        (
            changed("qweight", lambda t: t[:7]),
            "has g_idx as torch.int32 of shape [64], expected whole numbers of shape [56]",
        ),
        (changed("qweight", lambda t: t[:6]), "expected floats of shape [3, 24] for groups of 16"),
        (changed("scales", lambda t: t.double()), "has scales as torch.float64"),
        (
            changed("qzeros", lambda t: t[:, :2]),
            "has qzeros as torch.int32 of shape [4, 2], expected",
        ),
        (lambda layers: cut_rows(layers["up"]), "up of {} has 20 rows, expected a multiple of 8"),
        (changed("qzeros", lambda t: t[:3]), "expected int32 of shape [4, 3] for scales of shape"),
        (
            changed("g_idx", lambda t: t[:9]),
            "has g_idx as torch.int32 of shape [9], expected whole",
        ),
        (
            changed("g_idx", lambda t: t * 0),
            "has g_idx with groups of other sizes, expected 16 col",
        ),
        (
            changed("g_idx", lambda t: t - 1),
            "has g_idx with groups of other sizes, expected 16 col",
        ),
    ],
)
def test_refuses_tensors(tmp_path: Path, change: Any, text: str) -> None:
    layers = {name: gptq(source) for name, source in sources().items()}
    change(layers)
    write(
        tmp_path,
        {n: {k: t.contiguous() for k, t in layer.items()} for n, layer in layers.items()},
        rest(),
        GPTQ,
    )
    model = Model()
    before = repr(model)
    with pytest.raises(ValueError) as error:
        load_int4_checkpoint(model, tmp_path)
    assert text.format(tmp_path) in str(error.value)
    assert repr(model) == before


def test_refuses_folders(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config.json has no quantization_config, expected one"):
        load_int4_checkpoint(Model, tmp_path)
    layers = {name: gptq(source) for name, source in sources().items()}
    write(tmp_path, {}, rest(), GPTQ)
    with pytest.raises(
        ValueError, match="has no tensor named qweight, expected one for each layer"
    ):
        load_int4_checkpoint(Model, tmp_path)
    write(tmp_path, {}, rest() | layers["up"], GPTQ)
    with pytest.raises(ValueError, match=r"has 'g_idx', expected the name of a layer before it"):
        load_int4_checkpoint(Model, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    write(tmp_path, layers, rest(), GPTQ, files=2)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"up.qweight": "../model.safetensors"}}))
    with pytest.raises(
        ValueError, match=r"weight_map .* expected names of files in the same folder"
    ):
        load_int4_checkpoint(Model, tmp_path)
    index.write_text("{")
    with pytest.raises(ValueError, match=r"index.json is not JSON"):
        load_int4_checkpoint(Model, tmp_path)
    index.unlink()
    with pytest.raises(FileNotFoundError):
        load_int4_checkpoint(Model, tmp_path)


def test_refuses_what_was_cut_short(tmp_path: Path) -> None:
    layers = {name: gptq(source) for name, source in sources().items()}
    write(tmp_path, layers, rest(), GPTQ)
    whole = (tmp_path / "model.safetensors").read_bytes()
    for nbytes in (3, 200, len(whole) - 1):
        (tmp_path / "model.safetensors").write_bytes(whole[:nbytes])
        with pytest.raises(ValueError, match=r"^io\.inspect: .* expected .*"):
            load_int4_checkpoint(Model, tmp_path)


def test_refuses_what_does_not_fit_the_model(tmp_path: Path) -> None:
    of = sources()
    write(tmp_path, {name: gptq(source) for name, source in of.items()}, {}, GPTQ)
    with pytest.raises(ValueError, match=r"has no 'embed.weight', which the model has"):
        load_int4_checkpoint(Model, tmp_path)
    write(tmp_path, {"other": gptq(of["up"])}, rest(), GPTQ)
    with pytest.raises(
        ValueError, match=r"other is not in the model, expected a linear layer with"
    ):
        load_int4_checkpoint(Model, tmp_path)


class WithTable(Model):
    """A model with a buffer that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(LENGTH), persistent=False)


@pytest.mark.parametrize(
    ("others", "text"),
    [
        ({"up.bias": torch.zeros(N).bool()}, "has 'up.bias' as torch.bool, expected float32, bf"),
        (
            {"embed.weight": torch.zeros(10, LENGTH).long()},
            "has 'embed.weight' as torch.int64, expected float32, bf",
        ),
        ({"up.bias": torch.zeros(N + 1)}, f"has 'up.bias' of shape [{N + 1}], expected [{N}]"),
        ({"more": torch.zeros(3)}, "has 'more', expected names that the model has"),
        ({}, "has no 'table', which is on meta in the model, expected values; give it some after"),
    ],
)
def test_refuses_before_it_changes_anything(
    tmp_path: Path, others: dict[str, Tensor], text: str
) -> None:
    packed = {name: gptq(source) for name, source in sources().items()}
    write(tmp_path, packed, rest() | others, GPTQ)
    with torch.device("meta"):
        model = WithTable()
    modules = dict(model.named_modules())
    with pytest.raises(ValueError) as error:
        load_int4_checkpoint(model, tmp_path)
    want = f"load_int4_checkpoint: {tmp_path} {text}".replace("bf", "bfloat16 or float16")
    assert str(error.value).startswith(want)
    assert dict(model.named_modules()) == modules
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))

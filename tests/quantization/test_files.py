"""save_quantized, load_quantized, state dicts: what comes back, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_cases import FLOAT8, KINDS, Kind, Tied, linear, model_of, rows
from torch import Tensor, nn

from deepspeed_ext.io import inspect, load, save
from deepspeed_ext.quantization import (
    QuantizedLinear,
    load_quantized,
    quantize_model,
    quantized_file_bytes,
    save_quantized,
)

TOKENS = torch.arange(20).view(2, 10)
EACH = [*KINDS, *((format, None, True) for format in FLOAT8)]


def with_input_format() -> Tied:
    model = model_of()
    quantize_model(model, "int4", input_format="int8")
    return model


@pytest.mark.parametrize("kind", EACH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "begin",
    [
        lambda dtype: Tied,
        lambda dtype: model_of(dtype=dtype),
        lambda dtype: model_of(("int8", 5, True), dtype),
    ],
)
def test_loads_what_was_saved(
    tmp_path: Path, kind: Kind, dtype: torch.dtype, begin: Callable[[torch.dtype], Any]
) -> None:
    """Into a model on meta, one of floats, and one of another format."""
    model = model_of(kind, dtype)
    save_quantized(model, tmp_path / "model")
    loaded = load_quantized(begin(dtype), tmp_path / "model")
    assert isinstance(loaded, Tied)
    assert torch.equal(loaded(TOKENS), model(TOKENS))
    assert loaded.head.weight is loaded.embed.weight
    for (name, want), (_, got) in zip(
        model.state_dict().items(), loaded.state_dict().items(), strict=True
    ):
        assert got.dtype == want.dtype and torch.equal(got, want), name
    for name, parameter in model.named_parameters():
        assert loaded.get_parameter(name).requires_grad == parameter.requires_grad
    assert repr(loaded) == repr(model)
    gate = loaded.get_submodule("gate")
    assert isinstance(gate, QuantizedLinear) and gate.weight.dtype == dtype


def test_the_model_is_never_floats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed_ext.quantization import packing

    save_quantized(model_of(KINDS[0]), tmp_path / "model")
    made: list[nn.Module] = []
    weights: list[bool] = []

    def factory() -> nn.Module:
        made.append(Tied())
        weights.extend(parameter.is_meta for parameter in made[0].parameters())
        return made[0]

    monkeypatch.delattr(packing, "quantize")
    loaded = load_quantized(factory, tmp_path / "model")
    assert len(made) == 1 and loaded is made[0] and weights == [True] * len(weights) != []


def test_activations_are_saved(tmp_path: Path) -> None:
    save_quantized(with_input_format(), tmp_path / "model")
    layer = load_quantized(Tied, tmp_path / "model").get_submodule("gate")
    assert isinstance(layer, QuantizedLinear) and layer.layout.input_format == "int8"


def test_activations_are_those_of_the_layer() -> None:
    """A state dict says what a weight is, not how it is multiplied."""
    model, other = model_of(("int4", 128, True)), with_input_format()
    assert not model.load_state_dict(other.state_dict()).missing_keys
    layer = model.get_submodule("gate")
    assert isinstance(layer, QuantizedLinear) and layer.layout.input_format is None


class Changed(Tied):
    """The same in a newer version: a table less, whole numbers more."""

    def __init__(self, table: bool = False) -> None:
        super().__init__()
        if not table:
            del self.table
        self.places = nn.Parameter(torch.arange(3), requires_grad=False)


def test_buffers_that_a_newer_model_has_not(tmp_path: Path) -> None:
    model = Changed(table=True).eval()
    quantize_model(model)
    save_quantized(model, tmp_path / "model")
    loaded = load_quantized(Changed().eval(), tmp_path / "model")
    assert "table" not in dict(loaded.named_buffers())
    assert torch.equal(loaded.get_parameter("places"), torch.arange(3))
    assert not any(module.training for module in loaded.modules())


def test_loads_to_a_device(tmp_path: Path, device: str) -> None:
    model = model_of(KINDS[3])
    save_quantized(model, tmp_path / "model")
    loaded = load_quantized(Tied, tmp_path / "model", device=device)
    assert {tensor.device.type for tensor in loaded.state_dict().values()} <= {device, "cpu"}
    want = model(TOKENS)
    torch.testing.assert_close(loaded(TOKENS.to(device)).cpu(), want, rtol=0, atol=1e-4)


def test_a_layer_in_two_places_stays_one(tmp_path: Path) -> None:
    shared = nn.Linear(8, 8)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    want = quantized_file_bytes(model)
    quantize_model(model)
    save_quantized(model, tmp_path / "model")
    assert (tmp_path / "model").stat().st_size == want
    again = nn.Linear(8, 8)
    loaded = load_quantized(nn.Sequential(again, nn.ReLU(), again), tmp_path / "model")
    assert isinstance(loaded, nn.Sequential) and loaded[0] is loaded[2]


@pytest.mark.parametrize("kind", EACH)
@pytest.mark.parametrize("on_meta", [False, True])
def test_file_sizes_are_as_predicted(tmp_path: Path, kind: Kind, on_meta: bool) -> None:
    model = model_of()
    if on_meta:
        with torch.device("meta"):
            model = Tied()
    want = quantized_file_bytes(model, kind[0], group_size=kind[1], symmetric=kind[2])
    save_quantized(model_of(kind), tmp_path / "model")
    assert (tmp_path / "model").stat().st_size == want


def test_a_prediction_changes_nothing() -> None:
    model = model_of()
    before = {name: type(module) for name, module in model.named_modules()}
    assert quantized_file_bytes(model) > quantized_file_bytes(model, skip=["layers"]) // 2
    assert {name: type(module) for name, module in model.named_modules()} == before


def test_files_are_plain_safetensors(tmp_path: Path) -> None:
    """Any reader of the format has all, and each layer says what it is."""
    safetensors = pytest.importorskip("safetensors.torch")
    model = model_of(("int4", 16, True))
    save_quantized(model, tmp_path / "model.safetensors")
    tensors = safetensors.load_file(tmp_path / "model.safetensors")
    assert tensors["gate.codes"].dtype == torch.uint8
    assert json.loads(bytes(tensors["gate._extra_state"].tolist())) == {
        "packing": 1,
        "format": "int4",
        "shape": [1, 48],
        "group_size": 16,
        "symmetric": True,
        "activations": None,
        "act_order": False,
        "dtype": "float32",
    }


def state_of(kind: Kind) -> dict[str, Tensor]:
    layer = QuantizedLinear.from_linear(
        linear(33, 70), kind[0], group_size=kind[1], symmetric=kind[2]
    )
    return dict(layer.state_dict())


def note(**changes: Any) -> Tensor:
    fields = json.loads(bytes(state_of(("int8", 32, True))["_extra_state"].tolist())) | changes
    return torch.tensor(list(json.dumps(fields).encode()), dtype=torch.uint8)


def changed(**tensors: Tensor | None) -> dict[str, Any]:
    state = state_of(("int8", 32, True)) | tensors
    return {name: tensor for name, tensor in state.items() if tensor is not None}


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize(
    ("state", "text"),
    [
        (
            lambda: state_of(("int4", 32, True)),
            "state_dict has at '' int4 in groups of 32, symmetric, of shape [33, 70], expected int8"
            " in groups of 32, symmetric, of shape [33, 70]",
        ),
        (lambda: state_of(("int8", 16, True)), "state_dict has at '' int8 in groups of 16,"),
        (lambda: state_of(("int8", 32, False)), "int8 in groups of 32, with offsets, of shape"),
        (
            lambda: {"weight": torch.zeros(33, 70)},
            "state_dict has 'weight', floats, expected codes",
        ),
        (
            lambda: changed(_extra_state=None),
            "has no tensor '_extra_state', expected it beside codes",
        ),
        (lambda: changed(scales=None), "has no tensor 'scales', expected it beside codes"),
        (lambda: changed(codes=torch.zeros(33, 128)), "codes is torch.float32 of shape [33, 128]"),
        (
            lambda: changed(codes=torch.zeros(33, 70, dtype=torch.uint8)),
            "expected torch.uint8 of sh",
        ),
        (
            lambda: changed(scales=torch.ones(3, 36).half()),
            "scales is torch.float16 of shape [3, 36]",
        ),
        (lambda: changed(_extra_state=note(packing=2)), "expected packing 1: its version is newer"),
        (lambda: changed(_extra_state=note(packing=True)), "expected packing 1: its version is ne"),
        (
            lambda: changed(_extra_state=note(shape=[33, -1])),
            "has shape [33, -1], expected two sizes",
        ),
        (lambda: changed(_extra_state=note(shape=[33])), "has shape [33], expected two sizes"),
        (lambda: changed(_extra_state=note(shape=[33, True])), "has shape [33, True], expected tw"),
        (lambda: changed(_extra_state=note(shape=[33, 2**31])), "has shape [33, 2147483648], exp"),
        (
            lambda: changed(_extra_state=note(format="int3")),
            "format is 'int3', expected one of int8",
        ),
        (lambda: changed(_extra_state=note(group_size=99)), "has group_size 99, expected 70"),
        (lambda: changed(_extra_state=note(group_size=True)), "group_size is True, expected 1 or"),
        (
            lambda: changed(_extra_state=note(dtype="int8")),
            "expected dtype float32, bfloat16, float",
        ),
        (lambda: changed(_extra_state=note(more=1)), "expected packing, format, shape, group_size"),
        (
            lambda: changed(_extra_state=torch.ones(4)),
            "is torch.float32 of shape [4], expected a te",
        ),
        (lambda: changed(_extra_state=torch.ones(5000).byte()), "of shape [5000], expected a text"),
        (
            lambda: changed(_extra_state=note().to("meta")),
            "state_dict['_extra_state'] is on meta, expected values",
        ),
        (
            lambda: changed(_extra_state=torch.ones(4).byte()),
            r"is b'\x01\x01\x01\x01', expected JSON",
        ),
    ],
)
def test_refuses_state_dicts(state: Any, text: str, assign: bool) -> None:
    layer = QuantizedLinear.from_linear(linear(33, 70), "int8", group_size=32)
    x = rows((2, 70))
    before = layer(x)
    for strict in (True, False):
        with pytest.raises(RuntimeError) as error:
            layer.load_state_dict(state(), strict=strict, assign=assign)
        assert "QuantizedLinear: " in str(error.value) and text in str(error.value)
    assert torch.equal(layer(x), before)


def test_state_dicts_that_lack_a_layer() -> None:
    model = nn.Sequential(QuantizedLinear(8, 4), nn.Linear(4, 2))
    rest = {name: t for name, t in model.state_dict().items() if name.startswith("1.")}
    assert "0.codes" in model.load_state_dict(rest, strict=False).missing_keys
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(rest)


def test_refuses_models_without_layers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^save_quantized: model has no QuantizedLinear, expec"):
        save_quantized(model_of(), tmp_path / "model")
    save(model_of().state_dict(), tmp_path / "floats")
    with pytest.raises(ValueError, match="floats' has no quantized layers, expected some; see io"):
        load_quantized(Tied, tmp_path / "floats")


class Wider(Tied):
    def __init__(self) -> None:
        super().__init__(49)


class Other(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Identity()  # type: ignore[assignment]


class Less(Tied):
    def __init__(self) -> None:
        super().__init__()
        del self.gate


class More(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(2, 2)


class Unbiased(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0] = nn.Linear(48, 64, bias=False)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (
            Wider,
            "layers.0 of the model has weight [64, 49], expected a linear layer with weight [64,",
        ),
        (Other, "gate of the model is a Identity, expected a linear layer with weight [1, 48]"),
        (Less, "gate is not in the model, expected a linear layer with weight [1, 48]"),
        (More, "has no 'more.bias', which the model has"),
        (Unbiased, "has 'layers.0.bias', expected names that the model has"),
    ],
)
def test_refuses_other_models(tmp_path: Path, kind: type[Tied], text: str) -> None:
    save_quantized(model_of(KINDS[0]), tmp_path / "model")
    model = kind()
    before = repr(model)
    with pytest.raises(ValueError) as error:
        load_quantized(model, tmp_path / "model")
    assert str(error.value).startswith("load_quantized: ") and text in str(error.value)
    assert repr(model) == before


def test_refuses_tensors_that_do_not_fit(tmp_path: Path) -> None:
    save_quantized(model_of(KINDS[0]), tmp_path / "model")
    for name, tensor, text in (
        (
            "gate.codes",
            torch.zeros(1, 64).byte(),
            r"\[1, 64\], expected torch.uint8 of shape \[1, 128",
        ),
        (
            "gate.scales",
            torch.zeros(2, 4).half(),
            "scales is torch.float16 of shape .* expected torch.float32",
        ),
        (
            "layers.0.bias",
            torch.zeros(3),
            r"has 'layers.0.bias' of shape \[3\], expected \[64",
        ),
        ("gate._extra_state", torch.zeros(3).byte(), "gate._extra_state is .* expected JSON"),
    ):
        tensors = load(tmp_path / "model") | {name: tensor}
        save(tensors, tmp_path / "bad", metadata=inspect(tmp_path / "model").metadata)
        with pytest.raises(ValueError, match=text):
            load_quantized(Tied, tmp_path / "bad")


def test_refuses_a_layer_without_a_name(tmp_path: Path) -> None:
    """That is the model, which nothing can take the place of."""
    layer = linear(33, 70)
    state = QuantizedLinear.from_linear(layer).state_dict()
    save({f".{name}": tensor for name, tensor in state.items()}, tmp_path / "model")
    with pytest.raises(
        ValueError, match=r"model': '' is the model itself, expected a linear layer w"
    ):
        load_quantized(layer, tmp_path / "model")
    assert [*layer.state_dict()] == ["weight", "bias"]


def test_refuses_what_was_cut_short(tmp_path: Path) -> None:
    save_quantized(model_of(KINDS[0]), tmp_path / "model")
    whole = (tmp_path / "model").read_bytes()
    for nbytes in (0, 7, 100, len(whole) - 1):
        (tmp_path / "cut").write_bytes(whole[:nbytes])
        with pytest.raises(ValueError, match=r"^io\.inspect: .*cut"):
            load_quantized(Tied, tmp_path / "cut")


def test_refuses_buffers_without_values(tmp_path: Path) -> None:
    save_quantized(model_of(KINDS[0]), tmp_path / "model")
    tensors = {name: t for name, t in load(tmp_path / "model").items() if name != "table"}
    save(tensors, tmp_path / "bare")
    with pytest.raises(
        ValueError, match="has no 'table', which is on meta in the model, expected values"
    ):
        load_quantized(Tied, tmp_path / "bare")
    assert torch.equal(load_quantized(Tied(), tmp_path / "bare").get_buffer("table"), Tied().table)


def test_a_model_that_lost_a_tie_is_filled(tmp_path: Path) -> None:
    """Files of others leave out names that are tied."""
    model = model_of(KINDS[0])
    save_quantized(model, tmp_path / "model")
    tensors = load(tmp_path / "model")
    del tensors["head.weight"]
    save(tensors, tmp_path / "less", metadata=inspect(tmp_path / "model").metadata)
    loaded = load_quantized(Tied, tmp_path / "less")
    assert isinstance(loaded, Tied) and loaded.head.weight is loaded.embed.weight
    assert torch.equal(loaded(TOKENS), model(TOKENS))
    copied = tensors | {"head.weight": tensors["embed.weight"].clone()}
    save(copied, tmp_path / "copied", metadata=inspect(tmp_path / "model").metadata)
    loaded = load_quantized(Tied, tmp_path / "copied")
    assert isinstance(loaded, Tied) and loaded.head.weight is loaded.embed.weight
    copied["head.weight"][0, 0] += 1
    save(copied, tmp_path / "other", metadata=inspect(tmp_path / "model").metadata)
    with pytest.raises(
        ValueError, match=r"has other values for 'head.weight' than for 'embed.weig"
    ):
        load_quantized(Tied, tmp_path / "other")

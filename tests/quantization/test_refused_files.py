"""load_quantized: what does not fit a model is refused before anything of the model is changed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_cases import KINDS, Kind, Tied, model_of
from torch import Tensor, nn

from deepspeed_ext.io import inspect, load, save
from deepspeed_ext.quantization import (
    QuantizedLinear,
    load_quantized,
    quantize_model,
    save_quantized,
)


def on_meta() -> Tied:
    with torch.device("meta"):
        return Tied()


def edited(path: Path, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    """Return a file with what another one has, but for a change."""
    tensors = load(path)
    change(tensors)
    save(tensors, path.with_name("edited"), metadata=inspect(path).metadata)
    return path.with_name("edited")


def assert_refused(model: nn.Module, path: Path, text: str) -> None:
    """Compare the text of the error, and the model with what it was."""
    modules = dict(model.named_modules(remove_duplicate=False))
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with pytest.raises(ValueError) as error:
        load_quantized(model, path)
    assert str(error.value) == f"load_quantized: {str(path)!r} {text}"
    assert dict(model.named_modules(remove_duplicate=False)) == modules
    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert after.keys() == tensors.keys()
    assert all(after[name] is tensor for name, tensor in tensors.items())


FLOATS = "float32, bfloat16 or float16"


@pytest.mark.parametrize("begin", [model_of, on_meta, lambda: model_of(KINDS[1])])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("embed.weight", torch.int64),
        ("embed.weight", torch.float64),
        ("layers.0.bias", torch.bool),
        ("layers.0.bias", torch.complex64),
        ("layers.2.bias", torch.float8_e4m3fn),
    ],
)
def test_refuses_other_dtypes_before_it_changes_anything(
    tmp_path: Path, name: str, dtype: torch.dtype, begin: Callable[[], Tied]
) -> None:
    save_quantized(model_of(KINDS[0]), tmp_path / "model")

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name].to(dtype)
        if name == "embed.weight":
            tensors["head.weight"] = tensors[name]

    path = edited(tmp_path / "model", change)
    assert_refused(begin(), path, f"has {name!r} as {dtype}, expected {FLOATS}")


def test_refuses_other_dtypes_of_buffers(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    quantize_model(model)
    save_quantized(model, tmp_path / "model")
    count = "1.num_batches_tracked"
    path = edited(tmp_path / "model", lambda tensors: tensors.update({count: torch.zeros(())}))
    text = f"has {count!r} as torch.float32, expected torch.int64"
    assert_refused(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), path, text)


@pytest.mark.parametrize(
    ("table", "text"),
    [
        (None, "has no 'table', which is on meta in the model, expected values; give it some after"
         " the model is made, or make the model on the CPU"),
        (torch.zeros(7), "has 'table' of shape [7], expected [48]"),
        (torch.zeros(48).long(), f"has 'table' as torch.int64, expected {FLOATS}"),
    ],
)  # fmt: skip
def test_refuses_buffers_on_meta_before_it_changes_anything(
    tmp_path: Path, table: Tensor | None, text: str
) -> None:
    save_quantized(model_of(KINDS[0]), tmp_path / "model")
    change = (lambda t: t.pop("table")) if table is None else (lambda t: t.update(table=table))
    path = edited(tmp_path / "model", change)
    assert_refused(on_meta(), path, text)
    assert isinstance(load_quantized(model_of(), path), Tied)


def in_two_places(quantized: bool) -> nn.Module:
    shared = nn.Linear(8, 8)
    model = nn.Sequential(shared, nn.BatchNorm1d(8), shared)
    model.append(model[1])
    if quantized:
        quantize_model(model)
    return model


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize(
    ("name", "first"),
    [
        *(("2.codes", "0.codes"), ("2.scales", "0.scales"), ("2.bias", "0.bias")),
        *(("3.weight", "1.weight"), ("3.running_mean", "1.running_mean")),
    ],
)
def test_refuses_other_contents_for_another_place(
    tmp_path: Path, name: str, first: str, quantized: bool
) -> None:
    """What is in two places of the model cannot have two contents."""
    save_quantized(in_two_places(True), tmp_path / "model")
    path = edited(tmp_path / "model", lambda t: t.update({name: t[name].clone()}))
    assert load_quantized(in_two_places(quantized), path)
    path = edited(tmp_path / "model", lambda t: t.update({name: t[name] + 1}))
    text = f"has other values for {name!r} than for {first!r}, expected the same, as the model ties"
    assert_refused(in_two_places(quantized), path, f"{text} them")


def test_refuses_other_notes_for_another_place(tmp_path: Path) -> None:
    save_quantized(in_two_places(True), tmp_path / "model")
    other = QuantizedLinear(8, 8, input_format="int8").get_extra_state()
    path = edited(tmp_path / "model", lambda t: t.update({"2._extra_state": other}))
    text = "has other values for '2._extra_state' than for '0._extra_state', expected the same"
    assert_refused(in_two_places(False), path, f"{text}, as the model ties them")


def with_hook(model: Tied) -> None:
    model.gate.register_forward_hook(lambda *values: None)


def with_module(model: Tied) -> None:
    model.gate.lora = nn.Linear(48, 2)  # type: ignore[assignment]


@pytest.mark.parametrize("kind", [None, KINDS[1]])
@pytest.mark.parametrize(
    ("change", "lost"), [(with_hook, "has hooks"), (with_module, "has the module 'lora'")]
)
def test_refuses_to_lose_what_hangs_on_a_layer(
    tmp_path: Path, change: Callable[[Tied], None], lost: str, kind: Kind | None
) -> None:
    save_quantized(model_of(KINDS[0]), tmp_path / "model")
    model = model_of(kind)
    change(model)
    with pytest.raises(ValueError) as error:
        load_quantized(model, tmp_path / "model")
    text = f"gate of the model {lost}, expected a plain layer, as that would be lost"
    assert str(error.value) == f"load_quantized: {str(tmp_path / 'model')!r}: {text}"


def test_a_layer_alone_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    text = "model is a QuantizedLinear, expected a module that has some; for one layer there is"
    with pytest.raises(TypeError, match=f"^save_quantized: {text} state_dict$"):
        save_quantized(QuantizedLinear(8, 4), tmp_path / "model")
    assert not (tmp_path / "model").exists()

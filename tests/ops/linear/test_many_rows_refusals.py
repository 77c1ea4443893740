"""Linear layers on more rows than kernels take refuse what they refuse on few, in their words."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from quantized_linear_cases import WEIGHTS, weight_of
from torch import Tensor

from deepspeed_ext.ops import quantized_linear, skinny_linear, unpack_weight

N, K = 24, 64
FEW, MANY = 3, 70
Options = dict[str, Any]
Change = Callable[[int, str], Options]


def floats(*shape: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, device=device, dtype=dtype)


# What is given instead, by the number of rows and the device.
OTHERS: dict[str, Change] = {
    "x float64": lambda rows, device: dict(x=floats(rows, K, device=device).double()),
    "x int64": lambda rows, device: dict(x=floats(rows, K, device=device).long()),
    "x bool": lambda rows, device: dict(x=floats(rows, K, device=device).bool()),
    "bias of one": lambda rows, device: dict(bias=floats(1, device=device)),
    "bias of a row": lambda rows, device: dict(bias=floats(1, N, device=device)),
    "bias of all rows": lambda rows, device: dict(bias=floats(rows, N, device=device)),
    "bias 0-d": lambda rows, device: dict(bias=floats(device=device)),
    "bias float16": lambda rows, device: dict(bias=floats(N, device=device).half()),
    "bias of a gate": lambda rows, device: dict(
        bias=floats(1, device=device), gated=True, activation="silu"
    ),
    "bias of half": lambda rows, device: dict(
        bias=floats(N // 2, device=device), gated=True, activation="silu"
    ),
    "activated": lambda rows, device: dict(bias=floats(1, device=device), activation="gelu"),
    "residual of a row": lambda rows, device: dict(residual=floats(N, device=device)),
    "residual of a gate": lambda rows, device: dict(
        residual=floats(rows, N, device=device), gated=True, activation="silu"
    ),
    "residual wider": lambda rows, device: dict(
        x=floats(rows, K, device=device).half(), residual=floats(rows, N, device=device)
    ),
    "residual bfloat16": lambda rows, device: dict(
        residual=floats(rows, N, device=device).bfloat16()
    ),
    "gated alone": lambda rows, device: dict(gated=True),
}
each_other = pytest.mark.parametrize("other", OTHERS)


def assert_refused_alike(layer: Callable[..., Tensor], change: Change, device: str) -> None:
    layer(floats(FEW, K, device=device))  # loads the library, so that it is the one that refuses
    texts = []
    for rows in (FEW, MANY):
        given = dict(x=floats(rows, K, device=device)) | change(rows, device)
        with pytest.raises(ValueError) as error:
            layer(**given)
        texts.append(str(error.value).replace(f"[{rows}, ", "[rows, "))
    assert texts[0] == texts[1]


@each_other
@pytest.mark.parametrize("kind", WEIGHTS, ids=str)
def test_quantized_linear(kind: tuple[str, bool], other: str, device: str) -> None:
    weight = weight_of(N, K, *kind, 32, device)
    for input_format in (None, "int8") if kind[0] != "nf4" else (None,):

        def layer(x: Tensor, input_format: str | None = input_format, **options: Any) -> Tensor:
            return quantized_linear(x, weight, input_format=input_format, **options)

        assert_refused_alike(layer, OTHERS[other], device)


OTHER_WEIGHTS: dict[str, Change] = {
    "weight of one dimension": lambda rows, device: dict(weight=floats(K, device=device)),
    "weight of three": lambda rows, device: dict(weight=floats(1, N, K, device=device)),
    "weight of other rows": lambda rows, device: dict(weight=floats(N, K + 1, device=device)),
    "weight transposed": lambda rows, device: dict(weight=floats(K, N, device=device).t()),
    "weight bfloat16": lambda rows, device: dict(weight=floats(N, K, device=device).bfloat16()),
    "odd": lambda rows, device: dict(
        weight=floats(N + 1, K, device=device), gated=True, activation="silu"
    ),
}


@pytest.mark.parametrize("other", [*OTHERS, *OTHER_WEIGHTS])
def test_skinny_linear(other: str, device: str) -> None:
    def layer(x: Tensor, weight: Tensor | None = None, **options: Any) -> Tensor:
        weight = floats(N, K, device=device, dtype=x.dtype) if weight is None else weight
        return skinny_linear(x, weight, **options)

    assert_refused_alike(layer, (OTHERS | OTHER_WEIGHTS)[other], device)


def test_gates_of_odd_weights(device: str) -> None:
    weight = weight_of(N + 1, K, "int8", False, 32, device)
    for rows in (FEW, MANY):
        text = "^quantized_linear: codes has 25 rows, expected an even number, as gated is True$"
        with pytest.raises(ValueError, match=text):
            quantized_linear(floats(rows, K, device=device), weight, gated=True, activation="silu")


def test_other_devices(cuda: str) -> None:
    weight = weight_of(N, K, "int8", False, 32, cuda)
    for rows in (FEW, MANY):
        x = floats(rows, K, device=cuda)
        for name, shape in (("bias", (N,)), ("residual", (rows, N))):
            text = f"{name} is on cpu, expected cuda:0"
            given = {name: floats(*shape, device="cpu")}
            with pytest.raises(ValueError, match=f"^quantized_linear: {text}$"):
                quantized_linear(x, weight, **given)
            with pytest.raises(ValueError, match=f"^skinny_linear: {text}$"):
                skinny_linear(x, floats(N, K, device=cuda), **given)
        with pytest.raises(
            ValueError, match=r"^quantized_linear: codes is on cuda:0, expected cpu"
        ):
            quantized_linear(x.cpu(), weight)
        with pytest.raises(ValueError, match=r"^skinny_linear: weight is on cuda:0, expected cpu$"):
            skinny_linear(x.cpu(), floats(N, K, device=cuda))


def test_codes_of_other_shapes(device: str) -> None:
    weight = weight_of(N, K, "int8", False, 32, device)
    for codes in (weight.codes.flatten(), weight.codes[0, 0]):
        for rows in (FEW, MANY):
            with pytest.raises(
                ValueError, match=r"^quantized_linear: codes has shape .*, expected"
            ):
                quantized_linear(floats(rows, K, device=device), weight._replace(codes=codes))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8])
def test_unpack_weight_refuses_other_dtypes(dtype: torch.dtype, device: str) -> None:
    named = str(dtype).removeprefix("torch.")
    text = f"unpack_weight: dtype is {named}, expected float32, bfloat16 or float16"
    with pytest.raises(ValueError, match=f"^{text}$"):
        unpack_weight(weight_of(N, K, "int4", True, 32, device), dtype)

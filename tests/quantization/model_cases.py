"""What the tests of quantized models share: models, layers and how far a result may be off."""

import math

import torch
from torch import Tensor, nn

from deepspeed_ext.quantization import QuantizedLinear, quantize_model

PACKED = ("int8", "int4", "nf4")
FLOAT8 = ("fp8_e4m3", "fp8_e5m2")
# Of each format with and without offsets, in groups that divide a row of 70 and that do not.
KINDS = (
    *(("int8", 32, True), ("int8", None, True), ("int8", 7, False)),
    *(("int4", 32, True), ("int4", 35, False), ("nf4", 64, True)),
)
Kind = tuple[str, int | None, bool]
ROUNDING = torch.finfo(torch.float32).eps / 2


class Conv1D(nn.Module):
    """transformers' layer of this name: a linear layer whose weight lies the other way round."""

    def __init__(self, n: int, length: int) -> None:
        super().__init__()
        self.nf, self.nx = n, length
        self.weight = nn.Parameter(torch.randn(length, n) / length**0.5)
        self.bias = nn.Parameter(torch.randn(n))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


Conv1D.__module__ = "transformers.pytorch_utils"


class Tied(nn.Module):
    """A language model in outline: a head that is tied to an embedding, layers, a table."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, width)
        self.layers = nn.Sequential(nn.Linear(width, 64), nn.GELU(), Conv1D(width, 64))
        self.gate = nn.Linear(width, 1, bias=False)
        self.head = nn.Linear(width, 20, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(width) / width, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.get_buffer("table")
        x = x + self.layers(x) * self.gate(x).sigmoid()
        out: Tensor = self.head(x)
        return out


def model_of(kind: Kind | None = None, dtype: torch.dtype = torch.float32) -> Tied:
    """Return a model, the same each time, with its layers as floats or of a kind."""
    torch.manual_seed(0)
    model = Tied().to(dtype)
    if kind is not None:
        quantize_model(model, kind[0], group_size=kind[1], symmetric=kind[2])
    return model


def linear(
    n: int, length: int, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> nn.Linear:
    """Return a layer, the same for the same sizes."""
    torch.manual_seed(n * 1000 + length)
    return nn.Linear(length, n).to(device, dtype)


def rows(shape: tuple[int, ...], device: str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    """Return numbers, the same for the same shape."""
    torch.manual_seed(math.prod(shape))
    return torch.randn(shape).to(device, dtype)


def assert_multiplies(layer: QuantizedLinear, x: Tensor, got: Tensor) -> None:
    """Compare with the weight that the layer stands for, multiplied in float64.

    A number that is added up is rounded at most once by each addition, and a few times before. What
    torch multiplies, of over 64 rows, is rounded to the dtype of x before and after.
    """
    weight = layer.dequantize(torch.float32).cpu().double()
    bias = torch.zeros(()) if layer.bias is None else layer.bias.detach().cpu().double()
    wide, unit = x.detach().cpu().double(), torch.finfo(x.dtype).eps / 2
    want = wide @ weight.t() + bias
    terms = weight.abs()
    if not layer.layout.symmetric:  # products of codes and of offsets are added up on their own
        offsets = layer.get_buffer("offsets").cpu().double()[:, : layer.out_features].t()
        offsets = offsets.repeat_interleave(layer.layout.group_size, 1)[:, : layer.in_features]
        terms = (weight - offsets).abs() + offsets.abs()
    reach = wide.abs() @ terms.t() + bias.abs()
    by_torch = x.shape[:-1].numel() > 64
    error = (2 * x.shape[-1] + 8) * ROUNDING * reach + unit * (reach if by_torch else 0)
    error = error + unit * (want.abs() + bias.abs() + error)
    off = (got.detach().cpu().double() - want).abs()
    assert got.shape == want.shape and got.dtype == x.dtype
    assert bool((off <= error + torch.finfo(x.dtype).smallest_normal).all()), float(off.max())

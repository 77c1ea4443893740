"""QuantizedLinear: what it computes, what moves and copies leave of it, what it refuses."""

import copy
import pickle
import pickletools
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from model_cases import FLOAT8, KINDS, PACKED, Conv1D, Kind, assert_multiplies, linear, rows
from torch import Tensor, nn
from torch._dynamo.testing import AotEagerAndRecordGraphs

from deepspeed_ext.ops.quantization.packed_weight import PackedWeight, pack_weight
from deepspeed_ext.quantization import QuantizedLinear
from deepspeed_ext.quantization.packing import half_step

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
each_kind = pytest.mark.parametrize(("format", "group_size", "symmetric"), KINDS)


def made(format: str, group_size: int | None = 32, symmetric: bool = True) -> QuantizedLinear:
    return QuantizedLinear.from_linear(
        linear(33, 70), format, group_size=group_size, symmetric=symmetric
    )


@each_kind
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("shape", [(70,), (3, 5, 70), (0, 70), (65, 70)])
def test_multiplies(
    format: str,
    group_size: int | None,
    symmetric: bool,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    device: str,
) -> None:
    layer = made(format, group_size, symmetric).to(device, dtype)
    x = rows(shape, device, dtype)
    assert_multiplies(layer, x, layer(x))


@each_kind
def test_stands_for_the_weight(
    format: str, group_size: int | None, symmetric: bool, device: str
) -> None:
    """Each element is off by half a step of its group, and where blocks of rows end too."""
    source = linear(37, 70, device)
    layer = QuantizedLinear.from_linear(source, format, group_size=group_size, symmetric=symmetric)
    scales = layer.scales.double()[:, :37].t()
    step = scales.repeat_interleave(layer.layout.group_size, 1)[:, :70]
    off = (layer.dequantize(F32).double() - source.weight.double()).abs()
    assert bool((off <= step * half_step(layer.layout.of_format) * (1 + 1e-4)).all())
    assert bool((off > step / 100).any())


def test_blocks_of_rows_are_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed_ext.quantization import packing

    torch.manual_seed(0)
    source = Conv1D(33, 70)  # rows of its weight do not lie in one piece

    def layer_of(kind: Kind) -> QuantizedLinear:
        options: dict[str, Any] = dict(group_size=kind[1], symmetric=kind[2])
        return QuantizedLinear.from_linear(source, kind[0], **options)

    kinds = (*KINDS, *((format, None, True) for format in FLOAT8))
    whole = {kind: layer_of(kind).state_dict() for kind in kinds}
    calls = {name: Mock(wraps=getattr(packing, name)) for name in ("quantize", "quantize_packed_")}
    for elements in (1, 70 * 6):
        monkeypatch.setattr(packing, "_BLOCK_ELEMENTS", elements)
        for name, call in calls.items():
            monkeypatch.setattr(packing, name, call)
        for kind in kinds:
            blocks = layer_of(kind).state_dict()
            assert all(torch.equal(blocks[name], whole[kind][name]) for name in blocks)
    each = -(-33 // 4) + -(-33 // 8)
    assert calls["quantize_packed_"].call_count == each * len(KINDS)
    assert calls["quantize"].call_count == each * len(FLOAT8)


@pytest.mark.parametrize("format", [*PACKED, *FLOAT8])
@pytest.mark.parametrize("size", [(0, 8), (8, 0), (0, 0)])
def test_zero_sizes(format: str, size: tuple[int, int]) -> None:
    layer = QuantizedLinear.from_linear(nn.Linear(size[1], size[0]), format)
    x = rows((3, size[1]))
    assert torch.equal(layer(x), nn.functional.linear(x, torch.zeros(size), layer.bias))


def test_is_as_the_layer_was() -> None:
    """In training or not; and under inference_mode too, gradients can pass later."""
    assert made("int8").training
    with torch.inference_mode():
        layer = QuantizedLinear.from_linear(nn.Linear(8, 4, bias=False).eval())
    assert not layer.training
    x = rows((3, 8)).requires_grad_()
    assert torch.autograd.grad(layer(x).sum(), x)[0].shape == x.shape


def test_conv1d() -> None:
    source = Conv1D(33, 70)
    layer = QuantizedLinear.from_linear(source, "int8", group_size=35)
    assert (layer.in_features, layer.out_features) == (70, 33)
    assert layer.bias is source.bias
    x = rows((4, 70))
    assert_multiplies(layer, x, layer(x))
    torch.testing.assert_close(layer(x), source(x), rtol=0, atol=0.5)


def test_integers_for_x() -> None:
    layer = QuantizedLinear.from_linear(linear(33, 70), "int4", input_format="int8")
    x = rows((4, 70))
    off = (layer(x) - made("int4", 128)(x)).abs()
    assert 0 < float(off.max()) < 0.1


@pytest.mark.parametrize("format", FLOAT8)
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_multiplies_floats_of_8_bits(format: str, dtype: torch.dtype, device: str) -> None:
    """x is rounded to 4 bits of a number; GPUs add up products with 13 bits behind the largest."""
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs compute capability 8.9")
    layer = made(format).to(device, dtype)
    x = rows((5, 3, 70), device, dtype)
    weight, wide = layer.dequantize(F32).double(), x.double()
    assert layer.bias is not None
    want = wide @ weight.t() + layer.bias.double()
    # Of e4m3 half a unit in the last place is 1/16 of a number, or of 2^-6 times the scale.
    of_x = torch.maximum(wide.abs() / 16, wide.abs().amax(-1, keepdim=True) / 448 / 2**10)
    error = of_x @ weight.abs().t() + (wide.abs() @ weight.abs().t()).clamp_min(1e-3) * 2**-11
    error = error + (want.abs() + layer.bias.double().abs() + error) * torch.finfo(dtype).eps
    got = layer(x)
    assert got.dtype == dtype and got.shape == (5, 3, 33)
    assert bool(((got.double() - want).abs() <= error).all())


@pytest.mark.parametrize("format", [*PACKED, *FLOAT8])
def test_gradients(format: str) -> None:
    """To x through the floats, to the bias as ever, to codes and scales none."""
    layer = made(format)
    x = rows((3, 70)).requires_grad_()
    assert [name for name, _ in layer.named_parameters()] == ["bias"]
    assert layer.bias is not None
    grad = rows((3, 33))
    of_x, of_bias = torch.autograd.grad(layer(x), [x, layer.bias], grad)
    torch.testing.assert_close(of_x, grad @ layer.dequantize(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(of_bias, grad.sum(0))


@pytest.mark.parametrize(
    "move",
    [
        lambda layer: layer.half(),
        lambda layer: layer.bfloat16(),
        lambda layer: layer.double(),
        lambda layer: layer.to(BF16),
        lambda layer: layer.type(F16),
        lambda layer: copy.deepcopy(layer),
        lambda layer: pickle.loads(pickle.dumps(layer)),
        lambda layer: layer.share_memory(),
        lambda layer: nn.Sequential(layer).half()[0],
    ],
)
@pytest.mark.parametrize("kind", [*KINDS, ("fp8_e4m3", None, True)])
def test_moves_leave_codes_and_scales(move: Any, kind: tuple[str, int | None, bool]) -> None:
    before = made(*kind)
    after = move(copy.deepcopy(before))
    for name, buffer in before.named_buffers():
        moved = after.get_buffer(name)
        assert moved.dtype == buffer.dtype and torch.equal(moved, buffer), name
    assert torch.equal(after.dequantize(F32), before.dequantize(F32))


@pytest.mark.parametrize("kind", KINDS)
def test_all_tensors_are_there_during_a_move(kind: tuple[str, int | None, bool]) -> None:
    """As of torch's layer: a layer that is asked between any two tensors computes the same."""
    layer, x = made(*kind), rows((3, 70))
    want, calls = layer(x), 0

    def same(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        assert torch.equal(layer(x), want) and len(layer.state_dict()) == count
        return tensor.clone()

    count = len(layer.state_dict())
    layer._apply(same)
    assert calls == len(list(layer.buffers())) + 2  # the bias, and to see what becomes of a dtype
    assert torch.equal(layer(x), want)


def test_casts_leave_a_layer_without_bias_as_it_is() -> None:
    """So that other threads may compute with it meanwhile, which its documentation says."""
    layer = QuantizedLinear.from_linear(nn.Linear(70, 33, bias=False), "int4", symmetric=False)
    before = dict(layer.named_buffers())
    for dtype in (F16, BF16, F32):
        after = dict(layer.to(dtype).named_buffers())
        assert all(after[name] is tensor for name, tensor in before.items())


def test_dtype_is_that_of_casts() -> None:
    layer = QuantizedLinear.from_linear(nn.Linear(8, 4, bias=False).bfloat16())
    assert layer.dtype == layer.weight.dtype == BF16
    assert layer.half().weight.dtype == layer.double().weight.dtype == F16
    moved = copy.deepcopy(layer).to("meta", BF16)
    assert moved.scales.is_meta and moved.scales.dtype == F32 and moved.weight.dtype == BF16
    assert layer.to("meta").weight.is_meta and layer.codes.is_meta
    assert layer.to_empty(device="cpu").scales.dtype == F32


def test_moves_to_cuda_and_back(device: str) -> None:
    before = made("int4")
    after = copy.deepcopy(before).to(device).half().cpu()
    assert all(torch.equal(a, b) for a, b in zip(after.buffers(), before.buffers(), strict=True))


@pytest.mark.parametrize("format", [*PACKED, *FLOAT8])
def test_weight_reads_as_floats(format: str) -> None:
    layer = made(format)
    weight = layer.weight
    assert weight.shape == (33, 70) and weight.device.type == "cpu"
    floats = layer.dequantize()
    assert torch.equal(weight * 1, floats) and torch.equal(weight.t() @ weight, floats.t() @ floats)
    assert type(weight.detach()) is type(weight.data) is type(weight)
    assert torch.equal(weight.detach().data.float(), floats)
    x = rows((3, 70)).requires_grad_()
    grad = torch.autograd.grad(nn.functional.linear(x, weight).sum(), x)[0]
    torch.testing.assert_close(grad, floats.sum(0).expand(3, 70))
    assert repr(weight) == f"WeightView({format}, shape=[33, 70], dtype=torch.float32)"


def assigned(weight: torch.Tensor) -> None:
    weight[0, 0] = 5


def with_other_data(weight: torch.Tensor) -> None:
    weight.data = torch.zeros(33, 70)


@pytest.mark.parametrize(
    "write",
    [
        assigned,
        with_other_data,
        lambda weight: weight.mul_(2),
        lambda weight: weight.copy_(torch.zeros(33, 70)),
        lambda weight: weight.__setitem__(slice(None), 0),
        lambda weight: torch.add(torch.zeros(33, 70), 1, out=weight),
        lambda weight: torch.aminmax(torch.zeros(33, 70, 1), dim=2, out=(weight, weight)),
        lambda weight: torch._foreach_mul_([weight], 2),
        lambda weight: torch._foreach_copy_([torch.ones(33, 70), weight], [weight, weight]),
        lambda weight: nn.init.zeros_(weight),
        lambda weight: torch.ops.aten.mul_.Tensor(self=weight, other=weight),
    ],
)
def test_weight_cannot_be_written(write: Any) -> None:
    layer = made("int8")
    text = r"^QuantizedLinear: weight is an argument that .* writes to, expected it to be read only"
    before = layer.dequantize()
    with pytest.raises(RuntimeError, match=text), torch.no_grad():
        write(layer.weight)
    assert torch.equal(layer.dequantize(), before) and torch.equal(layer.weight + 0, before)


def test_the_attribute_weight_cannot_be_set() -> None:
    layer = made("int8")
    for weight in (torch.zeros(33, 70), nn.Parameter(torch.zeros(33, 70))):
        with pytest.raises(AttributeError, match="weight is assigned, expected it to be"):
            layer.weight = weight  # type: ignore[misc]


def test_weight_has_no_address() -> None:
    """Null would be read by kernels that take it."""
    with pytest.raises(
        RuntimeError, match=r"^QuantizedLinear: weight has no memory, expected what"
    ):
        made("int8").weight.data_ptr()
    for ask in (torch.from_dlpack, torch.Tensor.share_memory_):  # these read it
        with pytest.raises(RuntimeError, match="weight has no memory"):
            ask(made("int8").weight.detach())


def test_weight_can_be_written_elsewhere() -> None:
    """Where it is only read, and in what would be its views, which are copies."""
    layer, out = made("int8"), torch.zeros(33, 70)
    floats = layer.dequantize()
    out[:] = layer.weight
    assert torch.equal(out, floats)
    torch.add(layer.weight, 1, out=out)
    torch._foreach_add_([out], [layer.weight])
    assert torch.equal(out, floats + 1 + floats)
    for part in (layer.weight.t(), layer.weight[0], layer.weight.view(-1)):
        part.zero_()
    assert torch.equal(layer.dequantize(), floats)


def test_follows_autocast() -> None:
    layer, x = made("int8"), rows((3, 70))
    with torch.autocast("cpu", BF16):
        out = layer(x)
        with pytest.raises(ValueError, match="x is float64, expected float32, bfloat16 or float16"):
            layer(x.double())  # which autocast leaves as it is
    assert out.dtype == BF16
    assert torch.equal(out, layer(x.bfloat16()))


@pytest.mark.parametrize("format", [*PACKED, *FLOAT8])
def test_can_be_compiled(format: str) -> None:
    layer, x = made(format), rows((5, 70)).requires_grad_()
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), layer(x))


READERS: dict[str, tuple[int, Callable[[QuantizedLinear, Tensor], Tensor]]] = {
    "dtype": (0, lambda layer, x: layer(x.to(layer.weight.dtype))),
    "shape": (0, lambda layer, x: layer(x) * layer.weight.shape[0] + layer.weight.dim()),
    "device": (0, lambda layer, x: layer(x.to(layer.weight.device))),
    "is a tensor": (0, lambda layer, x: x + isinstance(layer.weight, Tensor)),
    "values": (1, lambda layer, x: F.linear(x, layer.weight) + x.mean(-1, keepdim=True)),
    "values, transposed": (1, lambda layer, x: x @ layer.weight.t()),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("format", ["int8", "nf4", "fp8_e4m3"])
def test_its_weight_can_be_read_in_a_compiled_function(format: str, reader: str) -> None:
    """In one graph, where nothing is made of a weight of which only the dtype is looked at."""
    makes, function = READERS[reader]
    layer, x = made(format), rows((5, 70))
    torch.compiler.reset()
    kept = AotEagerAndRecordGraphs()
    compiled = torch.compile(function, fullgraph=True, backend=kept)
    assert torch.equal(compiled(layer, x), function(layer, x))
    called = [str(node.target) for node in kept.fw_graphs[0].graph.nodes]
    assert sum("dequantize" in name or "unpack_weight" in name for name in called) == makes


@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight.mul_(2),
        lambda weight: weight.__setitem__(0, 1),
        lambda weight: torch.mul(weight, 2, out=weight),
        lambda weight: nn.init.zeros_(weight),
    ],
)
def test_its_weight_is_read_only_in_a_compiled_function_too(write: Any) -> None:
    layer = made("int8")

    def function(x: Tensor) -> Tensor:
        write(layer.weight)
        return layer(x)

    torch.compiler.reset()
    with pytest.raises(RuntimeError, match="expected it to be read only"):
        torch.compile(function, backend="eager")(rows((5, 70)))


def test_is_described() -> None:
    texts = [repr(made(*kind)) for kind in (("int8", 32, True), ("int4", 35, False))]
    assert texts == [
        "QuantizedLinear(in_features=70, out_features=33, bias=True, int8, group_size=32)",
        "QuantizedLinear(in_features=70, out_features=33, bias=True, int4, group_size=35,"
        " symmetric=False)",
    ]
    layer = QuantizedLinear(4, 3, False, "int4", input_format="int8", device="meta")
    assert repr(layer).endswith("bias=False, int4, group_size=4, input_format='int8')")


def test_made_on_meta_takes_no_memory_and_zeros_elsewhere() -> None:
    layer = QuantizedLinear(70, 33, format="nf4", group_size=32, device="meta", dtype=BF16)
    assert all(each.is_meta for each in (*layer.buffers(), *layer.parameters()))
    for format in ("int8", "int4", "nf4"):
        layer = QuantizedLinear(70, 33, format=format)
        assert torch.equal(layer(rows((2, 70))), torch.zeros(2, 33))


def test_of_a_packed_weight() -> None:
    source = made("int4", 35, False)
    weight = PackedWeight(source.codes, source.scales, source.offsets, "int4", 35, 70)
    x = rows((3, 70))
    layer = QuantizedLinear.from_packed(weight, source.bias)
    assert torch.equal(layer(x), source(x)) and layer.bias is source.bias
    order = torch.randperm(70)
    layer = QuantizedLinear.from_packed(weight, source.bias, order=order)
    assert torch.equal(layer(x), source(x[:, order]))
    torch.testing.assert_close(x @ layer.weight.t() + layer.bias, layer(x))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            dict(format="int3"),
            "format is 'int3', expected one of int8, int4, nf4, fp8_e4m3, fp8_e5m2",
        ),
        (dict(group_size=0), "group_size is 0, expected 1 or more, or None"),
        (dict(group_size=1.5), "group_size is 1.5, expected 1 or more, or None"),
        (
            dict(format="nf4", symmetric=False),
            "symmetric is False, expected True, as nf4 has no form with offsets",
        ),
        (dict(input_format="int4"), "input_format is 'int4', expected None or 'int8'"),
        (
            dict(format="nf4", input_format="int8"),
            "input_format is 'int8', expected None, as the codes of nf4 are no integers",
        ),
        (
            dict(dtype=torch.float64),
            "dtype is torch.float64, expected float32, bfloat16 or float16",
        ),
    ],
)
def test_refuses_options(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as error:
        QuantizedLinear(8, 4, **options)
    assert str(error.value) == f"QuantizedLinear: {text}"


class Special(nn.Linear):
    """A layer of another class."""


def pruned() -> nn.Module:
    from torch.nn.utils import prune

    layer = nn.Linear(8, 4)
    prune.random_unstructured(layer, "weight", amount=0.5)
    return layer


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (lambda: Special(8, 4), "linear is Special, expected Linear or Conv1D"),
        (lambda: nn.Bilinear(8, 4, 2), "linear is Bilinear, expected Linear or Conv1D"),
        (pruned, "linear has no parameter named weight, expected one; what makes the weight anew"),
        (
            lambda: nn.Linear(8, 4).double(),
            "weight has dtype torch.float64, expected float32, bfloat16 or float16",
        ),
    ],
)
def test_refuses_layers(source: Any, text: str) -> None:
    with pytest.raises(TypeError) as error:
        QuantizedLinear.from_linear(source())
    assert str(error.value).startswith(f"QuantizedLinear: {text}")


def with_act_order(device: str) -> QuantizedLinear:
    layer = made("int4", 35, False).to(device)
    weight = PackedWeight(layer.codes, layer.scales, layer.get_buffer("offsets"), "int4", 35, 70)
    return QuantizedLinear.from_packed(weight, layer.bias, order=torch.randperm(70, device=device))


@pytest.mark.parametrize("rows", [1, 70])
@pytest.mark.parametrize("format", [*PACKED, *FLOAT8, "with act-order"])
def test_refuses_rows_of_other_lengths(format: str, rows: int, device: str) -> None:
    """Longer and shorter ones, also where as many bytes of codes are read."""
    layer = with_act_order(device) if format == "with act-order" else made(format).to(device)
    for length in (69, 71, 72, 128, 140):
        text = rf"^QuantizedLinear: x has shape \[{rows}, {length}\], expected \[\.\.\., 70\]$"
        with pytest.raises(ValueError, match=text):
            layer(torch.zeros(rows, length, device=device))
    with pytest.raises(
        ValueError, match=r"^QuantizedLinear: x has shape \[\], expected \[\.\.\., "
    ):
        layer(torch.zeros((), device=device))


def test_refuses_parts_that_do_not_fit() -> None:
    weight = pack_weight(
        torch.zeros(4, 8, dtype=torch.int8), torch.ones(4, 2), format="int8", group_size=4
    )
    bad = weight._replace(scales=weight.scales.half())
    with pytest.raises(ValueError, match=r"^QuantizedLinear: scales is torch.float16 of shape \[2"):
        QuantizedLinear.from_packed(bad)
    with pytest.raises(ValueError, match=r"^QuantizedLinear: bias has shape \[3\], expected \[4\]"):
        QuantizedLinear.from_packed(weight, torch.zeros(3))
    for dtype in (torch.int64, torch.float64):
        text = f"^QuantizedLinear: bias is {dtype}, expected float32, bfloat16 or float16$"
        with pytest.raises(ValueError, match=text):
            QuantizedLinear.from_packed(weight, torch.ones(4, dtype=dtype))


def test_files_of_a_layer_have_no_more_than_it_was_made_of() -> None:
    """What follows from sizes is worked out by whoever reads them."""
    layer = QuantizedLinear(32, 8)
    written = pickle.dumps(layer)
    names = {
        argument for _, argument, _ in pickletools.genops(written) if isinstance(argument, str)
    }
    assert "layout" in names and not {"of_format", "_tensors", "nbytes"} & names
    read = pickle.loads(written)
    assert read.layout == layer.layout and "nbytes" in vars(read.layout)

"""Arguments of a wrong kind, None first of all: errors name the op, the argument, what it takes."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed_ext import ops
from deepspeed_ext.inference import KVCache
from deepspeed_ext.ops.quantization.packed_weight import PackedWeight

X = torch.ones(2, 8)
HEADS = torch.ones(1, 1, 2, 8)


def packed() -> PackedWeight:
    return ops.pack_weight(*ops.quantize(X, "int8", group_size=8), format="int8", group_size=8)


def attended(op: Callable[..., Any], **wrong: Any) -> Any:
    """Call an op on a cache with one token."""
    cache = KVCache(1, 64, 1, 8, dtype=torch.float32)
    cache.reserve([0], 1)
    heads = dict(q=HEADS.clone(), k=HEADS[:, :, :1], v=HEADS[:, :, :1], kv=cache.layer(0))
    if op in (ops.decode_attention, ops.prefill_attention):
        del heads["k"], heads["v"]
    return op(**heads | wrong)


WRONG: dict[str, Callable[[], Any]] = {
    "rms_norm: x is None, expected a tensor": lambda: ops.rms_norm(None),
    "rms_norm: x is [1.0], expected a tensor": lambda: ops.rms_norm([1.0]),
    "rms_norm: weight is 2.5, expected a tensor or None": lambda: ops.rms_norm(X, 2.5),
    "layer_norm: bias is 'b', expected a tensor or None": lambda: ops.layer_norm(X, None, "b"),
    "softmax: x is None, expected a tensor": lambda: ops.softmax(None),
    "softmax: mask is True, expected a tensor or None": lambda: ops.softmax(X, True),
    "cross_entropy: target is None, expected a tensor": lambda: ops.cross_entropy(X, None),
    "bias_activation: x is None, expected a tensor": lambda: ops.bias_activation(
        None, X[0], activation="gelu"
    ),
    "bias_dropout_residual: x is None, expected a tensor": lambda: ops.bias_dropout_residual(None),
    "bias_dropout_residual: residual is 1.0, expected a tensor or None": lambda: (
        ops.bias_dropout_residual(X, None, 1.0, 0.5)
    ),
    "dropout_activation: x is [1.0], expected a tensor": lambda: ops.dropout_activation([1.0]),
    "dropout_activation: seed is 3, expected a tensor or None": lambda: ops.dropout_activation(
        X, seed=3
    ),
    "rope: positions is None, expected a tensor": lambda: ops.rope(
        HEADS, None, None, ops.rope_frequencies(8)
    ),
    "rope: frequencies is None, expected a tensor": lambda: ops.rope(
        HEADS, None, torch.arange(1), None
    ),
    "rope_: q is None, expected a tensor": lambda: ops.rope_(
        None, None, torch.arange(1), ops.rope_frequencies(8)
    ),
    "quantize: x is None, expected a tensor": lambda: ops.quantize(None, "int8"),
    "dequantize: codes is None, expected a tensor": lambda: ops.dequantize(
        None, X, format="int8", group_size=8
    ),
    "dequantize: scales is None, expected a tensor": lambda: ops.dequantize(
        X.to(torch.int8), None, format="int8", group_size=8
    ),
    "pack_weight: codes is None, expected a tensor": lambda: ops.pack_weight(
        None, X, format="int8", group_size=8
    ),
    "skinny_linear: x is None, expected a tensor": lambda: ops.skinny_linear(None, X),
    "skinny_linear: weight is None, expected a tensor": lambda: ops.skinny_linear(X, None),
    "grouped_linear: x is None, expected a tensor": lambda: ops.grouped_linear(
        None, HEADS[0], torch.ones(1).int()
    ),
    "grouped_linear: weight is None, expected a tensor": lambda: ops.grouped_linear(
        X, None, torch.ones(1).int()
    ),
    "grouped_linear: offsets is [2], expected a tensor": lambda: ops.grouped_linear(
        X, HEADS[0], [2]
    ),
    "grouped_linear: bias is 0.5, expected a tensor or None": lambda: ops.grouped_linear(
        X, HEADS[0], torch.ones(1).int(), 0.5
    ),
    "quantized_linear: x is None, expected a tensor": lambda: ops.quantized_linear(None, packed()),
    "quantized_linear: weight is None, expected a PackedWeight": lambda: ops.quantized_linear(
        X, None
    ),
    "squared_norms: tensors[1] is None, expected a tensor": lambda: ops.squared_norms([X, None]),
    "squared_norms: tensors is None, expected a Sequence": lambda: ops.squared_norms(None),
    "adam_step_: params[0] is None, expected a tensor": lambda: ops.adam_step_(
        [None], [X], [X], [X], [X], lr=1.0
    ),
} | {
    f"{op.__name__}: {name} is {value!r}, expected {want}": lambda op=op, name=name, value=value: (
        attended(op, **{name: value})
    )
    for op, name, value, want in [
        (ops.rope_append_, "q", None, "a tensor"),
        (ops.rope_append_, "k", None, "a tensor"),
        (ops.rope_append_, "v", None, "a tensor"),
        (ops.rope_append_, "kv", None, "a PagedKV"),
        (ops.append_and_attend_, "q", [1, 2], "a tensor"),
        (ops.append_and_attend_, "k", None, "a tensor"),
        (ops.append_and_attend_, "v", None, "a tensor"),
        (ops.append_and_attend_, "kv", (1, 2), "a PagedKV"),
        (ops.append_and_attend_, "window", 2.5, "a whole number"),
        (ops.append_and_attend_, "slots", [0, 1], "a tensor or None"),
        (ops.decode_attention, "q", None, "a tensor"),
        (ops.decode_attention, "kv", None, "a PagedKV"),
        (ops.decode_attention, "window", "2", "a whole number"),
        (ops.prefill_attention, "q", None, "a tensor"),
        (ops.prefill_attention, "slots", [0, 1], "a tensor or None"),
    ]
}


@pytest.mark.parametrize("text", WRONG)
@pytest.mark.parametrize("is_recording", [True, False])
def test_an_argument_of_a_wrong_kind(text: str, is_recording: bool) -> None:
    with (
        torch.set_grad_enabled(is_recording),
        pytest.raises(TypeError, match=f"^{re.escape(text)}$"),
    ):
        WRONG[text]()


@pytest.mark.parametrize("layer", [torch.nn.Parameter, lambda x: x.as_subclass(_Marked)])
def test_subclasses_are_tensors(layer: Callable[[Tensor], Tensor]) -> None:
    with torch.no_grad():
        assert torch.equal(ops.skinny_linear(layer(X), X), X @ X.t())
        assert torch.equal(ops.quantized_linear(layer(X), packed()), X @ X.t())


class _Marked(Tensor):
    pass


def test_values_that_are_long_are_told_by_their_class() -> None:
    with pytest.raises(TypeError, match=r"^rms_norm: x is a list, expected a tensor$"):
        ops.rms_norm([1.0] * 1000)
    with pytest.raises(TypeError, match=r"^rms_norm: eps is a tensor of shape \[8\], expected"):
        ops.rms_norm(X, eps=X[0])


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(ValueError, match=r"^rms_norm: weight has shape \[2\], expected \[8\]"):
        ops.rms_norm(X, torch.ones(2))


@pytest.mark.parametrize("is_recording", [True, False])
def test_memory_that_is_not_there(device: str, is_recording: bool) -> None:
    x = X.new_zeros(1, device=device).expand(2**42, 8)
    weight, kind = torch.ones(8, device=device), RuntimeError
    text = "rms_norm: DefaultCPUAllocator: can't allocate memory"
    if device == "cuda":
        kind, text = torch.OutOfMemoryError, "rms_norm: CUDA out of memory. "
    with torch.set_grad_enabled(is_recording), pytest.raises(kind, match=re.escape(text)):
        ops.rms_norm(x, weight)
    with pytest.raises(kind, match=r"can't allocate|out of memory"):
        torch.empty(2**45, device=device)
    assert ops.rms_norm(X.to(device), weight).isfinite().all()

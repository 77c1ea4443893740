"""QuantizedLinear: a linear layer whose weight is quantized."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from deepspeed_ext.dtensors import is_dtensor
from deepspeed_ext.dtypes import DTYPES
from deepspeed_ext.ops import quantized_linear
from deepspeed_ext.ops._renamed import refuse_renamed
from deepspeed_ext.ops.quantization.packed_weight import PackedWeight
from deepspeed_ext.quantization.float8 import float8_linear
from deepspeed_ext.quantization.layout import WeightLayout, make_layout, read_note
from deepspeed_ext.quantization.packing import (
    Errors,
    dequantize_tensors,
    packed,
    quantize_weight,
)
from deepspeed_ext.quantization.weight_view import read_only, view_of
from deepspeed_ext.torch_internals.modules import EXTRA_STATE, buffers_of, parameters_of
from deepspeed_ext.torch_internals.tensors import is_traceable_wrapper_subclass

NOTE = EXTRA_STATE  # what torch calls what get_extra_state returns


class QuantizedLinear(nn.Module):
    """A linear layer of torch, x @ w.T + bias, with w quantized.

    Codes and scales are buffers, so that no optimizer trains them; the gradient to x goes through
    the weight as floats, as adapters beside it need. They keep their dtypes whatever the module is
    cast to: `half()` and the like concern the bias and `dtype`. Under autocast x is cast, as by
    torch's layer. A state dict has, beside them, a note of format and sizes, `_extra_state`; what
    does not fit is refused when it is loaded, and never read as something else.

    A row of x has the same bits alone and among up to 63 others, as `quantized_linear` says, but
    not in the fp8 formats: these torch multiplies, and sums go in another order in a batch.

    A layer without a bias may be cast while other threads compute with it, as that leaves codes and
    scales as they are. One with a bias may be neither cast nor moved then, as no layer of torch:
    the bias stays one parameter, whose memory torch changes below whoever reads it. Nor may any
    layer be moved to another device, where its tensors arrive one by one.

    `weight` has shape, dtype and device of the floats, and their values when something computes
    with it: see `WeightView`.

    Args:
        in_features: elements of a row of x.
        out_features: elements of a row of the result.
        bias: whether there is one.
        format: "int8", "int4", "nf4", or of CUDA 8.9 or newer "fp8_e4m3", "fp8_e5m2".
        group_size: elements along a row of the weight that share a scale; None: the whole row, as
            if it is shorter than this. The fp8 formats have one scale for a row in any case.
        symmetric: whether 0 is exact; else groups have an offset, in int8 and int4.
        input_format: None, or "int8": see `quantized_linear`. The fp8 formats round x too.
        device: of the tensors; on meta, a layer that is to be loaded takes no memory.
        dtype: of the bias and of `weight`.

    The weight is 0 until it is loaded.

    Raises:
        ValueError: an argument breaks a rule above; the text names it, its value and the rule.

    See: deepspeed_ext.ops.quantized_linear, which multiplies.
    """

    codes: Tensor
    scales: Tensor
    bias: nn.Parameter | None
    layout: WeightLayout
    dtype: torch.dtype

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        format: str = "int8",
        *,
        group_size: int | None = 128,
        symmetric: bool = True,
        input_format: str | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        **older: NoReturn,
    ) -> None:
        if older:
            refuse_renamed("QuantizedLinear", older)
        shape = (out_features, in_features)
        layout = make_layout("QuantizedLinear", format, shape, group_size, symmetric, input_format)
        self._begin(layout, torch.get_default_dtype() if dtype is None else dtype)
        for name, zeros in layout.tensors_on(device).items():
            self.register_buffer(name, zeros)
        if bias:
            self.bias = nn.Parameter(torch.zeros(out_features, device=device, dtype=self.dtype))
        else:
            self.register_parameter("bias", None)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Module,
        format: str = "int8",
        *,
        group_size: int | None = 128,
        symmetric: bool = True,
        input_format: str | None = None,
        **older: NoReturn,
    ) -> "QuantizedLinear":
        """Return a layer that does, but for rounding, what another one does.

        Args:
            linear: an nn.Linear, or transformers' Conv1D, whose weight lies the other way round.
                Its bias is taken over as it is.
            format: as of `QuantizedLinear`, as are the others.

        Raises:
            TypeError: it is of another class, its weight is no plain tensor of floats, or its bias
                no plain tensor.
            ValueError: an argument breaks a rule above, or the bias has another shape.
        """
        if older:
            refuse_renamed("QuantizedLinear", older)
        weight = weight_of("QuantizedLinear", linear)
        layout = make_layout(
            "QuantizedLinear", format, _shape(weight), group_size, symmetric, input_format
        )
        with torch.inference_mode(False):  # or no gradient could pass later
            return cls.of_weight(linear, weight, layout)

    @classmethod
    def of_weight(
        cls, linear: nn.Module, weight: Tensor, layout: WeightLayout, errors: Errors | None = None
    ) -> "QuantizedLinear":
        """Return a layer in place of another one; `errors` notes how far it is from it."""
        if weight.is_meta:
            tensors = layout.tensors_on("meta")
        else:
            tensors = quantize_weight(weight, layout, errors)
        layer = cls.of_tensors(layout, tensors, parameters_of(linear)["bias"], weight.dtype)
        return layer if linear.training else layer.eval()

    @classmethod
    def from_packed(
        cls,
        weight: PackedWeight,
        bias: Tensor | None = None,
        *,
        order: Tensor | None = None,
        input_format: str | None = None,
        **older: NoReturn,
    ) -> "QuantizedLinear":
        """Return a layer with a weight that is packed already; it shares the memory.

        Args:
            weight: of `pack_weight`.
            bias: (out,), or None.
            order: (in,), int64: column i of the weight belongs to element order[i] of x; None: i.
            input_format: as of `QuantizedLinear`.

        Raises:
            ValueError: the parts do not fit each other.
        """
        if older:
            refuse_renamed("QuantizedLinear", older)
        layout = make_layout(
            "QuantizedLinear",
            weight.format,
            weight.shape,
            weight.group_size,
            weight.offsets is None,
            input_format,
            order is not None,
        )
        given = {"codes": weight.codes, "scales": weight.scales, "offsets": weight.offsets}
        given["order"] = order
        tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
        problem = layout.misfit(tensors)
        if problem is not None:
            raise ValueError(f"QuantizedLinear: {problem}")
        if bias is not None and bias.shape != (layout.shape[0],):
            raise ValueError(
                f"QuantizedLinear: bias has shape {list(bias.shape)}, expected [{layout.shape[0]}]"
            )
        if bias is not None and bias.dtype not in DTYPES:
            raise ValueError(
                f"QuantizedLinear: bias is {bias.dtype}, expected float32, bfloat16 or float16"
            )
        dtype = torch.get_default_dtype() if bias is None else bias.dtype
        if bias is not None and not isinstance(bias, nn.Parameter):
            bias = nn.Parameter(bias)
        return cls.of_tensors(layout, tensors, bias, dtype)

    @classmethod
    def of_tensors(
        cls,
        layout: WeightLayout,
        tensors: Mapping[str, Tensor],
        bias: nn.Parameter | None,
        dtype: torch.dtype,
    ) -> "QuantizedLinear":
        made = cls.__new__(cls)
        made._begin(layout, dtype)
        buffers_of(made).update(tensors)  # a third of the time of register_buffer
        parameters_of(made)["bias"] = bias
        return made

    def _begin(self, layout: WeightLayout, dtype: torch.dtype) -> None:
        super().__init__()
        if dtype not in DTYPES:
            raise ValueError(
                f"QuantizedLinear: dtype is {dtype}, expected float32, bfloat16 or float16"
            )
        # Not by Module.__setattr__, which looks for parameters, modules and buffers of these names.
        vars(self).update(layout=layout, dtype=dtype)

    @property
    def in_features(self) -> int:
        """Elements of a row of x."""
        return self.layout.shape[1]

    @property
    def out_features(self) -> int:
        """Elements of a row of the result."""
        return self.layout.shape[0]

    @property
    def weight(self) -> Tensor:
        """Shape, dtype and device of the floats; their values when they are read, not before."""
        return view_of(self.layout, self._tensors(), self.dtype)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse another weight, which torch does by texts about names that are taken."""
        if name == "weight":
            raise AttributeError(read_only("is assigned"))
        super().__setattr__(name, value)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the floats that the weight stands for: (out, in).

        Args:
            dtype: float32, bfloat16 or float16; None: `dtype` of the layer.
        """
        return dequantize_tensors(self.layout, self._tensors(), dtype or self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return x @ w.T + bias, of the dtype of x.

        Args:
            x: (..., in), float32, bfloat16 or float16.

        Raises:
            ValueError: x has another length, or an argument breaks a rule of `quantized_linear`.
            RuntimeError: the device has no multiplication of the format.
        """
        if not x.is_meta and torch.is_autocast_enabled(x.device.type) and x.dtype in DTYPES:
            x = x.to(torch.get_autocast_dtype(x.device.type))
        bias = None if self.bias is None else self.bias.to(x.dtype)
        if self.layout.is_float8:
            return float8_linear(x, self.codes, self.scales, bias, self.layout)
        self.layout.check_rows(x)  # before columns are picked
        if self.layout.act_order:
            x = x.index_select(-1, self.get_buffer("order"))
        weight = packed(self.layout, self._tensors())
        out: Tensor = quantized_linear(x, weight, bias, input_format=self.layout.input_format)
        return out

    def extra_repr(self) -> str:
        """Return sizes and format, for print."""
        layout, parts = self.layout, []
        if not layout.is_float8:
            parts.append(f"group_size={layout.group_size}")
        if not layout.symmetric:
            parts.append("symmetric=False")
        if layout.input_format is not None:
            parts.append(f"input_format={layout.input_format!r}")
        if layout.act_order:
            parts.append("act_order=True")
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return ", ".join([sizes, f"bias={self.bias is not None}", layout.format, *parts])

    def get_extra_state(self) -> Tensor:
        """Return the note for a state dict."""
        return self.layout.note(self.dtype)

    def set_extra_state(self, state: Any) -> None:
        """Do nothing: `_load_from_state_dict` has compared the note before anything was copied."""

    def _tensors(self) -> dict[str, Tensor]:
        return {name: self.get_buffer(name) for name in self.layout.tensors()}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "QuantizedLinear":
        """Move all, and cast what may be cast; codes and scales stay the tensors that they are."""
        packed = list(self._tensors().values())

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if moved.dtype != tensor.dtype and any(tensor is each for each in packed):
                return tensor.to(moved.device)
            return moved

        super()._apply(move, recurse)  # type: ignore[no-untyped-call]
        dtype = fn(torch.empty(0, dtype=self.dtype, device=self.codes.device)).dtype
        self.dtype = dtype if dtype in DTYPES else self.dtype
        return self

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        problem = self._problem_of(state_dict, prefix)
        if problem is not None:
            error_msgs.append(f"QuantizedLinear: {problem}")
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _problem_of(self, state_dict: Mapping[str, Any], prefix: str) -> str | None:
        """Say why a state dict does not fit; nothing of this layer in it does."""
        if prefix + "weight" in state_dict:
            return (
                f"state_dict has {prefix + 'weight'!r}, floats, expected codes; load it into the"
                " model before quantize_model"
            )
        names = [*self.layout.tensors(), NOTE]
        there = [
            name
            for name in ("codes", "scales", "offsets", "order", NOTE)
            if prefix + name in state_dict
        ]
        if not there:
            return None
        for name in names:
            if not isinstance(state_dict.get(prefix + name), Tensor):
                return f"state_dict has no tensor {prefix + name!r}, expected it beside {there[0]}"
        try:
            saved, _ = read_note(state_dict[prefix + NOTE])
        except ValueError as error:
            return f"state_dict[{prefix + NOTE!r}] {error}"
        if replace(saved, input_format=self.layout.input_format) != self.layout:
            return f"state_dict has at {prefix!r} {_told(saved)}, expected {_told(self.layout)}"
        given = {name: state_dict[prefix + name] for name in self.layout.tensors()}
        problem = self.layout.misfit(given)
        return None if problem is None else f"state_dict at {prefix!r}: {problem}"


def weight_of(what: str, linear: nn.Module) -> Tensor:
    """Return the weight of a layer as (out, in), after its bias is looked at too.

    Args:
        what: begins the text of an error.

    Raises:
        TypeError: it is no layer that QuantizedLinear can stand for.
        ValueError: its bias has not one element for each row.
    """
    if type(linear) is not nn.Linear and not is_conv1d(linear):
        raise TypeError(f"{what}: linear is {type(linear).__name__}, expected Linear or Conv1D")
    weight: Tensor | None = parameters_of(linear).get("weight")
    if weight is None:
        raise TypeError(
            f"{what}: linear has no parameter named weight, expected one; what makes the weight"
            " anew for each call has to be removed before"
        )
    _check_plain(f"{what}: weight", weight)
    if weight.dtype not in DTYPES:
        raise TypeError(
            f"{what}: weight has dtype {weight.dtype}, expected float32, bfloat16 or float16"
        )
    weight = weight.detach()
    weight = weight.t() if is_conv1d(linear) else weight
    bias = parameters_of(linear).get("bias")
    if bias is not None:
        _check_plain(f"{what}: bias", bias)
        if bias.shape != weight.shape[:1]:  # torch takes one for all, kernels do not
            raise ValueError(
                f"{what}: bias has shape {list(bias.shape)}, expected {list(weight.shape[:1])}"
            )
    return weight


def _check_plain(what: str, tensor: Tensor) -> None:
    if is_dtensor(tensor):
        raise TypeError(f"{what} is a DTensor, expected a tensor that is whole")
    if is_traceable_wrapper_subclass(tensor):
        raise TypeError(f"{what} is a {type(tensor).__name__}, expected a plain tensor")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{what} is {tensor.layout}, expected a plain tensor")


def is_conv1d(module: nn.Module) -> bool:
    """Tell whether this is transformers' Conv1D, without importing what only it needs."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")


def _shape(weight: Tensor) -> tuple[int, int]:
    return weight.shape[0], weight.shape[1]


def _told(layout: WeightLayout) -> str:
    kind = "symmetric" if layout.symmetric else "with offsets"
    order = ", in an order of its own" if layout.act_order else ""
    return (
        f"{layout.format} in groups of {layout.group_size}, {kind}, of shape"
        f" {list(layout.shape)}{order}"
    )

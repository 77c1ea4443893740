"""What `weight` of a quantized layer is: a tensor that becomes floats when something reads it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from deepspeed_ext.quantization.layout import WeightLayout
from deepspeed_ext.quantization.packing import dequantize_tensors

_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class WeightView(Tensor):
    """Has shape, dtype and device of a weight, and its values, which are made for each use.

    Code of models reads `layer.weight.dtype` and the like before each multiplication, and that
    must cost nothing; code that computes with `layer.weight` gets the right numbers.

    Args:
        layout: of the weight.
        tensors: that stand for it.
        dtype: of the floats.
    """

    _layout: WeightLayout
    _tensors: dict[str, Tensor]

    @staticmethod
    def __new__(
        cls, layout: WeightLayout, tensors: dict[str, Tensor], dtype: torch.dtype
    ) -> "WeightView":
        made: WeightView = Tensor._make_wrapper_subclass(
            cls, layout.shape, dtype=dtype, device=tensors["codes"].device
        )
        made._layout, made._tensors = layout, tensors
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # It is there at all so that torch's modules see a tensor of another kind, and leave alone
        # the kernels that take the weights of a whole layer of a transformer.
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _ALIASES:
            view = args[0]
            return WeightView(view._layout, view._tensors, view.dtype)
        if func._schema.is_mutable and any(
            isinstance(value, WeightView)
            for value, argument in zip(args, func._schema.arguments, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ):
            raise RuntimeError(
                f"QuantizedLinear: weight is an argument that {func} writes to, expected it to be"
                " read only; make a new layer by QuantizedLinear.from_linear"
            )
        return func(*_floats(args), **_floats(kwargs or {}))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"WeightView({self._layout.format}, shape={list(self.shape)}, dtype={self.dtype})"


def _floats(values: Any) -> Any:
    def of(value: Any) -> Any:
        if not isinstance(value, WeightView):
            return value
        return dequantize_tensors(value._layout, value._tensors, value.dtype)

    return tree_map(of, values)

"""What `weight` of a quantized layer is: a tensor that becomes floats when something reads it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from deepspeed_ext.quantization.layout import WeightLayout
from deepspeed_ext.quantization.packing import dequantize_tensors
from deepspeed_ext.torch_internals.dispatch import schema_of, tree_leaves, tree_map
from deepspeed_ext.torch_internals.tensors import make_wrapper_subclass, past_torch_function

_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
# What dispatch sees as a write to a copy, or not at all.
_WRITERS = {
    Tensor.__setitem__: "weight[...] =",
    Tensor.data.__set__: "weight.data =",  # type: ignore[attr-defined]
}
_IN_PLACE = frozenset(
    getattr(Tensor, name) for name in dir(Tensor) if name[-1] == "_" and name[-2:] != "__"
) | {Tensor.__setitem__}
_ADDRESSES = (Tensor.data_ptr, Tensor.__dlpack__, Tensor.share_memory_)


class WeightView(Tensor):
    """Has shape, dtype and device of a weight, and its values, which are made for each use.

    Code of models reads `layer.weight.dtype` and the like before each multiplication, and that
    must cost nothing; code that computes with `layer.weight` gets the right numbers.

    It is read only: what would write to it is refused. What is a view of another tensor, such as
    `weight.t()`, `weight[0]` or `weight.view(-1)`, is a copy of this one, as there are no floats to
    look at; what is written to such a copy is not written to the layer. It has no address.

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
        made: WeightView = make_wrapper_subclass(
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
        if func in _WRITERS and isinstance(args[0], WeightView):
            _refuse(_WRITERS[func])
        if func in _ADDRESSES:  # which would be null, for kernels that torch does not call
            raise RuntimeError(
                "QuantizedLinear: weight has no memory, expected what computes with it to read it"
                " by ops of torch; dequantize() of the layer makes floats"
            )
        # It is there at all so that torch's modules see a tensor of another kind, and leave alone
        # the kernels that take the weights of a whole layer of a transformer.
        with past_torch_function():
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
        if schema_of(func).is_mutable and any(
            isinstance(each, WeightView) for each in tree_leaves(_written(func, args, kwargs or {}))
        ):
            _refuse(str(func))
        return func(*_floats(args), **_floats(kwargs or {}))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"WeightView({self._layout.format}, shape={list(self.shape)}, dtype={self.dtype})"


class _TracedFloats(Tensor):
    """What a graph of torch.compile has in place of a view, which it cannot make: the floats.

    They are worked out where something computes with them, as the compiler drops what nothing
    reads. What is written to them would be lost, and is refused.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        to_first = func in _IN_PLACE and isinstance(args[0], _TracedFloats)
        if to_first or isinstance(kwargs.get("out"), _TracedFloats):
            _refuse("a method in place, or out=,")
        with past_torch_function():
            return func(*args, **kwargs)


def view_of(layout: WeightLayout, tensors: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Return a `WeightView`, or what torch.compile can have in place of one."""
    if not torch.compiler.is_compiling():
        return WeightView(layout, tensors, dtype)
    return dequantize_tensors(layout, tensors, dtype).as_subclass(_TracedFloats)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return what an op writes to, also in lists and as out=."""
    arguments = schema_of(func).arguments
    given = {**dict(zip((each.name for each in arguments), args, strict=False)), **kwargs}
    return [
        given.get(each.name)
        for each in arguments
        if each.alias_info is not None and each.alias_info.is_write
    ]


def _refuse(writer: str) -> NoReturn:
    raise RuntimeError(read_only(f"is an argument that {writer} writes to"))


def read_only(what: str) -> str:
    """Return the text of an error about what would change a weight, of which no floats are kept."""
    return (
        f"QuantizedLinear: weight {what}, expected it to be read only; make a new layer by"
        " QuantizedLinear.from_linear"
    )


def _floats(values: Any) -> Any:
    def of(value: Any) -> Any:
        if not isinstance(value, WeightView):
            return value
        return dequantize_tensors(value._layout, value._tensors, value.dtype)

    return tree_map(of, values)

"""Models with quantized weights: a layer, the conversion of a model, files.

- layout: which tensors stand for a weight, and the note in a state dict that says so.
- packing: a weight as such tensors, and how far they are from it.
- float8, weight_view: fp8 multiplications; what `weight` of a layer is. linear: QuantizedLinear.
- candidates: which layers of a model can be replaced. report, convert: quantize_model.
- files: save_quantized, load_quantized. filling, parameters_on_meta: models that files fill.
- int4_tensors, compressed_tensors: what GPTQ, AWQ and compressed-tensors wrote. stored_weight: such
  a weight, rewritten. published: which of them a folder has. int4_checkpoint: models of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepspeed_ext.quantization.candidates import DEFAULT_SKIP
    from deepspeed_ext.quantization.convert import quantize_model
    from deepspeed_ext.quantization.files import (
        load_quantized,
        quantized_file_bytes,
        save_quantized,
    )
    from deepspeed_ext.quantization.int4_checkpoint import load_int4_checkpoint
    from deepspeed_ext.quantization.linear import QuantizedLinear
    from deepspeed_ext.quantization.report import LayerReport, Report

__all__ = [
    "DEFAULT_SKIP",
    "LayerReport",
    "QuantizedLinear",
    "Report",
    "load_int4_checkpoint",
    "load_quantized",
    "quantize_model",
    "quantized_file_bytes",
    "save_quantized",
]

_HOMES = {
    "DEFAULT_SKIP": "candidates",
    "LayerReport": "report",
    "QuantizedLinear": "linear",
    "Report": "report",
    "load_int4_checkpoint": "int4_checkpoint",
    "load_quantized": "files",
    "quantize_model": "convert",
    "quantized_file_bytes": "files",
    "save_quantized": "files",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

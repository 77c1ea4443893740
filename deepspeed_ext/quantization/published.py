"""Folders whose weights others have quantized: which of them are read, and what to do with those
that are not."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepspeed_ext.io.checkpoint.shards import read_json
from deepspeed_ext.quantization.compressed_tensors import read_pack_settings
from deepspeed_ext.quantization.int4_tensors import read_settings
from deepspeed_ext.quantization.stored_weight import Packing

_READ = "4 bits of gptq or awq, or pack-quantized of compressed-tensors"
_FROM_FLOATS = "give the folder of the model before that, with quantize='int4' or 'int8'"
_DEQUANTIZE = (
    "have transformers load it as floats ({}), and give what save_pretrained writes of that, or "
    + _FROM_FLOATS
)
_INSTEAD = {  # what to do, by method
    "bitsandbytes": _DEQUANTIZE.format("model.dequantize()"),
    "fp8": _DEQUANTIZE.format("FineGrainedFP8Config(dequantize=True)"),
    "mxfp4": _DEQUANTIZE.format("Mxfp4Config(dequantize=True)"),
}


def settings_in(op: str, folder: Path, config: Mapping[str, Any]) -> Any:
    """Return what a folder says of how its weights are quantized; None: nothing.

    Args:
        op: begins the text of an error.
        folder: of the model.
        config: of its config.json.

    Raises:
        ValueError: a file is no JSON.
    """
    for name in ("quantization_config", "compression_config"):
        if config.get(name) is not None:
            return config[name]
    older = folder / "quantize_config.json"
    return read_json(op, older) if older.exists() else None


def packing_of(what: str, settings: Any) -> Packing:
    """Return how the weights of a folder are stored.

    Args:
        what: begins the text of an error: what reads, and which folder.
        settings: as config.json has them.

    Raises:
        ValueError: they are stored as nothing here reads; names the method, and what to do.
    """
    if not isinstance(settings, Mapping):
        raise ValueError(f"{what} has the quantization_config {settings!r:.60}, expected an object")
    method = method_of(settings)
    marlin = "marlin" in (
        *(settings.get(name) for name in ("checkpoint_format", "version", "format")),
        "marlin" if settings.get("is_marlin_format") else None,
    )
    if method in ("gptq", "awq", "compressed-tensors") and not marlin:
        try:
            if method == "compressed-tensors":
                return read_pack_settings(what, settings)
            return read_settings(what, dict(settings))
        except ValueError as error:
            raise ValueError(f"{error}, of {method}; {_FROM_FLOATS}") from None
    named = f"{method!r:.60}" + (" for marlin" if marlin else "")
    instead = _INSTEAD.get(method, _FROM_FLOATS)
    if marlin:
        instead = f"have it written with checkpoint_format 'gptq', or {_FROM_FLOATS}"
    raise ValueError(
        f"{what} has weights quantized by {named}, expected floats, {_READ}; {instead}"
    )


def method_of(settings: Mapping[str, Any]) -> str:
    """Return the name of a method, which older files do not say."""
    if "quant_method" in settings:
        return str(settings["quant_method"])
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        return "bitsandbytes"
    return "compressed-tensors" if "config_groups" in settings else "gptq"

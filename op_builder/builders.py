"""The builder classes that users know, such as CPUAdamBuilder, made from the registry."""

from collections.abc import Callable
from typing import Any, ClassVar

from . import loading
from .log import logger
from .registry import GROUPS, OPS, specs_of

_ACRONYMS = {"cpu": "CPU", "io": "IO", "ltd": "LTD", "sgd": "SGD"}
_IRREGULAR = {
    "transformer_inference": "InferenceBuilder",
    "layernorm": "LayerNormBuilder",
    "moe": "MOEBuilder",
    "multihead_attention": "MultiHeadAttnBuilder",
    "scaled_upper_triangle_masked_softmax": "ScaledUpperTrainglemaskedSoftmaxBuilder",  # theirs
}
# Builders of older libraries that do not come, and what does their work.
INSTEAD = {
    "CCLCommBuilder": "torch.distributed",
    "DeepCompileBuilder": "torch.compile",
    "EvoformerAttnBuilder": "torch's scaled_dot_product_attention with attn_mask",
    "FPQuantizerBuilder": "deepspeed_ext.ops.quantize with an fp8 format",
    "GDSBuilder": "AsyncIOBuilder, whose engine takes CUDA tensors",
    "GPTQBuilder": "deepspeed_ext.quantization.load_int4_checkpoint",
    "InferenceCoreBuilder": "deepspeed_ext.init_inference",
    "InferenceCutlassBuilder": "deepspeed_ext.init_inference",
    "RaggedOpsBuilder": "deepspeed_ext.init_inference",
    "RaggedUtilsBuilder": "deepspeed_ext.init_inference",
    "ShareMemCommBuilder": "torch.distributed",
}


class OpBuilder:
    """Builds and loads one op, or a group of them; its subclasses only name it."""

    NAME = ""
    # What `load` returns, from the op's name. The package around this one sets it; alone, it is the
    # path of the library, as of `op_builder.load`.
    interface_of: ClassVar[Callable[[str], Any]] = staticmethod(loading.load)

    def load(self, verbose: bool = True) -> Any:
        """Load the op's library, compiling it when there is none yet.

        Args:
            verbose: taken for code that passes it; what is compiled is logged either way.

        Returns:
            A module with the functions of the op; for async_io, with what deepspeed_ext.io has.

        Raises:
            BuildError: every route to the library failed.
        """
        for spec in specs_of(self.NAME):
            loading.load(spec.name)
        return type(self).interface_of(self.NAME)

    def is_compatible(self, verbose: bool = False) -> bool:
        """Tell whether `load` would work here; with `verbose`, log the reasons why not."""
        found = [(spec.name, loading.status(spec)[1]) for spec in specs_of(self.NAME)]
        for name, reasons in found if verbose else []:
            for reason in reasons:
                logger.warning("%s: %s", name, reason)
        return not any(reasons for _, reasons in found)


def class_name(op: str) -> str:
    """Return the builder's name: cpu_adam gives CPUAdamBuilder."""
    if op in _IRREGULAR:
        return _IRREGULAR[op]
    return "".join(_ACRONYMS.get(word, word.capitalize()) for word in op.split("_")) + "Builder"


BUILDERS: dict[str, type[OpBuilder]] = {
    class_name(name): type(class_name(name), (OpBuilder,), {"NAME": name, "__module__": __name__})
    for name in [*(spec.name for spec in OPS), *GROUPS]
}


def __getattr__(name: str) -> type[OpBuilder]:
    if name in BUILDERS:
        return BUILDERS[name]
    text = f"module {__name__!r} has no attribute {name!r}"
    if name in INSTEAD:
        text += f", as its ops are not here; use {INSTEAD[name]}"
    raise AttributeError(text)

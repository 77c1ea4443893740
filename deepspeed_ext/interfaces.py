"""What a builder's `load` gives: the functions of an op library, or the I/O engine, as a module."""

import functools
from collections.abc import Collection
from types import ModuleType

from deepspeed_ext.op_builder.registry import GROUPS, spec_of

# What does the work of the functions that older libraries have under the same name; where it is the
# op itself, there is nothing more to say.
_INSTEAD = {
    "cpu_adam": "deepspeed_ext.optim.DeepSpeedCPUAdam",
    "fused_adam": "deepspeed_ext.optim.FusedAdam",
    "cpu_lion": "deepspeed_ext.optim.DeepSpeedCPULion",
    "fused_lion": "deepspeed_ext.optim.FusedLion",
    "cpu_adagrad": "deepspeed_ext.optim.DeepSpeedCPUAdagrad",
    "fused_adagrad": "deepspeed_ext.optim.FusedAdagrad",
    "cpu_sgd": "deepspeed_ext.optim.FusedSGD",
    "fused_sgd": "deepspeed_ext.optim.FusedSGD",
    "cpu_rmsprop": "deepspeed_ext.optim.FusedRMSprop",
    "fused_rmsprop": "deepspeed_ext.optim.FusedRMSprop",
    "cpu_lamb": "deepspeed_ext.optim.FusedLamb",
    "fused_lamb": "deepspeed_ext.optim.FusedLamb",
    "cpu_lars": "deepspeed_ext.optim.Lars",
    "fused_lars": "deepspeed_ext.optim.Lars",
    "quantizer": "deepspeed_ext.ops.ds_quantizer",
    "transformer_inference": "deepspeed_ext.inference.KVCache",
    "cpu_norm": "deepspeed_ext.ops.clip_grad_norm_",
    "fused_norm": "deepspeed_ext.ops.clip_grad_norm_",
    "async_io": "deepspeed_ext.io.AsyncIO",
}


# The modules of libraries that have ops of several, by the file of their self-checks.
_MODULES = {
    "kv_cache_checks": (
        "append_and_attend",
        "decode_attention",
        "paged_kv",
        "prefill_attention",
        "rope_append",
    ),
    "linear_checks": ("packed_weight", "quantized_linear"),
    "quantize_checks": (
        "dequantize",
        "ds_quantizer",
        "fake_quantize",
        "quantize",
        "quantize_packed",
    ),
}


class Interface(ModuleType):
    """The public names that belong to one op library.

    Args:
        op: the library.
        home: the module that has them.
        names: those of its names that belong here.
    """

    def __init__(self, op: str, home: ModuleType, names: Collection[str]) -> None:
        super().__init__(op, f"What belongs to the op library {op}, from {home.__name__}.")
        self.__all__ = sorted(names)
        self._home = home

    def __getattr__(self, name: str) -> object:
        if name in self.__all__:
            return getattr(self._home, name)
        text = f"{self.__name__}: attribute is {name!r}, expected one of {', '.join(self.__all__)}"
        if self.__name__ in _INSTEAD:
            text += f"; in place of the functions of older libraries use {_INSTEAD[self.__name__]}"
        raise AttributeError(text, name=name, obj=self)

    def __dir__(self) -> list[str]:
        return self.__all__


@functools.cache
def interface_of(op: str) -> Interface:
    """Return what belongs to an op library; importing it compiles and loads nothing.

    Args:
        op: a name of the registry, such as "cpu_adam", or of a group.
    """
    if op == "async_io":
        from deepspeed_ext import io

        return Interface(op, io, io.__all__)
    from deepspeed_ext import ops

    if op in GROUPS:
        return Interface(op, ops, {n for each in GROUPS[op] for n in interface_of(each).__all__})
    checks, _, name = spec_of(op).self_check.partition(":")
    family, _, file = checks.rpartition(".")
    modules = _MODULES.get(file, (name,))  # beside it, under the same name
    homes = [f"{family}.{module}" for module in modules]
    return Interface(
        op, ops, [name for name in ops.__all__ if getattr(ops, name).__module__ in homes]
    )

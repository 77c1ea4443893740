"""What a builder's `load` gives: the functions of an op library, or the I/O engine, as a module."""

import functools
from collections.abc import Mapping
from importlib import import_module
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
    "multihead_attention": "deepspeed_ext.ops.MultiHeadAttention",
    "stochastic_transformer": "deepspeed_ext.ops.DeepSpeedTransformerLayer",
    "transformer": "deepspeed_ext.ops.DeepSpeedTransformerLayer",
    "cpu_l2_norm": "deepspeed_ext.ops.clip_grad_norm_",
    "fused_l2_norm": "deepspeed_ext.ops.clip_grad_norm_",
    "async_io": "deepspeed_ext.io.AsyncIO",
}


# Of DeepSpeed's inference ops, those that it has for each dtype, and those under one name.
_OF_DTYPES = (
    *("add_padding", "allocate_workspace", "bias_add", "bias_gelu", "bias_relu", "bias_residual"),
    *("fused_gemm_gelu", "linear_layer", "mlp_gemm", "pad_transform", "qkv_gemm"),
    *("residual_add_bias", "softmax_context", "vector_matmul"),
)
_OF_INFERENCE = (
    *("_layer_norm_residual", "apply_rotary_pos_emb", "bias_geglu", "layer_norm"),
    *("layer_norm_residual_store_pre_ln_res", "release_workspace", "reset_cache"),
    "retake_workspace",
    *(f"{name}{end}" for name in _OF_DTYPES for end in ("", "_fp32", "_fp16", "_bf16")),
)

# What older libraries call in a module of this name, and where it is.
_FUSED_OPTIM = "deepspeed_ext.compat.fused_optim"
_TRANSFORMER = "deepspeed_ext.ops.transformer"
_LAYER = {
    name: _TRANSFORMER for name in ("DeepSpeedTransformerConfig", "DeepSpeedTransformerLayer")
}
_OLDER = {
    "cpu_adam": {"CPUAdamOptimizer": _FUSED_OPTIM},
    "fused_adam": {"multi_tensor_adam": _FUSED_OPTIM},
    "fused_optim": {
        f"multi_tensor_{name}": _FUSED_OPTIM for name in ("adam", "l2norm", "lamb", "scale", "sgd")
    },
    "layernorm": {
        name: "deepspeed_ext.compat.layernorm" for name in ("backward_affine", "forward_affine")
    },
    "moe": {
        name: "deepspeed_ext.compat.moe_functions"
        for name in ("MoeCombine", "MoeDispatch", "moe_cumsum")
    },
    "multihead_attention": {"MultiHeadAttention": _TRANSFORMER},
    "scaled_masked_softmax": {
        name: "deepspeed_ext.compat.scaled_masked_softmax"
        for name in ("backward", "forward", "get_batch_per_block")
    },
    "scaled_upper_triangle_masked_softmax": {
        name: "deepspeed_ext.compat.scaled_upper_triangle_masked_softmax"
        for name in ("backward", "forward")
    },
    "spatial_inference": {
        name: "deepspeed_ext.ops.older" for name in ("nhwc_bias_add_add", "nhwc_bias_add_bias_add")
    },
    "stochastic_transformer": _LAYER,
    "transformer": _LAYER,
    "transformer_inference": {
        **dict.fromkeys(_OF_INFERENCE, "deepspeed_ext.ops.older"),
        **dict.fromkeys(
            ("einsum_sec_sm_ecm", "moe_res_matmul"), "deepspeed_ext.compat.moe_functions"
        ),
    },
    "utils": {name: "deepspeed_ext.ops" for name in ("flatten", "unflatten")},
}


class Interface(ModuleType):
    """The public names that belong to one op library.

    Args:
        op: the library.
        homes: the names of the modules that have them, by the names that belong here.
    """

    def __init__(self, op: str, homes: Mapping[str, str]) -> None:
        super().__init__(op, f"What belongs to the op library {op}.")
        self.__all__ = sorted(homes)
        self._homes = homes

    def __getattr__(self, name: str) -> object:
        if name in self.__all__:
            return getattr(import_module(self._homes[name]), name)
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

        return Interface(op, dict.fromkeys(io.__all__, io.__name__))
    older = _OLDER.get(op, {})
    if op in GROUPS:
        members = [interface_of(member) for member in GROUPS[op]]
        return Interface(op, {n: each._homes[n] for each in members for n in each.__all__} | older)
    from deepspeed_ext import ops

    homes = spec_of(op).modules
    names = [name for name in ops.__all__ if getattr(ops, name).__module__ in homes]
    return Interface(op, dict.fromkeys(names, ops.__name__) | older)

"""The only list of op libraries; everything else that names them is derived from it."""

from dataclasses import replace

from .errors import BuildError
from .spec import OpSpec


def _op(library: str, op: str, *more: str) -> OpSpec:
    """Return the library of one op, such as optimizers/adam, for the device that its name says.

    `more` sources are compiled beside the usual ones.
    """
    family, _, name = op.partition("/")
    check = f"deepspeed_ext.ops.{family}.self_checks:{name}"
    if library.startswith("cpu"):
        sources = (f"{op}_ops.cpp", f"{op}_cpu.cpp", "common/simd/isa.cpp", *more)
        return OpSpec(name=library, device="cpu", sources=sources, self_check=check)
    return OpSpec(
        name=library,
        device="cuda",
        sources=(f"{op}_cuda.cu", *more, f"{op}_ops.cpp"),
        needs=("torch", "cuda"),
        self_check=check,
    )


def _one_number_each(library: str) -> OpSpec:
    """Return the library of the ops that make one number of each tensor: a norm, a fingerprint."""
    check = "deepspeed_ext.ops.optimizers.self_checks:one_number_each"
    on_cpu = library.startswith("cpu")
    ends = ("cpu.cpp", "ops.cpp") if on_cpu else ("cuda.cu", "ops.cpp")
    more = (f"optimizers/fingerprint_{end}" for end in ends)
    return replace(_op(library, "optimizers/l2_norm", *more), self_check=check)


def _norm(library: str, name: str, kind: str) -> OpSpec:
    """Return the library of a norm; both kinds share their sources."""
    more = () if library.startswith("cpu") else ("transformer/norm_backward_cuda.cu",)
    shared = _op(library, "transformer/norm", *more)
    check = f"deepspeed_ext.ops.transformer.self_checks:{name}"
    return replace(shared, defines=(("DSX_NORM", kind),), self_check=check)


def _elementwise(library: str, name: str) -> OpSpec:
    """Return the library of an elementwise op; they share their loops, and have their own rules."""
    shared = _op(library, "elementwise/elementwise")
    kernels = (source for source in shared.sources if not source.endswith("_ops.cpp"))
    defines = (
        ("DSX_RULE_HEADER", f'"elementwise/{name}.h"'),
        ("DSX_FORMULA", f'"elementwise/{name}_math.inl"'),
    )
    return replace(
        shared,
        sources=(f"elementwise/{name}_ops.cpp", *kernels),
        defines=defines,
        self_check=f"deepspeed_ext.ops.transformer.self_checks:{name}",
    )


def _quantized_linear(library: str, bits: int) -> OpSpec:
    """Return the library of the ops on weights of so many bits, which share their sources."""
    check = f"deepspeed_ext.ops.quantization.linear_checks:quantized_linear_w{bits}"
    shared = _op(library, "quantization/quantized_linear")
    return replace(shared, defines=(("DSX_BITS", str(bits)),), self_check=check)


def _quantizer(library: str) -> OpSpec:
    """Return the library of the ops that make floats codes, and codes floats."""
    check = "deepspeed_ext.ops.quantization.quantize_checks:quantizer"
    on_cpu = library.startswith("cpu")
    ends = ("cpu.cpp", "ops.cpp") if on_cpu else ("cuda.cu", "ops.cpp")
    more = (f"quantization/quantize_packed_{end}" for end in ends)
    return replace(_op(library, "quantization/quantize", *more), self_check=check)


def _kv_cache(kind: str, rule: str) -> tuple[OpSpec, OpSpec]:
    """Return the libraries of the ops on a cache of keys and values of one kind, for both devices.

    The ops share their sources, which are compiled for the kind.
    """
    made = []
    for prefix in ("cpu", "fused"):
        on_cpu = prefix == "cpu"
        ends = ("cpu.cpp", "ops.cpp") if on_cpu else ("cuda.cu", "ops.cpp")
        types = () if on_cpu else ("bfloat16", "float16")  # of queries, side by side
        shared = _op(
            f"{prefix}_kv_cache{kind}",
            "transformer/decode_attention",
            *(
                f"transformer/{op}_{end}"
                for op in ("prefill_attention", "rope_append")
                for end in ends
            ),
            f"transformer/append_and_attend_{ends[1]}",
            *(f"transformer/prefill_mma_{name}_cuda.cu" for name in types),
            *(() if on_cpu else ("transformer/decode_cluster_cuda.cu",)),
        )
        check = f"deepspeed_ext.ops.transformer.kv_cache_checks:kv_cache{kind}"
        made.append(replace(shared, defines=(("DSX_KV", rule),), self_check=check))
    return made[0], made[1]


def _optimizer(library: str, name: str, rule: str, measuring_rule: str = "") -> OpSpec:
    """Return the library of one optimizer, for the device that its name says.

    Optimizers share their sources, which are compiled for the rules in the header of that name: one
    that updates, and for some one that measures before.
    """
    defines = [
        ("DSX_RULE_HEADER", f'"optimizers/{name}.h"'),
        ("DSX_FORMULA", f'"optimizers/{name}_math.inl"'),
        ("DSX_RULE", rule),
    ]
    if measuring_rule:
        defines.append(("DSX_MEASURING_RULE", measuring_rule))
    on_cpu = library.startswith("cpu")
    kernels = ("optimizers/step_cpu.cpp", "common/simd/isa.cpp")
    return OpSpec(
        name=library,
        device="cpu" if on_cpu else "cuda",
        sources=("optimizers/step_ops.cpp", *(kernels if on_cpu else ("optimizers/step_cuda.cu",))),
        needs=("torch",) if on_cpu else ("torch", "cuda"),
        defines=tuple(defines),
        self_check=f"deepspeed_ext.ops.optimizers.self_checks:{name}",
    )


OPS: tuple[OpSpec, ...] = (
    _optimizer("cpu_adam", "adam", "Adam"),
    _optimizer("fused_adam", "adam", "Adam"),
    _optimizer("cpu_lion", "lion", "Lion"),
    _optimizer("fused_lion", "lion", "Lion"),
    _optimizer("cpu_adagrad", "adagrad", "Adagrad"),
    _optimizer("fused_adagrad", "adagrad", "Adagrad"),
    _optimizer("cpu_sgd", "sgd", "Sgd"),
    _optimizer("fused_sgd", "sgd", "Sgd"),
    _optimizer("cpu_rmsprop", "rmsprop", "Rmsprop"),
    _optimizer("fused_rmsprop", "rmsprop", "Rmsprop"),
    _optimizer("cpu_lamb", "lamb", "LambApply", "LambMoments"),
    _optimizer("fused_lamb", "lamb", "LambApply", "LambMoments"),
    _optimizer("cpu_lars", "lars", "LarsApply", "LarsNorms"),
    _optimizer("fused_lars", "lars", "LarsApply", "LarsNorms"),
    _one_number_each("cpu_norm"),
    _one_number_each("fused_norm"),
    _norm("cpu_rms_norm", "rms_norm", "RmsNorm"),
    _norm("fused_rms_norm", "rms_norm", "RmsNorm"),
    _norm("cpu_layer_norm", "layer_norm", "LayerNorm"),
    _norm("fused_layer_norm", "layer_norm", "LayerNorm"),
    _elementwise("cpu_bias_activation", "bias_activation"),
    _elementwise("fused_bias_activation", "bias_activation"),
    _elementwise("cpu_gated_activation", "gated_activation"),
    _elementwise("fused_gated_activation", "gated_activation"),
    _elementwise("cpu_nhwc_bias_add", "nhwc_bias_add"),
    _elementwise("fused_nhwc_bias_add", "nhwc_bias_add"),
    _op("cpu_rope", "transformer/rope"),
    _op("fused_rope", "transformer/rope"),
    _op("cpu_softmax", "transformer/softmax"),
    _op(
        "fused_softmax",
        "transformer/softmax",
        "transformer/softmax_masked_cuda.cu",
        "transformer/softmax_backward_cuda.cu",
    ),
    _op("cpu_cross_entropy", "transformer/cross_entropy"),
    _op("fused_cross_entropy", "transformer/cross_entropy"),
    _op("cpu_skinny_linear", "transformer/skinny_linear"),
    _op("fused_skinny_linear", "transformer/skinny_linear"),
    _quantized_linear("cpu_quantized_linear_w4", 4),
    _quantized_linear("fused_quantized_linear_w4", 4),
    _quantized_linear("cpu_quantized_linear_w8", 8),
    _quantized_linear("fused_quantized_linear_w8", 8),
    _quantizer("cpu_quantizer"),
    _quantizer("fused_quantizer"),
    *_kv_cache("", "FloatKv"),
    *_kv_cache("_int8", "Int8Kv"),
    *_kv_cache("_fp8", "Fp8Kv"),
    OpSpec(
        name="cpu_replay",
        device="cpu",
        sources=("replay/replay_ops.cpp",),
        self_check="deepspeed_ext.ops.replay_checks:replay",
    ),
    OpSpec(
        name="async_io",
        device="cpu",
        sources=(
            "aio/io_bindings.cpp",
            "aio/engine.cpp",
            "aio/queue.cpp",
            "aio/opening.cpp",
            "aio/error_text.cpp",
            "aio/regions.cpp",
            "aio/worker.cpp",
            "aio/file.cpp",
            "aio/page_buffer.cpp",
            "aio/backend.cpp",
            "aio/backend_factory.cpp",
            "aio/backend_threads.cpp",
            "aio/backend_uring.cpp",
            "aio/backend_libaio.cpp",
            "aio/checksum.cpp",
        ),
        needs=("pybind11",),
        self_check="deepspeed_ext.io.self_checks:async_io",
    ),
)


# One name, that older libraries have, for rows on CUDA. Without it `is_compatible` of these
# builders is False, as theirs is; the rows of the CPU have builders of their own. What utils has is
# plain torch, and needs no row.
GROUPS: dict[str, tuple[str, ...]] = {
    "transformer_inference": (
        "fused_kv_cache",
        "fused_kv_cache_int8",
        "fused_kv_cache_fp8",
        "fused_skinny_linear",
    ),
    "quantizer": ("fused_quantizer",),
    "fused_optim": ("fused_adam", "fused_sgd", "fused_lamb", "fused_norm"),
    "layernorm": ("fused_layer_norm",),
    "scaled_masked_softmax": ("fused_softmax",),
    "scaled_upper_triangle_masked_softmax": ("fused_softmax",),
    "utils": (),
}


def spec_of(name: str) -> OpSpec:
    """Return the row of an op."""
    for spec in OPS:
        if spec.name == name:
            return spec
    raise BuildError(
        name,
        f"there is no such op, expected one of {', '.join([*(s.name for s in OPS), *GROUPS])}",
        "run: python -m deepspeed_ext.op_builder list",
    )


def specs_of(name: str) -> tuple[OpSpec, ...]:
    """Return the rows of a group, or the one of an op."""
    return tuple(spec_of(member) for member in GROUPS.get(name, (name,)))

"""The only list of op libraries; everything else that names them is derived from it."""

from dataclasses import dataclass, replace
from typing import Literal

from .errors import BuildError
from .spec import OpSpec

_ISA = "common/simd/isa.cpp"


@dataclass(frozen=True)
class FunctionalOp:
    """An op, or a few that belong together, with a library for each device.

    One row gives both libraries, cpu_<name> and fused_<name>, what a builder's `load` returns, the
    self-check of ds_report, which is called `name` in deepspeed_ext.ops.self_checks or in
    `self_checks`, the table of ops, and the benchmark that `make bench` runs.

    Args:
        name: of the libraries, behind what they begin with.
        modules: what declares the ops: schema, function, fake, backward and reference; below
            deepspeed_ext.ops. It is imported on first use.
        kernels: "elementwise" for rules that share its loop, with rule, formula and ops in files of
            the row's name; else the sources of kernels and ops, without _cpu, _cuda and _ops.
        bits: what is promised of results. "same": the same bits from every instruction set, and for
            any split and number of threads. "row": that, and a row has the same bits in any batch.
        sanitizer: the program of tests/csrc that tries the kernels under the sanitizers.
        benchmark: benchmarks/bench_<benchmark>.py measures it.
        ops: sources of ops without kernels of their own, without _ops.
        more_cpu: sources for the CPU alone, by their whole names.
        more_cuda: sources of kernels for CUDA alone, without _cuda.
        defines: macros for all sources; so some serve several libraries.
        self_checks: the module below deepspeed_ext.ops that has the self-check.
    """

    name: str
    modules: tuple[str, ...]
    kernels: Literal["elementwise"] | tuple[str, ...]
    bits: Literal["same", "row"]
    sanitizer: str
    benchmark: str
    ops: tuple[str, ...] = ()
    more_cpu: tuple[str, ...] = ()
    more_cuda: tuple[str, ...] = ()
    defines: tuple[tuple[str, str], ...] = ()
    self_checks: str = "self_checks"

    def libraries(self) -> tuple[OpSpec, ...]:
        """Return the libraries, for the CPU and for CUDA."""
        stems, ops, defines = self.kernels, self.ops, self.defines
        if stems == "elementwise":
            stems, ops = ("elementwise/elementwise",), (f"elementwise/{self.name}",)
            defines = _rule(f"elementwise/{self.name}")
        else:
            ops = (*stems, *ops)
        of_ops = [f"{op}_ops.cpp" for op in ops]
        return _both(
            self.name,
            [*of_ops, *(f"{stem}_cpu.cpp" for stem in stems), *self.more_cpu, _ISA],
            [*(f"{stem}_cuda.cu" for stem in (*stems, *self.more_cuda)), *of_ops],
            defines=defines,
            self_check=f"deepspeed_ext.ops.{self.self_checks}:{self.name}",
            modules=self.modules,
        )


@dataclass(frozen=True)
class StepOp:
    """An optimizer's op; all share their sources, which are compiled for the rules of each.

    Args:
        name: of the header in csrc/optimizers with its rules, of its module and its self-check.
        rule: the one that updates.
        measuring_rule: the one that measures before, if there is one.
    """

    name: str
    rule: str
    measuring_rule: str = ""

    def libraries(self) -> tuple[OpSpec, OpSpec]:
        """Return the libraries, for the CPU and for CUDA."""
        defines = (*_rule(f"optimizers/{self.name}"), ("DSX_RULE", self.rule))
        if self.measuring_rule:
            defines = (*defines, ("DSX_MEASURING_RULE", self.measuring_rule))
        ops = "optimizers/step_ops.cpp"
        return _both(
            self.name,
            [ops, "optimizers/step_cpu.cpp", _ISA],
            [ops, "optimizers/step_cuda.cu"],
            defines=defines,
            self_check=f"deepspeed_ext.ops.optimizers.self_checks:{self.name}",
            modules=(f"optimizers.{self.name}",),
        )


def _rule(path: str) -> tuple[tuple[str, str], ...]:
    """Return the macros that bring a rule and its formula into the loop that many share."""
    return ("DSX_RULE_HEADER", f'"{path}.h"'), ("DSX_FORMULA", f'"{path}_math.inl"')


def _both(
    name: str,
    on_cpu: list[str],
    on_cuda: list[str],
    *,
    defines: tuple[tuple[str, str], ...],
    self_check: str,
    modules: tuple[str, ...],
) -> tuple[OpSpec, OpSpec]:
    """Return the libraries of a row, from the sources of each."""
    cpu = OpSpec(
        name=f"cpu_{name}",
        device="cpu",
        sources=tuple(on_cpu),
        defines=defines,
        self_check=self_check,
        modules=tuple(f"deepspeed_ext.ops.{module}" for module in modules),
    )
    cuda = replace(
        cpu,
        name=f"fused_{name}",
        device="cuda",
        sources=tuple(on_cuda),
        needs=("torch", "cuda"),
    )
    return cpu, cuda


def _kv_cache(kind: str, rule: str) -> FunctionalOp:
    """Return the ops on a cache of keys and values of one kind; the sources are of all kinds."""
    return FunctionalOp(
        f"kv_cache{kind}",
        modules=(
            "attention.append_and_attend",
            "attention.decode_attention",
            "attention.paged_kv",
            "attention.prefill_attention",
            "attention.rope_append",
        ),
        kernels=(
            "attention/decode/decode",
            "attention/prefill/prefill",
            "attention/cache/rope_append",
        ),
        ops=("attention/decode/append_and_attend",),
        more_cuda=(
            "attention/prefill/prefill_mma_bfloat16",  # by types of queries, side by side
            "attention/prefill/prefill_mma_float16",
            "attention/prefill/prefill_warpgroups_bfloat16",
            "attention/prefill/prefill_warpgroups_float16",
            "attention/decode/decode_cluster",
        ),
        defines=(("DSX_KV", rule),),
        bits="row",
        sanitizer=f"kv_cache{kind}",
        benchmark="decode",
        self_checks="attention.self_checks",
    )


def _norm(name: str, kind: str) -> FunctionalOp:
    """Return a norm; both kinds share their sources."""
    return FunctionalOp(
        name,
        modules=(f"norm.{name}",),
        kernels=("norm/norm",),
        more_cuda=("norm/norm_backward",),
        defines=(("DSX_NORM", kind),),
        bits="row",
        sanitizer="norms",
        benchmark=name,
    )


def _quantized_linear(bits: int) -> FunctionalOp:
    """Return the ops on weights of so many bits, which share their sources."""
    return FunctionalOp(
        f"quantized_linear_w{bits}",
        modules=(
            "quantization.packed_weight",
            "linear.quantized_linear",
            "linear.quantized_product",
            "linear.grouped_quantized_linear",
        ),
        kernels=("linear/quantized_linear", "linear/grouped_quantized"),
        more_cuda=("linear/quantized_many_rows",),
        defines=(("DSX_BITS", str(bits)),),
        bits="row",
        sanitizer=f"quantized_linear_w{bits}",
        benchmark="quantized_linear",
        self_checks="linear.self_checks",
    )


ROWS: tuple[StepOp | FunctionalOp, ...] = (
    StepOp("adam", "Adam"),
    StepOp("lion", "Lion"),
    StepOp("adagrad", "Adagrad"),
    StepOp("sgd", "Sgd"),
    StepOp("rmsprop", "Rmsprop"),
    StepOp("lamb", "LambApply", "LambMoments"),
    StepOp("lars", "LarsApply", "LarsNorms"),
    FunctionalOp(
        "l2_norm",
        modules=("optimizers.fingerprint", "optimizers.l2_norm"),
        kernels=("optimizers/l2_norm", "optimizers/fingerprint"),
        bits="same",
        sanitizer="l2_norm",
        benchmark="norm",
        self_checks="optimizers.self_checks",
    ),
    _norm("rms_norm", "RmsNorm"),
    _norm("layer_norm", "LayerNorm"),
    FunctionalOp(
        "bias_activation",
        modules=("elementwise.bias_activation",),
        kernels="elementwise",
        bits="same",
        sanitizer="activations",
        benchmark="activation",
    ),
    FunctionalOp(
        "gated_activation",
        modules=("elementwise.gated_activation",),
        kernels="elementwise",
        bits="same",
        sanitizer="activations",
        benchmark="swiglu",
    ),
    FunctionalOp(
        "nhwc_bias_add",
        modules=("elementwise.nhwc_bias_add",),
        kernels="elementwise",
        bits="same",
        sanitizer="activations",
        benchmark="activation",
    ),
    FunctionalOp(
        "dropout",
        modules=("elementwise.bias_dropout_residual", "elementwise.dropout_activation"),
        kernels="elementwise",
        bits="same",
        sanitizer="activations",
        benchmark="dropout",
    ),
    FunctionalOp(
        "rope",
        modules=("attention.rope",),
        kernels=("attention/cache/rope",),
        bits="row",
        sanitizer="rope",
        benchmark="rope",
    ),
    FunctionalOp(
        "softmax",
        modules=("softmax_and_loss.softmax",),
        kernels=("softmax/softmax",),
        more_cuda=("softmax/softmax_masked", "softmax/softmax_backward"),
        bits="row",
        sanitizer="softmax",
        benchmark="softmax",
    ),
    FunctionalOp(
        "cross_entropy",
        modules=("softmax_and_loss.cross_entropy", "linear.linear_cross_entropy"),
        kernels=("softmax/cross_entropy",),
        bits="row",
        sanitizer="softmax",
        benchmark="cross_entropy",
    ),
    FunctionalOp(
        "skinny_linear",
        modules=("linear.skinny_linear",),
        kernels=("linear/skinny_linear",),
        bits="row",
        sanitizer="skinny_linear",
        benchmark="skinny_linear",
    ),
    _quantized_linear(4),
    _quantized_linear(8),
    FunctionalOp(
        "grouped_linear",
        modules=("linear.grouped_linear",),
        kernels=("linear/grouped_linear",),
        more_cpu=("linear/skinny_linear_cpu.cpp",),
        bits="row",
        sanitizer="skinny_linear",
        benchmark="grouped_linear",
        self_checks="linear.self_checks",
    ),
    FunctionalOp(
        "quantizer",
        modules=(
            "quantization.dequantize",
            "quantization.ds_quantizer",
            "quantization.fake_quantize",
            "quantization.quantize",
            "quantization.quantize_packed",
            "quantization.repack_weight",
        ),
        kernels=(
            "quantization/quantize",
            "quantization/quantize_packed",
            "quantization/repack",
        ),
        bits="row",
        sanitizer="quantize",
        benchmark="quantize",
        self_checks="quantization.self_checks",
    ),
    FunctionalOp(
        "moe",
        modules=("moe.assign", "moe.permute", "moe.route", "moe.routing"),
        kernels=("moe/route", "moe/assign", "moe/permute"),
        bits="row",
        sanitizer="moe",
        benchmark="moe",
        self_checks="moe.self_checks",
    ),
    FunctionalOp(
        "random_ltd",
        modules=(
            "random_ltd.dropping_utils",
            "random_ltd.mask_gather",
            "random_ltd.token_gather",
            "random_ltd.token_scatter",
            "random_ltd.token_sort",
        ),
        kernels=("random_ltd/tokens", "random_ltd/token_sort", "random_ltd/mask_gather"),
        bits="same",
        sanitizer="random_ltd",
        benchmark="random_ltd",
        self_checks="random_ltd.self_checks",
    ),
    FunctionalOp(
        "sparse_attn",
        modules=("attention.block_sparse_attention",),
        kernels=("attention/sparse/block_sparse",),
        more_cuda=(
            "attention/sparse/block_sparse_mma_bfloat16",  # by types, side by side
            "attention/sparse/block_sparse_mma_float16",
        ),
        bits="row",
        sanitizer="block_sparse",
        benchmark="block_sparse",
        self_checks="self_checks",
    ),
    _kv_cache("", "FloatKv"),
    _kv_cache("_int8", "Int8Kv"),
    _kv_cache("_fp8", "Fp8Kv"),
)

OPS: tuple[OpSpec, ...] = (
    *(library for row in ROWS for library in row.libraries()),
    OpSpec(
        name="cpu_replay",
        device="cpu",
        sources=("replay/replay_ops.cpp",),
        self_check="deepspeed_ext.ops.self_checks:replay",
        modules=("deepspeed_ext.ops.replay",),
    ),
    OpSpec(
        name="async_io",
        device="cpu",
        sources=(
            "aio/io_bindings.cpp",
            *(
                f"aio/{name}.cpp"
                for name in (
                    *("engine", "queue", "opening", "error_text", "regions", "worker", "file"),
                    *("page_buffer", "file_map", "backend", "backend_factory", "backend_threads"),
                    *("backend_uring", "backend_libaio", "checksum"),
                )
            ),
        ),
        needs=("pybind11",),
        self_check="deepspeed_ext.io.self_checks:async_io",
        modules=("deepspeed_ext.io",),
    ),
)


# What two rows were called before: builders, DS_BUILD_<OP>, ds_report and `load` know them still.
EARLIER_NAMES = {"cpu_norm": "cpu_l2_norm", "fused_norm": "fused_l2_norm"}

# Of a whole layer, of which there is one: no kernel is faster where it may be less exact.
_LAYER = ("fused_dropout", "fused_bias_activation", "fused_layer_norm")

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
    "fused_optim": ("fused_adam", "fused_sgd", "fused_lamb", "fused_l2_norm"),
    "layernorm": ("fused_layer_norm",),
    "scaled_masked_softmax": ("fused_softmax",),
    "scaled_upper_triangle_masked_softmax": ("fused_softmax",),
    "spatial_inference": ("fused_nhwc_bias_add",),
    "transformer": _LAYER,
    "stochastic_transformer": _LAYER,
    "multihead_attention": ("fused_dropout", "fused_layer_norm"),
    "moe": ("fused_moe",),
    "sparse_attn": ("fused_sparse_attn",),
    "random_ltd": ("fused_random_ltd",),
    "utils": (),
    **{earlier: (name,) for earlier, name in EARLIER_NAMES.items()},
}


def spec_of(name: str) -> OpSpec:
    """Return the row of an op, by its name or an earlier one."""
    for spec in OPS:
        if spec.name == EARLIER_NAMES.get(name, name):
            return spec
    raise BuildError(
        name,
        f"there is no such op, expected one of {', '.join([*(s.name for s in OPS), *GROUPS])}",
        "run: python -m deepspeed_ext.op_builder list",
    )


def specs_of(name: str) -> tuple[OpSpec, ...]:
    """Return the rows of a group, or the one of an op."""
    return tuple(spec_of(member) for member in GROUPS.get(name, (name,)))

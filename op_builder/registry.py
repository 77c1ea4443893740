"""The only list of op libraries; everything else that names them is derived from it."""

from .errors import BuildError
from .spec import OpSpec


def _op(library: str, op: str) -> OpSpec:
    """Return the library of one op, such as optimizers/adam, for the device that its name says."""
    family, _, name = op.partition("/")
    check = f"deepspeed_ext.ops.{family}.self_checks:{name}"
    if library.startswith("cpu"):
        sources = (f"{op}_ops.cpp", f"{op}_cpu.cpp", "common/simd/isa.cpp")
        return OpSpec(name=library, device="cpu", sources=sources, self_check=check)
    return OpSpec(
        name=library,
        device="cuda",
        sources=(f"{op}_cuda.cu", f"{op}_ops_cuda.cpp"),
        needs=("torch", "cuda"),
        self_check=check,
    )


OPS: tuple[OpSpec, ...] = (
    _op("cpu_adam", "optimizers/adam"),
    _op("fused_adam", "optimizers/adam"),
    _op("cpu_lion", "optimizers/lion"),
    _op("fused_lion", "optimizers/lion"),
    _op("cpu_adagrad", "optimizers/adagrad"),
    _op("fused_adagrad", "optimizers/adagrad"),
    _op("cpu_sgd", "optimizers/sgd"),
    _op("fused_sgd", "optimizers/sgd"),
    _op("cpu_lamb", "optimizers/lamb"),
    _op("fused_lamb", "optimizers/lamb"),
    _op("cpu_lars", "optimizers/lars"),
    _op("fused_lars", "optimizers/lars"),
    _op("cpu_norm", "optimizers/l2_norm"),
    _op("fused_norm", "optimizers/l2_norm"),
    _op("cpu_rms_norm", "transformer/rms_norm"),
    _op("fused_rms_norm", "transformer/rms_norm"),
    _op("cpu_swiglu", "transformer/swiglu"),
    _op("fused_swiglu", "transformer/swiglu"),
    OpSpec(
        name="async_io",
        device="cpu",
        sources=(
            "aio/io_bindings.cpp",
            "aio/engine.cpp",
            "aio/queue.cpp",
            "aio/regions.cpp",
            "aio/worker.cpp",
            "aio/file.cpp",
            "aio/page_buffer.cpp",
            "aio/backend.cpp",
            "aio/backend_threads.cpp",
            "aio/backend_uring.cpp",
            "aio/backend_libaio.cpp",
            "aio/checksum.cpp",
        ),
        needs=("pybind11",),
        self_check="deepspeed_ext.io.self_checks:async_io",
    ),
)


def spec_of(name: str) -> OpSpec:
    """Return the row of an op."""
    for spec in OPS:
        if spec.name == name:
            return spec
    raise BuildError(
        name,
        f"there is no such op, expected one of {', '.join(spec.name for spec in OPS)}",
        "run: python -m deepspeed_ext.op_builder list",
    )

"""The only list of op libraries; everything else that names them is derived from it."""

from .spec import OpSpec


def _step(library: str, op: str) -> OpSpec:
    """Return the library of one op of the optimizers; its name says the device."""
    check = f"deepspeed_ext.ops.self_checks:{op}"
    if library.startswith("cpu"):
        sources = (f"optimizers/{op}_ops.cpp", f"optimizers/{op}_cpu.cpp", "common/simd/isa.cpp")
        return OpSpec(name=library, device="cpu", sources=sources, self_check=check)
    return OpSpec(
        name=library,
        device="cuda",
        sources=(f"optimizers/{op}_cuda.cu", f"optimizers/{op}_ops_cuda.cpp"),
        needs=("torch", "cuda"),
        self_check=check,
    )


OPS: tuple[OpSpec, ...] = (
    _step("cpu_adam", "adam"),
    _step("fused_adam", "adam"),
    _step("cpu_lion", "lion"),
    _step("fused_lion", "lion"),
    _step("cpu_adagrad", "adagrad"),
    _step("fused_adagrad", "adagrad"),
    _step("cpu_sgd", "sgd"),
    _step("fused_sgd", "sgd"),
    _step("cpu_lamb", "lamb"),
    _step("fused_lamb", "lamb"),
    _step("cpu_lars", "lars"),
    _step("fused_lars", "lars"),
    _step("cpu_norm", "l2_norm"),
    _step("fused_norm", "l2_norm"),
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

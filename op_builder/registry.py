"""The only list of op libraries; everything else that names them is derived from it."""

from .spec import OpSpec

OPS: tuple[OpSpec, ...] = (
    OpSpec(
        name="cpu_adam",
        device="cpu",
        sources=(
            "optimizers/adam_ops.cpp",
            "optimizers/adam_cpu.cpp",
            "common/simd/isa.cpp",
        ),
        self_check="deepspeed_ext.ops.self_checks:adam",
    ),
    OpSpec(
        name="fused_adam",
        device="cuda",
        sources=("optimizers/adam_cuda.cu", "optimizers/adam_ops_cuda.cpp"),
        needs=("torch", "cuda"),
        self_check="deepspeed_ext.ops.self_checks:adam",
    ),
)

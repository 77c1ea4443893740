"""The rest of the 50 configs: those with a block of a part that is not here."""

from configs import PLAIN, Sample
from configs_of_zero import ZERO

_FP16 = {"enabled": True, "loss_scale": 0, "initial_scale_power": 16}
_ONE_BIT = {"lr": 1e-4, "freeze_step": 23000, "cuda_aware": False, "comm_backend_name": "nccl"}


def _refused(config: dict[str, object], *names: str) -> Sample:
    return Sample({"train_batch_size": 8, **config}, refused=names, is_owned=True)


OWNED = {
    "1-bit Adam": _refused(
        {
            "optimizer": {"type": "OneBitAdam", "params": _ONE_BIT},
            "gradient_clipping": 1.0,
            "fp16": _FP16,
        },
        "optimizer.type",
    ),
    "1-bit Lamb": _refused(
        {"optimizer": {"type": "OneBitLamb", "params": {**_ONE_BIT, "coeff_beta": 0.9}}},
        "optimizer.type",
    ),
    "0/1 Adam": _refused(
        {"optimizer": {"type": "ZeroOneAdam", "params": {"lr": 1e-3, "var_freeze_step": 100}}},
        "optimizer.type",
    ),
    "compression": _refused(
        {
            "compression_training": {
                "weight_quantization": {
                    "shared_parameters": {"enabled": True, "quantize_groups": 1},
                    "different_groups": {"wq1": {"params": {"start_bits": 8}}},
                }
            }
        },
        "compression_training",
    ),
    "layers left out": _refused(
        {"compression_training": {"layer_reduction": {"enabled": True, "keep_number_layer": 6}}},
        "compression_training",
    ),
    "random-LTD": _refused(
        {
            "data_efficiency": {
                "enabled": True,
                "data_routing": {"enabled": True, "random_ltd": {"enabled": True}},
            }
        },
        "data_efficiency",
    ),
    "optimizer on NVMe": _refused(
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/scratch"},
                "offload_param": {"device": "nvme", "nvme_path": "/scratch"},
            },
            "aio": {"thread_count": 1},
        },
        "zero_optimization.offload_param.device",
    ),
    "parameters on the host": _refused(
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
        "zero_optimization.offload_param.device",
    ),
    "timings and a profile": _refused(
        {
            "wall_clock_breakdown": True,
            "flops_profiler": {"enabled": True, "profile_step": 2},
            "comet": {"enabled": True, "project": "runs"},
        },
        "flops_profiler",
        "comet",
    ),
    "compiled": _refused({"compile": {"deepcompile": True}}, "compile.deepcompile"),
    "tensor parallel": _refused({"tensor_parallel": {"autotp_size": 4}}, "tensor_parallel"),
    "autocast": _refused(
        {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "torch_autocast"
    ),
    "quantized messages": _refused(
        {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}},
        "zero_optimization.zero_quantized_weights",
    ),
}
SAMPLES = PLAIN | ZERO | OWNED

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
_LTD = {
    "enabled": True,
    "total_layer_num": 24,
    "random_ltd_layer_num": 2,
    "random_ltd_layer_id": [1, 2],
    "model_mask_name": "attention_mask",
    "model_type": "decoder",
    "hidden_state_order": "seq_batch_dim",
    "random_ltd_schedule": {
        "min_value": 128,
        "max_value": 2048,
        "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": 200000, "seq_per_step": 16},
    },
}
_AT = "data_efficiency.data_routing.random_ltd"
TOKENS = {
    "random-LTD": Sample(
        {
            "train_batch_size": 8,
            "data_efficiency": {
                "enabled": True,
                "seed": 1234,
                "data_routing": {"enabled": True, "random_ltd": _LTD},
            },
        },
        {
            "train_batch_size": 8,
            "data_efficiency.enabled": True,
            "data_efficiency.data_routing.enabled": True,
            f"{_AT}.enabled": True,
            f"{_AT}.total_layer_num": 24,
            f"{_AT}.random_ltd_layer_num": 2,
            f"{_AT}.random_ltd_layer_id": (1, 2),
            f"{_AT}.model_mask_name": "attention_mask",
            f"{_AT}.hidden_state_order": "seq_batch_dim",
            f"{_AT}.random_ltd_schedule.min_value": 128,
            f"{_AT}.random_ltd_schedule.max_value": 2048,
            f"{_AT}.random_ltd_schedule.schedule_config.require_steps": 200000,
            f"{_AT}.random_ltd_schedule.schedule_config.seq_per_step": 16,
        },
        warned=("data_efficiency.seed", f"{_AT}.model_type"),
    ),
}
SAMPLES = PLAIN | ZERO | OWNED | TOKENS

"""Those of the 50 configs that have much of ZeRO."""

import math

from configs import FP16, Sample


def _under(prefix: str, names: str) -> tuple[str, ...]:
    return tuple(f"{prefix}.{name}" for name in names.split())


_ZERO = "zero_optimization"
_OPTIMIZER = f"{_ZERO}.offload_optimizer"
_STAGE_2 = {
    "stage": 2,
    "allgather_partitions": True,
    "allgather_bucket_size": 2e8,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 2e8,
    "contiguous_gradients": True,
}
_STAGE_2_WARNED = _under(
    _ZERO,
    "allgather_partitions allgather_bucket_size overlap_comm reduce_scatter reduce_bucket_size"
    " contiguous_gradients",
)

ZERO = {
    "stage 2 with buckets": Sample(
        {
            "train_batch_size": 16,
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": _STAGE_2,
            "fp16": {**FP16, "initial_scale_power": 32, "loss_scale_window": 500},
            "gradient_clipping": 1.0,
        },
        {
            "train_batch_size": 16,
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization.stage": 2,
            "fp16.enabled": True,
            "fp16.initial_scale_power": 32,
            "fp16.loss_scale_window": 500,
            "gradient_clipping": 1.0,
        },
        _STAGE_2_WARNED,
    ),
    "stage 2, optimizer on the host": Sample(
        {
            "train_micro_batch_size_per_gpu": 8,
            "gradient_accumulation_steps": 4,
            "zero_optimization": {
                **_STAGE_2,
                "offload_optimizer": {"device": "cpu", "pin_memory": True},
            },
            "bf16": {"enabled": True},
            "gradient_clipping": 0.5,
        },
        {
            "train_micro_batch_size_per_gpu": 8,
            "gradient_accumulation_steps": 4,
            "zero_optimization.stage": 2,
            f"{_OPTIMIZER}.device": "cpu",
            "bf16.enabled": True,
            "gradient_clipping": 0.5,
        },
        sorted([*_STAGE_2_WARNED, f"{_OPTIMIZER}.pin_memory"]),
    ),
    "stage 3 as in tutorials": Sample(
        {
            "train_batch_size": 32,
            "zero_optimization": {
                "stage": 3,
                "overlap_comm": True,
                "contiguous_gradients": True,
                "sub_group_size": 1e9,
                "reduce_bucket_size": 1e6,
                "stage3_prefetch_bucket_size": 4e6,
                "stage3_param_persistence_threshold": 1e4,
                "stage3_max_live_parameters": 1e9,
                "stage3_max_reuse_distance": 1e9,
                "stage3_gather_16bit_weights_on_model_save": True,
            },
            "bf16": {"enabled": True},
        },
        {
            "train_batch_size": 32,
            "zero_optimization.stage": 3,
            "zero_optimization.stage3_gather_16bit_weights_on_model_save": True,
            "bf16.enabled": True,
        },
        _under(
            _ZERO,
            "overlap_comm contiguous_gradients sub_group_size reduce_bucket_size"
            " stage3_prefetch_bucket_size stage3_param_persistence_threshold"
            " stage3_max_live_parameters stage3_max_reuse_distance",
        ),
    ),
    "stage 3 with the second names": Sample(
        {
            "train_batch_size": 8,
            "zero_optimization": {
                "stage": 3,
                "max_live_parameters": 1e8,
                "max_reuse_distance": 1e8,
                "prefetch_bucket_size": 1e7,
                "param_persistence_threshold": 1e5,
                "gather_16bit_weights_on_model_save": True,
                "sub_group_size": 0,
            },
        },
        {
            "train_batch_size": 8,
            "zero_optimization.stage": 3,
            "zero_optimization.stage3_gather_16bit_weights_on_model_save": True,
        },
        _under(
            _ZERO,
            "max_live_parameters max_reuse_distance prefetch_bucket_size"
            " param_persistence_threshold sub_group_size",
        ),
    ),
    "numbers as texts": Sample(
        {
            "train_batch_size": "8",
            "gradient_accumulation_steps": "2",
            "gradient_clipping": "1e-1",
            "steps_per_print": "inf",
            "zero_optimization": {"stage": "2", "reduce_bucket_size": "5e8"},
            "fp16": {"enabled": "True", "loss_scale": "128", "initial_scale_power": "12"},
            "optimizer": {"type": "AdamW", "params": {"lr": "1e-5", "betas": ["0.9", "0.95"]}},
        },
        {
            "train_batch_size": 8,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 0.1,
            "steps_per_print": math.inf,
            "zero_optimization.stage": 2,
            "fp16.enabled": True,
            "fp16.loss_scale": 128,
            "fp16.initial_scale_power": 12,
            "optimizer.type": "AdamW",
            "optimizer.params": {"lr": 1e-5, "betas": (0.9, 0.95)},
        },
        (f"{_ZERO}.reduce_bucket_size",),
    ),
    "as accelerate writes it": Sample(
        {
            "train_batch_size": 16,
            "train_micro_batch_size_per_gpu": 8,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "none", "nvme_path": None},
                "offload_param": {"device": "none", "nvme_path": None},
                "stage3_gather_16bit_weights_on_model_save": False,
            },
            "gradient_clipping": 1.0,
            "steps_per_print": math.inf,
            "bf16": {"enabled": True},
            "fp16": {"enabled": False},
            "zero_allow_untested_optimizer": True,
        },
        {
            "train_batch_size": 16,
            "train_micro_batch_size_per_gpu": 8,
            "gradient_accumulation_steps": 1,
            "zero_optimization.stage": 2,
            "gradient_clipping": 1.0,
            "bf16.enabled": True,
        },
        ("zero_allow_untested_optimizer",),
    ),
    "offload by its old name": Sample(
        {
            "train_batch_size": 2,
            "zero_optimization": {
                "stage": 2,
                "cpu_offload": True,
                "cpu_offload_use_pin_memory": True,
                "contiguous_gradients": True,
            },
        },
        {
            "train_batch_size": 2,
            "zero_optimization.stage": 2,
            "zero_optimization.cpu_offload": True,
            "zero_optimization.cpu_offload_use_pin_memory": True,
            f"{_OPTIMIZER}.device": "cpu",
        },
        _under(_ZERO, "cpu_offload cpu_offload_use_pin_memory contiguous_gradients"),
    ),
    "no offload by its old name": Sample(
        {
            "train_batch_size": 2,
            "zero_optimization": {"stage": 1, "cpu_offload": False, "reduce_bucket_size": 5e8},
        },
        {"train_batch_size": 2, "zero_optimization.stage": 1},
        _under(_ZERO, "cpu_offload reduce_bucket_size"),
    ),
    "parameters of stage 2 are not offloaded": Sample(
        {
            "train_batch_size": 2,
            "zero_optimization": {
                "stage": 2,
                "offload_param": {"device": "cpu"},
                "offload_optimizer": {"device": "cpu"},
            },
        },
        {
            "train_batch_size": 2,
            "zero_optimization.stage": 2,
            f"{_OPTIMIZER}.device": "cpu",
            f"{_ZERO}.offload_param.device": "cpu",
        },
        (f"{_ZERO}.offload_param.device",),
    ),
    "parameters and optimizer on the host": Sample(
        {
            "train_batch_size": 2,
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "cpu", "pin_memory": True},
                "offload_optimizer": {"device": "cpu"},
            },
        },
        {
            "train_batch_size": 2,
            "zero_optimization.stage": 3,
            f"{_OPTIMIZER}.device": "cpu",
            f"{_ZERO}.offload_param.device": "cpu",
        },
        (f"{_ZERO}.offload_param.pin_memory",),
    ),
    "parameters and optimizer on NVMe": Sample(
        {
            "train_batch_size": 2,
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/scratch"},
                "offload_param": {
                    "device": "nvme",
                    "nvme_path": "/scratch",
                    "buffer_count": 6,
                    "buffer_size": 1e9,
                    "max_in_cpu": 1e9,
                },
            },
            "aio": {"thread_count": 1},
        },
        {
            "train_batch_size": 2,
            "zero_optimization.stage": 3,
            f"{_OPTIMIZER}.device": "nvme",
            f"{_OPTIMIZER}.nvme_path": "/scratch",
            f"{_ZERO}.offload_param.device": "nvme",
            f"{_ZERO}.offload_param.nvme_path": "/scratch",
        },
        (
            *_under(f"{_ZERO}.offload_param", "buffer_count buffer_size max_in_cpu"),
            "aio",
        ),
    ),
    "part of the optimizer on the host": Sample(
        {
            "train_batch_size": 2,
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu", "ratio": 0.3, "fast_init": False},
                "ignore_unused_parameters": False,
                "round_robin_gradients": True,
            },
        },
        {
            "train_batch_size": 2,
            "zero_optimization.stage": 3,
            f"{_OPTIMIZER}.device": "cpu",
            f"{_OPTIMIZER}.ratio": 0.3,
            "zero_optimization.ignore_unused_parameters": False,
        },
        (f"{_OPTIMIZER}.fast_init", f"{_ZERO}.round_robin_gradients"),
    ),
    "a client's optimizer": Sample(
        {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 8,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": 2, "load_from_fp32_weights": True},
            "gradient_clipping": 1.0,
        },
        {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 8,
            "zero_optimization.stage": 2,
            "gradient_clipping": 1.0,
        },
        (
            "zero_allow_untested_optimizer",
            "zero_force_ds_cpu_optimizer",
            f"{_ZERO}.load_from_fp32_weights",
        ),
    ),
    "nothing is quantized": Sample(
        {
            "train_batch_size": 8,
            "zero_optimization": {
                "stage": 3,
                "zero_quantized_weights": False,
                "zero_quantized_gradients": False,
                "zero_hpz_partition_size": 1,
                "mics_shard_size": -1,
                "memory_efficient_linear": False,
                "elastic_checkpoint": False,
            },
            "torch_autocast": {"enabled": False},
            "compile": {"disable": True, "backend": "inductor"},
        },
        {"train_batch_size": 8, "zero_optimization.stage": 3},
        _under(_ZERO, "memory_efficient_linear elastic_checkpoint"),
    ),
}

"""50 configs as people have them: what acts, what is warned of and what is refused in each.

Here those without much of ZeRO; configs_of_zero and configs_of_parts have the others.

They are written for these tests; keys and how often each occurs are those of public configs.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Sample:
    """A config and what is to come of it.

    Args:
        config: as a user has it.
        acts: every value that acts, by its path in the tree; all else is to have its default.
        warned: the keys that are named in a warning, and no others are.
        refused: the keys that are named in the error, and no others are.
        is_owned: it has a block of a part that is not here.
    """

    config: dict[str, Any]
    acts: dict[str, Any] = field(default_factory=dict)
    warned: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    is_owned: bool = False


FP16 = {
    "enabled": True,
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
_ADAM = {"type": "Adam", "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8}}
_ADAM_ACTS = {
    "optimizer.type": "Adam",
    "optimizer.params": {"lr": 3e-5, "betas": (0.8, 0.999), "eps": 1e-8},
}
PLAIN = {
    "one batch size": Sample({"train_batch_size": 8}, {"train_batch_size": 8}),
    "micro-batch alone": Sample(
        {"train_micro_batch_size_per_gpu": 4}, {"train_micro_batch_size_per_gpu": 4}
    ),
    "fp16 with its defaults": Sample(
        {"train_batch_size": 64, "steps_per_print": 100, "optimizer": _ADAM, "fp16": FP16},
        {"train_batch_size": 64, "steps_per_print": 100, "fp16.enabled": True, **_ADAM_ACTS},
    ),
    "all switched off": Sample(
        {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 1,
            "fp16": {"enabled": False},
            "bf16": {"enabled": False},
            "amp": {"enabled": False, "opt_level": "O1"},
            "flops_profiler": {"enabled": False, "profile_step": 1},
            "comms_logger": {"enabled": False},
            "tensorboard": {"enabled": True, "output_path": "runs"},
            "wandb": {"enabled": False, "group": None},
            "wall_clock_breakdown": "true",
            "prescale_gradients": False,
            "zero_optimization": {"stage": 0},
        },
        {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 1,
            "tensorboard.enabled": True,
            "tensorboard.output_path": "runs",
            "wall_clock_breakdown": True,
        },
        ("prescale_gradients",),
    ),
    "stage 3 with sizes for Trainer": Sample(
        {
            "train_batch_size": 8,
            "zero_optimization": {
                "stage": 3,
                "reduce_bucket_size": "auto",
                "stage3_prefetch_bucket_size": "auto",
                "stage3_param_persistence_threshold": "auto",
                "stage3_gather_16bit_weights_on_model_save": "auto",
            },
            "bf16": {"enabled": "true"},
        },
        {"train_batch_size": 8, "zero_optimization.stage": 3, "bf16.enabled": True},
    ),
    "warm-up and decay": Sample(
        {
            "train_batch_size": 256,
            "train_micro_batch_size_per_gpu": 8,
            "optimizer": _ADAM,
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {
                    "warmup_min_lr": 0,
                    "warmup_max_lr": 3e-5,
                    "warmup_num_steps": 500,
                    "total_num_steps": 10000,
                    "warmup_type": "linear",
                },
            },
            "bf16": {"enabled": True},
        },
        {
            "train_batch_size": 256,
            "train_micro_batch_size_per_gpu": 8,
            **_ADAM_ACTS,
            "scheduler.type": "WarmupDecayLR",
            "scheduler.params": {
                "warmup_min_lr": 0,
                "warmup_max_lr": 3e-5,
                "warmup_num_steps": 500,
                "total_num_steps": 10000,
                "warmup_type": "linear",
            },
            "bf16.enabled": True,
        },
    ),
    "warm-up": Sample(
        {
            "train_batch_size": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "weight_decay": 0.01}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 1000}},
        },
        {
            "train_batch_size": 4,
            "optimizer.type": "AdamW",
            "optimizer.params": {"lr": 0.001, "weight_decay": 0.01},
            "scheduler.type": "WarmupLR",
            "scheduler.params": {"warmup_num_steps": 1000},
        },
    ),
    "Lamb": Sample(
        {
            "train_batch_size": 65536,
            "train_micro_batch_size_per_gpu": 64,
            "steps_per_print": 1000,
            "prescale_gradients": False,
            "optimizer": {
                "type": "Lamb",
                "params": {
                    "lr": 11e-3,
                    "weight_decay": 0.01,
                    "bias_correction": False,
                    "max_coeff": 0.3,
                    "min_coeff": 0.01,
                },
            },
            "gradient_clipping": 1.0,
            "wall_clock_breakdown": False,
            "fp16": {"enabled": True, "loss_scale": 0},
        },
        {
            "train_batch_size": 65536,
            "train_micro_batch_size_per_gpu": 64,
            "steps_per_print": 1000,
            "optimizer.type": "Lamb",
            "optimizer.params": {
                "lr": 11e-3,
                "weight_decay": 0.01,
                "bias_correction": False,
                "max_coeff": 0.3,
                "min_coeff": 0.01,
            },
            "gradient_clipping": 1.0,
            "fp16.enabled": True,
        },
        ("prescale_gradients",),
    ),
    "Adam with decay in the gradient": Sample(
        {
            "train_batch_size": 12,
            "optimizer": {
                "type": "Adam",
                "params": {"lr": 1e-4, "torch_adam": True, "adam_w_mode": False},
            },
            "gradient_clipping": 0,
        },
        {
            "train_batch_size": 12,
            "optimizer.type": "Adam",
            "optimizer.params": {"lr": 1e-4, "torch_adam": True, "adam_w_mode": False},
        },
    ),
    "an optimizer of torch": Sample(
        {
            "train_batch_size": 128,
            "optimizer": {
                "type": "SGD",
                "params": {"lr": 0.1, "momentum": 0.9, "nesterov": "true"},
            },
            "zero_optimization": {"stage": 1},
        },
        {
            "train_batch_size": 128,
            "optimizer.type": "SGD",
            "optimizer.params": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
            "zero_optimization.stage": 1,
        },
    ),
    "small loss scales": Sample(
        {
            "train_micro_batch_size_per_gpu": 1,
            "fp16": {"enabled": True, "min_loss_scale": 0.01, "hysteresis": 1, "auto_cast": True},
        },
        {
            "train_micro_batch_size_per_gpu": 1,
            "fp16.enabled": True,
            "fp16.min_loss_scale": 0.01,
            "fp16.hysteresis": 1,
        },
        ["fp16.auto_cast"],
    ),
    "a loss scale that stays": Sample(
        {"train_batch_size": 2, "fp16": {"enabled": True, "loss_scale": 1024}},
        {"train_batch_size": 2, "fp16.enabled": True, "fp16.loss_scale": 1024},
    ),
    "bfloat16 by its old name": Sample(
        {"train_batch_size": 2, "bfloat16": {"enabled": True}, "steps_per_print": 2e16},
        {"train_batch_size": 2, "bf16.enabled": True, "steps_per_print": 2e16},
    ),
    "activation checkpointing": Sample(
        {
            "train_batch_size": 32,
            "activation_checkpointing": {
                "partition_activations": True,
                "contiguous_memory_optimization": False,
                "cpu_checkpointing": True,
                "number_checkpoints": 4,
                "profile": False,
            },
            "fp16": {"enabled": True},
        },
        {
            "train_batch_size": 32,
            "fp16.enabled": True,
            "activation_checkpointing.cpu_checkpointing": True,
            "activation_checkpointing.partition_activations": True,
        },
        (
            "activation_checkpointing.contiguous_memory_optimization",
            "activation_checkpointing.number_checkpoints",
            "activation_checkpointing.profile",
        ),
    ),
    "the oldest form": Sample(
        {"train_batch_size": 8, "zero_optimization": True, "disable_allgather": True},
        {"train_batch_size": 8, "zero_optimization.stage": 1},
        ("disable_allgather",),
    ),
    "keys that act nowhere": Sample(
        {
            "_comment": "tuned by hand",
            "cuda_visible_devices": "0,1",
            "train_batch_size": 8,
            "fp16": {"enabled": True, "opt_level": "O2", "_why": {"loss_scale": 0}},
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3}, "legacy_fusion": False},
        },
        {
            "train_batch_size": 8,
            "fp16.enabled": True,
            "optimizer.type": "Adam",
            "optimizer.params": {"lr": 1e-3},
        },
        (
            "_comment",
            "cuda_visible_devices",
            "fp16.opt_level",
            "fp16._why",
            "optimizer.legacy_fusion",
        ),
    ),
    "for the autotuner": Sample(
        {
            "train_micro_batch_size_per_gpu": 1,
            "autotuning": {"enabled": True, "fast": False, "arg_mappings": {"lr": "auto"}},
            "zero_optimization": {"stage": 1},
        },
        {"train_micro_batch_size_per_gpu": 1, "zero_optimization.stage": 1},
        ("autotuning",),
    ),
    "elastic": Sample(
        {
            "train_batch_size": 8,
            "elasticity": {"enabled": True, "max_train_batch_size": 2000, "version": 0.1},
        },
        {"train_batch_size": 8},
        ("elasticity",),
    ),
    "sent in float32": Sample(
        {
            "train_batch_size": 8,
            "bf16": {"enabled": True},
            "communication_data_type": "fp32",
            "gradient_predivide_factor": 1.0,
            "sparse_gradients": False,
        },
        {"train_batch_size": 8, "bf16.enabled": True, "communication_data_type": "float32"},
        ("gradient_predivide_factor",),
    ),
    "scaled before": Sample(
        {"train_batch_size": 8, "prescale_gradients": True, "gradient_predivide_factor": 8.0},
        {"train_batch_size": 8},
        ("prescale_gradients", "gradient_predivide_factor"),
    ),
    "compression that is off": Sample(
        {
            "train_batch_size": 8,
            "compression_training": {
                "weight_quantization": {"shared_parameters": {"enabled": False}},
                "layer_reduction": {"enabled": False},
            },
            "data_efficiency": {"enabled": False, "data_routing": {"enabled": False}},
        },
        {"train_batch_size": 8},
    ),
    "checkpoints": Sample(
        {
            "train_batch_size": 8,
            "checkpoint": {"tag_validation": "Fail", "use_node_local_storage": False},
            "dataloader_drop_last": False,
            "aio": {"block_size": 1048576, "queue_depth": 8},
        },
        {"train_batch_size": 8},
        ("checkpoint.tag_validation", "aio"),
    ),
    "a misplaced block": Sample(
        {"train_batch_size": 8, "offload_optimizer": {"device": "cpu"}},
        refused=("offload_optimizer",),
    ),
    "clipping in the optimizer": Sample(
        {
            "train_batch_size": 8,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "max_grad_norm": 1.0}},
        },
        refused=("optimizer.params.max_grad_norm",),
    ),
    "another program's keys": Sample(
        {"train_batch_size": 8, "model_name": "gpt", "num_layers": 24, "fp16": {"enabled": True}},
        refused=("model_name", "num_layers"),
    ),
}

"""Which names of DeepSpeed's are here and where, and what to use in place of those that are not."""

from collections.abc import Mapping

_C = "deepspeed_ext.compat"
ALL = "*"  # whatever the module has
_ADAM = {"deepspeed_ext.optim": "DeepSpeedCPUAdam FusedAdam"}
_SAFE = " ".join(
    f"safe_{does}_{scope}_{what}"
    for does in ("get", "set")
    for scope in ("full", "local")
    for what in ("fp32_param", "grad", "optimizer_state")
)
_SAFE += " safe_update_full_grad_vectorized"
_LEAVES = {
    "deepspeed_ext.engine.leaf_modules": "get_z3_leaf_modules set_z3_leaf_module"
    " set_z3_leaf_modules set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix"
    " unset_z3_leaf_modules z3_leaf_module",
}
_DROPPED = {
    "deepspeed_ext.ops": "GatherTokens ScatterTokens bert_sample_tokens gpt_sample_tokens",
}
_LOGS = {f"{_C}.conveniences": "log_dist logger"}
_OFFLOAD = "DeepSpeedZeroOffloadOptimizerConfig DeepSpeedZeroOffloadParamConfig"
_ZERO = {f"{_C}.zero": ALL}
_LAYER = "DeepSpeedTransformerConfig DeepSpeedTransformerLayer"
_ACTIVATIONS = {f"{_C}.activations": ALL}
_SPARSE = "deepspeed_ext.ops.sparse_attention"

# By the module of DeepSpeed's, '' for deepspeed itself: the names that it has, by where they are.
HERE: Mapping[str, Mapping[str, str]] = {
    "": {
        "deepspeed_ext": "init_inference",
        "deepspeed_ext.inference": "InferenceEngine",
        "deepspeed_ext.ops": _LAYER,
        f"{_C}.starting": "DeepSpeedConfig DeepSpeedConfigError add_config_arguments initialize",
        f"{_C}.conveniences": "OnDevice log_dist logger",
        f"{_C}.devices": "get_accelerator",
        f"{_C}.distributed": "init_distributed",
        f"{_C}.engine": "DeepSpeedEngine DeepSpeedOptimizer",
        f"{_C}.stand_in": "__version__ install",
    },
    "accelerator": {f"{_C}.devices": "get_accelerator"},
    "checkpoint": {},
    "checkpoint.utils": {f"{_C}.conveniences": "clone_tensors_for_torch_save"},
    "checkpointing": _ACTIVATIONS,
    "comm": {f"{_C}.distributed": ALL},
    "inference": {},
    "inference.engine": {"deepspeed_ext.inference": "InferenceEngine"},
    "launcher": {},
    "launcher.runner": {f"{_C}.launch": "DEEPSPEED_ENVIRONMENT_NAME main"},
    "moe": {},
    "moe.layer": {"deepspeed_ext.moe": "MoE"},
    "moe.utils": {"deepspeed_ext.moe": "split_params_into_different_moe_groups_for_optimizer"},
    "ops": {f"{_C}.compatible_ops": "__compatible_ops__"},
    "ops.adagrad": {"deepspeed_ext.optim": "DeepSpeedCPUAdagrad"},
    "ops.adam": _ADAM,
    "ops.aio": {"deepspeed_ext.op_builder": "AsyncIOBuilder", "deepspeed_ext.io": "aio_handle"},
    "ops.lamb": {"deepspeed_ext.optim": "FusedLamb"},
    "ops.lion": {"deepspeed_ext.optim": "DeepSpeedCPULion FusedLion"},
    "ops.op_builder": {"deepspeed_ext.op_builder": ALL},
    "ops.random_ltd": _DROPPED,
    "ops.random_ltd.dropping_utils": _DROPPED,
    "ops.sparse_attention": {_SPARSE: ALL},
    "ops.sparse_attention.bert_sparse_self_attention": {_SPARSE: "BertSparseSelfAttention"},
    "ops.sparse_attention.matmul": {_SPARSE: "MatMul"},
    "ops.sparse_attention.softmax": {_SPARSE: "Softmax"},
    "ops.sparse_attention.sparse_attention_utils": {_SPARSE: "SparseAttentionUtils"},
    "ops.sparse_attention.sparse_self_attention": {_SPARSE: "SparseSelfAttention"},
    "ops.sparse_attention.sparsity_config": {
        _SPARSE: " ".join(
            f"{pattern}SparsityConfig"
            for pattern in ("", "BSLongformer", "BigBird", "Dense", "Fixed", "LocalSlidingWindow")
        )
        + " VariableSparsityConfig"
    },
    "ops.transformer": {"deepspeed_ext.ops": _LAYER},
    "ops.transformer.transformer": {"deepspeed_ext.ops": _LAYER},
    "runtime": {},
    "runtime.activation_checkpointing": {},
    "runtime.activation_checkpointing.checkpointing": _ACTIVATIONS,
    "runtime.base_optimizer": {f"{_C}.engine": "DeepSpeedOptimizer"},
    "runtime.config": {f"{_C}.starting": "DeepSpeedConfig DeepSpeedConfigError"},
    "runtime.data_pipeline": {},
    "runtime.data_pipeline.data_routing": {},
    "runtime.data_pipeline.data_routing.basic_layer": {
        "deepspeed_ext.random_ltd": "RandomLayerTokenDrop"
    },
    "runtime.data_pipeline.data_routing.helper": {
        "deepspeed_ext.random_ltd": "convert_to_random_ltd remove_random_ltd_state_dict"
        " save_without_random_ltd"
    },
    "runtime.data_pipeline.data_routing.scheduler": {
        "deepspeed_ext.random_ltd": "RandomLTDScheduler"
    },
    "runtime.dataloader": {f"{_C}.conveniences": "RepeatingLoader"},
    "runtime.engine": {f"{_C}.engine": "DeepSpeedEngine"},
    "runtime.lr_schedules": {
        f"{_C}.schedules": ALL,
        "deepspeed_ext.optim.schedules": "LRRangeTest OneCycle WarmupCosineLR WarmupDecayLR"
        " WarmupLR",
    },
    "runtime.precision_config": {f"{_C}.starting": "DeepSpeedBF16Config DeepSpeedFP16Config"},
    "runtime.utils": {
        f"{_C}.conveniences": "move_to_device see_memory_usage set_random_seed",
    },
    "runtime.zero": _ZERO,
    "runtime.zero.config": {f"{_C}.starting": f"DeepSpeedZeroConfig {_OFFLOAD}"},
    "runtime.zero.leaf_module_config": {
        f"{_C}.starting": "DeepSpeedZeroLeafModuleConfig DEFAULT_LEAF_MODULE_CLASSES"
        " DEFAULT_LEAF_MODULE_NAMES DEFAULT_LEAF_MODULE_NAME_SUFFIXES"
    },
    "runtime.zero.offload_config": {
        f"{_C}.conveniences": "OffloadDeviceEnum",
        f"{_C}.starting": _OFFLOAD,
    },
    "runtime.zero.partition_parameters": {
        **_ZERO,
        f"{_C}.devices": "get_accelerator",
        f"{_C}.conveniences": "zero_wrapper_for_fp_tensor_constructor _orig_torch_arange",
    },
    "runtime.zero.utils": {f"{_C}.engine": "ZeRORuntimeException"},
    "utils": {
        f"{_C}.conveniences": "OnDevice RepeatingLoader instrument_w_nvtx log_dist logger",
        f"{_C}.distributed": "init_distributed",
        f"{_C}.parameters": _SAFE,
        **_LEAVES,
    },
    "utils.groups": {
        f"{_C}.distributed": "_get_data_parallel_group _get_data_parallel_rank"
        " _get_data_parallel_world_size",
    },
    "utils.logging": _LOGS,
    "utils.tensor_fragment": {f"{_C}.parameters": _SAFE},
    "utils.z3_leaf_module": _LEAVES,
    "utils.zero_to_fp32": {f"{_C}.whole_weights": ALL},
}

_PIPELINE = "cut the model by torch.distributed.pipelining, and give initialize one stage of it"
_TENSOR = "use torch.distributed.tensor.parallel"
_SEQUENCE = "use torch.distributed.tensor.experimental.context_parallel"
_EXPERTS = "use deepspeed_ext.moe.MoE, or the ops moe_route, moe_permute and moe_unpermute"
_GENERATION = "use deepspeed_ext.init_inference"

# What to use in place of these modules, which can be imported, and of all that is in them.
MODULES_NOT_HERE: Mapping[str, str] = {
    "autotuning": "run deepspeed_ext.offload.estimate and python -m deepspeed_ext.config check",
    "compression": "use deepspeed_ext.quantization after training",
    "elasticity": "use torchrun --nnodes MIN:MAX; checkpoints load on any number of processes",
    "inference.v2": _GENERATION,
    "module_inject": _GENERATION,
    "moe.experts": "use deepspeed_ext.moe.Experts",
    "moe.mappings": _EXPERTS,
    "moe.sharded_moe": _EXPERTS,
    "ops.transformer.inference": _GENERATION,
    "pipe": _PIPELINE,
    "profiling": "use torch.utils.flop_counter",
    "profiling.flops_profiler": "use torch.utils.flop_counter",
    "runtime.data_pipeline.curriculum_scheduler": "choose the samples in your loader",
    "runtime.hybrid_engine": _GENERATION,
    "runtime.pipe": _PIPELINE,
    "runtime.pipe.engine": _PIPELINE,
    "runtime.pipe.module": _PIPELINE,
    "runtime.pipe.topology": "use torch.distributed.device_mesh",
    "runtime.sequence_parallel": _SEQUENCE,
    "runtime.sequence_parallel.ulysses_sp": _SEQUENCE,
    "runtime.tensor_parallel": _TENSOR,
    "runtime.zero.tiling": "use plain linear layers, a block of which is gathered at a time",
    "sequence": _SEQUENCE,
    "sequence.layer": _SEQUENCE,
}
# What to use in place of these names, and of others in these modules.
NAMES_NOT_HERE: Mapping[str, str] = {
    "DeepSpeedHybridEngine": _GENERATION,
    "PipelineEngine": _PIPELINE,
    "PipelineModule": _PIPELINE,
    "add_tuning_arguments": "put the schedule into the config",
    "comm.log_summary": "use torch.profiler",
    "moe": _EXPERTS,
    "moe.utils": "optimizers need not know of experts: they are parts of plain parameters",
    "replace_transformer_layer": "use deepspeed_ext.patch, or deepspeed_ext.init_inference",
    "revert_transformer_layer": "use deepspeed_ext.unpatch",
    "runtime.data_pipeline": "choose the samples in your loader",
    "runtime.zero.offload_config.OffloadStateTypeEnum": "use offload_optimizer",
    "tp_model_init": _TENSOR,
    "utils.groups": "use torch.distributed.device_mesh",
}

"""The typed tree: each key that is accepted, with its type, its default and what comes of it.

Keys of parts that have not landed are rows of `refusals`. Names and defaults are DeepSpeed's.
"""

import math
from typing import Annotated, Any, ClassVar

from deepspeed_ext.config.block import Block
from deepspeed_ext.config.data_efficiency import DataEfficiency
from deepspeed_ext.config.kinds import (
    ANY_TEXT,
    ANYTHING,
    DTYPE,
    FLAG,
    HUGGING_FACE,
    PATH,
    SIZE,
    TEXT,
    TEXTS,
    Dtype,
    FrozenMapping,
    Key,
    Reader,
    choice,
    does,
    nowhere,
    number,
    so_anyway,
    whole,
)
from deepspeed_ext.config.precision import Bf16, Fp16
from deepspeed_ext.config.sparse_attention import SparseAttention

PARAMS = Reader("an object", FrozenMapping)

_BLOCKS = "parameters on NVMe come by pinned memory of two blocks"
_CACHE = "the kernel's page cache holds of parameters on NVMe what fits beside all else"
_RING = "state on disk comes and goes by a ring of 1 GiB at the most"
_BESIDE = "pieces of state are read and written beside the steps of others"
_LAUNCHER = "read by DeepSpeed's launcher alone"
_BY_BLOCK = "weights are gathered and gradients reduced block by block, each beside the next"
_OVERLAP = "reductions run beside backward"
_DEEPCOMPILE = "of deepcompile, which is refused"
_OUTPUT = "where the folder of this run is made; empty: the working folder"
_JOB = "DeepSpeedJobName"
_FLAT = "gradients of a block are reduced from one contiguous buffer"
_ANY_OPTIMIZER = "any optimizer is allowed; one that cannot be offloaded is an error by name"


class OffloadOptimizer(Block):
    """Where the optimizer's state rests."""

    place: ClassVar[str] = "zero_optimization.offload_optimizer."

    device: Annotated[
        str,
        choice("none", "cpu", "nvme"),
        does(
            "the optimizer's state rests in host memory, or on disk; it steps in host memory",
            filler="accelerate",
        ),
    ] = "none"
    pin_memory: Annotated[bool, FLAG, so_anyway("host copies beside a GPU are pinned")] = False
    ratio: Annotated[
        float, number(0, 1), does("this share of the parameters is offloaded, by bytes")
    ] = 1.0
    nvme_path: Annotated[Any, PATH, does("with device nvme, the folder of the state's file")] = None
    buffer_count: Annotated[int, whole(1), so_anyway(_RING)] = 4
    buffer_size: Annotated[int, SIZE, so_anyway(_RING)] = 100_000_000
    max_in_cpu: Annotated[int, SIZE, so_anyway(_CACHE)] = 1_000_000_000
    pipeline: Annotated[bool, FLAG, so_anyway(_BESIDE)] = False
    pipeline_read: Annotated[bool, FLAG, so_anyway(_BESIDE)] = False
    pipeline_write: Annotated[bool, FLAG, so_anyway(_BESIDE)] = False
    fast_init: Annotated[bool, FLAG, so_anyway("state is made where it rests")] = False


class OffloadParam(Block):
    """Where parameters rest; for stage 3."""

    place: ClassVar[str] = "zero_optimization.offload_param."

    device: Annotated[
        str,
        choice("none", "cpu", "nvme"),
        does(
            "in stage 3 parameters rest in host memory or, of one process, on disk, and the"
            " optimizer steps there; below nothing, as in DeepSpeed",
            filler="accelerate",
        ),
    ] = "none"
    pin_memory: Annotated[bool, FLAG, so_anyway("host memory beside a GPU is pinned")] = False
    nvme_path: Annotated[
        Any, PATH, does("with device nvme, the folder of the file that has the parameters")
    ] = None
    buffer_count: Annotated[int, whole(1), so_anyway(_BLOCKS)] = 5
    buffer_size: Annotated[int, SIZE, so_anyway(_BLOCKS)] = 100_000_000
    max_in_cpu: Annotated[int, SIZE, so_anyway(_CACHE)] = 1_000_000_000


_NONE: list[str] = []
_MIXTURES = [  # of transformers, whose processes may call different experts
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
]


class LeafModule(Block):
    """Modules that stage 3 gathers with all that is in them; the log names what is not there."""

    place: ClassVar[str] = "zero_optimization.leaf_module."

    classes: Annotated[
        list[str], TEXTS, does("their classes, with or without the module that these are of")
    ] = _MIXTURES
    names: Annotated[list[str], TEXTS, does("their names in the model")] = _NONE
    name_suffixes: Annotated[list[str], TEXTS, does("what their names end with")] = _NONE


class ZeroOptimization(Block):
    """The stage of ZeRO, and what is offloaded."""

    place: ClassVar[str] = "zero_optimization."

    stage: Annotated[
        int,
        whole(0, 3),
        does("shards optimizer state (1), gradients too (2), weights too (3)", filler="accelerate"),
    ] = 0
    offload_optimizer: Annotated[
        OffloadOptimizer, does("where the optimizer's state rests and steps")
    ] = OffloadOptimizer()
    offload_param: Annotated[OffloadParam, does("where parameters rest in stage 3")] = (
        OffloadParam()
    )
    leaf_module: Annotated[
        LeafModule, does("which modules are gathered with all that is in them")
    ] = LeafModule()
    ignore_unused_parameters: Annotated[
        bool,
        FLAG,
        does("false: parameters without gradients are reduced as zeros"),
    ] = True
    stage3_gather_16bit_weights_on_model_save: Annotated[
        bool,
        FLAG,
        does(
            "save_16bit_model, and Trainer's save_model, write whole weights in stage 3 too",
            "gather_16bit_weights_on_model_save",
            "stage3_gather_fp16_weights_on_model_save",
            "gather_fp16_weights_on_model_save",
            auto_is_default=True,
        ),
    ] = False
    cpu_offload: Annotated[
        bool, FLAG, does("an old name: true is offload_optimizer with device cpu")
    ] = False
    cpu_offload_params: Annotated[
        bool,
        FLAG,
        does("an old name: true is offload_param with device cpu", "cpu_offload_param"),
    ] = False
    cpu_offload_use_pin_memory: Annotated[
        bool, FLAG, does("an old name: true is pin_memory in offload_optimizer")
    ] = False

    overlap_comm: Annotated[bool, FLAG, so_anyway(_OVERLAP)] = False
    contiguous_gradients: Annotated[bool, FLAG, so_anyway(_FLAT)] = True
    reduce_scatter: Annotated[
        bool, FLAG, so_anyway("sharded gradients are reduced by reduce-scatter")
    ] = True
    use_multi_rank_bucket_allreduce: Annotated[
        bool, FLAG, so_anyway("sharded gradients are reduced by reduce-scatter")
    ] = True
    allgather_partitions: Annotated[bool, FLAG, so_anyway("weights are gathered by all-gather")] = (
        True
    )
    use_all_reduce_for_fetch_params: Annotated[
        bool,
        FLAG,
        so_anyway("weights are gathered by all-gather", "stage3_use_all_reduce_for_fetch_params"),
    ] = False
    allgather_sequential: Annotated[bool, FLAG, so_anyway(_BY_BLOCK)] = False
    reduce_bucket_size: Annotated[int, SIZE, so_anyway(_BY_BLOCK)] = 500_000_000
    allgather_bucket_size: Annotated[int, SIZE, so_anyway(_BY_BLOCK)] = 500_000_000
    round_robin_gradients: Annotated[
        bool, FLAG, so_anyway("each block's gradients are divided evenly among processes")
    ] = False
    sub_group_size: Annotated[
        int, SIZE, so_anyway("the optimizer steps in buckets of a size of its own")
    ] = 1_000_000_000
    stage3_max_live_parameters: Annotated[
        int,
        SIZE,
        so_anyway("stage 3 gathers at most two blocks of weights at a time", "max_live_parameters"),
    ] = 1_000_000_000
    stage3_max_reuse_distance: Annotated[
        int,
        SIZE,
        so_anyway("stage 3 gathers at most two blocks of weights at a time", "max_reuse_distance"),
    ] = 1_000_000_000
    stage3_prefetch_bucket_size: Annotated[
        int,
        SIZE,
        so_anyway("the next block is gathered while one computes", "prefetch_bucket_size"),
    ] = 50_000_000
    stage3_param_persistence_threshold: Annotated[
        int,
        SIZE,
        so_anyway("small parameters are gathered with their block", "param_persistence_threshold"),
    ] = 100_000
    stage3_model_persistence_threshold: Annotated[
        int,
        SIZE,
        so_anyway("small parameters are gathered with their block", "model_persistence_threshold"),
    ] = 2**63 - 1
    load_from_fp32_weights: Annotated[
        bool, FLAG, so_anyway("checkpoints hold master weights, and these are loaded")
    ] = True
    elastic_checkpoint: Annotated[
        bool, FLAG, so_anyway("any number of processes loads a checkpoint")
    ] = False
    pipeline_loading_checkpoint: Annotated[
        bool, FLAG, so_anyway("a checkpoint is read to where it stays")
    ] = False
    memory_efficient_linear: Annotated[
        bool, FLAG, so_anyway("linear layers keep no copy of a gathered weight")
    ] = True
    override_module_apply: Annotated[
        bool, FLAG, nowhere("of DeepSpeed's Init; zero.Init draws in shards")
    ] = True
    module_granularity_threshold: Annotated[int, SIZE, so_anyway(_BY_BLOCK)] = 0
    log_trace_cache_warnings: Annotated[
        bool, FLAG, so_anyway("no trace of modules is kept, so none goes stale")
    ] = False
    enable_sanity_checks: Annotated[
        bool, FLAG, so_anyway("shards and processes are checked always")
    ] = False


class Optimizer(Block):
    """The optimizer that is made where none is given."""

    place: ClassVar[str] = "optimizer."

    type: Annotated[str, TEXT, does("Adam, AdamW, Lamb, Lion, Adagrad, SGD or any of torch.optim")]
    params: Annotated[FrozenMapping, PARAMS, does("arguments of the optimizer, such as lr")] = (
        FrozenMapping({})
    )
    legacy_fusion: Annotated[Any, ANYTHING, nowhere("of kernels that are gone")] = None


class Scheduler(Block):
    """The schedule that is made where none is given."""

    place: ClassVar[str] = "scheduler."

    type: Annotated[
        str,
        TEXT,
        does("WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest or any of torch's"),
    ]
    params: Annotated[
        FrozenMapping, PARAMS, does("arguments of the schedule, such as warmup_num_steps")
    ] = FrozenMapping({})


class Compile(Block):
    """torch.compile."""

    place: ClassVar[str] = "compile."

    disable: Annotated[bool, FLAG, does("false: the model is compiled by torch.compile")] = True
    enabled: Annotated[bool, FLAG, does("an older name: true is disable false")] = False
    backend: Annotated[str, TEXT, does("of torch.compile")] = "inductor"
    kwargs: Annotated[FrozenMapping, PARAMS, does("arguments of torch.compile, such as mode")] = (
        FrozenMapping({})
    )
    double_buffer: Annotated[Any, ANYTHING, nowhere(_DEEPCOMPILE)] = None
    symmetric_memory: Annotated[Any, ANYTHING, nowhere(_DEEPCOMPILE)] = None
    free_activation: Annotated[Any, ANYTHING, nowhere(_DEEPCOMPILE)] = None
    offload_activation: Annotated[Any, ANYTHING, nowhere(_DEEPCOMPILE)] = None
    offload_opt_states: Annotated[Any, ANYTHING, nowhere(_DEEPCOMPILE)] = None
    offload_parameters: Annotated[Any, ANYTHING, nowhere(_DEEPCOMPILE)] = None
    debug_log: Annotated[Any, ANYTHING, nowhere(_DEEPCOMPILE)] = None

    @property
    def compiles(self) -> bool:
        """Whether the model is compiled."""
        return self.enabled or not self.disable


class Tensorboard(Block):
    """Metrics of each step in files of TensorBoard; the package tensorboard has to be there."""

    place: ClassVar[str] = "tensorboard."

    enabled: Annotated[bool, FLAG, does("metrics of each step are written")] = False
    output_path: Annotated[str, ANY_TEXT, does(_OUTPUT)] = ""
    job_name: Annotated[str, TEXT, does("the folder of this run")] = _JOB


class CsvMonitor(Block):
    """Metrics of each step in files of comma-separated values, one for each metric."""

    place: ClassVar[str] = "csv_monitor."

    enabled: Annotated[bool, FLAG, does("metrics of each step are written")] = False
    output_path: Annotated[str, ANY_TEXT, does(_OUTPUT)] = ""
    job_name: Annotated[str, TEXT, does("the folder of this run")] = _JOB


class Wandb(Block):
    """Metrics of each step for Weights & Biases; the package wandb has to be there."""

    place: ClassVar[str] = "wandb."

    enabled: Annotated[bool, FLAG, does("metrics of each step are written")] = False
    group: Annotated[str | None, TEXT, does("of the run")] = None
    team: Annotated[str | None, TEXT, does("whose run it is")] = None
    project: Annotated[str, TEXT, does("of the run")] = "deepspeed"


class Checkpoint(Block):
    """How checkpoints are written."""

    place: ClassVar[str] = "checkpoint."

    tag_validation: Annotated[
        str,
        choice("Ignore", "Warn", "Fail"),
        so_anyway("a tag that differs between processes is an error"),
    ] = "Warn"
    parallel_write: Annotated[Any, ANYTHING, so_anyway("all processes write at once")] = None


class DataTypes(Block):
    """In what gradients are added up."""

    place: ClassVar[str] = "data_types."

    grad_accum_dtype: Annotated[
        Dtype | None, DTYPE, so_anyway("micro-steps are added up in float32")
    ] = None


class ActivationCheckpointing(Block):
    """What checkpoints of activations keep, and where."""

    place: ClassVar[str] = "activation_checkpointing."

    cpu_checkpointing: Annotated[
        bool,
        FLAG,
        does(
            "inputs of checkpoints, torch's and checkpointing.checkpoint's, rest in host memory"
            " until backward wants them"
        ),
    ] = False
    partition_activations: Annotated[
        bool,
        FLAG,
        does(
            "the processes of an mpu that checkpointing.configure is given share inputs of its"
            " checkpoints out; others have inputs of their own"
        ),
    ] = False
    contiguous_memory_optimization: Annotated[
        bool, FLAG, so_anyway("torch's allocator keeps memory in large pieces")
    ] = False
    number_checkpoints: Annotated[
        int | None, whole(1), nowhere("of contiguous_memory_optimization")
    ] = None
    synchronize_checkpoint_boundary: Annotated[
        bool, FLAG, nowhere("to measure time; use torch.profiler")
    ] = False
    profile: Annotated[bool, FLAG, nowhere("to measure time; use torch.profiler")] = False


_AVERAGED = (
    "the reduction gives gradient_allreduce_op, whatever is divided before or after the reduction"
)


class Root(Block):
    """The whole config."""

    train_batch_size: Annotated[
        int | None,
        whole(1),
        does("samples in a step, over all processes", filler=HUGGING_FACE),
    ] = None
    train_micro_batch_size_per_gpu: Annotated[
        int | None,
        whole(1),
        does("samples in a micro-step of one process", filler=HUGGING_FACE),
    ] = None
    gradient_accumulation_steps: Annotated[
        int | None, whole(1), does("micro-steps in a step", filler=HUGGING_FACE)
    ] = None
    zero_optimization: Annotated[ZeroOptimization, does("ZeRO")] = ZeroOptimization()
    bf16: Annotated[Bf16, does("bfloat16", "bfloat16")] = Bf16()
    fp16: Annotated[Fp16, does("float16")] = Fp16()
    gradient_clipping: Annotated[
        float,
        number(0),
        does("gradients are scaled down to this norm; 0: never", filler=HUGGING_FACE),
    ] = 0.0
    optimizer: Annotated[Optimizer | None, does("the optimizer")] = None
    scheduler: Annotated[Scheduler | None, does("the schedule")] = None
    communication_data_type: Annotated[Dtype | None, DTYPE, does("gradients are reduced in it")] = (
        None
    )
    managed_gradient_accumulation: Annotated[
        bool,
        FLAG,
        does("false: each engine.step ends a step, of however many backwards there were"),
    ] = True
    gradient_allreduce_op: Annotated[
        str, choice("mean", "sum"), does("what gradients of the processes are reduced to")
    ] = "mean"
    prescale_gradients: Annotated[bool, FLAG, so_anyway(_AVERAGED)] = False
    gradient_predivide_factor: Annotated[float, number(0, above=True), so_anyway(_AVERAGED)] = 1.0
    data_types: Annotated[DataTypes, does("in what gradients are added up")] = DataTypes()
    steps_per_print: Annotated[
        float, number(0, above=True, infinite=True), does("so many steps from report to report")
    ] = math.inf
    dataloader_drop_last: Annotated[
        bool, FLAG, does("the loader leaves out a last micro-batch that is not full")
    ] = False
    checkpoint: Annotated[Checkpoint, does("how checkpoints are written")] = Checkpoint()
    compile: Annotated[Compile, does("torch.compile")] = Compile()
    wall_clock_breakdown: Annotated[
        bool,
        FLAG,
        does("forward, backward and step are timed, of steps that are logged; else of each"),
    ] = False
    memory_breakdown: Annotated[
        bool,
        FLAG,
        does("memory after forward, backward and step, of steps that are logged; else of each"),
    ] = False
    dump_state: Annotated[bool, FLAG, does("what the engine is made of is logged once")] = False
    tensorboard: Annotated[Tensorboard, does("metrics in TensorBoard")] = Tensorboard()
    csv_monitor: Annotated[CsvMonitor, does("metrics in files")] = CsvMonitor()
    wandb: Annotated[Wandb, does("metrics in Weights & Biases")] = Wandb()
    data_efficiency: Annotated[DataEfficiency, does("fewer tokens")] = DataEfficiency()
    activation_checkpointing: Annotated[
        ActivationCheckpointing, does("what checkpoints keep, and where")
    ] = ActivationCheckpointing()
    sparse_attention: Annotated[
        SparseAttention | None, does("a pattern, for the model to ask for")
    ] = None

    zero_allow_untested_optimizer: Annotated[bool, FLAG, so_anyway(_ANY_OPTIMIZER)] = False
    zero_force_ds_cpu_optimizer: Annotated[bool, FLAG, so_anyway(_ANY_OPTIMIZER)] = True

    aio: Annotated[Any, ANYTHING, so_anyway("the I/O engine finds out what the disk takes")] = None
    nvme_path: Annotated[Any, ANYTHING, nowhere("that of offload_optimizer acts")] = None
    pipeline: Annotated[Any, ANYTHING, nowhere("of pipeline modules, which are not here")] = None
    autotuning: Annotated[Any, ANYTHING, nowhere(_LAUNCHER)] = None
    elasticity: Annotated[Any, ANYTHING, nowhere(_LAUNCHER)] = None
    disable_allgather: Annotated[Any, ANYTHING, nowhere("read by nobody")] = None
    cuda_visible_devices: Annotated[
        Any, ANYTHING, nowhere("the environment variable of that name is what acts")
    ] = None


# Arguments of optimizers and schedules are passed on; these are known.
OPTIMIZER_PARAMS = {
    "lr": does("the learning rate", filler=HUGGING_FACE),
    "betas": does("the decay of both moments", filler=HUGGING_FACE),
    "eps": does("is added to the denominator", filler=HUGGING_FACE),
    "weight_decay": does("the decay of the weights", filler=HUGGING_FACE),
    "bias_correction": does("whether moments are corrected for beginning at 0"),
    "torch_adam": does("true: torch's own class, but with offload_optimizer"),
    "adam_w_mode": does("false: Adam adds the decay to the gradient; Adam decouples it else"),
    "max_coeff": does("the largest trust ratio of Lamb"),
    "min_coeff": does("the smallest trust ratio of Lamb"),
    "cuda_aware": so_anyway("the process group decides how messages go"),
    "comm_backend_name": so_anyway("the process group decides how messages go"),
}
SCHEDULER_PARAMS = {
    "warmup_min_lr": does("the rate of the first step", filler=HUGGING_FACE),
    "warmup_max_lr": does("the rate after the warm-up", filler=HUGGING_FACE),
    "warmup_num_steps": does("steps of the warm-up", filler=HUGGING_FACE),
    "warmup_type": does("log or linear"),
    "total_num_steps": does("steps until the rate is 0", filler=HUGGING_FACE),
}
COMPILE_KWARGS = {
    "mode": does("default, reduce-overhead, max-autotune and others"),
    "dynamic": does("true: sizes are compiled as variables"),
}
KNOWN_PARAMS: dict[str, dict[str, Key]] = {
    "optimizer.params.": OPTIMIZER_PARAMS,
    "scheduler.params.": SCHEDULER_PARAMS,
    "compile.kwargs.": COMPILE_KWARGS,
}

"""What is refused by name: parts that are not here. A part that lands leaves the list.

Each row says which values of a key ask for nothing; those are accepted.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from deepspeed_ext.config.kinds import FLAG, number_of

Test = Callable[[object], bool]


@dataclass(frozen=True)
class Refusal:
    """A key, or a value of one, that asks for what is not here.

    Args:
        key: its path.
        asks: does this value ask for it?
        expected: what is accepted, for the error.
        instead: a clause that says what to use.
    """

    key: str
    asks: Test
    expected: str
    instead: str


def _is_true(value: object) -> bool:
    """Tell whether a flag is on, also one that is written as a text; what is no flag is."""
    try:
        return bool(FLAG.read(value))
    except ValueError:
        return True


def _is_on(block: object) -> bool:
    """Tell whether a block is switched on: without `enabled: true` it is not."""
    return _is_true(block.get("enabled", False)) if isinstance(block, Mapping) else _is_true(block)


def _has_any_on(block: object) -> bool:
    """The same for a block whose parts have switches of their own."""
    if not isinstance(block, Mapping):
        return _is_true(block)
    inner = [value for value in block.values() if isinstance(value, Mapping)]
    return _is_on(block) or any(map(_has_any_on, inner))


def _is_other_than(*accepted: float) -> Test:
    def asks(value: object) -> bool:
        try:
            return number_of(value) not in accepted
        except (ValueError, TypeError):
            return not (value is False and 0 in accepted)

    return asks


def _is_one_of(*texts: str) -> Test:
    return lambda value: isinstance(value, str) and value.strip().lower() in texts


def _is_none_of(*texts: str) -> Test:
    return lambda value: str(value).strip().lower() not in texts


def _splits_tensors(block: object) -> bool:
    if not isinstance(block, Mapping):
        return _is_true(block)
    return _is_on(block) or _is_other_than(0, 1)(block.get("autotp_size", 0))


def _always(value: object) -> bool:
    return True


def _flag(key: str, instead: str) -> Refusal:
    return Refusal(key, _is_true, "false", instead)


def _block(key: str, instead: str) -> Refusal:
    return Refusal(key, _is_on, "enabled false", instead)


def _unfit(key: str, instead: str) -> Refusal:
    return Refusal(key, _always, "no such key", instead)


_ZERO = "zero_optimization."
_PROFILER = "use torch.profiler"
_QUANTIZED = "messages are not quantized yet; leave it out"
_MESH = "give zero.shard a mesh of two dimensions"
_ONE_BIT = "use Adam or Lamb; 1-bit optimizers are not here"
_DATA = "choose the samples in your loader"
_COMPILE = "use compile.disable false, which is torch.compile"
_TENSOR = "use torch.distributed.tensor.parallel"

REFUSALS = (
    _flag(f"{_ZERO}offload_optimizer.super_offload", "use device cpu, whose steps overlap too"),
    Refusal(
        f"{_ZERO}offload_optimizer.cpuadam_cores_perc",
        _is_other_than(0.8),
        "0.8, the default",
        "set OMP_NUM_THREADS",
    ),
    _flag(f"{_ZERO}legacy_stage1", "leave it out; there is one stage 1"),
    _flag(f"{_ZERO}zero_quantized_weights", _QUANTIZED),
    _flag(f"{_ZERO}zero_quantized_gradients", _QUANTIZED),
    _flag(f"{_ZERO}zero_quantized_nontrainable_weights", _QUANTIZED),
    _unfit(f"{_ZERO}zeropp_loco_param", _QUANTIZED),
    Refusal(f"{_ZERO}zero_hpz_partition_size", _is_other_than(1), "1", _MESH),
    Refusal(f"{_ZERO}mics_shard_size", _is_other_than(-1, 1), "-1 or 1", _MESH),
    _flag(f"{_ZERO}mics_hierarchical_params_gather", _MESH),
    _unfit(f"{_ZERO}zenflow", "use offload_optimizer with device cpu, whose steps overlap too"),
    _flag("fp16.consecutive_hysteresis", "leave it out; the count is filled when the scale grows"),
    _flag("fp16.fp16_master_weights_and_grads", "master weights are float32; leave it out"),
    _block("amp", "use bf16 or fp16"),
    _block("torch_autocast", "use bf16 or fp16, or torch.autocast in the model"),
    _flag("compile.deepcompile", _COMPILE),
    _flag("compile.autoep_non_moe", _COMPILE),
    Refusal("compile.passes", bool, "no passes", _COMPILE),
    Refusal(
        "data_types.grad_accum_dtype",
        _is_none_of("fp32", "float32", "torch.float32"),
        '"fp32"',
        "use communication_data_type",
    ),
    _unfit("data_types.param_dtype", "use bf16 or fp16"),
    _unfit("data_types.buffer_dtype", "cast the buffers of the model before initialize"),
    _flag("sparse_gradients", "use dense embeddings, sparse=False"),
    Refusal("timers", _has_any_on, "enabled false", _PROFILER),
    _flag("graph_harvesting", "call torch.compile on the model's blocks"),
    _flag("use_data_before_expert_parallel_", "give moe.MoE a mesh"),
    _block("comms_logger", _PROFILER),
    _block("flops_profiler", "use torch.utils.flop_counter"),
    _block("comet", "use tensorboard, wandb or csv_monitor"),
    _block("eigenvalue", "it serves quantization while training, which is not here"),
    _block("progressive_layer_drop", "drop layers in the model's forward"),
    _block("curriculum_learning", _DATA),
    Refusal("data_efficiency.data_sampling", _has_any_on, "enabled false", _DATA),
    _block(
        "data_efficiency.data_routing.random_ltd.layer_token_lr_schedule",
        "use a schedule of rates, as DeepSpeed has none of tokens either",
    ),
    Refusal("random_ltd", _has_any_on, "enabled false", "put it into data_efficiency.data_routing"),
    Refusal(
        "compression_training",
        _has_any_on,
        "enabled false throughout",
        "quantize after training by deepspeed_ext.quantization",
    ),
    _block("quantize_training", "quantize after training by deepspeed_ext.quantization"),
    Refusal("tensor_parallel", _splits_tensors, "autotp_size 0 or 1", _TENSOR),
    Refusal("sequence_parallel_size", _is_other_than(1), "1", _TENSOR),
    _unfit("seq_parallel_communication_data_type", "use communication_data_type"),
    _block("hybrid_engine", "use deepspeed_ext.init_inference for generation"),
    _block("nebula", "use engine.save_checkpoint, which is durable"),
    _unfit("vocabulary_size", "leave it out; it only warns of slow sizes"),
    _flag("checkpoint.load_universal", "load the folder that was saved here"),
    _flag("checkpoint.use_node_local_storage", "save to a folder that all hosts share"),
    Refusal(
        "optimizer.type",
        _is_one_of("onebitadam", "zerooneadam", "onebitlamb"),
        '"Adam", "Lamb" or another',
        _ONE_BIT,
    ),
    Refusal(
        "optimizer.type",
        _is_one_of("muon", "adafactor"),
        '"Adam" or another',
        "give initialize the optimizer itself",
    ),
    *(
        _unfit(f"optimizer.params.{name}", _ONE_BIT)
        for name in ("freeze_step", "coeff_beta", "factor_max", "factor_min", "factor_threshold")
    ),
    *(
        _unfit(f"optimizer.params.{name}", _ONE_BIT)
        for name in ("var_freeze_step", "var_update_scaler", "local_step_scaler")
    ),
    _unfit("optimizer.params.local_step_clipper", _ONE_BIT),
    _unfit("optimizer.params.max_grad_norm", "use gradient_clipping"),
)
OF = {row.key: tuple(each for each in REFUSALS if each.key == row.key) for row in REFUSALS}

"""How much memory training by a config takes, of a model that a folder describes."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from deepspeed_ext.config.classes import Named, steps_in_host
from deepspeed_ext.config.config import Config
from deepspeed_ext.io.checkpoint.shards import Shards
from deepspeed_ext.offload.memory_estimate import AT_REST, GRADIENTS, SHADOW, SUMS, WEIGHTS
from deepspeed_ext.offload.streamed import AT_HOME, set_home
from deepspeed_ext.ops.optimizers.state_formats import BLOCK
from deepspeed_ext.optim.base import FlatStateOptimizer
from deepspeed_ext.optim.formats import SCALE
from deepspeed_ext.zero.streaming.rest import large_ones

OP = "config check"
_SAMPLE = 1 << 12  # elements of a parameter that tells what a class of torch's keeps
_NO_STATE = (GRADIENTS, SUMS, SHADOW)
_OF_A_BLOCK = re.compile(r".*?\.\d+\.")  # the name up to its first number
Described = Mapping[str, Tensor]


@dataclass
class Needs:
    """Bytes by kind that each process needs, beside activations.

    Attributes:
        gpu: where the parameters are.
        host: of host memory.
        scratch: of what rests on a disk.
        disk: of a checkpoint of all processes together.
    """

    gpu: Counter[str] = field(default_factory=Counter)
    host: Counter[str] = field(default_factory=Counter)
    scratch: Counter[str] = field(default_factory=Counter)
    disk: int = 0

    def rows(self) -> Iterator[tuple[str, int, int, int]]:
        """Yield kind, bytes on the GPU, in host memory and on disk; the totals last."""
        columns = self.gpu, self.host, self.scratch
        for kind in dict.fromkeys((*self.gpu, *self.host, *self.scratch)):
            if any(column[kind] for column in columns):
                yield kind, self.gpu[kind], self.host[kind], self.scratch[kind]
        yield "a checkpoint, of all", 0, 0, self.disk
        yield "total", self.gpu.total(), self.host.total(), self.scratch.total() + self.disk


def described(folder: Path) -> dict[str, Tensor]:
    """Return the floating-point tensors of a folder of safetensors files, on meta.

    Raises:
        OSError, ValueError: it is no such folder.
    """
    saved = Shards(OP, folder).tensors
    made = {name: torch.empty(s.shape, dtype=s.dtype, device="meta") for name, s in saved.items()}
    found = {name: tensor for name, tensor in made.items() if tensor.is_floating_point()}
    if not found:
        raise ValueError(f"{OP}: {folder} has no weights, expected some of a floating-point dtype")
    return found


def needs_of(config: Config, weights: Described, processes: int) -> Needs:
    """Return what each process needs, by the table in the text of `zero.shard`.

    All weights are taken to be trained, and the blocks of stage 3 to be those that have a number in
    their name. Processes hold as many rows as the one that has most.

    Weights that rest in host memory have gradients and state there, too. Those of one process are
    taken to stream, by `zero.stream`.

    Args:
        config: that was read.
        weights: by name, on meta.
        processes: that share the model.

    Raises:
        ValueError: the optimizer of the config is none, or the batch sizes do not fit together.
    """
    stage, is_mixed = config.zero_optimization.stage, config.used_dtype is not None
    if config.offloads_params and processes == 1 and _is_offloaded(config):
        return _streamed(config, weights)
    shares = processes if stage else 1
    if is_mixed:  # what is kept are master weights, if there are any
        kept = torch.bfloat16 if config.low_precision else torch.float32
        weights = {name: weight.to(kept) for name, weight in weights.items()}
    needs = _kept(config, [_rows(weight, shares) for weight in weights.values()])
    kinds = (needs.gpu + needs.host).items()
    state = sum(n for kind, n in kinds if kind not in (WEIGHTS, *_NO_STATE))
    needs.disk = sum(weight.nbytes for weight in weights.values()) + shares * state
    if is_mixed or processes > 1 or stage == 3:
        _add_gathered(needs.gpu, config, weights, processes)
    return needs


def _is_offloaded(config: Config) -> bool:
    """Tell whether OffloadOptimizer steps what rests, or nothing does."""
    return config.optimizer is None or steps_in_host(config.optimizer.type)


def _streamed(config: Config, weights: Described) -> Needs:
    """Return what one process needs whose weights come block by block."""
    dtype = config.used_dtype
    params = {n: nn.Parameter(w if dtype is None else w.to(dtype)) for n, w in weights.items()}
    blocks: dict[str, list[str]] = {}
    for name in weights:
        if found := _OF_A_BLOCK.match(name):
            blocks.setdefault(found[0], []).append(name)
    rest = [large_ones([params[name] for name in names]) for names in blocks.values()]
    for param in (param for block in rest for param in block):
        set_home(param, AT_HOME)
    sizes = sorted((sum(param.nbytes for param in block) for block in rest), reverse=True)
    of_all = sum(param.nbytes for param in params.values())
    needs = Needs(Counter({WEIGHTS: of_all - sum(sizes)}))
    if config.optimizer is not None:
        named = Named(OP, config.optimizer.type, config.optimizer.params, "cpu", True)
        more = {"master": "float32"} if config.has_masters else {}
        estimate = named.estimated([*params.values()], 0.0, free_grads=True, **more)
        needs = Needs(Counter(estimate.gpu), Counter(estimate.host))
    state = sum(n for kind, n in needs.host.items() if kind not in (WEIGHTS, *_NO_STATE))
    needs.disk = of_all + state
    needs.gpu["blocks on the GPU"] = sum(sizes[:2])
    if config.zero_optimization.offload_param.device == "nvme":
        needs.host["blocks that are read"] = 2 * max(sizes, default=0)
        needs.scratch[AT_REST] = sum(sizes)
    else:
        needs.host[AT_REST] = sum(sizes)
    return needs


def _rows(weight: Tensor, shares: int) -> nn.Parameter:
    shape = [-(-weight.shape[0] // shares), *weight.shape[1:]] if weight.dim() else []
    return nn.Parameter(torch.empty(shape, dtype=weight.dtype, device="meta"))


def _kept(config: Config, params: list[nn.Parameter]) -> Needs:
    """Return weights, gradients and state, as they are from step to step."""
    weights = sum(param.nbytes for param in params)
    block, needs = config.optimizer, Needs(Counter({WEIGHTS: weights}))
    if block is None:
        return Needs(host=needs.gpu) if config.offloads_params else needs
    offload, rests = config.zero_optimization.offload_optimizer, config.offloads_params
    offloads = offload.device == "cpu"
    named = Named(OP, block.type, block.params, "cpu", offloads, config.state_dtype)
    tried = named.tried([{"params": params}])
    if offloads:
        found = named.estimated(params, 1 if rests else 1 - offload.ratio)
        needs.gpu, needs.host = Counter(found.gpu), Counter(found.host)
        return Needs(host=needs.gpu + needs.host) if rests else needs
    needs.gpu[GRADIENTS] = weights
    for dtype in {param.dtype for param in params}:
        elements = sum(param.numel() for param in params if param.dtype == dtype)
        for key, size in _state_of_an_element(tried, dtype).items():
            needs.gpu[key] += math.ceil(elements * size)
    return Needs(host=needs.gpu) if rests else needs


def _state_of_an_element(tried: torch.optim.Optimizer, dtype: torch.dtype) -> dict[str, float]:
    """Return the bytes of state for each element of a parameter, by key."""
    group = tried.param_groups[0]
    if isinstance(tried, FlatStateOptimizer):
        dtypes = tried.state_format.dtypes(tried.spec.state_keys(group), dtype)
        sizes = {key: float(kept.itemsize) for key, kept in dtypes.items()}
        coded = [key for key, kept in dtypes.items() if kept == torch.uint8]
        return sizes | {key + SCALE: 4 / BLOCK for key in coded}
    param = nn.Parameter(torch.zeros(_SAMPLE, 1, dtype=dtype))
    param.grad = torch.zeros_like(param)
    group["params"][:] = [param]
    try:
        tried.step()
    except Exception as error:  # such as of one that wants sparse gradients
        name = type(tried).__name__
        raise ValueError(f"{OP}: optimizer.type is {name}, whose step fails: {error}") from error
    tensors = {k: v for k, v in tried.state[param].items() if isinstance(v, Tensor) and v.dim()}
    return {key: tensor.nbytes / _SAMPLE for key, tensor in tensors.items()}


def _add_gathered(gpu: Counter[str], config: Config, weights: Described, processes: int) -> None:
    """Add what lies beside what is kept while forward and backward are under way."""
    is_mixed = config.bf16.enabled or config.fp16.enabled
    has_masters = is_mixed and not config.low_precision
    summed = config.communication_data_type or (torch.float32 if has_masters else None)
    blocks: Counter[str] = Counter()
    sums: Counter[str] = Counter()
    for name, weight in weights.items():
        found = _OF_A_BLOCK.match(name)
        block = found[0] if found else ""
        used = 2 if is_mixed else weight.element_size()
        blocks[block] += weight.numel() * used
        sums[block] += weight.numel() * (summed.itemsize if summed else used)
    largest = sorted((size for name, size in blocks.items() if name), reverse=True)
    stage, steps = config.zero_optimization.stage, config.batch_sizes(processes).steps
    gpu["gathered weights"] = blocks[""] + sum(largest[:2]) if stage == 3 else blocks.total()
    of_all = stage < 2 and steps > 1
    gpu["gradients on their way"] = sums.total() if of_all else max(sums.values(), default=0)
    gpu["gradients on their way"] += max(blocks.values(), default=0)

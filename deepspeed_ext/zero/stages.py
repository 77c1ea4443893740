"""shard: the stages of ZeRO as settings of torch's fully_shard."""

import logging
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn.parameter import is_lazy

from deepspeed_ext.dtensors import RESTS
from deepspeed_ext.torch_internals.tensors import has_gradient_hooks
from deepspeed_ext.zero.agreement import check_agreement
from deepspeed_ext.zero.all_processes import mesh_of_all
from deepspeed_ext.zero.blocks import Block, blocks_of
from deepspeed_ext.zero.kinds_of_parameters import is_sharded
from deepspeed_ext.zero.rows import in_whole_shapes
from deepspeed_ext.zero.sharding import Sharding
from deepspeed_ext.zero.shared_experts import (
    check_experts,
    described_experts,
    experts_of,
    how_to_shard,
)
from deepspeed_ext.zero.streaming import is_streamed

_OP = "zero.shard"
_log = logging.getLogger("deepspeed_ext")


def shard(
    model: nn.Module,
    stage: int,
    *,
    mesh: DeviceMesh | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    output_dtype: torch.dtype | None = None,
    blocks: Iterable[Block] | None = None,
    reduce_unused: bool = False,
    offload: str | None = None,
) -> nn.Module:
    """Shard a model over processes by a stage of ZeRO, in place.

    Parameters become DTensors, of which each process holds some rows. Make the optimizer after it,
    from model.parameters(), and go through several backwards for one step by `accumulate`.

    What a process keeps and sends, in elements for each parameter. There are n processes and m
    micro-steps in a step; w, c and g are the dtypes of the weights, of param_dtype (else w) and of
    reduce_dtype (else c); s is the state of the optimizer. The last two columns count what is
    sent, each time by (n - 1) / n elements and for an all-reduce by twice that.

        stage  kept always       also from forward   gradients until     gathered   reduced
                                 to backward         they are reduced    in a step  in a step
        0      (w + w' + s)      c                   g if m > 1; block   0          1 (all-reduce)
        1      (w + w' + s) / n  c                   g if m > 1; block   1          1
        2      (w + w' + s) / n  c                   block               1          m
        3      (w + w' + s) / n  c of two blocks     block               2 m        m

    w' is the gradient as the optimizer sees it, of dtype w, from backward to zero_grad; in the last
    backward it comes block by block as gathered weights go, so there is never more than the greater
    of the two. "block" is c and g of the block that is being reduced. What is in no block, such as
    embeddings, is a group of its own, which stage 3 gathers m times, as it is wanted again where
    forward ends; what is being gathered lies beside the block that it becomes. On a mesh of r rows
    of n, what is reduced is also all-reduced among r processes, 1 / n of it, once a step. A forward
    without gradients gathers once, and keeps nothing. In stages 1 and 2 each micro-step but the
    first also all-reduces one number, which tells whether a weight was written. What is kept from
    forward to backward serves that backward alone: as soon as forward ends parameters are shards
    again, for clipping, zero_grad and all that writes them; a loss that wants whole weights is
    computed in forward, or takes them by
    `param.full_tensor(grad_placements=[Partial("avg")] * param.device_mesh.ndim)`, with Partial of
    torch.distributed.tensor: without it torch takes the gradient that a process has for that of
    all.

    Experts of `deepspeed_ext.moe` that are shared out over processes stay so: n is, for them, how
    many processes have the same ones, which share out the first dimension behind that of experts
    which divides evenly. They are a block of their own within another one, and not counted there.
    Gradients are means over all processes, as of all else. Clip them by the optimizers'
    `clip_and_step`, or `deepspeed_ext.ops.clip_grad_norm_`: that of torch.nn.utils takes parameters
    of one mesh only, and these are of two.

    What does it, in torch 2.11 and 2.13: `fully_shard` on each block and on the model, with
    reshard_after_forward only in stage 3; stage 0 is a mesh of n rows of 1. `accumulate` calls
    set_requires_gradient_sync, set_reshard_after_backward and, where there are replicas,
    set_requires_all_reduce. Only 2.13 has set_reduce_scatter_unused_params, which is reduce_unused,
    and reset_iter_state, which drops what an error left of a step: with 2.11 we do what it does.
    offload is CPUOffloadPolicy, which pins host memory beside a GPU.

    Args:
        model: of any device; its parameters move to that of the mesh. Those on meta stay there, and
            `Init` fills them. Those of compat.zero.Init are rows of this process, and stay here.
            Not sharded yet. Frozen parameters are sharded too.
        stage: 0 to 3.
        mesh: one dimension: all of it shards. Two, named: replicas and shards (HSDP). None: all
            processes, on CUDA if they talk by NCCL, else on the CPU. Experts have a mesh of their
            own, of the same processes: one named dimension out of one or two.
        param_dtype: weights are gathered in this dtype, and inputs of blocks cast to it; None: as
            they are.
        reduce_dtype: gradients are added up in this dtype; None: as they are.
        output_dtype: floating-point outputs of the model are cast to it; None: they are not.
        blocks: what is gathered and reduced as one: names of modules, in which * stands for
            anything (of modules in each other the outer ones), or classes. None: modules of one
            class listed in a ModuleList, Sequential or ModuleDict; if there are none, or with
            reduce_unused, the model is one group. All processes call the same blocks in the same
            order, or they would gather different ones.
        reduce_unused: parameters that got a gradient in some processes only count as 0 in the
            others; one that got none anywhere has a gradient of 0 then, not None. No blocks are
            found then, as nothing tells layers from experts: name those that all processes call.
            False: every parameter gets one in all processes or in none. True needs torch 2.13;
            before, let each forward use all parameters, such as by adding 0 times a sum of those
            it does not.
        offload: "cpu": shards rest in host memory, and gradients come to them there, where the
            optimizer steps: w, w' and s of stage 3 are bytes of the host. A block comes to the
            device to be gathered. For stage 3. None: shards are on the device of the mesh.

    Returns:
        The model.

    Raises:
        ValueError: an argument or a parameter is not as it must be, or not the same on all
            processes; the text names it. The model is unchanged.

    See: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
        2020, section 5.
    """
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise ValueError(f"{_OP}: stage is {stage!r}, expected 0, 1, 2 or 3")
    if not isinstance(model, nn.Module):
        raise TypeError(f"{_OP}: model is a {type(model).__name__}, expected a torch.nn.Module")
    _check_offload(offload, stage)
    with in_whole_shapes(model):
        _check_model(model)
        found = blocks_of(model, blocks)
        if reduce_unused and blocks is None and found:
            _log.warning(
                "zero.shard: reduce_unused is True, so blocks %s are none, as some processes may"
                " not call them; name those that all call by blocks=",
                list(found),
            )
            found = {}
        mesh = _checked_mesh(mesh)
        check_experts(model, stage, mesh)
        experts = experts_of(model)
        found = {n: m for n, m in model.named_modules() if n in found or n in experts}
        groups = _groups(model, found)
        described = {
            "stage": stage,
            "mesh": list(mesh.mesh.shape),
            "param_dtype": param_dtype,
            "reduce_dtype": reduce_dtype,
            "output_dtype": output_dtype,
            "blocks": list(found),
            "reduce_unused": reduce_unused,
            "offload": offload,
            **described_experts(experts),
        }
        check_agreement(_OP, _described(model, described), mesh)
        if reduce_unused and not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            raise ValueError(
                f"{_OP}: reduce_unused is True, expected False with torch {torch.__version__},"
                " which has no set_reduce_scatter_unused_params"
            )
        if stage == 0:
            mesh = _only_replicas(mesh)
        place: dict[str, Any] = {"mesh": mesh, "offload_policy": _policy(offload, mesh)}
        inner = MixedPrecisionPolicy(param_dtype, reduce_dtype)
        outer = MixedPrecisionPolicy(param_dtype, reduce_dtype, output_dtype)
        of_model = set(groups[""])
        beside = how_to_shard(experts, stage)
        for name, block in reversed(found.items()):  # those inside of others first
            options: dict[str, Any] = {
                "mp_policy": inner,
                "reshard_after_forward": stage == 3,
                "ignored_params": of_model & set(block.parameters()),
            }
            fully_shard(block, **place | options | beside.get(name, {}))
        sharded = fully_shard(model, mp_policy=outer, reshard_after_forward=False, **place)
        if offload is not None:
            _let_rest(model)
        if reduce_unused:
            sharded.set_reduce_scatter_unused_params(True)
        names, has_experts = tuple(found), bool(experts)
        Sharding(model, stage, mesh, names, reduce_unused, param_dtype, has_experts).attach()
    return model


def _check_offload(offload: object, stage: int) -> None:
    if offload is None:
        return
    if offload != "cpu":
        what = ", as shards rest in memory" if offload == "nvme" else ""
        raise ValueError(f'{_OP}: offload is {offload!r}, expected "cpu" or None{what}')
    if stage != 3:
        raise ValueError(
            f'{_OP}: offload is "cpu" in stage {stage}, expected stage 3, as the others keep whole'
            " weights on the device from forward to backward"
        )


def _policy(offload: str | None, mesh: DeviceMesh) -> OffloadPolicy:
    """Return where shards rest, as fully_shard takes it."""
    if offload is None:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")


def _let_rest(model: nn.Module) -> None:
    """Let optimizers know of shards in host memory, also where all compute there."""
    for param in model.parameters():
        vars(param)[RESTS] = True


def _check_model(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if is_sharded(module):
            raise ValueError(
                f"{_OP}: model has {name or 'itself'!r}, which is sharded already, expected a"
                " model that is not"
            )
    if is_streamed(model):
        raise ValueError(
            f"{_OP}: model is streamed, expected one that is not; zero.stream is for one process"
        )
    params = dict(model.named_parameters())
    if not params:
        raise ValueError(f"{_OP}: model has no parameters, expected some")
    for name, param in params.items():
        if is_lazy(param):
            raise ValueError(
                f"{_OP}: parameter {name!r} has no shape yet, expected one; run the model once"
            )
        if param.dim() == 0:
            raise ValueError(
                f"{_OP}: parameter {name!r} has no dimensions, expected rows to shard; give it the"
                " shape [1]"
            )
        if has_gradient_hooks(param):  # of a tensor that no backward would know of
            raise ValueError(
                f"{_OP}: parameter {name!r} has a hook on its gradient, expected none, as its shard"
                " would not call it; register_post_accumulate_grad_hook on the sharded parameter,"
                " after this"
            )


def _groups(model: nn.Module, blocks: dict[str, nn.Module]) -> dict[str, list[nn.Parameter]]:
    """Return the parameters that are gathered as one, by block; '' is the model.

    Raises:
        ValueError: a parameter is in two blocks, or one has trainable ones of several dtypes.
    """
    owner: dict[str, str] = {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        inside = [block for block in blocks if name.startswith(f"{block}.")]
        owner[name] = max(inside, key=len, default="")
    groups: dict[str, list[nn.Parameter]] = {"": [], **{block: [] for block in blocks}}
    homes: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        homes.setdefault(param, []).append(name)
    for param, names in homes.items():
        owners = sorted({owner[name] for name in names})
        if len(owners) > 1 and owners[0] != "":
            raise ValueError(
                f"{_OP}: parameter {names[0]!r} is also {names[1:]}, in the blocks"
                f" {owners}, expected tied parameters in one block or in none; name blocks that"
                " hold all of them"
            )
        groups[owners[0]].append(param)
    for block, params in groups.items():
        dtypes = sorted({str(param.dtype) for param in params if param.requires_grad})
        if len(dtypes) > 1:
            raise ValueError(
                f"{_OP}: {f'block {block!r}' if block else 'what is in no block'} has trainable"
                f" parameters of {', '.join(dtypes)}, expected one dtype"
            )
    return groups


def _checked_mesh(mesh: DeviceMesh | None) -> DeviceMesh:
    if not dist.is_initialized():
        raise ValueError(
            f"{_OP}: there is no process group, expected one; start by torchrun and call"
            " torch.distributed.init_process_group first, also for one process"
        )
    if mesh is None:
        return mesh_of_all()
    if mesh.ndim not in (1, 2) or (mesh.ndim == 2 and not mesh.mesh_dim_names):
        raise ValueError(
            f"{_OP}: mesh has shape {list(mesh.mesh.shape)} and names {mesh.mesh_dim_names},"
            " expected one dimension, or two with names"
        )
    return mesh


def _only_replicas(mesh: DeviceMesh) -> DeviceMesh:
    """Return a mesh of the same processes on which nothing is cut."""
    return DeviceMesh(
        mesh.device_type, mesh.mesh.reshape(-1, 1), mesh_dim_names=("replicate", "shard")
    )


def _described(model: nn.Module, options: dict[str, object]) -> list[str]:
    """Return what must be the same on all processes, a line for each thing."""
    lines = [f"{name} {value}" for name, value in options.items()]
    for name, param in model.named_parameters(remove_duplicate=False):
        what = ("" if param.requires_grad else ", frozen") + ", on meta" * param.is_meta
        lines.append(f"parameter {name!r} of {list(param.shape)} {param.dtype}{what}")
    lines += [f"buffer {n!r} of {list(b.shape)} {b.dtype}" for n, b in model.named_buffers()]
    return lines

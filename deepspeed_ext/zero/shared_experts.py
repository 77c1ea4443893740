"""Experts that are shared out over processes: who has the same ones."""

from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from deepspeed_ext.dtensors import is_dtensor, local
from deepspeed_ext.moe import Experts
from deepspeed_ext.torch_internals.meshes import is_part_of_two, rest_of, root_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Shard

_OP = "zero.shard"


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules whose experts are shared out over processes, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Experts) and any(map(is_dtensor, module.parameters()))
    }


def check_experts(model: nn.Module, stage: int, mesh: DeviceMesh) -> None:
    """Refuse experts that cannot be sharded on a mesh; no process waits for another one.

    Args:
        model: with or without experts.
        stage: of ZeRO.
        mesh: for all that is no expert.

    Raises:
        ValueError: the text names a parameter.
    """
    experts = experts_of(model)
    homes: dict[int, str] = {}
    for name, module in experts.items():
        for param_name, param in module.named_parameters(f"{name}" if name else ""):
            homes[id(param)] = name
            if not is_dtensor(param):
                raise ValueError(
                    f"{_OP}: {param_name!r} is a plain tensor among experts that are shared out,"
                    " expected a DTensor as the others"
                )
            _check_mesh(param_name, param, mesh)
            _placement(param_name, stage, param)
    for name, param in model.named_parameters(remove_duplicate=False):
        home = homes.get(id(param))
        if home is not None and not name.startswith(f"{home}." if home else ""):
            raise ValueError(
                f"{_OP}: {name!r} is also a parameter of the experts {home!r}, expected one that"
                " nothing else has, as these are shared out"
            )
    if "" in experts:
        raise ValueError(f"{_OP}: model is {type(model).__name__}, expected what has these inside")


def described_experts(experts: dict[str, nn.Module]) -> dict[str, object]:
    """Return over which processes experts are shared out, which all have to say alike."""
    return {
        f"experts {name!r} over": [
            (root_of(mesh).mesh.tolist(), root_of(mesh).mesh_dim_names, mesh.mesh_dim_names)
            for mesh in [_mesh_of(module)]
        ]
        for name, module in experts.items()
    }


def how_to_shard(experts: dict[str, nn.Module], stage: int) -> dict[str, dict[str, Any]]:
    """Return what fully_shard is given for experts: the processes that have the same ones.

    All processes call it, as it makes groups of processes, for each mesh of experts once.
    """
    meshes: dict[DeviceMesh, DeviceMesh] = {}
    made = {}
    for name, module in experts.items():
        of_experts = _mesh_of(module)
        if of_experts not in meshes:
            meshes[of_experts] = rest_of(of_experts, are_replicas=stage == 0)
        made[name] = {
            "mesh": meshes[of_experts],
            "shard_placement_fn": partial(_placement, name, stage),
        }
    return made


def _mesh_of(experts: nn.Module) -> DeviceMesh:
    return next(param.device_mesh for param in experts.parameters() if is_dtensor(param))


def _check_mesh(name: str, param: "DTensor", mesh: DeviceMesh) -> None:
    of_param = param.device_mesh
    if not is_part_of_two(of_param):
        raise ValueError(
            f"{_OP}: {name!r} is shared out over {of_param}, expected a dimension, by its name, of"
            " a mesh of one or two, such as init_device_mesh(device, (2, 4), mesh_dim_names="
            "('data', 'expert'))['expert']"
        )
    theirs, ours = (sorted(m.mesh.flatten().tolist()) for m in (root_of(of_param), mesh))
    if theirs != ours or of_param.device_type != mesh.device_type:
        raise ValueError(
            f"{_OP}: {name!r} is of a mesh of the processes {theirs} on {of_param.device_type},"
            f" expected those of all else, {ours} on {mesh.device_type}"
        )


def _placement(name: str, stage: int, param: Any) -> "Shard":
    """Return the first dimension behind that of experts which the processes can share out.

    Fully_shard wants all of them to have as much: only the first dimension may be uneven.
    """
    from torch.distributed.tensor import Shard

    alike = root_of(param.device_mesh).size() // param.device_mesh.size()
    processes, shape = alike if stage else 1, local(param).shape
    if len(shape) < 2:
        raise ValueError(
            f"{_OP}: {name!r} has no dimensions in an expert, expected rows to shard; give it the"
            " shape [1]"
        )
    for dimension in range(1, len(shape)):
        if shape[dimension] % processes == 0:
            return Shard(dimension)
    raise ValueError(
        f"{_OP}: {name!r} has shape {list(param.shape)}, of experts which {processes} processes"
        f" have alike, expected a dimension behind the first that is a multiple of {processes}; let"
        " more processes share the experts out"
    )

"""Where the processes of the group compute, and the mesh of all of them."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

DIMENSIONS = ("shard",)  # of a mesh on which each process has its own part of each weight


def device_of_group() -> str:
    """Return "cuda" if NCCL is in the process group and there is a GPU, else "cpu"."""
    has_nccl = torch.cuda.is_available() and "nccl" in dist.get_backend_config()
    return "cuda" if has_nccl else "cpu"


def mesh_of_all() -> DeviceMesh:
    """Return the mesh that is meant where none is given."""
    return init_device_mesh(device_of_group(), (dist.get_world_size(),), mesh_dim_names=DIMENSIONS)

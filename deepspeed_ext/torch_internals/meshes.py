"""What is known of device meshes only inside of torch: what one was cut from."""

from typing import Any

from torch.distributed.device_mesh import DeviceMesh

_REPLICAS = ("replicate", "shard")


def root_of(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that this one was taken out of by name, or itself."""
    internal: Any = mesh
    root: DeviceMesh = internal._get_root_mesh()
    return root


def is_part_of_two(mesh: DeviceMesh) -> bool:
    """Tell whether `rest_of` knows the rest: a mesh is one dimension, by name, of one or two."""
    root, names = root_of(mesh), mesh.mesh_dim_names or ()
    return mesh.ndim == 1 and root.ndim < 3 and {*names} <= {*(root.mesh_dim_names or ())} != set()


def rest_of(mesh: DeviceMesh, are_replicas: bool) -> DeviceMesh:
    """Return the dimension that is beside one in the mesh that this was taken out of.

    All processes of that mesh call it, as it makes groups of processes.

    Args:
        mesh: of which `is_part_of_two`. Alone it has a dimension of one process beside it.
        are_replicas: return two dimensions, the second of one process, so that fully_shard has
            nothing to cut.
    """
    root: Any = root_of(mesh)
    (name,) = mesh.mesh_dim_names or ()
    if root.ndim == 1:
        root = root._unflatten(0, (1, root.size()), (f"beside_{name}", name))
    (other,) = {*root.mesh_dim_names} - {name}
    rest: Any = root[other]
    if are_replicas:
        rest = rest._unflatten(0, (rest.size(), 1), _REPLICAS)
    found: DeviceMesh = rest
    return found

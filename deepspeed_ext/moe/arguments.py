"""What layers of experts refuse of their arguments."""

from deepspeed_ext.ops._kinds import check_kinds, check_reals, check_whole

_MOST_EXPERTS = 1024  # of moe_route
_MOST_ROOM = 2**31 - 1  # rows, or even shares: what a capacity is made of, which is an int64


def check_choices(layer: str, *, num_experts: int, **counts: int) -> None:
    """Refuse numbers of experts and choices that there cannot be.

    Args:
        layer: what an error calls it.
        num_experts: of all processes.
        counts: by the names of arguments; the last one, of choices, is up to num_experts.
    """
    counts = {"num_experts": num_experts, **counts}
    check_whole(layer, **counts)
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{layer}: {name} is {count}, expected at least 1")
    if num_experts > _MOST_EXPERTS:
        raise ValueError(f"{layer}: num_experts is {num_experts}, expected at most {_MOST_EXPERTS}")
    name, choices = counts.popitem()
    if choices > num_experts:
        raise ValueError(f"{layer}: {name} is {choices}, expected at most {num_experts}, all")


def check_room(layer: str, *, min_capacity: int, **factors: float) -> None:
    """Refuse what no capacity is made of.

    Args:
        layer: what an error calls it.
        min_capacity: of an expert.
        factors: by the names of arguments.
    """
    check_whole(layer, min_capacity=min_capacity)
    check_reals(layer, **factors)
    for name, value in (*factors.items(), ("min_capacity", min_capacity)):
        if not 0 <= value <= _MOST_ROOM:
            raise ValueError(
                f"{layer}: {name} is {value}, expected a number from 0 to {_MOST_ROOM}"
            )


def check_mesh(layer: str, mesh: object) -> None:
    """Refuse what is neither None nor a mesh.

    Args:
        layer: what an error calls it.
        mesh: over whose processes experts are shared out.
    """
    if mesh is not None:
        from torch.distributed.device_mesh import DeviceMesh

        check_kinds(layer, mesh=(mesh, DeviceMesh))

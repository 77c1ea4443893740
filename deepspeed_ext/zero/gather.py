"""GatheredParameters: whole parameters for a while, and what one process writes into them."""

from collections.abc import Iterable
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from deepspeed_ext.dtensors import is_dtensor, local, part_for

_OP = "zero.GatheredParameters"


class GatheredParameters:
    """Show sharded parameters whole, and spread what one process writes into them.

        with zero.GatheredParameters(model.head, modifier_rank=0):
            if dist.get_rank() == 0:
                model.head.weight.normal_(std=0.02)
        with zero.GatheredParameters(model.head.weight) as weight:
            print(weight.norm())

    All processes that hold shards enter and leave it together, also when the body raises. Do not
    call the model inside.

    Args:
        params: a parameter; several; or a module, whose parameters, those of modules in it too, are
            plain whole ones inside.
        modifier_rank: the global rank of the process whose values count in the end, also if its
            body raises; those that others write are lost. None: nobody writes.

    Raises:
        ValueError: a parameter is not sharded, or modifier_rank holds no part of it.
        RuntimeError: a parameter was written to although modifier_rank is None.
    """

    def __init__(
        self,
        params: nn.Module | Tensor | Iterable[Tensor],
        modifier_rank: int | None = None,
    ) -> None:
        self._module = params if isinstance(params, nn.Module) else None
        self._is_one = isinstance(params, Tensor)
        if isinstance(params, nn.Module):
            named: dict[str, Tensor] = dict(params.named_parameters())
        else:
            several = [params] if isinstance(params, Tensor) else list(params)
            named = {f"params[{i}]": param for i, param in enumerate(several)}
        self._params = named
        self._rank = modifier_rank
        for name, param in named.items():
            _check(name, param, modifier_rank)
        self._whole: dict[Tensor, Tensor] = {}
        self._places: list[tuple[nn.Module, str, nn.Parameter]] = []

    def __enter__(self) -> Tensor | list[Tensor]:
        """Gather.

        Returns:
            The whole tensor, or a list of them, in the order of the parameters.
        """
        with torch.no_grad():
            for param in self._params.values():
                if param not in self._whole:
                    self._whole[param] = _full(param)
        self._versions = {param: whole._version for param, whole in self._whole.items()}
        if self._module is not None:
            self._show_in(self._module)
        tensors = [self._whole[param] for param in self._params.values()]
        return tensors[0] if self._is_one else tensors

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for module, name, shard in self._places:
            module._parameters[name] = shard
        self._places = []
        whole, self._whole = self._whole, {}
        if self._rank is not None:
            with torch.no_grad():
                for param, value in whole.items():
                    _spread(value, param, self._rank)
        elif kind is None:
            for name, param in self._params.items():
                if whole[param]._version != self._versions[param]:
                    raise RuntimeError(
                        f"{_OP}: {name} was written to, expected no change while modifier_rank is"
                        " None; name the rank whose values count"
                    )

    def _show_in(self, model: nn.Module) -> None:
        shown: dict[Tensor, nn.Parameter] = {
            param: nn.Parameter(whole, requires_grad=param.requires_grad)
            for param, whole in self._whole.items()
        }
        # nn.Parameter makes another tensor of the same memory and the same version counter.
        for module in model.modules():
            for name, param in module._parameters.items():
                if param is not None:
                    self._places.append((module, name, param))
                    module._parameters[name] = shown[param]
        self._whole = {param: shown[param].detach() for param in self._whole}


def _check(name: str, param: object, rank: int | None) -> None:
    if not isinstance(param, Tensor):
        raise TypeError(f"{_OP}: {name} is a {type(param).__name__}, expected a parameter")
    if not is_dtensor(param):
        raise ValueError(
            f"{_OP}: {name} is a plain tensor, expected a shard; it is whole already, as without"
            " zero.shard and between micro-steps"
        )
    if rank is not None and rank not in param.device_mesh.mesh.flatten().tolist():
        raise ValueError(
            f"{_OP}: modifier_rank is {rank}, expected one of the processes that hold {name},"
            f" {param.device_mesh.mesh.flatten().tolist()}"
        )


def _full(param: Tensor) -> Tensor:
    """Return the whole of a DTensor in memory of its own."""
    assert is_dtensor(param)
    full: Tensor = param.full_tensor().detach()
    same = full.untyped_storage().data_ptr() == local(param).untyped_storage().data_ptr()
    return full.clone() if same else full


def _spread(whole: Tensor, param: Tensor, rank: int) -> None:
    """Make the value that one process has the value of a parameter on all."""
    assert is_dtensor(param)
    _broadcast(whole, param.device_mesh, rank)
    local(param).copy_(part_for(whole, param))


def _broadcast(value: Tensor, mesh: DeviceMesh, rank: int) -> None:
    """Send a tensor from one process of a mesh to all of it, along one dimension after another."""
    mine = mesh.get_coordinate()
    source = (mesh.mesh == rank).nonzero()[0].tolist()
    assert mine is not None
    for dimension in reversed(range(mesh.ndim)):
        if list(mine[:dimension]) == source[:dimension]:
            sender = [*source[: dimension + 1], *mine[dimension + 1 :]]
            group = mesh.get_group(dimension)
            dist.broadcast(value, int(mesh.mesh[tuple(sender)]), group=group)

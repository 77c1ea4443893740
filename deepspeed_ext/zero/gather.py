"""GatheredParameters: whole parameters for a while, and what one process writes into them."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from deepspeed_ext.dtensors import is_dtensor, local, part_for
from deepspeed_ext.torch_internals.modules import parameters_of
from deepspeed_ext.torch_internals.tensors import differ, version_of

_OP = "zero.GatheredParameters"
_WHOLE, _SHARD = "_deepspeed_ext_whole", "_deepspeed_ext_shard"  # attributes of parameters


class GatheredParameters:
    """Show sharded parameters whole, and spread what one process writes into them.

        with zero.GatheredParameters(model.head, modifier_rank=0):
            if dist.get_rank() == 0:
                model.head.weight.normal_(std=0.02)
        with zero.GatheredParameters(model.head.weight) as weight:
            print(weight.norm())

    All processes that hold shards enter and leave it together, also when the body raises. Do not
    call the model inside. One inside of another one, for the same parameter, shows the same whole
    tensor: what the outer one's modifier_rank has written is there on all processes when it begins,
    and what its own writes when it ends. The inner one ends first.

    Args:
        params: a parameter; several; or a module, whose parameters, those of modules in it too, are
            plain whole ones inside.
        modifier_rank: the global rank of the process whose values count in the end, also if its
            body raises; those that others write are lost. None: nobody writes.

    Raises:
        ValueError: a parameter is not sharded, or modifier_rank holds no part of it.
        RuntimeError: a parameter was written to although modifier_rank is None; or it ends before
            one inside of it.
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
        # What another one shows in a module is of a shard, too.
        self._params = {name: _shard_of(param) for name, param in named.items()}
        self.modifier_rank = modifier_rank
        for name, param in self._params.items():
            _check(name, param, modifier_rank)
        self._own: list[Tensor] = []  # shards that were gathered here, not by another one around it
        self._places: list[tuple[nn.Module, str, Any]] = []  # and the shard

    def __enter__(self) -> Tensor | list[Tensor]:
        """Gather, unless another one that is under way has.

        Returns:
            The whole tensor, or a list of them, in the order of the parameters.
        """
        with torch.no_grad():
            for param in self._params.values():
                if _WHOLE not in vars(param):
                    vars(param)[_WHOLE] = _Whole(_full(param))
                    self._own.append(param)
                _whole(param).enter(self, param)
        tensors = [_whole(param).value for param in self._params.values()]
        self._before = [_whole(param).version() for param in self._params.values()]
        if self._module is not None:
            self._show_in(self._module)
        return tensors[0] if self._is_one else tensors

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        for param in self._params.values():
            _whole(param).check_innermost(self)
        for module, name, shard in self._places:
            parameters = parameters_of(module)
            shown, parameters[name] = parameters[name], shard
            _take(shown, shard)
        self._places = []
        known = [(name, param, _whole(param)) for name, param in self._params.items()]
        for *_, whole in known:
            whole.inside.pop()
        for param in self._own:
            del vars(param)[_WHOLE]
        self._own = []
        for (name, param, whole), before in zip(known, self._before, strict=True):
            if self.modifier_rank is not None:
                whole.spread(param, self.modifier_rank, before)
            elif kind is None and (whole.version() != before or whole.is_written(param)):
                raise RuntimeError(
                    f"{_OP}: {name} was written to, expected no change while modifier_rank is"
                    " None; name the rank whose values count"
                )

    def _show_in(self, model: nn.Module) -> None:
        shown: dict[Tensor, nn.Parameter] = {}
        for module in model.modules():
            for name, param in parameters_of(module).items():
                if param is not None and is_dtensor(param):
                    if param not in shown:
                        # Another tensor of the same memory and the same version counter.
                        whole = nn.Parameter(_whole(param).value, requires_grad=param.requires_grad)
                        vars(whole)[_SHARD] = _Link(param)
                        shown[param] = whole
                    self._places.append((module, name, param))
                    parameters_of(module)[name] = shown[param]


class _Whole:
    """What is gathered of a shard.

    Attributes:
        value: the whole tensor.
        excused: counts of its version that are writes of processes that were named.
        inside: the contexts that show it, the innermost last.
    """

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self.excused = 0
        self.inside: list[GatheredParameters] = []

    def enter(self, context: GatheredParameters, param: Tensor) -> None:
        """Begin another context, with what was written in the one around it on all processes."""
        rank = self.inside[-1].modifier_rank if self.inside else None
        if rank is not None:
            self.spread(param, rank, self.version())
        self.inside.append(context)

    def check_innermost(self, context: GatheredParameters) -> None:
        """Raise if a context that is about to end is around another one."""
        if self.inside[-1] is not context:
            raise RuntimeError(
                f"{_OP}: it ends before one inside of it for the same parameter, expected the inner"
                " one to end first"
            )

    def spread(self, param: Tensor, rank: int, before: int) -> None:
        """Make the value that one process has that of all, and allow its writes since a version."""
        with torch.no_grad():
            _spread(self.value, param, rank)
        self.excused += self.version() - before

    def is_written(self, param: Tensor) -> bool:
        """Tell whether the part of this process is another one, which `.data` tells no version."""
        assert is_dtensor(param)
        parts = local(param), part_for(self.value, param)
        return bool(differ(*([part.reshape(-1)] for part in parts)))

    def version(self) -> int:
        """Count writes, those left out that were allowed."""
        return version_of(self.value) - self.excused


class _Link:
    """From what is shown in a module to its shard; a copy or a pickle of it leads nowhere."""

    def __init__(self, shard: Tensor | None = None) -> None:
        self.shard = shard

    def __reduce__(self) -> tuple[Any, ...]:
        return _Link, ()


def _shard_of(param: Any) -> Any:
    link = vars(param).get(_SHARD) if isinstance(param, Tensor) else None
    shard = None if link is None else link.shard
    return shard if shard is not None and _WHOLE in vars(shard) else param


def _whole(param: Tensor) -> _Whole:
    whole: _Whole = vars(param)[_WHOLE]
    return whole


def _take(shown: Tensor | None, shard: Tensor) -> None:
    """Take what was put in the place of a whole parameter, as by assign=True; also if frozen."""
    if shown is None:
        return
    if shown.requires_grad != shard.requires_grad:
        shard.requires_grad_(shown.requires_grad)
    value = _whole(shard).value
    if shown.data_ptr() == value.data_ptr():
        return
    if shown.shape != value.shape:
        raise ValueError(
            f"{_OP}: a parameter of {list(value.shape)} has got the shape {list(shown.shape)},"
            " expected the same"
        )
    with torch.no_grad():
        value.copy_(shown)


def _check(name: str, param: object, rank: int | None) -> None:
    if not isinstance(param, Tensor):
        raise TypeError(f"{_OP}: {name} is a {type(param).__name__}, expected a parameter")
    if not is_dtensor(param):
        raise ValueError(
            f"{_OP}: {name} is a plain tensor, expected a shard; it is whole already, as without"
            " zero.shard"
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

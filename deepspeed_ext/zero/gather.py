"""GatheredParameters: whole parameters for a while, and what one process writes into them."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from deepspeed_ext.dtensors import full, is_dtensor, local, part_for
from deepspeed_ext.torch_internals.dispatch import is_in_backward
from deepspeed_ext.torch_internals.fully_shard import call_whole, is_in_forward, shards_of
from deepspeed_ext.torch_internals.modules import parameters_of
from deepspeed_ext.torch_internals.tensors import differ, past_torch_function, version_of
from deepspeed_ext.zero.memory import give_back
from deepspeed_ext.zero.rows import hide, rows_of, show
from deepspeed_ext.zero.sharding import Sharding
from deepspeed_ext.zero.shown import WHOLE, ShownShard

_OP = "zero.GatheredParameters"
_SHARD = "_deepspeed_ext_shard"  # attribute of a parameter that is shown in a module


class GatheredParameters:
    """Show sharded parameters whole, and spread what one process writes into them.

        with zero.GatheredParameters(model.head, modifier_rank=0):
            if dist.get_rank() == 0:
                model.head.weight.normal_(std=0.02)
        with zero.GatheredParameters(model.head.weight) as weight:
            print(weight.norm())

    All processes that hold shards enter and leave it together, also when the body raises. One
    inside of another one, for the same parameter, shows the same whole tensor: what the outer one's
    modifier_rank has written is there on all processes when it begins, and what its own writes when
    it ends. The inner one ends first.

    Inside, a model whose parameters are all whole may be called, as often in each process as it
    likes: nothing is exchanged. It is for numbers only: a backward through whole parameters is an
    error. So is a call of a model, or of a block, of which only some are whole. What is written
    between a forward and its backward counts in that backward in stage 3, and in stages 1 and 2
    from the next forward on.

    Args:
        params: a parameter; several; or a module, whose parameters, those of modules in it too, are
            plain whole ones inside. Shards, or those of compat.zero.Init.
        modifier_rank: the global rank of the process whose values count in the end, also if its
            body raises; those that others write are lost. None: nobody writes.
        inside: models in which params are plain whole ones inside, if params is no module.
        as_used: show weights in zero.shard's param_dtype, as its forwards use them, where nobody
            writes; else they are as the optimizer has them.

    Raises:
        ValueError: a parameter is not sharded, or modifier_rank holds no part of it.
        RuntimeError: a parameter was written to although modifier_rank is None; or it ends before
            one inside of it; or it begins in a forward or a backward of its model.
    """

    def __init__(
        self,
        params: nn.Module | Tensor | Iterable[Tensor],
        modifier_rank: int | None = None,
        *,
        inside: Iterable[nn.Module] = (),
        as_used: bool = False,
    ) -> None:
        self._is_one = isinstance(params, Tensor)
        if isinstance(params, nn.Module):
            named: dict[str, Tensor] = dict(params.named_parameters())
            inside = (params,)
        else:
            several = [params] if isinstance(params, Tensor) else list(params)
            named = {f"params[{i}]": param for i, param in enumerate(several)}
        # What another one shows in a module is of a shard, too.
        self._params = {name: shard_of(param) for name, param in named.items()}
        self.modifier_rank = modifier_rank
        for name, param in self._params.items():
            _check(name, param, modifier_rank)
        self._models = tuple(inside)
        self._as_used = as_used and modifier_rank is None
        self._own: list[Tensor] = []  # shards that were gathered here, not by another one around it
        self._places: list[tuple[nn.Module, str, Any]] = []  # and the shard
        self._calls: list[tuple[Sharding, int, Callable[[], None]]] = []

    def __enter__(self) -> Tensor | list[Tensor]:
        """Gather, unless another one that is under way has; after an error all is as before.

        Returns:
            The whole tensor, or a list of them, in the order of the parameters.
        """
        with torch.no_grad():
            for param in self._params.values():
                param.detach()  # one that is still being stepped is waited for
            with past_torch_function():
                try:
                    self._enter()
                except BaseException:  # as of memory that is not there: Python calls no __exit__
                    self._leave_modules()
                    for param in self._params.values():
                        inside = vars(param)[WHOLE].inside if WHOLE in vars(param) else []
                        if inside[-1:] == [self]:
                            inside.pop()
                    self._let_go()
                    raise
        tensors = [_whole(param).value for param in self._params.values()]
        return tensors[0] if self._is_one else tensors

    def _enter(self) -> None:
        found = (getattr(model, "_deepspeed_ext_sharding", None) for model in self._models)
        shardings = [each for each in found if isinstance(each, Sharding)]
        used: dict[int, torch.dtype | None] = {}
        for sharding in shardings:
            if is_in_backward() or is_in_forward(sharding.model):
                raise RuntimeError(
                    f"{_OP}: it begins in a forward or a backward of its model, expected it outside"
                    " of both; a block uses parameters of another one if that is left out of the"
                    " blocks of zero.shard"
                )
            used.update((id(shard), sharding.param_dtype) for shard in shards_of(sharding.model))
        for param in self._params.values():
            if self.modifier_rank is not None and is_shown(param):
                _whole(param).check_is_own(param)
        for param in self._params.values():
            if WHOLE not in vars(param):
                dtype = used.get(id(param)) if self._as_used else None
                self._own.append(param)
                vars(param)[WHOLE] = _Whole(_full(param, dtype))
                if is_dtensor(param):
                    param.__class__ = ShownShard
            _whole(param).enter(self, param)
        self._before = [_whole(param).version() for param in self._params.values()]
        mine, shown = set(map(id, self._params.values())), dict[Tensor, nn.Parameter]()
        for model in self._models:
            self._show_in(model, mine, shown)
        for sharding in shardings:
            self._let_call(sharding)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        with past_torch_function():
            self._exit(is_well=kind is None)

    def _exit(self, is_well: bool) -> None:
        for param in self._params.values():
            _whole(param).check_innermost(self)
        depths = {sharding: depth for sharding, depth, _ in self._calls}
        if any(len(sharding.shown) != depth for sharding, depth in depths.items()):
            _refuse_order()
        taken = self._leave_modules()
        taken += [(param, param) for param in self._params.values() if not is_dtensor(param)]
        try:
            for shown, shard in taken:
                _take(shown, shard)
            self._end(is_well)
        finally:
            self._let_go()

    def _leave_modules(self) -> list[tuple[Any, Any]]:
        """Put shards back; return what stood in their places, and the shards."""
        for sharding, _, end in reversed(self._calls):
            sharding.shown.pop()
            end()
        taken = []
        for module, name, shard in self._places:
            parameters = parameters_of(module)
            shown, parameters[name] = parameters[name], shard
            taken.append((shown, shard))
        self._places, self._calls = [], []
        return taken

    def _let_go(self) -> None:
        """Leave nothing of what was gathered here."""
        freed = 0
        for param in self._own:
            vars(param).pop(WHOLE, None)
            if is_dtensor(param):
                param.__class__ = DTensor
            else:
                freed += param.nbytes
                hide(param, _sharded(param))  # type: ignore[arg-type]
        self._own = []
        give_back(freed)

    def _end(self, is_well: bool) -> None:
        """Spread what was written, or see that nothing was."""
        known = [(name, param, _whole(param)) for name, param in self._params.items()]
        for *_, whole in known:
            whole.inside.pop()
        for (name, param, whole), before in zip(known, self._before, strict=True):
            if self.modifier_rank is not None:
                whole.spread(param, self.modifier_rank, before)
            elif is_well and (whole.version() != before or whole.is_written(param)):
                self._drop_write(name)

    def _drop_write(self, name: str) -> None:
        raise RuntimeError(
            f"{_OP}: {name} was written to, expected no change while modifier_rank is None; name"
            " the rank whose values count"
        )

    def _show_in(self, model: nn.Module, mine: set[int], shown: dict[Tensor, nn.Parameter]) -> None:
        for module in model.modules():
            for name, param in parameters_of(module).items():
                if param is not None and is_dtensor(param) and id(param) in mine:
                    if param not in shown:
                        # Another tensor of the same memory and the same version counter.
                        whole = nn.Parameter(_whole(param).value, requires_grad=param.requires_grad)
                        if whole.requires_grad:
                            whole.register_hook(_refuse_backward)
                        vars(whole).update(_attributes(param))
                        vars(whole)[_SHARD] = _Link(param)
                        shown[param] = whole
                    self._places.append((module, name, param))
                    parameters_of(module)[name] = shown[param]

    def _let_call(self, sharding: Sharding) -> None:
        """Let what is whole now be called, by itself or with all the model."""
        there = set(map(id, sharding.model.parameters()))
        whole = [shard for shard in shards_of(sharding.model) if id(shard) not in there]
        dtype = sharding.param_dtype
        casts = dtype is not None and all(_whole(shard).is_used_in(dtype) for shard in whole)
        end = call_whole(sharding.model, set(map(id, whole)), casts)
        sharding.shown.append(not any(map(is_dtensor, sharding.model.parameters())))
        self._calls.append((sharding, len(sharding.shown), end))


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

    def check_is_own(self, param: Tensor) -> None:
        """Raise if what is written here could not be what the optimizer has."""
        if self.value.dtype != _sharded(param).dtype:
            raise RuntimeError(
                f"{_OP}: modifier_rank is given inside of one that shows weights as they are used,"
                f" in {self.value.dtype}, expected that one to have a modifier_rank too"
            )

    def check_innermost(self, context: GatheredParameters) -> None:
        """Raise if a context that is about to end is around another one."""
        if self.inside[-1] is not context:
            _refuse_order()

    def spread(self, param: Tensor, rank: int, before: int) -> None:
        """Make the value that one process has that of all, and allow its writes since a version."""
        with torch.no_grad():
            _spread(self.value, _sharded(param), rank)
        self.excused += self.version() - before

    def is_written(self, param: Tensor) -> bool:
        """Tell whether the part of this process is another one, which `.data` tells no version."""
        kept = local(_sharded(param))
        part = part_for(self.value, _sharded(param)).to(kept.device)
        return bool(differ([kept.reshape(-1)], [part.reshape(-1)]))

    def is_used_in(self, dtype: torch.dtype) -> bool:
        """Tell whether it is as forwards use it."""
        return self.value.dtype == dtype or not self.value.is_floating_point()

    def version(self) -> int:
        """Count writes, those left out that were allowed."""
        return version_of(self.value) - self.excused


class _Link:
    """From what is shown in a module to its shard; a copy or a pickle of it leads nowhere."""

    def __init__(self, shard: Tensor | None = None) -> None:
        self.shard = shard

    def __reduce__(self) -> tuple[Any, ...]:
        return _Link, ()


def _refuse_order() -> None:
    raise RuntimeError(
        f"{_OP}: it ends before one inside of it for the same parameter or model, expected the"
        " inner one to end first"
    )


def _refuse_backward(grad: Tensor) -> None:
    raise RuntimeError(
        f"{_OP}: a backward reaches whole parameters, whose gradients no process would add up,"
        " expected one of a forward outside of it"
    )


def _attributes(param: Tensor) -> dict[str, Any]:
    """Return what others have written on a parameter."""
    return {k: v for k, v in vars(param).items() if not k.startswith("_deepspeed_ext")}


def shard_of(param: Any) -> Any:
    """Return the shard of what a GatheredParameters shows in a module; of all else itself."""
    link = vars(param).get(_SHARD) if isinstance(param, Tensor) else None
    shard = None if link is None else link.shard
    return shard if shard is not None and WHOLE in vars(shard) else param


def sharded(param: Tensor) -> DTensor | None:
    """Return the DTensor that holds a parameter, itself or rows beside it; of a plain one None."""
    return param if is_dtensor(param) else rows_of(param)


def is_shown(param: Tensor) -> bool:
    """Tell whether a shard, or what has rows here, is shown whole."""
    return WHOLE in vars(param)


def _sharded(param: Tensor) -> DTensor:
    found = sharded(param)
    assert found is not None
    return found


def _whole(param: Tensor) -> _Whole:
    whole: _Whole = vars(param)[WHOLE]
    return whole


def _take(shown: Tensor | None, shard: Tensor) -> None:
    """Take what was put in the place of a whole parameter, as by assign=True; also if frozen."""
    if shown is None:
        return
    if is_dtensor(shown):
        raise RuntimeError(
            f"{_OP}: a shard has come back into a module inside of it, expected whole parameters"
            " there until it ends; call only what has all of its parameters there"
        )
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
    if sharded(param) is None:
        raise ValueError(
            f"{_OP}: {name} is a plain tensor, expected a shard; it is whole already, as without"
            " zero.shard"
        )
    ranks = _sharded(param).device_mesh.mesh.flatten().tolist()
    if rank is not None and rank not in ranks:
        raise ValueError(
            f"{_OP}: modifier_rank is {rank}, expected one of the processes that hold {name},"
            f" {ranks}"
        )


def _full(param: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return the whole of a parameter in memory of its own, floating-point ones in a dtype."""
    if not is_dtensor(param):
        return show(param)  # type: ignore[arg-type]
    whole = full(param).detach()
    same = whole.untyped_storage().data_ptr() == local(param).untyped_storage().data_ptr()
    is_cast = dtype is not None and whole.is_floating_point()
    return whole.to(dtype if is_cast else whole.dtype, copy=same)


def _spread(whole: Tensor, param: DTensor, rank: int) -> None:
    """Make the value that one process has the value of a parameter on all."""
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

"""Parameters of which a process holds its rows only, before their model is sharded."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from deepspeed_ext.dtensors import local, part_for, rests_on_host, spread
from deepspeed_ext.torch_internals.modules import parameters_of
from deepspeed_ext.torch_internals.tensors import FITS_DATA, past_torch_function
from deepspeed_ext.zero.memory import give_back, put

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_ROWS = "_deepspeed_ext_rows"  # attribute of a parameter
SINCE_SHARDED = (
    "has given its rows to a model that was sharded since, expected the parameters of that model"
)
# What may be asked of a parameter that has no elements here, and what moves or casts it.
_METHODS = {
    *("__format__", "__hash__", "__repr__", "dim", "element_size", "get_device", "is_complex"),
    *("is_contiguous", "is_floating_point", "is_pinned", "is_shared", "nelement", "numel", "size"),
    *("bfloat16", "cpu", "cuda", "detach", "double", "float", "half", "requires_grad_", "to"),
    *("ndimension", "type", "is_inference", FITS_DATA),
}
_NOT_ATTRIBUTES = {"T", "mT", "H", "mH", "real", "imag"}


class _Guarded(Tensor):
    """Refuses all that would take no elements for those of the parameter."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer what is known; a value that is made of it is guarded too."""
        of = getattr(func, "__self__", None)
        name = getattr(of, "__name__", "") if func.__name__ in ("__get__", "__set__") else ""
        if (name and name not in _NOT_ATTRIBUTES) or (not name and func.__name__ in _METHODS):
            with past_torch_function():
                made = func(*args, **(kwargs or {}))
                is_made = isinstance(made, Tensor) and made is not args[0] and name != "grad"
                return made.as_subclass(RowsTensor) if is_made else made
        raise RuntimeError(
            f"zero: {name or func.__name__} is given a parameter of which this process holds its"
            " rows only, expected a whole one; do that inside of GatheredParameters, or after"
            " initialize"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(
            "zero: a parameter is pickled of which this process holds its rows only, expected a"
            " whole one; do that inside of GatheredParameters, or after initialize"
        )


class RowsTensor(_Guarded):
    """What `data` of a `RowsParameter` is."""

    def __repr__(self) -> str:  # type: ignore[override]
        return "RowsTensor()"


class RowsParameter(_Guarded, nn.Parameter):
    """A parameter without elements, whose rows are kept beside it, as zero.shard will deal them.

    While it is shown whole it is a plain Parameter, the same object.
    """

    def __repr__(self) -> str:  # type: ignore[override]
        rows = rows_of(self)
        return f"RowsParameter(of {list(rows.shape) if rows is not None else []})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "RowsParameter":
        rows = rows_of(self)
        assert rows is not None
        with past_torch_function():
            made = nn.Parameter(self.data.clone(), requires_grad=self.requires_grad)
        vars(made).update({k: copy.copy(v) for k, v in vars(self).items() if k != _ROWS})
        memo[id(self)] = hide(made, spread(local(rows).clone(), rows))
        return made  # type: ignore[return-value]  # hide has changed its class


def rows_of(param: Tensor) -> "DTensor | None":
    """Return the rows of a parameter that `keep` was called on, also while it is whole."""
    return vars(param).get(_ROWS)


def keep(
    param: nn.Parameter,
    mesh: DeviceMesh,
    dtype: torch.dtype | None = None,
    device: str | None = None,
) -> None:
    """Let go of a whole parameter but for the rows that fully_shard gives this process.

    All processes of the mesh call it. Each gets the rows of what the first one has.

    Args:
        param: plain, of at least one dimension and with memory.
        mesh: of one dimension, over which rows are dealt.
        dtype: to cast it to; None: none.
        device: where rows rest; None: that of the mesh.
    """
    from torch.distributed.tensor import Shard, distribute_tensor

    with torch.no_grad():
        whole = param.detach().to(mesh.device_type, dtype).contiguous()
        rows = distribute_tensor(whole, mesh, [Shard(0)])
        part = local(rows)
        if part.untyped_storage().nbytes() > part.nbytes:
            part = part.clone()  # a view would keep the whole
        part = part.to(device or mesh.device_type)
        param.data = whole
        hide(param, spread(part, rows))
        del whole
    give_back(param.element_size() * rows.numel())


def hide(param: nn.Parameter, rows: "DTensor") -> nn.Parameter:
    """Leave rows in the place of a whole parameter; a backward that has saved it is an error.

    Afterwards `give_back` is worth it.
    """
    with torch.no_grad():
        param.data = param.data.new_empty(0)
    torch.autograd.graph.increment_version(param)
    vars(param)[_ROWS] = rows
    param.__class__ = RowsParameter
    return param


def show(param: nn.Parameter) -> Tensor:
    """Make a parameter whole, of the dtype and on the device that it was moved to since.

    Returns:
        A tensor of the same memory and the same version counter.
    """
    rows = rows_of(param)
    assert rows is not None
    if rows.dtype != param.dtype:
        vars(param)[_ROWS] = rows = spread(local(rows).to(param.dtype), rows)
    whole = part_for(rows, torch.empty(0))
    if whole.untyped_storage().data_ptr() == local(rows).untyped_storage().data_ptr():
        whole = whole.clone()
    whole = whole.to(param.device)
    param.__class__ = nn.Parameter
    with torch.no_grad():
        param.data = whole
    return param.detach()


def make_whole(param: nn.Parameter) -> None:
    """Make a parameter whole for good whose rows, in one process, are all of it: it has them."""
    rows = rows_of(param)
    assert rows is not None
    with past_torch_function():
        dtype = param.dtype
    param.__class__ = nn.Parameter
    with torch.no_grad():
        param.data = local(rows).to(dtype)
    for name in [name for name in vars(param) if name == _ROWS or name.startswith("ds_")]:
        del vars(param)[name]


@contextmanager
def in_whole_shapes(model: nn.Module) -> Iterator[None]:
    """Let parameters on meta, of the whole shape, stand for those that have only rows here.

    Whoever replaces them inside, as fully_shard does, gets the rows; after an error all is as it
    was.
    """
    places = [
        (module, name, param)
        for module in model.modules()
        for name, param in parameters_of(module).items()
        if isinstance(param, RowsParameter)
    ]
    stand_ins: dict[nn.Parameter, nn.Parameter] = {}
    for module, name, param in places:
        if param not in stand_ins:
            rows = rows_of(param)
            if rows is None:
                raise ValueError(f"zero.shard: {name} of a {type(module).__name__} {SINCE_SHARDED}")
            made = torch.empty(rows.shape, dtype=param.dtype, device="meta")
            stand_ins[param] = nn.Parameter(made, requires_grad=param.requires_grad)
    for module, name, param in places:
        parameters_of(module)[name] = stand_ins[param]
    try:
        yield
    except BaseException:
        for module, name, param in places:
            parameters_of(module)[name] = param
        raise
    for module, name, param in places:
        shard = parameters_of(module)[name]
        assert shard is not None
        if _ROWS in vars(param):  # else it is tied, and was filled under another name
            # Rows may have come to rest elsewhere than the shard does.
            where = "cpu" if rests_on_host(shard) else vars(param)[_ROWS].device_mesh.device_type
            part = part_for(vars(param)[_ROWS], shard).to(where, shard.dtype)
            vars(param).clear()  # others have its memory there, too
            put(shard, part)

"""Experts: many copies of a module, with their parameters stacked."""

import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from deepspeed_ext.dtensors import is_dtensor
from deepspeed_ext.moe.arguments import check_mesh
from deepspeed_ext.moe.expert_forms import Weights, can_run, form_of, run
from deepspeed_ext.moe.stacks import copied, mirror, of_all, slices, stacked, tied
from deepspeed_ext.ops._kinds import check_kinds, check_whole
from deepspeed_ext.torch_internals.modules import STATE_DICT_HOOKS, reset_of
from deepspeed_ext.torch_internals.tensors import has_gradient_hooks, version_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Experts(nn.Module):
    """Many experts, all of them copies of one module at first.

    Parameters and buffers are those of the module with a dimension in front, (count, ...), and have
    its names: of an expert with a layer `up`, `experts.up.weight` is (count, out, in). What holds
    them is no nn.Linear, so that nothing takes them for the weights of one layer. The module itself
    is not changed and not kept.

    Each expert's rows go through the module's own forward, one expert after the other, with slices
    for its parameters; on CUDA the host waits once for the offsets. All experts are run at once,
    and nobody waits, if the module is known to be no more than linear layers and functions of each
    element, has no hooks, and is of float32, bfloat16 or float16:

    - an nn.Sequential of nn.Linear, the first one too, activations of torch and Dropout, none of
      them a subclass;
    - a module whose class says of its forward what it is, in its own body: `expert_form =
      ("up", functional.gelu, "down")`, or `("gate", functional.silu, "up", "down")` for
      down(silu(gate(x)) * up(x)). The names are those of its nn.Linear; for the function there may
      be the name of what has it.

    All parameters get gradients in each backward, those of experts without rows 0. An expert may
    return a tuple, of which the first is taken, as DeepSpeed does with (output, bias). Forward
    hooks on the module or inside of it are called for each expert; what else it keeps, but for
    parameters and buffers, all experts share. It cannot checkpoint parts of itself: checkpoint what
    calls this.

    Args:
        expert: takes (rows, n), returns as much. Copied; its random state is not used.
        count: of experts.
        mesh: of one dimension, over whose processes experts are shared out: parameters and buffers
            are DTensors with Shard(0), and no process ever has more than its own. Gradients are
            divided by its size: rows come from all of its processes, whose losses count as their
            mean. None: all experts are here.

    Raises:
        ValueError: count is no positive multiple of the mesh's size, or the mesh has more
            dimensions; the expert has parameters that are lazy, DTensors or have hooks, hooks on
            state dicts, or a name that nn.Module has.

    See: torch.func.functional_call.
    """

    num_experts: int
    num_local_experts: int
    _template: nn.Module

    def __init__(self, expert: nn.Module, count: int, mesh: "DeviceMesh | None" = None) -> None:
        super().__init__()
        _check(expert, count, mesh)
        self.num_experts = int(count)
        self.num_local_experts = self.num_experts // (1 if mesh is None else mesh.size())
        template = copied(expert, lambda tensor: torch.empty_like(tensor, device="meta"))
        self._form = form_of(template)
        self._names = [name for name, _ in template.named_parameters()]
        self._buffer_names = [name for name, _ in template.named_buffers()]
        self._in_use = _Lock()
        object.__setattr__(self, "_template", template)  # without memory; no part of this module
        stacks = {
            id(tensor): stacked(tensor, self.num_local_experts, mesh)
            for tensor in (*expert.parameters(), *expert.buffers())
        }
        mirror(expert, self, stacks, {})
        self._show_modes()

    def train(self, mode: bool = True) -> "Experts":
        """Set whether experts are trained; see nn.Module."""
        super().train(mode)
        self._template.train(mode)  # which may leave out some of its parts
        self._show_modes()
        return self

    def _show_modes(self) -> None:
        for name, module in self._template.named_modules():
            self.get_submodule(name).training = module.training

    def forward(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """Return what experts make of their rows.

        Args:
            rows: (rows, n), sorted by expert: those of the experts in this process, or of all where
                it has all.
            offsets: as many as there are of these, int32, where the rows of each end.

        Returns:
            (rows, n), of the dtype of rows, also under autocast; 0 behind the last offset.

        Raises:
            ValueError: offsets have another shape, or descend, or are beyond the rows; an expert
                returns another shape.
        """
        count = self.num_experts if self.has_all() else self.num_local_experts
        if offsets.shape != (count,):
            raise ValueError(
                f"Experts: offsets has shape {list(offsets.shape)}, expected [{count}]"
            )
        self._take_modes()
        if self._form is not None:
            weights = [self._weights(name) for name in self._form.linears]
            if can_run(weights, rows):
                found = run(self._form, weights, rows, offsets)
                _check_result(found, rows)
                return found.to(rows.dtype)
        return self._one_by_one(rows, offsets)

    def has_all(self) -> bool:
        """Tell whether all experts are in this process, if only while they are shown there.

        Raises:
            RuntimeError: their parameters are, and buffers are not.
        """
        if self.num_local_experts == self.num_experts:
            return True
        if any(is_dtensor(self._value(name)) for name in self._names) or not self._names:
            return False
        if self._buffer_names:
            raise RuntimeError(
                f"Experts: parameters are whole, and {self._buffer_names[0]} is shared out, as"
                " other buffers are, expected both or none"
            )
        return True

    def _take_modes(self) -> None:
        """Let experts train where this module and its parts say so, as some set these alone."""
        for name, module in self._template.named_modules():
            mode = self.get_submodule(name).training
            if module.training is not mode:
                module.training = mode

    def _weights(self, name: str) -> Weights:
        weight, bias = self._local(f"{name}.weight"), f"{name}.bias"
        return weight, self._local(bias) if bias in self._names else None

    def _local(self, name: str) -> Tensor:
        """Return a stacked parameter or buffer, as far as it is here."""
        value = self._value(name)
        if not is_dtensor(value):
            return value
        return of_all(value.to_local(), value.device_mesh.size())

    def _value(self, name: str) -> Tensor:
        value: Any = self
        for part in name.split("."):
            value = getattr(value, part)
        return value  # type: ignore[no-any-return]

    def _one_by_one(self, rows: Tensor, offsets: Tensor) -> Tensor:
        tie, pieces = slices([self._local(name) for name in self._names], rows)
        *parts, rest = rows.split(_sizes(offsets, len(rows)))
        found = []
        for i, own in enumerate(parts):
            if len(own):
                values = dict(zip(self._names, pieces[i :: len(parts)], strict=True))
                out = self._call(own, i, values)
                _check_result(out, own)
                found.append(out.to(rows.dtype))
        zeros = rest.masked_fill(torch.ones((), dtype=torch.bool, device=rest.device), 0)
        return torch.cat([*found, tied(zeros, tie)])  # no view, of which fully_shard warns

    def _call(self, rows: Tensor, expert: int, values: dict[str, Tensor]) -> Tensor:
        buffers = {name: self._local(name)[expert] for name in self._buffer_names}
        given = {**values, **buffers}
        with self._in_use:  # by this thread: meanwhile the module has these values
            out = torch.func.functional_call(self._template, given, (rows,))
        with torch.no_grad():
            for name, buffer in buffers.items():
                if given[name] is not buffer:  # another one was put in its place
                    buffer.copy_(given[name])
        result: Tensor = out[0] if isinstance(out, tuple) else out
        return result

    @torch.no_grad()
    def put(self, number: int, expert: nn.Module) -> None:
        """Give one of the experts in this process the values of a module.

        Args:
            number: of the expert, from 0.
            expert: with the same parameters and buffers.
        """
        values = dict([*expert.named_parameters(), *expert.named_buffers()])
        for name in (*self._names, *self._buffer_names):
            self._local(name)[number].copy_(values[name])

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw one expert as its modules do, by reset_parameters; all become copies of it.

        Raises:
            TypeError: a module in the expert has parameters, but no reset_parameters.
        """
        stacks = {name: self._local(name) for name in (*self._names, *self._buffer_names)}
        values = {name: stack[0].clone() for name, stack in stacks.items()}
        named = dict([*self._template.named_parameters(), *self._template.named_buffers()])
        of = {id(tensor): values[name] for name, tensor in named.items()}
        one = copied(self._template, lambda tensor: of[id(tensor)])
        versions = {name: version_of(value) for name, value in values.items()}
        for name, module in one.named_modules():
            reset = reset_of(module)
            if reset is not None:
                reset()
            elif any(True for _ in module.parameters(recurse=False)):
                raise TypeError(
                    f"Experts: {name or 'expert'} is a {type(module).__name__}, expected a module"
                    " with reset_parameters"
                )
        for name, value in values.items():
            if name in self._names or version_of(value) != versions[name]:
                stacks[name].copy_(value.expand_as(stacks[name]))

    def extra_repr(self) -> str:
        """Return how many there are, and of what."""
        return f"{self.num_experts} of {type(self._template).__name__}"


class _Lock:
    """A lock of a module: a copy of it has one of its own."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __deepcopy__(self, memo: object) -> "_Lock":
        return _Lock()

    def __reduce__(self) -> tuple[type["_Lock"], tuple[()]]:
        return _Lock, ()


def _check(expert: nn.Module, count: int, mesh: "DeviceMesh | None") -> None:
    check_kinds("Experts", expert=(expert, nn.Module))
    check_whole("Experts", count=count)
    check_mesh("Experts", mesh)
    processes = 1
    if mesh is not None:
        if mesh.ndim != 1:
            raise ValueError(f"Experts: mesh has {mesh.ndim} dimensions, expected 1")
        processes = mesh.size()
    if count < 1 or count % processes:
        want = "at least 1" if processes == 1 else f"a multiple of {processes}, the mesh's size"
        raise ValueError(f"Experts: count is {count}, expected {want}")
    for name, tensor in (*expert.named_parameters(), *expert.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(f"Experts: {name} is not initialized, expected one that has a shape")
        if is_dtensor(tensor):
            raise ValueError(f"Experts: {name} is a DTensor, expected a tensor that is here whole")
        if has_gradient_hooks(tensor):
            raise ValueError(f"Experts: {name} has hooks, expected none: they would see nothing")
    for name, module in expert.named_modules():
        for hooks in STATE_DICT_HOOKS:
            if getattr(module, hooks):
                raise ValueError(
                    f"Experts: {name or 'expert'} has hooks on its state dict, expected none: the"
                    " parameters of all experts are stacked in one of another shape"
                )


def _sizes(offsets: Tensor, rows: int) -> list[int]:
    """Return how many rows each expert has, and how many there are behind all.

    Raises:
        ValueError: an offset is below the one before it, or beyond the rows.
    """
    ends: list[int] = offsets.tolist()
    sizes, begin = [], 0
    for expert, end in enumerate(ends):
        if not begin <= end <= rows:
            raise ValueError(
                f"Experts: offsets[{expert}] is {end}, expected a number from {begin} to {rows}"
            )
        sizes.append(end - begin)
        begin = end
    return [*sizes, rows - begin]


def _check_result(out: object, rows: Tensor) -> None:
    if not isinstance(out, Tensor):
        raise TypeError(f"Experts: expert returned a {type(out).__name__}, expected a tensor")
    if out.shape != rows.shape:
        raise ValueError(
            f"Experts: expert returned shape {list(out.shape)}, expected {list(rows.shape)}"
        )

"""Calls of ops, recorded once and made again without Python between them, on the CPU.

What CUDA graphs are to a GPU: a step of a small model calls over a hundred ops, and Python takes
longer between them than some of them take.
"""

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepspeed_ext.ops._library import call_recording_nothing, define, refuse_tangents
from deepspeed_ext.torch_internals.dispatch import TorchDispatchMode, schema_of
from deepspeed_ext.torch_internals.tensors import storage_id


def _fake(names: Tensor, code: Tensor, given: list[Tensor]) -> Tensor:
    raise RuntimeError("replay_: given has fake tensors, expected values on the CPU")


_op = define(
    "replay_(Tensor names, Tensor code, Tensor(a!)[] given) -> Tensor",
    {"cpu": "cpu_replay"},
    fake=_fake,
)

# In the order of csrc/replay/replay_ops.cpp.
_KINDS = ("none", "Tensor", "Optional[Tensor]", "int", "Optional[int]", "bool", "float")
_CALL, _VIEW = 0, 1
_OF_TORCH = (torch.ops.aten.index_select.default,)  # called again too; it writes to nothing


def record(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, "Recorded"]:
    """Call a function, and return what it does as well as its result.

    Args:
        function: of tensors, to a tensor. It calls ops of this package and index_select, and makes
            views of tensors; all else that it does with them, and with numbers, is not done again.
        inputs: that it is called with. Later ones must have the same shapes, dtypes and strides.
    """
    # New ones: an input may be given twice, or be what the function has from elsewhere.
    inputs = tuple(tensor.view_as(tensor) for tensor in inputs)
    recorder = _Recorder(inputs)
    with recorder:
        result = function(*inputs)
    return result, Recorded(recorder, result)


class Recorded:
    """A function that has been called once; calls of this do the same ops again.

    They read and write what the function read and wrote: tensors that it had from elsewhere are
    kept, and what is in them may change. Results have memory of their own. Each op checks what it
    is given, as ever.

    Attributes:
        problem: what the function did that cannot be done again, None if nothing.
    """

    def __init__(self, recorder: "_Recorder", result: Tensor) -> None:
        self.problem = recorder.problem
        if self.problem is None and id(result) not in recorder.places:
            self.problem = "it returns what no op that is called again has left"
        if self.problem is not None:
            return
        inputs = recorder.given[: recorder.inputs]
        self._inputs = [_form_of(tensor) for tensor in inputs]
        self._given = recorder.given[recorder.inputs :]
        self._written = sorted(recorder.written)
        self._names = torch.tensor(list(recorder.names), dtype=torch.uint8, device="cpu")
        code = _code_of(recorder.instructions, recorder.places[id(result)])
        self._code = torch.tensor(code, dtype=torch.int64, device="cpu")

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Return what the function would.

        Raises:
            ValueError: an input is not like the one that was recorded, or their number.
            RuntimeError: there was a problem, a gradient is wanted, or an op refuses a tensor.
        """
        if self.problem is not None:
            raise RuntimeError(f"replay_: {self.problem}, expected what can be done again")
        if torch.is_grad_enabled() and any(t.requires_grad for t in (*inputs, *self._given)):
            raise RuntimeError(
                "replay_: a gradient is wanted, expected none; call it under torch.no_grad()"
            )
        refuse_tangents("replay_", {"inputs": inputs, "given": self._given})
        if len(inputs) != len(self._inputs):
            raise ValueError(
                f"replay_: inputs has {len(inputs)} tensors, expected {len(self._inputs)}"
            )
        for i, (tensor, want) in enumerate(zip(inputs, self._inputs, strict=True)):
            if _form_of(tensor) != want:
                raise ValueError(f"replay_: inputs[{i}] is {_form_of(tensor)}, expected {want}")
        given = [*inputs, *self._given]
        out: Tensor = call_recording_nothing(_op, self._names, self._code, given)
        # A native op does not count its writes.
        torch.autograd.graph.increment_version([given[place] for place in self._written])
        return out


class _Form(NamedTuple):
    """What ops go by, beside values."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def _form_of(tensor: Tensor) -> _Form:
    return _Form(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


class _Call(NamedTuple):
    """An instruction; places below 0 are of results, a new one each."""

    name: int
    arguments: list[tuple[int, int]]
    results: list[int]


class _View(NamedTuple):
    """An instruction."""

    source: int
    result: int
    later: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


class _Recorder(TorchDispatchMode):
    """Notes the ops that are called.

    Args:
        inputs: of the function, none of them twice.

    Attributes:
        inputs: how many.
        given: tensors that no op has left, the inputs first.
        written: the places of those of them that ops write to, also through views.
        places: by id of a tensor, all of which are kept so that no other one gets the same.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.problem: str | None = None
        self.given: list[Tensor] = []
        self.written: set[int] = set()
        self.places: dict[int, int] = {}
        self.instructions: list[_Call | _View] = []
        self.names = b""
        self.inputs = len(inputs)
        self._left: list[Tensor] = []
        self._sources: dict[int, int] = {}  # of views among results, by their places
        for tensor in inputs:
            self._place_of(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the op, and note it unless there was a problem before."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self.problem is None:
            results = [] if out is None else list(out) if isinstance(out, tuple | list) else [out]
            if func.namespace == "deepspeed_ext" or func in _OF_TORCH:
                self._add_call(func, args, kwargs, results)
            else:
                self._add_views(func, [a for a in args if isinstance(a, Tensor)], results)
        return out

    def _place_of(self, tensor: Tensor) -> int:
        if id(tensor) not in self.places:
            self.places[id(tensor)] = len(self.given)
            self.given.append(tensor)
        return self.places[id(tensor)]

    def _new_place(self, tensor: Tensor) -> int:
        self._left.append(tensor)
        self.places[id(tensor)] = -len(self._left)
        return -len(self._left)

    def _add_call(self, func: Any, args: Any, kwargs: Any, results: list[Any]) -> None:
        arguments = []
        for i, argument in enumerate(schema_of(func).arguments):
            value = args[i] if i < len(args) else kwargs.get(argument.name, argument.default_value)
            kind = str(argument.type)
            if value is None:
                arguments.append((_KINDS.index("none"), 0))
            elif kind not in _KINDS:
                self.problem = f"{func} takes a {kind}"
                return
            else:
                number = self._number_of(value, kind)
                arguments.append((_KINDS.index(kind), number))
                if argument.is_write:
                    self._add_write(number)
        if not all(isinstance(result, Tensor) for result in results):
            self.problem = f"{func} returns what is no tensor"
            return
        schema = schema_of(func)
        name = f"{schema.name}\0{schema.overload_name}\0".encode()
        place = self.names.find(name)
        if place < 0:
            place = len(self.names)
            self.names += name
        self.instructions.append(_Call(place, arguments, [self._new_place(r) for r in results]))

    def _add_write(self, place: int) -> None:
        while place in self._sources:
            place = self._sources[place]
        if place >= 0:
            self.written.add(place)

    def _number_of(self, value: Any, kind: str) -> int:
        if isinstance(value, Tensor):
            return self._place_of(value)
        if kind == "float":  # whatever number was given
            [bits] = struct.unpack("q", struct.pack("d", value))
            return int(bits)
        return int(value)

    def _add_views(self, func: Any, sources: list[Tensor], results: list[Any]) -> None:
        """Note views of what instructions leave; those of other tensors stay as they are."""
        views = sources and results and all(_is_view(each, sources[0]) for each in results)
        if schema_of(func).is_mutable or not views:
            self.problem = f"it calls {func}"
            return
        source = sources[0]
        place = self._place_of(source)
        for result in results:
            if place >= self.inputs or id(result) in self.places:
                self._place_of(result)
                continue
            later = result.storage_offset() - source.storage_offset()
            form = _form_of(result)
            reach = _reach(form)
            if reach and not 0 <= later <= _reach(_form_of(source)) - reach:
                self.problem = f"it calls {func} for elements beyond the tensor"
                return
            made = self._new_place(result)
            self._sources[made] = place
            self.instructions.append(_View(place, made, later, form.shape, form.strides))


def _reach(form: _Form) -> int:
    """Return how many elements lie from the first one to the last, those between included."""
    if 0 in form.shape:
        return 0
    return 1 + sum((n - 1) * stride for n, stride in zip(form.shape, form.strides, strict=True))


def _is_view(result: Any, source: Tensor) -> bool:
    if not isinstance(result, Tensor) or result.dtype != source.dtype or result.is_neg():
        return False
    return storage_id(result.untyped_storage()) == storage_id(source.untyped_storage())


def _reads(instruction: _Call | _View) -> list[int]:
    """Return the places of results that an instruction reads."""
    if isinstance(instruction, _View):
        places = [instruction.source]
    else:
        places = [what for kind, what in instruction.arguments if "Tensor" in _KINDS[kind]]
    return [place for place in places if place < 0]


def _code_of(instructions: Sequence[_Call | _View], result: int) -> list[int]:
    """Write instructions as numbers; a place is taken again when nobody reads what is there."""
    last = {place: i for i, each in enumerate(instructions) for place in _reads(each)}
    last[result] = len(instructions)
    now: dict[int, int] = {}  # where a result is
    free: list[int] = []
    most = 0
    code: list[int] = []
    for i, each in enumerate(instructions):
        made = [each.result] if isinstance(each, _View) else each.results
        for place in made:
            if not free:
                most += 1
                free.append(-most)
            now[place] = free.pop()
        if isinstance(each, _View):
            source = now.get(each.source, each.source)
            code += (_VIEW, source, now[each.result], each.later, len(each.sizes))
            code += (*each.sizes, *each.strides)
        else:
            code += (_CALL, each.name, len(each.arguments), len(each.results))
            for kind, what in each.arguments:
                code += (kind, now.get(what, what) if "Tensor" in _KINDS[kind] else what)
            code += (now[place] for place in each.results)
        dead = {p for p in (*_reads(each), *made) if last.get(p, i) == i}
        free += (now[place] for place in sorted(dead))
    return [now.get(result, result), *code]

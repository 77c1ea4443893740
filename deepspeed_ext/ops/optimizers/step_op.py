"""What is known of a step op, in one table, and what follows from it: schema, call, writes."""

import functools
import inspect
import math
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from deepspeed_ext.ops._library import call_recording_nothing, define, refuse_tangents
from deepspeed_ext.torch_internals.dispatch import OpOverload

P = ParamSpec("P")
R = TypeVar("R")

_STATES, _OPTIONS = "(states)", "(options)"
# All that step ops take, in the order of their schemas; an op has its own states and options.
_ARGUMENTS = {
    "params": "Tensor[]",
    "grads": "Tensor[]",
    _STATES: "Tensor[]",
    "scales": "Tensor[]",
    "master_params": "Tensor[]",
    "steps": "Tensor[]",
    "offsets": "Tensor?",
    "slots": "Tensor?",
    "noise": "Tensor?",
    "coefficients": "Tensor",
    "lr": "float",  # and lr_tensor, as a schema cannot have either
    _OPTIONS: "",
    "maximize": "bool",
    "grad_scale": "Tensor?",
    "found_inf": "Tensor?",
}
_SEQUENCES = frozenset((list, tuple))
_ON_HOST = ("offsets", "slots", "noise")  # always in host memory


@dataclass(frozen=True)
class State:
    """State that has an element for each of a parameter's.

    Attributes:
        key: its name in the state of an optimizer; the op's argument is called that and an "s".
        signed: whether values may be negative, which 8-bit codes have to know.
        when: the option of an optimizer that must be on, or not 0, for this state to be there; an
            op is given no tensors then. None: it always is there.
    """

    key: str
    signed: bool
    when: str | None = None

    @property
    def argument(self) -> str:
        """The name of the op's argument."""
        return self.key + "s"


@dataclass(frozen=True)
class Number:
    """An option that is a number, or a pair of them.

    Attributes:
        name: of the op's argument, and of the option of an optimizer.
        least: an optimizer refuses less than this, and NaN in any case.
        below: it refuses this and more.
        is_pair: there are two, in the schema under the singular of the name and 1 and 2.
    """

    name: str
    least: float = -math.inf
    below: float = math.inf
    is_pair: bool = False

    @property
    def key(self) -> str:
        """The name of the option of an optimizer."""
        return self.name

    @property
    def want(self) -> str:
        """What an error says that it must be."""
        if self.least == -math.inf:
            return "a number"
        return f"at least {self.least:g}" + f" and below {self.below:g}" * (self.below < math.inf)

    def takes(self, value: Any) -> bool:
        """Return whether a number is within the bounds; it may be a tensor."""
        return bool(value >= self.least) and (self.below == math.inf or bool(value < self.below))


@dataclass(frozen=True)
class Flag:
    """An option that is on or off.

    Attributes:
        name: of the op's argument.
        option: of the option of an optimizer, if that has another name.
    """

    name: str
    option: str | None = None

    @property
    def key(self) -> str:
        """The name of the option of an optimizer."""
        return self.option or self.name


BETAS = Number("betas", least=0, below=1, is_pair=True)
EPS = Number("eps", least=0)
WEIGHT_DECAY = Number("weight_decay", least=0)


@dataclass(frozen=True)
class StepOp:
    """A step op, or one of the two that a step consists of.

    Attributes:
        name: of the op.
        library: "lion" if its kernels are in cpu_lion and fused_lion.
        states: in the order of its arguments.
        options: numbers and flags that no other op need have, likewise.
        lacks: which arguments of all step ops it does not have.
        reads: which lists of tensors it leaves as they are.
        measures: it returns two sums of squares for each parameter: float64, (n, 2).
    """

    name: str
    library: str
    states: tuple[State, ...]
    options: tuple[Number | Flag, ...]
    lacks: tuple[str, ...] = ("coefficients",)
    reads: tuple[str, ...] = ("grads",)
    measures: bool = False

    @property
    def libraries(self) -> dict[str, str]:
        """The op libraries that have its kernels, by the type of the device."""
        return {"cpu": f"cpu_{self.library}", "cuda": f"fused_{self.library}"}

    @property
    def usual_states(self) -> tuple[State, ...]:
        """Those of most calls: those that always are there, or all if none is."""
        return tuple(state for state in self.states if state.when is None) or self.states

    @functools.cached_property
    def arguments(self) -> dict[str, str]:
        """The types of its arguments by their names, in order; of options there are none."""
        found: dict[str, str] = {}
        for name, kind in _ARGUMENTS.items():
            if name == _STATES:
                found |= {state.argument: kind for state in self.states}
            elif name == _OPTIONS:
                found |= {option.name: "" for option in self.options}
            elif name not in self.lacks:
                found[name] = kind
        return found

    @functools.cached_property
    def written(self) -> tuple[str, ...]:
        """The arguments that it writes to."""
        lists = [name for name, kind in self.arguments.items() if kind == "Tensor[]"]
        return tuple(name for name in lists if name not in self.reads)

    @functools.cached_property
    def state_keys(self) -> dict[str, str]:
        """The keys of its states by their arguments."""
        return {state.argument: state.key for state in self.states}

    @functools.cached_property
    def option_keys(self) -> dict[str, str]:
        """The names of an optimizer's options by the arguments for them."""
        return {option.name: option.key for option in self.options}

    def taken_from(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of the values that are arguments of this op."""
        return {name: values[name] for name in self.arguments if name in values}

    @property
    def schema(self) -> str:
        """What torch is to know of it."""
        return self._schema(in_place=True)

    @property
    def out_schema(self) -> str:
        """The same of its overload that writes elsewhere: to lists that are keyword-only."""
        return self._schema(in_place=False)

    def _schema(self, in_place: bool) -> str:
        letters = iter(string.ascii_lowercase)
        numbers = {option.name: option for option in self.options if isinstance(option, Number)}
        parts = []
        for name, kind in self.arguments.items():
            if in_place and name in self.written:
                parts.append(f"Tensor({next(letters)}!)[] {name}")
            elif name == "lr":
                parts += ["float lr", "Tensor? lr_tensor"]
            elif name in numbers and numbers[name].is_pair:
                parts += [f"float {name[:-1]}{i}" for i in (1, 2)]
            else:
                parts.append(f"{kind or ('float' if name in numbers else 'bool')} {name}")
        if not in_place:
            parts.append("*")
            parts += [f"Tensor({next(letters)}!)[] out_{name}" for name in self.written]
        name = self.name if in_place else f"{self.name}.out"
        return f"{name}({', '.join(parts)}) -> {'Tensor' if self.measures else '()'}"


def step_function(op: StepOp) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Define an op in torch's registry and make a function call it; used as a decorator.

    The function has the arguments of the op, by the names of the table, and the documentation; if
    the op writes to some, also `out`, the tensors to write to instead. Its body says what it
    returns if there are no parameters, and so no device to dispatch on.
    """
    names = tuple(op.arguments)
    pairs = {option.name for option in op.options if isinstance(option, Number) and option.is_pair}
    written = op.written

    fake = _squares_of if op.measures else None

    def define_one(schema: str) -> OpOverload:
        return define(schema, op.libraries, fake=fake, is_step=True, on_host=_ON_HOST)

    native = define_one(op.schema)
    native_out = define_one(op.out_schema) if written else native  # which is not called then

    def call(values: Mapping[str, Any]) -> Any:
        arguments: list[Any] = []
        for name in names:
            value = values[name]
            if name == "lr":
                arguments += (0.0, value) if isinstance(value, Tensor) else (value, None)
            elif name in pairs:
                arguments += value
            else:
                arguments.append(value)
        if not written:
            with torch.no_grad():  # part of a step, as the op is that writes
                return call_recording_nothing(native, *arguments)
        refuse_tangents(op.name, values)
        targets = values
        if values["out"] is None:
            result = native(*arguments)
        else:
            targets = _targets(op, values, values["out"])
            result = native_out(*arguments, **{f"out_{name}": targets[name] for name in written})
        # A native op does not count its writes. Without the count, a backward that saved a
        # parameter before the step would use the new values without an error.
        for name in written:
            if targets[name]:  # of most calls there are some empty lists
                torch.autograd.graph.increment_version(targets[name])
        return result

    def make(function: Callable[P, R]) -> Callable[P, R]:
        positional, defaults = _signature_of(function, (*names, "out") if written else names)

        @functools.wraps(function)
        def step(*args: P.args, **kwargs: P.kwargs) -> R:
            nothing = function(*args, **kwargs)  # and Python has checked the call
            values = {**defaults, **dict(zip(positional, args, strict=False)), **kwargs}
            for name in written:
                if type(values[name]) not in _SEQUENCES:
                    values[name] = _listed(op, name, values[name])
            if not values["params"] and not values.get("grads"):
                return nothing
            result: R = call(values)
            return result

        return step

    return make


def _targets(
    op: StepOp, values: Mapping[str, Any], out: Mapping[str, Sequence[Tensor]]
) -> dict[str, Sequence[Tensor]]:
    """Return for each argument that the op writes to what it is to write to."""
    for name in out:
        if name not in op.written:
            raise ValueError(f"{op.name}: out has {name!r}, expected some of {list(op.written)}")
    return {name: _listed(op, f"out[{name!r}]", out.get(name, values[name])) for name in op.written}


def _listed(op: StepOp, name: str, tensors: Any) -> list[Tensor]:
    """Return what may be gone through once, such as model.parameters(), as a list.

    Torch would take it too, and leave nothing of it to those who count what was written.
    """
    if isinstance(tensors, Tensor) or not isinstance(tensors, Iterable):
        raise TypeError(f"{op.name}: {name} is a {type(tensors).__name__}, expected a list")
    return list(tensors)


def _signature_of(
    function: Callable[..., Any], names: Sequence[str]
) -> tuple[list[str], dict[str, Any]]:
    """Return the arguments of a function that may be given by position, and all defaults.

    Raises:
        TypeError: the function does not have the arguments of the op.
    """
    parameters = inspect.signature(function).parameters
    if {*parameters} != {*names}:
        wrong = sorted({*parameters} ^ {*names})
        raise TypeError(f"{function.__name__}: arguments are not those of the op: {wrong}")
    positional = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    return positional, defaults


def _squares_of(params: Sequence[Tensor], *_: object) -> Tensor:
    return params[0].new_empty(len(params), 2, dtype=torch.float64)

"""Drawing: modules fill whole tensors with the random numbers of one seed."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor, nn

from deepspeed_ext.dtensors import is_dtensor
from deepspeed_ext.torch_internals.modules import buffers_of, parameters_of, reset_of
from deepspeed_ext.zero.units import Unit

Attribute = tuple[nn.Module, str]  # a tensor, as a module has it
Whole = dict[Attribute, Tensor]
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


class Keep(Protocol):
    """Takes what belongs to this process."""

    def __call__(self, whole: Tensor, tensor: Tensor, *, is_again: bool) -> None:
        """Copy.

        Args:
            whole: what was drawn.
            tensor: of the model.
            is_again: it has values, and only those elements count that init wrote.
        """


class Drawing:
    """Runs reset_parameters and init on units of a model.

    With init all units are reset twice: in a plain model init follows when everything was reset,
    and which random numbers it gets then is not known before.

    Args:
        seed: of the random numbers.
        init: see `Init`.
        device: where whole tensors are made.
    """

    def __init__(
        self, seed: int, init: Callable[[nn.Module], object] | None, device: torch.device
    ) -> None:
        self._seed = seed
        self._init = init
        self._device = device

    def fill(self, units: Sequence[Unit], keep: Keep) -> list[str]:
        """Fill units, and return the names of what was not filled.

        Args:
            units: in the order in which they are drawn.
            keep: called with each whole tensor; with one that is tied once more if there is init.
        """
        owned = _first_owners(units)
        unfilled: list[str] = []
        with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
            torch.manual_seed(self._seed)
            init_at = self._state_after_resets(units) if self._init else None
            for unit in units:
                begin = self._state()
                whole, init_next = self._drawn(unit, -1, init_at, owned)
                left = _untouched(unit, whole, -1)
                if any(not whole[attribute].is_floating_point() for attribute in left):
                    # A whole number may be any: one that no sentinel touches was not written.
                    self._set_state(begin)
                    again, init_next = self._drawn(unit, 0, init_at, owned)
                    left &= _untouched(unit, again, 0)
                init_at = init_next
                unfilled += sorted(unit.tensors[attribute] for attribute in left & owned)
                for attribute, name in unit.tensors.items():
                    if name in unit.wanted and (attribute in owned or self._init is not None):
                        keep(whole[attribute], _own(*attribute), is_again=attribute not in owned)
        return unfilled

    def _state_after_resets(self, units: Sequence[Unit]) -> list[Tensor]:
        begin = self._state()
        for unit in units:
            whole = self._whole(unit, -1)
            with _shown(whole):
                _reset(unit)
        end = self._state()
        self._set_state(begin)
        return end

    def _drawn(
        self,
        unit: Unit,
        sentinel: int,
        init_at: list[Tensor] | None,
        owned: set[Attribute],
    ) -> tuple[Whole, list[Tensor] | None]:
        """Return what a unit draws, and where init goes on with the random numbers."""
        whole = self._whole(unit, sentinel)
        with _shown(whole):
            _reset(unit)
            if self._init is not None and init_at is not None:
                resets_at = self._state()
                for attribute in whole.keys() - owned:  # so that one sees what init draws anew
                    _integers(_own(*attribute)).fill_(sentinel)
                self._set_state(init_at)
                for module in unit.modules:
                    self._init(module)
                init_at = self._state()
                self._set_state(resets_at)
        return whole, init_at

    def _whole(self, unit: Unit, sentinel: int) -> Whole:
        """Return whole tensors full of a value that nobody writes; copies of those with values."""
        whole = {}
        for (module, name), full_name in unit.tensors.items():
            tensor = _own(module, name)
            if full_name in unit.wanted or is_dtensor(tensor):
                made = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
                _integers(made).fill_(sentinel)
            else:
                made = tensor.detach().clone()
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
            whole[module, name] = made
        return whole

    def _state(self) -> list[Tensor]:
        on_device = [torch.cuda.get_rng_state()] if self._device.type == "cuda" else []
        return [torch.get_rng_state(), *on_device]

    def _set_state(self, state: list[Tensor]) -> None:
        torch.set_rng_state(state[0])
        for on_device in state[1:]:
            torch.cuda.set_rng_state(on_device)


def _own(module: nn.Module, name: str) -> Tensor:
    tensor = parameters_of(module).get(name, buffers_of(module).get(name))
    assert tensor is not None
    return tensor


def _first_owners(units: Sequence[Unit]) -> set[Attribute]:
    """Return for each tensor the first attribute that it is."""
    first: dict[Tensor, Attribute] = {}
    for module, name in chain.from_iterable(unit.tensors for unit in units):
        first.setdefault(_own(module, name), (module, name))
    return set(first.values())


def _reset(unit: Unit) -> None:
    for module in unit.modules:
        reset = reset_of(module)
        if callable(reset):
            reset()


@contextlib.contextmanager
def _shown(whole: Whole) -> Iterator[None]:
    """Let modules have whole tensors; what they put in place of one is taken."""
    before = {attribute: _own(*attribute) for attribute in whole}
    try:
        for attribute, tensor in whole.items():
            _put(*attribute, tensor)
        yield
        whole.update({attribute: _own(*attribute).detach() for attribute in whole})
    finally:
        for attribute, tensor in before.items():
            _put(*attribute, tensor)


def _put(module: nn.Module, name: str, tensor: Tensor) -> None:
    home: dict[str, Tensor | None] = buffers_of(module)
    if name in parameters_of(module):
        home = parameters_of(module)  # type: ignore[assignment]
    home[name] = tensor


def _untouched(unit: Unit, whole: Whole, sentinel: int) -> set[Attribute]:
    """Return where elements still have the bytes that they began with."""
    return {
        attribute
        for attribute, name in unit.tensors.items()
        if name in unit.wanted and bool((_integers(whole[attribute]) == sentinel).any())
    }


def is_untouched(tensor: Tensor) -> Tensor:
    """Return which elements still have the bytes that they began with."""
    return _integers(tensor) == -1


def _integers(tensor: Tensor) -> Tensor:
    """Return the bytes of each element as a whole number; -1 is a NaN that no formula gives."""
    return tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()])

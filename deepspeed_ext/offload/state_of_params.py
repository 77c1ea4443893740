"""The state of an offloaded optimizer, by parameter, as users see it."""

from collections.abc import Iterator, MutableMapping
from typing import Any

from torch import Tensor

from deepspeed_ext.offload.pipeline import Pipeline


class State(MutableMapping[Tensor, Any]):
    """The state of an offloaded optimizer by parameter: what its host copies have."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._state, self._table = pipeline.host_optimizer.state, pipeline.table

    def __getitem__(self, param: Tensor) -> Any:
        self._pipeline.show_state(param)
        return self._state[self._table.copy_of(param)]

    def get(self, param: Tensor, default: Any = None) -> Any:
        """Return the state of a parameter, or the default if it has none."""
        self._pipeline.show_state(param)
        return self._state.get(self._table.copy_of(param), default)

    def __setitem__(self, param: Tensor, entry: Any) -> None:
        self._state[self._table.copy_of(param)] = entry

    def __delitem__(self, param: Tensor) -> None:
        del self._state[self._table.copy_of(param)]

    def __contains__(self, param: object) -> bool:
        return self._table.copy_of(param) in self._state

    def __iter__(self) -> Iterator[Any]:
        return map(self._table.param_of, list(self._state))

    def __len__(self) -> int:
        return len(self._state)

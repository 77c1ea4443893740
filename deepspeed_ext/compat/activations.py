"""deepspeed.checkpointing: activations that are computed again in backward, by torch's checkpoint.

Settings and random states are of the whole process.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as _checkpoint

from deepspeed_ext.compat.devices import get_accelerator
from deepspeed_ext.config import read

_MODEL_PARALLEL = "model-parallel-rng"
_SEED_OFFSET = 2718  # of that state, as in Megatron
_settings: dict[str, Any] = {}
_INSTEAD = {
    "checkpoint_in_cpu": "what is kept stays on the device",
    "synchronize": "use torch.profiler",
    "profile": "use torch.profiler",
}
_KEYS = {"checkpoint_in_cpu": "cpu_checkpointing", "synchronize": "synchronize_checkpoint_boundary"}


def configure(
    mpu_: Any,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Take note of settings of the whole process; those that ask for what is so anyway do nothing.

    Args:
        mpu_: of Megatron, with one model-parallel process; or None.
        deepspeed_config: a config, whose block activation_checkpointing counts where an argument is
            None.
        partition_activations: nothing is to be shared out among one model-parallel process.
        contiguous_checkpointing: torch's allocator does it.
        num_checkpoints: of that.
        checkpoint_in_cpu: refused.
        synchronize: refused.
        profile: refused.

    Raises:
        ValueError: there are several model-parallel processes, or an argument is refused.
    """
    block: Any = {}
    if deepspeed_config is not None:
        block = read(deepspeed_config).as_dict().get("activation_checkpointing") or {}
    given = {"checkpoint_in_cpu": checkpoint_in_cpu, "synchronize": synchronize, "profile": profile}
    for name, value in given.items():
        asked = block.get(_KEYS.get(name, name)) if value is None else value
        if asked:
            raise ValueError(
                f"checkpointing.configure: {name} is {asked}, expected False; {_INSTEAD[name]}"
            )
    size = mpu_.get_model_parallel_world_size() if mpu_ is not None else 1
    if size > 1:
        raise ValueError(
            f"checkpointing.configure: mpu_ has {size} model-parallel processes, expected one; use"
            " torch.distributed.tensor.parallel"
        )
    _settings["is_configured"] = True


def is_configured() -> bool:
    """Tell whether `configure` was called in this process."""
    return bool(_settings)


def reset() -> None:
    """Do nothing: no buffers are kept."""


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function, and again in backward instead of keeping what it computes."""
    return _checkpoint(function, *args, use_reentrant=False, **kwargs)


class _Tracker:
    """Random states of the device by name, as Megatron keeps them; of the whole process."""

    def __init__(self) -> None:
        self._states: dict[str, Tensor] = {}

    def reset(self) -> None:
        """Forget all."""
        self._states = {}

    def get_states(self) -> dict[str, Tensor]:
        """Return all by name."""
        return dict(self._states)

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Have these from now on."""
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Add a state that begins with a seed.

        Raises:
            ValueError: there is one of this name.
        """
        if name in self._states:
            raise ValueError(f"get_cuda_rng_tracker: name is {name!r}, expected one that is free")
        before = get_accelerator().get_rng_state()
        get_accelerator().manual_seed(seed)
        self._states[name] = get_accelerator().get_rng_state()
        get_accelerator().set_rng_state(before)

    @contextlib.contextmanager
    def fork(self, name: str = _MODEL_PARALLEL) -> Iterator[None]:
        """Draw from a state inside, and go on with the one before afterwards.

        Raises:
            ValueError: there is none of this name.
        """
        if name not in self._states:
            raise ValueError(
                f"get_cuda_rng_tracker: name is {name!r}, expected one of {list(self._states)};"
                " call model_parallel_cuda_manual_seed before"
            )
        before = get_accelerator().get_rng_state()
        get_accelerator().set_rng_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = get_accelerator().get_rng_state()
            get_accelerator().set_rng_state(before)


_tracker = _Tracker()


def get_cuda_rng_tracker() -> _Tracker:
    """Return the random states of the whole process."""
    return _tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the device, and the state of what is model-parallel with another seed."""
    _tracker.reset()
    torch.manual_seed(seed)
    _tracker.add(_MODEL_PARALLEL, seed + _SEED_OFFSET)

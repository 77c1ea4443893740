"""deepspeed.checkpointing: activations that are computed again in backward, by torch's checkpoint.

Settings and random states are of the whole process.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint as _checkpoint

from deepspeed_ext.compat.devices import get_accelerator
from deepspeed_ext.config import read
from deepspeed_ext.offload import SavedTensors, checkpoint as _checkpoint_in, saved_tensors

_MODEL_PARALLEL = "model-parallel-rng"
_SEED_OFFSET = 2718  # of that state, as in Megatron
_REFUSED = ("synchronize", "profile")
_KEYS = {
    "checkpoint_in_cpu": "cpu_checkpointing",
    "partition_activations": "partition_activations",
    "synchronize": "synchronize_checkpoint_boundary",
    "profile": "profile",
}


class _Settings:
    """What `configure` has asked for, of the whole process.

    Attributes:
        is_made: whether it was called.
        device: where inputs go; None: they stay.
        mesh: whose processes share them out; None: none do.
        rank: of this process among the model-parallel ones.
    """

    is_made = False
    device: SavedTensors | None = None
    mesh: DeviceMesh | None = None
    rank = 0


_settings = _Settings()


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
        mpu_: of Megatron, which knows the model-parallel processes; or None.
        deepspeed_config: a config, whose block activation_checkpointing counts where an argument is
            None.
        partition_activations: model-parallel processes share inputs of checkpoints out.
        contiguous_checkpointing: torch's allocator does it.
        num_checkpoints: of that.
        checkpoint_in_cpu: inputs of checkpoints rest in host memory.
        synchronize: refused.
        profile: refused.

    Raises:
        ValueError: an argument is refused.
    """
    block: Any = None
    if deepspeed_config is not None:
        block = read(deepspeed_config).activation_checkpointing
    asked = {
        "checkpoint_in_cpu": checkpoint_in_cpu,
        "partition_activations": partition_activations,
        "synchronize": synchronize,
        "profile": profile,
    }
    for name, value in asked.items():
        if value is None and block is not None:
            asked[name] = getattr(block, _KEYS[name])
    for name in _REFUSED:
        if asked[name]:
            raise ValueError(
                f"checkpointing.configure: {name} is {asked[name]}, expected False; use"
                " torch.profiler"
            )
    made = _Settings()
    if mpu_ is not None:
        made.rank = _of(mpu_, "rank")
        if asked["partition_activations"] and _of(mpu_, "world_size") > 1:
            made.mesh = DeviceMesh.from_group(_of(mpu_, "group"), get_accelerator().device_name())
    if asked["checkpoint_in_cpu"]:
        made.device = saved_tensors("cpu")
    elif made.mesh is not None:
        made.device = saved_tensors("cpu", budget=0)  # parts stay
    made.is_made = True
    vars(_settings).clear()
    vars(_settings).update(vars(made))


def _of(mpu: Any, what: str) -> Any:
    """Return what an mpu knows of the model-parallel processes, by its newer name or its older."""
    newer = getattr(mpu, f"get_tensor_model_parallel_{what}", None)
    return (newer or getattr(mpu, f"get_model_parallel_{what}"))()


def is_configured() -> bool:
    """Tell whether `configure` was called in this process."""
    return _settings.is_made


def reset() -> None:
    """Do nothing: no buffers are kept."""


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function, and again in backward instead of keeping what it computes.

    Its tensors among args are kept as `configure` says. It draws the same numbers again, also those
    of `get_cuda_rng_tracker`.
    """
    again = _drawn_alike(function)
    if _settings.device is None:
        return _checkpoint(again, *args, use_reentrant=False, **kwargs)
    return _checkpoint_in(again, *args, device=_settings.device, mesh=_settings.mesh, **kwargs)


def _drawn_alike(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, whose later calls draw from the tracker what the first one drew."""
    states = _tracker.get_states()
    if not states:
        return function
    calls = itertools.count()

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not next(calls):
            return function(*args, **kwargs)
        before = _tracker.get_states()
        _tracker.set_states(states)
        try:
            return function(*args, **kwargs)
        finally:
            _tracker.set_states(before)

    return call


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
    """Seed the device, and with other seeds the state of what each model-parallel process has."""
    _tracker.reset()
    torch.manual_seed(seed)
    _tracker.add(_MODEL_PARALLEL, seed + _SEED_OFFSET + _settings.rank)

"""Exchange: what processes that save together tell each other."""

import contextlib
import pickle
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo

from deepspeed_ext.io.tensors import bytes_of
from deepspeed_ext.torch_internals.processes import default_store, timeout_of

Local = Callable[[], Any]
Global = Callable[[list[Any]], Sequence[Any]]


class Exchange:
    """Steps that processes take together, the first one deciding.

    The collectives are called on the group itself: `torch.distributed`'s functions ask first
    whether it knows the group, and after destroy_process_group() it knows none.

    Args:
        group: of all processes, the default one or one of `made_for_saves`.
        device: where what is exchanged has to be.
    """

    def __init__(self, group: Any, device: str) -> None:
        self._group = group
        self._device = device
        self.rank: int = group.rank()
        self.processes: int = group.size()

    def step(self, local: Local, decide: Global) -> Any:
        """Do a part in each process, let the first one decide on all, and return its answer.

        Args:
            local: called in each process.
            decide: called in the first one with what these returned; returns one answer for each.

        Raises:
            BaseException: what the first of them raised that says enough, in all processes.
        """
        value, error = _tried(local)
        said = self._gather((value, None if error is None else sendable(error)))
        answers = [] if said is None else _decided(said, decide)
        answer, refusal = self._scatter(answers)
        if error is not None and not isinstance(error, Exception):
            raise error
        if refusal is not None:
            raise refusal
        return answer

    def same(self, value: Any) -> Any:
        """Return what the first process has."""
        return self.step(lambda: value, lambda values: [values[0]] * len(values))

    def _gather(self, value: Any) -> list[Any] | None:
        """Return what each process has, in the first one."""
        own = _packed(value)
        sizes = self._gathered(torch.tensor([own.numel()], device="cpu"), is_first_only=False)
        assert sizes is not None
        padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8, device="cpu")
        padded[: own.numel()] = own  # what is pickled says itself where it ends
        rows = self._gathered(padded, is_first_only=True)
        if rows is None:
            return None
        return [_unpacked(row) for row in rows]

    def _scatter(self, values: Sequence[Any]) -> Any:
        """Return what the first process has for this one."""
        parts = [_packed(value) for value in values]
        size = max((part.numel() for part in parts), default=0)
        sizes = self._gathered(torch.tensor([size], device="cpu"), is_first_only=False)
        assert sizes is not None
        length = int(sizes[0])
        into = torch.empty(length, dtype=torch.uint8, device=self._device)
        rows = []
        if self.rank == 0:
            rows = [torch.cat((p, p.new_zeros(length - p.numel()))) for p in parts]
        self._group.scatter([into], [[row.to(self._device) for row in rows]] if rows else []).wait()
        return _unpacked(into.cpu())

    def _gathered(self, value: Tensor, *, is_first_only: bool) -> list[Tensor] | None:
        """Return the tensors of all processes, on the host; None where they are not wanted."""
        value = value.to(self._device)
        rows = [torch.empty_like(value) for _ in range(self.processes)]
        if not is_first_only:
            self._group.allgather([rows], [value]).wait()
        elif self.rank == 0:
            self._group.gather([rows], [value]).wait()
        else:
            self._group.gather([], [value]).wait()
            return None
        return [row.cpu() for row in rows]


def of_all(device: str) -> Exchange:
    """Return the exchange between all processes of the default group.

    Args:
        device: on which that can exchange tensors.
    """
    return Exchange(dist.group.WORLD, device)


def made_for_saves(device: str) -> Exchange:
    """Return one for a thread, which lives until nobody has it: gloo, unknown to torch.

    All processes call it. It has the timeout of the default group: others would wait half an hour
    for who has ended.

    Args:
        device: as of `of_all`.
    """
    world: Any = dist.group.WORLD
    timeout = timeout_of(world, torch.device(device))
    prefix = f"deepspeed_ext.zero.save/{of_all(device).same(secrets.token_hex(8))}"
    store = PrefixStore(prefix, default_store())
    limit = {} if timeout is None else {"timeout": timeout}
    return Exchange(ProcessGroupGloo(store, world.rank(), world.size(), **limit), "cpu")


def _tried(local: Local) -> tuple[Any, BaseException | None]:
    try:
        return local(), None
    except BaseException as error:  # Ctrl-C too: the others wait for an answer
        return None, error


def _decided(
    said: list[tuple[Any, Exception | None]], decide: Global
) -> list[tuple[Any, Exception | None]]:
    """Return answers, or for all what has failed first, if it says enough."""
    errors = [error for _, error in said if error is not None]
    if errors:
        return [(None, telling(errors))] * len(said)
    answers, error = _tried(lambda: decide([value for value, _ in said]))
    if error is not None:
        return [(None, sendable(error))] * len(said)
    return [(answer, None) for answer in answers]


def telling(errors: Sequence[Exception]) -> Exception:
    """Return the first of several errors that says enough: others only say that one has failed."""
    first = (error for error in errors if isinstance(error, OSError | ValueError | TypeError))
    return next(first, errors[0])


def sendable(error: BaseException) -> Exception:
    """Return an error that other processes can raise."""
    if isinstance(error, Exception):
        with contextlib.suppress(Exception):
            pickle.loads(pickle.dumps(error))
            return error
    return RuntimeError(f"{type(error).__name__}: {error}")


def _packed(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _unpacked(content: Tensor) -> Any:
    return pickle.loads(bytes_of(content))

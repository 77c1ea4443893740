"""What kills savers for the programs that look after them: at every step, and at random moments.

They must not start threads before they fork.
"""

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from deepspeed_ext.io import AsyncIO

Work = Callable[[], None]


def fork(work: Work) -> int:
    """Return the number of a process that works, and ends with 0 if all went well."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)


def kill_at_every_step(
    prepare: Work, work: Work, calls: Sequence[str], look_after: Callable[[str], None]
) -> int:
    """Kill a process before and after each write, and each call of functions of os.

    Args:
        prepare: called each time before.
        work: what it does.
        calls: names of the functions.
        look_after: called when it was killed, and at last when it has come through.

    Returns:
        How many such steps there are.
    """
    deadly, status = 0, 1
    while status:
        deadly += 1
        prepare()
        _, status = os.waitpid(fork(partial(_work_until, deadly, work, calls)), 0)
        assert status in (0, signal.SIGKILL), status
        look_after(f"step {deadly}")
    return deadly - 1


def kill_at_random(
    work: Work, times: int, seconds: float, look_after: Callable[[str], None]
) -> None:
    """Kill a process that would work for ever, after up to so many seconds."""
    chance = random.Random(1)
    for i in range(times):
        child = fork(work)
        time.sleep(chance.random() * seconds)
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        look_after(f"kill {i}")


def _work_until(deadly: int, work: Work, calls: Sequence[str]) -> None:
    count = [0]
    AsyncIO.write = _counted(deadly, AsyncIO.write, count)  # type: ignore[method-assign]
    for name in calls:
        setattr(os, name, _counted(deadly, getattr(os, name), count))
    work()


def _counted(deadly: int, function: Callable[..., Any], count: list[int]) -> Callable[..., Any]:
    """Return a function that kills the process before or after its n-th call of all such."""

    def step() -> None:
        count[0] += 1
        if count[0] == deadly:
            os.kill(os.getpid(), signal.SIGKILL)

    def call(*arguments: Any, **named: Any) -> Any:
        step()
        result = function(*arguments, **named)
        step()
        return result

    return call

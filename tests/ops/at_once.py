"""Calls in several threads, which begin together."""

import threading
from collections.abc import Callable
from typing import Any

import torch


def at_once(*tasks: Callable[[], None]) -> None:
    """Run each in a thread of its own, all of which begin together; raise what one raises."""
    barrier, raised = threading.Barrier(len(tasks)), []

    def run(task: Callable[[], None]) -> None:
        try:
            barrier.wait(60)
            task()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]


def in_threads(device: str, times: int, *calls: Callable[[], Any]) -> list[list[Any]]:
    """Return what each returns so many times, in a thread and, on CUDA, a stream of its own."""
    found: list[list[Any]] = [[] for _ in calls]

    def often(call: Callable[[], Any], into: list[Any]) -> None:
        stream = torch.cuda.Stream() if device == "cuda" else None
        with torch.cuda.stream(stream):
            into.extend(call() for _ in range(times))
            if stream is not None:
                stream.synchronize()

    if device == "cuda":
        torch.cuda.synchronize()
    at_once(*(lambda c=call, i=into: often(c, i) for call, into in zip(calls, found, strict=True)))
    return found

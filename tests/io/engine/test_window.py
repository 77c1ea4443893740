"""Transfers under way hold no more than they may, end in order, and failures come out."""

import pytest
import torch

from deepspeed_ext.io.engine.future import Future
from deepspeed_ext.io.engine.window import Window


class Job:
    """A transfer that ends when it is waited for."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure = failure
        self.ended = False

    def wait(self, seconds: float) -> bool:
        self.ended = True
        return True

    def done(self) -> bool:
        return self.ended

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure


def test_the_oldest_ends_when_there_is_too_much() -> None:
    window, jobs, told = Window(100), [Job() for _ in range(5)], list[int]()
    for i, job in enumerate(jobs):
        window.add(Future(job, torch.empty(0)), 40, lambda i=i: told.append(i))
        assert [job.ended for job in jobs].count(True) == max(0, i - 1)
    assert told == [0, 1, 2]
    window.finish()
    assert told == [0, 1, 2, 3, 4]


def test_a_failure_comes_out_and_the_rest_is_waited_for() -> None:
    window, told = Window(100), list[int]()
    jobs = [Job(), Job(OSError("first")), Job(OSError("second")), Job()]
    futures = [Future(job, torch.empty(0)) for job in jobs]
    for i, future in enumerate(futures):
        window.add(future, 10, lambda i=i: told.append(i))
    with pytest.raises(OSError, match="first"):
        window.finish()
    assert told == [0] and not jobs[2].ended
    window.abandon()
    assert all(job.ended for job in jobs) and told == [0]
    assert all(future.collected for future in futures)
    window.finish()

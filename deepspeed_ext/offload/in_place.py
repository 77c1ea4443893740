"""Parameters that are stepped where they are: on the device, or at rest in host memory."""

from collections.abc import Sequence
from functools import partial
from time import perf_counter

from deepspeed_ext.offload.copies import REQUESTED, Recorder
from deepspeed_ext.offload.host_optimizer import HostOptimizer, scaling_of
from deepspeed_ext.offload.worker import Run, Task, Urgency, Worker
from deepspeed_ext.optim.buckets import Bucket


class StepsInPlace:
    """Steps buckets by the gradients that their parameters have.

    In host memory the worker steps, as it has all threads; step() waits for it, as gradients are
    read where they are, and are the user's again afterwards.

    Args:
        host_optimizer: has the buckets.
        worker: of the optimizer.

    Attributes:
        buckets: and the number of the group of each.
        seconds: of steps in host memory.
        recorder: is told of these, if there is one.
    """

    def __init__(self, host_optimizer: HostOptimizer, worker: Worker) -> None:
        self._host_optimizer, self._worker = host_optimizer, worker
        self.buckets: list[tuple[int, Bucket]] = []
        self.seconds = 0.0
        self.recorder: Recorder | None = None

    def step(self, divisor: float) -> None:
        """Step all of them.

        Args:
            divisor: of the gradients.

        Raises:
            ValueError: a gradient is not as it must be; the text says which.
        """
        scaling = scaling_of(divisor)
        runs: list[Run] = []
        for group, bucket in self.buckets:
            work = self._host_optimizer.gathered(bucket)
            if work is None:
                continue
            options = self._host_optimizer.param_groups[group]
            run = partial(self._host_optimizer.step_gathered, options, bucket, work, scaling)
            if bucket.device.type == "cpu":
                runs.append(partial(self._timed, run))
            else:
                run()
        self._in_worker(runs)

    def _in_worker(self, runs: Sequence[Run]) -> None:
        """Run these there; Ctrl-C is raised when they are over."""
        tasks: list[Task] = []
        try:
            tasks += (self._worker.submit(Task(run, Urgency.STEP)) for run in runs)
            self._worker.wait(tasks)
        except BaseException:
            self._worker.wait(tasks)
            raise
        for task in tasks:
            if task.error is not None:
                raise task.error

    def _timed(self, run: Run) -> None:
        begin = perf_counter()
        run()
        end = perf_counter()
        self.seconds += end - begin
        if self.recorder is not None:
            self.recorder.note(REQUESTED, begin, end)

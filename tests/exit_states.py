"""Programs that end in every state: `python tests/exit_states.py --rounds 10`, or one by its name.

Each is a child of a process that has loaded everything and has no threads, and ends as Python does.
What it ends with is compared with what it should end with: a signal of the process's own, an exit
code of somebody else's, or a hang, is an error, and so is what the runtime of C++ says.
"""

import argparse
import atexit
import gc
import os
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo  # by the first optimizer: it takes a second
import torch.distributed as dist
import torch.distributed.tensor

from deepspeed_ext import op_builder
from deepspeed_ext.inference.model.checkpoint_folder import FolderTensors
from deepspeed_ext.io import AsyncIO
from deepspeed_ext.io._native import native
from deepspeed_ext.offload import OffloadOptimizer
from deepspeed_ext.offload.worker import Task, Urgency, Worker

PATIENCE = 300.0  # seconds, after which a program hangs: others may want all processors
ELEMENTS = 100_000  # of a parameter: a step over all is long enough to be under way
STATES: dict[str, tuple[Callable[[], object], int]] = {}
kept: list[object] = []


def ends_with(status: int = 0) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """Name a state, and say how a process ends in it: minus a signal, or an exit code."""

    def add(state: Callable[[], object]) -> Callable[[], object]:
        STATES[state.__name__] = state, status
        return state

    return add


class Training:
    """A model and its optimizer after some steps.

    Args:
        waits: whether step() returns when the weights are there.
        threads: that torch uses.
    """

    def __init__(self, waits: bool = False, threads: int = 1) -> None:
        torch.set_num_threads(threads)
        self.layers = [torch.nn.Linear(ELEMENTS // 500, 500) for _ in range(8)]
        self.model = torch.nn.Sequential(*self.layers)
        model = None if waits else self.model
        self.optimizer = OffloadOptimizer(self.model.parameters(), model=model)
        for _ in range(3):
            self.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def backward(self) -> None:
        """Make gradients: a speculative step begins."""
        sum(layer(torch.ones(1, ELEMENTS // 500)).sum() for layer in self.layers).backward()

    def step(self) -> None:
        """Return while the step is under way."""
        self.backward()
        self.optimizer.step()


def go_on() -> None:
    """Be in and out of torch for as long as Python takes to end."""
    for _ in range(5000):
        torch.ones(ELEMENTS // 10).add_(1)


# A step under way


@ends_with()
def speculative_step() -> None:
    Training().backward()


@ends_with()
def speculative_step_with_threads() -> None:
    Training(threads=2).backward()


@ends_with()
def after_step() -> None:
    Training().step()


@ends_with()
def after_step_in_a_global() -> None:
    kept.append(Training())
    kept[0].step()


@ends_with()
def after_step_in_a_cycle() -> None:
    training = Training()
    training.itself = training
    training.step()


@ends_with()
def after_step_of_one_that_never_goes() -> None:
    import ctypes

    training = Training()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(training))
    training.step()


@ends_with()
def collected_in_its_own_thread() -> None:
    """Whoever drops an optimizer waits for its thread, but that thread itself cannot."""
    training = Training()
    training.itself = training
    training.optimizer.synchronize()
    worker = training.optimizer._pipeline.worker
    gc.collect()
    gc.disable()
    may, ending = threading.Event(), threading.Event()
    threading._register_atexit(ending.set)

    def collect() -> None:
        may.wait()
        gc.collect()
        ending.wait()
        go_on()

    worker.submit(Task(collect, Urgency.ADD))
    del training, worker
    may.set()


# Ways out


@ends_with(1)
def exception() -> None:
    training = Training()
    training.step()
    raise ValueError("mine")


@ends_with(3)
def sys_exit() -> None:
    training = Training()
    training.step()
    sys.exit(3)


@ends_with()
def sys_exit_in_a_thread() -> None:
    def run() -> None:
        training = Training()
        training.step()
        sys.exit(3)

    threading.Thread(target=run).start()


@ends_with()
def training_in_a_thread_when_the_main_thread_is_over() -> None:
    def run() -> None:
        training = Training()
        threading.main_thread().join()
        for _ in range(3):
            training.step()

    threading.Thread(target=run).start()


@ends_with()
def first_step_when_the_main_thread_is_over() -> None:
    def run() -> None:
        threading.main_thread().join()
        Training().step()

    threading.Thread(target=run).start()


@ends_with(-signal.SIGTERM)
def terminated() -> None:
    training = Training()
    training.step()
    os.kill(os.getpid(), signal.SIGTERM)


@ends_with(7)
def terminated_with_a_handler() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    training = Training()
    training.step()
    os.kill(os.getpid(), signal.SIGTERM)


@ends_with(-signal.SIGINT)
def interrupted() -> None:
    training = Training()
    training.step()
    os.kill(os.getpid(), signal.SIGINT)


def press_ctrl_c(times: int) -> None:
    """Have it come again and again from now on, as somebody does who has lost patience."""

    def press() -> None:
        for _ in range(times):
            time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()


def go_on_in_the_end() -> None:
    kept.append(Training())
    for _ in range(4):
        kept[0].step()
    kept[0].backward()
    kept[0].optimizer._pipeline.worker.submit(Task(go_on, Urgency.ADD))


@ends_with()
def interrupted_while_python_ends() -> None:
    go_on_in_the_end()
    threading._register_atexit(press_ctrl_c, 20)  # called before ours


@ends_with()
def interrupted_while_others_end() -> None:
    """Python leaves out ours, then, and waits for no thread."""

    def end() -> None:
        press_ctrl_c(20)
        raise KeyboardInterrupt

    go_on_in_the_end()
    threading._register_atexit(end)


@ends_with()
def stepped_in_atexit() -> None:
    training = Training()
    atexit.register(training.step)


@ends_with()
def made_in_atexit() -> None:
    atexit.register(lambda: kept.append(Training()))


@ends_with()
def made_after_the_last_finalizer() -> None:
    """Nothing of ours is closed so late, and torch has taken away the ops that were there."""
    import weakref

    def late() -> None:
        weakref.finalize._exitfunc()
        Worker().submit(Task(go_on, Urgency.ADD))
        kept.append(Files())

    atexit.register(late)


@ends_with()
def saved_in_atexit() -> None:
    training = Training()
    atexit.register(lambda: torch.save(training.optimizer.state_dict(), os.devnull))
    training.step()


# Fork


@ends_with()
def forked_while_a_step_is_under_way() -> None:
    training = Training()
    training.step()
    child = os.fork()
    if child == 0:
        return  # and end as Python does
    if os.waitpid(child, 0)[1]:
        os._exit(9)
    training.step()


@ends_with()
def forked_child_trains() -> None:
    training = Training()
    training.step()
    child = os.fork()
    if child == 0:
        Training().step()
        return
    if os.waitpid(child, 0)[1]:
        os._exit(9)


@ends_with()
def child_outlives_the_parent() -> None:
    training = Training()
    training.step()
    parent = os.getpid()
    if os.fork() == 0:
        while os.getppid() == parent:
            time.sleep(0.001)
        Training().step()


# Reads and writes


class Files:
    """Reads and writes that are under way.

    Args:
        backend: of the engine.
    """

    def __init__(self, backend: str = "auto") -> None:
        self.engine = AsyncIO(block_size=1 << 16, backend=backend)
        self.tensor = torch.ones(4 << 20)
        self.futures = [self.engine.write(self.tensor, str(name)) for name in range(3)]


@ends_with()
def writing() -> None:
    kept.append(Files())


@ends_with()
def writing_by_threads() -> None:
    kept.append(Files("threads"))


@ends_with()
def writing_and_dropped() -> None:
    Files()


@ends_with()
def writing_with_callbacks() -> None:
    files = Files()
    for future in files.futures:
        future.add_done_callback(lambda _: torch.ones(ELEMENTS).add_(1))
    kept.append(files)


@ends_with()
def writing_with_callbacks_interrupted() -> None:
    files = Files()
    for future in files.futures:
        future.add_done_callback(lambda _: [torch.ones(ELEMENTS).add_(1) for _ in range(200)])
    kept.append(files)
    threading._register_atexit(press_ctrl_c, 20)


@ends_with()
def writing_interrupted_while_python_ends() -> None:
    kept.append(Files())
    threading._register_atexit(press_ctrl_c, 20)


@ends_with()
def writing_and_forked() -> None:
    files = Files()
    child = os.fork()
    if child == 0:
        return
    if os.waitpid(child, 0)[1]:
        os._exit(9)
    files.engine.wait()


@ends_with()
def written_in_atexit() -> None:
    atexit.register(lambda: kept.append(Files()))


@ends_with()
def engine_in_a_daemon_thread() -> None:
    """It makes engines and drops them, wherever Python ends it."""
    begun = threading.Event()

    def run() -> None:
        while True:
            AsyncIO(queue_depth=1, backend="threads")
            begun.set()

    threading.Thread(target=run, daemon=True).start()
    begun.wait()


# Checkpoints


def save_ahead() -> None:
    from deepspeed_ext import zero

    torch.set_num_threads(1)
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    model = zero.shard(torch.nn.Linear(4000, 2000), stage=3)
    zero.save("saved", "one", model, wait=False)
    kept.append(model)


@ends_with()
def saving() -> None:
    save_ahead()


@ends_with()
def saving_interrupted() -> None:
    save_ahead()
    press_ctrl_c(20)


@ends_with(-signal.SIGINT)
def loading_interrupted() -> None:
    def load(names: list[str], *_: object) -> dict[str, torch.Tensor]:
        go_on()
        return dict.fromkeys(names, torch.ones(1))

    names = ["0.weight", "1.weight"]
    sizes = dict.fromkeys(names, SimpleNamespace(nbytes=4))
    shards: Any = SimpleNamespace(tensors=sizes, load=load)
    with FolderTensors(shards, names, torch.device("cpu")) as tensors:
        press_ctrl_c(20)
        tensors["0.weight"]


def run(state: str) -> str | None:
    """Run a state in a child; return what was wrong with its end. The child returns '' instead."""
    expected = STATES[state][1]
    reader, writer = os.pipe()
    folder, output = tempfile.mkdtemp(), tempfile.TemporaryFile()  # noqa: SIM115
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.chdir(folder)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        return ""
    os.close(writer)
    late = not select.select([reader], [], [], PATIENCE)[0]  # its end closes the other end
    os.close(reader)
    if late:
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    shutil.rmtree(folder)
    output.seek(0)
    text = output.read().decode(errors="replace")
    if not late and status == expected and "terminate called" not in text:
        return None
    return f"{state}: {'a hang' if late else status}, expected {expected}\n{text}"


def main() -> Callable[[], object] | None:
    """Run what is asked for; in the child of a state, return that to be run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("states", nargs="*", default=[], help=", ".join(STATES))
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    op_builder.load("cpu_adam")
    native()
    gc.freeze()
    failures = 0
    for _ in range(options.rounds):
        for state in options.states or STATES:
            wrong = run(state)
            if wrong == "":
                return STATES[state][0]
            failures += wrong is not None
            if wrong is not None:
                print(wrong, flush=True)
    sys.exit(bool(failures))


if __name__ == "__main__":
    state = main()
    if state is not None:
        state()

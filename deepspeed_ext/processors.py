"""Which processors a process takes for work that streams memory, beside others on its host.

torchrun starts processes with one thread each. What steps state in host memory needs more: it takes
the processors of the affinity mask, divided by the processes of the host, and no two processes
share one while there are enough. Whole cores are given before two processes share a core, and those
of a NUMA node together, to the processes whose GPUs are at that node: process i is taken to use
device i, as those of torchrun do.

A mask that is narrower than that of the process that started this one was given to this process
by whoever did that (`torchrun --numa-binding`, numactl). Then as many processes share it as the
host has, times the part that it is of the other mask: one, which takes all of it, or those of a
node.

There are as many threads as processors, and no more than torch.get_num_threads(), which the user
may have lowered. torchrun lowers it, too, by OMP_NUM_THREADS=1, which does not count: who wants one
thread there says `threads=1`.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TypeVar

from deepspeed_ext.op_builder.log import logger
from deepspeed_ext.threads import AwaitedThread, is_awaited

_LARGE = 2**22  # bytes, below which it does not matter where they are
_BINDING = ("GOMP_CPU_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND")  # by whoever sets one of these

Made = TypeVar("Made")


@dataclass(frozen=True)
class Topology:
    """Where processors are, as far as it is known.

    Attributes:
        nodes: NUMA node of each; others are taken to be at node 0.
        cores: the first one of those that share a core, of each; others have their own.
    """

    nodes: Mapping[int, int] = field(default_factory=dict)
    cores: Mapping[int, int] = field(default_factory=dict)

    def place(self, processor: int) -> tuple[int, int, int]:
        """Return what to sort processors by."""
        core = self.cores.get(processor, processor)
        return self.nodes.get(processor, 0), core, processor


@dataclass(frozen=True)
class Host:
    """What a process knows of its host.

    Attributes:
        mask: processors that this process may run on.
        whole: those of the process that started it.
        processes: how many torchrun has started on the host.
        rank: which of them this is; None: it is not known.
        quota: of how many processors the host's processes may use the time; None: of all.
        topology: where processors are.
        gpu_nodes: NUMA nodes of the GPUs; None for one of which it is not known.
        is_lowered: whether OMP_NUM_THREADS is 1, which torchrun sets where nobody has set it.
        is_placed: whether the user lets OpenMP decide where threads run.
    """

    mask: frozenset[int]
    whole: frozenset[int] = frozenset()
    processes: int = 1
    rank: int | None = None
    quota: float | None = None
    topology: Topology = Topology()
    gpu_nodes: Sequence[int | None] = ()
    is_lowered: bool = False
    is_placed: bool = False


@dataclass(frozen=True)
class Share:
    """Processors for the threads of a process that stream memory.

    Attributes:
        processors: where they may run.
        is_bound: whether they are kept there: others are left to other processes.
        most: how many threads that are, if torch has not fewer.
        is_lowered: whether it was not the user who gave torch one thread.
        wanted: how many threads there are to be, whatever torch has; None: as has been said.
    """

    processors: frozenset[int] = frozenset()
    is_bound: bool = False
    most: int = 1
    is_lowered: bool = False
    wanted: int | None = None

    def threads(self, of_torch: int) -> int:
        """Return how many threads there are, where torch.get_num_threads() is this."""
        if self.wanted is not None:
            return self.wanted
        if of_torch == 1 and self.is_lowered:
            return self.most
        return min(of_torch, self.most)

    def __str__(self) -> str:
        return f"{'' if self.is_bound else 'any of '}processors {ranges(self.processors)}"

    def enter(self, threads: int) -> None:
        """Let the current thread, which is new and has no team yet, have it here.

        Args:
            threads: how many the team has, the current one included.
        """
        import torch  # here, as a report has to work without

        of_all = torch.get_num_threads()
        if threads != of_all:
            torch.set_num_threads(threads)
            # New threads begin with the number that was set last, in whatever thread.
            with contextlib.suppress(RuntimeError):  # there is no thread to be had
                _in_thread(partial(torch.set_num_threads, of_all))
        if self.is_bound:  # after the former, which starts threads of a pool that is for all
            try:
                os.sched_setaffinity(0, self.processors)  # the team inherits it
            except OSError as error:  # what forbids that, or took a processor away
                logger.warning("threads cannot be kept on %s: %s", self, error)

    def touching(self, nbytes: int, make: Callable[[], Made]) -> Made:
        """Return memory that is made, and touched first, where the threads run."""
        if not self.is_bound or nbytes < _LARGE or not is_awaited():
            return make()
        import torch

        threads = self.threads(torch.get_num_threads())

        def made() -> Made:
            self.enter(threads)
            return make()

        return _in_thread(made)


def _in_thread(run: Callable[[], Made]) -> Made:
    """Return, or raise, what a thread of its own does.

    Raises:
        RuntimeError: no thread can be started.
    """
    made: list[Made] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            made.append(run())
        except BaseException as error:
            errors.append(error)

    thread = AwaitedThread(work, "deepspeed_ext-processors")
    thread.start()
    thread.join()
    if errors:
        raise errors.pop()
    return made.pop()


def share_of(host: Host, wanted: int | None = None) -> Share:
    """Return what a process takes.

    Args:
        host: what it knows.
        wanted: how many threads there are to be; None: as many as processors.
    """
    whole = host.whole | host.mask
    mask = whole if host.is_placed else host.mask  # OpenMP has bound this thread already
    sharers = max(1, round(host.processes * len(mask) / len(whole)))
    own, most = mask, len(mask) // sharers
    if sharers > 1 and host.rank is not None and not host.is_placed:
        own = divide(mask, sharers, host.topology)[_turn(host, host.rank, sharers)]
        most = len(own)
    if host.quota is not None:
        most = min(most, int(host.quota / host.processes))
    if wanted is not None and wanted > len(own):
        own = mask  # so many would be in each other's way
    is_lowered = host.is_lowered and host.processes > 1
    return Share(own, own != mask, max(1, most), is_lowered, wanted)


def _turn(host: Host, rank: int, sharers: int) -> int:
    """Return which part of the mask this process takes."""
    nodes = [node for node in host.gpu_nodes[: host.processes] if node is not None]
    if len(nodes) < host.processes:
        return rank % sharers
    by_node = sorted(range(host.processes), key=nodes.__getitem__)
    return by_node.index(rank) % sharers


def divide(
    processors: Iterable[int], parts: int, topology: Topology | None = None
) -> list[frozenset[int]]:
    """Divide processors into parts that are even, disjoint, and as near together as they can be.

    Args:
        processors: at least one.
        parts: how many; if these are more than processors, some are alike.
        topology: where the processors are.
    """
    place = (topology or Topology()).place
    ordered = sorted(processors, key=place)
    cores: dict[tuple[int, int], list[int]] = {}
    for processor in ordered:
        cores.setdefault(place(processor)[:2], []).append(processor)
    units = list(cores.values()) if parts <= len(cores) else [[one] for one in ordered]
    found = []
    for i in range(parts):
        begin, end = (len(units) * each // parts for each in (i, i + 1))
        found.append(frozenset().union(*units[begin : max(end, begin + 1)]))
    return found


def check_threads(owner: str, threads: object) -> None:
    """Raise TypeError or ValueError if this is no number of threads, and not None."""
    want = "expected a whole number above 0, or None for the processors of this process"
    if threads is None:
        return
    if isinstance(threads, bool) or not isinstance(threads, int):
        raise TypeError(f"{owner}: threads is {threads!r}, {want}")
    if threads < 1:
        raise ValueError(f"{owner}: threads is {threads}, {want}")


# What is read of the machine


def share_here(wanted: int | None = None) -> Share:
    """Return what this process takes; see `share_of`."""
    return share_of(host_here(), wanted)


def host_here(root: Path = Path("/")) -> Host:
    """Return what this process knows of its host by now.

    Args:
        root: of the folders /sys and /proc.
    """
    mask = frozenset(os.sched_getaffinity(0))
    processes = local_processes()
    rank = _number("LOCAL_RANK")
    try:
        whole = frozenset(os.sched_getaffinity(os.getppid()))
    except OSError:  # it is over
        whole = mask
    return Host(
        mask,
        whole,
        processes,
        rank if rank is not None and rank < processes else None,
        quota_in(root),
        topology_in(root, mask) if processes > 1 else Topology(),
        _gpu_nodes(root) if processes > 1 else (),
        is_lowered=os.environ.get("OMP_NUM_THREADS") == "1",
        is_placed=any(os.environ.get(name, "false").lower() != "false" for name in _BINDING),
    )


def local_processes() -> int:
    """Return how many processes torchrun has started on this host, this one included."""
    return _number("LOCAL_WORLD_SIZE") or 1


def _number(name: str) -> int | None:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else None


def topology_in(root: Path, processors: Iterable[int]) -> Topology:
    """Return what the kernel says about where processors are."""
    system = root / "sys/devices/system"
    nodes = {
        processor: int(folder.name.removeprefix("node"))
        for folder in sorted(system.glob("node/node[0-9]*"))
        for processor in _processors_in(folder / "cpulist")
    }
    cores = {}
    for processor in processors:
        siblings = _processors_in(system / f"cpu/cpu{processor}/topology/thread_siblings_list")
        cores[processor] = min(siblings, default=processor)
    return Topology(nodes, cores)


def quota_in(root: Path) -> float | None:
    """Return of how many processors the control groups of this process give the time, at most."""
    lines = _text(root / "proc/self/cgroup").splitlines()
    own = next((line[3:] for line in lines if line.startswith("0::")), "/")
    found = []
    for group in (PurePosixPath(own), *PurePosixPath(own).parents):
        quota, _, period = _text(root / f"sys/fs/cgroup{group}" / "cpu.max").strip().partition(" ")
        if quota.isdecimal() and period.isdecimal():
            found.append(int(quota) / int(period))
    return min(found, default=None)


def _gpu_nodes(root: Path) -> list[int | None]:
    """Return the NUMA node of each GPU, if this process uses any already."""
    import torch  # here, as a report has to work without

    if not torch.cuda.is_initialized():
        return []
    devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [_gpu_node(root, device) for device in devices]


def _gpu_node(root: Path, device: object) -> int | None:
    numbers = [getattr(device, f"pci_{part}_id", -1) for part in ("domain", "bus", "device")]
    if min(numbers) < 0:
        return None
    address = "{:04x}:{:02x}:{:02x}.0".format(*numbers)
    node = _text(root / "sys/bus/pci/devices" / address / "numa_node").strip()
    return int(node) if node.isdecimal() else None  # -1: the machine does not say


def _processors_in(path: Path) -> list[int]:
    """Return the processors of a list such as 0-3,8."""
    found: list[int] = []
    for part in filter(None, _text(path).strip().split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def ranges(processors: Iterable[int]) -> str:
    """Return processors as a list such as 0-3,8."""
    runs: list[list[int]] = []
    for processor in sorted(processors):
        if runs and processor == runs[-1][-1] + 1:
            runs[-1][1:] = [processor]
        else:
            runs.append([processor])
    return ",".join("-".join(map(str, run)) for run in runs)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""

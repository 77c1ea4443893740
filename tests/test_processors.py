"""Which processors a process takes, on machines that are made up."""

import contextlib
import itertools
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from deepspeed_ext import processors
from deepspeed_ext.processors import (
    Host,
    Share,
    Topology,
    check_threads,
    divide,
    host_here,
    quota_in,
    ranges,
    share_of,
    topology_in,
)

# Processor i and i + 8 are one core, and the cores 0-3 are at node 0, 4-7 at node 1.
TWO_NODES = Topology({i: i % 8 // 4 for i in range(16)}, {i: i % 8 for i in range(16)})
NODE_0, NODE_1 = ({*range(4 * i, 4 * i + 4), *range(4 * i + 8, 4 * i + 12)} for i in (0, 1))


def shares(mask: set[int] | range, processes: int, **known: object) -> list[Share]:
    """Return what each of the processes takes."""
    facts = {"whole": frozenset(mask), **known}
    return [
        share_of(Host(frozenset(mask), processes=processes, rank=rank, **facts))  # type: ignore[arg-type]
        for rank in range(processes)
    ]


def taken(found: list[Share]) -> list[set[int]]:
    return [set(share.processors) for share in found]


def assert_divided(parts: list[set[int]], mask: set[int] | range) -> None:
    """They are disjoint, and the mask together."""
    assert sorted(itertools.chain.from_iterable(parts)) == sorted(mask)


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 5, 8, 11, 16])
@pytest.mark.parametrize("topology", [Topology(), TWO_NODES], ids=["flat", "two nodes"])
def test_processes_divide_the_mask(processes: int, topology: Topology) -> None:
    found = shares(range(16), processes, topology=topology)
    assert_divided(taken(found), range(16))
    sizes = [len(share.processors) for share in found]
    whole_core = 2 if topology.cores and processes <= 8 else 1
    assert max(sizes) - min(sizes) <= whole_core
    assert [share.threads(1000) for share in found] == sizes
    assert {share.is_bound for share in found} == {processes > 1}


def test_three_processes_on_eight_processors() -> None:
    found = shares(range(8), 3)
    assert taken(found) == [{0, 1}, {2, 3, 4}, {5, 6, 7}]
    assert [share.threads(8) for share in found] == [2, 3, 3]


def test_nodes_and_whole_cores_stay_together() -> None:
    assert taken(shares(range(16), 2, topology=TWO_NODES)) == [NODE_0, NODE_1]
    four = taken(shares(range(16), 4, topology=TWO_NODES))
    assert four == [{0, 1, 8, 9}, {2, 3, 10, 11}, {4, 5, 12, 13}, {6, 7, 14, 15}]
    assert taken(shares(range(16), 8, topology=TWO_NODES)) == [{i, i + 8} for i in range(8)]
    sixteen = taken(shares(range(16), 16, topology=TWO_NODES))  # now cores have to be shared
    assert sixteen[:2] == [{0}, {8}]


def test_an_odd_mask() -> None:
    mask = {1, 2, 3, 9, 12, 13, 15}  # cores 1 (both), 2, 3 of node 0, 4, 5, 7 of node 1
    two = taken(shares(mask, 2, topology=TWO_NODES))
    assert two == [{1, 9, 2, 3}, {12, 13, 15}]
    assert_divided(taken(shares(mask, 3, topology=TWO_NODES)), mask)


def test_more_processes_than_processors_have_one_thread_each() -> None:
    found = shares({3, 5}, 5)
    assert taken(found) == [{3}, {3}, {3}, {5}, {5}]
    assert {share.threads(8) for share in found} == {1}
    alone = shares({3}, 2)
    assert taken(alone) == [{3}, {3}]


@pytest.mark.parametrize(
    ("nodes", "want"),
    [
        ([1, 0], [NODE_1, NODE_0]),
        ([1, 1], [NODE_0, NODE_1]),  # both cannot have it
        ([1, None], [NODE_0, NODE_1]),
        ([1], [NODE_0, NODE_1]),
        ([1, 0, 0, 0], [NODE_1, NODE_0]),  # of four GPUs two are used
    ],
)
def test_the_node_of_the_gpu_is_preferred(nodes: list[int | None], want: list[set[int]]) -> None:
    found = shares(range(16), 2, topology=TWO_NODES, gpu_nodes=nodes)
    assert taken(found) == want


def test_gpus_that_take_turns_at_the_nodes() -> None:
    found = shares(range(16), 4, topology=TWO_NODES, gpu_nodes=[0, 1, 0, 1])
    at_0, at_1 = [{0, 1, 8, 9}, {2, 3, 10, 11}], [{4, 5, 12, 13}, {6, 7, 14, 15}]
    assert taken(found) == [at_0[0], at_1[0], at_0[1], at_1[1]]


def test_a_mask_that_was_divided_already_is_taken_whole() -> None:
    masks = [frozenset(range(4 * i, 4 * i + 4)) for i in range(4)]
    for rank, mask in enumerate(masks):
        share = share_of(Host(mask, whole=frozenset(range(16)), processes=4, rank=rank))
        assert (share.processors, share.is_bound, share.threads(16)) == (mask, False, 4)


def test_processes_that_are_bound_to_a_node_divide_it() -> None:
    """As those of `torchrun --numa-binding=node`, whose GPUs may take turns at the nodes."""
    for nodes in ([0, 0, 1, 1], [0, 1, 0, 1]):
        found = [
            share_of(
                Host(
                    frozenset((NODE_0, NODE_1)[node]),
                    whole=frozenset(range(16)),
                    processes=4,
                    rank=rank,
                    topology=TWO_NODES,
                    gpu_nodes=nodes,
                )
            )
            for rank, node in enumerate(nodes)
        ]
        assert_divided(taken(found), range(16))
        assert {share.threads(1000) for share in found} == {4}


def test_a_mask_of_all_processes_is_divided() -> None:
    """As by `taskset -c 0-7 torchrun`: the process that started them has it too."""
    found = shares(range(8), 4)
    assert_divided(taken(found), range(8))


def test_a_quota_is_divided_too() -> None:
    mask = frozenset(range(16))
    for processes, quota, want in ((1, 4.0, 4), (2, 8.0, 4), (2, 5.0, 2), (4, 2.0, 1), (2, 99, 8)):
        share = share_of(Host(mask, processes=processes, rank=0, quota=quota))
        assert share.threads(16) == want


def test_threads_of_torch() -> None:
    """One process has as many as torch; of several, those whom torchrun gave one do not count."""
    mask = frozenset(range(8))
    alone = share_of(Host(mask, is_lowered=True))
    assert [alone.threads(n) for n in (1, 3, 8, 20)] == [1, 3, 8, 8]
    assert not alone.is_bound
    lowered = share_of(Host(mask, processes=2, rank=1, is_lowered=True))
    assert [lowered.threads(n) for n in (1, 3, 8)] == [4, 3, 4]
    by_hand = share_of(Host(mask, processes=2, rank=1))
    assert [by_hand.threads(n) for n in (1, 3, 8)] == [1, 3, 4]


def test_threads_that_are_asked_for() -> None:
    mask = frozenset(range(8))
    for wanted in (1, 4):
        share = share_of(Host(mask, processes=2, rank=0, quota=1.0, is_lowered=True), wanted)
        assert share.threads(1) == share.threads(8) == wanted
        assert share.processors == {0, 1, 2, 3} and share.is_bound
    many = share_of(Host(mask, processes=2, rank=0), 5)  # which its processors are too few for
    assert (many.threads(1), many.processors, many.is_bound) == (5, mask, False)


def test_without_a_rank_threads_are_divided_and_kept_nowhere() -> None:
    share = share_of(Host(frozenset(range(8)), processes=4, is_lowered=True))
    assert (share.threads(1), share.is_bound) == (2, False)


def test_who_lets_openmp_place_threads_keeps_that() -> None:
    """OpenMP has put the thread that asks on one processor by then."""
    facts = {"whole": frozenset(range(8)), "is_placed": True}
    alone = share_of(Host(frozenset({0}), **facts))  # type: ignore[arg-type]
    assert (alone.threads(8), alone.is_bound) == (8, False)
    two = share_of(Host(frozenset({0}), processes=2, rank=1, **facts))  # type: ignore[arg-type]
    assert (two.threads(8), two.is_bound) == (4, False)


def test_divide_says_the_same_in_whatever_order() -> None:
    assert divide([5, 1, 3, 2], 2) == divide([1, 2, 3, 5], 2) == [{1, 2}, {3, 5}]


@pytest.mark.parametrize(
    ("given", "text"),
    [([], ""), ([4], "4"), ([0, 1, 2, 3], "0-3"), ([9, 3, 1, 2, 8, 5], "1-3,5,8-9")],
)
def test_ranges(given: list[int], text: str) -> None:
    assert ranges(given) == text


@pytest.mark.parametrize("threads", [0, -1])
def test_too_few_threads_are_refused(threads: int) -> None:
    want = f"one: threads is {threads}, expected a whole number above 0, or None for "
    with pytest.raises(ValueError, match=want):
        check_threads("one", threads)


@pytest.mark.parametrize("threads", [True, 2.0, "2"])
def test_what_is_no_number_of_threads_is_refused(threads: object) -> None:
    with pytest.raises(TypeError, match=f"one: threads is {threads!r}, expected a whole number"):
        check_threads("one", threads)


# What is read of the machine


def write(root: Path, texts: dict[str, str]) -> Path:
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def test_topology_of_a_machine(tmp_path: Path) -> None:
    system = "sys/devices/system"
    files = {f"{system}/node/node0/cpulist": "0-1,4-5", f"{system}/node/node1/cpulist": "2-3,6-7"}
    for i in range(8):
        siblings = f"{system}/cpu/cpu{i}/topology/thread_siblings_list"
        files[siblings] = f"{i % 4},{i % 4 + 4}"
    found = topology_in(write(tmp_path, files), range(8))
    assert found.nodes == {0: 0, 1: 0, 4: 0, 5: 0, 2: 1, 3: 1, 6: 1, 7: 1}
    assert found.cores == {i: i % 4 for i in range(8)}


def test_a_machine_that_says_nothing(tmp_path: Path) -> None:
    assert topology_in(tmp_path, [2, 3]) == Topology({}, {2: 2, 3: 3})
    assert quota_in(tmp_path) is None


def test_the_least_quota_of_all_groups_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "1:name=systemd:/x\n0::/a/b",
        "sys/fs/cgroup/a/b/cpu.max": "max 100000",
        "sys/fs/cgroup/a/cpu.max": "250000 100000",
        "sys/fs/cgroup/cpu.max": "800000 100000",
    }
    assert quota_in(write(tmp_path, files)) == 2.5
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")  # as in a container
    assert quota_in(tmp_path) == 8


def test_nodes_of_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [
        SimpleNamespace(pci_domain_id=0, pci_bus_id=bus, pci_device_id=0) for bus in (10, 200)
    ]
    devices.append(SimpleNamespace())  # of a torch that does not tell
    pci = "sys/bus/pci/devices"
    write(tmp_path, {f"{pci}/0000:0a:00.0/numa_node": "1", f"{pci}/0000:c8:00.0/numa_node": "-1"})
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert list(host_here(tmp_path).gpu_nodes) == []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(devices))
    monkeypatch.setattr(torch.cuda, "get_device_properties", devices.__getitem__)
    assert host_here(tmp_path).gpu_nodes == [1, None, None]


def test_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS", *processors._BINDING):
        monkeypatch.delenv(name, raising=False)
    host = host_here()
    assert host.mask == os.sched_getaffinity(0)
    assert host.mask <= host.whole
    assert (host.processes, host.rank, host.is_lowered, host.is_placed) == (1, None, False, False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("OMP_PROC_BIND", "close")
    host = host_here()
    assert (host.processes, host.rank, host.is_lowered, host.is_placed) == (4, 3, True, True)
    monkeypatch.setenv("LOCAL_RANK", "4")
    monkeypatch.setenv("OMP_PROC_BIND", "FALSE")
    host = host_here()
    assert host.rank is None and not host.is_placed


# Threads


def of_new_thread() -> tuple[int, set[int]]:
    """Return how many threads of torch a thread of the user begins with, and its mask."""
    found: list[tuple[int, set[int]]] = []
    thread = threading.Thread(
        target=lambda: found.append((torch.get_num_threads(), os.sched_getaffinity(0)))
    )
    thread.start()
    thread.join()
    return found[0]


def tasks() -> set[int]:
    """Return all threads of this process."""
    return set(map(int, os.listdir("/proc/self/task")))


def masks_of(threads: set[int]) -> list[set[int]]:
    """Return where some threads may run, but for those that are over."""
    found = []
    for thread in threads:
        with contextlib.suppress(ProcessLookupError):
            found.append(os.sched_getaffinity(thread))
    return found


def test_a_thread_that_enters_leaves_all_others_as_they_are() -> None:
    mask = os.sched_getaffinity(0)
    one = min(mask)
    share = Share(frozenset({one}), is_bound=True, wanted=3)
    before = torch.get_num_threads(), of_new_thread()
    inside: list[tuple[int, set[int]]] = []
    team: list[set[int]] = []
    others: list[set[int]] = []

    def enter() -> None:
        share.enter(share.threads(1))
        there = tasks() - {threading.get_native_id()}
        torch.zeros(2**18).add_(1)
        team.extend(masks_of(tasks() - there - {threading.get_native_id()}))
        others.extend(masks_of(there))
        inside.append((torch.get_num_threads(), os.sched_getaffinity(0)))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert inside == [(3, {one})]
    assert team == [{one}] * 2  # beside the thread itself
    assert others and all(other == mask for other in others)  # torch's pools too
    assert (torch.get_num_threads(), of_new_thread()) == before
    assert os.sched_getaffinity(0) == mask


def test_large_memory_is_touched_first_on_the_share() -> None:
    one = min(os.sched_getaffinity(0))
    share = Share(frozenset({one}), is_bound=True)

    def where() -> tuple[int, set[int]]:
        return threading.get_ident(), os.sched_getaffinity(0)

    here = where()
    there = share.touching(2**22, where)
    assert there[0] != here[0] and there[1] == {one}
    assert share.touching(2**22 - 1, where) == here
    assert Share(frozenset({one})).touching(2**30, where) == here  # not bound: as ever
    with pytest.raises(MemoryError, match="too much"):
        share.touching(2**22, too_much)
    assert where() == here


def too_much() -> None:
    raise MemoryError("too much")

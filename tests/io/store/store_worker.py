"""Processes for the tests of TensorStore: one that holds stores, and writers that are killed.

python store_worker.py hold FOLDER: opens stores, says so, and waits for the end of stdin.
python store_worker.py fork FOLDER: forks while a store writes, and waits for the end of stdin.
python store_worker.py crash FOLDER ROUNDS: kills writers of generations, and looks what is there.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from deepspeed_ext.io.engine.async_io import AsyncIO
from deepspeed_ext.io.store.tensor_store import TensorStore

SIZES = {"a": 30_000, "b": 75_001, "c": 1, "d": 40_000, "e": 1024}


def hold(folder: Path) -> None:
    """Hold a scratch and a durable store, and so does a forked child that outlives this one."""
    scratch = TensorStore(folder)
    scratch.put("x", torch.ones(1 << 20))
    durable = TensorStore(folder / "s", durable=True)
    durable.put("x", torch.ones(1000))
    child = os.fork()
    if child == 0:
        sys.exit(0)  # as Python does, with all that it runs at the end
    assert os.waitpid(child, 0) == (child, 0)
    durable.put("y", torch.ones(1000))
    assert torch.equal(scratch.get("x"), torch.ones(1 << 20))
    durable.commit()
    durable.put("z", torch.ones(1000))
    child = os.fork()
    if child:
        print(child, flush=True)
    os.read(0, 1)
    os._exit(0)


def fork_under_way(folder: Path) -> None:
    """Fork while the native code writes into a scratch store; the child outlives this process."""
    engine = AsyncIO(block_size=4096, queue_depth=1, backend="threads")
    store = TensorStore(folder, engine=engine)
    while True:
        future = store.put_async("x", torch.ones(8 << 20, dtype=torch.uint8))
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(write, b"1")
            os.read(0, 1)
            os._exit(0)
        under_way = not future.done()
        os.read(read, 1)  # the child has run all that it does after a fork
        if under_way:
            break
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    print(child, flush=True)
    os.read(0, 1)
    os._exit(0)


def write_generations(folder: Path, told: int) -> None:
    """Commit one generation after another, and tell the number of each that is committed."""
    store = TensorStore(folder, durable=True)
    generation = int(store.get("c").item()) if "c" in store else 0
    while True:
        generation += 1
        for name, size in SIZES.items():
            grown = size + 3000 * (generation % 3)
            store.put_async(name, torch.full((grown if size > 1 else 1,), float(generation)))
        if generation % 2:
            store.put_async("odd", torch.full((5000,), float(generation)))
        elif "odd" in store:
            store.delete("odd")
        store.commit()
        os.write(told, generation.to_bytes(8, "little"))


def generation_in(folder: Path) -> int:
    """Return the generation of all tensors; each is whole, and none of another one."""
    with TensorStore(folder, durable=True, read_only=True) as store:
        if not len(store):
            return 0
        tensors = {name: store.get(name) for name in store}
    generation = int(tensors["c"].item())
    assert set(tensors) == {*SIZES, *(["odd"] if generation % 2 else [])}, generation
    for name, tensor in tensors.items():
        assert tensor.eq(generation).all(), (name, generation)
    return generation


def crash(folder: Path, rounds: int) -> None:
    """Kill a writer at a random moment, again and again; print what was found each time."""
    chance = random.Random(11)
    acknowledged, found = 0, []
    TensorStore(folder, durable=True).close()
    for number in range(rounds):
        read, write = os.pipe()
        writer = os.fork()
        if writer == 0:
            try:
                write_generations(folder, write)
            finally:
                os._exit(1)
        os.close(write)
        told = os.read(read, 8) if number % 5 else b""  # sometimes before the first commit
        time.sleep(chance.uniform(0, 0.03))
        os.kill(writer, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(writer, 0)[1]), "it ended by itself"
        while more := os.read(read, 4096):
            told += more
        os.close(read)
        if told:
            acknowledged = int.from_bytes(told[-8:], "little")
        generation = generation_in(folder)
        assert acknowledged <= generation <= acknowledged + 1
        found.append([acknowledged, generation])
        acknowledged = generation
    print(json.dumps({"found": found, "data": (folder / "data").stat().st_size}))


if __name__ == "__main__":
    torch.set_num_threads(1)  # a forked child cannot use the threads of its parent
    if sys.argv[1] == "hold":
        hold(Path(sys.argv[2]))
    elif sys.argv[1] == "fork":
        fork_under_way(Path(sys.argv[2]))
    else:
        crash(Path(sys.argv[2]), int(sys.argv[3]))

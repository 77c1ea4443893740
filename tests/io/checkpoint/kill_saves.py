"""A program that kills savers, at every step they take and at random moments, and looks after them.

The arguments are a folder and the kind of temporary file, "unnamed" or "named". It prints at how
many steps it killed, and how often at random.
"""

import sys
from functools import partial
from pathlib import Path

import torch
from state_dict_cases import assert_same, files_in

sys.path.append(str(Path(__file__).parents[2]))

from killing import kill_at_every_step, kill_at_random

from deepspeed_ext.io.checkpoint import new_file
from deepspeed_ext.io.checkpoint.state_dict import load, save

MIB = 1 << 20
STATES = [{"w": torch.full((MIB // 2 + 3,), v), "v": torch.tensor(v)} for v in (1.0, 2.0)]
RANDOM_KILLS = 20


def save_forever(path: Path) -> None:
    while True:
        for state in STATES:
            save(state, path, durable=False)


def look_after(path: Path, when: str) -> None:
    """Either state is there, whole, and the next save clears what a saver may have left."""
    loaded = load(path)
    assert_same(loaded, STATES[int(loaded["v"]) - 1])
    if files_in(path.parent) != [path.name]:
        left = [name for name in files_in(path.parent) if name != path.name]
        assert len(left) == 1 and left[0].startswith(".saving-"), (when, left)
        save(STATES[0], path)
        assert files_in(path.parent) == [path.name], when


def main(folder: Path, kind: str) -> None:
    torch.set_num_threads(1)
    path = folder / "model"
    if kind == "named":
        new_file._DESCRIPTORS = "/does/not/exist"
    first, second = (partial(save, state, path) for state in STATES)
    after = partial(look_after, path)
    steps = kill_at_every_step(first, second, ("fsync", "fchmod", "link", "replace"), after)
    kill_at_random(partial(save_forever, path), RANDOM_KILLS, 0.06, after)
    print(steps, RANDOM_KILLS)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

"""Fork in the middle of a step whose state is on disk, in a process without other tests' threads.

python fork_in_a_step.py FOLDER
"""

import gc
import os
import signal
import sys
import warnings
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[1] / "optim"))

import torch
from disks import on_disk

from deepspeed_ext.offload.bucket import HostBucket


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", ".*fork.*", DeprecationWarning)
    pair = on_disk(folder)
    for _ in range(2):
        pair.backward()
        pair.step()
    original, children = HostBucket._step_part, []

    def forking(*args):
        if not children:
            children.append(os.fork())
            if children == [0]:  # it ends as Python does, with all that it has of the optimizer
                signal.alarm(60)
                gc.collect()
                os._exit(0 if not pair.ours.close() else 1)
        return original(*args)

    HostBucket._step_part = forking
    pair.backward()
    pair.step()
    assert os.waitpid(children[0], 0)[1] == 0
    pair.check()
    print("went on")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

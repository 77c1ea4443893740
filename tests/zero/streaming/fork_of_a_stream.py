"""Fork a process whose weights rest in a file, and write them in the child.

python fork_of_a_stream.py FOLDER
"""

import os
import signal
import sys
import warnings
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[2] / "optim"))

import torch
from stream_cases import Model, assert_equal_models, loss_of, on_disk, pair, some_ids


def child(streamed: Model, kept: Model) -> None:
    ids = some_ids("cpu", 1)
    for _ in range(2):
        for model in (streamed, kept):
            loss_of(model, ids).backward()
            with torch.no_grad():
                for param in model.parameters():
                    param -= param.grad
        assert_equal_models(streamed, kept, gradients=True)
    streamed.to(torch.bfloat16)
    assert torch.isfinite(streamed(ids)).all()


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", ".*fork.*", DeprecationWarning)
    streamed, kept, handle = pair("cpu", rest=on_disk(folder))
    streamed(some_ids("cpu", 0))
    number = os.fork()
    if number == 0:
        signal.alarm(60)
        try:
            child(streamed, kept)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(number, 0)[1] == 0
    assert_equal_models(streamed, kept)
    ids = some_ids("cpu", 2)
    assert torch.equal(streamed(ids), kept(ids))
    stats = handle.stats()
    assert stats["disk_bytes"] == stats["resting_bytes"] > 0
    print("went on")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

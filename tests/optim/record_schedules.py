"""Record what DeepSpeed's own schedules give, for test_optim_schedules.

In an environment with torch and DeepSpeed, which the tests do not need (`DS_BUILD_OPS=0 pip install
--no-deps deepspeed`, and the pure Python packages that it imports):

    python tests/optim/record_schedules.py

It takes the cases from recorded_schedules.json and writes their values into it. A case has the lr
of each group of a torch.optim.Adam, the arguments of the schedule, and how many steps it takes; its
values are rows of iteration, lr of each group and first beta of each group. The first rows are
kept, and two of every 200 after those.
"""

import json
from pathlib import Path

FILE = Path(__file__).with_name("recorded_schedules.json")


def is_kept(iteration):
    return iteration < 16 or iteration % 200 < 2


def record(kind, case):
    import torch

    groups = [{"params": [torch.zeros(1)], "lr": lr} for lr in case["lrs"]]
    optimizer = torch.optim.Adam(groups)
    schedule = kind(optimizer, **case["arguments"])
    for iteration in range(-1, case["steps"]):
        if is_kept(iteration):
            lrs = [group["lr"] for group in optimizer.param_groups]
            yield [iteration, lrs, [group["betas"][0] for group in optimizer.param_groups]]
        schedule.step()


def main():
    import deepspeed
    from deepspeed.runtime import lr_schedules

    recorded = json.loads(FILE.read_text())
    recorded["deepspeed"] = deepspeed.__version__
    for case in recorded["cases"]:
        case["values"] = list(record(getattr(lr_schedules, case["schedule"]), case))
    cases = ",\n".join(json.dumps(case) for case in recorded.pop("cases"))
    FILE.write_text(json.dumps(recorded)[:-1] + f', "cases": [\n{cases}\n]}}\n')


if __name__ == "__main__":
    main()

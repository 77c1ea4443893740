"""Trainings go on from DeepSpeed's folders, imported or not: on other numbers of processes."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed_folder import Run
from processes import Case
from torch import Tensor, nn
from zero_cases import FORMATS, Net, adam, assert_close, loss_of, whole

from deepspeed_ext import zero
from deepspeed_ext.offload import OffloadOptimizer

OPTIONS = {"lr": 0.02, "weight_decay": 0.1, "eps": 1e-3}
PARTS = 2  # of a batch, however many processes there are
SOURCES = {"0": (0, 1), "1": (1, 3), "elastic": (2, 2), "3": (3, 12)}  # stage, processes there


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for n, p in trained if "norm" not in n]},
        {"params": [p for n, p in trained if "norm" in n], "weight_decay": 0.0},
    ]


def train(model: nn.Module, optimizer: Any, first: int, last: int, parts: range) -> None:
    for number in range(first, last):
        sum(loss_of(model, number, part) / len(parts) for part in parts).backward()
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is None:  # DeepSpeed's flat gradients have zeros there
                    param.grad = torch.zeros_like(param)
        optimizer.step()
        optimizer.zero_grad()


def plain() -> tuple[Net, torch.optim.AdamW]:
    """Two steps without DeepSpeed."""
    model = Net()
    optimizer = torch.optim.AdamW(groups_of(model), **OPTIONS)
    train(model, optimizer, 0, 2, range(PARTS))
    return model, optimizer


def written(model: Net, optimizer: torch.optim.AdamW, folder: Path, source: str) -> None:
    """Write what DeepSpeed would have written then."""
    names = {p: n for n, p in model.named_parameters()}

    def values(param: Tensor) -> dict[str, Tensor]:
        state = optimizer.state[param]
        found = {"fp32": param.detach(), **{k: state[k] for k in ("exp_avg", "exp_avg_sq")}}
        return {key: value.clone() for key, value in found.items()}

    groups = [{names[p]: values(p) for p in group["params"]} for group in optimizer.param_groups]
    stage, processes = SOURCES[source]
    Run(
        groups,
        stage=stage,
        processes=processes,
        frozen={n: p.detach() for n, p in model.named_parameters() if not p.requires_grad},
        ties={"head.weight": "embedding.weight"},
        options=[
            {k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups
        ],
        step=2.0,
        sub_group=100,
        is_elastic=source == "elastic",
    ).write(folder / "theirs")


def goes_on(row: str, folder: Path) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    home = folder / f"{row}-{world}"
    model, optimizer = plain()
    if rank == 0:
        written(model, optimizer, home, row)
        if row != "0":  # of several groups, which only the optimizer here names
            zero.import_deepspeed(home / "theirs", home / "ours")
    dist.barrier()
    train(model, optimizer, 2, 4, range(PARTS))
    expected = {name: param.detach() for name, param in model.named_parameters()}
    mine = range(rank, PARTS, world)
    if row == "1":
        mistakes(home, rank)
    kinds = torch.optim.AdamW, adam, OffloadOptimizer
    for stage, source, kind in zip((3, 2, 1), ("theirs", "ours", "theirs"), kinds, strict=True):
        sharded = zero.shard(Net(seed=5), stage)
        more = {"model": sharded} if kind is OffloadOptimizer else {}
        options = OPTIONS if row == "elastic" else {"lr": 1.0}  # which has none of its own
        other: Any = kind(groups_of(sharded), **options, **more)
        place = home / ("theirs" if row == "0" else source)
        random = torch.get_rng_state()
        client = zero.load(place, None, sharded, other)
        assert client["global_steps"] == 5 and torch.equal(torch.get_rng_state(), random)
        assert [group["weight_decay"] for group in other.param_groups] == [0.1, 0.0]
        train(sharded, other, 2, 4, mine)
        for name, param in sharded.named_parameters():
            assert_close(whole(param), expected[name], f"{name}, {kind.__name__}")


def mistakes(home: Path, rank: int) -> None:
    """All processes raise what is wrong in one, before the model has changed."""
    model = zero.shard(Net(seed=5), 2)
    optimizer = adam(groups_of(model), lr=1.0)
    before = {name: whole(param).clone() for name, param in model.named_parameters()}
    with pytest.raises(ValueError, match=r"a \w+Reader for it, process . has a \w+Reader"):
        zero.load(home / ("ours" if rank else "theirs"), None, model, optimizer)
    if rank == 0:
        cut = home / "cut" / "global_step4"
        shutil.copytree(home / "theirs" / "global_step4", cut)
        os.truncate(cut / "zero_pp_rank_1_mp_rank_00_optim_states.pt", 99)
    dist.barrier()
    error, text = (ValueError, "pp_rank_1_.* no content") if rank else (RuntimeError, "another pr")
    with pytest.raises(error, match=text):
        zero.load(home / ("cut" if rank else "theirs"), "global_step4", model, optimizer)
    for name, param in model.named_parameters():
        assert torch.equal(whole(param), before[name])


def comes_back(row: str, folder: Path) -> None:
    """What was exported loads as what was saved, in state formats that DeepSpeed does not have."""
    home = folder / f"{row}-back"
    dtype, options = FORMATS[row]

    def made(seed: int) -> tuple[nn.Module, Any]:
        model = zero.shard(Net(seed).to(dtype), 2)
        return model, adam(groups_of(model), lr=0.02, **options)

    model, optimizer = made(0)
    for number in range(2):
        loss_of(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()
    zero.save(home / "ours", "t", model, optimizer, epoch=3)
    if dist.get_rank() == 0:
        zero.export_deepspeed(home / "ours", home / "theirs")
    dist.barrier()
    found = []
    for place in ("ours", "theirs"):
        other, its_optimizer = made(5)
        assert zero.load(home / place, None, other, its_optimizer)["epoch"] == 3
        state = {
            f"{name}.{key}": whole(value)
            for name, param in other.named_parameters()
            if "unused" not in name and param.requires_grad
            for key, value in its_optimizer.state[param].items()
        }
        found.append(state | {name: whole(param) for name, param in other.named_parameters()})
    assert found[0].keys() == found[1].keys() and len(found[0]) > 40
    for name, tensor in found[0].items():
        assert_close(found[1][name], tensor, name, exact=True)


CASES = [
    Case(world, "goes_on", row) for row, world in (("1", 2), ("0", 2), ("elastic", 1), ("3", 2))
]
CASES += [Case(1, "comes_back", row) for row in ("remainder", "codes")]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.function}-{case.row}-{case.world}")
def test_trainings_go_on(case: Case, groups: Any) -> None:
    groups.run(case)

"""Streamed models in several processes, each of which has all of the weights."""

import copy

import pytest
import torch
from processes import Case
from stream_cases import Model, assert_equal_models, loss_of, some_ids
from torch import nn
from zero_cases import home

from deepspeed_ext import zero
from deepspeed_ext.offload import OffloadOptimizer


def data_parallel(row, folder):
    """Gradients are those that DistributedDataParallel has reduced, without and with no_sync.

    It takes no parameters on two kinds of devices: a streamed model, on the CPU alone.
    """
    kept = Model()
    streamed = copy.deepcopy(kept)
    place = {"device": "nvme", "nvme_path": folder} if row == "nvme" else {}
    streams = zero.stream(streamed, to=home(), **place)
    if home() == "cuda":
        with pytest.raises(ValueError, match="must be on the same type of devices"):
            nn.parallel.DistributedDataParallel(streamed)
        return
    made = []
    for model in (kept.to(home()), streamed):
        wrapped = nn.parallel.DistributedDataParallel(model)
        optimizer = OffloadOptimizer(model.parameters(), model=model, lr=1e-2)
        for number in range(4):
            if number % 2 == 0:
                with wrapped.no_sync():
                    loss_of(wrapped, ids(2 * number)).backward()
            loss_of(wrapped, ids(2 * number + 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        made.append(model)
    assert streams.stats()["fetched"] > 0
    assert_equal_models(made[1], made[0])


def ids(number):
    rank = torch.distributed.get_rank()
    return some_ids(home(), 100 * number + rank)


def refused(row, folder):
    """A model that processes share out, in whatever way, is told what to use."""
    model = Model()
    zero.shard(model, 3)
    with pytest.raises(ValueError, match=r"is sharded, expected a whole one; several processes"):
        zero.stream(model)


CASES = [*(Case(2, "data_parallel", row) for row in ("cpu", "nvme")), Case(2, "refused", "")]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.function}-{c.row}-{c.world}")
def test_processes(case, groups):
    groups.run(case, least=1)

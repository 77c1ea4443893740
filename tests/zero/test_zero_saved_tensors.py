"""Saved tensors leave beside sharded weights: numbers are those without, and weights stay."""

import pytest
import torch
from processes import Case
from zero_cases import Net, batch, home, whole

from deepspeed_ext import offload, zero
from deepspeed_ext.offload import OffloadOptimizer

STEPS = 3


class Checkpointed(Net):
    """Whose blocks are computed again; their inputs are kept by `saved`."""

    saved = None

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = offload.checkpoint(block, x, device=self.saved) if self.saved else block(x)
        return self.head(x)


def trained(stage, how, folder):
    """Return weights after some steps, and how many bytes were away at the most."""
    model = Checkpointed()
    place = {"offload": "cpu"} if stage == "rests" else {}
    zero.shard(model, 3 if place else int(stage), param_dtype=torch.bfloat16, **place)
    where = {"device": "nvme", "nvme_path": folder} if how == "nvme" else {"device": "cpu"}
    saved = offload.saved_tensors(min_bytes=0, **where)
    model.saved = saved if how == "checkpoint" else None
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = OffloadOptimizer(params, model=model, lr=1e-2)
    for number in range(STEPS):
        for i in zero.accumulate(model, 2):
            tokens, targets = batch(2 * number + i)
            if how in ("cpu", "nvme"):
                with saved:
                    loss = loss_of(model, tokens, targets)
            else:
                loss = loss_of(model, tokens, targets)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    return [whole(param).cpu() for param in model.parameters()], saved.stats()


def loss_of(model, tokens, targets):
    logits = model(tokens).float().flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, targets.flatten())


def leaves(row, folder):
    wanted, _ = trained(row, "", folder)
    for how in ("cpu", "nvme", "checkpoint"):
        found, stats = trained(row, how, folder)
        assert all(map(torch.equal, found, wanted)), how
        assert stats["peak"] > 0 == stats["bytes"], how
    assert home() == "cuda" or all(param.device.type == "cpu" for param in found)


CASES = [Case(2, "leaves", stage) for stage in ("0", "1", "2", "3", "rests")]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.row)
def test_processes(case, groups):
    groups.run(case)

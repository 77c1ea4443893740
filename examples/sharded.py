"""Training on several processes: the model sharded by a stage of ZeRO, files of the first one."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_ext import zero
from examples.gpt import GPT, Block
from examples.optimizers import STATES
from examples.options import UserError
from examples.run_folder import RunFolder
from examples.text import Text
from examples.trainer import Settings, Trainer

_TAG = "last"


def join_processes() -> None:
    """Meet the processes that torchrun has started, or none; only the first one prints."""
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "cpu:gloo,cuda:nccl"
    if dist.is_initialized():
        return
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    if dist.get_rank():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # as long as the process


class ShardedTrainer(Trainer):
    """Trains one model on all processes, each with its share of every batch.

    Losses are means over all, so that their number changes a run by rounding only. With experts it
    changes a little more: each balances the load of its own share.
    """

    def __init__(self, settings: Settings, text: Text) -> None:
        world = dist.get_world_size()
        if settings.batch_size % world:
            raise UserError(
                f"--batch-size is {settings.batch_size}, expected a multiple of {world}, the number"
                " of processes"
            )
        super().__init__(settings, text)

    def _prepared(self, model: GPT) -> GPT:
        is_low = "master" in STATES[self.settings.state]
        if is_low:
            model.bfloat16()  # the optimizer keeps what is missing
        assert self.settings.zero_stage is not None
        on_gpu = self.settings.device == "cuda"
        mesh = dist.device_mesh.init_device_mesh(self.settings.device, (dist.get_world_size(),))
        zero.shard(
            model,
            self.settings.zero_stage,
            mesh=mesh,
            param_dtype=torch.bfloat16 if on_gpu else None,
            reduce_dtype=torch.float32 if on_gpu else None,
            blocks=[Block],
        )
        return model

    def _share(self, examples: Tensor) -> Tensor:
        return examples.chunk(dist.get_world_size())[dist.get_rank()]

    def _mean(self, loss: Tensor) -> Tensor:
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        return mean

    def _sum(self, counts: Tensor) -> Tensor:
        total = counts.clone()
        dist.all_reduce(total)
        return total

    def any_process(self, flag: bool) -> bool:
        """Return whether this is true in any process."""
        count = torch.tensor(float(flag), device=self.settings.device)
        dist.all_reduce(count)
        return bool(count)

    def save(self, folder: RunFolder, content: dict[str, Any]) -> None:
        """Save all shards."""
        zero.save(folder.checkpoint.parent, _TAG, self.model, self._torch_optimizer(), **content)

    def load(self, folder: RunFolder, content: dict[str, Any]) -> None:
        """Continue from shards of any number of processes."""
        zero.load(folder.checkpoint.parent, None, self.model, self._torch_optimizer())

    def _torch_optimizer(self) -> torch.optim.Optimizer:
        assert isinstance(self.optimizer, torch.optim.Optimizer)
        return self.optimizer


class ShardedFolder(RunFolder):
    """The folder of a run on several processes: the first one writes, but for checkpoints."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.checkpoint = path / "checkpoint" / "latest"
        self.is_shown = dist.get_rank() == 0
        self.processes = dist.get_world_size()

    def load(self) -> dict[str, Any]:
        """Return what the checkpoint says of the run, without weights."""
        return zero.inspect(self.checkpoint.parent)

    def write_metrics(self, history: list[dict[str, Any]]) -> None:
        """Write the metrics anew, in the first process."""
        if self.is_shown:
            super().write_metrics(history)

    def append_metrics(self, entry: dict[str, Any]) -> None:
        """Add the line of one more step, in the first process."""
        if self.is_shown:
            super().append_metrics(entry)

    def write_sample(self, text: bytes) -> None:
        """Write generated text, in the first process."""
        if self.is_shown:
            super().write_sample(text)

    def draw(self, history: list[dict[str, Any]], title: str) -> None:
        """Draw the loss, in the first process."""
        if self.is_shown:
            super().draw(history, title)

    def draw_load(self, history: list[dict[str, Any]], title: str) -> None:
        """Draw the load of experts, in the first process."""
        if self.is_shown:
            super().draw_load(history, title)

"""What all schedules share: counting, writing into the optimizer's groups, state dicts."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from deepspeed_ext.optim.schedules.arguments import per_group, spread, whole


class Schedule(LRScheduler):
    """A torch scheduler whose values are a function of how often it was stepped.

    `last_batch_iteration` is -1 when a schedule is made and grows by 1 with each step(); torch's
    `last_epoch` is 1 more. So the optimizer's step j, from 1, acts with the values of iteration
    j - 2. These are written to the dicts in `optimizer.param_groups`, also to those that were added
    or replaced since; an `lr` that is a tensor is filled and stays the same one. What others wrote
    to `lr` in between lasts until the next step(). A group that is added has as its own lr what it
    has at the next step() or get_lr().

    Args:
        optimizer: any torch.optim.Optimizer. A group's own lr is its `initial_lr`, if another
            scheduler left one there, else its `lr`. A state that DeepSpeed saved has scheduled
            rates and no `initial_lr`: let the optimizer load it after the schedule was made.
        last_batch_iteration: to go on from, a whole number, at least -1. The values of it are
            written at once.

    Raises:
        TypeError: an argument is of the wrong kind, or optimizer is no torch.optim.Optimizer.
        ValueError: an argument is out of range, named in the text; step() and get_lr() raise it
            where a list of numbers has none for a group that was added.
    """

    base_lrs: list[float | Tensor]  # of each group, its own

    def __init__(self, optimizer: Optimizer, last_batch_iteration: int) -> None:
        start = self._checked(last_batch_iteration)
        super().__init__(optimizer)
        self.base_lrs = [float(lr) for lr in self.base_lrs]  # a tensor on a device waits for it
        if start >= 0:
            self.step(start)

    @property
    def last_batch_iteration(self) -> int:
        """How often step() was called, less 1."""
        return self.last_epoch - 1

    def _lrs_at(self, iteration: int) -> Sequence[float]:
        """Return the lr of each group of the optimizer at an iteration, -1 or more."""
        raise NotImplementedError

    def get_lr(self) -> list[float | Tensor]:
        """Return what the formula gives for each group now; get_last_lr() has what was written."""
        return list(self._lrs_at(self.last_batch_iteration))

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Write the values of the next iteration, or of the one that is given, also of an earlier.

        Call it after the optimizer's step(); torch warns if the first call comes before.
        """
        if last_batch_iteration is None:
            self._lrs_at(self.last_batch_iteration + 1)  # raises before anything is counted
            super().step()
            return
        iteration = self._checked(last_batch_iteration)
        lrs, groups = self._lrs_at(iteration), self.optimizer.param_groups
        self.last_epoch = iteration + 1
        for group, lr in zip(groups, lrs, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        written = [group["lr"] for group in groups]
        self._last_lr = [lr.clone() if isinstance(lr, Tensor) else lr for lr in written]

    def state_dict(self) -> dict[str, Any]:
        """Return the number of the iteration, which DeepSpeed's classes load, and the own lrs."""
        own = self._own_lrs()
        return {"last_batch_iteration": self.last_batch_iteration, "base_lrs": own}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state dict of this class or of DeepSpeed's, and write its values at once.

        Args:
            state_dict: `last_batch_iteration`; `base_lrs`, if it is there, becomes the groups' own
                lrs. All else is what the constructor was given.

        Raises:
            ValueError: it is none of these. Nothing was changed then.
        """
        title = type(self).__name__
        if "last_batch_iteration" not in state_dict:
            keys = sorted(map(str, state_dict))
            raise ValueError(
                f"{title}: state_dict has keys {keys}, expected last_batch_iteration among them"
            )
        iteration = self._checked(state_dict["last_batch_iteration"])
        if "base_lrs" in state_dict:
            groups = len(self.optimizer.param_groups)
            own = per_group(title, "base_lrs", state_dict["base_lrs"], groups)
            self.base_lrs = [*spread(title, "base_lrs", own, groups)]
        self.step(iteration)

    def _own_lrs(self) -> list[float]:
        """Return each group's own lr, those of groups that were added since too."""
        groups = self.optimizer.param_groups
        for group in groups[len(self.base_lrs) :]:
            self.base_lrs.append(float(group.setdefault("initial_lr", float(group["lr"]))))
        return [float(lr) for lr in self.base_lrs[: len(groups)]]

    def _checked(self, iteration: object) -> int:
        return whole(type(self).__name__, "last_batch_iteration", iteration, -1)

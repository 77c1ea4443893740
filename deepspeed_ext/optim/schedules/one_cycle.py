"""OneCycle: lr goes up and down once while momentum goes down and up, then both decay."""

import logging
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from deepspeed_ext.optim.schedules.arguments import (
    BELOW_1,
    PerGroup,
    check_optimizer,
    check_order,
    flag,
    number,
    per_group,
    spread,
    whole,
)
from deepspeed_ext.optim.schedules.base import Schedule

_log = logging.getLogger("deepspeed_ext")


class _Half(NamedTuple):
    """Of a cycle: how many iterations, and in how many stairs, 0 for none."""

    steps: int
    stairs: int

    def share(self, iterations: int) -> float:
        """Return how high lr is, 0 to 1, this many iterations from the lower end."""
        if self.stairs:
            return iterations * self.stairs // self.steps / self.stairs
        return iterations / self.steps


class OneCycle(Schedule):
    """Raise lr, lower it again, then let it decay; momentum does the reverse.

    At iteration n, with k = n + 1, F = cycle_first_step_size, S = cycle_second_step_size and
    D = decay_step_size:

        lr  = cycle_min_lr + (cycle_max_lr - cycle_min_lr) * share    for k < F + S
              cycle_min_lr / (1 + decay_lr_rate * periods)            for k >= F + S
        mom = cycle_min_mom                                           for k = 0
              cycle_max_mom - (cycle_max_mom - cycle_min_mom) * share for 0 < k < F + S
              cycle_max_mom * (1 + decay_mom_rate * periods)          for k >= F + S
        share = k / F                                                 for k <= F
                (F + S - k) / S                                       for k > F
        periods = (k - F - S) / D, or 0 if D is 0

    With a stair count c, in either half, the share is floor(share * c) / c.

    Args:
        optimizer: any torch.optim.Optimizer.
        cycle_min_lr: at both ends of the cycle, at least 0; a number or a list of one for each
            group.
        cycle_max_lr: in its middle, at least cycle_min_lr; likewise.
        decay_lr_rate: of the decay after the cycle, at least 0.
        cycle_first_step_size: iterations in which lr goes up, a whole number, at least 1.
        cycle_second_step_size: those in which it goes down, at least 0. None: as many.
        cycle_first_stair_count: stairs on the way up, at least 0; 0: none.
        cycle_second_stair_count: on the way down. None: as many.
        decay_step_size: iterations of a period of the decay, at least 0; 0: no decay.
        cycle_momentum: write momentum to `betas[0]` of the groups that have betas. `betas[1]` stays
            as it is, where DeepSpeed sets 0.99. If no group has betas, the log says that none is
            written.
        cycle_min_mom: in the middle and in the optimizer's first step, at least 0 and below 1; a
            number or a list of one for each group.
        cycle_max_mom: at the ends, at least cycle_min_mom and below 1; likewise.
        decay_mom_rate: of momentum's growth after the cycle, at least 0. step() refuses to go where
            momentum would be 1.
        last_batch_iteration: to go on from; -1: the beginning.

    Raises:
        ValueError: an argument is out of range, named in the text; or, in step(), momentum.

    See: Smith, "A disciplined approach to neural network hyper-parameters", 2018, section 4. The
    numbers are those that DeepSpeed 0.19 gives, measured; the rest is as in `Schedule`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: PerGroup,
        cycle_max_lr: PerGroup,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: PerGroup = 0.8,
        cycle_max_mom: PerGroup = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        title = type(self).__name__
        groups = len(check_optimizer(title, optimizer).param_groups)
        self._low = per_group(title, "cycle_min_lr", cycle_min_lr, groups)
        self._high = per_group(title, "cycle_max_lr", cycle_max_lr, groups)
        check_order(title, ("cycle_min_lr", self._low), ("cycle_max_lr", self._high))
        self._low_mom = per_group(title, "cycle_min_mom", cycle_min_mom, groups, BELOW_1)
        self._high_mom = per_group(title, "cycle_max_mom", cycle_max_mom, groups, BELOW_1)
        check_order(title, ("cycle_min_mom", self._low_mom), ("cycle_max_mom", self._high_mom))
        up = whole(title, "cycle_first_step_size", cycle_first_step_size, 1)
        stairs = whole(title, "cycle_first_stair_count", cycle_first_stair_count, 0)
        self._up = self._down = _Half(up, stairs)
        if cycle_second_step_size is not None:
            down = whole(title, "cycle_second_step_size", cycle_second_step_size, 0)
            self._down = self._down._replace(steps=down)
        if cycle_second_stair_count is not None:
            stairs = whole(title, "cycle_second_stair_count", cycle_second_stair_count, 0)
            self._down = self._down._replace(stairs=stairs)
        self._period = whole(title, "decay_step_size", decay_step_size, 0)
        self._lr_rate = number(title, "decay_lr_rate", decay_lr_rate)
        self._mom_rate = number(title, "decay_mom_rate", decay_mom_rate)
        self._cycles_momentum = flag(title, "cycle_momentum", cycle_momentum)
        if self._cycles_momentum and not any("betas" in each for each in optimizer.param_groups):
            kind = type(optimizer).__name__
            _log.warning("OneCycle: no group of %s has betas: its momentum stays as it is", kind)
        super().__init__(optimizer, last_batch_iteration)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Write lr as every schedule does, and momentum.

        Raises:
            ValueError: momentum would be 1 or more. Nothing was written then.
        """
        iteration = self.last_batch_iteration + 1
        if last_batch_iteration is not None:
            iteration = self._checked(last_batch_iteration)
        groups = self.optimizer.param_groups if self._cycles_momentum else []
        momenta = self._moms_at(iteration)[: len(groups)]
        cycled = [each for each in zip(groups, momenta, strict=True) if "betas" in each[0]]
        highest = max((momentum for _, momentum in cycled), default=0.0)
        if highest >= 1:
            raise ValueError(
                f"OneCycle: momentum is {highest:g} at iteration {iteration}, expected below 1; "
                "lower decay_mom_rate"
            )
        super().step(last_batch_iteration)
        for group, momentum in cycled:
            first, *others = group["betas"]
            if isinstance(first, Tensor):
                first.fill_(momentum)
            else:
                group["betas"] = (momentum, *others)

    def get_mom(self) -> list[tuple[float, ...]] | None:
        """Return the betas of each group with the momentum that the formula gives now.

        Before the first step it is cycle_max_mom, from which the formula goes down, as DeepSpeed's;
        the optimizer's first step has cycle_min_mom. None: no momentum is cycled.
        """
        if not self._cycles_momentum:
            return None
        iteration = self.last_batch_iteration
        groups = self.optimizer.param_groups
        if iteration < 0:
            momenta = [*spread("OneCycle", "cycle_max_mom", self._high_mom, len(groups))]
        else:
            momenta = self._moms_at(iteration)
        both = zip(groups, momenta, strict=True)
        return [(momentum, *map(float, group.get("betas", ())[1:])) for group, momentum in both]

    def _moms_at(self, iteration: int) -> list[float]:
        groups, done = len(self.optimizer.param_groups), iteration + 1
        lows = spread("OneCycle", "cycle_min_mom", self._low_mom, groups)
        highs = spread("OneCycle", "cycle_max_mom", self._high_mom, groups)
        if done == 0:
            return list(lows)
        if (share := self._share(done)) is None:
            return [high * (1 + self._mom_rate * self._periods(done)) for high in highs]
        both = zip(lows, highs, strict=True)
        return [high * (1 - share) + low * share for low, high in both]

    def _lrs_at(self, iteration: int) -> Sequence[float]:
        groups, done = len(self.optimizer.param_groups), iteration + 1
        lows = spread("OneCycle", "cycle_min_lr", self._low, groups)
        highs = spread("OneCycle", "cycle_max_lr", self._high, groups)
        if (share := self._share(done)) is None:
            return [low / (1 + self._lr_rate * self._periods(done)) for low in lows]
        both = zip(lows, highs, strict=True)
        return [low * (1 - share) + high * share for low, high in both]

    def _share(self, done: int) -> float | None:
        """Return how far lr is from its least, 0, to its most, 1; None after the cycle."""
        left = self._up.steps + self._down.steps - done
        if left <= 0:
            return None
        return self._up.share(done) if done <= self._up.steps else self._down.share(left)

    def _periods(self, done: int) -> float:
        """Return how many periods of the decay have passed since the cycle."""
        since = done - self._up.steps - self._down.steps
        return since / self._period if self._period else 0.0

"""Schedules that warm up: WarmupLR, WarmupDecayLR and WarmupCosineLR."""

import logging
import math
from collections.abc import Sequence

from torch.optim import Optimizer

from deepspeed_ext.optim.schedules.arguments import (
    UP_TO_1,
    PerGroup,
    check_optimizer,
    check_order,
    number,
    own_lrs,
    per_group,
    spread,
    whole,
)
from deepspeed_ext.optim.schedules.base import Schedule

_log = logging.getLogger("deepspeed_ext")
_TYPES = ("log", "linear")


class _Warmup:
    """How far the warm-up is at an iteration: 0 at its beginning, 1 after it."""

    def __init__(self, title: str, steps: int, kind: str) -> None:
        if kind not in _TYPES:
            raise ValueError(f"{title}: warmup_type is {kind!r}, expected {' or '.join(_TYPES)}")
        self.steps = max(2, whole(title, "warmup_num_steps", steps, 0))
        self.kind = kind

    def __call__(self, iteration: int) -> float:
        if iteration >= self.steps:
            return 1.0
        done = max(iteration, 0)
        if self.kind == "log":
            return math.log(done + 1) / math.log(self.steps)
        return done / self.steps

    def check_total(self, title: str, total: int) -> int:
        """Return how many steps there are in all, at least 1; warn if they end in the warm-up."""
        total = whole(title, "total_num_steps", total, 1)
        if total < self.steps:
            _log.warning(
                "%s: total_num_steps is %d, less than the %d steps of the warm-up, which is taken "
                "to its end; then the rate drops to its least",
                *(title, total, self.steps),
            )
        return total


class WarmupLR(Schedule):
    """Raise lr from warmup_min_lr to warmup_max_lr, and keep it there.

    At iteration n, with N = max(2, warmup_num_steps):

        lr = warmup_min_lr + (warmup_max_lr - warmup_min_lr) * share
        share = 0                    for n = -1, the optimizer's first step
                ln(n + 1) / ln(N)    for 0 <= n < N, "log"
                n / N                for 0 <= n < N, "linear"
                1                    for n >= N

    Args:
        optimizer: any torch.optim.Optimizer.
        warmup_min_lr: at the beginning, at least 0; a number or a list of one for each group.
        warmup_max_lr: after the warm-up, at least warmup_min_lr; likewise. None: each group's own.
        warmup_num_steps: a whole number, at least 0; 0 and 1 are taken for 2.
        warmup_type: "log" or "linear".
        last_batch_iteration: to go on from; -1: the beginning.

    Raises:
        ValueError: an argument is out of range, named in the text.

    See: the numbers are those that DeepSpeed 0.19 gives, measured; the rest is as in `Schedule`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        title = type(self).__name__
        groups = len(check_optimizer(title, optimizer).param_groups)
        self._low = per_group(title, "warmup_min_lr", warmup_min_lr, groups)
        self._high: PerGroup | None = None
        if warmup_max_lr is not None:
            self._high = per_group(title, "warmup_max_lr", warmup_max_lr, groups)
        high = own_lrs(optimizer) if self._high is None else self._high
        check_order(title, ("warmup_min_lr", self._low), ("warmup_max_lr", high))
        self._warmup = _Warmup(title, warmup_num_steps, warmup_type)
        super().__init__(optimizer, last_batch_iteration)

    def _share(self, iteration: int) -> float:
        """Return how far lr is from warmup_min_lr, 0, to warmup_max_lr, 1."""
        return self._warmup(iteration)

    def _lrs_at(self, iteration: int) -> Sequence[float]:
        own, title, share = self._own_lrs(), type(self).__name__, self._share(iteration)
        lows = spread(title, "warmup_min_lr", self._low, len(own))
        highs = own
        if self._high is not None:
            highs = [*spread(title, "warmup_max_lr", self._high, len(own))]
        # Not low + (high - low) * share, which need not be `high` where the share is 1.
        both = zip(lows, highs, strict=True)
        return [low * (1 - share) + high * share for low, high in both]


class WarmupDecayLR(WarmupLR):
    """Raise lr as WarmupLR does, then lower it to warmup_min_lr in a straight line.

    At iteration n, with N = max(2, warmup_num_steps) and T = total_num_steps:

        lr = warmup_min_lr + (warmup_max_lr - warmup_min_lr) * share
        share = that of WarmupLR                        for n < N
                max(0, (T - n) / max(1, T - N))         for n >= N

    Args:
        optimizer: any torch.optim.Optimizer.
        total_num_steps: of warm-up and decay, a whole number, at least 1. If it is less than the
            warm-up, lr drops to warmup_min_lr after that, and the log says so.
        warmup_min_lr: at both ends, as in WarmupLR.
        warmup_max_lr: as in WarmupLR; its default is 0.001 here. None: each group's own lr.
        warmup_num_steps: as in WarmupLR.
        warmup_type: "log" or "linear".
        last_batch_iteration: to go on from; -1: the beginning.

    Raises:
        ValueError: an argument is out of range, named in the text.

    See: the numbers are those that DeepSpeed 0.19 gives, measured; the rest is as in `Schedule`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        title = type(self).__name__
        warmup = _Warmup(title, warmup_num_steps, warmup_type)
        self._total = warmup.check_total(title, total_num_steps)
        super().__init__(
            *(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps),
            warmup_type=warmup_type,
            last_batch_iteration=last_batch_iteration,
        )

    def _share(self, iteration: int) -> float:
        steps = self._warmup.steps
        if iteration < steps:
            return self._warmup(iteration)
        return max(0.0, (self._total - iteration) / max(1, self._total - steps))


class WarmupCosineLR(Schedule):
    """Raise lr to each group's own one, then lower it along half a cosine.

    At iteration n, with N = max(2, warmup_num_steps) and T = total_num_steps:

        lr = own lr of the group * ratio
        ratio = 0                                                            for n = -1
                warmup_min_ratio + (1 - warmup_min_ratio) * share            for 0 <= n < N
                cos_min_ratio + (1 - cos_min_ratio) * (1 + cos(pi * x)) / 2  for n >= N
        share = that of WarmupLR
        x = min(1, (n - N + 1) / max(1, T - N))

    Args:
        optimizer: any torch.optim.Optimizer.
        total_num_steps: of warm-up and decay, a whole number, at least 1. If it is less than the
            warm-up, lr drops to the least after that, and the log says so.
        warmup_min_ratio: of a group's own lr at iteration 0, from 0 to 1.
        warmup_num_steps: a whole number, at least 0; 0 and 1 are taken for 2.
        cos_min_ratio: of a group's own lr at the end, from 0 to 1.
        warmup_type: "log" or "linear".
        last_batch_iteration: to go on from; -1: the beginning.

    Raises:
        ValueError: an argument is out of range, named in the text.

    See: the numbers are those that DeepSpeed 0.19 gives, measured; the rest is as in `Schedule`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        title = type(self).__name__
        check_optimizer(title, optimizer)
        self._warmup = _Warmup(title, warmup_num_steps, warmup_type)
        self._total = self._warmup.check_total(title, total_num_steps)
        self._first = number(title, "warmup_min_ratio", warmup_min_ratio, UP_TO_1)
        self._last = number(title, "cos_min_ratio", cos_min_ratio, UP_TO_1)
        super().__init__(optimizer, last_batch_iteration)

    def _ratio(self, iteration: int) -> float:
        if iteration < 0:
            return 0.0
        steps = self._warmup.steps
        if iteration < steps:
            least, share = self._first, self._warmup(iteration)
        else:
            done = min(1.0, (iteration - steps + 1) / max(1, self._total - steps))
            least, share = self._last, (1 + math.cos(math.pi * done)) / 2
        return least * (1 - share) + share

    def _lrs_at(self, iteration: int) -> Sequence[float]:
        ratio = self._ratio(iteration)
        return [lr * ratio for lr in self._own_lrs()]

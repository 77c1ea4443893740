"""LRRangeTest: lr that grows without end, to find the one at which training diverges."""

from collections.abc import Sequence

from torch.optim import Optimizer

from deepspeed_ext.optim.schedules.arguments import (
    PerGroup,
    check_optimizer,
    flag,
    number,
    per_group,
    spread,
    whole,
)
from deepspeed_ext.optim.schedules.base import Schedule


class LRRangeTest(Schedule):
    """Raise lr without end, evenly or in stairs.

    At iteration n, with S = lr_range_test_step_size:

        lr = lr_range_test_min_lr * (1 + lr_range_test_step_rate * intervals)
        intervals = (n + 1) / S, rounded down with lr_range_test_staircase

    Args:
        optimizer: any torch.optim.Optimizer.
        lr_range_test_min_lr: at the beginning, at least 0; a number, or a list of one for each
            group.
        lr_range_test_step_size: iterations of an interval, a whole number, at least 1.
        lr_range_test_step_rate: growth in each interval, as a share of lr_range_test_min_lr; at
            least 0.
        lr_range_test_staircase: grow at the end of an interval only.
        last_batch_iteration: to go on from; -1: the beginning.

    Raises:
        ValueError: an argument is out of range, named in the text.

    See: Smith, "A disciplined approach to neural network hyper-parameters", 2018, section 4. The
    numbers are those that DeepSpeed 0.19 gives, measured; the rest is as in `Schedule`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: PerGroup = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        title = type(self).__name__
        groups = len(check_optimizer(title, optimizer).param_groups)
        self._low = per_group(title, "lr_range_test_min_lr", lr_range_test_min_lr, groups)
        self._size = whole(title, "lr_range_test_step_size", lr_range_test_step_size, 1)
        self._rate = number(title, "lr_range_test_step_rate", lr_range_test_step_rate)
        self._staircase = flag(title, "lr_range_test_staircase", lr_range_test_staircase)
        super().__init__(optimizer, last_batch_iteration)

    def _lrs_at(self, iteration: int) -> Sequence[float]:
        done, size = iteration + 1, self._size
        growth = 1 + self._rate * (done // size if self._staircase else done / size)
        groups = len(self.optimizer.param_groups)
        lows = spread(type(self).__name__, "lr_range_test_min_lr", self._low, groups)
        return [low * growth for low in lows]

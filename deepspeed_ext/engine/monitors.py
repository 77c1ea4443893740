"""Where metrics go: the log, TensorBoard, Weights & Biases, and files of comma-separated values."""

import csv
import logging
import math
import os
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, TextIO

from deepspeed_ext.config import Config
from deepspeed_ext.engine.metrics import Step, sentence

_log = logging.getLogger("deepspeed_ext")
_PREFIX = "Train/Samples/"
_NAMES = {  # as DeepSpeed calls them, where it has them
    "loss": "train_loss",
    "scale": "loss_scale",
    "norm": "grad_norm",
    "skipped": "skipped_steps",
}
_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb"}


class Monitor(Protocol):
    """What metrics are written to."""

    def write(self, events: Mapping[str, float], at: int) -> None:
        """Write values by name.

        Args:
            events: the values.
            at: how many samples there were.
        """

    def close(self) -> None:
        """End."""


class CsvFiles:
    """A file for each name, with the columns step and name; what is there already goes on.

    Args:
        folder: made if it is not there.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._files: dict[str, TextIO] = {}

    def write(self, events: Mapping[str, float], at: int) -> None:
        """Write values by name, each a line of its file."""
        for name, value in events.items():
            if name not in self._files:
                path = self._folder / f"{name.replace('/', '_').replace(' ', '_')}.csv"
                self._files[name] = path.open("a", newline="")
                if path.stat().st_size == 0:
                    csv.writer(self._files[name]).writerow(["step", name.rpartition("/")[2]])
            csv.writer(self._files[name]).writerow([at, value])
            self._files[name].flush()

    def close(self) -> None:
        """Close the files."""
        while self._files:
            self._files.popitem()[1].close()


class TensorBoard:
    """Files of TensorBoard.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._writer: Any = import_module("torch.utils.tensorboard").SummaryWriter(str(folder))

    def write(self, events: Mapping[str, float], at: int) -> None:
        """Write values by name."""
        for name, value in events.items():
            self._writer.add_scalar(name, value, at)
        self._writer.flush()

    def close(self) -> None:
        """End the writer."""
        self._writer.close()


class Wandb:
    """A run of Weights & Biases, or the one that the script has begun.

    Args:
        options: of wandb.init.
    """

    def __init__(self, **options: Any) -> None:
        self._run: Any = import_module("wandb").init(**options)

    def write(self, events: Mapping[str, float], at: int) -> None:
        """Write values by name."""
        self._run.log(dict(events), step=at)

    def close(self) -> None:
        """Leave the run to the end of the process, as the script may go on with it."""


def check_packages(config: Config) -> None:
    """Refuse a config with a monitor whose package is missing.

    Raises:
        ImportError: it is.
    """
    for block, package in _PACKAGES.items():
        if getattr(config, block).enabled and find_spec(package) is None:
            raise ImportError(
                f"initialize: config has {block}.enabled true, expected the package {package};"
                f" pip install {package}, or leave {block} out",
                name=package,
            )


def monitors_of(config: Config) -> dict[str, Monitor]:
    """Return what the config asks for, by the name of its block."""
    made: dict[str, Monitor] = {}
    board, sheet, wandb = config.tensorboard, config.csv_monitor, config.wandb
    if board.enabled:
        made["tensorboard"] = TensorBoard(Path(board.output_path, board.job_name))
    if wandb.enabled:
        made["wandb"] = Wandb(project=wandb.project, group=wandb.group, entity=wandb.team)
    if sheet.enabled:
        made["csv_monitor"] = CsvFiles(Path(os.path.abspath(sheet.output_path), sheet.job_name))
    return made


class Reports:
    """Shows steps: each to monitors, some in the log.

    A monitor gets a step when the next one is over, so that the device never waits for it. One that
    fails is named in the log and left out; the training goes on.

    Args:
        monitors: by the names of their blocks.
        every: so many steps from one to the next that is logged; inf: none.
    """

    def __init__(self, monitors: dict[str, Monitor], every: float) -> None:
        self._monitors, self._every = monitors, every
        self._waiting: Step | None = None

    def logs(self, number: int) -> bool:
        """Tell whether a step is one that is logged."""
        return not math.isinf(self._every) and number % self._every == 0

    def add(self, step: Step) -> None:
        """Show a step that is over."""
        if self._monitors:
            self.flush()
            self._waiting = step
        if self.logs(step.number) and _log.isEnabledFor(logging.INFO):
            _log.info(sentence(step))

    def flush(self) -> None:
        """Give monitors the step that waits."""
        step, self._waiting = self._waiting, None
        if step is None:
            return
        events = {_PREFIX + _NAMES.get(n, n): value for n, value in step.numbers().items()}
        self._each(lambda monitor: monitor.write(events, step.samples))

    def close(self) -> None:
        """Flush, and close the monitors."""
        self.flush()
        self._each(lambda monitor: monitor.close())
        self._monitors = {}

    def _each(self, use: Any) -> None:
        for name, monitor in list(self._monitors.items()):
            try:
                use(monitor)
            except Exception as error:
                del self._monitors[name]
                _log.error(
                    "%s failed and gets no more metrics; the training goes on: %s: %s",
                    *(name, type(error).__name__, error),
                )

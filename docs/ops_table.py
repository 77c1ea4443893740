"""Write the table of docs/ops.md from the rows of the registry: `python docs/ops_table.py`.

It stands between `<!-- ops -->` and `<!-- end -->`. `--check` writes nothing, and fails if the page
has another one.
"""

import argparse
import re
import sys
from pathlib import Path
from types import FunctionType

import torch

from deepspeed_ext import ops
from deepspeed_ext.op_builder.registry import OPS, ROWS
from deepspeed_ext.op_builder.spec import OpSpec

PAGE = Path(__file__).parent / "ops.md"
_MARKED = re.compile(r"(<!-- ops -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def _functions(modules: tuple[str, ...]) -> list[str]:
    """Return the public functions and layers of modules, without references."""
    found = [name for name in ops.__all__ if ops._HOMES[name] in modules and "_ref" not in name]
    return [name for name in found if _is_called(getattr(ops, name))]


def _is_called(value: object) -> bool:
    return isinstance(value, FunctionType) or (
        isinstance(value, type) and issubclass(value, torch.nn.Module)
    )


def _sentence(name: str) -> str:
    """Return what the docstring of a function begins with."""
    first = (getattr(ops, name).__doc__ or "").split("\n\n")[0]
    return " ".join(first.split()).replace("|", "\\|").replace("``", "`")


def table() -> str:
    """Return the table: a line for each function, with what is promised and the libraries."""
    of_rows = [(row.libraries(), getattr(row, "bits", "step")) for row in ROWS]
    known = {spec for libraries, _ in of_rows for spec in libraries}
    of_rows += [((spec,), "") for spec in OPS if spec not in known]
    grouped: dict[tuple[str, ...], tuple[list[OpSpec], str]] = {}
    for libraries, bits in of_rows:
        grouped.setdefault(libraries[0].modules, ([], bits))[0].extend(libraries)
    lines = ["| function | what it does | bits | libraries |", "| --- | --- | --- | --- |"]
    for modules, (libraries, bits) in grouped.items():
        named = ", ".join(f"`{spec.name}`" for spec in libraries)
        for name in _functions(modules):
            lines.append(f"| `{name}` | {_sentence(name)} | {bits} | {named} |")
            named = "as above"
    return "\n".join(lines)


def replaced(text: str) -> str:
    """Return a page with the table between its marks."""
    return _MARKED.sub(lambda match: f"{match[1]}\n{table()}\n\n{match[3]}", text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, fail if it would")
    options = parser.parse_args()
    old = PAGE.read_text()
    new = replaced(old)
    if options.check and new != old:
        print(f"{PAGE} has another table; run: python docs/ops_table.py", file=sys.stderr)
        return 1
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())

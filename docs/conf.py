"""The site of the documents: `make docs` builds it of the pages that lie in the repository."""

import re
from collections.abc import Iterator

from sphinx.application import Sphinx

import deepspeed_ext

project = html_title = "deepspeed_ext"
version = release = deepspeed_ext.__version__
html_show_copyright = html_show_sourcelink = False
html_theme = "furo"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
include_patterns = ["*.md", "docs/**.md", "csrc/**.md", "deepspeed_ext/**.md"]
myst_heading_anchors = 4
default_role = "code"  # one pair of backticks, as in Markdown

# The tree beside each page; what the pages themselves link to needs none.
_TREE = {
    "Use": [
        *("docs/optimizers", "docs/offload", "docs/zero", "docs/engine", "docs/config"),
        *("docs/moe", "docs/layers", "docs/sparse-attention", "docs/random-ltd", "docs/patch"),
        *("docs/compat", "docs/io"),
        *(
            "docs/quantization",
            "docs/inference",
            "docs/inference-inputs",
            "docs/server",
            "docs/ops",
            "docs/environment",
            "docs/limits",
        ),
    ],
    "Reference": ["docs/api/*"],
    "Look inside": [
        *("docs/architecture", "docs/add-an-op", "docs/benchmarks", "docs/glossary"),
        *("csrc/README", "csrc/*/README", "deepspeed_ext/**/README"),
    ],
    "The project": ["*"],
}


def _add_tree(app: Sphinx, page: str, source: list[str]) -> None:
    if page != root_doc:
        return
    for caption, pages in _TREE.items():
        entries = "\n".join(pages)
        source[0] += f"\n```{{toctree}}\n:hidden:\n:glob:\n:caption: {caption}\n\n{entries}\n```\n"


# A name with an underscore behind it, and signs, mean something to Sphinx.
_QUOTED = re.compile(r"(`+[^`]+`+)")
_NAME = re.compile(r"(?<![\w.])[a-z]\w*_(?!\w)")


def _plain(line: str) -> str:
    parts = _QUOTED.split(line)
    for i in range(0, len(parts), 2):
        parts[i] = _NAME.sub(r"`\g<0>`", re.sub(r"[*|]", r"\\\g<0>", parts[i]))
    return "".join(parts)


def _shown(lines: list[str]) -> Iterator[str]:
    """Yield a docstring's lines for Sphinx: what stands apart and deeper is shown as it stands."""
    is_apart = is_example = False
    before = ""
    for line in lines:
        deeper = line.startswith("    ")
        if line and not deeper:
            is_apart = is_example = False
        if deeper and not is_apart and (before == "" or before == "Example:"):
            is_apart, is_example = True, before == "Example:"
            yield from ("    ::", "") if is_example else ("::", "")
        yield "    " * is_example + line if is_apart else _plain(line)
        before = line


def _show_docstring(
    app: Sphinx, kind: str, name: str, value: object, options: object, lines: list[str]
) -> None:
    lines[:] = _shown(list(lines))


def setup(app: Sphinx) -> None:
    """Let the first page have the tree, and docstrings be plain text that anybody can read."""
    app.connect("source-read", _add_tree)
    app.connect("autodoc-process-docstring", _show_docstring, priority=400)  # napoleon's is 500

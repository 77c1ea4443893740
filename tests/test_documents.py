"""Links lead to what is there, and what others run of this repository is what it says."""

import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "csrc/README.md"),
    "deepspeed_ext/inference/model/policies/README.md",
]


def anchors_of(text):
    """Return what headings are called in links: lower case, hyphens for spaces, no other signs."""
    headings = re.findall(r"^#+ +(.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(folder, text):
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if re.match(r"\w+:", path):
            continue  # of another place
        file = folder / path
        is_there = file.exists()
        if is_there and anchor:
            is_there = anchor in anchors_of(file.read_text() if path else text)
        if not is_there:
            yield target


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document):
    path = ROOT / document
    assert list(broken_links(path.parent, path.read_text())) == []


def test_broken_links_are_noticed():
    text = "# One: heading\n[a](#one-heading) [b](#two) [c](nowhere.md) [d](README.md#measured)"
    assert list(broken_links(ROOT, text)) == ["#two", "nowhere.md"]


def test_the_workflow_runs_what_everybody_can_run():
    (workflow,) = ROOT.glob(".github/workflows/*")
    assert re.search(r"^ +- run: .* \.ci/run$", workflow.read_text(), re.MULTILINE)
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_hooks_are_the_linters_of_make_lint():
    """They run what requirements/dev.txt pins, with no versions of their own."""
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    entries = re.findall(r"entry: (.*)", hooks)
    programs = {Path(entry.split()[0]).name for entry in entries}
    recipes = (ROOT / "Makefile").read_text()
    pinned = re.findall(r"^([\w-]+)==", (ROOT / "requirements" / "dev.txt").read_text(), re.M)
    assert programs == {*pinned, "make"} - {"torch", "mypy"}
    assert "make types" in entries and "mypy --strict" in recipes
    assert hooks.count("language: system") == len(entries) and "rev:" not in hooks
    for entry in entries:
        words = entry.replace(".venv/bin/", "").replace(" --force-exclude", "")
        assert entry == "make types" or words in recipes.replace("$(BIN)/", ""), entry


def test_templates_ask_for_the_report():
    templates = [path.read_text() for path in ROOT.glob(".github/ISSUE_TEMPLATE/[!c]*.yml")]
    assert templates and all("`ds_report --json`" in text for text in templates)

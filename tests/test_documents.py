"""Links in the documents lead to files and headings that are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "csrc/README.md"]


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

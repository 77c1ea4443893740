"""Links lead to what is there, what documents show runs, and what others run here is as it says."""

import os
import re
from pathlib import Path

import pytest
import torch
import warm_python

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
DOCUMENTS = sorted(
    {
        *PAGES,
        *ROOT.glob("*.md"),
        *ROOT.glob("csrc/**/*.md"),
        *ROOT.glob("deepspeed_ext/**/*.md"),
    }
)
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def anchors_of(text):
    """Return what headings are called in links: lower case, hyphens for spaces, no other signs."""
    headings = re.findall(r"^#+ +(.*)$", _FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(folder, text):
    for target in re.findall(r"\]\(([^)\s]+)\)", _FENCE.sub("", text)):
        path, _, anchor = target.partition("#")
        if re.match(r"\w+:", path):
            continue  # of another place
        file = folder / path
        is_there = file.exists()
        if is_there and anchor:
            is_there = anchor in anchors_of(file.read_text() if path else text)
        if not is_there:
            yield target


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(path):
    assert list(broken_links(path.parent, path.read_text())) == []


def test_broken_links_are_noticed():
    text = "# One: heading\n[a](#one-heading) [b](#two) [c](nowhere.md) [d](README.md#measured)"
    assert list(broken_links(ROOT, text)) == ["#two", "nowhere.md", "README.md#measured"]


def programs_of(text):
    """Return the Python programs of a page, each with all that comes before it in the same one.

    A block that imports begins a program; one that does not goes on with the one before it. So what
    a reader copies to try a block is what begins with the last import above it.
    """
    programs = []
    for language, code in _FENCE.findall(text):
        if language != "python":
            continue
        if re.search(r"^(import|from) ", code, re.MULTILINE) or not programs:
            programs.append(code)
        else:
            programs[-1] += code
    return programs


PROGRAMS = [
    pytest.param(code, id=f"{name_of(path)}-{number}")
    for path in PAGES
    for number, code in enumerate(programs_of(path.read_text()), 1)
]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """The folder of a small model, which programs find at path/to/model."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    letters = {chr(32 + i): i for i in range(95)} | {"?": 95}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("code", PROGRAMS)
def test_what_a_page_shows_runs(code, request, tmp_path):
    """In a folder of its own; as torchrun would start it where it asks for processes."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if "init_process_group" in code:
        store = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
        environment |= store
    if "path/to/model" in code:
        (tmp_path / "path" / "to").mkdir(parents=True)
        (tmp_path / "path" / "to" / "model").symlink_to(request.getfixturevalue("model_folder"))
    done = warm_python.run("-c", code, env=environment, cwd=tmp_path)
    assert done.returncode == 0, f"{code}\n{done.stdout}{done.stderr}"


def test_programs_begin_where_something_is_imported():
    blocks = (
        ("python", "import a"),
        ("text", "b"),
        ("python", "c()"),
        ("python", "from d import e"),
    )
    text = "\n".join(f"```{language}\n{code}\n```" for language, code in blocks)
    assert programs_of(text) == ["import a\nc()\n", "from d import e\n"]


def test_the_readme_is_short_and_shows_each_feature():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 200
    shown = "".join(programs_of(text))
    for feature in ("optim ", "offload", "zero", "io", "init_inference", "quantization"):
        assert feature.strip() in shown, feature


def test_headlines_are_figures_of_the_tables():
    """Each time and rate of the README stands on the page of benchmarks, too."""
    text = (ROOT / "README.md").read_text()
    headlines = text[text.index("## Headline") : text.index("## Limits")]
    rows = re.findall(r"^\| (?!---)(.*) \|$", headlines, re.MULTILINE)[1:]
    tables = (ROOT / "docs" / "benchmarks.md").read_text()
    assert len(rows) == 10
    ratios = [float(row.split(" | ")[-1]) for row in rows]
    assert min(ratios) < 1
    for row in rows:
        _, ours, theirs, ratio = row.split(" | ")
        values = [
            re.search(r"[\d,.]*\d(?= (?:ms|GB/s|tokens/s))", cell)[0] for cell in (ours, theirs)
        ]
        for value in values:
            assert re.search(rf"(?<![\d.,]){re.escape(value)}(?![\d.])", tables), (row, value)
        of_ours, of_theirs = (float(value.replace(",", "")) for value in values)
        quotient = of_theirs / of_ours if " ms" in ours else of_ours / of_theirs
        assert quotient == pytest.approx(float(ratio), rel=0.02), row


def test_the_table_of_ops_is_that_of_the_rows():
    done = warm_python.run(ROOT / "docs" / "ops_table.py", "--check", cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


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

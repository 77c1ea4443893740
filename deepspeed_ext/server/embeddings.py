"""/v1/embeddings: what texts mean, as vectors of length 1."""

import base64
import struct
from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
from starlette.requests import Request
from starlette.responses import JSONResponse
from torch import Tensor
from torch.nn import functional as F

from deepspeed_ext.inference.model.checkpoint_folder import ModelFolder
from deepspeed_ext.inference.serving.encoder_engine import EncoderEngine
from deepspeed_ext.server.errors import ApiError, wrong
from deepspeed_ext.server.fields import as_api_error
from deepspeed_ext.server.prompts import prompts_of, tokens_of
from deepspeed_ext.server.service import Service, while_connected

_FIELDS = ("model", "input", "encoding_format", "dimensions", "user")
_TOGETHER = 64  # texts whose hidden states are there at a time


class Pooling(Enum):
    """Which hidden states of a text become its vector."""

    MEAN = "the mean of all tokens"
    FIRST = "that of the first token"


def pooling_of(folder: ModelFolder) -> Pooling:
    """Return what a folder of sentence-transformers says; of others it is the mean.

    Raises:
        ValueError: it says something else.
    """
    said = folder.fields_of("1_Pooling/config.json")
    chosen = sorted(key for key, value in said.items() if value is True and "_mode_" in key)
    if chosen in ([], ["pooling_mode_mean_tokens"]):
        return Pooling.MEAN
    if chosen == ["pooling_mode_cls_token"]:
        return Pooling.FIRST
    raise ValueError(
        f"serve: 1_Pooling/config.json has {', '.join(chosen)}, expected pooling_mode_mean_tokens"
        " or pooling_mode_cls_token"
    )


async def embed(service: Service, given: dict[str, Any], request: Request) -> JSONResponse:
    """Answer a request for vectors."""
    encoder = service.encoder
    for name in given:
        if name not in _FIELDS:
            raise ApiError(400, f"{name} is no field that is known here", name, "unknown_field")
    form = given.get("encoding_format")
    if form not in (None, "float", "base64"):
        raise wrong("encoding_format", form, "'float' or 'base64'")
    width = encoder.encoder.of.hidden
    if given.get("dimensions") not in (None, width):
        raise wrong("dimensions", given["dimensions"], f"{width}, or null")
    prompts = prompts_of("input", given.get("input"), service.limits.completions)
    tokens = await tokens_of(service.tokenizer, prompts, "input")
    _check(tokens, encoder.encoder.limits.places)
    try:
        vectors = await while_connected(request, service.encoded(_vectors, tokens))
    except ValueError as error:
        raise as_api_error(error, "input") from None
    count = sum(map(len, tokens))
    service.metrics.tokens["prompt"] += count
    service.metrics.ends["stop"] += 1
    shown = _in_base64 if form == "base64" else list
    data = [
        {"object": "embedding", "index": i, "embedding": shown(vector)}
        for i, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": count, "total_tokens": count}
    return JSONResponse({"object": "list", "data": data, "model": service.name, "usage": usage})


def _check(tokens: Sequence[list[int]], most: int | None) -> None:
    for i, each in enumerate(tokens):
        if not each:
            raise ApiError(400, f"input {i} is empty, expected at least one token", "input")
        if most is not None and len(each) > most:
            raise ApiError(
                400,
                f"input {i} has {len(each)} tokens, expected at most {most}",
                "input",
                "context_length_exceeded",
            )


def _vectors(
    engine: EncoderEngine, pooling: Pooling, tokens: Sequence[list[int]]
) -> list[list[float]]:
    """Return a vector for each text.

    Raises:
        ApiError: one is not finite.
    """
    found = []
    for begin in range(0, len(tokens), _TOGETHER):
        some = tokens[begin : begin + _TOGETHER]
        longest = max(map(len, some))
        ids = torch.tensor([each + [0] * (longest - len(each)) for each in some])
        mask = torch.arange(longest) < torch.tensor([len(each) for each in some]).unsqueeze(1)
        states = engine(ids, mask).last_hidden_state
        found.append(F.normalize(_pooled(states.float().cpu(), pooling), dim=1))
    vectors = torch.cat(found)
    if not vectors.isfinite().all():
        raise ApiError(500, "a vector is not finite: a weight is not, or numbers became too large")
    values: list[list[float]] = vectors.tolist()
    return values


def _pooled(states: Tensor, pooling: Pooling) -> Tensor:
    # Padding is 0, and the sum points where the mean does.
    return states.sum(1) if pooling is Pooling.MEAN else states[:, 0]


def _in_base64(vector: Sequence[float]) -> str:
    """Return float32 values, the lowest byte first."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()

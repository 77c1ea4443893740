"""What encoders refuse: inputs, tables, and models that are not quite of their family."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from encoder_cases import PLACES, make

from deepspeed_ext.inference import init_inference
from deepspeed_ext.inference.__main__ import main
from deepspeed_ext.inference.model.policies.bert import ROBERTA
from deepspeed_ext.inference.model.policy import Windows

IDS = torch.ones(2, 3, dtype=torch.int64)
WRONG: tuple[tuple[tuple[Any, ...], str], ...] = (
    ((IDS[0],), "EncoderEngine: input_ids has shape [3], expected (texts, tokens)"),
    ((IDS.float(),), "EncoderEngine: input_ids has dtype torch.float32, expected int64 or int32"),
    ((IDS * 97,), "EncoderEngine: input_ids has 97, expected 0 to 96"),
    ((-IDS,), "EncoderEngine: input_ids has -1, expected 0 to 96"),
    (
        (IDS, IDS[:1]),
        "EncoderEngine: attention_mask has shape [1, 3], expected [2, 3], that of input_ids",
    ),
    ((IDS, IDS * 2), "EncoderEngine: attention_mask has 2, expected 0 or 1"),
    ((IDS, IDS * float("nan")), "EncoderEngine: attention_mask has nan, expected 0 or 1"),
    ((IDS, None, IDS * 2), "EncoderEngine: token_type_ids has 2, expected 0 to 1"),
    (
        (torch.ones(1, 81, dtype=torch.int64),),
        "EncoderEngine: input_ids has a token at position 80, expected at most 79",
    ),
)


@pytest.mark.parametrize(("inputs", "text"), WRONG, ids=lambda value: str(value)[:60])
def test_refused_inputs(inputs: tuple[Any, ...], text: str) -> None:
    engine = init_inference(make("bert"))
    with pytest.raises(ValueError) as caught:
        engine(*inputs)
    assert str(caught.value) == text


def test_lists_are_refused() -> None:
    with pytest.raises(TypeError) as caught:
        init_inference(make("bert"))([[1, 2]])
    assert str(caught.value) == "EncoderEngine: input_ids is a list, expected a tensor"


def test_the_last_position() -> None:
    """RoBERTa's positions begin behind the padding's; padding beyond the last one does no harm."""
    model = make("roberta")
    engine = init_inference(model)
    most = PLACES - 2
    ids = torch.ones(1, 200, dtype=torch.int64)  # 1 is the padding
    ids[:, :most] = 9
    want = engine(ids[:, :most]).last_hidden_state
    got = engine(ids, (ids != 1).long()).last_hidden_state
    assert torch.equal(got[:, :most], want) and not got[:, most:].any()
    with pytest.raises(ValueError, match="at position 199, expected at most 77"):
        engine(ids.clamp(min=2))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (dict(is_decoder=True), "is_decoder is True, expected False"),
        (
            dict(position_embedding_type="relative_key"),
            "position_embedding_type is 'relative_key', expected 'absolute'",
        ),
    ],
    ids=["is_decoder", "relative positions"],
)
def test_relatives_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as caught:
        init_inference(make("bert", **changes))
    place = "the table of model_type 'bert' has no place for it"
    assert str(caught.value) == f"init_inference: {text}: {place}"


@pytest.mark.parametrize("value", [-3, 97, 10**9, 1.0, 1.5, "1", True])
def test_a_padding_that_is_no_token(value: Any) -> None:
    model = make("roberta")
    model.config = model.config.to_dict() | dict(pad_token_id=value)
    with pytest.raises(ValueError) as caught:
        init_inference(model)
    assert str(caught.value) == (
        f"init_inference: pad_token_id is {value!r}, expected 0 to 96, the number of a token"
    )


def test_a_padding_behind_all_positions() -> None:
    model = make("roberta")
    model.config = model.config.to_dict() | dict(pad_token_id=PLACES - 1)
    with pytest.raises(ValueError) as caught:
        init_inference(model)
    assert str(caught.value) == (
        f"init_inference: embeddings.position_embeddings.weight has {PLACES} rows, expected"
        f" {PLACES + 1} or more, for 1 positions from row {PLACES} on, as config says"
    )


@pytest.mark.parametrize(
    ("name", "what"), [("kv_dtype", "keeps no keys and values"), ("quantize_head", "has no head")]
)
def test_arguments_that_mean_nothing_to_an_encoder(name: str, what: str) -> None:
    given: dict[str, Any] = {name: "int8"}
    with pytest.raises(ValueError) as caught:
        init_inference(make("bert"), **given)
    assert str(caught.value) == (
        f"init_inference: {name} is 'int8', expected None, as an encoder {what}"
    )


@pytest.mark.parametrize(
    ("changes", "names", "text"),
    [
        (dict(norm_place="before"), {}, "norm_place is 'before', expected 'after' of an encoder"),
        (dict(position="none"), {}, "position is 'none', expected 'learned' of an encoder"),
        (dict(parallel=True), {}, "parallel is True, expected False of an encoder"),
        (dict(softcap=30.0), {}, "softcap is 30.0, expected 0.0 of an encoder"),
        (dict(embedding_scale=2.0), {}, "embedding_scale is 2.0, expected 1.0 of an encoder"),
        (dict(windows=Windows(size=8)), {}, "windows is 8, expected 0 of an encoder"),
        (
            {},
            dict(q_norm="attention.output.LayerNorm"),
            "the table has a name for q_norm, expected none of an encoder with norm_place 'after'",
        ),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_tables_that_no_encoder_is_like(
    changes: dict[str, Any], names: dict[str, Any], text: str
) -> None:
    policy = replace(ROBERTA, names=replace(ROBERTA.names, **names), **changes)
    with pytest.raises(ValueError) as caught:
        init_inference(make("roberta"), policy=policy)
    assert str(caught.value) == f"init_inference: {text}"


def test_the_command_line_is_for_models_that_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make("bert").save_pretrained(tmp_path)
    capsys.readouterr()
    assert main([str(tmp_path), "--tokens", "1,2"]) == 2
    assert capsys.readouterr().err == (
        f"inference: {tmp_path} has an encoder, expected a model that writes text\n"
    )

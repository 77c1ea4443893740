"""More tokens than a model was made for, and a rule of positions that says it is finetuned."""

import logging
from pathlib import Path
from typing import Any

import pytest
import tiny_folder
import torch

from deepspeed_ext.inference.initialize import init_inference

YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)


def greedy(folder: Path, count: int) -> list[int]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    prompt = torch.tensor([[5, 6, 7]])
    made = model.generate(
        prompt, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    found: list[int] = made[0, 3:].tolist()
    return found


@pytest.mark.parametrize("changes", [{}, dict(rope_scaling=YARN | dict(finetuned=True))], ids=str)
def test_text_beyond_the_positions_is_that_of_transformers(
    tmp_path: Path, changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    config = dict(tiny_folder.CONFIG) | dict(max_position_embeddings=64) | changes
    config.pop("eos_token_id")
    folder = tiny_folder.write(tmp_path / "model", config)
    with caplog.at_level(logging.WARNING, "deepspeed_ext"):
        init_inference(folder)
        assert not caplog.records
        engine = init_inference(folder, max_tokens=160)
    assert [each.getMessage() for each in caplog.records] == [
        "init_inference: max_tokens is 160, more than the 64 positions that the model was made for:"
        " text beyond them is computed, as by transformers, and may be worse"
    ]
    found = engine.generate([5, 6, 7], max_new_tokens=120)
    assert found[0].tokens == greedy(folder, 120)


def test_finetuned_changes_nothing(tmp_path: Path) -> None:
    """Beside rules of which it is none, too; another name is still refused."""
    texts = []
    for i, more in enumerate(({}, dict(finetuned=True), dict(finetuned=False))):
        config = dict(tiny_folder.CONFIG) | dict(rope_scaling=YARN | more)
        engine = init_inference(tiny_folder.write(tmp_path / str(i), config))
        texts.append(engine.generate([5, 6, 7], max_new_tokens=30, stop_tokens=())[0].tokens)
    assert texts[0] == texts[1] == texts[2]
    config = dict(tiny_folder.CONFIG) | dict(rope_scaling=YARN | dict(fine_tuned=True))
    with pytest.raises(ValueError, match="rope_parameters has 'fine_tuned', expected nothing"):
        init_inference(tiny_folder.write(tmp_path / "other", config))

"""The page on tables of one's own: its code runs as it stands, and what it prints is as it says."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_ext.inference.initialize import init_inference
from deepspeed_ext.inference.model import policies

PAGE = (Path(policies.__file__).parent / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
CODE = [text for language, text in BLOCKS if language == "python"]


def test_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec(CODE[0], names)
    printed = capsys.readouterr().out.splitlines()
    (shown,) = (text for language, text in BLOCKS if not language)
    assert [
        line for line in printed if not re.search(r"layers\.[12]\.", line)
    ] == shown.splitlines()
    exec(CODE[1], names)
    with torch.no_grad():
        for parameter in names["model"].parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    exec(CODE[2], names)
    assert len(CODE) == 3


@pytest.mark.parametrize("change", ["use_qkv_bias", "qk_layernorm", "use_parallel_residual"])
def test_other_models_of_the_family(change: str) -> None:
    """Biases are read where they are; what the table does not know is refused by its name."""
    names: dict[str, Any] = {}
    exec(CODE[0].replace("    vocab_size", f"    {change}=True,\n    vocab_size"), names)
    exec(CODE[1], names)
    if change == "use_qkv_bias":
        with torch.no_grad():
            for parameter in names["model"].parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        exec(CODE[2], names)
        return
    with pytest.raises(ValueError, match=f"init_inference: {change} is True, expected False"):
        init_inference(names["model"], policy=names["STABLELM"])

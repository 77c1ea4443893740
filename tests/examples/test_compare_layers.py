"""examples.compare_layers: a small BERT with each kind of layer."""

import re
from pathlib import Path

import pytest
import torch

from examples import compare_layers
from examples.compare_layers import Bert, Layer, whole


def test_all_kinds_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare_layers.main(["--out", str(tmp_path), "--steps", "2"]) == 0
    losses = re.findall(r"^ +(.+?) +(\d\.\d{4})$", capsys.readouterr().out, re.MULTILINE)
    names = [name for name, _ in losses]
    assert names[4:] == ["whole layer", "BigBird", "random-LTD"] and len(names) == 7
    assert all(3 < float(loss) < 6 for _, loss in losses)
    assert (tmp_path / "layers.png").stat().st_size > 1000


def test_a_whole_layer_computes_what_the_plain_one_does() -> None:
    torch.manual_seed(0)
    layer = Layer().eval()
    for part in (layer.norm, layer.next_norm):
        torch.nn.init.normal_(part.weight)
        torch.nn.init.normal_(part.bias)
    x = torch.randn(2, 24, compare_layers.HIDDEN)
    torch.testing.assert_close(whole(layer).eval()(x), layer(x), rtol=1e-4, atol=1e-4)


def test_dropped_tokens_come_back_step_by_step() -> None:
    scheduler = compare_layers.dropping(Bert(), 100)
    kept = []
    for step in (1, 25, 50, 100):
        scheduler.update_seq(step)
        kept.append(scheduler.get_current_seq())
    assert kept == [64, 96, 128, 128]

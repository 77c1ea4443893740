"""The picture of one step of the model that offloaded steps are measured with."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.offload_contenders import FORMATS, NUMBERS
from benchmarks.offload_model import Size, make_data, make_model
from deepspeed_ext.offload import OffloadOptimizer, Timeline

_WARM_UP = 3
_RECORDED = 3  # of which the one in the middle is drawn
_FORWARD, _BACKWARD = "forward", "backward"
STEPS = _WARM_UP + _RECORDED


def draw(
    size: Size, device: str, form: str, path: Path, advance: Callable[[], object], where: Any
) -> None:
    """Take some steps and draw one of them.

    Args:
        size: of model and batch.
        device: "cpu" or "cuda".
        form: of the state.
        path: of the picture.
        advance: is called for each step.
        where: options that say where state rests.
    """
    model, data = make_model(size, device), make_data(size, device)
    numel = sum(param.numel() for param in model.parameters())
    options = NUMBERS | FORMATS[form] | where
    with OffloadOptimizer(model.parameters(), model=model, **options) as optimizer:

        def step(timeline: Timeline) -> None:
            with timeline.span(_FORWARD):
                loss = model(*data)
            with timeline.span(_BACKWARD):
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            advance()

        for _ in range(_WARM_UP):
            step(Timeline(optimizer))
        with Timeline(optimizer) as timeline:
            for _ in range(_RECORDED):
                step(timeline)
    begins = [span.begin for span in timeline.spans() if span.name == _FORWARD]
    title = f"{numel / 1e9:.2f} B parameters, {form} state, {size.batch * size.length:,} tokens"
    timeline.draw(path, title, window=(begins[1], begins[2]))

"""Steps as CUDA graphs."""

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from deepspeed_ext.inference.execution.graphs import Graphs


def doubled(graphs: Graphs, x: Tensor, before: Callable[[], object]) -> Tensor:
    def step() -> Tensor:
        before()
        return x * 2

    for _ in range(3):  # as it is, recorded, replayed
        out = graphs.run("double", step)
    return out


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.usefixtures("garbage_stays")
def test_graphs_that_nobody_has_may_go_while_another_is_recorded(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As engines do that were in a cycle, whenever Python collects them."""
    monkeypatch.setattr(torch.compiler.config, "force_cudagraph_gc", False)
    x = torch.arange(5.0, device=device)
    graphs = Graphs(x.device)
    doubled(graphs, x, int)
    cycle: list[object] = [graphs]
    cycle.append(cycle)
    del graphs, cycle

    def collect() -> None:
        if torch.cuda.is_current_stream_capturing():
            assert gc.collect() > 0

    assert doubled(Graphs(x.device), x, collect).tolist() == [0, 2, 4, 6, 8]

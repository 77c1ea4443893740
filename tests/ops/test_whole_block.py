"""Our ops together as blocks of a transformer: one graph, the bits of eager, and no more copies."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from small_gpt import Ours, SmallGpt
from torch import Tensor

VOCABULARY = 60
COPIES = ("aten::copy_", "aten::clone", "aten::contiguous", "aten::_to_copy")


def loss_and_gradients(
    function: Callable[[Tensor], Tensor], model: SmallGpt, tokens: Tensor
) -> list[Tensor]:
    loss = function(tokens)
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


def copies_of(
    function: Callable[[Tensor], Tensor], model: SmallGpt, tokens: Tensor
) -> tuple[Counter[str], list[str]]:
    """Count those that torch makes, and name those of our ops that had torch make one."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        loss_and_gradients(function, model, tokens)
    found = [event for event in profile.events() if event.name in COPIES]
    callers = [event.cpu_parent.name for event in found if event.cpu_parent is not None]
    return (
        Counter(event.name for event in found),
        [name for name in callers if name.startswith("deepspeed_ext::")],
    )


@pytest.mark.long
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend: str, device: str) -> None:
    """Inductor may take gradients of the embedding, and on CUDA of attention, in another order."""
    model = SmallGpt(Ours, VOCABULARY, seed=0).to(device)
    names = ["loss", *(name for name, _ in model.named_parameters())]
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    for batch, length in ((3, 42), (5, 24)):
        tokens = torch.arange(batch * length, device=device).view(batch, length).square() % 59
        got = loss_and_gradients(compiled, model, tokens)
        want = loss_and_gradients(model, model, tokens)
        for name, value, expected in zip(names, got, want, strict=True):
            if backend == "inductor" or device == "cuda":
                bound = 1e-5 * expected.abs().max().item()
                torch.testing.assert_close(value, expected, atol=bound, rtol=1e-4, msg=name)
            else:
                assert torch.equal(value, expected), name
        of_all, of_ours = copies_of(compiled, model, tokens)
        of_eager, _ = copies_of(model, model, tokens)
        assert of_all <= of_eager
        # The gradient of k comes by columns out of the product of matrices.
        assert of_ours in ([], ["deepspeed_ext::rope"])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1

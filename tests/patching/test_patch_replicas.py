"""Patched models in nn.DataParallel: each replica computes with its own parameters.

Torch makes replicas for GPUs alone; here its own code makes them on the CPU, with clones in the
place of copies that go to a GPU.
"""

import copy
import pickle
import sys
import threading
from typing import Any

import pytest
import torch
from patch_cases import batch, model_of
from torch import Tensor, nn
from torch.nn.parallel import replicate

from deepspeed_ext import patch, unpatch
from deepspeed_ext.patching.replaced import replaced_of

FAMILIES = ("Llama", "Gemma2", "Mixtral", "GPT2", "GPTNeoX")


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let parameters that go to replicas be multiplied by 1, 2 and so on."""

    def copies(tensors: list[Tensor], devices: list[Any], detach: bool = False) -> Any:
        return [[t * (1 + n) if t.requires_grad else t.clone() for t in tensors] for n in range(2)]

    monkeypatch.setattr(
        sys.modules["torch.nn.parallel.replicate"], "_broadcast_coalesced_reshape", copies
    )


def replicas_of(model: nn.Module) -> list[Any]:
    return replicate(model, [0, 1])


def with_weights_times(model: Any, factor: int) -> Any:
    """Return an unpatched copy."""
    made = copy.deepcopy(model)
    unpatch(made)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(factor)
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_replicas_compute_with_their_own_parameters(family: str) -> None:
    """And say so in gradients; those of the model are the sum."""
    # Transformers mixes up logits of routers that two threads ask for.
    options = dict(output_router_logits=False) if family == "Mixtral" else {}
    model, inputs = model_of(family, **options), batch()
    model.set_attn_implementation("eager")
    plain = [with_weights_times(model, factor) for factor in (1, 2)]
    report = patch(model)
    assert report.replaced[""] == ("linear_cross_entropy",)
    replicas = replicas_of(model)
    names = {name for name, _ in model.named_modules() if replaced_of(model.get_submodule(name))}
    assert len(names) > 6
    for replica in replicas:
        for name, module in replica.named_modules():
            found = replaced_of(module)
            assert (name in names) == (found is not None)
            assert found is None or found.module is module
    losses: list[Any] = [None, None]

    def work(number: int) -> None:
        losses[number] = replicas[number](**inputs)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each, found in zip(plain, losses, strict=True):
        assert found.logits is None
        want = each(**inputs).loss
        want.backward()
        torch.testing.assert_close(found.loss, want, atol=1e-5, rtol=1e-4)
        found.loss.backward()
    for (name, parameter), first, second in zip(
        model.named_parameters(), *(each.parameters() for each in plain), strict=True
    ):
        sum_of_both = first.grad + 2 * second.grad  # replicas are of parameters times 1 and 2
        scale = float(sum_of_both.abs().max())
        torch.testing.assert_close(
            parameter.grad,
            sum_of_both,
            atol=2e-5 * max(scale, 1),
            rtol=1e-4,
            msg=lambda text, name=name: f"{name}: {text}",
        )
    assert model(**inputs).logits is None
    with torch.no_grad():
        found = replicas[1].eval()(inputs["input_ids"]).logits
        torch.testing.assert_close(
            found, plain[1].eval()(inputs["input_ids"]).logits, atol=1e-4, rtol=1e-4
        )


def test_each_module_alone() -> None:
    """All that is replaced, as torch replicates it."""
    model = model_of("Llama")
    patch(model)
    norm = model.model.norm
    replica = norm._replicate_for_data_parallel()
    replica.weight = torch.full((32,), 7.0)
    x = torch.randn(2, 32)
    torch.testing.assert_close(replica(x), type(norm).forward(replica, x))
    again = replica._replicate_for_data_parallel()
    again.weight = torch.full((32,), 3.0)
    torch.testing.assert_close(again(x), type(norm).forward(again, x))
    unpatch(replica)
    assert "forward" not in vars(replica) and "forward" in vars(norm)


def test_copies_are_replicated_and_unpatched_models_too() -> None:
    model, inputs = model_of("Qwen2"), batch()
    before = [sorted(vars(module)) for module in model.modules()]
    patch(model)
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for module in each.modules():
            found = replaced_of(module)
            assert found is None or vars(module)["_replicate_for_data_parallel"].__self__ is found
        first, second = replicas_of(each)
        want = [with_weights_times(model, n)(**inputs).loss for n in (1, 2)]
        torch.testing.assert_close([r(**inputs).loss for r in (first, second)], want)
        unpatch(each)
        assert [sorted(vars(module)) for module in each.modules()] == before
    unpatch(model)
    for replica, loss in zip(replicas_of(model), want, strict=True):
        torch.testing.assert_close(replica(**inputs).loss, loss)


def test_a_forward_around_ours_is_refused() -> None:
    """It would call the one of the module, whose weights are another's."""
    model = model_of("Qwen2")
    patch(model)
    norm, ours = model.model.norm, model.model.norm.forward
    norm.forward = lambda x: ours(x) * 1
    sentence = "^patch: the forward of Qwen2RMSNorm has been put into another, expected ours alone"
    with pytest.raises(RuntimeError, match=sentence):
        replicas_of(model)
    unpatch(model)
    replicas_of(model)

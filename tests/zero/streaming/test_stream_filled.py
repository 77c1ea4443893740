"""Models without memory are streamed, and filled where they rest."""

import copy

import pytest
import torch
from safetensors.torch import save_file
from stream_cases import Model, assert_equal_models, loss_of, some_ids

from deepspeed_ext import offload, zero


def write_the_rest(module):
    """What no reset_parameters writes."""
    for name, param in module.named_parameters(recurse=False):
        if name == "scale" or name.isdecimal():
            param.fill_(0.25)


def trained(model, device):
    with offload.OffloadOptimizer(model.parameters(), model=model, lr=1e-2) as optimizer:
        for step in range(3):
            loss_of(model, some_ids(device, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


@pytest.mark.parametrize("files", [False, True])
def test_they_are_those_of_a_model_that_was_filled_first(device, rest, files, tmp_path):
    if files:
        saved = {n: p.detach() for n, p in Model().named_parameters() if "head" not in n}
        save_file(saved, tmp_path / "model.safetensors")
    options = {"files": tmp_path} if files else {"seed": 3, "init": write_the_rest}
    made = []
    for streamed in (True, False):
        with zero.Init(**options) as init:
            model = Model()
        if streamed:
            handle = zero.stream(model, to=device, **rest)
            assert model.words.weight.is_meta and model.layers[0].up.weight.device.type == "cpu"
            with pytest.raises(RuntimeError, match=r"^zero.stream: \d+ parameters that were on m"):
                model(some_ids(device, 0))
        init.fill(model, None if streamed else device)
        made.append(model)
    assert_equal_models(*made)
    stats = handle.stats()
    assert stats["disk_bytes"] == (stats["resting_bytes"] if rest else 0)
    assert made[0].words.weight.device.type == device
    assert made[0].head.weight is made[0].words.weight
    assert_equal_models(*(trained(model, device) for model in made))
    assert handle.stats()["disk_bytes"] == stats["disk_bytes"]


def test_values_by_load_state_dict(device, rest):
    kept = Model()
    with torch.device("meta"):
        model = Model()
    zero.stream(model, to=device, **rest)
    whole = copy.deepcopy(kept.state_dict())
    for name, param in model.named_parameters():
        if param.is_meta:
            at, _, last = name.rpartition(".")
            made = torch.nn.Parameter(whole[name].to(device))
            setattr(model.get_submodule(at), last, made)
    model.head.weight = model.words.weight
    model.load_state_dict(whole)
    assert_equal_models(model, kept)
    assert_equal_models(trained(model, device), trained(kept.to(device), device))

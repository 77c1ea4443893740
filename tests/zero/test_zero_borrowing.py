"""What is said of a weight that is used outside of its block: which it is, and what to do."""

import os
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

from deepspeed_ext.zero import borrowing

MIXED = "aten.mm.default: got mixed torch.Tensor and DTensor, need to convert all torch.Tensor"


def mix(*tensors: object) -> NoReturn:
    """What torch does, whose lines are not in the traceback."""
    raise RuntimeError(MIXED)


def model_of(*names: str) -> nn.Module:
    """A model with a Linear of each name, and weights of its own."""
    model = nn.Module()
    for name in names:
        owner = model
        for part in name.split("."):
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        owner.weight = nn.Parameter(torch.ones(2))
    model.scale = nn.Parameter(torch.ones(2))
    return model


@pytest.fixture(autouse=True)
def shards(monkeypatch: pytest.MonkeyPatch) -> list[nn.Parameter]:
    """Parameters that are not gathered: the weights of blocks."""
    found: list[nn.Parameter] = []
    monkeypatch.setattr(borrowing, "is_dtensor", lambda t: any(t is shard for shard in found))
    return found


def told(model: nn.Module, shards: list[nn.Parameter], forward: Any, *blocks: str) -> str:
    """Return what is added to the error of a forward."""
    shards += [p for block in blocks for p in model.get_submodule(block).parameters()]
    with pytest.raises(RuntimeError) as caught:
        forward(model)
    borrowing.name_borrowed(caught.value, model, blocks)
    text, _, added = str(caught.value).partition("\n")
    assert text == MIXED
    return added


def fault(name: str, block: str, fix: str) -> str:
    return (
        f"zero: parameter '{name}' is used outside of its block '{block}', which alone gathers it,"
        f" expected the block itself to use it; {fix}, and it is gathered with the model"
    )


def of_another(model: Any) -> None:
    mix(model.b.weight)


def with_one_of_another(model: Any) -> None:
    call(of_another, model, model.a.weight)


def call(function: Any, model: Any, weight: object) -> None:
    function(model)


def of_a_list(model: Any) -> None:
    weights = [model.a.weight]
    mix(weights)


def through_a_global(model: Any) -> None:
    global KEPT
    KEPT = model
    of_a_global()


def of_a_global() -> None:
    mix(KEPT.a.weight)


KEPT: Any = None


def beside_the_models_own(model: Any) -> None:
    mix(model.scale * 2, (model.scale + model.a.weight.detach()), [model.a.weight])


def beside_items_that_are_not_told(model: Any) -> None:
    """What would have to be run, is not there, or is no key."""
    rest, by_name, key = [1, 2], {"x": 1}, [3]
    mix(rest[1:], rest[len(key)], by_name["xy"[:1]], model.a.weight)


@pytest.mark.parametrize(
    "forward, name",
    [
        (of_another, "b.weight"),
        (with_one_of_another, "b.weight"),
        (of_a_list, "a.weight"),
        (through_a_global, "a.weight"),
        (beside_the_models_own, "a.weight"),
        (beside_items_that_are_not_told, "a.weight"),
    ],
)
def test_the_weight_of_the_line_that_failed(
    forward: Any, name: str, shards: list[nn.Parameter]
) -> None:
    """Not one of a line that has called it, nor one that is gathered."""
    block, others = name[0], [each for each in "abc" if each != name[0]]
    text = told(model_of("a", "b", "c"), shards, forward, "a", "b", "c")
    assert text == fault(name, block, f"leave the block out, as by blocks={others}")


class Holder(nn.Module):
    """Keeps modules and weights in whatever torch has for that."""

    def __init__(self) -> None:
        super().__init__()
        self.modules_ = nn.ModuleList([model_of(), model_of()])
        self.named = nn.ModuleDict({"x": model_of()})
        self.weights = nn.ParameterList([torch.ones(2), torch.ones(2)])
        self.by_name = nn.ParameterDict({"x": torch.ones(2)})


def of_a_list_of_modules(model: Any) -> None:
    mix(model.held.modules_[1].scale)


def of_a_dict_of_modules(model: Any) -> None:
    mix(model.held.named["x"].scale)


def of_a_list_of_weights(model: Any) -> None:
    mix(model.held.weights[1])


def of_a_dict_of_weights(model: Any) -> None:
    mix(model.held.by_name["x"])


@pytest.mark.parametrize(
    "forward, name",
    [
        (of_a_list_of_modules, "modules_.1.scale"),
        (of_a_dict_of_modules, "named.x.scale"),
        (of_a_list_of_weights, "weights.1"),
        (of_a_dict_of_weights, "by_name.x"),
    ],
)
def test_items_of_modules(forward: Any, name: str, shards: list[nn.Parameter]) -> None:
    model = nn.Module()
    model.held = Holder()
    text = told(model, shards, forward, "held")
    assert text == fault(f"held.{name}", "held", "leave the block out, as by blocks=[]")


def test_the_innermost_of_blocks_in_blocks(shards: list[nn.Parameter]) -> None:
    def forward(model: Any) -> None:
        mix(model.layers.one.weight)

    for blocks in (("layers", "layers.one"), ("layers.one", "layers")):
        text = told(model_of("layers.one"), shards, forward, *blocks)
        fix = "leave the block out, as by blocks=['layers']"
        assert text == fault("layers.one.weight", "layers.one", fix)


def test_blocks_whose_names_begin_alike(shards: list[nn.Parameter]) -> None:
    """As layer 1 and layer 10 do."""

    def forward(model: Any) -> None:
        mix(model.h.layer10.weight)

    model = model_of("h.layer1", "h.layer10")
    shards.append(model.get_parameter("h.layer10.weight"))
    text = (
        "zero: a module has used a parameter of a block that was not gathered, expected the block"
        " itself to use it; leave its block out of the blocks ['h.layer1'], and it is gathered with"
        " the model"
    )
    assert told(model, shards, forward, "h.layer1") == text


@pytest.mark.parametrize("count", [9, 10])
def test_of_many_blocks_not_all_are_listed(count: int, shards: list[nn.Parameter]) -> None:
    def forward(model: Any) -> None:
        mix(model.b0.weight)

    blocks = [f"b{i}" for i in range(count)]
    fix = f"leave the block out, as by blocks={blocks[1:]}"
    if count > 9:
        fix = "leave that block out of zero.shard's blocks="
    text = told(model_of(*blocks), shards, forward, *blocks)
    assert text == fault("b0.weight", "b0", fix)


def test_lines_that_cannot_be_read(shards: list[nn.Parameter]) -> None:
    """As of code that a program has made, or whose file has changed."""
    forward: dict[str, Any] = {"mix": mix}
    exec(compile("def forward(model):\n    mix(model.a.weight)\n", os.devnull, "exec"), forward)
    text = told(model_of("a"), shards, forward["forward"], "a")
    assert text.startswith("zero: a module has used a parameter of a block that was not gathered")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(borrowing.linecache, "getlines", lambda path: ["def broken(:\n"])
        assert told(model_of("a"), shards, lambda model: mix(model.a.weight), "a") == text


def test_other_errors_stay_as_they_are() -> None:
    error = RuntimeError("something else", 3)
    borrowing.name_borrowed(error, model_of("a"), ("a",))
    assert error.args == ("something else", 3)
    error = RuntimeError(MIXED, 3)
    borrowing.name_borrowed(error, model_of("a"), ("a",))
    assert error.args[0].startswith(f"{(MIXED, 3)}\nzero: a module") and error.args[1:] == (3,)

"""The state of a training in a checkpoint: what is taken of a model, and what is refused of it."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

from deepspeed_ext.optim import DeepSpeedCPUAdam
from deepspeed_ext.zero.checkpoint.training_state import (
    Targets,
    _ordered,
    check_extra,
    check_model,
    extra_of,
    options_of,
    state_of,
    take_extra,
    tensors_of,
)


def metadata_of(tensors: dict[str, Tensor]) -> Metadata:
    return Metadata(
        {
            name: TensorStorageMetadata(TensorProperties(dtype=t.dtype), t.shape, [])
            for name, t in tensors.items()
        }
    )


def stepped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


def test_state_that_is_no_tensor_is_refused() -> None:
    """It would be in no checkpoint, and a training that goes on without it another one."""
    model = nn.Linear(3, 2)
    optimizer: Any = stepped(torch.optim.SGD(model.parameters(), momentum=0.9))
    assert state_of("op", model, optimizer)[0].keys() == {
        "optimizer.weight.momentum_buffer",
        "optimizer.bias.momentum_buffer",
    }
    optimizer.state[model.bias]["calls"] = 3
    with pytest.raises(
        TypeError, match=r"^op: state 'calls' of 'bias' is a int, expected a tensor"
    ):
        state_of("op", model, optimizer)


@pytest.mark.parametrize("shape", [(3, 2), (6,), (2, 2), (2, 3, 1)])
def test_weights_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    model = nn.Linear(3, 2)
    saved = tensors_of("op", model)
    check_model("op", model, metadata_of(saved))
    text = rf"^op: 'weight' has shape \[{', '.join(map(str, shape))}\] in the checkpoint, expected"
    with pytest.raises(ValueError, match=text + r" \[2, 3\]$"):
        check_model("op", model, metadata_of(saved | {"model.weight": torch.ones(shape)}))


class Extra(nn.Module):
    """Has state beside its weight, in a form that has changed since, and an alias of the weight."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.extra: Any = [1]
        self.found: list[object] = []
        self.register_state_dict_post_hook(self._with_alias)

    @staticmethod
    def _with_alias(module: nn.Module, state: dict[str, Any], prefix: str, local: Any) -> None:
        state[f"{prefix}alias"] = state[f"{prefix}weight"]

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state

    def _load_from_state_dict(self, state: Any, prefix: str, local: Any, *rest: Any) -> None:
        self.found.append(local.get("version"))
        super()._load_from_state_dict(state, prefix, local, *rest)


def test_extra_state_comes_back_as_of_this_version() -> None:
    """Modules turn what has no version into what they were long ago."""
    first, second = (nn.Sequential(Extra(), nn.BatchNorm1d(2)) for _ in range(2))
    first[0].extra = {"count": 3, "last": torch.ones(2)}
    extra = extra_of(first)
    assert extra == {"0._extra_state": first[0].extra}, "an alias is no state of its own"
    take_extra(second, extra)
    assert second[0].extra == first[0].extra and second[0].found == [2]


def test_extra_state_of_one_side_only(caplog: pytest.LogCaptureFixture) -> None:
    check_extra("op", nn.Sequential(Extra()), {"0._extra_state": [2]})
    check_extra("op", nn.Linear(2, 2), {})
    with pytest.raises(
        ValueError, match=r"^op: only the model has the extra state '0\._extra_state"
    ):
        check_extra("op", nn.Sequential(Extra()), {})
    with pytest.raises(ValueError, match=r"^op: only the checkpoint has the extra state 'x', exp"):
        check_extra("op", nn.Linear(2, 2), {"x": 1})
    assert caplog.messages == []
    check_extra("op", nn.Sequential(Extra()), None)
    check_extra("op", nn.Linear(2, 2), None)
    assert caplog.messages == ["op: the checkpoint is of before ['0._extra_state'] was saved"]


GROUPS = ([["a", "b"], ["c"]], [["b", "a"], ["c"]])


@pytest.mark.parametrize("saved", GROUPS)
def test_parameters_of_a_group_in_any_order(saved: list[list[str]]) -> None:
    groups = [{"lr": i, "params": names} for i, names in enumerate(saved)]
    expected = [{"lr": 0, "params": [0, 1]}, {"lr": 1, "params": [2]}]
    assert _ordered("op", groups, GROUPS[0]) == expected


@pytest.mark.parametrize(
    "saved, where",
    [
        ([["a"], ["c"]], "group 0 has 'b' in the optimizer"),
        ([["a", "b", "d"], ["c"]], "group 0 has 'd' in the checkpoint"),
        ([["a", "b"], []], "group 1 has 'c' in the optimizer"),
        ([["a", "c"], ["b"]], "group 0 has 'b' in the optimizer"),
        ([["a", "b"]], "the checkpoint has 1 groups of parameters, expected 2"),
        ([["a", "b"], ["c"], []], "the checkpoint has 3 groups of parameters, expected 2"),
    ],
    ids=str,
)
def test_groups_with_other_parameters_are_refused(saved: Sequence[Any], where: str) -> None:
    """Some would be trained by the options of others."""
    groups = [{"lr": i, "params": names} for i, names in enumerate(saved)]
    with pytest.raises(ValueError, match=f"^op: {where}"):
        _ordered("op", groups, GROUPS[0])


def test_learning_rates_that_are_tensors_are_saved_as_numbers() -> None:
    """Which every optimizer takes."""
    group = {"lr": torch.tensor(0.5), "betas": (0.9, 0.99), "fused": None, "params": ["a"]}
    (made,) = options_of([group])
    assert made == group and type(made["lr"]) is float


def test_state_is_read_to_where_it_is_only_if_it_is_of_the_same_kind() -> None:
    """What is kept in fewer bits is rounded by the optimizer, at random, and not by a copy."""
    model = nn.Linear(3, 2)
    optimizer = stepped(DeepSpeedCPUAdam(model.parameters()))
    state, groups = state_of("op", model, optimizer)
    saved = metadata_of(tensors_of("op", model) | state)
    for dtype in (torch.float32, torch.bfloat16):
        own = stepped(DeepSpeedCPUAdam(model.parameters(), state_dtype=dtype))
        targets = Targets("op", model, own, groups, saved)
        for name, param in model.named_parameters():
            for key in ("exp_avg", "exp_avg_sq"):
                target, kept = targets.tensors[f"optimizer.{name}.{key}"], own.state[param][key]
                assert target.dtype == torch.float32 and target.shape == param.shape
                is_own = target.untyped_storage().data_ptr() == kept.untyped_storage().data_ptr()
                assert is_own == (dtype == torch.float32)


def test_state_of_another_class_of_torch_is_refused() -> None:
    model = nn.Linear(3, 2)
    state, groups = state_of("op", model, stepped(torch.optim.Adam(model.parameters())))
    saved = metadata_of(tensors_of("op", model) | state)
    Targets("op", model, torch.optim.AdamW(model.parameters()), groups, saved)
    with pytest.raises(ValueError, match=r"^op: SGD: state of params\[0\] has keys"):
        Targets("op", model, torch.optim.SGD(model.parameters(), momentum=0.9), groups, saved)

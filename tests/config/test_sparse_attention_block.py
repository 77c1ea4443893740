"""The block sparse_attention: a pattern for the model, by each mode's keys."""

import pytest
import torch

import deepspeed_ext.compat as deepspeed
from deepspeed_ext.config import read
from deepspeed_ext.ops import sparse_attention

ALL = {  # as DeepSpeed's documents show it: with the keys of every mode
    "block": 32,
    "different_layout_per_head": True,
    "num_local_blocks": 4,
    "num_global_blocks": 1,
    "attention": "bidirectional",
    "horizontal_global_attention": False,
    "num_different_global_patterns": 4,
    "num_random_blocks": 0,
    "local_window_blocks": [4],
    "global_block_indices": [0],
    "global_block_end_indices": None,
    "num_sliding_window_blocks": 3,
}
CLASSES = {
    "dense": sparse_attention.DenseSparsityConfig,
    "fixed": sparse_attention.FixedSparsityConfig,
    "variable": sparse_attention.VariableSparsityConfig,
    "bigbird": sparse_attention.BigBirdSparsityConfig,
    "bslongformer": sparse_attention.BSLongformerSparsityConfig,
}


@pytest.mark.parametrize("mode", CLASSES)
def test_each_mode_gives_its_pattern(mode):
    config = read({"train_batch_size": 8, "sparse_attention": {"mode": mode, **ALL}})
    given = config.sparse_attention.as_dict()
    assert given.pop("mode") == mode
    pattern = config.sparse_attention.sparsity_config(num_heads=4)
    assert type(pattern) is CLASSES[mode] and pattern.block == 32
    assert torch.equal(pattern.make_layout(512), CLASSES[mode](4, **given).make_layout(512))
    for name, value in given.items():
        assert getattr(pattern, name) == value
        assert value == ALL.get(name, 0) and set(given) <= {*ALL, "seed"}
    other = "config: sparse_attention.num_different_global_patterns acts nowhere: mode is "
    assert config.warnings[-1:] == (() if mode == "fixed" else (f'{other}"{mode}"',))


def test_what_is_said_acts():
    block = {
        "mode": "BigBird",
        "num_random_blocks": "2",
        "attention": "unidirectional",
        "seed": 5,
    }
    pattern = read({"sparse_attention": block}).sparse_attention.sparsity_config(2)
    want = sparse_attention.BigBirdSparsityConfig(
        2, num_random_blocks=2, attention="unidirectional", seed=5
    )
    assert torch.equal(pattern.make_layout(320), want.make_layout(320))
    block = {"mode": "variable", "local_window_blocks": [1, "3"], "global_block_indices": [2, 5]}
    block["global_block_end_indices"] = [3, 7]
    pattern = read({"sparse_attention": block}).sparse_attention.sparsity_config(2)
    assert pattern.local_window_blocks == [1, 3] and pattern.global_block_end_indices == [3, 7]
    assert read({}).sparse_attention is None
    assert read({"sparse_attention": {}}).sparse_attention.mode == "fixed"


def test_scripts_find_what_deepspeed_has():
    """A dict of the mode and its class's arguments, which is theirs to change."""
    given = {"train_batch_size": 8, "sparse_attention": {"mode": "bslongformer", **ALL}}
    config = deepspeed.DeepSpeedConfig(given)
    options = config.sparse_attention
    name = options.pop("mode")
    options["global_block_indices"].append(2)
    pattern = CLASSES[name](num_heads=2, **options)
    assert pattern.global_block_indices == [0, 2]
    assert deepspeed.DeepSpeedConfig(given).sparse_attention["global_block_indices"] == [0]
    assert deepspeed.DeepSpeedConfig({"train_batch_size": 8}).sparse_attention is None
    module = deepspeed.ops.sparse_attention
    assert module.matmul.MatMul is sparse_attention.MatMul
    assert module.FixedSparsityConfig is module.sparsity_config.FixedSparsityConfig


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ({"mode": "window"}, 'sparse_attention.mode is "window", expected one of "dense", "fixed"'),
        ({"blocks": 16}, "sparse_attention.blocks is no key, expected sparse_attention.block"),
        ({"local_window_blocks": 4}, "sparse_attention.local_window_blocks is 4, expected a list"),
        ({"local_window_blocks": [1.5]}, "sparse_attention.local_window_blocks is [1.5], expecte"),
        ({"attention": "both"}, 'sparse_attention.attention is "both", expected one of "bidirec'),
        (True, "sparse_attention is true, expected an object"),
    ],
)
def test_what_it_lacks_is_said_by_name(block, text):
    with pytest.raises(ValueError) as caught:
        read({"sparse_attention": block})
    assert str(caught.value).startswith(f"config: {text}")


def test_what_does_not_fit_together_is_said_when_it_is_asked_for():
    block = read({"sparse_attention": {"num_global_blocks": 3}}).sparse_attention
    with pytest.raises(ValueError, match=r"^FixedSparsityConfig: num_global_blocks is 3, expected"):
        block.sparsity_config(4)

"""Each key of the tree and each refusal, one by one."""

from pathlib import Path

import pytest

from deepspeed_ext.config import read
from deepspeed_ext.config.kinds import ANYTHING, DTYPE, FLAG, Effect
from deepspeed_ext.config.page import page
from deepspeed_ext.config.refusals import REFUSALS
from deepspeed_ext.config.tree import KNOWN_PARAMS, Root
from deepspeed_ext.config.walk import block_of, key_of

ROOT = Path(__file__).parents[2]
_AROUND = {"optimizer.": {"type": "Adam"}, "scheduler.": {"type": "WarmupLR"}}


def keys_below(block):
    for name, info in block.model_fields.items():
        inner = block_of(block, name)
        if inner is not None:
            yield from keys_below(inner)
        else:
            yield f"{block.place}{name}", key_of(block, name), info


KEYS = [pytest.param(*row, id=row[0]) for row in keys_below(Root)]
INERT = [each for each in KEYS if each.values[1].effect is not Effect.DOES]


def config_with(path, value):
    """Return a config with one key, and the type that its block needs."""
    *blocks, last = path.split(".")
    config = {"train_batch_size": 8}
    block = config
    for name in blocks:
        block[name] = dict(_AROUND.get(f"{name}.", {}))
        block = block[name]
    block[last] = value
    return config


def without(config, *path):
    """Return a config as a dict less one key."""
    values = config.model_dump()
    block = values
    for name in path[:-1]:
        block = block[name]
    del block[path[-1]]
    return values


def values_of(info):
    if FLAG in info.metadata:
        return True, False
    if ANYTHING in info.metadata:
        return True, {"enabled": True}, "x"
    if DTYPE in info.metadata:
        return "fp32", "float32"
    others = {"Warn": ("Fail",), "decoder": ("encoder",)}
    return others.get(info.default, (1, 7))


@pytest.mark.parametrize(("path", "key", "info"), INERT)
def test_a_key_that_changes_nothing_changes_its_warning_alone(path, key, info):
    names = [path, *(f"{path.rpartition('.')[0]}.{older}" for older in key.older)]
    first = path.split(".")
    plain = read(config_with(path, None))
    for name in names:
        for value in values_of(info):
            config = read(config_with(name, value))
            assert len(config.warnings) == 1
            assert config.warnings[0].startswith(f"config: {name} ")
            assert config.warnings[0].count(key.text) == 1
            assert without(config, *first) == without(plain, *first)


@pytest.mark.parametrize(("path", "key", "info"), KEYS)
def test_defaults_are_what_their_readers_read(path, key, info):
    """A default that is written out is the same as none, but for what has to be said of it."""
    if info.is_required() or info.default is None or path.endswith("params"):
        return
    config = read(config_with(path, info.default))
    plain = read(config_with(path, None))
    assert config.model_dump() == plain.model_dump()
    assert bool(config.warnings) == (key.effect is not Effect.DOES or "cpu_offload" in path)


def test_every_text_is_a_clause_of_its_own():
    texts = [each.values[1].text for each in KEYS]
    texts += [key.text for keys in KNOWN_PARAMS.values() for key in keys.values()]
    texts += [row.instead for row in REFUSALS]
    assert all(text and not text.endswith(".") for text in texts)


# What asks for a part that is not here, where neither true nor a block that is on does.
_ASKING = {
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": [0.5],
    "zero_optimization.zero_hpz_partition_size": [2, "8"],
    "zero_optimization.mics_shard_size": [2],
    "sequence_parallel_size": [2],
    "compile.passes": [["prefetch"]],
    "tensor_parallel": [{"autotp_size": 2}, {"enabled": True}],
    "compression_training": [{"a": {"b": {"enabled": "true"}}}],
    "optimizer.type": ["OneBitAdam", "zerooneadam", "Muon"],
    "data_types.grad_accum_dtype": ["bf16", "fp16", 1],
}
_IDLE = {
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": [0.8],
    "zero_optimization.zero_hpz_partition_size": [1, "1"],
    "zero_optimization.mics_shard_size": [-1, 1],
    "sequence_parallel_size": [1],
    "compile.passes": [[], None],
    "tensor_parallel": [{}, {"autotp_size": 1}, {"autotp_size": 0}],
    "compression_training": [{}, {"a": {"b": {"enabled": False}}}],
    "optimizer.type": ["Adam", "lion"],
    "data_types.grad_accum_dtype": [None],
}


@pytest.mark.parametrize("row", REFUSALS, ids=lambda row: f"{row.key}-{row.instead[:9]}")
def test_a_refusal_names_its_key_and_what_to_use(row):
    if row.expected.startswith("enabled false"):
        usual = [{"enabled": True}, {"enabled": "true", "more": 1}, True]
    else:
        usual = [True, "true", 1] if row.expected == "false" else [True]
    values = [value for value in _ASKING.get(row.key, usual) if row.asks(value)]
    assert values
    for value in values:
        with pytest.raises(ValueError) as caught:
            read(config_with(row.key, value))
        (sentence,) = str(caught.value).splitlines()
        assert sentence.startswith(f"config: {row.key} is ")
        assert sentence.endswith(f", expected {row.expected}; {row.instead}")


@pytest.mark.parametrize("row", REFUSALS, ids=lambda row: f"{row.key}-{row.instead[:9]}")
def test_what_asks_for_nothing_is_accepted(row):
    usual = [] if row.expected == "no such key" else [False, "false", 0]
    if row.expected.startswith("enabled false"):
        usual = [{}, {"enabled": False, "more": 1}, {"enabled": "false"}, False]
    for value in [None, *_IDLE.get(row.key, usual)]:
        if row.key == "optimizer.type" and value is None:
            continue
        assert read(config_with(row.key, value)).warnings == ()


def test_parameters_are_offloaded_in_stage_3_alone():
    for device in ("cpu", "nvme"):
        zero = {"stage": 2, "offload_param": {"device": device}}
        config = read({"zero_optimization": zero})
        key = "zero_optimization.offload_param.device"
        assert config.warnings == (f"config: {key} acts nowhere: it is for stage 3",)
        assert not config.offloads_params
        config = read({"zero_optimization": {**zero, "stage": 3}})
        assert config.warnings == () and config.offloads_params
    config = read({"zero_optimization": {"stage": 3, "cpu_offload_param": True}})
    (warning,) = config.warnings
    assert config.offloads_params and "is an old name; use" in warning
    zero = {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"ratio": 0.5}}
    (warning,) = read({"zero_optimization": zero}).warnings
    assert warning.endswith("offload_optimizer.ratio acts nowhere: parameters rest")


@pytest.mark.parametrize("block", ["offload_optimizer", "offload_param"])
def test_folders_are_paths(block):
    def read_with(path, device="nvme"):
        inner = {"device": device, "nvme_path": path}
        return read({"zero_optimization": {"stage": 3, block: inner}}).zero_optimization

    for path, told in ((5, "5"), (["a"], r'\["a"\]'), ("/a\0b", r'"/a\\u0000b"'), (b"/a", "")):
        for device in ("nvme", "cpu"):
            text = (
                rf"^config: zero_optimization\.{block}\.nvme_path is {told}.*, expected the path of"
            )
            with pytest.raises(ValueError, match=text):
                read_with(path, device)
    for path in ("/scratch", "here", ROOT, None):
        assert getattr(read_with(path), block).nvme_path == path
    text = (
        rf'^config: zero_optimization\.{block}\.nvme_path is "" beside device "nvme", expected the '
    )
    with pytest.raises(ValueError, match=text):
        read_with("")
    assert getattr(read_with("", "cpu"), block).nvme_path == ""


def test_old_names_may_stand_beside_what_they_mean():
    new = {"device": "CPU", "pin_memory": "true"}
    old = {"cpu_offload": "true", "cpu_offload_use_pin_memory": 1}
    config = read({"zero_optimization": {**old, "offload_optimizer": new}})
    zero = config.zero_optimization
    assert zero.offload_optimizer.device == "cpu" and zero.offload_optimizer.pin_memory is True
    with pytest.raises(ValueError, match=r"as zero_optimization\.cpu_offload_param is true$"):
        both = {"cpu_offload_param": True, "offload_param": {"device": "none"}}
        read({"zero_optimization": both})


def test_one_bit_optimizers_are_one_sentence():
    params = {"freeze_step": 100, "max_grad_norm": 1}
    for names in (("type", "params"), ("params", "type")):
        both = {"type": "OneBitAdam", "params": params}
        with pytest.raises(ValueError) as caught:
            read({"optimizer": {name: both[name] for name in names}})
        assert str(caught.value).count("config: ") == 1


def test_comments_are_of_any_kind_and_anywhere():
    config = read(
        {
            "_": [1],
            "Comment": {},
            "optimizer": {"type": "Adam", "params": {"_lr": 1, "comments": "", "lr": 1}},
        }
    )
    assert len(config.warnings) == 4 and dict(config.optimizer.params) == {"lr": 1}


def test_messages_of_optimizers_are_not_passed_on():
    params = {"lr": 1, "cuda_aware": True, "comm_backend_name": "nccl"}
    config = read({"optimizer": {"type": "Adam", "params": params}})
    assert dict(config.optimizer.params) == {"lr": 1} and len(config.warnings) == 2
    assert config.as_dict()["optimizer"]["params"] == params


def test_a_path_as_a_key_acts_nowhere():
    config = read({"train_batch_size": 1, "zero_optimization.reduce_bucket_size": 5})
    (warning,) = config.warnings
    assert warning.startswith("config: zero_optimization.reduce_bucket_size acts nowhere")


def test_the_page_is_that_of_the_tree():
    how = "run: python -m deepspeed_ext.config keys docs/config.md"
    assert (ROOT / "docs" / "config.md").read_text() == page(), how


def test_the_page_has_every_key():
    text = page()
    for path, key, _ in (each.values for each in KEYS):
        for name in (path.rpartition(".")[2], *key.older):
            assert f"`{name}`" in text
    assert all(f"| `{row.key}` |" in text for row in REFUSALS)

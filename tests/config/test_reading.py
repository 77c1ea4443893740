"""Where configs come from, and texts, numbers, "auto" and mistakes in them."""

import base64
import copy
import json
import math
import pickle
import sys
import types
from pathlib import Path

import pytest
import torch

from deepspeed_ext.config import Config, read
from deepspeed_ext.config.kinds import FrozenMapping

_CONFIG = {"train_batch_size": 8, "zero_optimization": {"stage": 2}}


def fails(source, *sentences):
    with pytest.raises(ValueError) as caught:
        read(source)
    assert type(caught.value) is ValueError
    assert str(caught.value).splitlines() == [f"config: {sentence}" for sentence in sentences]


@pytest.fixture(autouse=True)
def without_hjson(monkeypatch):
    """Whether it is installed is no matter of these tests."""
    monkeypatch.setitem(sys.modules, "hjson", None)
    monkeypatch.setattr("deepspeed_ext.config.reading.find_spec", lambda name: None)


def file_of(folder, text):
    path = folder / "ds.json"
    path.write_text(text)
    return path


def test_a_dict_a_file_and_base64_are_the_same(tmp_path):
    text = json.dumps(_CONFIG)
    path = file_of(tmp_path, text)
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    configs = [read(source) for source in (_CONFIG, path, str(path), encoded)]
    assert all(config == configs[0] for config in configs)
    assert configs[0].zero_optimization.stage == 2
    assert read(configs[0]) is configs[0]


def test_bytes_at_the_begin_that_windows_writes_are_no_matter(tmp_path):
    path = tmp_path / "ds.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(_CONFIG).encode())
    assert read(path).train_batch_size == 8


def test_base64_of_both_alphabets_is_read():
    text = json.dumps({"train_batch_size": 8, "_": "\N{LATIN SMALL LETTER Y WITH DIAERESIS}?>~"})
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        assert read(encode(text.encode()).decode()).train_batch_size == 8


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (3, "source is of type int, expected a dict, the path of a JSON file that is there, or"),
        ("no/such.json", 'source is "no/such.json", expected a dict, the path of a JSON file that'),
        ("", "source is the folder ., expected a dict, the path of a JSON file that is there, or"),
    ],
)
def test_other_sources_are_named(source, sentence):
    fails(source, f"{sentence}{'' if sentence.endswith('or') else ' is there, or'} base64 of JSON")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is empty, expected a JSON object"),
        (" \n", "is empty, expected a JSON object"),
        ("[1, 2]", "is [1, 2], expected a JSON object"),
        ('{"a": 1', 'has "" in line 1, column 8, expected JSON'),
        (
            '{\n  // batch\n  "train_batch_size": 8}',
            'has "// batch" in line 2, column 3, expected JSON without comments; take them out, or'
            " pip install hjson",
        ),
        (
            '{"train_batch_size": 8 # of all\n}',
            'has "# of all" in line 1, column 24, expected JSON without comments; take them out, or'
            " pip install hjson",
        ),
        ('{"train_batch_size": 8,}', 'has "}" in line 1, column 24, expected JSON'),
        ("[" * 100_000, "is nested too deep, expected a JSON object"),
    ],
)
def test_wrong_files_are_named(tmp_path, text, sentence):
    path = file_of(tmp_path, text)
    fails(path, f"{path} {sentence}")


def test_a_file_that_is_no_text_is_named(tmp_path):
    path = tmp_path / "ds.json"
    path.write_bytes(b"\xff\xfe{}")
    fails(path, f"{path} has invalid start byte, expected JSON in UTF-8")


@pytest.mark.parametrize("text", ['{"a": 1, "a": 1}', '{"fp16": {"a": 1, "b": 2, "a": 3}}'])
def test_a_key_that_is_twice_is_an_error(tmp_path, text):
    path = file_of(tmp_path, text)
    fails(path, f"a is twice in {path}, expected once")


def test_hjson_is_read_where_it_is(tmp_path, monkeypatch):
    seen = []
    stand_in = types.ModuleType("hjson")
    stand_in.loads = lambda text, object_pairs_hook: seen.append(text) or dict(_CONFIG)
    monkeypatch.setitem(sys.modules, "hjson", stand_in)
    monkeypatch.setattr("deepspeed_ext.config.reading.find_spec", lambda name: stand_in)
    text = "{train_batch_size: 8 # samples\n}"
    assert read(file_of(tmp_path, text)).train_batch_size == 8
    assert seen == [text]


def test_keys_are_texts():
    fails({"fp16": {1: True}}, "fp16 has the key 1, expected a text")


def test_nothing_of_the_source_is_shared():
    source = copy.deepcopy(_CONFIG) | {"optimizer": {"type": "Adam", "params": {"betas": [0, 1]}}}
    config = read(source)
    source["optimizer"]["params"]["betas"][0] = source["zero_optimization"]["stage"] = 3
    config.as_dict()["optimizer"]["params"]["lr"] = 1
    assert config.optimizer.params == FrozenMapping({"betas": (0, 1)})
    assert config.as_dict()["zero_optimization"] == {"stage": 2}
    assert config.as_dict()["optimizer"]["params"] == {"betas": [0, 1]}


def test_a_config_is_frozen_copied_and_pickled():
    config = read(_CONFIG)
    with pytest.raises(ValueError, match="frozen"):
        config.train_batch_size = 4
    with pytest.raises(ValueError, match="frozen"):
        config.zero_optimization.stage = 1
    for other in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert other == config and other.as_dict() == config.as_dict()


def test_arguments_are_frozen_and_passed_on():
    params = read(
        {"train_batch_size": 1, "optimizer": {"type": "Adam", "params": {"lr": 1, "a": {"b": [2]}}}}
    ).optimizer.params
    with pytest.raises(TypeError):
        params["lr"] = 2
    assert dict(**params)["lr"] == 1 and params["a"]["b"] == (2,) and len(params) == 2


@pytest.mark.parametrize(
    ("text", "value"), [("fp32", torch.float32), ("bfp16", torch.bfloat16), ("FP16", torch.float16)]
)
def test_dtypes_are_those_of_torch(text, value):
    config = read({"communication_data_type": text})
    assert config.communication_data_type is value
    assert config.as_dict() == {"communication_data_type": text}


def test_texts_are_read_as_what_they_say():
    given = {
        "train_batch_size": " 8 ",
        "steps_per_print": "Infinity",
        "fp16": {"enabled": "TRUE", "auto_cast": 0, "hysteresis": "2.0"},
        "optimizer": {"type": "SGD", "params": {"lr": "-1E-3", "foreach": "False", "a": "x"}},
    }
    config = read(given)
    assert config.train_batch_size == 8 and config.steps_per_print == math.inf
    assert config.fp16.enabled is True and config.fp16.auto_cast is False
    assert config.optimizer.params == FrozenMapping({"lr": -1e-3, "foreach": False, "a": "x"})
    assert config.as_dict() == {
        "train_batch_size": 8,
        "steps_per_print": math.inf,
        "fp16": {"enabled": True, "auto_cast": False, "hysteresis": 2},
        "optimizer": {"type": "SGD", "params": {"lr": -1e-3, "foreach": False, "a": "x"}},
    }
    assert type(config.as_dict()["fp16"]["hysteresis"]) is int


def test_sizes_may_be_fractions_that_others_have_computed():
    size = {"stage3_prefetch_bucket_size": 0.9 * 64 * 64, "reduce_bucket_size": "5e8"}
    zero = read({"zero_optimization": size}).zero_optimization
    assert zero.stage3_prefetch_bucket_size == 3686 and zero.reduce_bucket_size == 500_000_000


def test_null_is_no_key():
    config = read(
        {
            "train_batch_size": 8,
            "optimizer": None,
            "scheduler": {"type": None},
            "gradient_clipping": None,
            "fp16": None,
            "wall_clock_breakdown": None,
            "zero_optimization": {"stage": None, "offload_optimizer": None},
        }
    )
    assert config.optimizer is None and config.gradient_clipping == 0
    assert not config.is_set("gradient_clipping") and not config.is_set("fp16")
    assert config.warnings == ("config: scheduler acts nowhere: it has no type",)


def test_what_is_set_is_known_by_the_names_of_the_documents():
    config = read({"gradient_clipping": 0, "bfloat16": {"enabled": True}})
    assert config.is_set("gradient_clipping") and config.is_set("bf16.enabled")
    assert not config.is_set("fp16.enabled") and not config.is_set("train_batch_size")


def test_auto_is_the_default_where_a_key_changes_nothing():
    config = read({"zero_optimization": {"reduce_bucket_size": "auto", "overlap_comm": "auto"}})
    assert config.zero_optimization.reduce_bucket_size == 500_000_000
    assert config.warnings == ()
    assert not config.is_set("zero_optimization.reduce_bucket_size")


def test_every_other_auto_is_named_at_once_with_who_fills_it():
    config = {
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "fp16": {"enabled": "auto", "loss_scale": "auto"},
        "zero_optimization": {"stage": "auto", "reduce_bucket_size": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": ["auto", 0.9]}},
        "wall_clock_breakdown": "auto",
    }
    by_trainer = "train_batch_size, gradient_clipping, fp16.enabled"
    fails(
        config,
        "train_batch_size, gradient_clipping, fp16.enabled, fp16.loss_scale,"
        " zero_optimization.stage, optimizer.params.lr, optimizer.params.betas,"
        ' wall_clock_breakdown are "auto", expected a value for each:'
        f" Trainer or accelerate fills {by_trainer}, optimizer.params.lr, optimizer.params.betas;"
        " you fill fp16.loss_scale, wall_clock_breakdown;"
        " accelerate fills zero_optimization.stage",
    )
    fails(
        {"optimizer": {"type": "auto"}},
        'optimizer.type is "auto", expected a value for each: you fill optimizer.type',
    )


@pytest.mark.parametrize(
    ("config", "nearest"),
    [
        ({"train_batch_siz": 8}, "train_batch_siz is no key, expected train_batch_size"),
        ({"fp16": {"enable": True}}, "fp16.enable is no key, expected fp16.enabled"),
        (
            {"zero_optimization": {"overlap_com": True}},
            "zero_optimization.overlap_com is no key, expected zero_optimization.overlap_comm",
        ),
        ({"tensorbord": {}}, "tensorbord is no key, expected tensorboard"),
        ({"initial_scale_power": 8}, "initial_scale_power is no key, expected it as fp16.init"),
        (
            {"qqq": 1},
            "qqq is no key, expected a key that `python -m deepspeed_ext.config keys` lists",
        ),
    ],
)
def test_an_unknown_key_is_an_error_with_the_nearest(config, nearest):
    fails(config, nearest + ("ial_scale_power" if nearest.endswith("init") else ""))


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"train_batch_size": 0}, "train_batch_size is 0, expected a whole number, 1 or more"),
        ({"train_batch_size": 2.5}, "train_batch_size is 2.5, expected a whole number, 1 or more"),
        ({"train_batch_size": -4}, "train_batch_size is -4, expected a whole number, 1 or more"),
        ({"train_batch_size": True}, "train_batch_size is true, expected a whole number, 1 or"),
        (
            {"train_batch_size": math.nan},
            "train_batch_size is NaN, expected a whole number, 1 or more",
        ),
        (
            {"train_batch_size": "inf"},
            'train_batch_size is "inf", expected a whole number, 1 or more',
        ),
        ({"gradient_clipping": math.nan}, "gradient_clipping is NaN, expected a number, 0 or more"),
        ({"gradient_clipping": "nan"}, 'gradient_clipping is "nan", expected a number, 0 or more'),
        ({"gradient_clipping": -1}, "gradient_clipping is -1, expected a number, 0 or more"),
        ({"gradient_clipping": math.inf}, "gradient_clipping is Infinity, expected a number, 0 or"),
        ({"steps_per_print": 0}, "steps_per_print is 0, expected a number, above 0, or inf"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage is 4, expected a whole num"),
        ({"fp16": {"enabled": "yes"}}, 'fp16.enabled is "yes", expected true or false'),
        ({"fp16": {"enabled": 2}}, "fp16.enabled is 2, expected true or false"),
        ({"fp16": []}, "fp16 is [], expected an object"),
        ({"optimizer": "Adam"}, 'optimizer is "Adam", expected an object'),
        ({"optimizer": {"type": 3}}, "optimizer.type is 3, expected a text that is not empty"),
        (
            {"optimizer": {"type": "Adam", "params": [1]}},
            "optimizer.params is [1], expected an object",
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"lr": math.nan}}},
            "optimizer.params.lr is NaN, expected a number",
        ),
        (
            {"communication_data_type": "int8"},
            'communication_data_type is "int8", expected "fp32", "fp16" or "bf16"',
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "gpu"}}},
            'zero_optimization.offload_optimizer.device is "gpu", expected one of "none", "cpu"',
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"ratio": 1.5}}},
            "zero_optimization.offload_optimizer.ratio is 1.5, expected a number, 0 to 1",
        ),
        (
            {"zero_optimization": {"reduce_bucket_size": "big"}},
            'zero_optimization.reduce_bucket_size is "big", expected a number, 0 or more',
        ),
        (
            {"bf16": {}, "bfloat16": {}},
            "bfloat16 is given beside bf16, expected one of these names",
        ),
        (
            {"bf16": {"enabled": True}, "fp16": {"enabled": True}},
            "bf16.enabled is true beside fp16.enabled, expected one of them",
        ),
        (
            {
                "data_types": {"grad_accum_dtype": "fp32"},
                "communication_data_type": "bf16",
            },
            "data_types.grad_accum_dtype is torch.float32 beside communication_data_type torch.bf",
        ),
        (
            {
                "data_types": {"grad_accum_dtype": "fp32"},
                "bf16": {"enabled": True, "bf16_master_weights_and_grads": True},
            },
            "data_types.grad_accum_dtype is torch.float32 beside bf16.bf16_master_weights_and_gra",
        ),
        (
            {"bf16": {"enabled": True, "bf16_optimizer_states": True}},
            "bf16.bf16_optimizer_states is true, expected bf16.bf16_master_weights_and_grads true",
        ),
        (
            {"zero_optimization": {"leaf_module": {"names": ["a", 1]}}},
            'zero_optimization.leaf_module.names is ["a", 1], expected a list of texts that are no',
        ),
        (
            {"fp16": {"enabled": True, "min_loss_scale": 32, "initial_scale_power": 4}},
            "fp16.min_loss_scale is 32, expected at most 16, 2 to the power fp16.initial_scale_p",
        ),
        (
            {
                "zero_optimization": {
                    "cpu_offload": True,
                    "offload_optimizer": {"device": "none"},
                }
            },
            'zero_optimization.offload_optimizer.device is "none", expected "cpu", as'
            " zero_optimization.cpu_offload is true",
        ),
    ],
)
def test_values_that_do_not_fit_are_named(config, sentence):
    with pytest.raises(ValueError) as caught:
        read(config)
    assert str(caught.value).startswith(f"config: {sentence}")
    assert "\n" not in str(caught.value)


def test_nan_in_a_file_is_named(tmp_path):
    path = file_of(tmp_path, '{"gradient_clipping": NaN}')
    fails(path, "gradient_clipping is NaN, expected a number, 0 or more")


def test_all_that_is_wrong_is_said_at_once():
    fails(
        {"a_b_c_d": 1, "train_batch_size": 0, "amp": {"enabled": True}},
        "a_b_c_d is no key, expected a key that `python -m deepspeed_ext.config keys` lists",
        'amp is {"enabled": true}, expected enabled false; use bf16 or fp16',
        "train_batch_size is 0, expected a whole number, 1 or more",
    )


def test_long_values_are_cut():
    with pytest.raises(ValueError) as caught:
        read({"train_batch_size": "9" * 50 + "x" * 50})
    assert len(str(caught.value)) < 150


def test_the_package_does_not_import_pydantic():
    import subprocess

    code = "import sys, deepspeed_ext; print('pydantic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def test_a_config_is_read_without_torch():
    import subprocess

    code = (
        "import sys; from deepspeed_ext.config import read;"
        "read({'train_batch_size': 1}); print('torch' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert done.stdout == "False\n", done.stderr


def test_an_empty_config_is_a_config():
    config = read({})
    assert isinstance(config, Config) and config.warnings == () and config.as_dict() == {}

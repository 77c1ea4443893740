"""python -m deepspeed_ext.config check and keys."""

import json

import pytest
import torch
from configs_of_parts import SAMPLES
from safetensors.torch import save_file

from deepspeed_ext.config.__main__ import main
from deepspeed_ext.config.page import page

_NAMES = [name for name, sample in SAMPLES.items() if "Trainer" in name or sample.is_owned]


@pytest.fixture
def check(tmp_path, monkeypatch, capsys):
    def run(config, *arguments, columns=80):
        monkeypatch.setenv("COLUMNS", str(columns))
        path = tmp_path / "ds.json"
        path.write_text(config if isinstance(config, str) else json.dumps(config))
        status = main(["check", str(path), *arguments])
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


def test_each_key_has_its_value_and_effect(check):
    config = {"train_batch_size": 8, "fp16": {"enabled": False, "loss_scale": 128}, "_note": "x"}
    status, out, err = check(config, columns=100)
    assert (status, err) == (0, "")
    assert out.splitlines() == [
        "key               value  effect",
        "train_batch_size  8      samples in a step, over all processes",
        "fp16.enabled      false  as without it",
        "fp16.loss_scale   128    0: the scale of the loss follows overflows; else it is this",
        '_note             "x"    nowhere: a comment',
    ]


@pytest.mark.parametrize("columns", [30, 40, 80, 200])
@pytest.mark.parametrize("name", _NAMES)
def test_a_table_fits_the_terminal_and_loses_nothing(check, name, columns):
    status, out, err = check(SAMPLES[name].config, columns=columns)
    lines = out.splitlines()
    assert max(map(len, lines)) <= max(columns, 40)
    assert status == bool(SAMPLES[name].refused) and bool(err) == bool(SAMPLES[name].refused)
    first = lines[0].index("value")
    paths = "".join(line[:first].strip() for line in lines)
    assert all(each in paths for each in (*SAMPLES[name].warned, *SAMPLES[name].refused))


def test_a_refusal_is_a_sentence_and_a_row(check):
    status, out, err = check({"train_batch_size": 8, "graph_harvesting": True})
    assert status == 1
    instead = "call torch.compile on the model's blocks"
    assert err == f"config: graph_harvesting is true, expected false; {instead}\n"
    assert f"graph_harvesting  true   refused: {instead}" in out


def test_a_value_that_does_not_fit_is_a_sentence(check):
    status, _, err = check({"train_batch_size": 0})
    assert status == 1
    assert err == "config: train_batch_size is 0, expected a whole number, 1 or more\n"


def test_what_trainer_fills_is_open_and_all_other_auto_an_error(check):
    status, out, err = check({"train_batch_size": "auto", "bf16": {"enabled": "auto"}})
    assert (status, err) == (0, "")
    assert out.count("open: Trainer or accelerate fills it") == 2
    status, out, err = check({"train_batch_size": "auto", "fp16": {"loss_scale": "auto"}})
    assert status == 1 and "open: you fill it" in out
    assert (
        err.startswith('config: fp16.loss_scale is "auto", expected') and "train_batch" not in err
    )


def test_batch_sizes_are_those_of_so_many_processes(check):
    config = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}
    status, out, _ = check(config, "--processes", "8")
    assert status == 0
    assert out.endswith(
        "\non 8 processes a step is 64 samples: 2 micro-steps of 4 samples on each\n"
    )
    status, out, err = check(config, "--processes", "3")
    assert status == 1 and err.startswith("config: train_batch_size is 64, expected a multiple of")
    status, out, err = check(
        {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 4}, "--processes", "3"
    )
    assert (status, err) == (0, "") and "processes a step" not in out


def adam(**params):
    return {"optimizer": {"type": "AdamW", "params": params}, "train_batch_size": 8}


def test_options_of_optimizer_and_schedule_are_tried(check):
    assert check(adam(lr=1e-3))[0] == 0
    for config, text in (
        (
            adam(learning_rate=1e-3),
            "optimizer.params has 'learning_rate', expected one of adamw_mode",
        ),
        ({"optimizer": {"type": "AdamX"}}, "config check: optimizer.type is 'AdamX', expected one"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup": 3}}}, "scheduler.params: "),
        ({"scheduler": {"type": "Warmup"}}, "config check: scheduler.type is 'Warmup', expected"),
    ):
        status, _, err = check({"train_batch_size": 8} | config)
        assert status == 1 and text in err and err.count("\n") == 1, err
    for params in ({"lr": "auto"}, {"lr": "auto", "learning_rate": 1}):  # Trainer completes them
        assert check(adam(**params))[0] == 0
    schedule = {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}
    assert check({"train_batch_size": 8, "scheduler": schedule})[0] == 0


def test_a_model_in_a_folder_says_what_training_takes(check, tmp_path):
    shapes = {"embed.weight": (10, 6), "layers.0.w": (6, 8), "layers.1.w": (6, 9), "ids": (3,)}
    dtypes = {"ids": torch.int64}
    save_file(
        {name: torch.zeros(shape, dtype=dtypes.get(name)) for name, shape in shapes.items()},
        tmp_path / "model.safetensors",
    )
    folder = ("--model", str(tmp_path), "--processes", "2")
    config = adam(lr=1e-3) | {"zero_optimization": {"stage": 3}, "gradient_clipping": 1.0}
    status, out, err = check(config, *folder)
    assert (status, err) == (0, "")
    # 162 weights, 81 of which are here; two layers and the embedding, and twice the latter, which
    # is the largest that is reduced.
    assert out[out.index("162") :].splitlines() == [
        "162 parameters on 2 processes: each needs, beside activations, at most",
        "                               GPU        host        disk",
        "weights                      324 B",
        "gradients                    324 B",
        "exp_avg                      324 B",
        "exp_avg_sq                   324 B",
        "gathered weights             648 B",
        "gradients on their way       480 B",
        "a checkpoint, of all                              1.90 KiB",
        "total                     2.37 KiB                1.90 KiB",
    ]
    rests = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
    for more in ({}, {"offload_optimizer": {"device": "cpu"}}):
        block = rests["zero_optimization"] | more
        status, out, err = check(config | {"zero_optimization": block}, *folder)
        assert (status, err) == (0, "")
        lines = [line for line in out.splitlines() if line.startswith(("weights", "gradients  "))]
        assert [line.split()[1:] for line in lines] == [["324", "B"]] * 2
        assert all(line[23:36].isspace() for line in lines), lines  # none of it on the GPU
    status, _, err = check(config, "--model", str(tmp_path / "none"))
    assert status == 1 and str(tmp_path / "none") in err
    sparse = {"optimizer": {"type": "SparseAdam"}, "train_batch_size": 8}
    status, _, err = check(sparse, *folder)
    assert status == 1 and err.startswith("config check: optimizer.type is SparseAdam, whose step")
    status, _, err = check(adam(lr="inf"), *folder)
    assert status == 1 and "optimizer.params.lr is inf, expected a finite number" in err
    save_file({"ids": torch.zeros(3, dtype=torch.int64)}, tmp_path / "model.safetensors")
    status, _, err = check(config, *folder)
    assert status == 1 and "has no weights" in err
    status, _, err = check(adam(lr="auto"), *folder)
    assert status == 1 and "leaves nothing open by auto" in err


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_a_file_that_is_no_config_is_a_sentence(check, text):
    status, out, err = check(text)
    assert status == 1 and out == "" and err.startswith("config: ") and err.count("\n") == 1


def test_a_file_that_is_not_there_is_a_sentence(capsys, tmp_path):
    assert main(["check", str(tmp_path / "no.json")]) == 1
    expected = f"config: file is {tmp_path}/no.json, expected one that is there\n"
    assert capsys.readouterr().err == expected


def test_keys_are_printed_or_written(capsys, tmp_path):
    assert main(["keys"]) == 0
    assert capsys.readouterr().out == page()
    assert main(["keys", str(tmp_path / "config.md")]) == 0
    assert (tmp_path / "config.md").read_text() == page()

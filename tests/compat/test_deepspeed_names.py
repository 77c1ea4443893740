"""DeepSpeed's names are there, each in its module, or say what to use instead."""

import argparse
import importlib
import logging
from functools import partial

import pytest
import torch
from torch import nn
from zero_cases import Block, Net

import deepspeed_ext.compat as deepspeed
from deepspeed_ext import op_builder, optim
from deepspeed_ext.compat.modules import found
from deepspeed_ext.compat.names import ALL, HERE, MODULES_NOT_HERE, NAMES_NOT_HERE
from deepspeed_ext.zero.blocks import blocks_of


def test_all_names_are_there_and_in_dir():
    count = 0
    for path, homes in HERE.items():
        module = importlib.import_module(f"deepspeed_ext.compat.{path}".rstrip("."))
        for home, names in homes.items():
            for name in names.split() if names != ALL else ():
                value = getattr(importlib.import_module(home), name)
                assert getattr(module, name) is value or name == "__compatible_ops__"
                assert name in dir(module)
                count += 1
    assert count > 90
    assert deepspeed.ops.adam.DeepSpeedCPUAdam is optim.DeepSpeedCPUAdam
    assert deepspeed.comm.get_rank is torch.distributed.get_rank
    assert deepspeed.runtime.lr_schedules.WARMUP_MIN_LR == "warmup_min_lr"
    assert "WarmupLR" in deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES
    with pytest.raises(AttributeError, match=r"deepspeed\.utils\.nothing is no name"):
        _ = deepspeed.utils.nothing
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("deepspeed_ext.compat.nothing")


def test_other_names_say_what_to_use():
    for path in MODULES_NOT_HERE:
        module = importlib.import_module(f"deepspeed_ext.compat.{path}")
        sentence = rf"^compat: deepspeed\.{path}\.Thing is not here; {MODULES_NOT_HERE[path]}$"
        with pytest.raises(ImportError, match=sentence):
            _ = module.Thing
        assert not hasattr(module, "__file__")
    for whole in NAMES_NOT_HERE:
        path, _, name = whole.rpartition(".")
        with pytest.raises(ImportError, match="is not here; "):
            found(path, name)
    with pytest.raises(ImportError, match=r"PipelineModule is not here; .*pipelining"):
        exec("from deepspeed_ext.compat.pipe import PipelineModule")


def test_arguments_and_configs():
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", "a.json"])
    assert args.deepspeed and args.deepspeed_config == "a.json"
    config = deepspeed.DeepSpeedConfig(
        {"train_batch_size": 8, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 2}}
    )
    assert (config.train_micro_batch_size_per_gpu, config.zero_optimization_stage) == (4, 2)
    assert not config.fp16.enabled and config.zero_enabled
    with pytest.raises(deepspeed.DeepSpeedConfigError):
        deepspeed.DeepSpeedConfig({"train_batch_sise": 8})
    model, config = nn.Linear(2, 2), {"train_batch_size": 1}
    with pytest.raises(ValueError, match="mpu is a object, expected None"):
        deepspeed.initialize(model=model, config=config, mpu=object())
    with pytest.raises(ValueError, match="config_params is given beside config"):
        deepspeed.initialize(model=model, config=config, config_params=config)
    with pytest.raises(RuntimeError, match="dist_init_required is False"):
        deepspeed.initialize(model=model, config_params=config, dist_init_required=False)


def test_other_launchers_are_not_taken_for_one_process(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(RuntimeError, match="OMPI_COMM_WORLD_SIZE is 4 and RANK is not set"):
        deepspeed.init_distributed()


def test_conveniences(caplog):
    loader = deepspeed.utils.RepeatingLoader([1, 2])
    assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1]
    with pytest.raises(StopIteration):
        next(deepspeed.utils.RepeatingLoader([]))
    with caplog.at_level(logging.INFO, logger="deepspeed_ext"):
        deepspeed.utils.log_dist("in all", ranks=[-1])
        deepspeed.utils.log_dist("not here", ranks=[1])
        deepspeed.runtime.utils.see_memory_usage("not forced")
        deepspeed.runtime.utils.see_memory_usage("now", force=True)
    assert [r.message.split(" has")[0] for r in caplog.records] == [
        "[rank 0] in all",
        "now: the process",
    ]
    deepspeed.runtime.utils.set_random_seed(3)
    first = torch.rand(2)
    deepspeed.runtime.utils.set_random_seed(3)
    assert torch.equal(first, torch.rand(2))
    with deepspeed.OnDevice(dtype=torch.bfloat16):
        weight = nn.Linear(2, 2).weight
    assert weight.is_meta and weight.dtype == torch.bfloat16
    assert torch.get_default_dtype() == torch.float32
    tensor = torch.ones(3)
    copies = deepspeed.checkpoint.utils.clone_tensors_for_torch_save({"a": [tensor, (2, tensor)]})
    assert torch.equal(copies["a"][0], tensor) and copies["a"][1][0] == 2
    assert copies["a"][0].data_ptr() != tensor.data_ptr()
    moved = deepspeed.runtime.utils.move_to_device({"a": tensor, "b": 1}, "meta")
    assert moved["a"].is_meta and moved["b"] == 1
    assert deepspeed.comm.inference_all_reduce is torch.distributed.all_reduce
    fp16 = deepspeed.runtime.precision_config.DeepSpeedFP16Config
    assert fp16(enabled=True, loss_scale="8").loss_scale == 8
    with pytest.raises(ValueError, match="loss_scale_window"):
        fp16(enabled=True, loss_scale_window=0)
    assert fp16(enabled=False, loss_scale_window=0).loss_scale_window == 0
    assert fp16(enabled=True, loss_scale=8, min_loss_scale="-1").min_loss_scale == -1
    zero = deepspeed.runtime.zero.config
    read = zero.DeepSpeedZeroConfig(
        stage=2,
        prefetch_bucket_size=8,
        stage3_gather_fp16_weights_on_model_save=True,
        cpu_offload_param=True,
        leaf_module={"names": "experts"},
    )
    assert read.stage == 2 and read.offload_param.device == "cpu"
    assert read.prefetch_bucket_size == read.stage3_prefetch_bucket_size == 8
    assert read.gather_16bit_weights_on_model_save and not hasattr(read, "gather_all")
    assert isinstance(read.offload_param, zero.DeepSpeedZeroOffloadParamConfig)
    leaves = deepspeed.runtime.zero.leaf_module_config
    assert read.leaf_module.names == ["experts"]
    assert read.leaf_module.classes == leaves.DEFAULT_LEAF_MODULE_CLASSES
    read.leaf_module.classes.clear()
    assert zero.DeepSpeedZeroConfig().leaf_module.classes
    with pytest.raises(ValueError, match=r"\.stages is no key, expected zero_optimization\.stage"):
        zero.DeepSpeedZeroConfig(stages=2)
    assert deepspeed.ops.__compatible_ops__.keys() >= {"cpu_adam", "async_io"}
    assert deepspeed.ops.op_builder.CPUAdamBuilder is op_builder.CPUAdamBuilder


def test_the_accelerator_is_torchs():
    accelerator = deepspeed.get_accelerator()
    assert accelerator is deepspeed.accelerator.get_accelerator()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    assert accelerator.device_name() == kind
    assert torch.device(accelerator.current_device_name()).type == kind
    assert accelerator.device_count() >= 1 and accelerator.is_available()
    assert accelerator.memory_allocated() >= 0
    accelerator.empty_cache()
    accelerator.synchronize()
    accelerator.manual_seed(1)
    state = accelerator.get_rng_state()
    first = torch.rand(2)
    accelerator.set_rng_state(state)
    assert torch.equal(first, torch.rand(2)) or kind == "cuda"
    tensor = torch.ones(2, device=kind)
    assert accelerator.on_accelerator(tensor)
    assert accelerator.create_op_builder("CPUAdamBuilder").NAME == "cpu_adam"
    with pytest.raises(AttributeError, match="has no 'nothing'"):
        _ = accelerator.nothing


def test_activations_are_computed_again():
    checkpointing = deepspeed.checkpointing
    assert not checkpointing.is_configured()
    for name in ("synchronize", "profile"):
        with pytest.raises(ValueError, match=f"{name} is True, expected False"):
            checkpointing.configure(None, **{name: True})
    block = {"profile": True}
    with pytest.raises(ValueError, match="profile is True"):
        checkpointing.configure(None, {"train_batch_size": 1, "activation_checkpointing": block})
    assert not checkpointing.is_configured()
    mpu = argparse.Namespace(
        get_model_parallel_world_size=lambda: 1, get_model_parallel_rank=lambda: 0
    )
    checkpointing.configure(mpu, partition_activations=True)
    assert checkpointing.is_configured()
    checkpointing.reset()
    calls = []

    def layer(x, gain):
        calls.append(1)
        return (x * gain).relu()

    x = torch.tensor([1.0, -2.0], requires_grad=True)
    checkpointing.checkpoint(layer, x, gain=3.0).sum().backward()
    assert x.grad.tolist() == [3, 0] and len(calls) == 2
    checkpointing.model_parallel_cuda_manual_seed(5)
    tracker = checkpointing.get_cuda_rng_tracker()
    state = tracker.get_states()
    draw = partial(torch.rand, 2, device="cuda" if torch.cuda.is_available() else "cpu")
    outside = torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.get_rng_state()
    with tracker.fork():
        first = draw()
    there = torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.get_rng_state()
    assert torch.equal(outside, there)
    with tracker.fork():
        second = draw()
    tracker.set_states(state)
    with tracker.fork():
        assert torch.equal(first, draw()) and not torch.equal(first, second)
    with pytest.raises(ValueError, match="name is 'other', expected one of"), tracker.fork("other"):
        pass
    with pytest.raises(ValueError, match="expected one that is free"):
        tracker.add("model-parallel-rng", 1)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

    def forward(self, x):
        return self.experts[0](x)


def test_leaf_modules_are_one_block():
    model = nn.Module()
    model.layer, model.head = Experts(), nn.Linear(2, 2)
    assert list(blocks_of(model, None)) == [f"layer.experts.{i}" for i in range(3)]
    marked = deepspeed.utils.set_z3_leaf_modules(model, ["Experts"])
    assert marked == deepspeed.utils.get_z3_leaf_modules(model) == [model.layer]
    assert deepspeed.utils.z3_leaf_module(model.layer)
    assert list(blocks_of(model, None)) == ["layer"]
    assert deepspeed.utils.unset_z3_leaf_modules(model, [Experts]) == [model.layer]
    assert len(blocks_of(model, None)) == 3
    with pytest.raises(ValueError, match=r"leaf_module_classes is \['Other'\], expected"):
        deepspeed.utils.set_z3_leaf_modules(model, ["Other"])
    named = deepspeed.utils.set_z3_leaf_modules_by_name
    by_end = deepspeed.utils.set_z3_leaf_modules_by_suffix
    assert named(model, ["layer", "no"], raise_if_not_found=False) == ([model.layer], ["no"])
    with pytest.raises(ValueError, match=r"module_names has \['no'\], expected those of"):
        named(model, ["layer", "no"], flag=False)
    assert deepspeed.utils.get_z3_leaf_modules(model) == [model.layer]
    assert by_end(model, ["yer"], flag=False) == ([model.layer], [])
    assert deepspeed.utils.get_z3_leaf_modules(model) == []


def test_whole_weights_of_a_checkpoint(tmp_path):
    names = deepspeed.utils.zero_to_fp32
    model = Net()
    config = {"train_batch_size": 1, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    engine, *_ = deepspeed.initialize(model=model, config=config)
    wanted = {name: p.full_tensor().cpu() for name, p in model.named_parameters()}
    engine.save_checkpoint(tmp_path / "run")
    plain = names.load_state_dict_from_zero_checkpoint(engine.module, tmp_path / "run")
    tokens = torch.ones(1, 3, dtype=torch.int64)
    assert type(plain) is Net and type(plain.blocks[0]) is Block
    assert all(torch.equal(p, wanted[name]) for name, p in plain.named_parameters())
    assert plain.head.weight is plain.embedding.weight is not engine.module.head.weight
    assert [p.requires_grad for p in plain.parameters()] == [
        p.requires_grad for p in model.parameters()
    ]
    close = {"rtol": 0.05, "atol": 0.05}  # of weights used in bfloat16
    found = engine(tokens.to(engine.device)).cpu().float()
    torch.testing.assert_close(plain(tokens), found, **close)
    initialized, *_ = deepspeed.initialize(model=plain, config=config)  # as a new one
    assert torch.equal(initialized(tokens.to(engine.device)).cpu().float(), found)
    initialized.destroy()
    engine.destroy()
    state = names.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "run")
    assert state.keys() == {*wanted, "head.weight"}
    assert state["head.weight"] is state["embedding.weight"]  # tied, and whole for load_state_dict
    assert all(torch.equal(state[name], wanted[name]) for name in wanted)
    Net(seed=2).load_state_dict(state)
    other = names.load_state_dict_from_zero_checkpoint(Net(seed=1), tmp_path / "run")
    assert all(torch.equal(p, wanted[name]) for name, p in other.named_parameters())
    with pytest.raises(ValueError, match=r"expected the same parameters"):
        names.load_state_dict_from_zero_checkpoint(nn.Linear(2, 2), tmp_path / "run")
    names.convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "run", tmp_path / "bin")
    read = torch.load(tmp_path / "bin" / "pytorch_model.bin")
    assert all(torch.equal(read[name], wanted[name]) for name in wanted)
    names.convert_zero_checkpoint_to_fp32_state_dict(
        tmp_path / "run", tmp_path / "safe", max_shard_size="1GB", safe_serialization=True
    )
    assert [path.name for path in (tmp_path / "safe").iterdir()] == ["model.safetensors"]
    for size in ("5", "GB", "x GB"):
        with pytest.raises(ValueError, match="max_shard_size is"):
            names.convert_zero_checkpoint_to_fp32_state_dict(
                tmp_path / "run", tmp_path / "none", size, safe_serialization=True
            )
    for name in ("exclude_frozen_parameters", "lazy_mode"):
        with pytest.raises(ValueError, match=f"{name} is True, expected False"):
            names.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "run", **{name: True})


def test_files_of_a_checkpoint_of_deepspeeds(tmp_path):
    names = deepspeed.utils.zero_to_fp32
    for rank in (10, 2, 0):
        for kind in ("optim", "model"):
            (tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt").touch()
    ranks = [tmp_path / f"zero_pp_rank_{rank}_mp_rank_00" for rank in (0, 2, 10)]
    assert names.get_optim_files(tmp_path) == [f"{rank}_optim_states.pt" for rank in ranks]
    assert names.get_model_state_files(tmp_path) == [f"{rank}_model_states.pt" for rank in ranks]
    assert names.get_model_state_file(tmp_path, 3) == f"{ranks[0]}_model_states.pt"
    with pytest.raises(FileNotFoundError, match=r"has no files mp_rank_00_model_states\.pt, expec"):
        names.get_model_state_file(tmp_path, 2)

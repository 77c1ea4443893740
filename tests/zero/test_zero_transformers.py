"""transformers in stage 3: it asks for zero.Init by itself, and never has a whole model."""

import contextlib
import importlib.machinery
import sys
import types

import pytest
import torch
import torch.distributed as dist
from processes import Case
from torch import nn
from zero_cases import whole

import deepspeed_ext
from deepspeed_ext.compat import zero as compat
from deepspeed_ext.compat.engine import DeepSpeedEngine
from deepspeed_ext.zero.rows import RowsParameter

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
}


ASKED = []  # how Init was asked for


class Asked(compat.Init):
    def __init__(self, *args, **kwargs):
        ASKED.append((args, kwargs))
        super().__init__(*args, **kwargs)


class Stage3:
    """What a Trainer keeps of a config."""

    config = CONFIG

    def is_zero3(self):
        return True


def module(name, **members):
    made = types.ModuleType(name)
    made.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(made).update(members)
    return made


@contextlib.contextmanager
def stage_3():
    """What of DeepSpeed transformers imports, and a config of stage 3 in the process.

    Accelerate imports a class of engines, too, where a deepspeed is installed.
    """
    from transformers.integrations import deepspeed as integration

    accelerator = types.SimpleNamespace(current_device_name=lambda: "cpu")
    partition = module(
        "deepspeed.runtime.zero.partition_parameters",
        zero_wrapper_for_fp_tensor_constructor=None,
        _orig_torch_arange=torch.arange,
    )
    runtime_zero = module("deepspeed.runtime.zero", partition_parameters=partition)
    zero = types.SimpleNamespace(Init=Asked, GatheredParameters=compat.GatheredParameters)
    modules = [
        module("deepspeed", zero=zero, comm=dist, DeepSpeedEngine=DeepSpeedEngine),
        module("deepspeed.accelerator", get_accelerator=lambda: accelerator),
        module("deepspeed.runtime", zero=runtime_zero),
        runtime_zero,
        partition,
    ]
    held = Stage3()
    there = {n: m for n, m in sys.modules.items() if n.partition(".")[0] == "deepspeed"}
    sys.modules.update({each.__name__: each for each in modules})
    integration.set_hf_deepspeed_config(held)  # which keeps a weak reference
    try:
        assert integration.is_deepspeed_zero3_enabled()
        yield
    finally:
        integration.unset_hf_deepspeed_config()
        for each in modules:
            del sys.modules[each.__name__]
        sys.modules.update(there)


def small(tied):
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=37,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
        num_labels=3,
        pad_token_id=0,
    )


def assert_same(ours, theirs):
    with compat.GatheredParameters(ours.parameters()):
        for (name, a), (of, b) in zip(
            ours.named_parameters(), theirs.named_parameters(), strict=True
        ):
            assert (name, a.dtype) == (of, b.dtype) and torch.equal(a.cpu(), b.cpu()), name
    for (name, a), b in zip(ours.named_buffers(), theirs.buffers(), strict=True):
        assert torch.equal(a.cpu(), b.cpu()), name


def loads(row, folder):
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    tied = row == "tied"
    rank, path = dist.get_rank() if dist.is_initialized() else 0, folder / f"{row}model"
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(small(tied))
    if rank == 0:
        plain.save_pretrained(path)
    ASKED.clear()
    torch.manual_seed(rank)
    with stage_3():
        drawn = AutoModelForCausalLM.from_config(small(tied))
        assert ASKED == [((), {"config_dict_or_path": CONFIG})]
        dist.barrier()
        model = AutoModelForCausalLM.from_pretrained(path)
        labelled = AutoModelForSequenceClassification.from_pretrained(path)
        halved = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        for each in (drawn, model, labelled, halved):
            assert all(type(param) is RowsParameter for param in each.parameters())
        with pytest.raises(RuntimeError, match="holds its rows only"):
            drawn.save_pretrained(folder / "of_rows")
        resized = AutoModelForCausalLM.from_pretrained(path)
        resized.resize_token_embeddings(41)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert_same(model, plain)
    assert_same(labelled.model, plain.model)  # and a head that no file has
    assert_same(halved, AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16))
    with compat.GatheredParameters([drawn.lm_head.weight, labelled.score.weight]):
        for weight in (drawn.lm_head.weight, labelled.score.weight):
            assert 0.01 < weight.std() < 0.04
            everywhere = weight.detach().clone()
            dist.broadcast(everywhere, 0)
            assert torch.equal(weight, everywhere)
    rows = resized.model.embed_tokens.weight.detach().clone()
    dist.broadcast(rows, 0)
    assert torch.equal(resized.model.embed_tokens.weight, rows)
    assert torch.equal(rows[:37].cpu(), plain.model.embed_tokens.weight.cpu())
    assert resized.lm_head.weight.shape == (41, 16)
    engines = [deepspeed_ext.initialize(model=each, config=CONFIG)[0] for each in (model, plain)]
    tokens = torch.arange(1, 9, device=engines[0].device)[None] + rank
    for _ in range(2):
        losses = []
        for engine in engines:
            losses.append(engine(tokens, labels=tokens).loss)
            engine.backward(losses[-1])
            engine.step()
        assert torch.equal(*losses)
    compat.know(model)
    with compat.GatheredParameters(model.parameters()):  # another number of steps in each process
        out = model.generate(tokens, max_new_tokens=2 + 2 * rank, min_new_tokens=2 + 2 * rank)
        assert out.shape == (1, 10 + 2 * rank)
        assert all(type(param) is nn.Parameter for param in model.parameters())
    for ours, theirs in zip(*(engine.parameters() for engine in engines), strict=True):
        assert torch.equal(whole(ours), whole(theirs))


CASES = [Case(2, "loads", row) for row in ("tied", "apart")]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.function}-{c.row}-{c.world}")
def test_processes(case, groups):
    groups.run(case)


def test_one_process_without_a_group(tmp_path):
    """Init makes the group."""
    assert not dist.is_initialized()
    try:
        loads("tied", tmp_path)
    finally:
        dist.destroy_process_group()

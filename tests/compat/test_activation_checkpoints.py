"""deepspeed.checkpointing and the block activation_checkpointing: where inputs rest meanwhile."""

import argparse

import pytest
import torch
import torch.distributed as dist
from processes import Case
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepspeed_ext
from deepspeed_ext.compat import activations
from deepspeed_ext.config import read

MANY = 1 << 18  # elements of 1 MiB: fewer stay
BLOCK = {"cpu_checkpointing": True}


@pytest.fixture
def as_before():
    yield
    vars(activations._settings).clear()


def test_inputs_rest_in_host_memory(as_before):
    config = {"train_batch_size": 1, "activation_checkpointing": BLOCK}
    for arguments in ({"checkpoint_in_cpu": True}, {"deepspeed_config": config}):
        activations.configure(None, **arguments)
        x = torch.ones(MANY, requires_grad=True)
        y = activations.checkpoint(lambda x: x.sin().exp(), x * 1)
        stats = activations._settings.device.stats()
        assert stats["bytes"] == 4 * MANY
        y.sum().backward()
        torch.testing.assert_close(x.grad, x.cos() * x.sin().exp())
    activations.configure(None, {**config}, checkpoint_in_cpu=False)
    assert activations._settings.device is None


def test_the_same_numbers_are_drawn_from_the_tracker(as_before):
    activations.model_parallel_cuda_manual_seed(5)
    tracker = activations.get_cuda_rng_tracker()
    for settings in ({}, {"checkpoint_in_cpu": True}):
        activations.configure(None, **settings)
        x = torch.ones(1000, requires_grad=True)

        def drop(x):
            with tracker.fork():
                return nn.functional.dropout(x.sin(), 0.5).square()

        y = activations.checkpoint(drop, x)
        behind = tracker.get_states()["model-parallel-rng"].clone()
        y.sum().backward()
        torch.testing.assert_close(x.grad, torch.where(y > 0, 8 * x.sin() * x.cos(), 0.0))
        assert torch.equal(tracker.get_states()["model-parallel-rng"], behind)
    tracker.reset()


def share_out(row, folder):
    """Of Megatron's processes each keeps a part, on the device or in host memory."""
    world, rank = dist.get_world_size(), dist.get_rank()
    prefix = "get_tensor_model_parallel_" if row == "newer" else "get_model_parallel_"
    known = {"world_size": world, "rank": rank, "group": dist.group.WORLD}
    mpu = argparse.Namespace(**{prefix + name: lambda v=v: v for name, v in known.items()})
    block = {"partition_activations": True, "cpu_checkpointing": row == "newer"}
    config = {"train_batch_size": 1, "activation_checkpointing": block}
    activations.configure(mpu, config)
    leaf = torch.linspace(-1, 1, 3 * MANY).requires_grad_()
    y = activations.checkpoint(lambda x: x.sin().exp(), leaf * 1)
    stats = activations._settings.device.stats()
    # With `checkpoint_in_cpu` parts leave; otherwise they stay, and are counted as such.
    assert stats["bytes" if row == "newer" else "stayed"] == 4 * -(-3 * MANY // world)
    y.sum().backward()
    torch.testing.assert_close(leaf.grad, leaf.cos() * leaf.sin().exp())
    activations.model_parallel_cuda_manual_seed(5)
    with activations.get_cuda_rng_tracker().fork():
        drawn = torch.rand(3)
    seen = [torch.empty_like(drawn) for _ in range(world)]
    dist.all_gather(seen, drawn)
    assert not torch.equal(seen[0], seen[1])
    activations.get_cuda_rng_tracker().reset()
    activations.configure(None)


@pytest.mark.parametrize("row", ["older", "newer"])
def test_model_parallel_processes_share_inputs_out(groups, row):
    groups.run(Case(2, "share_out", row))


class Net(nn.Module):
    """Checkpoints of both kinds, and one that is compiled or plain."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(512, 512) for _ in range(3))
        self.use_reentrant = use_reentrant

    def forward(self, x):
        x = self.first(x).exp()  # is saved, and stays
        x = checkpoint(self._middle, x, use_reentrant=self.use_reentrant)
        return self.last(x).square().mean()

    def _middle(self, x):
        return self.second(nn.functional.gelu(x))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_initialize(use_reentrant):
    found = []
    for block in ({}, BLOCK):
        torch.manual_seed(0)
        config = {
            "train_batch_size": 1,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "activation_checkpointing": block,
        }
        engine, *_ = deepspeed_ext.initialize(model=Net(use_reentrant), config=config)
        for _ in range(2):
            loss = engine(torch.linspace(-1, 1, 512 * 512).view(512, 512))
            if block:
                assert engine._saved.stats()["bytes"] == 4 * MANY
            engine.backward(loss)
            engine.step()
        assert engine._saved is None or engine._saved.stats()["bytes"] == 0
        found.append([p.detach().clone() for p in engine.module.parameters()])
        engine.destroy()
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.long
def test_models_of_transformers():
    """Also those that are told to make checkpoints when the engine is there."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2}
    small = LlamaConfig(vocab_size=32, num_attention_heads=2, **sizes)
    ids = torch.arange(2048).view(8, 256) % 32
    found = []
    for is_kept in (False, True):
        torch.manual_seed(0)
        config = {
            "train_batch_size": 1,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "activation_checkpointing": {"cpu_checkpointing": is_kept},
        }
        engine, *_ = deepspeed_ext.initialize(model=LlamaForCausalLM(small), config=config)
        engine.gradient_checkpointing_enable()
        loss = engine(input_ids=ids, labels=ids).loss
        if is_kept:
            assert engine._saved.stats()["bytes"] == 2 * 4 * MANY
        engine.backward(loss)
        found.append([p.grad.clone() for p in engine.module.parameters()])
        engine.destroy()
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_what_is_compiled_decides_itself():
    given = {
        "train_batch_size": 1,
        "activation_checkpointing": BLOCK,
        "compile": {"disable": False},
    }
    (warning,) = read(given).warnings
    assert "cpu_checkpointing acts nowhere in what torch.compile compiles" in warning

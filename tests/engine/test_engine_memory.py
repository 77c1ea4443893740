"""What `config check --model` says is what an engine of that config has."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from processes import Case
from torch import Tensor, nn

import deepspeed_ext
from deepspeed_ext.config import read
from deepspeed_ext.config.memory import needs_of
from deepspeed_ext.dtensors import local

ROWS = {
    "adam": {"type": "AdamW", "params": {"lr": 1e-2}},
    "lamb": {"type": "Lamb", "params": {"lr": 1e-2}},
    "torch's": {"type": "RMSprop", "params": {"momentum": 0.9}},
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 7)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x).square().mean()


def has(row, folder):
    stage, optimizer, precision, device = row.split("-")
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": int(stage), "offload_optimizer": {"device": device}},
        "optimizer": ROWS[optimizer],
        precision: {"enabled": True},
    }
    model = Net()
    weights = {name: param.detach().to("meta") for name, param in model.named_parameters()}
    needs = needs_of(read(config), weights, dist.get_world_size())
    engine = deepspeed_ext.initialize(model=model, config=config)[0]
    for _ in range(2):
        engine.backward(engine(torch.arange(10)))
        grads = sum(local(param.grad).nbytes for param in engine.parameters())
        engine.step()
    state: Counter[str] = Counter()
    for entry in engine.optimizer.state.values():
        for key, value in entry.items():
            if isinstance(value, Tensor) and value.dim():
                state[key] += local(value).nbytes
    there = needs.host if device == "cpu" else needs.gpu
    if dist.get_rank() == 0:  # which has most rows
        assert needs.gpu["weights"] == sum(local(param).nbytes for param in engine.parameters())
        assert needs.gpu["gradients"] == grads
        said = Counter({key: size for key, size in there.items() if key in state})
        between = 256 * len(weights) if device == "cpu" else 0  # of parameters in a slab
        assert state <= said <= state + Counter(dict.fromkeys(state, between)), (said, state)
        shares = dist.get_world_size() if stage != "0" else 1
        params = list(engine.parameters())
        whole = sum(param.numel() * param.element_size() for param in params)
        assert 0 <= needs.disk - whole - shares * said.total() < 64  # counts of steps


def streams(row, folder):
    """Weights of one process that come block by block, from host memory or a disk."""
    optimizer, precision, device = row.split("-")
    rest = {"device": device, "nvme_path": str(folder) if device == "nvme" else None}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "offload_param": rest},
        "optimizer": ROWS[optimizer],
        precision: {"enabled": True},
    }
    model = Net()
    weights = {name: param.detach().to("meta") for name, param in model.named_parameters()}
    needs = needs_of(read(config), weights, dist.get_world_size())
    engine = deepspeed_ext.initialize(model=model, config=config)[0]
    engine.backward(engine(torch.arange(10)))
    engine.step()
    stream = engine.module._zero_stream.stats()
    resting = needs.scratch if device == "nvme" else needs.host
    assert resting["weights at rest"] == stream["resting_bytes"] == 2 * 2 * (6 * 6 + 6)
    assert stream["disk_bytes"] == (stream["resting_bytes"] if device == "nvme" else 0)
    of_all = sum(param.nbytes for param in engine.parameters())
    assert needs.gpu["weights"] == of_all - stream["resting_bytes"]
    assert needs.gpu["blocks on the GPU"] == stream["resting_bytes"]
    state: Counter[str] = Counter()
    for entry in engine.optimizer.state.values():
        for key, value in entry.items():
            if isinstance(value, Tensor) and value.dim():
                state[key] += value.nbytes
    said = Counter({key: size for key, size in needs.host.items() if key in state})
    assert state <= said <= state + Counter(dict.fromkeys(state, 256 * len(weights))), said
    assert "master_param" in state


CASES = [
    *(Case(1, "streams", f"adam-bf16-{device}") for device in ("cpu", "nvme")),
    *(
        Case(2, "has", row)
        for row in ("2-adam-bf16-none", "3-lamb-bf16-none", "0-torch's-bf16-none")
    ),
    *(Case(2, "has", row) for row in ("1-adam-bf16-cpu",)),
    Case(1, "has", "2-torch's-bf16-none"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.function}-{c.row}-{c.world}")
def test_processes(case, groups):
    groups.run(case)

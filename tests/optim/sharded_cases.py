"""What the tests of sharded parameters share: the classes, models, training, comparison."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from deepspeed_ext.optim import (
    DeepSpeedCPUAdagrad,
    DeepSpeedCPUAdam,
    DeepSpeedCPULion,
    FusedAdagrad,
    FusedAdam,
    FusedLamb,
    FusedLion,
    FusedRMSprop,
    FusedSGD,
    HybridAdam,
    Lars,
)


@dataclass(frozen=True)
class Row:
    """A class to try with sharded parameters; a further class is one more row of ROWS.

    Attributes:
        make: the class.
        device: "cpu" or "cuda", where the processes compute; with one GPU for each on CUDA.
        ways: "sharded" on that device, "offload" to host memory by CPUOffloadPolicy, or both; by
            what the class takes.
        options: keyword arguments of its constructor. Keep eps large where there is one: it keeps
            the rounding of small gradients, which differs with the sharding, from being blown up.
        elementwise: each element is stepped by itself, so that sharding changes no bit. False where
            a norm is taken of the parameter, as in LAMB.
    """

    make: Callable[..., torch.optim.Optimizer]
    device: str = "cpu"
    options: dict[str, Any] = field(default_factory=dict)
    ways: tuple[str, ...] = ("sharded", "offload")
    elementwise: bool = True

    @property
    def home(self) -> str:
        """Where the parameters are that the class steps."""
        return self.device if "sharded" in self.ways else "cpu"


_ADAM = {"lr": 0.02, "weight_decay": 0.1, "eps": 1e-3}
_LAMB = _ADAM | {"max_coeff": 2.0, "max_grad_norm": 0.5}
_LARS = {"lr": 0.02, "momentum": 0.9, "eeta": 0.3, "weight_decay": 0.1, "epsilon": 0.01}
ROWS = {
    "DeepSpeedCPUAdam": Row(DeepSpeedCPUAdam, options=_ADAM),
    "DeepSpeedCPUAdam_amsgrad": Row(DeepSpeedCPUAdam, options=_ADAM | {"amsgrad": True}),
    "DeepSpeedCPUAdagrad": Row(DeepSpeedCPUAdagrad, options=_ADAM | {"lr_decay": 0.1}),
    "DeepSpeedCPULion": Row(DeepSpeedCPULion, options={"lr": 0.002, "weight_decay": 0.1}),
    "FusedRMSprop": Row(FusedRMSprop, options={"lr": 0.01, "momentum": 0.5, "eps": 1e-2}),
    "FusedSGD": Row(FusedSGD, options={"lr": 0.02, "momentum": 0.9, "nesterov": True}),
    "HybridAdam": Row(HybridAdam, options=_ADAM),
    "FusedLamb": Row(FusedLamb, options=_LAMB, elementwise=False),
    "Lars": Row(Lars, options=_LARS, elementwise=False),
    "FusedAdam": Row(FusedAdam, "cuda", _ADAM, ("sharded",)),
    "FusedAdagrad": Row(FusedAdagrad, "cuda", _ADAM, ("sharded",)),
    "FusedLion": Row(FusedLion, "cuda", {"lr": 0.002, "weight_decay": 0.1}, ("sharded",)),
    "FusedLamb_on_CUDA": Row(FusedLamb, "cuda", _LAMB, ("sharded",), elementwise=False),
    "DeepSpeedCPUAdam_beside_CUDA": Row(DeepSpeedCPUAdam, "cuda", _ADAM, ("offload",)),
}


def mesh_of(row: Row, *shape: int):
    """All processes of the group, in one row unless a shape is given."""
    names = ("a", "b")[: len(shape) or 1]
    return init_device_mesh(row.device, shape or (dist.get_world_size(),), mesh_dim_names=names)


class Net(nn.Module):
    """Odd sizes; parameters that have fewer rows than there are processes, so empty shards."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(6, 12)
        self.second = nn.Linear(12, 3)
        self.last = nn.Linear(3, 1)

    def forward(self, x):
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


def sharded_net(row: Row, way: str = "", seed: int = 0, kind: str = "fsdp") -> nn.Module:
    """The net under FSDP2, in one of the ways of the row; `kind` may add a mesh dimension."""
    net = Net(seed).to(row.device)
    mesh = mesh_of(row)
    options = {}
    if (way or row.ways[0]) == "offload":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=row.device == "cuda")
    if kind == "hsdp":
        mesh = mesh_of(row, 2, dist.get_world_size() // 2)
    if kind == "tensor parallel":
        both = mesh_of(row, dist.get_world_size() // 2, 2)
        plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
        mesh, inner = (both[name] for name in both.mesh_dim_names)
        parallelize_module(net, inner, plan)
    for layer in (net.first, net.second, net):
        fully_shard(layer, mesh=mesh, **options)
    return net


def batches(steps: int, first: int = 0):
    """Inputs and targets of whole batches; the same in all processes."""
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        yield torch.randn(8, 6, generator=generator), torch.randn(8, 1, generator=generator)


def train(net: nn.Module, optimizer, row: Row, steps: int, first: int = 0, shares: int = 0) -> None:
    """Train on whole batches, or in each process on its share of each when there are shares."""
    for x, y in batches(steps, first):
        if shares:
            share = dist.get_rank() * shares // dist.get_world_size()
            x, y = x.chunk(shares)[share], y.chunk(shares)[share]
        optimizer.zero_grad()
        loss_of(net, row, x, y).backward()
        optimizer.step()


def loss_of(net: nn.Module, row: Row, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    device = row.device if isinstance(next(net.parameters()), DTensor) else row.home
    return nn.functional.mse_loss(net(x.to(device)), y.to(device))


def twin(row: Row, steps: int, **options):
    """The same training without sharding."""
    net = Net().to(row.home)
    optimizer = row.make(net.parameters(), **row.options | options)
    train(net, optimizer, row, steps)
    return net, optimizer


def distribute(tensor: torch.Tensor, mesh, placements) -> DTensor:
    """Shard a tensor that all processes have; torch's scatter cannot do all uneven layouts."""
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def state_of(net: nn.Module, optimizer) -> dict[str, torch.Tensor]:
    """Parameters and their state by name, whole; a collective call for a sharded net."""
    found = {}
    for name, param in net.named_parameters():
        found[name] = param
        found |= {f"{name}.{key}": value for key, value in optimizer.state[param].items()}
    return {name: full(_on_mesh(value)).cpu() for name, value in found.items()}


def _on_mesh(value: torch.Tensor) -> torch.Tensor:
    """full_tensor wants parts where the mesh is, and those of offloaded parameters are not."""
    if isinstance(value, DTensor) and value.device.type != value.device_mesh.device_type:
        return value.to(value.device_mesh.device_type)
    return value


def assert_trained_alike(actual, expected) -> None:
    """Compare nets and optimizers (pairs): only the rounding of gradients may differ."""
    ours, theirs = state_of(*actual), state_of(*expected)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(
            value, theirs[name], rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        assert torch.equal(value, expected[name]), name


def check_state_of(param, entry):
    """State is sharded as its parameter is; steps are not."""
    for key, value in entry.items():
        if key == "step":
            assert type(value) is torch.Tensor and value.shape == ()
            assert value.device == param.device
        else:
            assert type(value) is DTensor
            assert value.device_mesh == param.device_mesh and value.placements == param.placements
            assert value.shape == param.shape and value.stride() == param.stride()
            assert value.to_local().shape == param.to_local().shape
            assert value.to_local().device == param.to_local().device


def give_grads(generator, *models, factor=1.0):
    """Like parameters of several models get the same gradients, each sharded as it is."""
    for params in zip(*models, strict=True):
        grad = torch.randn(params[0].shape, generator=generator) * factor
        for param in params:
            if not param.requires_grad:
                param.grad = None
                continue
            value = grad.to(param.device, param.dtype)
            if isinstance(param, DTensor):
                value = distribute(value, param.device_mesh, param.placements)
            param.grad = value

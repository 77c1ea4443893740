"""What the ZeRO tests share: a small model with all that is difficult, training, comparison."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from deepspeed_ext.optim import (
    DeepSpeedCPUAdagrad,
    DeepSpeedCPUAdam,
    DeepSpeedCPULion,
    FusedAdagrad,
    FusedAdam,
    FusedLion,
)

FORMATS = {  # dtype of weights, and options of optimizers
    "float32": (torch.float32, {}),
    "bfloat16": (torch.bfloat16, {"state_dtype": torch.bfloat16, "master": "float32"}),
    "remainder": (torch.bfloat16, {"state_dtype": torch.float32, "master": "remainder"}),
    "codes": (torch.bfloat16, {"state_dtype": torch.uint8, "master": "float32"}),
    "low": (torch.bfloat16, {}),
}
ON_GPU = {  # which steps parameters there, by what steps them on the CPU
    DeepSpeedCPUAdagrad: FusedAdagrad,
    DeepSpeedCPUAdam: FusedAdam,
    DeepSpeedCPULion: FusedLion,
}
VOCABULARY = 11
WIDTH = 6


class Block(nn.Module):
    """Odd numbers of rows, and fewer of them than there may be processes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 9)
        self.down = nn.Linear(9, WIDTH)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x + self.gain * self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Tied embeddings, a frozen weight, and a layer that no forward uses."""

    def __init__(self, seed: int = 0, blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.unused = nn.Linear(3, 2)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks[1].down.weight.requires_grad_(False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def home():
    """Where the processes of this group compute."""
    return "cuda" if "nccl" in dist.get_backend_config() else "cpu"


def at_home(kind):
    """The class of optimizers that steps parameters where the processes of this group compute."""
    return ON_GPU.get(kind, kind) if home() == "cuda" else kind


def adam(params, **options):
    """That of the processes of this group."""
    return at_home(DeepSpeedCPUAdam)(params, **options)


def mesh_at_home(shape, names=None):
    """A mesh of the processes of this group."""
    return init_device_mesh(home(), shape, mesh_dim_names=names)


def batch(number: int, rank: int | None = None):
    """Tokens and targets of one process, the same each time."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randint(VOCABULARY, (2, 4, 5), generator=generator).to(home())


def loss_of(model, number: int, rank: int | None = None):
    tokens, targets = batch(number, rank)
    return cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())


def whole(tensor):
    """The whole of a DTensor, where its mesh computes: a collective call."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to(tensor.device_mesh.device_type).full_tensor()


def assert_close(ours, theirs, what, exact=False, **tolerance):
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-4, "atol": 1e-6} | tolerance
    torch.testing.assert_close(ours, theirs, **tolerance, msg=lambda text: f"{what}: {text}")

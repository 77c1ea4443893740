"""One process of test_clip.py: clips DTensors and compares with whole tensors, in float64."""

import itertools
import os
import re
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from deepspeed_ext.dtensors import sum_over_shards
from deepspeed_ext.ops import clip_grad_norm_, total_squared_norm


def whole_tensors() -> list[Tensor]:
    """The same in every process; the second has fewer rows than there are processes."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in [(8, 6), (1, 4), (5, 3), (7,)]]


def assert_close(got: Tensor | float, want: Tensor | float) -> None:
    torch.testing.assert_close(torch.as_tensor(got).double(), torch.as_tensor(want).double(),
                               rtol=1e-6, atol=1e-12)  # fmt: skip


def check_placements(mesh: DeviceMesh, others: list[DeviceMesh]) -> None:
    """Every pair of placements, mixed with plain tensors and with tensors of other meshes."""
    whole = whole_tensors()
    want = sum(tensor.double().square().sum() for tensor in whole)
    choices = [Shard(0), Replicate()]
    for placements in itertools.product(choices, repeat=mesh.ndim):
        tensors = [distribute_tensor(tensor, mesh, placements) for tensor in whole]
        assert_close(total_squared_norm(tensors), want)
        mixed = [tensors[0], whole[1], distribute_tensor(whole[2], others[0], [Shard(0)]), whole[3]]
        assert_close(total_squared_norm(mixed), want)
        grads = [tensor.clone() for tensor in mixed]
        params = [torch.zeros_like(grad).requires_grad_() for grad in grads]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        assert_close(clip_grad_norm_(params, 2.0), want.sqrt())
        for param, tensor in zip(params, whole, strict=True):
            grad = param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
            assert_close(grad, tensor.double() * 2 / want.sqrt())


def check_rows(mesh: DeviceMesh) -> None:
    """Only rows of sharded tensors are summed, all columns of them, and the input stays."""
    whole, rank = whole_tensors(), dist.get_rank()
    kinds = [Shard(0), Replicate(), None, Shard(0)]
    tensors = [
        tensor if kind is None else distribute_tensor(tensor, mesh, [kind] * mesh.ndim)
        for tensor, kind in zip(whole, kinds, strict=True)
    ]
    rows = torch.arange(8.0, dtype=torch.float64).view(4, 2) + 100 * rank
    before = rows.clone()
    count = dist.get_world_size()
    want = rows.clone()
    for i in (0, 3):
        want[i] = count * (rows[i] - 100 * rank) + 100 * sum(range(count))
    assert_close(sum_over_shards(rows, tensors), want)
    assert torch.equal(rows, before)
    assert sum_over_shards(rows, whole) is rows


def check_partial(mesh: DeviceMesh) -> None:
    local = torch.ones(4)
    tensors = [local, DTensor.from_local(local, mesh, [Partial()] * mesh.ndim)]
    text = (
        "sum_over_shards: tensors[1] has placement Partial(sum), expected Shard or Replicate;"
        " add it up with redistribute() first"
    )
    try:
        total_squared_norm(tensors)
    except ValueError as error:
        assert re.fullmatch(re.escape(text), str(error)), error
    else:
        raise AssertionError("a Partial tensor was taken")


def check_fsdp(mesh: DeviceMesh) -> None:
    """A sharded model is clipped as the same model in one process, for the whole batch."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 1))
    torch.manual_seed(0)
    sharded = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 1))
    for layer in (*sharded, sharded):
        fully_shard(layer, mesh=mesh)
    batch = torch.randn(4, 6)
    plain(batch).square().mean().backward()
    sharded(batch).square().mean().backward()
    want = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    assert want > 0.1
    assert_close(clip_grad_norm_(sharded.parameters(), 0.1), want)
    for param, expected in zip(sharded.parameters(), plain.parameters(), strict=True):
        assert isinstance(param.grad, DTensor) and expected.grad is not None
        torch.testing.assert_close(param.grad.full_tensor(), expected.grad, rtol=1e-4, atol=1e-6)


def check_strided_shards(grid: DeviceMesh) -> None:
    """FSDP over tensor parallel shards: both mesh dimensions hold pieces of one tensor."""
    model, generator = nn.Linear(8, 6), torch.Generator().manual_seed(1)
    model.weight = nn.Parameter(torch.randn(8, 6, generator=generator))
    model.bias = nn.Parameter(torch.randn(7, generator=generator))
    want = sum(param.detach().double().square().sum() for param in model.parameters())
    for name, param in list(model.named_parameters()):
        sharded = distribute_tensor(param.detach(), grid["shard"], [Shard(0)])
        model.register_parameter(name, nn.Parameter(sharded))
    fully_shard(model, mesh=grid["replicate"])
    params = list(model.parameters())
    assert all(isinstance(param, DTensor) and param.device_mesh.ndim == 2 for param in params)
    assert_close(total_squared_norm(params), want)


def main() -> None:
    rank, count, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    flat = init_device_mesh("cpu", (count,), mesh_dim_names=("data",))
    grid = init_device_mesh("cpu", (2, count // 2), mesh_dim_names=("replicate", "shard"))
    for mesh in (flat, grid):
        check_placements(mesh, [flat, grid])
        check_rows(mesh)
        check_partial(mesh)
        check_fsdp(mesh)
    check_strided_shards(grid)
    dist.barrier()  # nobody leaves while another still talks to it
    print("all as expected", flush=True)
    os._exit(0)  # at a usual exit the threads of process groups now and then abort the process


if __name__ == "__main__":
    main()

"""Estimates are what a real optimizer allocates, byte for byte, and refuse what cannot fit."""

import sys
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from deepspeed_ext.offload import (
    Estimate,
    OffloadOptimizer,
    estimate,
    memory_budget,
    param_table,
)
from deepspeed_ext.offload.pipeline import Memory
from deepspeed_ext.optim import (
    DeepSpeedCPUAdagrad,
    DeepSpeedCPUAdam,
    DeepSpeedCPULion,
    FusedLamb,
    FusedSGD,
)

GIB, PAGE = 2**30, 4096
BF16, F32 = torch.bfloat16, torch.float32
COMPACT: dict[str, Any] = {"state_dtype": torch.uint8, "master": "remainder"}
SHAPES = [(300, 70), (7,), (), (64, 64), (0,), (513,), (20, 90)]
CASES = [
    (DeepSpeedCPUAdam, {}, F32),
    (DeepSpeedCPUAdam, {"amsgrad": True, "master": "float32"}, BF16),
    (DeepSpeedCPUAdam, COMPACT, BF16),
    (DeepSpeedCPUAdam, {"state_dtype": BF16}, BF16),
    (DeepSpeedCPUAdagrad, {}, F32),
    (DeepSpeedCPULion, {"state_dtype": torch.uint8}, F32),
    (FusedSGD, {"momentum": 0.9, "lr": 0.1}, BF16),
]
MODULE = sys.modules["deepspeed_ext.offload.memory_estimate"]  # its function has the same name


@pytest.fixture(autouse=True)
def plenty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have memory for everything; buckets that hold some of the parameters only."""
    for module in (MODULE, memory_budget):
        monkeypatch.setattr(module, "free_memory", lambda: 64 * GIB)
    monkeypatch.setattr(param_table, "BUCKET", 5000)


def parameters(dtype: torch.dtype, device: str = "cpu") -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape, dtype=dtype, device=device)) for shape in SHAPES]


def stepped(params: list[nn.Parameter], *args: Any, **options: Any) -> OffloadOptimizer:
    """Return an optimizer that has state, and whose next gradients are in host memory."""
    made = OffloadOptimizer(params, *args, **options)
    for _ in range(2):
        made.step()
        made.zero_grad()
        sum(p.sum() for p in params if p.requires_grad).backward()
    made.synchronize()
    return made


def memory_of(tensors: list[Tensor]) -> int:
    """Return the bytes of the memory that these are in."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def state_of(bucket: Any) -> Counter[str]:
    found = Counter({key: buffer.nbytes for key, [buffer] in bucket.buffers.items()})
    found.update({f"{key}_scale": scale.nbytes for key, scale in bucket.scales.items()})
    return found


def allocated(made: OffloadOptimizer) -> tuple[Counter[str], Counter[str]]:
    """Return what is there: where the parameters are, and in host memory, gradients aside."""
    work = made._pipeline
    gpu, host = Counter[str](), Counter[str]()
    params = [param for group in made.param_groups for param in group["params"]]
    copies = [work.table[param].copy for param in params]
    host["weights"] = memory_of([c for c, p in zip(copies, params, strict=True) if c is not p])
    for _, kept in work._in_place.buckets:
        gpu += state_of(kept)
    for bucket in work._buckets:
        host += state_of(bucket.bucket)
        if bucket.shadow is not None:
            buffers = [buffer for [buffer] in bucket.shadow.buffers.values()]
            host["steps ahead"] += sum(t.nbytes for t in (*buffers, *bucket.shadow.scales.values()))
            host["steps ahead"] += memory_of(bucket.shadow.weights)
    return gpu, host


def without(kinds: dict[str, int] | Any, *names: str) -> dict[str, int]:
    return {kind: nbytes for kind, nbytes in kinds.items() if nbytes and kind not in names}


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("kind", "options", "dtype"), CASES)
def test_an_estimate_is_what_is_allocated(
    kind: Any, options: dict[str, Any], dtype: torch.dtype, fraction: float
) -> None:
    found = estimate(parameters(dtype), kind, gpu_fraction=fraction, **options)
    with stepped(parameters(dtype), kind, gpu_fraction=fraction, **options) as made:
        gpu, host = allocated(made)
        taken = sum(streams.staged_bytes for streams in made._pipeline._streams.values())
        buckets = len(made._pipeline._buckets)
    assert buckets > 1 or fraction > 0
    assert without(found.gpu, "weights", "gradients") == without(gpu)
    assert without(found.host, "gradients") == without(host)
    assert found.gpu["weights"] == sum(p.nbytes for p in parameters(dtype))
    assert found.gpu["gradients"] == found.gpu["weights"]
    assert 0 <= taken - found.host["gradients"] <= PAGE * buckets


def test_meta_models_and_shapes_are_like_real_ones() -> None:
    real = estimate(parameters(BF16), **COMPACT)
    assert estimate(parameters(BF16, "meta"), **COMPACT) == real
    assert estimate(SHAPES, dtype=BF16, **COMPACT) == real
    assert estimate([("name", p) for p in parameters(BF16)], **COMPACT) == real
    groups = [{"params": parameters(BF16)[:3]}, {"params": iter(parameters(BF16)[3:]), "lr": 1.0}]
    assert estimate(groups, **COMPACT).host_bytes == real.host_bytes
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1000, 1000, bias=False), nn.LayerNorm(1000))
    found = estimate(model)
    assert found.elements == 1_002_000
    assert found.host["exp_avg"] == 4 * (1_000_000 + 2 * 1024)  # whole cache lines


def test_frozen_parameters_have_a_copy_and_nothing_else() -> None:
    params = parameters(F32)
    params[0].requires_grad_(False)
    found = estimate(params)
    with stepped(params) as made:
        _, host = allocated(made)
    assert without(found.host, "gradients") == without(host)
    assert found.gpu["gradients"] == found.gpu["weights"] - params[0].nbytes


def test_freed_gradients_are_added_up_in_float32() -> None:
    found = estimate(parameters(BF16), free_grads=True)
    with stepped(parameters(BF16), free_grads=True) as made:
        sums = [known.value.nbytes for known in made._pipeline.table.sums()]
    assert found.host["sums of gradients"] == sum(sums)
    assert found.gpu["gradients"] < found.gpu["weights"]


def test_a_budget_limits_speculation() -> None:
    all_of_it = estimate(parameters(F32))
    kept = all_of_it.needed_bytes - all_of_it.host["gradients"]
    for extra in (0, 2000, 120_000, 700_000):
        found = estimate(parameters(F32), memory_budget=kept + extra)
        with stepped(parameters(F32), memory_budget=kept + extra) as made:
            _, host = allocated(made)
        assert found.host["steps ahead"] == host["steps ahead"]
        assert found.host["steps ahead"] <= extra
    assert 0 < found.host["steps ahead"] == all_of_it.host["steps ahead"]


def test_sharded_parameters_count_as_what_is_here() -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        shards = [
            nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)]))
            for p in parameters(BF16)
            if p.dim()
        ]
        found = estimate(shards, **COMPACT)
        assert found == estimate([p for p in parameters(BF16) if p.dim()], **COMPACT)
    finally:
        torch.distributed.destroy_process_group()


def refuse_to_allocate(*_: object) -> None:
    raise AssertionError("allocated")


def test_what_cannot_fit_is_refused_before_anything_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = estimate(parameters(F32))
    kept = found.needed_bytes - found.host["gradients"]
    monkeypatch.setattr(param_table, "host_copies", refuse_to_allocate)
    with pytest.raises(ValueError, match="OffloadOptimizer: memory_budget is 1000, expected") as e:
        OffloadOptimizer(parameters(F32), memory_budget=1000)
    assert f"at least {kept} for weights and state" in str(e.value)
    assert str(estimate(parameters(F32), memory_budget=1000)) in str(e.value)
    monkeypatch.setattr(MODULE, "free_memory", lambda: kept)  # and nothing for gradients
    with pytest.raises(MemoryError, match=f"host memory is {kept} bytes, expected at least") as e:
        OffloadOptimizer(parameters(F32))
    assert "master='remainder'" in str(e.value)
    assert str(estimate(parameters(F32))) in str(e.value)


def test_it_is_refused_only_if_it_cannot_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    found = estimate(parameters(F32))
    kept = found.needed_bytes - found.host["gradients"]
    monkeypatch.setattr(MODULE, "free_memory", lambda: kept + 4 * 300 * 70)  # the largest bucket
    tight = estimate(parameters(F32))
    assert tight.needed_bytes == tight.available
    assert tight.host["steps ahead"] == 0
    assert tight.memory.spare == tight.memory.shadow
    OffloadOptimizer(parameters(F32)).close()


def test_the_table() -> None:
    found = Estimate(
        "OffloadOptimizer of DeepSpeedCPUAdam",
        2_261_000_000,
        {"weights": 4 * GIB, "gradients": 4 * GIB},
        {"weights": 4 * GIB, "gradients": 1536, "exp_avg": 3, "steps ahead": GIB // 2},
        Memory(0, 0),
        5 * GIB,
        3 * GIB,
    )
    assert str(found) == (
        "OffloadOptimizer of DeepSpeedCPUAdam, 2,261,000,000 parameters\n"
        "                      GPU        host\n"
        "weights          4.00 GiB    4.00 GiB\n"
        "gradients        4.00 GiB    1.50 KiB\n"
        "exp_avg                           3 B\n"
        "steps ahead                512.00 MiB\n"
        "total            8.00 GiB    4.50 GiB\n"
        "available                    3.00 GiB\n"
        "memory_budget                5.00 GiB\n"
        "lacking                      1.00 GiB"
    )


def test_refuses_what_the_optimizer_refuses() -> None:
    with pytest.raises(TypeError, match="optimizer_class is FusedLamb, expected"):
        estimate(SHAPES, FusedLamb)
    with pytest.raises(ValueError, match="gpu_fraction is 2, expected 0 to 1"):
        estimate(SHAPES, gpu_fraction=2)
    with pytest.raises(ValueError, match=r"state_dtype is torch\.float64, expected"):
        estimate(SHAPES, state_dtype=torch.float64)


def test_processes_of_one_host_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = estimate(parameters(F32)).needed_bytes
    monkeypatch.setattr(MODULE, "free_memory", lambda: 8 * kept)
    alone = estimate(parameters(F32))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    among = estimate(parameters(F32))
    assert among.available == alone.available == 8 * kept  # a part may be with the others already
    assert 0 == among.host["steps ahead"] < alone.host["steps ahead"]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "many")
    assert estimate(parameters(F32)) == alone

"""Compact state of sharded parameters: rounding, saving, and loading onto another sharding."""

import copy

import pytest
import torch
import torch.distributed as dist
from sharded_cases import ROWS, assert_same, distribute, full, give_grads, mesh_of
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import Parameter

SHAPES = ((11, 70), (3, 500), (1, 9), (2048,))


def make(row, placement, shapes=SHAPES, **options):
    """Parameters that are sharded like this (plain if None), and their optimizer."""
    generator = torch.Generator().manual_seed(1)
    mesh = mesh_of(row)
    params = []
    for shape in shapes:
        value = torch.randn(shape, generator=generator).to(row.device, torch.bfloat16)
        params.append(
            Parameter(value if placement is None else distribute(value, mesh, [placement]))
        )
    return params, row.make(params, **row.options | options)


def steps(seed, *pairs):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(3):
        give_grads(generator, *(params for params, _ in pairs))
        for _, optimizer in pairs:
            optimizer.step()


def whole(params, optimizer):
    """Parameters and state, whole and portable, by number and key."""
    entries = optimizer.state_dict()["state"]
    found = {f"{i}": full(param) for i, param in enumerate(params)}
    for i, entry in entries.items():
        found |= {f"{i}.{key}": full(value) for key, value in entry.items()}
    return {key: v if v.is_floating_point() else v.int() for key, v in found.items()}


def formats_when_sharded(name, folder):
    row = ROWS[name]
    # What is rounded at random, and the halves of master weights, do not depend on the sharding.
    options = {"state_dtype": torch.bfloat16, "master": "remainder", "seed": 5}
    pairs = [make(row, placement, **options) for placement in (None, Shard(0), Replicate())]
    steps(2, *pairs)
    for pair in pairs[1:]:
        assert_same(whole(*pair), whole(*pairs[0]))
    if dist.get_world_size() > 1:  # one process has all of each row
        with pytest.raises(ValueError, match=r"expected Shard\(0\) or Replicate with state_dtype="):
            make(row, Shard(1), SHAPES[:1], **options)

    # Codes are saved as float32, which any sharding loads, the same one without a change.
    coded = {"state_dtype": torch.uint8, "master": "remainder"}
    one, other = make(row, Shard(0), **coded), make(row, Shard(0), **coded)
    steps(3, one)
    saved = one[1].state_dict()
    for entry in saved["state"].values():
        assert not any(key.endswith("_scale") for key in entry)
        assert all(type(entry[key]) is DTensor for key in ("exp_avg", "exp_avg_sq"))
        assert entry["exp_avg"].dtype == torch.float32
    for mine, theirs in zip(one[0], other[0], strict=True):
        theirs.data._local_tensor.copy_(mine.data._local_tensor)
    other[1].load_state_dict(saved)
    steps(4, one, other)
    assert_same(whole(*one), whole(*other))

    elsewhere = make(row, Replicate(), **coded)
    elsewhere[1].load_state_dict(one[1].state_dict())
    got, want = whole(*elsewhere), whole(*one)
    for key in (key for key in want if "exp_avg" in key):
        bound = want[key].abs() / 30 + want[key].abs().max() / 1000
        assert ((got[key] - want[key]).abs() <= bound).all(), key


def refuses_numbers_together(name, folder):
    """What one process alone was given keeps all of them as they were, and none waits for it."""
    row = ROWS[name]
    elsewhere = "state is refused by another process, expected by none; its error says why"
    last = dist.get_world_size() - 1
    for placement in (Shard(0), Replicate()):
        pair = make(row, placement)
        steps(6, pair)
        before = whole(*pair)

        def negative(saved):
            saved["state"][3]["exp_avg_sq"].to_local()[0] = -1.0

        def missing(saved):
            del saved["state"][3]["exp_avg"]

        def shorter(saved):
            saved["param_groups"][0]["params"].pop()

        for spoil, text in (
            (negative, r"state of params\[3\]: exp_avg_sq has the value -1, expected none below 0"),
            (missing, r"state of params\[3\] has keys .*, expected exp_avg among them"),
            (shorter, "doesn't match the size of optimizer's group"),
        ):
            saved = copy.deepcopy(pair[1].state_dict())
            if dist.get_rank() == last:
                spoil(saved)
            with pytest.raises(ValueError, match=text if dist.get_rank() == last else elsewhere):
                pair[1].load_state_dict(saved)
            assert_same(whole(*pair), before)
            assert pair[1].param_groups[0]["lr"] == row.options["lr"]
        pair[1].load_state_dict(pair[1].state_dict())
        assert_same(whole(*pair), before)

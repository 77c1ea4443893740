"""The rows of parameters that are replaced and freed, and whose identity others get."""

import gc

import pytest
import torch
from offload_cases import Pair, Summed
from optim_cases import make_params
from torch.nn import Parameter

from deepspeed_ext.offload.param_table import ParamTable

ROUNDS = 12


def test_rows_are_found_by_parameter_and_by_copy():
    table, params = ParamTable(), make_params()
    copies = table.copies_of(params)
    assert table.copies_of(params) == copies and len(table) == len(params)
    for param, copy in zip(params, copies, strict=True):
        row = table[param]
        assert row is table.get(param) is table.of_copy(copy) and row.is_copied
        assert table.param_of(copy) is param and table.copy_of(param) is copy
    other = Parameter(params[0].detach().clone())  # equal, but another one
    assert table.get(other) is None and table.copy_of(other) is other


def test_a_parameter_that_stays_is_its_own_copy():
    table, [param] = ParamTable(), [Parameter(torch.ones(3))]
    table.keep_on_device([param])
    assert table.copies_of([param]) == [param] and not table[param].is_copied


def test_who_gets_the_identity_of_another_gets_nothing_else():
    table, seen, used_again = ParamTable(), set(), 0
    for size in range(2, 2 + ROUNDS):
        param = Parameter(torch.ones(size))
        used_again += id(param) in seen
        seen.add(id(param))
        [copy] = table.copies_of([param])
        row = table[param]
        assert row.param is param and copy.shape == (size,)
        assert not row.hits and not row.has_sum and row.bucket is None and not row.has_new_look()
        row.hits, row.summed().count = 3, 1
        table.forget([], {})
        assert not len(table) and table.param_of(copy) is copy
        del param, copy, row
    assert used_again


def test_what_is_in_two_groups_hides_nobody_who_is_gone():
    table, (first, second) = ParamTable(), [Parameter(torch.ones(2)) for _ in range(2)]
    copies = table.copies_of([first, second])
    table.forget([{"params": [first]}, {"params": [first]}], {})
    assert [row.param for row in table] == [first]
    assert table.param_of(copies[1]) is copies[1]


def test_a_row_stays_while_there_is_state():
    table, param = ParamTable(), Parameter(torch.ones(2))
    [copy] = table.copies_of([param])
    table.forget([], {copy: {}})
    assert table[param].copy is copy
    table.forget([], {})
    assert table.get(param) is None


@pytest.mark.parametrize("made", [Pair, Summed], ids=lambda made: made.__name__)
@pytest.mark.parametrize("at", [0, -1])
def test_parameters_that_are_replaced_again_and_again(made, at):
    """The optimizer is right about those that there are, and keeps nothing of the others."""
    pair = made(params=make_params())
    pair.train(3)
    for size in range(2, 2 + ROUNDS):
        fresh = torch.full((size,), 0.5)
        for optimizer, params in pair.both():
            del optimizer.state[params[at]]
            optimizer.zero_grad()
            old, params[at] = params[at], Parameter(fresh.clone())
            group = optimizer.param_groups[0]["params"]
            group[[p is old for p in group].index(True)] = params[at]
        del old, group
        pair.train(2)
        gc.collect()
        table = pair.ours._pipeline.table
        assert [row.param for row in table if row.bucket is None] == []
        assert len(table) == len(pair.params) == len(pair.ours.state)
        assert len(pair.ours._hooks) == len(pair.params)
        if made is Pair:
            assert all(p.grad is None for p in pair.params)
    before = pair.ours.stats()
    pair.train(3)
    now = pair.ours.stats()
    assert now["committed"] - before["committed"] >= 2 and now["discarded"] == before["discarded"]

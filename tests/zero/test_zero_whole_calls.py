"""Sharded models inside of GatheredParameters: whole wherever they are held, and called."""

import logging

import pytest
import torch
import torch.distributed as dist
from processes import Case
from torch import nn
from torch.distributed.tensor import DTensor
from zero_cases import Net, batch, home, loss_of, whole

import deepspeed_ext
from deepspeed_ext.compat import zero as compat
from deepspeed_ext.compat.zero import ZeroParamStatus, gathered
from deepspeed_ext.dtensors import local


def engine_of(stage, precision=""):
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }
    if precision:
        config[precision] = {"enabled": True}
    engine = deepspeed_ext.initialize(model=Net(), config=config)[0]
    compat.know(engine.module)
    return engine


def calls(row, folder):
    """As often in each process as it likes, with the numbers of a sharded forward."""
    stage, precision = row.split("-")
    engine, model = (e := engine_of(int(stage), precision)), e.module
    other, rank = engine_of(int(stage), precision), dist.get_rank()
    tokens, _ = batch(3)
    for number in range(2):
        for each in (engine, other):
            loss = loss_of(each, number)
            if each is engine:  # between forward and backward
                with compat.GatheredParameters(list(model.parameters())), torch.no_grad():
                    inside = [model(tokens) for _ in range(1 + 2 * rank)][-1]
                    assert not any(isinstance(p, DTensor) for p in model.parameters())
                    weight = model.head.weight
                    assert weight is model.embedding.weight and type(weight) is nn.Parameter
                    assert weight.dtype == (torch.bfloat16 if precision else torch.float32)
                    hidden = model.blocks[0](inside[..., :6].float())  # inputs are cast as ever
                    assert hidden.dtype == weight.dtype and hidden.shape[-1] == 6
                with torch.no_grad():
                    assert torch.equal(model(tokens), inside)
            each.backward(loss)
            each.step()
    for ours, theirs in zip(engine.parameters(), other.parameters(), strict=True):
        assert isinstance(ours, DTensor) and torch.equal(whole(ours), whole(theirs))


def held(row, folder):
    """Who holds a shard has the whole inside; what is written to it counts everywhere."""
    engine = engine_of(int(row))
    model, rank, plain = engine.module, dist.get_rank(), Net().to(home())
    for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        shape = local(param).shape
        is_described = row == "3"
        assert hasattr(param, "ds_id") == is_described
        with compat.GatheredParameters([param]):  # as vLLM is given weights
            assert type(param.data) is torch.Tensor and torch.equal(param.data, other), name
            assert torch.equal(param.cpu(), other.cpu()) and param.numel() == other.numel()
            assert torch.equal(param.full_tensor(), other)
            assert param.requires_grad == other.requires_grad
            if is_described:
                assert param.ds_status is ZeroParamStatus.AVAILABLE
                assert model.get_parameter(name).ds_status is ZeroParamStatus.AVAILABLE
        assert type(param) is DTensor and local(param).shape == shape
        if is_described:
            assert param.ds_status is ZeroParamStatus.NOT_AVAILABLE
            assert param.ds_shape == other.shape and torch.equal(param.ds_tensor, local(param))
    seen = []
    handle = model.head.register_forward_pre_hook(lambda head, _: seen.append(vars(head.weight)))
    loss_of(engine, 0)  # TRL asks there
    handle.remove()
    status = ZeroParamStatus.AVAILABLE if is_described else None
    assert [attributes.get("ds_status") for attributes in seen] == [status]
    up = model.blocks[0].up.weight
    with compat.GatheredParameters(up, modifier_rank=1), torch.no_grad():
        up.fill_(3.0 + rank)
        with compat.GatheredParameters(engine, modifier_rank=0):
            assert model.blocks[0].up.weight.eq(4).all()
            model.blocks[0].up.bias.data = torch.full((9,), 5.0 + rank, device=home())
            nn.init.constant_(model.blocks[1].up.weight, 7.0 + rank)
        up[0] = 8.0 + rank
        up.data = up.data + 1
    assert whole(up)[0].eq(10).all() and whole(up)[1:].eq(5).all()
    assert whole(model.blocks[0].up.bias).eq(5).all()
    assert whole(model.blocks[1].up.weight).eq(7).all()
    spare = nn.Linear(2, 2)  # plain
    mixed = [spare.weight, torch.ones(1), model.head.weight, None, spare.bias]
    with compat.GatheredParameters(mixed, 1, fwd_module=spare), torch.no_grad():
        for param in (spare.weight, spare.bias, model.head.weight):
            param.fill_(rank)
    assert whole(model.head.weight).eq(1).all()
    assert spare.weight.eq(1).all() and spare.bias.eq(1).all()
    params = list(model.parameters())
    with compat.GatheredParameters(params[:: 1 - 2 * rank], 0), torch.no_grad():  # a set
        params[0].fill_(rank)
    assert whole(params[0]).eq(0).all()
    with compat.GatheredParameters(model, enabled=False):
        assert isinstance(model.head.weight, DTensor)


class Records(logging.Handler):
    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def mistakes(row, folder):
    engine = engine_of(int(row), "bf16")
    model = engine.module
    loss_of(engine, 0)
    seen = Records()
    gathered._warn_dropped.cache_clear()  # another test's process may have warned
    logging.getLogger("deepspeed_ext").addHandler(seen)
    before = whole(model.head.weight)
    for _ in range(2):  # adapters are merged in each step, and taken out again
        with compat.GatheredParameters(model), torch.no_grad():
            model.head.weight.add_(1)
            model.head.weight.mul_(2)
    logging.getLogger("deepspeed_ext").removeHandler(seen)
    assert torch.equal(whole(model.head.weight), before)
    assert len(seen.texts) == 1 and "modifier_rank is None; that is dropped" in seen.texts[0]
    for rank in (2, -1):
        with pytest.raises(ValueError, match=f"modifier_rank is {rank}, expected 0 to 1"):
            compat.GatheredParameters(model.head, rank).__enter__()
    text = "a backward reaches whole parameters"
    with pytest.raises(RuntimeError, match=text), compat.GatheredParameters(model):
        loss_of(model, 0).backward()
    with compat.GatheredParameters(model):
        loss = loss_of(model, 0)
    with pytest.raises(RuntimeError, match=text):
        loss.backward()
    text = "the model is called inside of GatheredParameters of some"
    with pytest.raises(RuntimeError, match=text), compat.GatheredParameters(model.head.weight):
        loss_of(model, 0)
    text, up = "a Block is called inside of GatheredParameters of", model.blocks[0].up.weight
    with pytest.raises(RuntimeError, match=text), compat.GatheredParameters(up):
        model.blocks[0](torch.ones(1, 6))
    text = "in torch.bfloat16, expected that one"
    with compat.GatheredParameters(model), pytest.raises(RuntimeError, match=text):
        compat.GatheredParameters(model.head, 0).__enter__()
    for wanted in ("blocks.0.up.weight", "head.weight"):  # a shard by then, and one that is whole
        text = f"in a forward or a backward of {'its' if 'up' in wanted else 'the'} model"
        hook = model.blocks[1].register_forward_hook(
            lambda *_, wanted=wanted: compat.GatheredParameters(
                model.get_parameter(wanted), modifier_rank=0
            ).__enter__()
        )
        with pytest.raises(RuntimeError, match=text):
            loss_of(engine, 0)
        hook.remove()
    first, second = (compat.GatheredParameters(model.blocks[i]) for i in range(2))
    first.__enter__()
    second.__enter__()
    with pytest.raises(RuntimeError, match="it ends before one inside of it"):
        first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    first.__exit__(None, None, None)
    with pytest.raises(KeyError), compat.GatheredParameters(model, modifier_rank=0):
        raise KeyError
    other = engine_of(int(row), "bf16")  # and nothing of all that is left
    for number in range(2):
        for each in (engine, other):
            each.backward(loss_of(each, number))
            each.step()
    for ours, theirs in zip(engine.parameters(), other.parameters(), strict=True):
        assert torch.equal(whole(ours), whole(theirs))


def alone(row, folder):
    """One process, whose model initialize leaves whole, or shards in stage 3."""
    for stage in (1, 3):
        engine, plain = engine_of(stage), Net().to(home())
        with compat.GatheredParameters(engine.parameters(), modifier_rank=0), torch.no_grad():
            pairs = zip(engine.parameters(), plain.parameters(), strict=True)
            assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
            assert torch.equal(loss_of(engine.module, 0), loss_of(plain, 0))
            engine.module.head.weight.fill_(3)
        assert whole(engine.module.head.weight).eq(3).all()
        engine.backward(loss_of(engine, 0))
        engine.step()


CASES = [
    Case(1, "alone", ""),
    *(Case(2, "calls", row) for row in ("3-bf16", "2-", "0-bf16")),
    *(Case(2, "held", row) for row in ("3", "1")),
    Case(2, "mistakes", "3"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.function}-{c.row}-{c.world}")
def test_processes(case, groups):
    groups.run(case)

"""What is done between the micro-steps of accumulate does what it does in plain PyTorch."""

import itertools

import pytest
import torch
import torch.distributed as dist
from process_groups import with_long
from processes import Case
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial
from zero_cases import Net, assert_close, home, loss_of, whole

from deepspeed_ext import zero

MICRO_STEPS = 3
NAMES = ("blocks.0.up.weight", "embedding.weight")


class Pair:
    """A sharded model, and the same training of one whole model that sees all batches."""

    def __init__(self, stage, mesh=None, **options):
        self.stage = stage
        self.ours, self.plain = zero.shard(Net(), stage, mesh=mesh, **options), Net()
        self.models = (self.ours, self.plain)
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in self.models]

    def forward(self, number):
        """Return the losses of both, not yet run backward."""
        ranks = range(dist.get_world_size())
        loss = loss_of(self.ours, number) / MICRO_STEPS
        return loss, sum(loss_of(self.plain, number, rank) for rank in ranks) / (
            MICRO_STEPS * len(ranks)
        )

    def add(self, number):
        for loss in self.forward(number):
            loss.backward()

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def train(self, number):
        for i in zero.accumulate(self.ours, MICRO_STEPS):
            self.add(number + i)
        self.step()

    def assert_equal(self, what):
        for (name, ours), theirs in zip(
            self.ours.named_parameters(), self.plain.parameters(), strict=True
        ):
            assert_close(whole(ours), theirs.detach(), f"{name}, stage {self.stage}, {what}")


def pairs(row):
    """Each stage; replicas, whose sums over shards wait for the others; sums of another dtype."""
    mesh = None
    if row == "replicas":
        mesh = init_device_mesh(home(), (2, 2), mesh_dim_names=("replicas", "shards"))
    for stage in (2, 3) if mesh else range(4):
        yield lambda stage=stage: Pair(
            stage, mesh, reduce_dtype=torch.float64 if row == "double" else None
        )


def by_hand(model, _):
    for param in model.parameters():
        param.grad = None


def some(model, _):
    for name in NAMES:
        model.get_parameter(name).grad = None


def twice(model, optimizer):
    optimizer.zero_grad()
    model.zero_grad()


DROPS = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "model": lambda model, optimizer: model.zero_grad(),
    "optimizer, zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model, zeros": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "fused, zeros": lambda model, _: torch.optim.AdamW(model.parameters(), fused=True).zero_grad(
        set_to_none=False
    ),
    "by hand": by_hand,
    "twice": twice,
    "some": some,
}


PLACES = [(1, "begins"), (1, "inside"), (0, "ends"), (2, "inside"), (2, "ends")]


def drops(row, folder):
    """Gradients that are dropped: by each way, and at each place in a loop."""
    for make in pairs(row):
        pair, places = make(), itertools.cycle(PLACES)
        for how, drop in DROPS.items():
            if (row, how) == ("replicas", "some"):
                continue
            for at, where in PLACES if how == "optimizer" else (next(places), next(places)):
                drop_at(pair, drop, at, where)
                pair.assert_equal(f"{how} {where} {at}")


def drop_at(pair, drop, at, where):
    def now(i, place):
        if (i, place) == (at, where):
            for each in zip(pair.models, pair.optimizers, strict=True):
                drop(*each)

    for i in zero.accumulate(pair.ours, MICRO_STEPS):
        now(i, "begins")
        losses = pair.forward(10 * at + i)
        now(i, "inside")
        for loss in losses:
            loss.backward()
        now(i, "ends")
    pair.step()


def some_of_replicas(row, folder):
    """Sums of a block that wait for other replicas are dropped as one."""
    for make in pairs("replicas"):
        pair = make()
        text = "^zero.accumulate: gradients of .*weight.* are dropped and others of its block not"
        with pytest.raises(RuntimeError, match=text):
            for i in zero.accumulate(pair.ours, MICRO_STEPS):
                pair.add(i)
                some(pair.ours, None)
        pair.optimizers[1].zero_grad()
        pair.train(10)
        pair.assert_equal("after it")


def earlier(row, folder):
    """What a backward before the loop has left is added to, or dropped with the rest."""
    for make, drops in itertools.product(pairs(row), (False, True)):
        pair = make()
        for _ in range(2):
            pair.add(7)
            for i in zero.accumulate(pair.ours, MICRO_STEPS):
                pair.add(i)
                if drops and i == 0:
                    for optimizer in pair.optimizers:
                        optimizer.zero_grad()
            pair.step()
            pair.assert_equal(f"earlier gradients, drops {drops}")


def losses_of_shards(row, folder):
    """A backward through a shard, and no forward: added to what is there, dropped with it."""

    def penalize(pair):
        for model in pair.models:
            weight = model.embedding.weight
            if isinstance(weight, DTensor):
                placements = [Partial("avg")] * weight.device_mesh.ndim
                weight = weight.full_tensor(grad_placements=placements)
            (weight.pow(2).sum() / MICRO_STEPS).backward()

    ways = ("", "before", "after")
    for make, drops, to_none in itertools.product(pairs(row), ways, (False, True)):
        pair = make()
        for i in zero.accumulate(pair.ours, MICRO_STEPS):
            for place in ("before", "after"):
                if i > 0 and place == "after":
                    penalize(pair)
                    penalize(pair)
                if i == 1 and place == drops:
                    for optimizer in pair.optimizers:
                        optimizer.zero_grad(set_to_none=to_none)
            pair.add(i)
        pair.step()
        pair.assert_equal(f"losses of shards, drops {drops}, {to_none}")


def freezes(row, folder):
    """A frozen parameter keeps what it has; a thawed one begins."""
    for make in pairs(row):
        pair = make()
        if row == "replicas":
            text = "^zero.accumulate: .*blocks.0.up.weight.* have gradients in some micro-steps"
            with pytest.raises(RuntimeError, match=text):
                for i in zero.accumulate(pair.ours, MICRO_STEPS):
                    pair.add(i)
                    pair.ours.get_parameter(NAMES[0]).requires_grad_(False)
            continue
        for where in ("ends", "begins"):
            for i in zero.accumulate(pair.ours, MICRO_STEPS):
                if where == "ends":
                    pair.add(i)
                if i == 1:
                    for model in pair.models:
                        for name in (*NAMES, "blocks.1.down.weight"):
                            param = model.get_parameter(name)
                            param.requires_grad_(not param.requires_grad)
                if where == "begins":
                    pair.add(i)
            pair.step()
            pair.assert_equal(f"freezes, {where}")


def unused(row, folder):
    """Zeros of what no pass uses are added up, too, in the dtype of sums; all stay trained."""
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        return  # test_zero_parity has what is said then
    for stage in range(4):
        pair = Pair(stage, reduce_unused=True, reduce_dtype=torch.float64)
        for i in zero.accumulate(pair.ours, MICRO_STEPS):
            pair.add(i)
        assert whole(pair.ours.unused.weight.grad).eq(0).all()
        pair.step()
        pair.assert_equal("unused")
        if stage < 2:
            text = r"^zero.accumulate: \['embedding.weight', .* have gradients in some micro-steps"
            with pytest.raises(RuntimeError, match=text):
                for i in zero.accumulate(pair.ours, MICRO_STEPS):
                    loss_of(pair.ours, i).backward()
                    pair.ours.embedding.weight.requires_grad_(False).grad = None


def thaws(row, folder):
    """A whole block that was frozen when it was sharded."""
    for stage in range(4):
        model = Net()
        model.blocks[0].requires_grad_(False)
        zero.shard(model, stage, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        loss_of(model, 0).backward()
        model.blocks[0].requires_grad_(True)
        loss_of(model, 0).backward()
        assert model.blocks[0].up.weight.grad.dtype == torch.float32


@torch.no_grad()
def copy(param):
    param.copy_(param * 2)


@torch.no_grad()
def turn_sign_of_one(param):  # in one process, which no version counter tells of
    local = param.to_local() if isinstance(param, DTensor) else param
    if dist.get_rank() == 0 or local.shape == param.shape:
        torch._foreach_neg_([local[:1].data])


def writes(row, folder):
    """A weight that was written counts from the next forward on, also if it is put back after."""
    for make, write in itertools.product(pairs(row), (copy, turn_sign_of_one)):
        pair = make()
        for i in zero.accumulate(pair.ours, MICRO_STEPS):
            if i == 1:
                kept = [model.get_parameter(NAMES[0]).detach().clone() for model in pair.models]
                for model in pair.models:
                    write(model.get_parameter(NAMES[0]))
            pair.add(i)
            if i == 1:
                for model, before in zip(pair.models, kept, strict=True):
                    model.get_parameter(NAMES[0]).data.copy_(before)
            if i == 0:
                for model in pair.models:
                    write(model.get_parameter(NAMES[1]))
        pair.step()
        pair.assert_equal(f"after {write.__name__}")


def averages(row, folder):
    """Other weights for an evaluation between micro-steps, and back."""
    for make in pairs(row):
        pair = make()
        for i in zero.accumulate(pair.ours, MICRO_STEPS):
            pair.add(i)
            kept = [{k: v.clone() for k, v in m.state_dict().items()} for m in pair.models]
            for model, state in zip(pair.models, kept, strict=True):
                model.load_state_dict({name: value * 0.5 for name, value in state.items()})
            with torch.set_grad_enabled(i == 1):
                losses = [loss.detach() for loss in pair.forward(9)]
            ours = losses[0].clone()
            dist.all_reduce(ours)
            assert_close(ours / dist.get_world_size(), losses[1], f"stage {pair.stage}")
            for model, state in zip(pair.models, kept, strict=True):
                model.load_state_dict(state)
        pair.step()
        pair.assert_equal("averages")
        pair.train(10)
        pair.assert_equal("after averages")


def first_forwards(row, folder):
    """The first forward ever is in inference mode, inside of a loop."""
    for make in pairs(row):
        pair = make()
        for i in zero.accumulate(pair.ours, MICRO_STEPS):
            with torch.inference_mode():
                loss_of(pair.ours, 8)
            pair.add(i)
        pair.step()
        pair.assert_equal("first forward")


def reads(row, folder):
    """A gradient that is not there yet is no gradient of some kind: who reads it is told."""
    for stage in (0, 1):
        pair = Pair(stage)
        for i in zero.accumulate(pair.ours, MICRO_STEPS):
            pair.add(i)
            if i == 2:
                break
            assert all(isinstance(param, DTensor) for param in pair.ours.parameters())
            grad = pair.ours.embedding.weight.grad
            text = "^zero.accumulate: a gradient is read between micro-steps, expected after the"
            for read in (torch.Tensor.norm, lambda g: g[0] * 2, lambda g: g.add_(1)):
                with pytest.raises(RuntimeError, match=text):
                    read(grad)
            with pytest.raises(RuntimeError, match=text):
                torch.nn.utils.clip_grad_norm_(pair.ours.parameters(), 1.0)
            assert repr(grad).startswith("Unreduced(of [11, 6]")
        pair.optimizers[1].zero_grad()
        pair.optimizers[0].zero_grad()
        pair.train(10)
        pair.assert_equal("after reads")


CASES = [
    Case(world, function, row)
    for function in ("drops", "earlier", "freezes", "averages", "first_forwards", "writes")
    for world, row in ((1, ""), (2, ""), (2, "double"), (4, "replicas"))
    if row == "" or function in ("drops", "earlier", "freezes")
]
CASES += [
    Case(4, "some_of_replicas", ""),
    *(Case(2, function, "") for function in ("reads", "unused", "thaws", "losses_of_shards")),
]
LONG = (
    "drops-replicas-4",
    "drops-double-2",
    "drops--2",
)


@pytest.mark.parametrize("case", with_long(CASES, *LONG))
def test_processes(case, groups):
    groups.run(case)

"""Sharded parameters: FSDP2 and other DTensors trained as if whole, saved onto other worlds."""

import processes
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from layout_cases import (
    copies_and_pickles,
    loads_every_layout,
    notices_changes_from_outside,
    refuses,
    steps_every_layout,
    takes_gradients_of_other_layouts,
)
from processes import Case
from sharded_cases import (
    ROWS,
    Net,
    assert_same,
    assert_trained_alike,
    batches,
    check_state_of,
    distribute,
    full,
    give_grads,
    loss_of,
    mesh_of,
    sharded_net,
    state_of,
    train,
    twin,
)
from sharded_formats import formats_when_sharded, refuses_numbers_together
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.nn import Parameter
from waiting_scaler import waiting_scaler

from deepspeed_ext.optim import DeepSpeedCPUAdam

WORLDS = (1, 2, 4)


def sharded_training(row, way="", steps=0, seed=0, **options):
    net = sharded_net(row, way, seed)
    optimizer = row.make(net.parameters(), **row.options | options)
    train(net, optimizer, row, steps, shares=dist.get_world_size())
    return net, optimizer


def trains_as_if_whole(name, folder):
    row, world = ROWS[name], dist.get_world_size()
    for way in row.ways:
        for kind in ["fsdp", "hsdp", "tensor parallel"][: 3 if world == 4 else 1]:
            net = sharded_net(row, way, kind=kind)
            optimizer = row.make(net.parameters(), **row.options)
            train(net, optimizer, row, 4, shares=2 if kind == "tensor parallel" else world)
            assert_trained_alike((net, optimizer), twin(row, 4))
            for param in net.parameters():
                check_state_of(param, optimizer.state[param])


# Distributed checkpoint


def saves(name, folder):
    """What `loads` reads in all other worlds."""
    row, world = ROWS[name], dist.get_world_size()
    net, optimizer = sharded_training(row, steps=3)
    for flat in (False, True):
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        state = get_optimizer_state_dict(net, optimizer, options=options)
        content = {"net": get_model_state_dict(net), "optimizer": state}
        dcp.save(content, checkpoint_id=folder / f"{name}-{world}-{flat}", no_dist=world == 1)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    content = dict(
        zip(("net", "optimizer"), get_state_dict(net, optimizer, options=options), strict=True)
    )
    expected = state_of(net, optimizer)
    if dist.get_rank() == 0:
        torch.save((content, expected), folder / f"{name}-{world}.pt")


def loads(name, folder):
    row, here = ROWS[name], dist.get_world_size()
    for world in WORLDS:
        path = folder / f"{name}-{world}.pt"
        if path.exists() and (world != here or here == 2):  # not all save, and GPUs may be few
            flat = world > here
            load = load_sharded(folder / f"{name}-{world}-{flat}", flat)
            compare_after_loading(row, path, load, steps=here * flat)
    compare_after_loading(row, path if path.exists() else folder / f"{name}-1.pt", load_full)


def load_sharded(path, flat):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)

    def load(net, optimizer, _):
        state = get_optimizer_state_dict(net, optimizer, options=options)
        content = {"net": get_model_state_dict(net), "optimizer": state}
        dcp.load(content, checkpoint_id=path, no_dist=dist.get_world_size() == 1)
        set_model_state_dict(net, content["net"])
        set_optimizer_state_dict(net, optimizer, content["optimizer"], options=options)

    return load


def load_full(net, optimizer, content):
    set_state_dict(
        net,
        optimizer,
        model_state_dict=content["net"],
        optim_state_dict=content["optimizer"],
        options=StateDictOptions(full_state_dict=True),
    )


def compare_after_loading(row, path, load, steps=0):
    """Load into a net that was never trained, or trained differently, and go on."""
    content, expected = torch.load(path, weights_only=True)
    net, optimizer = sharded_training(row, steps=steps, seed=7)
    load(net, optimizer, content)
    assert_same(state_of(net, optimizer), expected)
    train(net, optimizer, row, 2, first=3, shares=dist.get_world_size())
    assert_trained_alike((net, optimizer), twin(row, 5))


def dry_step_changes_nothing(name, folder):
    """Distributed checkpoint steps an optimizer without state before it saves or loads."""
    row = ROWS[name]
    for dtype in (torch.float32, torch.bfloat16):
        pairs = []
        for dry in (False, True):
            net = Net().to(row.device, dtype)
            mesh = mesh_of(row)
            params = {
                name: Parameter(distribute(param.detach(), mesh, [Shard(0)]))
                for name, param in net.named_parameters()
            }
            for key, param in params.items():
                setattr(net.get_submodule(key.split(".")[0]), key.split(".")[1], param)
            options = row.options | {"master_weights": True}
            pairs.append((net, row.make(net.parameters(), **options)))
            if dry:
                before = [full(param).clone() for param in net.parameters()]
                state = get_optimizer_state_dict(net, pairs[-1][1])["state"]
                for param, value in zip(net.parameters(), before, strict=True):
                    assert torch.equal(full(param), value)
                for entry in state.values():
                    assert entry["step"] == 0
                    moments = entry.keys() - {"step", "master_param"}
                    assert moments and not any(full(entry[key]).any() for key in moments)
        generator = torch.Generator().manual_seed(3)
        for _ in range(2):
            give_grads(generator, *(list(net.parameters()) for net, _ in pairs))
            for _, optimizer in pairs:
                optimizer.step()
        assert_same(state_of(*pairs[0]), state_of(*pairs[1]))


def skips_together(name, folder):
    """An inf in the gradients of one process keeps GradScaler from stepping in any."""
    row = ROWS[name]
    net = sharded_net(row)
    optimizer = row.make(net.parameters(), **row.options)
    with pytest.MonkeyPatch.context() as monkeypatch:
        scaler = waiting_scaler(monkeypatch, row.device, init_scale=4.0)
        for bad in (False, True, False):
            before = {name: value.clone() for name, value in state_of(net, optimizer).items()}
            [(x, y)] = batches(1)
            scaler.scale(loss_of(net, row, x, y)).backward()
            if row.device == "cuda":
                torch.cuda.synchronize()  # gradients that are copied to host memory
            if bad and dist.get_rank() == 0:
                net.first.weight.grad._local_tensor[0, 0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            after = state_of(net, optimizer)
            if bad:
                assert_same(after, before)
            else:
                assert not torch.equal(after["first.weight"], before["first.weight"])


def clips_as_if_whole(name, folder):
    """The norm is that of the whole gradient; inf in one process changes nothing in any."""
    row = ROWS[name]
    for kind in ["fsdp", "hsdp"][: 2 if dist.get_world_size() == 4 else 1]:
        nets = sharded_net(row, kind=kind), Net().to(row.home)
        plain = [Parameter(torch.ones(3, device=row.home)) for _ in nets]
        pairs = [
            (net, row.make([*net.parameters(), extra], **row.options))
            for net, extra in zip(nets, plain, strict=True)
        ]
        for x, y in batches(3):
            norms = []
            for (net, optimizer), extra in zip(pairs, plain, strict=True):
                optimizer.zero_grad()
                loss_of(net, row, x, y).backward()
                extra.grad = torch.full_like(extra, 0.5)
                norms.append(optimizer.clip_and_step(0.3))
            torch.testing.assert_close(*norms)
            assert norms[0] > 0.3 and norms[0].shape == ()
        assert_trained_alike(*pairs)
        torch.testing.assert_close(*plain)

        before = state_of(*pairs[0])
        grad = nets[0].first.weight.grad
        if grad.device_mesh.get_coordinate()[-1] == 0:  # one process, or one and its replicas
            grad._local_tensor[0, 0] = float("inf")
        assert pairs[0][1].clip_and_step(0.3).isinf()
        assert_same(state_of(*pairs[0]), before)
        assert pairs[0][1].skipped_steps == 1


def takes_meta_parameters(name, folder):
    row = ROWS[name]
    net = sharded_net(row)
    with torch.device("meta"):
        empty = Net()
    mesh = mesh_of(row)
    for layer in (empty.first, empty.second, empty):
        fully_shard(layer, mesh=mesh)
    pairs = [(n, row.make(n.parameters(), **row.options)) for n in (net, empty)]
    empty.to_empty(device=row.device)
    set_model_state_dict(empty, get_model_state_dict(net))
    for each in pairs:
        train(*each, row, 2)
    assert_same(state_of(*pairs[0]), state_of(*pairs[1]))


# The tests: one for each function, class and number of processes


EACH_CLASS = {  # functions: the numbers of processes
    saves: WORLDS,
    trains_as_if_whole: (2, 4),
    loads: WORLDS,
    dry_step_changes_nothing: (2,),
    skips_together: (2,),
    clips_as_if_whole: (2, 4),
    steps_every_layout: (4,),
}
ONE_CLASS = {  # what is not about formulas, so tried with one class for a device
    takes_meta_parameters: (2,),
    loads_every_layout: (2, 4),
    copies_and_pickles: (2,),
    notices_changes_from_outside: (2, 4),
    takes_gradients_of_other_layouts: (4,),
    refuses: (2,),
    formats_when_sharded: (2, 4),
    refuses_numbers_together: (2,),
}
OF_NETS = (saves, trains_as_if_whole, loads, skips_together, clips_as_if_whole)


def worlds_of(function, name):
    """The numbers of processes in which a function is tried with a class.

    What FSDP2 does to a net does not depend on the formula: in four processes it is tried with one
    class whose elements are stepped each by itself, and with those that take norms.
    """
    if ROWS[name].device == "cuda":
        return WORLDS  # as there may be fewer GPUs
    worlds = (EACH_CLASS | ONE_CLASS)[function]
    if function in OF_NETS and ROWS[name].elementwise and name != "DeepSpeedCPUAdam":
        return worlds[:-1] if len(worlds) > 1 else worlds
    return worlds


CASES = [
    Case(world, function.__name__, name)
    for function in EACH_CLASS | ONE_CLASS
    for name, row in ROWS.items()
    if function in EACH_CLASS or name in ("DeepSpeedCPUAdam", "FusedAdam")
    if "sharded" in row.ways or function in OF_NETS
    for world in worlds_of(function, name)
]


@pytest.mark.parametrize(("lr", "grad", "steps"), [(0.0, 0.0, 0), (0.0, 1.0, 1), (0.1, 0.0, 1)])
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_a_first_step_counts_unless_lr_and_gradients_are_0(lr, grad, steps, tensor_lr):
    param = Parameter(torch.ones(3))
    optimizer = DeepSpeedCPUAdam([param], lr=torch.tensor(lr) if tensor_lr else lr)
    param.grad = torch.full((3,), grad)
    for count in (steps, steps + 1):
        optimizer.step()
        assert optimizer.state[param]["step"] == count


def gpus_missing(case):
    return ROWS[case.row].device == "cuda" and torch.cuda.device_count() < case.world


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    groups = processes.Groups(__name__, tmp_path_factory.mktemp("groups"))
    yield groups
    groups.end()


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.function}-{c.row}-{c.world}")
def test_sharded(case, groups):
    if gpus_missing(case):
        pytest.skip(f"needs {case.world} CUDA GPUs")
    saved = [c for c in CASES if c.function == "saves" and c.row == case.row]
    for needed in saved if case.function == "loads" else ():
        if not gpus_missing(needed):
            groups.run(needed, ROWS[case.row].device)
    groups.run(case, ROWS[case.row].device)

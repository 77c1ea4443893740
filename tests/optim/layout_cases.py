"""DTensors made by hand, in every layout: cases that each run in several processes."""

import copy
import pickle
import re

import pytest
import torch
import torch.distributed as dist
from sharded_cases import ROWS, check_state_of, distribute, full, give_grads, mesh_of
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import Parameter


def layouts(row):
    """Pairs of a mesh and placements on it."""
    world = dist.get_world_size()
    line = mesh_of(row)
    found = [(line, [Shard(0)]), (line, [Shard(1)]), (line, [Replicate()])]
    if world == 4:
        square = mesh_of(row, 2, 2)
        found += [
            (square, [Replicate(), Shard(0)]),
            (square, [Shard(0), Shard(1)]),
            (square, [Shard(1), Shard(1)]),
            (square, [_StridedShard(0, split_factor=2), Shard(0)]),
        ]
    return found


def make_params(row):
    """DTensors of every layout, dtype and of odd and small sizes, plain ones among them; twins."""
    generator = torch.Generator().manual_seed(5)
    sharded, whole = [], []
    for mesh, placements in layouts(row):
        for shape in ((5, 7), (1, 3)):
            for dtype in (torch.float32, torch.bfloat16):
                value = torch.randn(shape, generator=generator).to(row.device, dtype)
                sharded.append(Parameter(distribute(value, mesh, placements)))
                sharded.append(Parameter(value.clone()))
                whole += [Parameter(value.clone()), Parameter(value.clone())]
    return sharded, whole


def assert_same_training(row, ours, theirs):
    """Compare pairs of parameters and optimizer, to the bit where elements are independent."""
    for i, (p, q) in enumerate(zip(ours[0], theirs[0], strict=True)):
        pairs = {"": (p, q)}
        entry, expected = (pair[1].state.get(x, {}) for pair, x in ((ours, p), (theirs, q)))
        assert entry.keys() == expected.keys()
        pairs |= {key: (entry[key], expected[key]) for key in entry}
        for key, (value, other) in pairs.items():
            close = {"rtol": 0, "atol": 0} if row.elementwise else {"rtol": 1e-5, "atol": 1e-7}
            if not row.elementwise and p.dtype != torch.float32:
                close = {"rtol": 1e-2, "atol": 1e-3}
            torch.testing.assert_close(
                full(value),
                other.detach(),
                **close,
                msg=lambda text, i=i, key=key, p=p: f"params[{i}] {key} {p}: {text}",
            )


def step(generator, *pairs, factor=1.0):
    give_grads(generator, *(params for params, _ in pairs), factor=factor)
    for _, optimizer in pairs:
        optimizer.step()


def pairs_of(row, **options):
    """The same training of sharded and of whole parameters: (parameters, optimizer) twice."""
    sharded, whole = make_params(row)
    options = row.options | options
    return (sharded, row.make(sharded, **options)), (whole, row.make(whole, **options))


def steps_every_layout(name, folder):
    row = ROWS[name]
    ours, theirs = pairs_of(row, master_weights=True)
    generator = torch.Generator().manual_seed(6)
    for i in range(3):
        for params, optimizer in (ours, theirs):
            for param in params[::3]:
                param.requires_grad_(i != 1)  # frozen for a while
            if i == 2:
                more = [twin_of(param) for param in params[:2]]
                optimizer.add_param_group({"params": more, "lr": 0.5})
                params += more
        step(generator, ours, theirs)
    assert_same_training(row, ours, theirs)
    for param in ours[0]:
        if isinstance(param, DTensor):
            check_state_of(param, ours[1].state[param])


def twin_of(param):
    return Parameter(param.detach().clone())


def loads_every_layout(name, folder):
    """State of whole tensors, of other placements, of another mesh; and it keeps their dtypes."""
    row = ROWS[name]
    ours, theirs = pairs_of(row, master_weights=True)
    generator = torch.Generator().manual_seed(7)
    step(generator, ours, theirs)
    plain = copy.deepcopy(theirs[1].state_dict())
    flat = mesh_of(row)
    other = mesh_of(row, 1, dist.get_world_size())

    def moved(mesh, placements):
        state = {
            i: {
                key: distribute(value, mesh, placements) if value.dim() else value
                for key, value in entry.items()
            }
            for i, entry in plain["state"].items()
        }
        return plain | {"state": state}

    saved = [
        plain,
        copy.deepcopy(ours[1].state_dict()),
        moved(flat, [Shard(1)]),
        moved(other, [Replicate(), Shard(0)]),
    ]
    for state in saved:
        fresh, _ = pairs_of(row, master_weights=True)
        if state is not plain:
            fresh[1].load_state_dict(plain)
            step(generator, fresh)
        fresh[1].load_state_dict(state)
        with torch.no_grad():
            for p, q in zip(fresh[0], ours[0], strict=True):
                p.copy_(q)
        both = copy.deepcopy(theirs)
        step(generator, fresh, both)
        assert_same_training(row, fresh, both)


def copies_and_pickles(name, folder):
    row = ROWS[name]
    ours, theirs = pairs_of(row, master_weights=True)
    generator = torch.Generator().manual_seed(8)
    step(generator, ours, theirs)
    for twins in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        whole = copy.deepcopy(theirs)
        step(generator, twins, whole)
        assert_same_training(row, twins, whole)
    assert_same_training(row, ours, theirs)


def notices_changes_from_outside(name, folder):
    row = ROWS[name]
    ours, theirs = pairs_of(row, master_weights=True)
    generator = torch.Generator().manual_seed(9)
    step(generator, ours, theirs)
    for i, (p, q) in enumerate(zip(ours[0], theirs[0], strict=True)):
        value = torch.rand(q.shape, generator=generator).to(row.device)
        theirs[1].state[q]["exp_avg"] = value
        replace_state(ours[1].state[p], value, p, i % 3, mesh_of(row))
    step(generator, ours, theirs)
    with torch.no_grad():
        for i, (p, q) in enumerate(zip(ours[0], theirs[0], strict=True)):
            q.mul_(3)
            triple(p, (i // 2 + 1) % 4)
    step(generator, ours, theirs)
    assert_same_training(row, ours, theirs)
    with torch.no_grad():
        for p in ours[0][2::4]:  # parts with another order in memory
            p._local_tensor = p._local_tensor.t().contiguous().t()
    step(generator, ours, theirs)
    assert_same_training(row, ours, theirs)


def replace_state(entry, value, param, way, mesh):
    """Put a value in the place of state: whole, in another layout, or written into it."""
    if way == 0 or not isinstance(param, DTensor):
        entry["exp_avg"] = value.clone()
    elif way == 1:
        entry["exp_avg"] = distribute(value, mesh, [Shard(1)])
    else:
        entry["exp_avg"].copy_(distribute(value, param.device_mesh, param.placements))


def triple(param, way):
    """Write a parameter: whole, through its local part, or by putting another part there."""
    if way < 2 or not isinstance(param, DTensor):
        param.mul_(3)
    elif way == 2:
        param._local_tensor.mul_(3)
    else:  # as FSDP2 does
        part = param._local_tensor
        param._local_tensor = torch.empty_strided(
            part.shape, part.stride(), dtype=part.dtype, device=part.device
        ).copy_(part * 3)


def takes_gradients_of_other_layouts(name, folder):
    """As torch's optimizers do, which redistribute them."""
    row = ROWS[name]
    ours, theirs = pairs_of(row)
    generator = torch.Generator().manual_seed(10)
    for kind in range(3):
        give_grads(generator, ours[0], theirs[0])
        for p, q in zip(ours[0], theirs[0], strict=True):
            if isinstance(p, DTensor):
                mesh = p.device_mesh
                placements = [[Replicate()], [Shard(1)], [Partial()]][kind] * mesh.ndim
                part = q.grad
                if kind == 1:
                    part = distribute(q.grad, mesh, placements).to_local()
                if kind == 2:  # the sum of equal powers of two of it
                    part = q.grad / dist.get_world_size()
                p.grad = DTensor.from_local(
                    part, mesh, placements, shape=p.shape, stride=p.stride()
                )
        for _, optimizer in (ours, theirs):
            optimizer.step()
    assert_same_training(row, ours, theirs)


def refuses(name, folder):
    row = ROWS[name]
    title = row.make.__name__
    mesh = mesh_of(row)

    def refused(text, kind=ValueError):
        return pytest.raises(kind, match=f"^{re.escape(title)}: {text}$")

    good = Parameter(torch.ones(4, 4, device=row.device))
    partial = Parameter(DTensor.from_local(torch.ones(4, 4), mesh, [Partial()]))
    text = r"params\[1\] is a DTensor with placements .*, expected Shard or Replicate"
    with pytest.raises(ValueError, match=f"^{title}: {text}$"):
        row.make([good, partial])
    wrong = Parameter(distribute(torch.ones(4, 4).double(), mesh, [Shard(0)]))
    text = (
        r"params\[0\] is a DTensor whose local part is torch.float64, expected float32, bfloat16 "
        "or float16; .*"
    )
    with pytest.raises(ValueError, match=f"^{title}: {text}$"):
        row.make([wrong])

    param = Parameter(distribute(torch.ones(4, 4), mesh, [Replicate()]))
    other = mesh_of(row, 1, dist.get_world_size())
    optimizer = row.make([good, param], **row.options)
    for grad, text in (
        (
            torch.ones(4, 4, device=row.device),
            r"params\[1\] is a Tensor, expected a DTensor, as its parameter is",
        ),
        (
            distribute(torch.ones(4, 4), other, [Replicate()] * 2),
            r"params\[1\] is on DeviceMesh.*, expected DeviceMesh.*",
        ),
    ):
        param.grad = grad
        with pytest.raises(ValueError, match=f"^{title}: gradient of {text}$"):
            optimizer.step()
    assert torch.equal(full(param), torch.ones(4, 4, device=row.device))
    stale = (param * param).sum()
    param.grad = distribute(torch.ones(4, 4), mesh, [Replicate()])
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()
    param.grad = None
    good.grad = distribute(torch.ones(4, 4), mesh, [Replicate()])
    text = r"params\[0\] is a DTensor, expected a plain tensor, as its parameter is"
    with pytest.raises(ValueError, match=f"^{title}: gradient of {text}$"):
        optimizer.step()
    good.grad = None

    param.grad = distribute(torch.ones(4, 4), mesh, [Replicate()])
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    key = next(k for k, value in state["state"][1].items() if value.shape == (4, 4))
    state["state"][1][key] = torch.ones(4, 3)
    text = rf"state of params\[1\]: {key} has shape \[4, 3\], expected \[4, 4\]"
    with pytest.raises(ValueError, match=f"^{title}: {text}$"):
        optimizer.load_state_dict(state)

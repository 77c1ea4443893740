"""zero.Init: the same weights for any number of processes as for a plain model of that seed."""

import json

import pytest
import torch
import torch.distributed as dist
from processes import Case
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from zero_cases import Net, adam, home, loss_of, whole

from deepspeed_ext import io, zero


class Odd(nn.Module):
    """Buffers, tied weights, a module without reset_parameters, batch norm, and attention."""

    def __init__(self, seed=None):
        super().__init__()
        if seed is not None:
            torch.manual_seed(seed)
        self.embedding = nn.Embedding(7, 4, padding_idx=0)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(4, 2, 5, batch_first=True) for _ in range(2)
        )
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.full((3,), 0.5))
        self.register_buffer("table", torch.arange(6.0).view(2, 3), persistent=False)
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("count", torch.tensor(-1))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x.flatten(0, 1))) * self.scale.mean()


def write_the_rest(module):
    """What no reset_parameters writes."""
    if isinstance(module, Odd):
        module.scale.fill_(0.5)
        module.table.copy_(torch.arange(6.0).view(2, 3))
        module.mask.copy_(torch.tensor([True, False]))
        module.count.fill_(-1)


def draw_anew(module):
    """As constructors of transformers do, by apply, when all modules are there."""
    write_the_rest(module)
    if isinstance(module, nn.Linear):
        module.weight.normal_(std=0.02)


def assert_same_model(model, plain):
    for get in (nn.Module.named_parameters, nn.Module.named_buffers):
        pairs = list(zip(get(model), get(plain), strict=True))
        for (name, ours), (other, theirs) in pairs:
            assert name == other and ours.requires_grad == theirs.requires_grad
            assert torch.equal(whole(ours), theirs.detach()), name


def seeds(row, folder):
    for stage in (0, 1, 3):
        random = torch.get_rng_state()
        with zero.Init(seed=5, init=write_the_rest) as init:
            model = Odd()
        assert all(p.is_meta for p in model.parameters())
        assert init.fill(zero.shard(model, stage)) is model
        assert torch.equal(torch.get_rng_state(), random)
        plain = Odd(seed=5)
        assert_same_model(model, plain)
        assert model.head.weight is model.embedding.weight
        trained = adam(model.parameters())
        model.train()(torch.ones(2, 3, dtype=torch.long)).square().mean().backward()
        trained.step()
        assert model.embedding.weight.grad is not None
        with zero.Init(seed=6, init=draw_anew) as init:
            model = Odd()
        init.fill(zero.shard(model, stage))
        plain = Odd(seed=6)
        with torch.no_grad():
            plain.apply(draw_anew)
        assert_same_model(model, plain)


def no_process_group_needed(row, folder):
    with zero.Init(seed=5, init=write_the_rest) as init:
        model = Odd()
    assert_same_model(init.fill(model), Odd(seed=5))


def layouts(row, folder):
    """Replicas of shards, and rows that not every process has."""
    mesh = init_device_mesh(home(), (2, 2), mesh_dim_names=("replica", "shard"))
    gain = lambda module: hasattr(module, "gain") and module.gain.fill_(1)  # noqa: E731
    with zero.Init(seed=3, init=gain) as init:
        model = Net(seed=3)
    init.fill(zero.shard(model, 3, mesh=mesh))
    assert_same_model(model, Net(seed=3))
    loss_of(model, 0).backward()


def files(row, folder):
    source = Odd(seed=8)
    world = dist.get_world_size()
    state = source.state_dict()
    if dist.get_rank() == 0:
        io.save(state, folder / f"whole{world}.safetensors")
        save_parts(folder / f"parts{world}", state)
        low = {n: t.bfloat16() if t.is_floating_point() else t for n, t in state.items()}
        save_parts(
            folder / f"low{world}",
            {f"model.{n}": t for n, t in low.items()} | {"x": state["scale"]},
        )
    dist.barrier()
    bare = lambda name: name.removeprefix("model.") if name != "x" else None  # noqa: E731
    for name, rename in (("whole{}.safetensors", None), ("parts{}", None), ("low{}", bare)):
        path = folder / name.format(world)
        with zero.Init(files=path, init=write_the_rest, rename=rename) as init:
            model = Odd()
        init.fill(zero.shard(model, 3))
        if rename is not None:
            with torch.no_grad():
                for tensor in (*source.parameters(), *source.buffers()):
                    tensor.copy_(tensor.bfloat16()) if tensor.is_floating_point() else None
        assert_same_model(model, source)
        model(torch.ones(2, 3, dtype=torch.long))


def save_parts(path, state):
    """As Hugging Face lays models out: several files and an index; tied weights once."""
    path.mkdir()
    state = {n: t for n, t in state.items() if n not in ("head.weight", "model.head.weight")}
    names = sorted(state)
    index = {}
    for i, part in enumerate((names[::2], names[1::2])):
        io.save({n: state[n] for n in part}, path / f"model-{i}.safetensors")
        index |= {n: f"model-{i}.safetensors" for n in part}
    (path / zero.saved_model.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))


def refusals(row, folder):
    with zero.Init() as init:
        model = Odd()
    with pytest.raises(ValueError) as caught:
        init.fill(zero.shard(model, 2))
    assert str(caught.value) == (
        "zero.Init: 'count', 'mask', 'scale', 'table' are filled by no file, reset_parameters or"
        " init=, expected values for all parameters and buffers; write them in init="
    )


CASES = [
    *(Case(world, "seeds", "") for world in (1, 2, 4)),
    *(Case(world, "files", "") for world in (1, 4)),
    Case(4, "layouts", ""),
    Case(2, "refusals", ""),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.function}-{c.row}-{c.world}")
def test_processes(case, groups):
    groups.run(case)


def test_a_model_that_is_not_sharded():
    no_process_group_needed("", "")


def filled(files, **options):
    with zero.Init(files=files, **options) as init:
        model = nn.Linear(2, 3)
    return init.fill(model)


def refused(text, files, kind=ValueError, **options):
    with pytest.raises(kind) as caught:
        filled(files, **options)
    assert str(caught.value) == text


def test_files_are_checked(tmp_path):
    path = tmp_path / "a.safetensors"
    io.save({"weight": torch.ones(3, 2), "other": torch.ones(1)}, path)
    text = (
        f"zero.Init: {path} has 'other', expected names in the model's state dict; let rename give"
        " None for what is to be left out"
    )
    refused(text, path)
    only = {"weight": "weight"}
    assert torch.equal(filled(path, rename=only.get).weight.data, torch.ones(3, 2))
    io.save({"weight": torch.ones(2, 3)}, path)
    text = (
        f"zero.Init: tensor 'weight' of {path} has shape [2, 3] of torch.float32, expected [3, 2]"
        " of torch.float32"
    )
    refused(text, path)
    io.save({"bias": torch.ones(3, dtype=torch.int32)}, path)
    text = (
        f"zero.Init: tensor 'bias' of {path} has shape [3] of torch.int32, expected [3] of"
        " torch.float32"
    )
    refused(text, path)
    io.save({"bias": torch.arange(3.0)}, path)
    assert torch.equal(filled([path]).bias.data, torch.arange(3.0))
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)
    with pytest.raises(ValueError, match="it was cut short"):
        filled(path)


def test_indexes_are_checked(tmp_path):
    index = tmp_path / zero.saved_model.INDEX
    inside = tmp_path / "a.safetensors"
    io.save({"weight": torch.ones(3, 2)}, inside)
    for content in ("", "[]", "{}", '{"weight_map": {"a": 1}}'):
        index.write_text(content)
        text = f"zero.Init: {index} has no weight_map of names to files, expected an index"
        refused(text, tmp_path)
    for name in ("../a.safetensors", "/etc/passwd", "..", ""):
        index.write_text(json.dumps({"weight_map": {"weight": name}}))
        refused(f"zero.Init: {index} has the file {name!r}, expected files beside it", index)
    index.write_text(json.dumps({"weight_map": {"bias": "a.safetensors"}}))
    text = f"zero.Init: {index} has 'bias' in a.safetensors, expected names of tensors in that file"
    refused(text, tmp_path)


def test_what_is_there_stays():
    with zero.Init() as init:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    kept = nn.Parameter(torch.full((2,), 3.0))
    model[0].bias = kept
    init.fill(model)
    assert model[0].bias is kept and torch.equal(kept.data, torch.full((2,), 3.0))
    assert torch.equal(model[1].running_var, torch.ones(2))
    assert torch.equal(model[1].num_batches_tracked, torch.tensor(0))

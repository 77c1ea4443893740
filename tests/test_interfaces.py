"""What the builders' `load` gives, for code that was written for older libraries."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from deepspeed_ext import interfaces, io, op_builder, ops, optim
from deepspeed_ext.op_builder import OPS, AsyncIOBuilder, CPUAdamBuilder

ROOT = Path(__file__).parent.parent


def test_an_op_library_gives_its_ops():
    adam = CPUAdamBuilder().load(verbose=False)
    assert isinstance(adam, ModuleType) and adam is CPUAdamBuilder().load()
    assert (adam.adam_step_, adam.adam_step_ref_) == (ops.adam_step_, ops.adam_step_ref_)
    assert set(dir(adam)) == {"adam_step_", "adam_step_ref_", "CPUAdamOptimizer"}
    param, grad = torch.ones(4), torch.ones(4)
    state = [torch.zeros(4), torch.zeros(4), torch.zeros(1)]
    adam.adam_step_([param], [grad], *([tensor] for tensor in state), lr=0.5)
    torch.testing.assert_close(param, torch.full((4,), 0.5))


def test_the_io_library_gives_the_handle(tmp_path):
    engine = AsyncIOBuilder().load()
    assert isinstance(engine, ModuleType) and engine.AsyncIO is io.AsyncIO
    handle = engine.aio_handle(1 << 16, 4, False, False, 1)
    tensor = torch.arange(100, dtype=torch.uint8)
    assert handle.sync_pwrite(tensor, str(tmp_path / "file")) == 1
    assert (tmp_path / "file").read_bytes() == bytes(range(100))


@pytest.mark.parametrize("spec", OPS, ids=lambda spec: spec.name)
def test_every_library_has_something_and_says_what_to_use_in_place_of_the_rest(spec):
    module = interfaces.interface_of(spec.name)
    assert all(callable(getattr(module, name)) for name in module.__all__) and module.__all__
    text = f"{spec.name}: attribute is 'create_adam', expected one of {', '.join(module.__all__)}"
    if instead := interfaces._INSTEAD.get(spec.name):
        home, _, name = instead.rpartition(".")
        homes = {"deepspeed_ext.optim": optim, "deepspeed_ext.ops": ops, "deepspeed_ext.io": io}
        assert hasattr(homes[home], name)
        text += f"; in place of the functions of older libraries use {instead}"
    with pytest.raises(AttributeError) as caught:
        _ = module.create_adam
    assert str(caught.value) == text
    assert hasattr(module, "multi_tensor_adam") == (spec.name == "fused_adam")


def test_the_names_that_libraries_share_are_all_there():
    given = {name for spec in OPS for name in interfaces.interface_of(spec.name).__all__}
    of_no_library = {"clip_grad_norm_", "total_squared_norm", "flatten", "unflatten"}
    of_no_library |= {"decode_blocks", "encode_blocks", "join_float32", "split_float32"}
    of_no_library |= {name for name in ops.__all__ if name.startswith("rope_frequencies")}
    of_no_library |= {"rope_scale_yarn", "NextNorm", "Undivided"}
    of_no_library |= {
        name
        for name, home in ops._HOMES.items()
        if home.startswith("deepspeed_ext.ops.transformer.")
    }
    older = {"CPUAdamOptimizer", "multi_tensor_adam"}
    assert given == {*ops.__all__, *io.__all__} - of_no_library | older


def test_a_group_has_what_its_libraries_have():
    names = interfaces.interface_of("transformer_inference").__all__
    assert {"prefill_attention", "decode_attention", "rope_append_"} <= set(names)
    assert len(names) == len(set(names))


def test_loading_compiles_first(monkeypatch):
    loaded = []
    monkeypatch.setattr(op_builder.loading, "load", loaded.append)
    assert op_builder.FusedLionBuilder().load().lion_step_ is ops.lion_step_
    assert loaded == ["fused_lion"]


def test_builders_work_alone(tmp_path):
    """As in setup.py, where there is no package around them."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]);"
        "from op_builder import CPUAdamBuilder, loading;"
        "print(CPUAdamBuilder.interface_of is loading.load, 'deepspeed_ext' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, ROOT], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout == "True False\n", done.stderr

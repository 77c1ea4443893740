"""Private members of torch: one folder of the package reads them, and the torch here has them."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_layering import python_files
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from deepspeed_ext.torch_internals import modules, tensors

HOME = "torch_internals/"
TEXT = "a text"
# Private by their looks only: of Python and its named tuples, of accelerate, ours on objects of
# torch, and torch._foreach_*, which torch documents.
OF_OTHERS = re.compile(
    "_getframe|_current_frames|_register_atexit|_asdict|_fields|_replace|_hf_hook"
    "|_deepspeed_ext_.*|_foreach_.*"
)


def is_private(name: str) -> bool:
    return re.fullmatch(r"_[A-Za-z]\w*", name) is not None and OF_OTHERS.fullmatch(name) is None


def defined_in(tree: ast.AST) -> Iterator[str]:
    """Yield what a file gives names to: functions, classes, variables, attributes of self."""
    for node in ast.walk(tree):
        match node:
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
                | ast.arg(arg=name)
            ):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                yield name


def reads_of(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield each private name that a file reads, and of what."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=value, attr=name) if is_private(name):
                yield name, ast.unparse(value)
            case ast.Import(names=aliases):
                for alias in aliases:
                    yield from ((part, "torch") for part in private_parts(alias.name))
            case ast.ImportFrom(module=str(module), names=aliases, level=0):
                for part in private_parts(".".join([module, *(a.name for a in aliases)])):
                    yield part, module
            case ast.Call(func=ast.Name(id=str(how)), args=[*given, ast.Constant(value=str(name))]):
                if how in ("getattr", "hasattr", "delattr", "attrgetter") and is_private(name):
                    yield name, ast.unparse(given[0]) if given else how
            case ast.Constant(value=str(text)):
                if is_private(text):
                    yield text, TEXT
                yield from ((part, "torch") for part in private_parts(text))


def private_parts(dotted: str) -> list[str]:
    """Return the private names in one of torch such as torch._C.x; none in other texts."""
    if re.fullmatch(r"torch(\.\w+)+", dotted) is None:
        return []
    return [part for part in dotted.split(".") if is_private(part)]


@cache
def sources(at_home: bool = False) -> dict[str, ast.Module]:
    """Return what the package's files say; of the one folder alone in a tenth of the time."""
    files = python_files()
    return {path: ast.parse(files[path]) for path in files if path.startswith(HOME) or not at_home}


@cache
def names_of_torch() -> frozenset[str]:
    """Return the private names that the one folder reads."""
    return frozenset(name for name, _ in reads_at_home())


@cache
def reads_at_home() -> frozenset[tuple[str, str]]:
    return frozenset(read for tree in sources(at_home=True).values() for read in reads_of(tree))


@cache
def names_of_ours() -> frozenset[str]:
    """Return what the package gives names to, less what torch has under the same."""
    others = (tree for path, tree in sources().items() if not path.startswith(HOME))
    modules = {part.removesuffix(".py") for path in sources() for part in path.split("/")}
    defined = frozenset(name for tree in others for name in defined_in(tree))
    return (defined | modules) - names_of_torch()


def problems(tree: ast.AST) -> list[str]:
    """Return what a file reads of torch's; what it defines itself it may read of self."""
    here = set(defined_in(tree))
    found = []
    for name, owner in reads_of(tree):
        if owner == TEXT:
            is_ours = (name, TEXT) not in reads_at_home()
        elif owner in ("self", "cls", "super()"):
            is_ours = name in here or name in names_of_ours()
        else:
            is_ours = name in names_of_ours() and re.match(r"torch\b", owner) is None
        if not is_ours:
            found.append(f"reads {name} of {owner}, which only {HOME} may")
    return found


def test_no_other_file_reads_private_members() -> None:
    others = ((path, tree) for path, tree in sources().items() if not path.startswith(HOME))
    assert [f"{path} {problem}" for path, tree in others for problem in problems(tree)] == []


@pytest.mark.parametrize(
    "text",
    [
        "import torch._dynamo",
        "from torch._C import parse_schema",
        "from torch.nn.modules.module import _global_forward_hooks",
        "def f():\n    from torch.distributed.fsdp._fully_shard import x",
        "torch._int_mm(x, y)",
        "torch.nn._reduction.get_enum(x)",
        "def f(tensor):\n    return tensor._local_tensor",
        "def f(tensor):\n    return tensor._unheard_of",
        "class A:\n    def f(self):\n        return self._parameters",
        "getattr(tensor, '_version')",
        "attrgetter('_spec')",
        "sys.modules.get('torch._dynamo.config')",
    ],
)
def test_the_rule_notices(text: str) -> None:
    assert problems(ast.parse(text))


def test_the_rule_lets_ours_be() -> None:
    text = "class A:\n    def __init__(self):\n        self._spec = 1\n        print(self._spec)"
    assert problems(ast.parse(text)) == []


# What torch has

OF_CUDA = {"_cuda_hasPrimaryContext"}  # where torch was built with it
KEYS = {"_extra_state"}  # of state dicts: no attributes
SINCE_2_13 = {"_fsdp_param_groups", "reset_iter_state"}
UNTIL_2_11 = {"_fsdp_param_group", "reduce_scatter_state"}  # seen; 2.12 was not looked at
OF_MODULES = ("torch._C", "_library_utils", "_pytree", "config")
OF_FULLY_SHARD = r"state|group|param|home|context|root|.*\._state_ctx"


def public_names_of(path: str, tree: ast.AST) -> Iterator[str]:
    """Yield the public names of what is private: of modules, and of objects of fully_shard."""
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=aliases) if private_parts(module):
                yield from (alias.name for alias in aliases)
            case ast.Attribute(value=value, attr=name):
                owner, of_fully_shard = ast.unparse(value), path.endswith("fully_shard.py")
                if owner in OF_MODULES or (of_fully_shard and re.fullmatch(OF_FULLY_SHARD, owner)):
                    yield name


@cache
def all_names() -> list[str]:
    """Return the names that the one folder reads of torch."""
    names = {name for name, _ in reads_at_home()} - KEYS
    for path, tree in sources(at_home=True).items():
        names.update(public_names_of(path, tree))
    return sorted(names)


@pytest.fixture(scope="module")
def owners() -> Iterator[dict[str, list[Any]]]:
    """Return what has each name: several for those that more than one object has to have."""
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model: Any = fully_shard(nn.Sequential(nn.Linear(2, 2)))
        model(torch.ones(1, 2)).sum().backward()
        found: dict[str, list[Any]] = {}
        for owner, names in (*plain_owners(), *owners_of_fully_shard(model)):
            for name in names.split():
                found.setdefault(name, []).append(owner)
        yield found
    finally:
        dist.destroy_process_group()


def plain_owners() -> Iterator[tuple[Any, str]]:
    for module, names in (
        ("torch", "_C _compile _library _ops _dynamo _int_mm _scaled_mm _subclasses"),
        ("torch._subclasses", "FakeTensor FakeTensorMode"),
        ("torch", "_has_compatible_shallow_copy_type"),
        ("torch.utils", "_pytree _python_dispatch"),
        ("torch.distributed.tensor", "_utils"),
        ("torch.distributed.fsdp", "_fully_shard"),
        ("torch.distributed.fsdp._fully_shard", "_fsdp_common"),
        ("torch._compile", "_disable_dynamo"),
        ("torch._dynamo.config", "nontraceable_tensor_subclasses"),
        ("torch._library.autograd", "Info make_autograd_impl"),
        ("torch._library.utils", "has_kwarg_only_tensors is_tensorlist_like_type"),
        ("torch._ops", "OpOverload"),
        ("torch.utils._python_dispatch", "TorchDispatchMode is_traceable_wrapper_subclass"),
        ("torch.utils._pytree", "tree_leaves tree_map"),
        ("torch.autograd", "_unsafe_preserve_version_counter"),
        ("torch.autograd.forward_ad", "_current_level"),
        ("torch.distributed.tensor._utils", "compute_local_shape_and_global_offset"),
        ("torch.distributed.distributed_c10d", "_get_default_store"),
        ("torch.nn.modules.module", "_global_forward_hooks _global_forward_pre_hooks"),
        ("torch._C", "_AutoDispatchBelowAutograd _after_autograd_keyset _any_requires_grad"),
        ("torch._C", "_are_functorch_transforms_active _current_graph_task_id parse_schema"),
        ("torch._C", "_set_grad_enabled"),
        ("torch._C", "_is_fwd_grad_enabled _is_torch_function_enabled DispatchKeySet"),
        ("torch._C", "DisableTorchFunctionSubclass _cuda_hasPrimaryContext _autograd"),
        ("torch._C", "_will_engine_execute_node"),
        ("torch._C._autograd", "_get_current_graph_task_keep_graph"),
        ("torch._C._autograd", "_top_saved_tensors_default_hooks"),
    ):
        yield import_module(module), names
    module, world = nn.Linear(1, 1), dist.group.WORLD
    optimizer = torch.optim.SGD(module.parameters())
    yield torch.ops.aten, "_to_copy"
    yield torch.autograd.Variable, "_execution_engine"
    yield torch.ops.aten.add.Tensor, "_op _schema"
    yield torch.ones(1), "_version _base _is_zerotensor _backward_hooks _make_subclass"
    yield torch.ones(1), "_post_accumulate_grad_hooks _make_wrapper_subclass"
    yield torch.ones(1).untyped_storage(), "_cdata"
    yield module, "_parameters _buffers _modules _non_persistent_buffers_set _call_impl"
    yield module, "_forward_hooks _forward_pre_hooks _backward_hooks _backward_pre_hooks"
    yield module, "_state_dict_hooks _state_dict_pre_hooks _compiled_call_impl"
    yield module, "_load_state_dict_pre_hooks _load_state_dict_post_hooks"
    yield module.state_dict(), "_metadata"
    yield module, "_apply _replicate_for_data_parallel"
    yield nn.LSTM(1, 1), "_flat_weights _flat_weights_names"
    yield nn.MultiheadAttention(1, 1), "_reset_parameters"
    yield torch.compile(module), "_orig_mod"
    yield checkpoint_wrapper(module), "_checkpoint_wrapped_module"
    yield optimizer, "_optimizer_load_state_dict_pre_hooks _optimizer_load_state_dict_post_hooks"
    yield dist.device_mesh.init_device_mesh("cpu", (1,)), "_get_root_mesh _unflatten"
    yield world, "_get_backend"
    yield world._get_backend(torch.device("cpu")).options, "_timeout"


def owners_of_fully_shard(model: Any) -> Iterator[tuple[Any, str]]:
    state = model._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    group = groups[0] if groups else state._fsdp_param_group
    param = group.fsdp_params[0]
    yield model, "_get_fsdp_state reset_iter_state"
    yield state, "_fsdp_param_groups _fsdp_param_group _is_root _state_ctx _comm_ctx"
    yield state, "_mp_policy _pre_forward_hook_handle _post_forward_hook_handle"
    yield state, "_training_state _root_post_backward_final_callback"
    yield state._state_ctx, "iter_forward_root post_backward_final_callback_queued"
    yield state._comm_ctx, "all_gather_state reduce_scatter_state post_forward_order"
    yield group, "_training_state _all_gather_result _post_reduce_event _all_reduce_state"
    yield group, "_reshard_after_forward_event _post_forward_indices _partial_reduce_output"
    yield group, "_to_sharded fsdp_params is_unsharded unshard reshard mesh_info post_backward"
    yield group, "wait_for_unshard"
    yield param, "_unsharded_param _setattr_on_modules _module_info sharded_param"
    yield param, "unsharded_accumulated_grad reset_sharded_param _sharded_param_data"
    yield param, "fsdp_placement sharded_size _orig_size"
    yield group, "_orig_dtype _init_mp_dtypes reduce_grads"
    yield param, "reduce_dtype all_gather_outputs to_accumulated_grad_if_needed"
    yield param._module_info, "module param_name shared_modules"
    yield param.sharded_param, "_local_tensor _spec"
    yield import_module("torch.distributed.fsdp._fully_shard._fsdp_common"), "TrainingState"


@pytest.mark.parametrize("name", all_names())
def test_torch_has(name: str, owners: dict[str, list[Any]]) -> None:
    assert name in owners, f"say in {Path(__file__).name} what of torch has {name}"
    if name in OF_CUDA and torch.version.cuda is None:
        pytest.skip("this torch was built without CUDA")
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    if (name in SINCE_2_13 and version < (2, 13)) or (name in UNTIL_2_11 and version > (2, 11)):
        pytest.skip("of other versions")
    without = [owner for owner in owners[name] if not hasattr(owner, name)]
    assert not without, f"torch {torch.__version__}: no {name} in {without}"


def test_nothing_else_is_looked_for(owners: dict[str, list[Any]]) -> None:
    assert set(owners) - set(all_names()) == set()


def test_what_is_named_by_a_text_is_what_torch_calls_it() -> None:
    """A key of a state dict, the class of compiled modules: no attribute has these names."""

    class Counted(nn.Module):
        def get_extra_state(self) -> int:
            return 0

    assert list(Counted().state_dict()) == [modules.EXTRA_STATE]
    assert modules.is_compiled(torch.compile(nn.Linear(1, 1)))


@pytest.mark.parametrize("at_once", [4, 16, 1 << 20])
@pytest.mark.parametrize("kept_in", [torch.bfloat16, torch.float32, torch.uint8])
def test_differ_sees_each_element(
    kept_in: torch.dtype, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the first and last of what is compared at once, of no elements, NaN, and a sign of 0."""
    monkeypatch.setattr(tensors, "_COMPARED_AT_ONCE", at_once)
    sizes = [0, 5, 11, 0, 1, 7, 3, 20, 0]
    values = [torch.arange(size).float() for size in sizes]
    if kept_in.is_floating_point:
        values[4][0], values[5][2] = torch.nan, 0.0
    kept = [value.to(kept_in, copy=True) for value in values]
    assert not tensors.differ(values, kept)
    for value in values:
        for i in range(value.numel()):
            was = value[i].item()
            value[i] = -0.0 if was == 0 and kept_in.is_floating_point else 77.0
            assert tensors.differ(values, kept)
            value[i] = was
    assert not tensors.differ([values[0]], [kept[0]])

"""What importing deepspeed_ext.ops, and using a name of it, brings into the process."""

import json
import subprocess
import sys
from importlib import import_module
from typing import Any

import pytest
import warm_python

from deepspeed_ext import ops

# Both print what has been imported, and what is registered, after the statements in between.
SEEN = """
import json, sys
{}
imported = sorted(name for name in sys.modules if name.startswith("deepspeed_ext.ops."))
registered = []
if "torch" in sys.modules:
    import torch
    registered = torch._C._dispatch_get_all_op_names()
registered = [name[15:] for name in registered if name.startswith("deepspeed_ext::")]
print(json.dumps(dict(imported=imported, registered=registered, torch="torch" in sys.modules)))
"""


def seen_after(statements: str) -> Any:
    """What a process that has imported torch has after these statements."""
    done = warm_python.run("-c", SEEN.format(statements))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_importing_the_package_imports_nothing_else() -> None:
    command = [sys.executable, "-c", SEEN.format("import deepspeed_ext.ops")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert json.loads(done.stdout) == dict(imported=[], registered=[], torch=False), done.stderr


def test_saving_needs_no_op() -> None:
    seen = seen_after("from deepspeed_ext.io import save, load")
    assert seen["registered"] == [] and seen["imported"] == []


@pytest.mark.parametrize(
    "use",
    ["from deepspeed_ext.ops import adam_step_", "from deepspeed_ext import ops; ops.adam_step_"],
)
def test_using_a_function_registers_its_op_alone(use: str) -> None:
    seen = seen_after(use)
    assert sorted(seen["registered"]) == ["adam_step_", "adam_step_.out"]
    assert not any("lion" in name or ".norm" in name for name in seen["imported"])


def test_all_ops_are_registered_by_a_star() -> None:
    registered = set(seen_after("from deepspeed_ext.ops import *")["registered"])
    assert {"adam_step_", "lars_norms", "squared_norms", "rms_norm", "rope"} <= registered


def test_an_op_can_be_used_first_inside_a_compiled_function() -> None:
    seen = seen_after(
        "import torch; from deepspeed_ext import ops;"
        "compiled = torch.compile(lambda x: ops.rms_norm(x) * 2, fullgraph=True, backend='eager');"
        "x = torch.ones(2, 8);"
        "assert torch.equal(compiled(x), ops.rms_norm(x) * 2)"
    )
    assert "rms_norm" in seen["registered"]


def test_every_public_name_is_where_the_table_says() -> None:
    for name, home in ops._HOMES.items():
        assert getattr(ops, name) is getattr(import_module(home), name)
        assert getattr(ops, name).__module__ == home
    assert set(ops.__all__) == set(ops._HOMES) <= set(dir(ops))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"has no attribute .adm.$"):
        ops.adm  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'adm'"):
        from deepspeed_ext.ops import adm  # type: ignore[attr-defined] # noqa: F401

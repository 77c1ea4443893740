"""Importing the package is inert: no process, CUDA context, output, compiler or heavy module."""

import importlib.metadata
import json
import os
import subprocess
import sys

import pytest

import deepspeed_ext

# Run in a fresh process: imports every module of the package but `python -m` entries, and
# writes what it saw to the file in its argument.
_IMPORT_ALL = """
import json, sys
import torch
started = []
def watch(event, arguments):
    if event in ("subprocess.Popen", "pty.spawn") or event.startswith(("os.exec", "os.fork",
            "os.posix_spawn", "os.spawn", "os.system", "os.startfile")):
        started.append(f"{event} {arguments}")
sys.addaudithook(watch)
import importlib, pkgutil, threading
import deepspeed_ext
threads = threading.active_count()
import deepspeed_ext.op_builder  # where it is another folder, walking does not find it
names = [module.name for package in (deepspeed_ext, deepspeed_ext.op_builder)
         for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
         if not module.name.endswith("__main__")]
for name in names:
    importlib.import_module(name)
seen = {"names": names, "processes": started, "cuda": torch.cuda.is_initialized(),
        "threads": threading.active_count() - threads}
open(sys.argv[1], "w").write(json.dumps(seen))
"""


def _run(code, folder, **environ):
    """Run `code` with a path for its answer; return the answer and what it printed."""
    answer = folder / "answer"
    done = subprocess.run(
        [sys.executable, "-c", code, answer],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return answer.read_text(), done.stdout + done.stderr


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """What importing every module did, on a machine without a compiler or any other program."""
    folder = tmp_path_factory.mktemp("imported")
    answer, printed = _run(
        _IMPORT_ALL, folder, PATH=str(folder / "empty"), CXX="", DS_EXT_CACHE=str(folder / "cache")
    )
    return json.loads(answer) | {"printed": printed, "cache": folder / "cache"}


def test_all_modules_were_imported(imported):
    expected = {"deepspeed_ext.ops", "deepspeed_ext.optim", "deepspeed_ext.op_builder.loading"}
    assert expected <= set(imported["names"])


def test_import_starts_no_process(imported):
    assert imported["processes"] == []


def test_import_starts_no_thread(imported):
    assert imported["threads"] == 0


def test_import_makes_no_cuda_context(imported):
    assert not imported["cuda"]


def test_import_prints_nothing(imported):
    assert imported["printed"] == ""


def test_import_compiles_nothing(imported):
    assert not imported["cache"].exists()


def test_import_alone_does_not_import_torch(tmp_path):
    code = "import sys, deepspeed_ext; open(sys.argv[1], 'w').write(str('torch' in sys.modules))"
    assert _run(code, tmp_path) == ("False", "")


def test_import_loads_nothing_heavy(tmp_path):
    """An optimizer needs torch, this package and Python; benchmarks.bench_build has the times."""
    code = """if True:
        import sys, torch
        before = set(sys.modules)
        import deepspeed_ext
        deepspeed_ext.DeepSpeedCPUAdam, deepspeed_ext.adam_step_
        new = {name for name in sys.modules if name not in before}
        heavy = {name for name in new if name.partition(".")[0] not in sys.stdlib_module_names}
        heavy -= {name for name in heavy if name.startswith("deepspeed_ext")}
        open(sys.argv[1], "w").write(" ".join(sorted(heavy)))
    """
    assert _run(code, tmp_path) == ("", "")


def test_public_names_come_from_their_homes():
    from deepspeed_ext import ops, optim

    assert deepspeed_ext.DeepSpeedCPUAdam is optim.DeepSpeedCPUAdam
    assert deepspeed_ext.FusedAdam is optim.FusedAdam
    assert deepspeed_ext.adam_step_ is ops.adam_step_
    assert deepspeed_ext.adam_step_ref_ is ops.adam_step_ref_


def test_public_names_are_listed():
    assert set(deepspeed_ext.__all__) <= set(dir(deepspeed_ext))


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'deepspeed_ext' has no attribute 'FusedAdm'"):
        deepspeed_ext.FusedAdm  # noqa: B018


def test_version_is_that_of_the_distribution():
    assert deepspeed_ext.__version__ == importlib.metadata.version("deepspeed_ext")

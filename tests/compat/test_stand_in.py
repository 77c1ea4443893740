"""A package named deepspeed: for one process, and written into an environment and out of it."""

import importlib.metadata
import importlib.util
import multiprocessing
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import warm_python

from deepspeed_ext.compat import __main__ as command, environment
from deepspeed_ext.compat.environment import Environment
from deepspeed_ext.compat.names import HERE, MODULES_NOT_HERE

ROOT = Path(__file__).parents[2]
# What Hugging Face's libraries, and scripts, do.
IMPORTS = """
import importlib.metadata, importlib.util
import deepspeed
import deepspeed.ops.adam as adam
import deepspeed.runtime.zero.partition_parameters
from deepspeed import DeepSpeedEngine, comm, zero
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from deepspeed.launcher.runner import DEEPSPEED_ENVIRONMENT_NAME
from deepspeed.ops.lion import DeepSpeedCPULion
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.utils import groups, logger, safe_get_full_grad, set_z3_leaf_modules
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
import deepspeed_ext.compat
assert importlib.util.find_spec("deepspeed") is not None
assert importlib.metadata.metadata("deepspeed")["Name"] == "deepspeed"
assert importlib.metadata.version("DeepSpeed") == deepspeed.__version__ == "0.16.3+deepspeed.ext"
assert deepspeed is deepspeed_ext.compat and comm.is_initialized() is False
assert GatheredParameters is zero.GatheredParameters is deepspeed_ext.compat.zero.GatheredParameters
assert deepspeed.zero is zero is deepspeed_ext.compat.zero
assert adam.DeepSpeedCPUAdam is deepspeed.ops.adam.DeepSpeedCPUAdam
assert deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES
try:
    from deepspeed.pipe import PipelineModule
except ImportError as error:
    assert "deepspeed.pipe.PipelineModule is not here; " in str(error)
else:
    raise AssertionError
"""


def run(code, **environment):
    """Run code in a process that has imported torch."""
    variables = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    done = warm_python.run("-c", code, env=variables)
    assert done.returncode == 0, done.stdout + done.stderr


def test_install_is_for_a_process():
    run(
        "import deepspeed_ext.compat as compat, sys\n"
        "assert 'deepspeed' not in sys.modules\n"
        f"compat.install()\ncompat.install()\n{IMPORTS}"
        "names = [d.metadata['Name'] for d in importlib.metadata.distributions()]\n"
        "assert names.count('deepspeed') == 1\n"
        "compat.install()\n"
    )


def test_install_comes_first_and_beside_no_other(tmp_path):
    too_late = (
        "import sys, types\n"
        "for name in ('accelerate', 'transformers'): sys.modules[name] = types.ModuleType(name)\n"
        "from deepspeed_ext import compat\n"
        "try: compat.install()\n"
        "except RuntimeError as error:\n"
        "    assert str(error).startswith('compat.install: accelerate, transformers are imp')\n"
        "else: raise AssertionError\n"
        "assert 'deepspeed' not in sys.modules\n"
    )
    run(too_late)
    foreign(tmp_path)
    beside = (
        "from deepspeed_ext import compat\n"
        "try: compat.install()\n"
        "except RuntimeError as error:\n"
        "    assert str(error).startswith('compat.install: deepspeed 0.19.8 is there'), error\n"
        "else: raise AssertionError\n"
    )
    run(beside, PYTHONPATH=f"{ROOT}:{tmp_path}")


def foreign(folder):
    """Make a folder that has another deepspeed."""
    (folder / "deepspeed").mkdir()
    (folder / "deepspeed" / "__init__.py").write_text("zero = 1\n")
    info = folder / "deepspeed-0.19.8.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.19.8\n")


@pytest.fixture
def place(tmp_path):
    """Folders of packages and of programs."""
    made = Environment(tmp_path / "packages", tmp_path / "bin")
    made.packages.mkdir()
    (tmp_path / "bin").mkdir()
    return made


def files_of(place):
    return sorted(
        str(p.relative_to(place.packages.parent)) for p in place.packages.parent.rglob("*")
    )


def test_enable_and_disable(place):
    empty = files_of(place)
    assert not place.has_parts() and not place.is_whole() and not place.disable()
    assert place.enable() and place.is_whole() and place.has_parts()
    assert not place.enable()
    run(IMPORTS, PYTHONPATH=f"{ROOT}:{place.packages}")
    for left in place.packages.glob("*/__pycache__"):
        for file in left.iterdir():
            file.unlink()
        left.rmdir()
    assert os.access(place.packages.parent / "bin" / "deepspeed", os.X_OK)
    assert place.disable() and files_of(place) == empty


@pytest.mark.parametrize("kind", ["module", "link"])
def test_what_others_have_there_stays(place, kind):
    """A module of one file, and a program whose target is not there now."""
    if kind == "module":
        (place.packages / "deepspeed.py").write_text("zero = 1\n")
    else:
        (place.packages.parent / "bin" / "deepspeed").symlink_to("/nowhere/deepspeed")
    before = files_of(place)
    with pytest.raises(ValueError, match="expected no deepspeed"):
        place.enable()
    place.disable()
    assert files_of(place) == before


def test_pip_removes_it(tmp_path):
    """In an environment of its own, by its command line."""
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    before = files_of_env(tmp_path)

    def compat(what):
        return subprocess.run(
            [python, "-m", "deepspeed_ext.compat", what],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )

    assert compat("status").returncode == 1
    done = compat("enable")
    assert done.returncode == 0 and done.stdout.startswith("wrote deepspeed 0.16.3+"), done.stderr
    assert compat("status").stdout.startswith("enabled: deepspeed 0.16.3+deepspeed.ext in ")
    pip = [sys.executable, "-m", "pip", "--python", python, "uninstall", "--yes", "deepspeed"]
    done = subprocess.run(pip, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert files_of_env(tmp_path) == before


def files_of_env(folder):
    return sorted(path for path in (folder / "env").rglob("*") if "__pycache__" not in path.parts)


def test_the_command_says_what_is_so(place, monkeypatch, capsys):
    monkeypatch.setattr(command, "Environment", lambda: place)
    said = []
    for what in ("status", "disable", "enable", "enable", "status", "disable", "status"):
        said.append((command.main([what]), capsys.readouterr().out.split(" deepspeed")[0]))
    assert [status for status, _ in said] == [1, 0, 0, 0, 0, 0, 1]
    assert [text.strip() for _, text in said[2:6:2]] == ["wrote", "enabled:"]
    place.enable()
    (place.packages / "deepspeed" / "__init__.py").write_text("# deepspeed_ext.compat, older\n")
    assert command.main(["status"]) == 1
    assert capsys.readouterr().out.startswith("half written, or of another version: ")
    assert command.main(["enable"]) == 0 and place.is_whole()


@pytest.mark.parametrize("at", range(3))
@pytest.mark.parametrize("what", ["enable", "disable"])
def test_an_interrupted_call_leaves_nothing_broken(place, what, at):
    """A process that ends at once in the middle: there is a whole package, or none that counts."""
    if what == "disable":
        place.enable()
    child = os.fork()
    if child == 0:
        rename, calls = os.rename, []

        def ends(*arguments):
            calls.append(1)
            if len(calls) > at:
                os._exit(9)
            rename(*arguments)

        os.rename = ends
        getattr(place, what)()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (
        9 if what == "enable" or at < 2 else 0
    )
    path = [str(place.packages)]
    counts = bool(list(importlib.metadata.distributions(name="deepspeed", path=path)))
    is_there = importlib.machinery.PathFinder.find_spec("deepspeed", path) is not None
    assert place.is_whole() or not (counts and is_there)
    getattr(place, what)()
    assert place.is_whole() == (what == "enable") == place.has_parts()
    assert not list(place.packages.glob(".deepspeed*"))
    assert [p.name for p in (place.packages.parent / "bin").iterdir()] == ["deepspeed"] * (
        what == "enable"
    )


def _enable(place, results):
    results.put(place.enable())


def test_several_at_once_write_one(place):
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    children = [context.Process(target=_enable, args=(place, results)) for _ in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * 4
    assert sorted(results.get() for _ in children) == [False, False, False, True]
    assert place.is_whole()


def test_what_is_there_stays(place, monkeypatch, capsys):
    foreign(place.packages)
    for what in ("enable", "disable"):
        with monkeypatch.context() as patch:
            patch.syspath_prepend(place.packages)
            patch.setattr(command, "Environment", lambda: place)
            assert command.main([what]) == 1
            assert f"compat.{what}: deepspeed 0.19.8 is there" in capsys.readouterr().err
            assert command.main(["status"]) == 1
            assert "deepspeed 0.19.8 is there, which is not" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"__init__\.py is there, expected no deepspeed"):
        place.enable()
    (place.packages / "deepspeed" / "__init__.py").rename(place.packages / "deepspeed" / "other.py")
    program = place.packages.parent / "bin" / "deepspeed"
    program.write_text("#!/bin/sh\n")
    with pytest.raises(ValueError, match="bin/deepspeed is there, expected no deepspeed"):
        place.enable()
    assert program.read_text() == "#!/bin/sh\n"
    gone = Environment(place.packages / "none", place.packages)
    with pytest.raises(FileNotFoundError):
        gone.enable()


def test_every_module_is_named():
    assert "zero" not in HERE and not HERE.keys() & MODULES_NOT_HERE.keys()
    assert environment.NAME == "deepspeed"

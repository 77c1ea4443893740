"""Installing: wheel and sdist without torch or a compiler, and wheels with compiled ops inside."""

import ast
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import torch

from deepspeed_ext.op_builder import OPS, BuildError, aot, load, probe
from deepspeed_ext.op_builder.errors import Unavailable
from deepspeed_ext.op_builder.registry import GROUPS

ROOT = Path(__file__).parent.parent
EVERY_OP = {spec.name for spec in OPS}
NAME = re.search(r'__version__ = "(.+)"', (ROOT / "deepspeed_ext/__init__.py").read_text())[1]
NOT_SOURCES = (".*", "build", "dist", "out", "prebuilt", "*.egg-info", "__pycache__", "*.so")
LEFT_OUT = {spec.name for spec in OPS if spec.name.startswith("cpu_")} - {"cpu_l2_norm"}
# All on CUDA would take 10 minutes: an optimizer, and what is none.
LEFT_OUT |= {spec.name for spec in OPS if spec.device == "cuda"}
LEFT_OUT -= {"fused_adam", "fused_l2_norm"}
CUDA_WORD = re.compile(r"cuda|cublas|curand|nvrtc", re.IGNORECASE)

# Torch's number for the device type, which every libtorch_cpu.so defines; error texts compare it.


def run(*command, **options):
    return subprocess.run([*map(str, command)], capture_output=True, text=True, **options)


def environment(**changes):
    """Return this process's variables without those that build ops or change imports."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("DS_", "DSX_", "PYTHON"))}
    return kept | {name: str(value) for name, value in changes.items()}


def pip_wheel(source, out, **options):
    """Make a wheel as `pip install` does; return what pip printed."""
    command = ("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index")
    return run(sys.executable, *command, "-w", out, source, **options)


def only_wheel(done, out):
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = out.glob("*.whl")
    return wheel


def names_in(wheel):
    return set(zipfile.ZipFile(wheel).namelist())


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the sources, so that building does not litter the working copy."""
    copy = tmp_path_factory.mktemp("tree") / "deepspeed_ext"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_SOURCES))
    return copy


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """The environment of a build that sees no program at all, and whose torch is not importable."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text("raise ImportError('this build has no torch')")
    (folder / "bin").mkdir()
    return environment(PYTHONPATH=folder, PATH=folder / "bin", CXX="no-such-compiler")


@pytest.fixture(scope="module")
def compiled_wheel(tree, tmp_path_factory):
    """The wheel of DS_BUILD_OPS=1, for one CUDA target, where there is a CUDA compiler.

    Of the CPU ops, which the cache has already, it holds the one that compiles fastest; of those on
    CUDA some of each kind.
    """
    if not compilable():
        pytest.skip(f"no op can be compiled here: {probe.why_not(OPS[0])[0]}")
    base = tmp_path_factory.getbasetemp()
    out = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiled"
    out.mkdir(exist_ok=True)
    left_out = {f"DS_BUILD_{name.upper()}": 0 for name in LEFT_OUT}
    variables = environment(DS_BUILD_OPS="1", TORCH_CUDA_ARCH_LIST="9.0", **left_out)
    with (out / "lock").open("w") as lock:  # one worker makes it for all
        fcntl.flock(lock, fcntl.LOCK_EX)
        (wheel,) = list(out.glob("*.whl")) or [only_wheel(pip_wheel(tree, out, env=variables), out)]
    return wheel


@pytest.fixture(scope="module")
def plain_wheel(tree, bare, tmp_path_factory):
    """The usual wheel, from a tree in which another one has been built before."""
    out = tmp_path_factory.mktemp("plain")
    for leftover in ("prebuilt/cpu_adam.so", "csrc/removed.h"):
        path = tree / "build" / "lib" / "deepspeed_ext" / leftover
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("from an older build")
    return only_wheel(pip_wheel(tree, out, env=bare), out)


def files_of(tree, folder):
    """Return the files below a folder of the tree, as the tree calls them."""
    found = [path for path in (tree / folder).rglob("*") if path.is_file()]
    return {str(path.relative_to(tree)) for path in found if "__pycache__" not in path.parts}


def compilable():
    return {spec.name for spec in OPS if not probe.why_not(spec)}


def fresh_python(folder, wheel):
    """Install the wheel into a new environment that has this one's other packages; return Python.

    They are plain folders of its path, so that an editable install of this one stays behind.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    others = [entry for entry in sys.path if entry.endswith("-packages")]
    (site / "others.pth").write_text("\n".join(others) + "\n")
    command = ("install", "--no-deps", "--no-index", "--no-compile", wheel)
    done = run(sys.executable, "-m", "pip", "--python", python, *command)
    assert done.returncode == 0, done.stdout + done.stderr
    return python


def test_plain_wheel_is_for_every_machine(plain_wheel):
    assert plain_wheel.name == f"deepspeed_ext-{NAME}-py3-none-any.whl"
    assert not [name for name in names_in(plain_wheel) if name.endswith(".so")]


def test_wheel_carries_all_sources(plain_wheel, tree):
    inside = {f"deepspeed_ext/{f}" for part in ("csrc", "op_builder") for f in files_of(tree, part)}
    expected = files_of(tree, "deepspeed_ext") | inside
    assert {"deepspeed_ext/py.typed", "deepspeed_ext/csrc/optimizers/adam_math.inl"} <= expected
    assert {name for name in names_in(plain_wheel) if ".dist-info/" not in name} == expected


def test_sdist_makes_the_same_wheel(tree, bare, plain_wheel, tmp_path):
    build = "from setuptools import build_meta as b; import sys; b.build_sdist(sys.argv[1])"
    done = run(sys.executable, "-c", build, tmp_path, cwd=tree, env=bare)
    assert done.returncode == 0, done.stdout + done.stderr
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    for folder in ("tests", "requirements"):
        assert files_of(tree, folder) <= files
    wheel = only_wheel(pip_wheel(sdist, tmp_path, env=bare), tmp_path)
    assert names_in(wheel) == names_in(plain_wheel)


def test_requirements_are_the_base_ones_and_leave_torch_alone(plain_wheel):
    archive = zipfile.ZipFile(plain_wheel)
    (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    lines = archive.read(metadata).decode().split("\n\n")[0].splitlines()
    wanted = [line.removeprefix("Requires-Dist: ") for line in lines if "Requires-Dist" in line]
    always = [requirement for requirement in wanted if "extra ==" not in requirement]
    assert [requirement.replace(" ", "") for requirement in always] == base_requirements()
    assert "torch>=2.11" in base_requirements()


def base_requirements():
    lines = (ROOT / "requirements" / "base.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_requirements_are_what_the_package_imports():
    imported = set()
    for path in [*ROOT.glob("deepspeed_ext/**/*.py"), *ROOT.glob("op_builder/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                imported.add(node.module.partition(".")[0])
    third_party = imported - sys.stdlib_module_names - {"deepspeed_ext"}
    needed = {re.split(r"\W", requirement)[0] for requirement in base_requirements()}
    # ninja is a program, pybind11 headers; matplotlib is for the examples, an extra, and starlette
    # and uvicorn are for the server, another one. Tokenizers are taken where they are, and
    # transformers is what an example compares itself with.
    optional = {"matplotlib", "numpy", "starlette", "tokenizers", "transformers", "uvicorn"}
    optional.add("jinja2")  # which torch needs, so it is there
    assert third_party - optional == needed - {"ninja", "pybind11"}


def test_installed_wheel_works_without_a_compiler(plain_wheel, tmp_path):
    python = fresh_python(tmp_path / "env", plain_wheel)
    code = (
        "import deepspeed_ext, torch; from deepspeed_ext.op_builder import load, loading;"
        "print(deepspeed_ext.__file__, torch.__version__, loading.CSRC.is_dir(), sep='\\n');"
        "load('cpu_adam')"
    )
    variables = environment(PATH=tmp_path, DS_EXT_CACHE=tmp_path / "cache", CXX="no-such-compiler")
    done = run(python, "-c", code, env=variables, cwd=tmp_path)
    file, torch_version, has_csrc = done.stdout.splitlines()
    assert Path(file).is_relative_to(tmp_path / "env")
    assert torch_version == torch.__version__
    assert has_csrc == "True"
    assert "CXX names the compiler 'no-such-compiler'" in done.stderr.splitlines()[-1]


def test_a_working_copy_in_the_working_folder_is_whole(plain_wheel, tree, tmp_path):
    """Python finds it before what is installed, and all of it, not half of each."""
    python = fresh_python(tmp_path / "env", plain_wheel)
    code = (
        "import deepspeed_ext, deepspeed_ext.op_builder as builder;"
        "from deepspeed_ext import op_builder; from deepspeed_ext.op_builder import loading;"
        "assert op_builder is builder;"
        "print(deepspeed_ext.__file__, builder.__file__, loading.CSRC, sep='\\n')"
    )
    done = run(python, "-c", code, env=environment(), cwd=tree)
    assert done.stdout.splitlines() == [
        str(tree / "deepspeed_ext" / "__init__.py"),
        str(tree / "op_builder" / "__init__.py"),
        str(tree / "csrc"),
    ], done.stderr
    done = run(python, "-m", "deepspeed_ext.op_builder", "path", env=environment(), cwd=tree)
    assert (done.returncode, done.stderr) == (0, "")
    done = run(python, "-c", code, env=environment(), cwd=tmp_path)
    assert all(f"{tmp_path}/env/" in line for line in done.stdout.splitlines()), done.stderr


def test_a_part_of_a_working_copy_says_what_to_do(tree, tmp_path):
    shutil.copytree(tree / "deepspeed_ext", tmp_path / "deepspeed_ext")
    done = run(sys.executable, "-c", "import deepspeed_ext", env=environment(), cwd=tmp_path)
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: deepspeed_ext: {tmp_path}/deepspeed_ext has no op_builder in it or beside"
        " it, expected the whole package; run Python in another folder, or install the package"
        " again"
    )


@pytest.mark.long
def test_compiled_wheel_is_for_this_platform(compiled_wheel):
    number = f"cp{sys.version_info.major}{sys.version_info.minor}"
    tag = f"{number}-{number}" if "async_io" in compilable() else "py3-none"  # a Python module
    assert re.fullmatch(rf"deepspeed_ext-{NAME}-{tag}-linux_\w+\.whl", compiled_wheel.name)
    libraries = {name for name in names_in(compiled_wheel) if name.endswith(".so")}
    assert libraries == {f"deepspeed_ext/prebuilt/{name}.so" for name in compilable() - LEFT_OUT}


@pytest.mark.long
def test_compiled_cpu_library_has_nothing_of_cuda(compiled_wheel, tmp_path):
    for tool in ("readelf", "nm"):
        if shutil.which(tool) is None:
            pytest.skip(f"there is no {tool} on PATH")
    cpu = [spec for spec in OPS if spec.device == "cpu" and spec.name in compilable()]
    assert {"cpu_adam", "cpu_l2_norm"} <= {spec.name for spec in cpu}
    for name, needs in ((spec.name, spec.needs) for spec in cpu):
        member = f"deepspeed_ext/prebuilt/{name}.so"
        wheel = zipfile.ZipFile(compiled_wheel)
        library = load(name) if name in LEFT_OUT else wheel.extract(member, tmp_path)
        dynamic = run("readelf", "-d", library).stdout
        assert ("libtorch" in dynamic) == ("torch" in needs)
        assert not CUDA_WORD.search(dynamic)
        symbols = set(run("nm", "-D", library).stdout.split())
        known = "aoti_torch_abi_version" if "torch" in needs else f"PyInit_{name}"
        assert known in symbols  # so the list is not an empty one
        assert not [name for name in symbols if CUDA_WORD.search(name)]


@pytest.mark.long
def test_compiled_wheel_works_without_a_compiler(compiled_wheel, tmp_path):
    python = fresh_python(tmp_path / "env", compiled_wheel)
    variables = environment(
        PATH=tmp_path, DS_EXT_CACHE=tmp_path / "cache", DS_EXT_JIT="0", CXX="no-such-compiler"
    )
    program = python.with_name("ds_report")
    names = compilable() & {"cpu_l2_norm", "async_io"}
    done = run(program, *names, "--json", env=variables, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)["ops"]
    assert set(found) == names
    for row in found.values():
        assert row["library"].startswith(f"{tmp_path}/env/")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("command", ["bdist_wheel", "editable_wheel"])
def test_op_asked_for_by_name_that_cannot_be_built_stops_the_install(command, tree, tmp_path):
    variables = environment(DS_BUILD_CPU_ADAM="1", CXX="no-such-compiler")
    options = ("--dist-dir", tmp_path)
    done = run(sys.executable, "setup.py", "-q", command, *options, cwd=tree, env=variables)
    assert done.returncode == 1
    assert not list(tmp_path.glob("*.whl"))
    last = done.stderr.splitlines()[-1]
    assert "cpu_adam: DS_BUILD_CPU_ADAM=1 asks for it, but CXX names the compiler" in last
    assert last.endswith("or set DS_BUILD_CPU_ADAM=0 to install without cpu_adam")


def test_ops_asked_for_where_torch_is_hidden_stop_the_install(tree, tmp_path):
    code = "import sys; sys.path = sys.argv[2:] + sys.path; from op_builder import aot;"
    code += (
        "from pathlib import Path; aot.compile_into_package(Path(sys.argv[1]), Path(sys.argv[1]))"
    )
    arguments = ("-I", "-S", "-c", code, tmp_path, tree)
    done = run(sys.executable, *arguments, env=environment(DS_BUILD_OPS="1"))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("then: pip install --no-build-isolation .")


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Run aot.build with a compiler that fails for the named ops; return what is in the folder."""
    monkeypatch.setattr(aot.probe, "check_compilable", lambda spec: None)
    for spec in OPS:
        monkeypatch.delenv(f"DS_BUILD_{spec.name.upper()}", raising=False)

    def build(failing=()):
        def compile_library(wanted, scratch):
            if wanted.spec.name in failing:
                raise Unavailable("a cause", "a fix")
            scratch.mkdir(parents=True, exist_ok=True)
            library = scratch / wanted.file
            library.write_text(wanted.spec.name)
            return library

        monkeypatch.setattr(aot, "compile_library", compile_library)
        libraries = aot.compile_into_package(tmp_path / "prebuilt", tmp_path / "scratch")
        assert libraries == [path for path in libraries if path.is_file()]
        return {path.stem for path in (tmp_path / "prebuilt").glob("*")}

    return build


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, set()),
        ({"OPS": "0"}, set()),
        ({"OPS": "1"}, EVERY_OP),
        ({"OPS": "1", "FUSED_ADAM": "0"}, EVERY_OP - {"fused_adam"}),
        ({"OPS": "0", "FUSED_ADAM": "1"}, {"fused_adam"}),
        ({"FUSED_ADAM": "1"}, {"fused_adam"}),
        ({"CPU_NORM": "1"}, {"cpu_l2_norm"}),  # what it was called before
        ({"OPS": "1", "FUSED_NORM": "0"}, EVERY_OP - {"fused_l2_norm"}),
        ({"OPS": "1", "CPU_ADAM": ""}, EVERY_OP),
        ({"TRANSFORMER_INFERENCE": "1"}, set(GROUPS["transformer_inference"])),
        (
            {"TRANSFORMER_INFERENCE": "1", "FUSED_KV_CACHE": "0"},
            set(GROUPS["transformer_inference"]) - {"fused_kv_cache"},
        ),
        (
            {"OPS": "1", "TRANSFORMER_INFERENCE": "0", "FUSED_KV_CACHE": "1"},
            EVERY_OP - set(GROUPS["transformer_inference"]) | {"fused_kv_cache"},
        ),
        ({"STRING": "a suffix", "SPARSE_ATTN": "0"}, set()),
    ],
)
def test_variables_choose_the_ops(variables, expected, compiled, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(f"DS_BUILD_{name}", value)
    assert compiled() == expected


def test_op_that_is_not_asked_for_by_name_may_fail(compiled, monkeypatch, caplog):
    monkeypatch.setenv("DS_BUILD_OPS", "1")
    assert compiled() == EVERY_OP
    assert compiled(failing=["fused_adam"]) == EVERY_OP - {
        "fused_adam"
    }  # and the older library is gone
    assert "fused_adam is left out: a cause; a fix" in caplog.text


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        ("DS_BUILD_CPU_ADAMM", "1", "DS_BUILD_CPU_ADAMM=1 asks for an op that does not exist"),
        ("DS_BUILD_OPS", "yes", "DS_BUILD_OPS is 'yes', expected 0 or 1"),
        ("DS_BUILD_CPU_ADAM", "2", "DS_BUILD_CPU_ADAM is '2', expected 0 or 1"),
    ],
)
def test_wrong_variable_stops_the_install(variable, value, text, compiled, monkeypatch):
    monkeypatch.setenv(variable, value)
    with pytest.raises(BuildError, match=text):
        compiled()

"""ds_report: the state of each op, the machine around it, JSON, exit codes and colours."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import torch
import warm_python

from deepspeed_ext import environment, report
from deepspeed_ext.op_builder import OPS, OpSpec, cuda, probe
from deepspeed_ext.processors import ranges, share_here

CPU_ADAM, CPU_L2_NORM = (
    next(spec for spec in OPS if spec.name == n) for n in ("cpu_adam", "cpu_l2_norm")
)
ISAS = ("scalar", "sse2", "neon", "avx2", "avx512")


def passes(device):
    """A self-check that finds nothing wrong."""
    assert device == "cpu"


def fails(device):
    raise ValueError(f"wrong numbers\non {device}")


def crashes(device):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def checked_by(monkeypatch):
    """Make an op whose library is there, and whose self-check is a function of this file."""
    monkeypatch.setitem(sys.modules, "checks_of_this_test", sys.modules[__name__])
    monkeypatch.setattr(report, "load", lambda name: Path(f"/somewhere/{name}.so"))
    return lambda function: OpSpec(
        "made_up", "cpu", sources=(), self_check=f"checks_of_this_test:{function.__name__}"
    )


@pytest.fixture
def nothing_built(monkeypatch, tmp_path):
    """No library anywhere, and the routes of the environment open."""
    monkeypatch.setenv("DS_EXT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("deepspeed_ext.op_builder.loading.PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setattr("deepspeed_ext.op_builder.loading._LOADED", {})  # by tests before this one
    for name in ("DS_EXT_JIT", "DS_EXT_LIBRARY_CPU_ADAM"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def ds_report(*arguments, **environ):
    return subprocess.run(
        [sys.executable, "-m", "deepspeed_ext.report", *arguments],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
    )


def test_op_whose_self_check_passes_works(checked_by):
    row = report.check(checked_by(passes))
    assert (row.op, row.device, row.state) == ("made_up", "cpu", "works")
    assert row.milliseconds >= 0
    assert (row.library, row.reason) == ("/somewhere/made_up.so", None)


def test_op_whose_self_check_raises_is_unavailable(checked_by):
    row = report.check(checked_by(fails))
    assert row.state == "unavailable"
    assert row.reason == (
        "its self-check failed with ValueError: wrong numbers on cpu;"
        " run: python -m deepspeed_ext.op_builder clean, then: ds_report --build made_up"
    )


def test_op_whose_self_check_crashes_is_unavailable(checked_by):
    row = report.check(checked_by(crashes))
    assert row.state == "unavailable"
    assert row.reason.startswith("its self-check ended with signal SIGKILL; run: ")


def test_without_torch_that_is_the_reason(tmp_path):
    """In a Python without any package, for every op, and also where an op is ready."""
    root = Path(report.__file__).parent.parent
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from deepspeed_ext import report;"
        "sys.exit(report.main(['--json', *sys.argv[2:]]))"
    )
    command = [sys.executable, "-S", "-I", "-c", code, root, "cpu_adam", "async_io"]
    environ = {**os.environ, "DS_EXT_CACHE": str(tmp_path)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "")
    found = json.loads(done.stdout)
    for row in found["ops"].values():
        assert row["state"] == "unavailable"
        assert row["reason"].startswith("torch is not installed; run: ")
        assert row["reason"].endswith(" -m pip install 'torch>=2.11'")
    of_torch = ("torch", "CUDA of torch", "threads", "CUDA devices", "I/O backends", "direct I/O")
    for name in (*of_torch, "I/O settings", "NCCL"):
        assert found["environment"][name].startswith("not found: torch is not installed; run: ")


def test_a_torch_that_cannot_be_imported_is_the_reason(tmp_path):
    """Its version is right, but it lacks a library, say."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.13.0'\n")
    (tmp_path / "torch" / "__init__.py").write_text(
        "import sys\n"
        "if hasattr(sys, 'tried'):\n"
        "    raise RuntimeError('function has a docstring')\n"  # as torch's second time does
        "sys.tried = True\n"
        "raise OSError('no libcudart.so')\n"
    )
    done = ds_report("--json", "cpu_adam", PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (1, "")
    found = json.loads(done.stdout)
    want = "torch cannot be imported (OSError: no libcudart.so); install torch again"
    assert found["ops"]["cpu_adam"]["reason"] == want
    for name in ("torch", "threads", "CUDA devices", "NCCL", "I/O backends"):
        assert found["environment"][name] == f"not found: {want}"


def test_op_without_library_is_not_built_and_is_not_compiled(nothing_built):
    reasons = probe.why_not(CPU_ADAM)
    if reasons:
        pytest.skip(f"cpu_adam cannot be compiled here: {reasons[0]}")
    row = report.check(CPU_ADAM)
    assert row.state == "not built"
    assert row.reason == "ds_report --build cpu_adam compiles it"
    assert not (nothing_built / "cache").exists()


def test_op_without_library_and_compiler_is_unavailable(nothing_built, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    row = report.check(CPU_ADAM)
    assert row.state == "unavailable"
    assert "no-such-compiler" in row.reason and "; " in row.reason


def test_op_without_library_is_unavailable_where_compiling_is_forbidden(nothing_built, monkeypatch):
    monkeypatch.setenv("DS_EXT_JIT", "0")
    row = report.check(CPU_ADAM)
    assert row.state == "unavailable"
    assert "DS_EXT_JIT=0" in row.reason


def test_wrong_override_is_unavailable(nothing_built, monkeypatch):
    monkeypatch.setenv("DS_EXT_LIBRARY_CPU_ADAM", "/no/such.so")
    row = report.check(CPU_ADAM)
    assert row.state == "unavailable"
    assert "DS_EXT_LIBRARY_CPU_ADAM names /no/such.so" in row.reason


@pytest.mark.parametrize(
    ("torch_cuda", "visible", "installed", "reason"),
    [
        (None, None, [], "no CUDA device is visible; run on a machine with an NVIDIA GPU"),
        ("13.0", "", [], "no CUDA device is visible; unset CUDA_VISIBLE_DEVICES, which is ''"),
        (None, None, [90], "the torch that is installed has no CUDA; "),
        ("13.0", None, [90], "torch cannot use the CUDA device; update its driver"),
    ],
)
def test_cuda_op_without_device_is_unavailable(
    torch_cuda, visible, installed, reason, checked_by, monkeypatch
):
    spec = OpSpec("made_up", "cuda", (), ("cuda",), self_check=checked_by(crashes).self_check)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", torch_cuda)
    monkeypatch.setattr("deepspeed_ext.op_builder.toolchain.torch_cuda", lambda: torch_cuda)
    monkeypatch.setattr(cuda, "device_capabilities", lambda: installed)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    row = report.check(spec, build=True)
    assert row.state == "unavailable"
    assert reason in row.reason


@pytest.fixture
def table_of(monkeypatch, capsys, checked_by):
    """Run ds_report in this process on made-up ops; return exit code and output."""

    def run(*arguments, checks=(passes, fails)):
        ops = [
            OpSpec(function.__name__, "cpu", (), self_check=checked_by(function).self_check)
            for function in checks
        ]
        monkeypatch.setattr(report, "OPS", ops)
        monkeypatch.setattr(report, "GROUPS", {"both": ("passes", "fails")})
        return report.main(list(arguments)), capsys.readouterr()

    return run


def test_table_has_a_row_for_each_op(table_of):
    code, printed = table_of()
    lines = printed.out.splitlines()
    assert lines[0].split() == ["op", "device", "state"]
    assert lines[1].startswith("passes  cpu     works (self-check in ")
    assert lines[2].startswith("fails   cpu     unavailable: its self-check failed with")
    assert lines[3].startswith(" " * 16) and lines[3].strip()
    assert code == 0  # nothing was named


def test_table_fits_eighty_columns(table_of):
    _, printed = table_of()
    too_long = [line for line in printed.out.splitlines() if len(line) > 80]
    assert [line for line in too_long if "/" not in line] == []  # a path is never cut


def test_exit_code_is_that_of_the_named_ops(table_of):
    assert table_of("passes")[0] == 0
    assert table_of("fails")[0] == 1
    assert table_of("both")[0] == 1  # a group
    assert table_of("passes", "fails", "--json")[0] == 1


def test_only_the_named_ops_are_run(table_of):
    _, printed = table_of("passes", "--json", checks=(passes, crashes))
    assert list(json.loads(printed.out)["ops"]) == ["passes"]


def test_unknown_op_is_refused_with_the_known_names(table_of):
    code, printed = table_of("cpu_adamm")
    assert code == 1
    assert printed.out == ""
    assert printed.err == "ds_report: op is 'cpu_adamm', expected one of passes, fails, both\n"


def test_colours_are_for_terminals_only(table_of, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert "\x1b" not in table_of()[1].out
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda self: True)
    assert "\x1b[32mworks\x1b[0m (self-check" in table_of()[1].out
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in table_of()[1].out


def test_failing_probe_is_a_line(monkeypatch):
    def broken():
        raise RuntimeError("line one\nline two")

    monkeypatch.setattr(environment, "_devices", broken)
    monkeypatch.setenv("CXX", "no-such-compiler")
    lines = environment.describe()
    assert lines["CUDA devices"] == "not found: line one line two"
    assert lines["C++ compiler"].startswith("not found: CXX names the compiler")


def no_answer() -> str:
    threading.Event().wait()
    raise AssertionError


def bad_answer() -> str:
    raise RuntimeError("unhandled system error\nlast error: no socket")


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (None, "2.99.1, not tried: no CUDA device is visible"),
        (lambda: " works", "2.99.1 works"),
        (bad_answer, "2.99.1 does not work: unhandled system error last error: no socket"),
        (lambda: os._exit(5), "2.99.1 does not work: its process ended with code 5"),
        (no_answer, "2.99.1 does not work: no answer within 0.01 s"),
    ],
)
def test_nccl_is_tried_in_a_child(answer, text, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 99, 1))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if answer is not None:
        monkeypatch.setattr(environment, "_try_nccl", answer)
    if answer is no_answer:
        monkeypatch.setattr(environment, "_NCCL_SECONDS", 0.01)
    assert environment._nccl() == text
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert environment._nccl() == "none in this torch"


def test_nccl_works_where_there_is_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    done = ds_report("--json", "cpu_l2_norm")
    version = ".".join(map(str, torch.cuda.nccl.version()))
    assert json.loads(done.stdout)["environment"]["NCCL"] == f"{version} works"


def test_a_compiler_without_a_version_and_a_cache_that_is_not_used(monkeypatch, tmp_path):
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("DS_EXT_CACHE", str(tmp_path))
    tmp_path.chmod(0o777)
    lines = environment.describe()
    assert lines["C++ compiler"] == f"{compiler} names no version"
    assert lines["op cache"] == f"{tmp_path} is not used (others can write to it)"


def test_locked_memory_limit_has_human_units(monkeypatch):
    limits = {65536: "64 KiB", 8 << 20: "8 MiB", 100: "100 bytes", -1: "unlimited"}
    for limit, text in limits.items():
        monkeypatch.setattr("resource.getrlimit", lambda _, limit=limit: (limit, limit))
        assert environment.describe()["locked memory"] == text


@pytest.fixture
def cpu_l2_norm():
    """The op that compiles fastest."""
    reasons = probe.why_not(CPU_L2_NORM)
    if reasons:
        pytest.skip(f"cpu_l2_norm cannot be compiled here: {reasons[0]}")


@pytest.mark.usefixtures("cpu_l2_norm")
@pytest.mark.long
def test_real_report_as_json(tmp_path):
    done = ds_report("--build", "cpu_l2_norm", DS_EXT_CACHE=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(tmp_path.glob("cpu_l2_norm-*/cpu_l2_norm.so"))
    # By its earlier name, too.
    done = ds_report("--json", "cpu_norm", DS_EXT_CACHE=str(tmp_path), CXX="no-such-compiler")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["ops"]["cpu_l2_norm"]["state"] == "works"
    assert found["ops"]["cpu_l2_norm"]["milliseconds"] > 0
    assert found["ops"]["cpu_l2_norm"]["library"].startswith(str(tmp_path))
    assert found["environment"]["op cache"] == str(tmp_path)
    assert found["environment"]["torch"].startswith(torch.__version__)


@pytest.mark.usefixtures("cpu_l2_norm")
@pytest.mark.parametrize("isa", ISAS)
def test_instruction_sets_are_those_of_the_kernels(isa):
    code = "from deepspeed_ext.report import main; raise SystemExit(main())"
    environ = {**os.environ, "DSX_FORCE_ISA": isa}
    done = warm_python.run("-c", code, "--json", "--build", "cpu_l2_norm", env=environ)
    found = json.loads(done.stdout)
    works = found["ops"]["cpu_l2_norm"]["state"] == "works"
    assert found["environment"]["CPU kernels"].startswith(f"{isa}, forced" if works else "none: ")


def test_the_threads_of_a_process_beside_others(monkeypatch):
    """As torchrun starts it; the report says what OffloadOptimizer would take."""
    mask = sorted(os.sched_getaffinity(0))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    before = f"1 in torch, {len(mask)} cores for this process; "
    found = environment._threads()
    alone = f"1 in OffloadOptimizer, on any of processors {ranges(mask)}"
    assert found == before + alone
    count = len(mask)  # so that each has one
    for name, value in (("LOCAL_WORLD_SIZE", count), ("LOCAL_RANK", 0), ("OMP_NUM_THREADS", 1)):
        monkeypatch.setenv(name, str(value))
    assert environment._threads() == before + f"1 in OffloadOptimizer, on {share_here()}"
    monkeypatch.setenv("LOCAL_RANK", str(count))  # no such process
    assert environment._threads() == before + alone

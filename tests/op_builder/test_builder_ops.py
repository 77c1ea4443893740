"""The rows of the registry compile, the CPU one loads; builder classes; the command line."""

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from deepspeed_ext import op_builder
from deepspeed_ext.op_builder import OPS, loading, probe, registry, toolchain
from deepspeed_ext.op_builder.__main__ import main
from deepspeed_ext.op_builder.builders import class_name
from deepspeed_ext.op_builder.compile import compile_library
from deepspeed_ext.op_builder.wanted import Wanted

CPU = registry.spec_of("cpu_adam")


def undefined_libraries(library: Path) -> set[str]:
    text = subprocess.run(["readelf", "-d", library], check=True, capture_output=True, text=True)
    return set(re.findall(r"\(NEEDED\).*\[(.*?)\]", text.stdout))


@pytest.mark.long
def test_a_cpu_row_compiles_and_loads_and_knows_no_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_EXT_WERROR", "1")
    row = registry.spec_of("cpu_l2_norm")  # which compiles fastest
    library = compile_library(Wanted.of(row), tmp_path / "a folder")
    assert Wanted.of(row).fits(library)
    assert not any("cuda" in name or "cublas" in name for name in undefined_libraries(library))
    assert json.loads((tmp_path / "a folder" / "build.json").read_text())["cxx"]
    # Its earlier names are known, too.
    monkeypatch.setenv("DS_EXT_LIBRARY_CPU_NORM", str(library))
    code = "from deepspeed_ext.op_builder import load as l; print(l('cpu_l2_norm'), l('cpu_norm'))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == f"{library} {library}\n"


@pytest.mark.long
def test_a_cuda_row_compiles_where_there_is_nvcc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = registry.spec_of("fused_l2_norm")
    reasons = probe.why_not(row)
    if reasons:
        pytest.skip(reasons[0])
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    monkeypatch.setenv("DS_EXT_WERROR", "1")
    library = compile_library(Wanted.of(row), tmp_path)
    assert Wanted.of(row).fits(library)
    needed = undefined_libraries(library)
    assert "libtorch.so" in needed and any(name.startswith("libcudart") for name in needed)
    assert "libtorch_cuda.so" not in needed


def test_every_source_of_the_registry_is_there() -> None:
    for spec in OPS:
        assert Wanted.of(spec).digest
        assert re.fullmatch(r"[a-z0-9_]+", spec.name)
        assert re.fullmatch(r"[\w.]+:\w+", spec.self_check)


@pytest.mark.parametrize(
    "op, name",
    [
        ("cpu_adam", "CPUAdamBuilder"),
        ("fused_adam", "FusedAdamBuilder"),
        ("cpu_adagrad", "CPUAdagradBuilder"),
        ("async_io", "AsyncIOBuilder"),
        ("random_ltd", "RandomLTDBuilder"),
        ("transformer_inference", "InferenceBuilder"),
    ],
)
def test_class_names(op: str, name: str) -> None:
    assert class_name(op) == name


def test_every_row_has_a_builder() -> None:
    for spec in OPS:
        builder = getattr(op_builder, class_name(spec.name))
        assert spec.name == builder.NAME and issubclass(builder, op_builder.OpBuilder)
    with pytest.raises(AttributeError, match="NoSuchBuilder"):
        _ = op_builder.NoSuchBuilder


def test_a_builder_loads_its_op_and_gives_what_belongs_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    monkeypatch.setattr(loading, "load", lambda name: done.append(f"load {name}"))
    monkeypatch.setattr(op_builder.OpBuilder, "interface_of", lambda name: done.append(name) or 5)
    assert op_builder.CPUAdamBuilder().load(verbose=False) == 5
    assert done == ["load cpu_adam", "cpu_adam"]


def test_builders_have_their_earlier_names_too() -> None:
    for earlier, name in registry.EARLIER_NAMES.items():
        assert registry.specs_of(earlier) == (registry.spec_of(name),)
        assert registry.spec_of(earlier) is registry.spec_of(name)
    functions = dir(op_builder.CPUL2NormBuilder().load())
    assert functions == dir(op_builder.CPUNormBuilder().load()) and "l2_norm" in functions
    assert op_builder.FusedNormBuilder.NAME == "fused_norm"


def test_every_self_check_is_there() -> None:
    for spec in registry.OPS:
        module, _, name = spec.self_check.partition(":")
        assert callable(getattr(importlib.import_module(module), name)), spec.name


def test_a_builder_of_a_group_loads_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(loading, "load", lambda name: done.append(name))
    monkeypatch.setattr(op_builder.OpBuilder, "interface_of", lambda name: name)
    assert op_builder.InferenceBuilder().load() == "transformer_inference"
    members = registry.GROUPS["transformer_inference"]
    assert done == list(members) and len(set(members)) == len(members)
    states: dict[str, list[str]] = {name: [] for name in members}
    monkeypatch.setattr(loading, "status", lambda spec: (None, states[spec.name]))
    assert op_builder.InferenceBuilder().is_compatible()
    states[members[-1]].append("it is the last one")
    assert not op_builder.InferenceBuilder().is_compatible()


def test_the_quantizers_name_stands_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in older libraries; where there is no CUDA, it says so, and the CPU's builder works."""
    builder, of_cpu = op_builder.QuantizerBuilder(), op_builder.CPUQuantizerBuilder()
    assert registry.GROUPS[builder.NAME] == ("fused_quantizer",)
    assert builder.is_compatible() == op_builder.FusedQuantizerBuilder().is_compatible()
    if torch.version.cuda is None:
        assert not builder.is_compatible()
        with pytest.raises(op_builder.BuildError, match=r"fused_quantizer: .*CUDA"):
            builder.load()
    assert of_cpu.is_compatible()
    x = torch.randn(4, 64)
    assert of_cpu.load().ds_quantizer(x.clone(), 4).shape == x.shape
    monkeypatch.setattr(loading, "load", lambda name: name)
    assert builder.load().__all__ == of_cpu.load().__all__


def test_is_compatible_means_that_load_would_work(
    monkeypatch: pytest.MonkeyPatch, warnings_logged: Callable[[], list[str]], tmp_path: Path
) -> None:
    builder = op_builder.CPUAdamBuilder()
    assert builder.is_compatible(verbose=True) and warnings_logged() == []
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert not builder.is_compatible() and warnings_logged() == []
    assert not builder.is_compatible(verbose=True)
    (warning,) = warnings_logged()
    assert warning.startswith("cpu_adam: CXX names the compiler") and "unset CXX" in warning
    (tmp_path / "mine.so").write_text(Wanted.of(CPU).stamp)
    monkeypatch.setenv("DS_EXT_LIBRARY_CPU_ADAM", str(tmp_path / "mine.so"))
    assert builder.is_compatible()  # a ready library needs no compiler
    monkeypatch.setattr(toolchain, "_torch_states", lambda name: "2.10.0")
    assert not builder.is_compatible()


def test_is_compatible_heeds_the_ban_on_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_EXT_JIT", "0")
    monkeypatch.setattr(loading, "PREBUILT", Path("/nowhere"))
    assert not op_builder.CPUAdamBuilder().is_compatible()


@pytest.mark.parametrize("columns", [50, 80])
def test_the_command_line_fits_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line[0] != " "] == [spec.name for spec in OPS]
    assert all(len(line) <= columns or " " not in line.strip() for line in lines)


def test_the_command_line_builds_what_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    built: list[Wanted] = []

    def compile_into_cache(wanted: Wanted) -> Path:
        built.append(wanted)
        return tmp_path / "cpu_adam.so"

    monkeypatch.setattr("deepspeed_ext.op_builder.__main__.compile_into_cache", compile_into_cache)
    assert main(["build", "cpu_adam"]) == 0
    assert built == [Wanted.of(CPU)] and "ready" in capsys.readouterr().out
    assert main(["build", "no_such_op"]) == 1
    assert "no_such_op: there is no such op" in capsys.readouterr().err


def test_the_command_line_says_why_a_build_failed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert main(["build", "cpu_adam"]) == 1
    assert "/nowhere/c++" in capsys.readouterr().out
    assert main(["build"]) == 0  # not named, so not asked for: skipped with the reason
    assert "skipped" in capsys.readouterr().out


def test_path_and_clean(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["path"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "cache")
    assert main(["clean"]) == 0

"""The house rules that can be read off the sources: who may include or import whom, and sizes.

Each rule is a function from a file to what is wrong with it. It runs over all sources, and over
small samples that break it, so that a rule that has gone blind is noticed.
"""

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath

import pytest
from floors import FLOORS_OF_OPS, NATIVE_FLOORS, PYTHON_LAYERS, ROOMS, Layers

ROOT = Path(__file__).parent.parent
CPP_SUFFIXES = {".h", ".inl", ".cuh", ".cpp", ".cu"}
SOURCES = {".py", *CPP_SUFFIXES}
PROGRAMS = ("examples/", "report.py", "__main__.py")  # these talk to a user, so they may print
MAX_LINES = 500
MAX_FUNCTION_LINES = 60
Rule = Callable[[str, str], Iterator[str]]


def cpp_files() -> dict[str, str]:
    """Return the text of each native source by its path in csrc."""
    files = sorted(path for path in (ROOT / "csrc").rglob("*") if path.suffix in CPP_SUFFIXES)
    return {path.relative_to(ROOT / "csrc").as_posix(): path.read_text() for path in files}


def python_files() -> dict[str, str]:
    """Return the text of each Python source by its path in the installed package, or examples/."""
    folders = {
        ROOT / "deepspeed_ext": "",
        ROOT / "op_builder": "op_builder/",
        ROOT / "examples": "examples/",
    }
    return {
        prefix + path.relative_to(folder).as_posix(): path.read_text()
        for folder, prefix in folders.items()
        for path in sorted(folder.rglob("*.py"))
    }


def includes_of(text: str) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', text, re.MULTILINE)


def without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


# Native code


def headers_are_of_the_stable_abi(path: str, text: str) -> Iterator[str]:
    """torch/torch.h, torch/extension.h, ATen and c10 would tie a binary to one torch."""
    for header in includes_of(text):
        stable = header.startswith(
            ("torch/csrc/stable/", "torch/headeronly/", "torch/csrc/inductor/aoti_torch/c/")
        )
        if header.startswith(("torch/", "ATen/", "c10/")) and not stable:
            yield f"includes {header}, which is not of torch's stable ABI"


def torch_stays_at_the_boundary(path: str, text: str) -> Iterator[str]:
    """Kernels know no torch: only *_ops* and common/torch do."""
    at_boundary = "_ops" in PurePosixPath(path).name or path.startswith("common/torch/")
    for header in includes_of(text):
        if header.startswith(("torch/", "common/torch/")) and not at_boundary:
            yield f"includes {header}, which only *_ops* files and common/torch may"


def pybind11_stays_in_bindings(path: str, text: str) -> Iterator[str]:
    """Python's ABI is for aio's bindings alone, and those know no torch."""
    headers = includes_of(text)
    if re.fullmatch(r"aio/\w+_bindings\.cpp", path):
        yield from (
            f"includes {header}, a torch header" for header in headers if "torch/" in header
        )
    else:
        yield from (f"includes {header}" for header in headers if header.startswith("pybind11"))


def families_have_floors(path: str, text: str) -> Iterator[str]:
    """A family includes itself, common, and what it stands on; common includes common."""
    families = {str(PurePosixPath(name).parent) for name in cpp_files()} | {"aio", "optimizers"}
    mine = family_of(str(PurePosixPath(path).parent))
    allowed = ("common", mine, *NATIVE_FLOORS.get(mine, ()))
    for header in includes_of(text):
        folder = str(PurePosixPath(header).parent)
        if folder in families and family_of(folder) not in allowed:
            yield f"includes {header}, of {family_of(folder)}, which {mine} does not stand on"


def family_of(folder: str) -> str:
    """Return the family that a folder of csrc belongs to: all of common is one."""
    return "common" if folder.startswith("common") else folder


def roles_are_kept(path: str, text: str) -> Iterator[str]:
    """A formula includes its declarations only; CPU code no CUDA, CUDA code no SIMD."""
    name = PurePosixPath(path).name
    for header in includes_of(text):
        if name.endswith("_math.inl") and header != path.replace("_math.inl", ".h"):
            yield f"includes {header}: a formula includes at most its own declarations"
        cuda = header.startswith(("cuda", "common/cuda/"))
        if cuda and not ("cuda" in name or path.startswith("common/cuda/")):
            yield f"includes {header} in a file that is not for CUDA"
        if header == "common/simd/foreach_isa.h" and not name.endswith("_cpu.cpp"):
            yield f"includes {header}, which is for *_cpu.cpp"


def native_code_is_silent(path: str, text: str) -> Iterator[str]:
    """It never prints, exits or starts a thread of its own; only the I/O engine has threads.

    What DSX_ASSERT expands to aborts in builds with DSX_CHECKED, which are those of test programs.
    """
    code = without_comments(text)
    if path == "common/checked.h":
        code = code.replace("define DSX_ASSERT(condition, text) assert(", "")
    for word in re.findall(r"\b(f?printf|puts|cout|cerr|_?exit|abort|assert)\b\s*(?:\(|<<)", code):
        yield f"calls {word}"
    if not path.startswith("aio/"):
        for word in re.findall(r"std::(?:thread|jthread|async)\b|pthread_create|#pragma omp", code):
            yield f"has {word}: threads are parallel_for's and the I/O engine's"
    at_boundary = "_ops" in PurePosixPath(path).name or path.startswith("common/torch/")
    if "parallel_for" in code and not at_boundary:
        yield "has parallel_for, which is for *_ops* and common/torch"


def nothing_is_global(path: str, text: str) -> Iterator[str]:
    """State belongs to an object that the caller holds."""
    for line in without_comments(text).splitlines():
        if re.match(
            r"\s*(static|thread_local|extern)\b(?!.*\b(const|constexpr|extern \"C\")\b)", line
        ):
            if "(" not in line and line.rstrip().endswith((";", "{")):
                yield f"has a variable that outlives its call: {line.strip()}"
        elif re.match(
            r"(inline )?(int|bool|float|double|int64_t|std::\S+) \w+( =.*|\{.*\})?;", line
        ):
            yield f"has a global: {line.strip()}"


def headers_are_read_once(path: str, text: str) -> Iterator[str]:
    if path.endswith((".h", ".cuh")) and "foreach" not in path and "#pragma once" not in text:
        yield "has no #pragma once"


def opens_with_a_comment(path: str, text: str) -> Iterator[str]:
    if not text.startswith("// "):
        yield "does not open with a comment that says its job"


# Python


def imports_point_down(path: str, text: str) -> Iterator[str]:
    """A module imports itself and lower layers, wherever in the file the import stands.

    A command may start what stands above its package.
    """
    if path.endswith("/__main__.py"):
        return
    names = (name for name in imports_of(path, text) if name not in ("", "__version__"))
    yield from not_below(module_of(path), names, PYTHON_LAYERS, "deepspeed_ext")


def rooms_point_down(path: str, text: str) -> Iterator[str]:
    """The same for the rooms of a package, where nobody goes through its front door."""
    for package, rows in ROOMS.items():
        if path.startswith(f"{package}/"):
            whole = f"deepspeed_ext.{package.replace('/', '.')}"
            mine = module_of(path.removeprefix(f"{package}/"))
            yield from not_below(mine, imports_of(path, text, whole), rows, whole)


def not_below(mine: str, names: Iterable[str], layers: Layers, package: str) -> Iterator[str]:
    """Say which of the modules that one imports are neither itself nor in a row before its own."""
    rank = {module: i for i, row in enumerate(layers) for module in row}
    if mine == "__init__":
        return
    if mine not in rank:
        yield f"is in no layer: name {package}.{mine} in tests/test_layering.py"
        return
    for name in names:
        if name == mine:
            continue
        if name not in rank:
            yield f"imports {package}.{name}, which is in no layer"
        elif rank[name] >= rank[mine]:
            yield f"imports {package}.{name}, which is not below {mine}"


def families_of_ops_have_floors(path: str, text: str) -> Iterator[str]:
    """As those of native code: what others need stands above them, in ops itself."""
    parts = PurePosixPath(path).parts
    if parts[0] != "ops" or len(parts) < 3:
        return
    allowed = (parts[1], *FLOORS_OF_OPS.get(parts[1], ()))
    names = re.findall(r"deepspeed_ext\.ops\.(\w+)", text)
    if not path.endswith("/self_checks.py"):  # these call all ops as users do, by the front door
        names += imports_of(path, text, "deepspeed_ext.ops")
    for name in names:
        if not name.startswith("_") and name not in allowed:
            yield f"names deepspeed_ext.ops.{name}, which {parts[1]} does not stand on"


def builders_stand_alone(path: str, text: str) -> Iterator[str]:
    """op_builder also runs from setup.py: alone, and without torch until something is asked."""
    if module_of(path) != "op_builder":
        return
    for node in ast.walk(ast.parse(text)):
        if any(name.startswith("deepspeed_ext") for name in absolute_names(node)):
            yield "imports deepspeed_ext by name"
    for node in ast.parse(text).body:
        if any(name.split(".")[0] == "torch" for name in absolute_names(node)):
            yield "imports torch at its top"


def ops_are_called_in_ops(path: str, text: str) -> Iterator[str]:
    if module_of(path) != "ops" and re.search(r"torch\.ops\.deepspeed_ext|torch\.library", text):
        yield "touches torch.ops.deepspeed_ext or torch.library, which only ops may"


def library_code_does_not_print(path: str, text: str) -> Iterator[str]:
    if path.startswith(PROGRAMS[0]) or path.endswith(PROGRAMS[1:]):
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "sys.stdout.write"):
            yield f"prints in line {node.lineno}; use the logger"


def functions_are_short(path: str, text: str) -> Iterator[str]:
    """Docstrings do not count."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[ast.get_docstring(node) is not None :]
            lines = (node.end_lineno or 0) - first[0].lineno + 1 if first else 0
            if lines > MAX_FUNCTION_LINES:
                yield f"has {node.name} with {lines} lines, expected at most {MAX_FUNCTION_LINES}"


def opens_with_a_docstring(path: str, text: str) -> Iterator[str]:
    if not ast.get_docstring(ast.parse(text)):
        yield "does not open with a docstring that says its job"


# Both


def flags_are_safe(path: str, text: str) -> Iterator[str]:
    """These bind a binary to one CPU, change results, or bring a second thread pool."""
    for flag in ("-march=native", "-ffast-math", "-fopenmp", "--use_fast_math", "-Ofast"):
        if flag in text:
            yield f"has the flag {flag}"


def files_are_short(path: str, text: str) -> Iterator[str]:
    lines = text.splitlines()
    if len(lines) > MAX_LINES and not any("lines" in line for line in lines[:10]):
        yield f"has {len(lines)} lines, expected at most {MAX_LINES}, or why not at its top"


def nothing_is_left_to_do(path: str, text: str) -> Iterator[str]:
    for word in re.findall(r"\b(TODO|FIXME|XXX)\b", text):
        yield f"has {word}"


def module_of(path: str) -> str:
    """Return the first name below deepspeed_ext."""
    return path.partition("/")[0].removesuffix(".py")


def absolute_names(node: ast.AST) -> list[str]:
    """Return the modules that an import statement names without dots in front."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        return [node.module]
    return []


def imports_of(path: str, text: str, below: str = "deepspeed_ext") -> Iterator[str]:
    """Yield the first name below a package of all that a module imports from it; '' for itself."""
    package = ["deepspeed_ext", *PurePosixPath(path).parent.parts]
    for node in ast.walk(ast.parse(text)):
        names = absolute_names(node)
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}" for alias in node.names]
        for name in names:
            if f"{name}.".startswith(f"{below}."):
                yield name[len(below) + 1 :].partition(".")[0]


CPP_RULES: tuple[Rule, ...] = (
    headers_are_of_the_stable_abi,
    torch_stays_at_the_boundary,
    pybind11_stays_in_bindings,
    families_have_floors,
    roles_are_kept,
    native_code_is_silent,
    nothing_is_global,
    headers_are_read_once,
    opens_with_a_comment,
    flags_are_safe,
    files_are_short,
    nothing_is_left_to_do,
)
PYTHON_RULES: tuple[Rule, ...] = (
    imports_point_down,
    rooms_point_down,
    families_of_ops_have_floors,
    builders_stand_alone,
    ops_are_called_in_ops,
    library_code_does_not_print,
    functions_are_short,
    opens_with_a_docstring,
    flags_are_safe,
    files_are_short,
    nothing_is_left_to_do,
)
LONG_FUNCTION = "def f():\n" + "    f()\n" * 61
BROKEN: tuple[tuple[Rule, str, str], ...] = (
    (headers_are_of_the_stable_abi, "optimizers/a_ops.h", "#include <torch/extension.h>"),
    (headers_are_of_the_stable_abi, "optimizers/a_ops.h", "#include <ATen/ATen.h>"),
    (headers_are_of_the_stable_abi, "optimizers/a_ops.h", "  #  include <c10/core/Device.h>"),
    (torch_stays_at_the_boundary, "optimizers/a_cpu.cpp", "#include <torch/headeronly/a.h>"),
    (torch_stays_at_the_boundary, "optimizers/a.h", '#include "common/torch/checks.h"'),
    (pybind11_stays_in_bindings, "optimizers/a_ops.cpp", "#include <pybind11/pybind11.h>"),
    (pybind11_stays_in_bindings, "aio/io_bindings.cpp", "#include <torch/csrc/stable/tensor.h>"),
    (families_have_floors, "aio/a.h", '#include "optimizers/adam.h"'),
    (families_have_floors, "common/cuda/a.h", '#include "optimizers/adam.h"'),
    (families_have_floors, "quantization/a.h", '#include "linear/few_rows.h"'),
    (families_have_floors, "attention/cache/a.h", '#include "attention/decode/decode.h"'),
    (roles_are_kept, "optimizers/a_math.inl", '#include "common/math.h"'),
    (roles_are_kept, "optimizers/a_cpu.inl", '#include "common/cuda/check.h"'),
    (roles_are_kept, "common/a.h", "#include <cuda_runtime.h>"),
    (roles_are_kept, "optimizers/a_cuda.cu", '#include "common/simd/foreach_isa.h"'),
    (native_code_is_silent, "optimizers/a.h", 'printf("x");'),
    (native_code_is_silent, "optimizers/a.h", 'std::cerr << "x";'),
    (native_code_is_silent, "optimizers/a.h", "std::thread worker(f);"),
    (native_code_is_silent, "optimizers/a_cpu.cpp", "torch::stable::parallel_for(0, n, 1, f);"),
    (native_code_is_silent, "common/a.h", "torch::stable::parallel_for(0, n, 1, f);"),
    (nothing_is_global, "optimizers/a.h", "static int calls = 0;"),
    (nothing_is_global, "optimizers/a.h", "thread_local std::vector<int> buffer;"),
    (nothing_is_global, "optimizers/a.h", "int64_t calls = 0;"),
    (headers_are_read_once, "optimizers/a.h", "// A header.\n"),
    (opens_with_a_comment, "optimizers/a.h", "#pragma once\n"),
    (imports_point_down, "ops/a.py", "from deepspeed_ext.optim import FusedAdam"),
    (imports_point_down, "ops/a.py", "def f():\n    import deepspeed_ext.optim.adam"),
    (imports_point_down, "ops/a.py", "from deepspeed_ext import FusedAdam"),
    (imports_point_down, "ops/a.py", "from ..optim import adam"),
    (imports_point_down, "optim/a.py", "from deepspeed_ext import io"),
    (imports_point_down, "new/a.py", ""),
    (rooms_point_down, "io/engine/a.py", "from deepspeed_ext.io.store.ledger import Ledger"),
    (rooms_point_down, "io/store/a.py", "def f():\n    import deepspeed_ext.io.checkpoint.format"),
    (rooms_point_down, "io/tensors.py", "from deepspeed_ext.io.engine import future"),
    (rooms_point_down, "io/tensors.py", "from .engine import future"),
    (rooms_point_down, "io/engine/watcher.py", "from deepspeed_ext.io.engine import future"),
    (rooms_point_down, "io/store/a.py", "from deepspeed_ext.io import AsyncIO"),
    (rooms_point_down, "io/store/a.py", "from deepspeed_ext import io"),
    (rooms_point_down, "io/new.py", ""),
    (
        rooms_point_down,
        "optim/checks.py",
        "from deepspeed_ext.optim.base import FlatStateOptimizer",
    ),
    (rooms_point_down, "optim/buckets.py", "def f():\n    from deepspeed_ext.optim import owner"),
    (rooms_point_down, "offload/worker.py", "from deepspeed_ext.offload.host_gradients import Sum"),
    (rooms_point_down, "quantization/layout.py", "from deepspeed_ext.quantization import linear"),
    (rooms_point_down, "zero/checkpoint/reading.py", "from .storage import Storage"),
    (rooms_point_down, "inference/model/policies/bert.py", "from ..architecture import b"),
    (rooms_point_down, "inference/weights/loader.py", "from .quantize_on_load import a"),
    (rooms_point_down, "inference/execution/kv_cache.py", "from .decoder import a"),
    (rooms_point_down, "inference/requests/request.py", "from .stream import a"),
    (rooms_point_down, "inference/serving/slot_table.py", "from .step_plan import a"),
    (rooms_point_down, "op_builder/spec.py", "from .registry import ROWS"),
    (families_of_ops_have_floors, "ops/a/b.py", "from deepspeed_ext.ops.c.d import e"),
    (families_of_ops_have_floors, "ops/a/b.py", "from deepspeed_ext.ops import rms_norm"),
    (families_of_ops_have_floors, "ops/a/b.py", "from deepspeed_ext import ops"),
    (builders_stand_alone, "op_builder/a.py", "import torch"),
    (builders_stand_alone, "op_builder/a.py", "def f():\n    import deepspeed_ext"),
    (ops_are_called_in_ops, "optim/a.py", "torch.ops.deepspeed_ext.adam_step_()"),
    (library_code_does_not_print, "optim/a.py", "print('x')"),
    (functions_are_short, "optim/a.py", LONG_FUNCTION),
    (opens_with_a_docstring, "optim/a.py", "import torch"),
    (flags_are_safe, "op_builder/a.py", "FLAGS = ['-march=native']"),
    (files_are_short, "optim/a.py", "x = 1\n" * 501),
    (nothing_is_left_to_do, "optim/a.py", "# TODO later"),
)


def problems(rule: Rule, files: dict[str, str]) -> list[str]:
    return [f"{path} {problem}" for path, text in files.items() for problem in rule(path, text)]


@pytest.mark.parametrize("rule", CPP_RULES, ids=lambda rule: rule.__name__)
def test_native_sources_keep(rule: Rule) -> None:
    assert problems(rule, cpp_files()) == []


@pytest.mark.parametrize("rule", PYTHON_RULES, ids=lambda rule: rule.__name__)
def test_python_sources_keep(rule: Rule) -> None:
    assert problems(rule, python_files()) == []


def test_tests_and_benchmarks_are_short() -> None:
    folders = ROOT / "tests", ROOT / "benchmarks"
    paths = [path for folder in folders for path in folder.rglob("*") if path.suffix in SOURCES]
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}
    assert problems(files_are_short, texts) == []


def test_names_of_test_modules_are_their_own() -> None:
    """Tests of all folders run in one process, which imports modules by name alone."""
    names = Counter(path.stem for path in (ROOT / "tests").rglob("*.py"))
    assert {name for name, files in names.items() if files > 1} <= {"conftest"}


def name_of(value: object) -> str:
    """Return the same name in every process that runs tests: no address."""
    return getattr(value, "__name__", str(value))[:40]


@pytest.mark.parametrize(("rule", "path", "text"), BROKEN, ids=name_of)
def test_rules_notice(rule: Rule, path: str, text: str) -> None:
    assert list(rule(path, text))


def test_every_package_has_floors() -> None:
    """But ops as a whole, whose families have them by their names alone."""
    packages = {str(PurePosixPath(path).parent) for path in python_files()}
    modules = {path.removesuffix(".py") for path in python_files()}
    named = {f"{package}/{name}" for package, rows in ROOMS.items() for row in rows for name in row}
    assert packages - ROOMS.keys() == {".", "ops"}
    assert named - modules - packages == set()


def test_every_rule_has_a_sample() -> None:
    assert {rule for rule, _, _ in BROKEN} == {*CPP_RULES, *PYTHON_RULES}


def test_there_are_sources() -> None:
    assert "optimizers/adam_math.inl" in cpp_files()
    assert {"optim/adam.py", "ops/optimizers/adam.py", "op_builder/registry.py"} <= set(
        python_files()
    )

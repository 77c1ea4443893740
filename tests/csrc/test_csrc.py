"""Compile the C++ test programs in several ways, and run each of them."""

import fcntl
import functools
import hashlib
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_ext.op_builder import OpSpec, cuda, toolchain
from deepspeed_ext.op_builder.errors import Unavailable
from deepspeed_ext.op_builder.registry import OPS, ROWS, FunctionalOp, StepOp

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
ISA = "common/simd/isa.cpp"
# Whose kernels are compiled with macros of their own.
LIBRARIES = {spec.name: spec for spec in OPS if spec.defines and spec.device == "cpu"}
NO_OP = OpSpec("", "cpu", ())
_BACKENDS = ("backend", "backend_factory", "backend_uring", "backend_libaio", "backend_threads")
_ENGINE = ("engine", "queue", "opening", "error_text", "worker", "regions", "file", "page_buffer")
# Sources in brackets are compiled as one, because half the time goes into what all of them include.
BACKENDS = [tuple(f"aio/{name}.cpp" for name in _BACKENDS)]
ENGINE = [*BACKENDS, tuple(f"aio/{name}.cpp" for name in _ENGINE)]
PROGRAMS = {  # with the sources that each is linked with; an op library stands for its kernels
    "dtype": [],
    "absent": [],
    "chunks": [],
    "overlap": [],
    "isa": [ISA],
    "vec": [ISA],
    "vec_math": [ISA],
    "vec_memory": [ISA],
    "steps": [ISA, "cpu_adam", "cpu_lion", "cpu_adagrad", "cpu_sgd", "cpu_rmsprop"],
    "storage": [ISA, "cpu_adam"],
    "lamb": [ISA, "cpu_lamb"],
    "lars": [ISA, "cpu_lars"],
    "sum": [ISA],
    "l2_norm": [ISA, "optimizers/l2_norm_cpu.cpp"],
    "fingerprint": [ISA, "optimizers/fingerprint_cpu.cpp"],
    "quantize": [ISA, "quantization/quantize_cpu.cpp"],
    "repack": [ISA, "quantization/repack_cpu.cpp"],
    "norms": [ISA, "cpu_rms_norm", "cpu_layer_norm"],
    "softmax": [ISA, "softmax/softmax_cpu.cpp", "softmax/cross_entropy_cpu.cpp"],
    "activations": [
        ISA,
        *("cpu_bias_activation", "cpu_gated_activation", "cpu_nhwc_bias_add"),
    ],
    "rope": [ISA, "attention/cache/rope_cpu.cpp"],
    "block_sparse": [ISA, "attention/sparse/block_sparse_cpu.cpp"],
    "moe": [ISA, "moe/route_cpu.cpp", "moe/assign_cpu.cpp", "moe/permute_cpu.cpp"],
    "skinny_linear": [ISA, "linear/skinny_linear_cpu.cpp"],
    "quantized_linear_w4": [ISA, "cpu_quantized_linear_w4"],
    "quantized_linear_w8": [ISA, "cpu_quantized_linear_w8"],
    "kv_cache": [ISA, "cpu_kv_cache"],
    "kv_cache_int8": [ISA, "cpu_kv_cache_int8"],
    "kv_cache_fp8": [ISA, "cpu_kv_cache_fp8"],
    "aio_plan": [],
    "aio_backends": BACKENDS,
    "aio_wake": BACKENDS,
    "aio_engine": ENGINE,
    "aio_requests": ENGINE,
    "aio_errors": ENGINE,
    "aio_faults": ENGINE,
}
THREADED = ["aio_wake", "aio_engine", "aio_requests", "aio_faults"]
SANITIZE = ["-O1", "-g1", "-fno-sanitize-recover=all", "-DDSX_CHECKED"]
# Of kernels, the scalar copy and the widest one: between them are other vectors, which vec and
# vec_memory try, and each copy takes the compiler half a minute.
_CPU = Path("/proc/cpuinfo").read_text()
_WITHOUT = {"BASELINE": "avx2" in _CPU, "AVX2": "avx512bw" in _CPU}
FEW_COPIES = [f"-DDSX_WITHOUT_{name}" for name, has_wider in _WITHOUT.items() if has_wider]
# Of what these two find, the addresses are found when they are used; GCC takes a fifth longer.
FOUND_BY_ADDRESS = "-fno-sanitize=null,object-size"
# GCC takes twice as long to put these checks in line as to call a function for them.
CALLS = ["--param", "asan-instrumentation-with-call-threshold=0"]


def sanitizer() -> str:
    """Return clang++ if it can link such programs, else the usual compiler.

    For the largest kernels with checks of each access GCC takes three to twenty times as long.
    """
    if shutil.which("clang++") is None:
        return ""
    asked = ["clang++", "--print-runtime-dir"]
    found = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
    return "clang++" if any(Path(found).glob("libclang_rt.asan*.a")) else ""


@dataclass(frozen=True)
class Way:
    """How programs are compiled and run.

    Args:
        compiler: its command; empty for the one that op_builder uses.
        flags: what it gets besides the flags of the product.
        programs: those worth compiling this way.
        sources: of programs that are linked with others than usual.
        emulator: the command that runs them, if not this CPU.
        packages: Debian's names for what the compiler and the emulator come in.
    """

    compiler: str
    flags: list[str]
    programs: list[str]
    sources: dict[str, list[str]] = field(default_factory=dict)
    emulator: str = ""
    packages: str = ""

    def is_sanitized(self) -> bool:
        """Tell whether each access is checked, which takes the compiler long."""
        return "-DDSX_CHECKED" in self.flags

    def missing(self) -> list[str]:
        """Return the commands that this machine lacks."""
        needed = [name for name in (self.compiler, self.emulator) if name]
        return [name for name in needed if shutil.which(name) is None]


SANITIZER = sanitizer()
FAULTS = ["-fsanitize=address,undefined"]
# By the flags of the product tests/ops tries kernels on all instruction sets, tests/io the engine.
WAYS = {
    "product": Way(
        "",
        [],
        ["isa", "vec", "vec_memory", "vec_math", "steps"],
    ),
    "sanitized": Way(
        SANITIZER,
        [*SANITIZE, *FAULTS],
        # Of the two caches of codes one: they differ in the conversion of an element.
        [program for program in PROGRAMS if program != "kv_cache_fp8"],
    ),
    "threads": Way(
        "",
        [*SANITIZE, "-fsanitize=thread"],
        ["steps", "lamb", *THREADED],
        sources={"steps": [ISA, "cpu_adam"]},  # all rules share the loop
    ),
    "clang": Way(
        "clang++",
        [],
        ["vec", "vec_memory"],
        packages="clang",
    ),
    "arm": Way(
        "aarch64-linux-gnu-g++",
        ["-static"],
        # LARS has the loops of LAMB; caches and weights of 8 bits differ in the conversion.
        [
            name
            for name in PROGRAMS
            if name not in ("lars", "kv_cache_fp8", "quantized_linear_w8")
            and PROGRAMS[name] != ENGINE
        ],
        emulator="qemu-aarch64",
        packages="g++-aarch64-linux-gnu qemu-user",
    ),
}


def case_of(way: str, program: str) -> Any:
    """Return the parameters of a test, marked if it takes long.

    That is an emulator, and kernels of every instruction set, sanitized or with the product's
    flags, of which GCC takes minutes to compile some, and the engine but for its run with sanitized
    addresses.
    """
    has_kernels = any("cpu" in source for source in PROGRAMS[program])
    is_long = WAYS[way].emulator or (way != "threads" and way != "clang" and has_kernels)
    is_long = is_long or (way != "sanitized" and PROGRAMS[program] == ENGINE)
    return pytest.param((way, program), marks=[pytest.mark.long] if is_long else [])


CASES = [case_of(way, program) for way in WAYS for program in WAYS[way].programs]


def compiler_of(way: str, spec: OpSpec = NO_OP) -> list[str]:
    """Return the start of every command that compiles this way; a warning is an error."""
    compiler = [WAYS[way].compiler] if WAYS[way].compiler else toolchain.cxx()
    flags = [*toolchain.compile_flags(spec, ""), "-Werror", "-pthread", *WAYS[way].flags]
    is_gcc = "Free Software Foundation" in version_of(*compiler)
    flags += [*CALLS, FOUND_BY_ADDRESS] if way == "sanitized" and is_gcc else []
    return [*compiler, *flags, f"-I{CSRC}", f"-I{HERE}"]


@functools.cache
def version_of(*compiler: str) -> str:
    """Return what a compiler says of itself."""
    done = subprocess.run([*compiler, "--version"], capture_output=True, text=True)
    return done.stdout


@functools.cache
def headers() -> str:
    """Return a digest of all that a source may include."""
    digest = hashlib.sha256()
    for path in sorted([*CSRC.rglob("*"), *HERE.iterdir()]):
        if path.suffix in (".h", ".inl"):
            digest.update(f"{path}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def compile_program(way: str, program: str, folder: Path) -> Path:
    """Compile one program one way, with the sources that it shares with others."""
    objects = []
    for unit in WAYS[way].sources.get(program, PROGRAMS[program]):
        sources = (unit,) if isinstance(unit, str) else unit
        spec = LIBRARIES.get(sources[0], NO_OP)
        kernels = [(source,) for source in spec.sources if source.endswith("_cpu.cpp")]
        for part in kernels or [sources]:  # kernels of a library are compiled one by one
            paths = [CSRC / source for source in part]
            stem = folder / f"{spec.name}_{part[0].replace('/', '_')}_{way}"
            copies = FEW_COPIES if WAYS[way].is_sanitized() else []
            objects.append(once(stem, ".o", [*compiler_of(way, spec), *copies, "-c"], paths))
    main = HERE / f"test_{program}.cpp"
    return once(folder / f"{program}_{way}", "", compiler_of(way), [main], objects)


def once(
    stem: Path, suffix: str, compiler: list[str], sources: list[Path], objects: Sequence[Path] = ()
) -> Path:
    """Compile files as one, unless that has been done, by another worker or an earlier run.

    The name of the result has a digest of all that it depends on; older ones are removed.
    """
    *others, last = map(str, sources)
    included = [part for path in others for part in ("-include", path)]
    command = [*compiler, *included, last, *map(str, objects)]
    depends = [*command, version_of(*compiler), headers(), *(p.read_text() for p in sources)]
    key = hashlib.sha256("\0".join(depends).encode()).hexdigest()[:16]
    target, part = (stem.with_name(f"{stem.name}-{key}{end}") for end in (suffix, ".part"))
    with stem.with_name(f"{stem.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            for old in stem.parent.glob(f"{stem.name}-{'?' * 16}*"):
                old.unlink()
            run = subprocess.run([*command, "-o", str(part)], capture_output=True, text=True)
            assert run.returncode == 0, run.stderr
            part.rename(target)
    return target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which all workers and runs compile; `make clean` removes it."""
    folder = HERE.parents[1] / "build" / "tests-csrc"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # the sources are read-only
        return tmp_path_factory.mktemp("csrc")
    return folder


def run(command: list[str], force_isa: str = "") -> subprocess.CompletedProcess[str]:
    """Run a program, output and errors as one text."""
    environment = {
        **os.environ,
        "DSX_FORCE_ISA": force_isa,
        "TSAN_OPTIONS": "halt_on_error=1",  # thousands of reports would take minutes
    }
    return subprocess.run(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_row_has_a_program(row: StepOp | FunctionalOp) -> None:
    """A row of the registry names one that is linked with its kernels."""
    library = row.libraries()[0]
    if isinstance(row, StepOp):  # the others share a loop of one pass
        assert library.name in PROGRAMS[row.name if row.measuring_rule else "steps"]
    else:
        linked = PROGRAMS[row.sanitizer]
        kernels = [source for source in library.sources if source.endswith("_cpu.cpp")]
        assert library.name in linked or set(kernels) & set(linked)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_program(case: tuple[str, str], folder: Path) -> None:
    """Every program passes, however it is compiled."""
    way = WAYS[case[0]]
    if way.missing():
        pytest.skip(f"no {' and no '.join(way.missing())}; run: apt-get install {way.packages}")
    result = run([*([way.emulator] if way.emulator else []), str(compile_program(*case, folder))])
    if case[0] == "threads" and "unexpected memory mapping" in result.stdout:
        pytest.skip("ThreadSanitizer of this compiler cannot run: vm.mmap_rnd_bits is over 28")
    assert result.returncode == 0, result.stdout
    assert " 0 failed" in result.stdout


all_floats = pytest.mark.skipif(
    "DSX_ALL_FLOATS" not in os.environ,
    reason="takes minutes; set DSX_ALL_FLOATS=1 (every 1021st is always tested)",
)


@all_floats
@pytest.mark.long
@pytest.mark.parametrize("case", [("product", "vec_math")], ids="-".join)
def test_functions_of_all_floats(case: tuple[str, str], folder: Path) -> None:
    """The error bounds of exp, log, sigmoid and others hold for each of the 2^32 floats."""
    result = run([str(compile_program(*case, folder)), "all"])
    assert result.returncode == 0, result.stdout


@all_floats
@pytest.mark.long
def test_cuda_functions_of_all_floats(folder: Path) -> None:
    """The same on CUDA, whose functions have bounds of their own."""
    try:
        nvcc = cuda.nvcc()
        targets, _ = cuda.clamp(cuda.requested_targets(), cuda.known_numbers(nvcc))
    except Unavailable as reason:
        pytest.skip(str(reason))
    flags = [*toolchain.nvcc_flags(NO_OP), *(f for target in targets for f in target.gencode())]
    source = HERE / "test_cuda_math.cu"
    program = once(folder / "cuda_math", "", [str(nvcc), *flags, f"-I{CSRC}"], [source])
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    result = run([str(program)])
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("way", ["product", "sanitized"])
@pytest.mark.parametrize("case", ["typed", "any", "pitch", "even_row", "from", "heads"])
def test_arithmetic_on_an_absent_row(way: str, case: str, folder: Path) -> None:
    """It aborts where that is checked, and does what the hardware does in the product."""
    result = run([str(compile_program(way, "absent", folder)), case])
    if way == "product":
        assert (result.returncode, result.stdout) == (0, "")
    else:
        assert result.returncode == -signal.SIGABRT, result.stdout
        assert "arithmetic on an absent row" in result.stdout


PRODUCT_ISA = pytest.mark.parametrize("case", [("product", "isa")], ids="-".join)


@PRODUCT_ISA
def test_force_isa(case: tuple[str, str], folder: Path) -> None:
    """DSX_FORCE_ISA picks any ISA up to the widest one, and nothing else."""
    program = [str(compile_program(*case, folder)), "current"]
    widest = run(program).stdout.strip()
    x86 = os.uname().machine == "x86_64"
    names = ["scalar", "sse2", "avx2", "avx512"] if x86 else ["scalar", "neon"]
    available = names[: names.index(widest) + 1]
    for name in available:
        assert run(program, name).stdout.strip() == name
    for name in ("baseline", "AVX2", *names[len(available) :]):
        result = run(program, name)
        assert result.returncode == 1
        assert result.stdout.strip() == (
            f"DSX_FORCE_ISA is {name}, expected one that this library has for this CPU: "
            + ", ".join(available)
        )


OLDER_CPUS = [("Nehalem", "sse2", "isa"), ("Nehalem", "sse2", "steps"), ("Haswell", "avx2", "isa")]


@pytest.mark.long
@pytest.mark.parametrize(("cpu", "widest", "program"), OLDER_CPUS)
def test_older_cpus(cpu: str, widest: str, program: str, folder: Path) -> None:
    """A CPU without the wide instructions is recognised, and none of them is executed on it.

    Kernels are run on the oldest: emulated, a Haswell takes six times as long.
    """
    if shutil.which("qemu-x86_64") is None or os.uname().machine != "x86_64":
        pytest.skip("no qemu-x86_64, or not on x86-64; run: apt-get install qemu-user")
    command = ["qemu-x86_64", "-cpu", cpu, str(compile_program("product", program, folder))]
    assert run(command).returncode == 0
    if program == "isa":
        assert run([*command, "current"]).stdout.split()[-1] == widest


@pytest.mark.long
@pytest.mark.parametrize("case", [("product", "steps")], ids="-".join)
def test_prefetch(case: tuple[str, str], folder: Path) -> None:
    """The compiler has left the prefetches in: no result would show that they are missing."""
    if os.uname().machine != "x86_64" or shutil.which("objdump") is None:
        pytest.skip("no objdump, or not on x86-64")
    program = compile_program(*case, folder)
    listing = run(["objdump", "-d", "--no-show-raw-insn", str(program)]).stdout
    assert listing.count("prefetch") >= 5 * 4 * 3  # optimizers, instruction sets, arrays

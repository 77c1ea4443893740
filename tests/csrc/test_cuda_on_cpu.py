"""Run CUDA kernels on the CPU, where sanitizers watch what they read and write, and races."""

import hashlib
import re
from pathlib import Path

import pytest
from test_csrc import CSRC, HERE, ISA, NO_OP, SANITIZE, folder, once, run

from deepspeed_ext.op_builder import cuda, toolchain
from deepspeed_ext.op_builder.errors import Unavailable

__all__ = ["folder"]  # a fixture

KERNELS = {"quantize_packed": "quantization/quantize_packed"}
WAYS = {"sanitized": ("address,undefined", 1), "threads": ("thread", 5)}  # one case of so many


def on_cpu(source: str) -> str:
    """Return the text of a kernel with calls of run_on_cpu in the place of launches."""

    def call(launch: re.Match[str]) -> str:
        kernel, blocks, threads, arguments = launch.groups()
        return f"run_on_cpu({blocks}, {threads}, [&, k = {kernel}] {{ k({arguments}); }});"

    pattern = r"(\w+)<<<(.+?), (\w+), 0, cudaStream_t\(stream\)>>>\((.*?)\);"
    text, count = re.subn(pattern, call, source, flags=re.DOTALL)
    assert count == source.count("<<<") > 0
    return re.sub(r"cuda(PeekAt|Get)LastError\(\)", "cudaSuccess", text)


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel(kernel: str, way: str, folder: Path) -> None:
    """It writes what the CPU's does, reads and writes nothing else, and has no races."""
    try:
        include = cuda.toolkit() / "include"
    except Unavailable as reason:
        pytest.skip(str(reason))
    text = on_cpu((CSRC / f"{KERNELS[kernel]}_cuda.cu").read_text())
    place = folder / f"{kernel}_on_cpu_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    place.mkdir(exist_ok=True)
    (place / "kernel_on_cpu.inc").write_text(text)
    compiler = [*toolchain.cxx(), *toolchain.compile_flags(NO_OP, ""), "-pthread", f"-I{CSRC}"]
    wanted = [ISA, f"{KERNELS[kernel]}_cpu.cpp"]  # as they are: others sanitize them
    objects = [
        once(folder / source.replace("/", "_"), ".o", [*compiler, "-O1", "-c"], [CSRC / source])
        for source in wanted
    ]
    # Compilers of the CPU do not know its attributes and pragmas.
    sanitizer, step = WAYS[way]
    flags = [*SANITIZE, f"-fsanitize={sanitizer}", "-w", f"-I{HERE}", f"-I{place}", f"-I{include}"]
    main = HERE / f"test_{kernel}_on_cpu.cpp"
    program = once(folder / f"{kernel}_on_cpu_{way}", "", [*compiler, *flags], [main], objects)
    result = run([str(program), str(step)])
    if way == "threads" and "unexpected memory mapping" in result.stdout:
        pytest.skip("ThreadSanitizer of this compiler cannot run: vm.mmap_rnd_bits is over 28")
    assert result.returncode == 0, result.stdout

"""Compile the CUDA test programs where there is nvcc, and run them where there is a GPU too."""

import subprocess
from pathlib import Path

import pytest
import torch

from deepspeed_ext.op_builder import cuda, toolchain
from deepspeed_ext.op_builder.errors import Unavailable
from deepspeed_ext.op_builder.registry import OPS

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
SPEC = next(spec for spec in OPS if "cuda" in spec.needs)


@pytest.mark.parametrize("program", ["floats"])
def test_cuda_program(program: str, tmp_path: Path) -> None:
    """Every program compiles without a warning and passes."""
    try:
        nvcc = cuda.nvcc()
    except Unavailable as error:
        pytest.skip(str(error))
    targets, _ = cuda.clamp(cuda.requested_targets(), cuda.known_numbers(nvcc))
    flags = [*toolchain.nvcc_flags(SPEC), *(flag for each in targets for flag in each.gencode())]
    target = tmp_path / program
    command = [str(nvcc), *flags, f"-I{CSRC}", f"-I{HERE}", str(HERE / f"test_{program}.cu")]
    command += ["-ccbin", toolchain.cxx()[0], "-Werror=all-warnings", "-o", str(target)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    if not torch.cuda.is_available():
        pytest.skip("compiled; to run it needs a CUDA GPU")
    result = subprocess.run([str(target)], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout
    assert " 0 failed" in result.stdout

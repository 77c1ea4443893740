"""Elementwise rules: wrong ones are rejected by name, and kernels keep to their registers."""

import re
import subprocess
from pathlib import Path

import pytest
from test_csrc import CSRC

from deepspeed_ext.op_builder import OpSpec, cuda, toolchain
from deepspeed_ext.op_builder.errors import Unavailable
from deepspeed_ext.op_builder.registry import OPS

RULE = """#pragma once
#include "elementwise/elementwise.h"
namespace dsx {
struct Wrong {
  static constexpr const char* kOp = "wrong";
  static constexpr int kIn = 2;
  static constexpr int kOut = 1;
  DSX_HOST_DEVICE static constexpr bool is_biased(int) { return false; }
};
#define DSX_RULES(each) each(Wrong)
}
"""
FORMULA = """template <class V>
DSX_INLINE void formula(const Wrong&, NoOption, const V (&in)[2], V (&out)[1]) {
  out[0] = in[0] + in[1];
}
"""
MEMBERS = "Wrong: a rule has kOp, kIn, kOut and is_biased"
ARITY = "the formula of a rule is formula(rule, option, in[kIn], out[kOut])"
WRONG = {  # what is replaced in the texts above, and what the compiler says first
    "no kOut": ("static constexpr int kOut = 1;", "", MEMBERS),
    "no kIn": ("static constexpr int kIn = 2;", "", MEMBERS),
    "no is_biased": ("is_biased", "is_biassed", MEMBERS),
    "a formula of another arity": ("(&in)[2]", "(&in)[3]", ARITY),
    "a formula with more results": ("(&out)[1]", "(&out)[2]", ARITY),
    "a formula of another rule": ("const Wrong&", "const int&", ARITY),
    "nothing": ("", "", ""),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rules(name: str, tmp_path: Path) -> None:
    old, new, want = WRONG[name]
    for file, text in (("wrong.h", RULE), ("wrong_math.inl", FORMULA)):
        (tmp_path / file).write_text(text.replace(old, new) if old else text)
    defines = ['-DDSX_RULE_HEADER="wrong.h"', '-DDSX_FORMULA="wrong_math.inl"']
    flags = ["-std=c++20", "-fsyntax-only", f"-I{CSRC}", f"-I{tmp_path}", *defines]
    source = str(CSRC / "elementwise" / "elementwise_cpu.cpp")
    done = subprocess.run([*toolchain.cxx(), *flags, source], capture_output=True, text=True)
    head, error, rest = done.stderr.partition("error:")
    assert (done.returncode != 0) == bool(want), done.stderr
    assert want in rest.splitlines()[0] if want else not error, done.stderr
    assert "Wrong" in head + rest.splitlines()[0] if want else True, done.stderr


# What each kernel may use for 9.0 by nvcc 13.0: registers, and bytes of spills. In brackets what it
# used when each op had kernels of its own, or before more of a group was on its way, if less.
# Registers are given out by the eight.
TABLE = """
elements GatedActivation Any 64 0 (62)
elements GatedActivation BFloat16 48 0
elements GatedActivation Half 48 0
elements GatedActivation f 46 0 (42)
elements GatedActivationBackward Any 80 0 (78)
elements GatedActivationBackward BFloat16 59 0 (56)
elements GatedActivationBackward Half 59 0 (56)
elements GatedActivationBackward f 54 0 (52)
elements BiasActivation Any 48 0 (47)
elements BiasActivation BFloat16 48 0
elements BiasActivation Half 48 0
elements BiasActivation f 40 0
elements BiasActivationBackward Any 64 0 (63)
elements BiasActivationBackward BFloat16 48 144
elements BiasActivationBackward Half 48 32 (24 bytes of spills)
elements BiasActivationBackward f 48 0
groups BiasActivationBackward Any 95 0 (72)
groups BiasActivationBackward BFloat16 120 0 (93)
groups BiasActivationBackward Half 120 0 (94)
groups BiasActivationBackward f 107 0 (80)
elements NhwcBiasAdd Any 74 0
elements NhwcBiasAdd BFloat16 63 0
elements NhwcBiasAdd Half 63 0
elements NhwcBiasAdd f 50 0
elements NhwcBiasAddAlone Any 48 0
elements NhwcBiasAddAlone f 34 0
elements NhwcBiasAddAlone Half 36 0
elements NhwcBiasAddAlone BFloat16 36 0
groups NhwcBiasAddBackward Any 50 0 (44)
groups NhwcBiasAddBackward BFloat16 60 0
groups NhwcBiasAddBackward Half 60 0
groups NhwcBiasAddBackward f 64 0 (52)
elements BiasDropoutResidual Any 64 0
elements BiasDropoutResidual f 50 0
elements BiasDropoutResidual Half 58 0
elements BiasDropoutResidual BFloat16 56 0 (54)
elements BiasDropoutResidualBackward Any 52 0
elements BiasDropoutResidualBackward f 44 0
elements BiasDropoutResidualBackward Half 44 0
elements BiasDropoutResidualBackward BFloat16 48 0
groups BiasDropoutResidualBackward Any 68 0 (56)
groups BiasDropoutResidualBackward f 62 0
groups BiasDropoutResidualBackward Half 72 0
groups BiasDropoutResidualBackward BFloat16 70 0
elements DropoutActivation Any 56 0
elements DropoutActivation f 46 0
elements DropoutActivation Half 57 0
elements DropoutActivation BFloat16 57 0
elements DropoutActivationBackward Any 64 0
elements DropoutActivationBackward f 52 0
elements DropoutActivationBackward Half 63 0
elements DropoutActivationBackward BFloat16 63 0
groups DropoutActivationBackward Any 96 0 (80)
groups DropoutActivationBackward f 110 0 (79)
groups DropoutActivationBackward Half 124 0 (113)
groups DropoutActivationBackward BFloat16 124 0 (100)
"""


def kernels_of(spec: OpSpec, nvcc: str) -> dict[str, tuple[int, int]]:
    """Return registers and bytes of spills by kernel, each as rule and storage type."""
    source = next(CSRC / source for source in spec.sources if source.endswith(".cu"))
    flags = [*toolchain.nvcc_flags(spec), f"-I{CSRC}", "-arch=sm_90", "-cubin", "-o", "/dev/null"]
    command = [nvcc, *flags, "--resource-usage", str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pattern = (
        r"Compiling entry function '\w*?(elements|groups)_kernelI(\w+?)EEv.*?"
        r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers"
    )
    found = {}
    for kernel, types, stores, loads, registers in re.findall(pattern, done.stderr, re.DOTALL):
        rule, storage = re.findall(r"(?<=\d)[A-Z][A-Za-z0-9]*?(?=E)|f$", types)
        found[f"{kernel} {rule} {storage}"] = int(registers), int(stores) + int(loads)
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    "spec", [s for s in OPS if "elementwise/elementwise_cuda.cu" in s.sources], ids=lambda s: s.name
)
def test_registers(spec: OpSpec) -> None:
    """No kernel of an elementwise op uses more registers or spills more than the table says."""
    try:
        nvcc = cuda.nvcc()
    except Unavailable as reason:
        pytest.skip(str(reason))
    found = kernels_of(spec, str(nvcc))
    table = {" ".join(row[:3]): row[3:5] for row in map(str.split, TABLE.strip().splitlines())}
    assert found
    for name, (registers, spills) in found.items():
        most, bytes_spilled = map(int, table[name])
        assert registers <= most and spills <= bytes_spilled, (name, registers, spills)

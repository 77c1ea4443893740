"""Libraries of others that do what an op does: `python -m benchmarks.rivals` tells which are here.

None of them is needed. A benchmark of an op measures those that can be imported beside ours, on a
GPU; one that refuses a shape or fails is named and left out.
"""

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch

Way = Callable[..., object]
EPS = 1e-6


def _liger(module: str, function: str, *more: object) -> Way:
    """Return an autograd function of Liger's, called with operands and then these."""
    found: Any = getattr(importlib.import_module(f"liger_kernel.ops.{module}"), function)
    return lambda *operands: found.apply(*operands, *more)


def _quack(module: str, function: str, **options: object) -> Way:
    found: Way = getattr(importlib.import_module(f"quack.{module}"), function)
    return partial(found, **options)


def _quacks_layer_norm() -> Way:
    """Return its forward, which has vectors in float32; there is no backward of it."""
    norm = _quack("rmsnorm", "layernorm_fwd", eps=1e-5)
    return lambda x, weight, bias: norm(x, weight.float(), bias.float())


# By op: what makes the function of a library, by the name of its module.
_RIVALS: Mapping[str, Mapping[str, Callable[[], Way]]] = {
    "rms_norm": {
        "quack": partial(_quack, "rmsnorm", "rmsnorm", eps=EPS),
        # Not in place: the gradient would be written over what the next call reads.
        "liger_kernel": partial(
            _liger, "rms_norm", "LigerRMSNormFunction", EPS, 0.0, "llama", False
        ),
    },
    "layer_norm": {
        "quack": _quacks_layer_norm,
        "liger_kernel": partial(_liger, "layer_norm", "LigerLayerNormFunction", 1e-5),
    },
    "softmax": {
        "quack": partial(_quack, "softmax", "softmax"),
        "liger_kernel": partial(_liger, "softmax", "LigerSoftmaxFunction"),
    },
    "swiglu": {"liger_kernel": partial(_liger, "swiglu", "LigerSiLUMulFunction")},
}
_PACKAGES = {"quack": "quack-kernels", "liger_kernel": "liger-kernel"}
_NAMES = {"quack": "quack", "liger_kernel": "Liger"}


def rivals_of(op: str) -> dict[str, Callable[[], Way]]:
    """Return what makes the functions of those that are installed, by name and version."""
    return {
        f"{_NAMES[module]} {_version(module)}": make
        for module, make in _RIVALS.get(op, {}).items()
        if find_spec(module) is not None
    }


def _version(module: str) -> str:
    try:
        return version(_PACKAGES[module])
    except PackageNotFoundError:
        return "of unknown version"


def main() -> None:
    """Print which are here, and which benchmarks have them."""
    cudnn = torch.backends.cudnn.version()
    print(f"torch         {torch.__version__}: in all benchmarks")
    print(f"cuDNN         {cudnn or 'missing'}: prefill, decode")
    for module, name in _NAMES.items():
        ops = ", ".join(op for op, rivals in _RIVALS.items() if module in rivals)
        found = _version(module) if find_spec(module) is not None else "missing"
        missing = "" if found != "missing" else f"; pip install {_PACKAGES[module]}"
        print(f"{name:13s} {found}: {ops}{missing}")


if __name__ == "__main__":
    main()

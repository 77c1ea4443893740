"""Compiled ops for PyTorch, and what is made of them; nothing is loaded before it is used."""

import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepspeed_ext.engine import Engine, initialize
    from deepspeed_ext.inference import init_inference
    from deepspeed_ext.ops import adam_step_, adam_step_ref_
    from deepspeed_ext.optim import DeepSpeedCPUAdam, FusedAdam
    from deepspeed_ext.patching import patch, unpatch

__version__ = "0.1.0"

__all__ = [
    "DeepSpeedCPUAdam",
    "Engine",
    "FusedAdam",
    "__version__",
    "adam_step_",
    "adam_step_ref_",
    "init_inference",
    "initialize",
    "patch",
    "unpatch",
]

_HOMES = {
    "DeepSpeedCPUAdam": "deepspeed_ext.optim",
    "Engine": "deepspeed_ext.engine",
    "FusedAdam": "deepspeed_ext.optim",
    "adam_step_": "deepspeed_ext.ops",
    "adam_step_ref_": "deepspeed_ext.ops",
    "init_inference": "deepspeed_ext.inference",
    "initialize": "deepspeed_ext.engine",
    "patch": "deepspeed_ext.patching",
    "unpatch": "deepspeed_ext.patching",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


def _import_builders(folder: Path) -> None:
    """Import op_builder: a package in this folder when installed, beside it in a working copy.

    A working copy may be found by being the working folder, and then no installer has said where
    its parts are; those of an installed copy would be of other sources.
    """
    name = f"{__name__}.op_builder"
    if not (folder / "op_builder").is_dir():
        beside = folder.parent / "op_builder" / "__init__.py"
        spec = spec_from_file_location(name, beside)
        if not beside.is_file() or spec is None or spec.loader is None:
            raise ImportError(
                f"deepspeed_ext: {folder} has no op_builder in it or beside it, expected the whole"
                " package; run Python in another folder, or install the package again"
            )
        module = sys.modules[name] = module_from_spec(spec)
        spec.loader.exec_module(module)
        globals()["op_builder"] = module


def _interface_of(op: str) -> object:
    interfaces = import_module("deepspeed_ext.interfaces")  # here, as it imports torch
    return interfaces.interface_of(op)


_import_builders(Path(__file__).parent)
# Builders know no ops and no I/O, so they are told what `load` gives.
import_module("deepspeed_ext.op_builder").OpBuilder.interface_of = staticmethod(_interface_of)

"""What is told to torch.compile without importing it."""

import sys
from typing import Any

from torch._compile import _disable_dynamo

# Leaves a function to Python where torch.compile traces; torch.compiler.disable does that too, and
# imports the compiler, which takes 0.8 s.
untraced = _disable_dynamo


def is_loaded() -> bool:
    """Tell whether the compiler has been imported: else nobody compiles anything."""
    return "torch._dynamo" in sys.modules


def leave_to_python(classes: set[type]) -> None:
    """Let compiled code leave what touches tensors of these classes to Python.

    By a setting that only config files are meant to know; nothing to do where nobody compiles.
    """
    config: Any = sys.modules.get("torch._dynamo.config")
    if config is not None and not classes <= config.nontraceable_tensor_subclasses:
        config.nontraceable_tensor_subclasses |= classes

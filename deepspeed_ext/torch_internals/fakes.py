"""Tensors that have no memory, of which torch's own calls make others of that kind."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils import _pytree

__all__ = ["FakeTensor"]


@contextmanager
def without_memory(*values: Any) -> Iterator[Any]:
    """Let calls make tensors without memory, also of those that have some, which nothing changes.

    Args:
        values: trees.

    Yields:
        The values, with such tensors in place of all in them.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:

        def fake(value: Any) -> Any:
            is_plain = isinstance(value, Tensor) and not isinstance(value, FakeTensor)
            is_plain = is_plain and not isinstance(value, torch.nn.Parameter)
            return mode.from_tensor(value) if is_plain else value

        yield _pytree.tree_map(fake, values)

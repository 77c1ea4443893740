"""What goes through the layers of a decoder, and where a layer works."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deepspeed_ext.inference.weights.loader import NormWeights
from deepspeed_ext.ops import PagedKV, Undivided
from deepspeed_ext.ops.linear.few_rows import are_few


class PackedPrefill(NamedTuple):
    """Tokens that lie end to end: the next one of each running request, then parts of prompts.

    Only attention looks at them apart: running requests are rows of one token, parts are rows
    padded to the length of the longest.

    Args:
        running: (rows,), int32: the slots of running requests.
        to_padded: (batch, n), int64: which packed token is each of a part; any behind its end.
        to_packed: (tokens of parts,), int64: where in all rows of parts each packed token is.
    """

    running: Tensor
    to_padded: Tensor
    to_packed: Tensor


class Rows(NamedTuple):
    """Hidden states that go through the layers, beside others or alone.

    Args:
        x: those that go into the first layer.
        slots: as of `Decoder.hidden`, as are counts and pack.
        is_step: whether they are what `Decoder.step` takes, and their logits are wanted.
        wanted: some tokens of a row, and others, side by side; after attention the last layer goes
            on with each of these by themselves. None: with all.
    """

    x: Tensor
    slots: Tensor
    counts: Tensor | None = None
    pack: PackedPrefill | None = None
    is_step: bool = False
    wanted: Sequence[slice] | None = None


class HiddenState(NamedTuple):
    """What a half of a layer leaves to the next one.

    Args:
        x: hidden states.
        left: what is left to be added to them. The next norm does that in its own pass over memory,
            where the linear layer before cannot.
        normed: what that layer knows of the next norm; None: nothing.
    """

    x: Tensor
    left: Tensor | None = None
    normed: Undivided | None = None

    @property
    def total(self) -> Tensor:
        """Hidden states with what is left to be added."""
        return self.x if self.left is None else self.x + self.left


class LayerContext(NamedTuple):
    """Where a layer works: its number, its keys and values, and whose tokens there are.

    Args:
        has_few_rows: whether linear layers add what they are to be added to in the same pass.
        next_norm: what comes after this layer, if that is a norm.
        wanted: as of `Rows`, in the last layer.
    """

    i: int
    kv: PagedKV
    slots: Tensor
    counts: Tensor | None
    pack: PackedPrefill | None
    has_few_rows: bool
    next_norm: NormWeights | None
    wanted: Sequence[slice] | None

    def after_attention(self, rest: Callable[..., HiddenState], *of_tokens: Tensor) -> HiddenState:
        """Return what a layer makes of hidden states when no token looks at others any more.

        Args:
            rest: of the layer, of a context and these.
            of_tokens: (batch, n, ...) each.
        """
        if self.wanted is None:
            return rest(self, *of_tokens)
        found = []
        for some in self.wanted:
            left = [each[:, some] for each in of_tokens]
            found.append(rest(self._replace(has_few_rows=are_few(left[0])), *left))
        if len(found) == 1:
            return found[0]
        return HiddenState(torch.cat([each.total for each in found], 1))

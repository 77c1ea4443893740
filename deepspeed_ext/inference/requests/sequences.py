"""Prompts and what follows them as one tensor, as transformers' generate returns it."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepspeed_ext.inference.requests.prompts import PromptReader, ReadPrompts
from deepspeed_ext.inference.requests.request import Completion


class TensorForm(NamedTuple):
    """Makes a tensor of completions.

    Args:
        read: the prompts that they follow.
        pad: the token for padding; None if there is none, which one row needs not.
    """

    read: ReadPrompts
    pad: int | None

    def of(self, completions: Sequence[Completion]) -> Tensor:
        """Return (completions, tokens), int64: a prompt as it was given, then the new tokens.

        Shorter prompts have padding before them, and shorter completions behind them. The stop
        token that ended one is part of it.
        """
        given, filler = self.read.rows, 0 if self.pad is None else self.pad
        width = max(map(len, given), default=0)
        rows = []
        for each in completions:
            prompt = given[each.prompt]
            end = [each.stop] if isinstance(each.stop, int) else []
            rows.append([filler] * (width - len(prompt)) + prompt + each.tokens + end)
        longest = max(map(len, rows), default=width)
        rows = [row + [filler] * (longest - len(row)) for row in rows]
        made = torch.tensor(rows, dtype=torch.int64, device=self.read.device or "cpu")
        return made.reshape(len(rows), longest)


def tensor_form(
    asked: Any,
    stream: bool,
    reader: PromptReader,
    options: Any,
    named: Mapping[str, Any],
    read: ReadPrompts,
) -> TensorForm:
    """Return what makes the tensor that was asked for; nothing is computed before that is sure.

    Args:
        asked: return_tensors.
        stream: whether pieces were asked for, too.
        reader: knows tokens for padding.
        options: of the call, of which a GenerationConfig may say one.
        named: arguments, likewise.
        read: the prompts.

    Raises:
        ValueError: it is another form, or there is no token for padding.
    """
    if asked != "pt" or stream:
        also = " and stream is True" if asked == "pt" else ""
        want = "None" if also else "None or 'pt'"
        raise ValueError(f"generate: return_tensors is {asked!r:.60}{also}, expected {want}")
    said = named.get("pad_token_id"), getattr(options, "pad_token_id", None), reader.pad_token()
    pad = next((each for each in said if each is not None), None)
    if pad is None and len(read.rows) > 1:
        raise ValueError(
            "generate: return_tensors is 'pt' and no token is for padding, expected pad_token_id"
        )
    if pad is not None and (type(pad) is not int or not 0 <= pad < reader.vocabulary):
        raise ValueError(
            f"generate: pad_token_id is {pad!r:.60}, expected 0 to {reader.vocabulary - 1}"
        )
    return TensorForm(read, pad)

"""What a model thinks of tokens that are there already: their log-probabilities, of logits."""

import torch
from torch import Tensor

from deepspeed_ext.inference.execution.sampling import likeliest
from deepspeed_ext.ops import cross_entropy

SCORED = 256  # rows that go through the head at once
ORDERED = 16  # rows of which the likeliest tokens are found at once, as that takes most memory


def score(logits: Tensor, tokens: Tensor, count: int) -> Tensor:
    """Return what each row of logits says of the token that came, and of the likeliest ones.

    All log-probabilities of a row are differences of its logits, beside one number for the row: so
    that of the token is that of the likeliest if and only if their logits are the same.

    Args:
        logits: (rows, vocabulary), float32, bfloat16 or float16; at least one row.
        tokens: (rows,), int64.
        count: how many of the likeliest tokens.

    Returns:
        (rows, 2 + 2 count), float64: the largest logit; the token's log-probability; the likeliest
        tokens, the first of equal ones first, and their log-probabilities.
    """
    largest, place = logits.max(-1, keepdim=True)
    largest, whole = largest.double(), -cross_entropy(logits, place[:, 0], reduction="none")

    def told(some: Tensor) -> Tensor:
        return logits.gather(1, some).double() - largest + whole[:, None].double()

    columns = [largest, told(tokens[:, None])]
    if count > 0:
        top = torch.cat([likeliest(part.float(), count) for part in logits.split(ORDERED)])
        columns += [top.double(), told(top)]
    return torch.cat(columns, -1)

"""What a step computes: decided from the states of requests before any of it is queued.

So no pass changes what another one is about. A request that is prefilled in a step samples its
first token in it, and is decoded from the next one on.
"""

from typing import NamedTuple

from deepspeed_ext.inference.execution.runner import ROWS
from deepspeed_ext.inference.requests.request import Request
from deepspeed_ext.inference.serving.slot_table import Batch, ByState, batches_of

# Tokens of a prompt that are prefilled at once, and of a pack. Fewer fill large GPUs less evenly.
CHUNK = 2048
_TOGETHER = 1024  # tokens of several prompts in a step: running requests wait for all of them
PACKED = 2 * CHUNK  # tokens that the rows of a pack have together in attention, padding included
_LEAST = 256  # tokens that fewer cost as much as, as all weights are read for them


class Part(NamedTuple):
    """The next tokens of a prompt.

    Args:
        request: is PREFILLING.
        tokens: how many.
    """

    request: Request
    tokens: int


class PrefillPass(NamedTuple):
    """What goes through the model at once.

    Args:
        parts: of different prompts.
        running: decoded in the same pass, or None.
    """

    parts: list[Part]
    running: Batch | None = None


class StepPlan(NamedTuple):
    """All that a step computes.

    Args:
        decode: running requests, whose next token is computed.
        prefill: passes over parts of prompts.
        first: requests whose prompt is whole by then, whose first token is sampled.
    """

    decode: list[Batch]
    prefill: list[PrefillPass]
    first: list[Batch]


def plan_step(requests: ByState, packs: bool, shares_passes: bool = False) -> StepPlan:
    """Return what to compute next.

    Args:
        requests: those that have a slot.
        packs: whether prompts are prefilled together, and running requests decoded with them.
        shares_passes: whether all that is not packed goes through the model side by side.
    """
    prefilling, decode = requests
    if not prefilling:
        return StepPlan(decode, [], [])
    if not packs:
        most, least = (PACKED, 1) if shares_passes else (_TOGETHER, _LEAST)
        passes = [PrefillPass([part]) for part in _parts_alone(prefilling, most, least)]
    else:
        batch = decode[0] if len(decode) == 1 else None
        parts = _parts_packed(prefilling, CHUNK - (0 if batch is None else len(batch.slots)))
        passes = [PrefillPass(parts, batch)] if parts else []
        decode = [] if parts and batch is not None else decode
    counts = dict(part for each in passes for part in each.parts)
    asked = (each for each in prefilling if each.wants_token)  # others are there to be read
    whole = [each for each in asked if each.left == counts.get(each, 0)]
    return StepPlan(decode, passes, batches_of(whole))


def _parts_alone(prefilling: list[Request], most: int, least: int) -> list[Part]:
    """Return some prompts, or parts of some, each for rows of its own: one, or of so many tokens.

    Args:
        least: tokens that fewer are counted as.
    """
    parts, cost = list[Part](), 0
    for request in prefilling:
        if request.left > 0:
            count = min(request.left, CHUNK)
            cost += max(least, count)
            if parts and cost > most:
                break
            parts.append(Part(request, count))
    return parts


def _parts_packed(prefilling: list[Request], most: int) -> list[Part]:
    """Return parts for one pass of at most so many tokens, in the order of their requests."""
    parts, longest = list[Part](), 0
    for request in prefilling:
        count = min(request.left, most)
        longest = max(longest, count)
        if most == 0 or len(parts) == ROWS or longest * (len(parts) + 1) > PACKED:
            break
        if count > 0:
            parts.append(Part(request, count))
            most -= count
    return parts

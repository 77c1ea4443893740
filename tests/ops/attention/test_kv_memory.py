"""Attention over a cache: beside results, and what chunks find, 1 % of what operands take."""

from itertools import product

import torch
from allocated import Taken, measured, share
from kv_cases import make_kv
from samples import BF16

from deepspeed_ext.ops import PagedKV, decode_attention, prefill_attention

STORED = [BF16, torch.int8, torch.float8_e4m3fn]
HEADS, GROUP, WIDTH, LENGTHS, WINDOW = 2, 4, 128, [4096, 1000, 2048], 3000
CHUNK = 200  # tokens that are prefill_attention's


def partials(kv: PagedKV, tokens: int) -> int:
    """What chunks find, for all that a slot could have in the window; prefill keeps nothing."""
    if tokens == CHUNK:
        return 0
    chunks = min(-(-kv.table.shape[1] // 4), (WINDOW + tokens + 253) // 256 + 1)
    return len(LENGTHS) * HEADS * chunks * tokens * GROUP * (WIDTH + 16) * 4


def share_of(stored: torch.dtype, tokens: int, device: str, taken: Taken) -> float:
    """Return what a call takes beside those, as a share of its operands."""
    kv = make_kv(LENGTHS, HEADS, WIDTH, stored, device)
    q = torch.ones((len(LENGTHS), tokens, HEADS * GROUP, WIDTH), dtype=BF16, device=device)
    options = dict(alibi_slopes=torch.ones(8, device=device), window=WINDOW, softcap=3.0)
    op = prefill_attention if tokens == CHUNK else decode_attention
    op(q, kv, **options)  # type: ignore[arg-type]
    results, extra = taken(op, q, kv, return_lse=True, **options)
    extra -= sum(t.nbytes for t in results) + partials(kv, tokens)
    return share(extra, sum(t.nbytes for t in (q, *kv) if t is not None))


def shares(device: str, taken: Taken) -> list[float]:
    return [share_of(*call, device, taken) for call in product(STORED, (1, 16, CHUNK))]


def test_no_more_than_a_hundredth(device: str) -> None:
    found = measured(shares, device)
    assert len(found) == 9 and max(found) <= 0.01

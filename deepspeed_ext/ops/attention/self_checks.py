"""Quick runs of the ops on a cache of keys and values against their references, for ds_report."""

import torch

from deepspeed_ext import ops
from deepspeed_ext.dtypes import DTYPES
from deepspeed_ext.ops._compare import compare
from deepspeed_ext.ops.attention.paged_kv import PAGE, PagedKV

_HEADS, _KV_HEADS, _WIDTH, _LENGTH = 8, 2, 64, 300


def kv_cache(device: str) -> None:
    """Run `_check` with floats of every kind."""
    for dtype in DTYPES:
        _check(dtype, dtype, device)


def kv_cache_int8(device: str) -> None:
    """Run `_check` with codes of int8."""
    _check(torch.int8, torch.bfloat16, device)


def kv_cache_fp8(device: str) -> None:
    """Run `_check` with codes of fp8."""
    _check(torch.float8_e4m3fn, torch.bfloat16, device)


def _check(stored: torch.dtype, dtype: torch.dtype, device: str) -> None:
    """Append 295 turned tokens to a slot, then five, then one, and let them attend.

    Raises:
        RuntimeError: a result is not what the reference says.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return (torch.rand(shape, generator=generator) + 0.5).to(dtype).to(device)

    pages = -(-_LENGTH // PAGE)
    shape = (pages, _KV_HEADS, PAGE, _WIDTH)
    codes = stored.itemsize == 1
    scales = [torch.zeros(shape[:-1], device=device) for _ in range(2 if codes else 0)]
    kv = PagedKV(
        torch.zeros(shape, dtype=stored, device=device),
        torch.zeros(shape, dtype=stored, device=device),
        torch.arange(pages - 1, -1, -1, dtype=torch.int32, device=device).unsqueeze(0),
        torch.tensor([_LENGTH], dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
        *scales,
    )
    frequencies = ops.rope_frequencies(_WIDTH).to(device)
    for tokens, length in ((_LENGTH - 5, _LENGTH - 5), (5, _LENGTH)):
        q, k, v = (random(1, tokens, n, _WIDTH) for n in (_HEADS, _KV_HEADS, _KV_HEADS))
        kv.lengths.fill_(length)
        want, before = q.cpu().double(), _on_host(kv)
        ops.rope_append_(q, k, v, kv, frequencies)
        ops.rope_append_ref_(want, k.cpu(), v.cpu(), before, frequencies.cpu())
        compare(f"rope_append_: q on {device}", q, want, 0.01, of_largest=0.01)
        op = ops.decode_attention if tokens == 5 else ops.prefill_attention
        out, result = op(q, kv), ops.decode_attention_ref(q.cpu(), _on_host(kv))
        assert isinstance(out, torch.Tensor) and isinstance(result, torch.Tensor)
        bound = 1e-5 if dtype == torch.float32 else 0.01
        name = "decode_attention" if tokens == 5 else "prefill_attention"
        compare(f"{name}: out on {device}", out, result, bound)
    q, k, v = (random(1, 1, n, _WIDTH) for n in (_HEADS, _KV_HEADS, _KV_HEADS))
    kv.lengths.fill_(_LENGTH + 1)
    out = ops.append_and_attend_(q, k, v, kv, frequencies)
    turned = q.clone()  # again, to the same place
    ops.rope_append_(turned, k, v, kv, frequencies)
    result = ops.decode_attention_ref(turned.cpu(), _on_host(kv))
    assert isinstance(out, torch.Tensor) and isinstance(result, torch.Tensor)
    compare(f"append_and_attend_: out on {device}", out, result, bound)


def _on_host(kv: PagedKV) -> PagedKV:
    there = [None if t is None else t.cpu().clone() for t in kv]
    return PagedKV(*there)  # type: ignore[arg-type]

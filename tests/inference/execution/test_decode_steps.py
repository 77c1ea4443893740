"""A cache and its ops together: step by step as all at once, forks, graphs, streams."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed_ext.inference import KVCache
from deepspeed_ext.ops import decode_attention, rope_append_, rope_frequencies

HEADS, KV_HEADS, WIDTH = 4, 2, 64
_NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
ON_BOTH = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=_NEEDS_GPU)])
KINDS = pytest.mark.parametrize("kind", [None, "int8", "fp8"])


def projections(slots: int, tokens: int, device: str, seed: int = 0) -> Tensor:
    """q, k and v of some tokens in one tensor: (slots, tokens, heads, width)."""
    random = torch.Generator().manual_seed(seed)
    shape = (slots, tokens, HEADS + 2 * KV_HEADS, WIDTH)
    return torch.randn(shape, generator=random).bfloat16().to(device)


@functools.cache
def frequencies(device: torch.device) -> Tensor:
    """Made once, as a graph that is captured takes no copy from the host."""
    return rope_frequencies(WIDTH).to(device)


def step(cache: KVCache, qkv: Tensor, slots: Tensor | None = None) -> Tensor:
    """Append the tokens of a step, and attend."""
    q, k, v = qkv.clone().split([HEADS, KV_HEADS, KV_HEADS], 2)
    rope_append_(q, k, v, cache.layer(0), frequencies(q.device), slots=slots)
    out = decode_attention(q, cache.layer(0), slots=slots)
    assert isinstance(out, Tensor)
    return out


def make(slots: int, device: str, kind: str | None = None, **options: Any) -> KVCache:
    return KVCache(slots, 640, KV_HEADS, WIDTH, quantized=kind, device=device, **options)


@ON_BOTH
@KINDS
def test_one_at_a_time_or_sixteen_at_once(kind: str | None, device: str) -> None:
    qkv = projections(2, 96, device)
    one, sixteen = make(2, device, kind), make(2, device, kind)
    singly = []
    for i in range(96):
        one.reserve([0, 1], 1)
        singly.append(step(one, qkv[:, i : i + 1]))
    at_once = []
    for i in range(0, 96, 16):
        sixteen.reserve([0, 1], 16)
        at_once.append(step(sixteen, qkv[:, i : i + 16]))
    assert torch.equal(torch.cat(singly, 1), torch.cat(at_once, 1))
    one.check()


@ON_BOTH
@KINDS
def test_forks_go_on_as_if_they_were_alone(kind: str | None, device: str) -> None:
    """Each with its own copy of the page that they share, and after tokens were taken back."""
    cache, alone = make(3, device, kind), make(1, device, kind)
    slots = [torch.tensor([i], dtype=torch.int32, device=device) for i in range(3)]
    start = projections(1, 16, device, seed=1)
    for target in (cache, alone):
        for _ in range(5):
            target.reserve(0, 16)
            step(target, start, slots[0])
    cache.fork(0, 2)
    cache.reserve([0, 2], 1)
    mine, other = projections(1, 1, device, seed=2), projections(1, 1, device, seed=3)
    step(cache, other, slots[0])
    got = step(cache, mine, slots[2])
    alone.reserve(0, 1)
    assert torch.equal(got, step(alone, mine))
    cache.reserve(2, 7)
    step(cache, projections(1, 7, device, seed=4), slots[2])
    cache.truncate(2, 81)
    cache.reserve(2, 1)
    alone.reserve(0, 1)
    assert torch.equal(step(cache, mine, slots[2]), step(alone, mine))
    cache.check()


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=_NEEDS_GPU)])
@KINDS
def test_a_graph_sees_lengths_and_tables_as_they_are(kind: str | None, device: str) -> None:
    cache, eager = make(2, device, kind), make(2, device, kind)
    qkv = projections(2, 80, device)
    static = qkv[:, :1].clone()
    cache.reserve([0, 1], 1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        step(cache, static)
        with torch.cuda.graph(graph, stream=stream):
            out = step(cache, static)
            with pytest.raises(RuntimeError, match="is capturing a graph"):
                cache.reserve(0, 1)
    torch.cuda.current_stream().wait_stream(stream)
    cache.truncate(0, 0)
    cache.truncate(1, 0)
    for i in range(80):
        cache.reserve([0, 1], 1)
        eager.reserve([0, 1], 1)
        static.copy_(qkv[:, i : i + 1])
        graph.replay()
        assert torch.equal(out, step(eager, qkv[:, i : i + 1]))
    cache.check()
    cache.free(1)
    graph.replay()
    assert out[1].isnan().all() and torch.isfinite(out[0]).all()
    with pytest.raises(RuntimeError, match="was to write outside of the pages"):
        cache.check()


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=_NEEDS_GPU)])
def test_two_caches_on_two_streams(device: str) -> None:
    caches = [make(4, device) for _ in range(2)]
    work = [projections(4, 16, device, seed=seed) for seed in range(2)]
    want = []
    for which in range(2):
        alone = make(4, device)
        for _ in range(20):
            alone.reserve(range(4), 16)
            last = step(alone, work[which])
        want.append(last)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    got: list[Tensor] = [torch.empty(0)] * 2
    for _ in range(20):
        for which in range(2):
            with torch.cuda.stream(streams[which]):
                caches[which].reserve(range(4), 16)
                got[which] = step(caches[which], work[which])
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@ON_BOTH
def test_what_is_freed_is_not_written(device: str) -> None:
    cache = make(2, device)
    cache.reserve([0, 1], 16)
    qkv = projections(2, 16, device)
    step(cache, qkv)
    keys = cache.layer(0).keys.clone()
    cache.free(1)
    cache.reserve(0, 16)
    out = step(cache, qkv)
    with pytest.raises(RuntimeError, match="was to write outside"):
        cache.check()
    page = cache._page_table.tables[0][0]
    others = [i for i in range(len(keys)) if i != page]
    bits = [t[others].view(torch.int16) for t in (keys, cache.layer(0).keys)]
    assert torch.equal(*bits) and out[1].isnan().all() and out[0].isfinite().all()

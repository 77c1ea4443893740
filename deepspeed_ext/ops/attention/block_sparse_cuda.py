"""block_sparse_attention on CUDA by torch's batched products, until it has a kernel there.

Rows of blocks that name as many others, or nearly so, are worked on together, so many that scores
take up to 64 MB; a row of blocks has at least its own. Gradients of keys and values go by columns
of blocks in the same way, so that no two additions meet.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

_MOST_SCORES = 1 << 24
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_LAYOUTS = (torch.bool, torch.uint8, torch.int32, torch.int64)
_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass
class _Tile:
    """Some rows of blocks, or columns, and those that they name: lanes, and others.

    Args:
        heads: of each.
        lanes: its number among the blocks.
        others: the numbers of blocks that it names, as many for each; (tiles, most).
        left_out: (tiles, 1 or block, most * block) what is beyond the tokens, not named, or behind.
        rows: of each lane or other token, whichever are rows.
        keys: likewise.
    """

    heads: Tensor
    lanes: Tensor
    others: Tensor
    left_out: Tensor
    rows: Tensor
    keys: Tensor


@dataclass
class _Call:
    """The arguments of a call, which are checked."""

    name: str
    q: Tensor
    k: Tensor
    v: Tensor
    layout: Tensor
    key_padding_mask: Tensor | None
    attn_mask: Tensor | None
    rpe: Tensor | None
    block: int
    scale: float
    causal: bool

    def __post_init__(self) -> None:
        """Check what a kernel would."""
        self._check_qkv()
        batch, heads, tokens, _ = self.q.shape
        n = self.blocks = -(-tokens // self.block)
        shape, layout = [*self.layout.shape], self.layout
        fits = len(shape) == 3 and shape[0] in (1, heads) and shape[1:] == [n, n]
        want = f"[{heads} or 1, {n}, {n}], as q has {tokens} tokens"
        self._check(fits, "layout", f"has shape {shape}", want)
        self._check_kind("layout", layout, _LAYOUTS, "bool, uint8, int32 or int64")
        if self.key_padding_mask is not None:
            shape = [*self.key_padding_mask.shape]
            want = f"[{batch}, {tokens}], of batch and tokens"
            self._check(shape == [batch, tokens], "key_padding_mask", f"has shape {shape}", want)
        full = [batch, heads, tokens, tokens]
        for name, mask in (("attn_mask", self.attn_mask), ("rpe", self.rpe)):
            if mask is not None:
                shape = [*mask.shape]
                pairs = zip(shape[::-1], full[::-1], strict=False)
                fits = len(shape) <= 4 and all(a in (1, b) for a, b in pairs)
                want = f"one that can be broadcast to {full}"
                self._check(fits, name, f"has shape {shape}", want)
        floats = "float32, bfloat16 or float16"
        for name in ("key_padding_mask", "attn_mask"):
            mask = getattr(self, name)
            if mask is not None:
                self._check_kind(name, mask, (torch.bool, *_FLOATS), f"bool, {floats}")
        if self.rpe is not None:
            self._check_kind("rpe", self.rpe, _FLOATS, floats)

    def _check_qkv(self) -> None:
        q, k, v = self.q, self.k, self.v
        want = "[batch, heads, tokens, head_dim]"
        self._check(q.dim() == 4, "q", f"has shape {[*q.shape]}", want)
        width = q.shape[3]
        self._check(1 <= width <= 256, "q", f"has head_dim {width}", "1 to 256")
        fits = k.dim() == 4 and (k.shape[0], *k.shape[2:]) == (q.shape[0], *q.shape[2:])
        want = f"[{q.shape[0]}, kv_heads, {q.shape[2]}, {width}], as q has"
        self._check(fits, "k", f"has shape {[*k.shape]}", want)
        fits = k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0
        want = f"a multiple of {k.shape[1]}, the heads of k"
        self._check(fits, "q", f"has {q.shape[1]} heads", want)
        self._check(v.shape == k.shape, "v", f"has shape {[*v.shape]}", f"{[*k.shape]}")
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            self._check_kind(name, tensor, _FLOATS, "float32, bfloat16 or float16")
        fits = self.block in (16, 32, 64, 128)
        self._check(fits, "block", f"is {self.block}", "16, 32, 64 or 128")
        fits = abs(self.scale) <= torch.finfo(torch.float32).max
        self._check(fits, "scale", f"is {self.scale:g}", "a finite number")

    def _check(self, fits: bool, argument: str, got: str, want: str) -> None:
        if not fits:
            raise ValueError(f"{self.name}: {argument} {got}, expected {want}")

    def _check_kind(
        self, argument: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], want: str
    ) -> None:
        device, dtype = tensor.device, str(tensor.dtype).removeprefix("torch.")
        self._check(device == self.q.device, argument, f"is on {device}", f"{self.q.device}")
        self._check(tensor.dtype in dtypes, argument, f"is {dtype}", want)

    def in_blocks(self, tensor: Tensor) -> Tensor:
        """Return (batch, heads, tokens, ...) as (batch, heads, blocks, block, ...)."""
        beyond = self.blocks * self.block - tensor.shape[2]
        if beyond > 0:
            tensor = F.pad(tensor, (*[0, 0] * (tensor.dim() - 3), 0, beyond))
        blocks: Tensor = tensor.unflatten(2, (self.blocks, self.block))
        return blocks

    def tokens_of(self, blocks: Tensor) -> Tensor:
        """Return the numbers of the tokens of some blocks, (tiles, n) to (tiles, n * block)."""
        inside = torch.arange(self.block, device=blocks.device)
        return (blocks[..., None] * self.block + inside).flatten(-2)

    def tiles(self, by_rows: bool) -> Iterator[_Tile]:
        """Yield all rows of blocks that name one, or all columns that a row names."""
        heads, tokens, n = self.q.shape[1], self.q.shape[2], self.blocks
        named = self.layout != 0
        named = (named.tril() if self.causal else named).expand(heads, n, n)
        named = (named if by_rows else named.mT).reshape(heads * n, n)
        counts, order = named.sum(-1).sort(stable=True)
        left = counts.tolist()
        while left and left[-1] > 0:
            most = left[-1]
            each = max(1, self.q.shape[0]) * self.block * most * max(self.block, self.q.shape[3])
            taken = min(len(left), max(1, _MOST_SCORES // each))
            chosen = order[len(left) - taken : len(left)]
            del left[-taken:]
            mine = named[chosen].byte()
            others = mine.argsort(dim=-1, descending=True, stable=True)[:, :most]
            lanes = chosen % n
            lane_tokens, other_tokens = self.tokens_of(lanes[:, None]), self.tokens_of(others)
            is_there = mine.gather(1, others).bool().repeat_interleave(self.block, 1)
            left_out = ~(is_there & (other_tokens < tokens))[:, None]
            pair = lane_tokens[:, :, None], other_tokens[:, None]
            rows, keys = pair if by_rows else pair[::-1]
            if self.causal:
                left_out = left_out | (keys > rows)
            rows, keys = rows.clamp(max=tokens - 1), keys.clamp(max=tokens - 1)
            yield _Tile(chosen // n, lanes, others, left_out, rows, keys)

    def of_kv_head(self, heads: Tensor) -> Tensor:
        return heads // (self.q.shape[1] // self.k.shape[1])

    def scores(self, tile: _Tile, lanes: Tensor, others: Tensor) -> Tensor:
        """Return (batch, tiles, block, others), -inf where left out."""
        score = lanes @ others.mT * self.scale
        full = (*self.q.shape[:3], self.q.shape[2])
        left_out, heads = tile.left_out, tile.heads[:, None, None]
        padding = self.key_padding_mask
        of_keys = None if padding is None else padding[:, None, None, :]
        for mask in (self.rpe, of_keys, self.attn_mask):
            if mask is None:
                continue
            here = mask.expand(full)[:, heads, tile.rows, tile.keys]
            if here.is_floating_point():
                left_out = left_out | (here == -math.inf)
                score = score + here
            else:
                left_out = left_out | ~here
        return score.masked_fill(left_out, -math.inf)


def _blocks_of(blocks: Tensor, heads: Tensor, numbers: Tensor) -> Tensor:
    """Return some blocks of each tile, one after the other, as floats."""
    if numbers.dim() > 1:
        return blocks[:, heads[:, None], numbers].flatten(2, 3).float()
    return blocks[:, heads, numbers].float()


def _product(weights: Tensor, values: Tensor) -> Tensor:
    """Return weights @ values, in which values have no part where their weight is 0."""
    finite = values.isfinite()
    out = weights @ values.masked_fill(~finite, 0)
    reached = (weights != 0).float() @ (~finite).float()
    return out.masked_fill(reached > 0, math.nan)


def _without_autocast(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let products be of the floats that they are given."""

    @functools.wraps(function)
    def run(*args: _P.args, **options: _P.kwargs) -> _R:
        first = args[0]
        assert isinstance(first, Tensor)
        with torch.autocast(first.device.type, enabled=False):
            return function(*args, **options)

    return run


@_without_autocast
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    rpe: Tensor | None,
    *,
    block: int,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Return the result, and the logarithms of the sums of exponentials of scores."""
    masks = key_padding_mask, attn_mask, rpe
    call = _Call("block_sparse_attention", q, k, v, layout, *masks, block, scale, causal)
    in_q, in_k, in_v = map(call.in_blocks, (q, k, v))
    out, lse = in_q.new_zeros(in_q.shape), in_q.new_full(in_q.shape[:-1], -math.inf).float()
    for tile in call.tiles(by_rows=True):
        of_kv = call.of_kv_head(tile.heads)
        lanes = _blocks_of(in_q, tile.heads, tile.lanes)
        score = call.scores(tile, lanes, _blocks_of(in_k, of_kv, tile.others))
        shift = score.amax(-1, keepdim=True)
        shift = shift.masked_fill(shift == -math.inf, 0)
        weights = (score - shift).exp().masked_fill(score == -math.inf, 0)
        total = weights.sum(-1, keepdim=True)
        found = _product(weights, _blocks_of(in_v, of_kv, tile.others))
        found = (found / total).masked_fill(total == 0, 0)
        out[:, tile.heads, tile.lanes] = found.to(q.dtype)
        lse[:, tile.heads, tile.lanes] = (total.log() + shift)[..., 0]
    tokens = q.shape[2]
    return tuple(t.flatten(2, 3)[:, :, :tokens].contiguous() for t in (out, lse))  # type: ignore


@_without_autocast
def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    layout: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    rpe: Tensor | None,
    *,
    block: int,
    scale: float,
    causal: bool,
    needs_q: bool,
    needs_kv: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; what is not needed is empty."""
    masks = key_padding_mask, attn_mask, rpe
    name = "block_sparse_attention_backward"
    call = _Call(name, q, k, v, layout, *masks, block, scale, causal)
    for argument, tensor, want in (("grad_out", grad_out, q), ("out", out, q), ("lse", lse, lse)):
        shape = [*want.shape] if argument != "lse" else [*q.shape[:3]]
        call._check([*tensor.shape] == shape, argument, f"has shape {[*tensor.shape]}", f"{shape}")
    delta = (grad_out.float() * out.float()).sum(-1)
    delta = delta if grad_lse is None else delta - grad_lse
    shift = lse.masked_fill(lse == -math.inf, 0)
    in_q, in_k, in_v, in_grad, in_shift, in_delta = map(
        call.in_blocks, (q, k, v, grad_out, shift, delta)
    )
    grads = [q.new_empty(0), k.new_empty(0), v.new_empty(0)]
    if needs_q:
        found = in_q.new_zeros(in_q.shape)
        for tile in call.tiles(by_rows=True):
            of_kv, here = call.of_kv_head(tile.heads), (tile.heads, tile.lanes)
            keys = _blocks_of(in_k, of_kv, tile.others)
            score = call.scores(tile, _blocks_of(in_q, *here), keys)
            back = _blocks_of(in_grad, *here) @ _blocks_of(in_v, of_kv, tile.others).mT
            of_rows = (_blocks_of(t, *here)[..., None] for t in (in_shift, in_delta))
            _, of_score = _weights_and_gradients(score, back, *of_rows)
            found[:, tile.heads, tile.lanes] = (_product(of_score, keys) * scale).to(q.dtype)
        grads[0] = found.flatten(2, 3)[:, :, : q.shape[2]].contiguous()
    if needs_kv:
        # Of each head of q; then those that share one of k are added up.
        of_k, of_v = (in_q.new_zeros(in_q.shape, dtype=torch.float32) for _ in range(2))
        for tile in call.tiles(by_rows=False):
            of_kv, there = call.of_kv_head(tile.heads), (tile.heads, tile.others)
            rows, grad = _blocks_of(in_q, *there), _blocks_of(in_grad, *there)
            score = call.scores(tile, _blocks_of(in_k, of_kv, tile.lanes), rows)
            back = _blocks_of(in_v, of_kv, tile.lanes) @ grad.mT
            of_rows = (_blocks_of(t, *there)[..., None, :] for t in (in_shift, in_delta))
            weights, of_score = _weights_and_gradients(score, back, *of_rows)
            of_v[:, tile.heads, tile.lanes] = _product(weights, grad)
            of_k[:, tile.heads, tile.lanes] = _product(of_score, rows) * scale
        for i, (found, like) in enumerate(((of_k, k), (of_v, v)), 1):
            of_group = found.flatten(2, 3)[:, :, : k.shape[2]].unflatten(1, (k.shape[1], -1))
            grads[i] = of_group.sum(2).to(like.dtype)
    return grads[0], grads[1], grads[2]


def _weights_and_gradients(
    score: Tensor, back: Tensor, shift: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the weights, and the gradients of scores, from those of weights."""
    weights = (score - shift).exp().masked_fill(score == -math.inf, 0)
    return weights, (weights * (back - delta)).masked_fill(weights == 0, 0)

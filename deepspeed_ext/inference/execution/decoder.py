"""A decoder: from tokens that a cache has room for to the logits of the next ones."""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from deepspeed_ext.inference.execution.kv_cache import KVCache
from deepspeed_ext.inference.model.architecture import Architecture
from deepspeed_ext.inference.model.positions import alibi_slopes
from deepspeed_ext.inference.weights.loader import Layer, Linear, NormWeights, Weights
from deepspeed_ext.ops import (
    NextNorm,
    PagedKV,
    Undivided,
    append_and_attend_,
    layer_norm,
    prefill_attention,
    rms_norm,
    rope_append_,
)
from deepspeed_ext.ops.linear.few_rows import are_few


class Pack(NamedTuple):
    """Tokens that lie end to end, first some that go on by one, then parts of prompts.

    Only attention looks at them apart: those that go on as rows of one token, parts as rows of
    as many as the longest has.

    Args:
        going: (rows,), int32: the slots of those that go on.
        spread: (batch, n), int64: which token is each of a part; any for those behind its end.
        back: (tokens of parts,), int64: where in all rows of parts each token is.
    """

    going: Tensor
    spread: Tensor
    back: Tensor


class _Place(NamedTuple):
    """Where a layer works: its number, its keys and values, and whose tokens there are.

    Args:
        has_few_rows: whether linear layers add what they are to be added to in the same pass.
        next_norm: what comes after this layer, if that is a norm.
    """

    i: int
    kv: PagedKV
    slots: Tensor
    counts: Tensor | None
    pack: Pack | None
    has_few_rows: bool
    next_norm: NormWeights | None


class _Between(NamedTuple):
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


class Decoder:
    """All layers of a model, over a cache.

    It holds no state but the weights: what differs from request to request is in the cache. Nothing
    that it does depends on numbers that the host would have to ask the device for.

    With up to 64 rows the linear layers around an RMS norm do it between them (`NextNorm`), in
    float32 and bfloat16: then a layer of a model like LLaMA is 5 kernels on CUDA for one token of
    each of a few requests: qkv, attention with the rotation and the cache, out, up, down. Other
    norms are kernels of their own: 7 for GPT-2, 9 for Gemma.

    Args:
        architecture: of the model.
        weights: of the model.
    """

    def __init__(self, architecture: Architecture, weights: Weights) -> None:
        self.of, self.weights = architecture, weights
        of, device, dtype = architecture, weights.embedding.device, weights.embedding.dtype
        frequencies: dict[bytes, Tensor] = {}  # on the device, once each
        self._rotations: list[tuple[Tensor | None, float]] = []
        for rotation in of.rotations:
            if rotation is None:
                self._rotations.append((None, 1.0))
                continue
            key = rotation.frequencies.numpy().tobytes()
            if key not in frequencies:
                frequencies[key] = rotation.frequencies.to(device)
            self._rotations.append((frequencies[key], rotation.scale))
        self._slopes = (
            torch.tensor(alibi_slopes(of.heads), dtype=torch.float32, device=device)
            if of.position == "alibi"
            else None
        )
        linears = [
            part for each in weights.layers for part in (each.qkv, each.out, each.up, each.down)
        ]
        self._joins_norms = (
            of.norm == "rms"
            and of.norm_place == "before"
            and of.hidden % 8 == 0
            and dtype in (torch.float32, torch.bfloat16)
            and all(linear.joins_norms for linear in linears)
        )
        self._embedding_scale = torch.tensor(of.embedding_scale, dtype=dtype, device="cpu").item()

    def hidden(
        self,
        tokens: Tensor,
        cache: KVCache,
        slots: Tensor,
        counts: Tensor | None = None,
        pack: Pack | None = None,
    ) -> Tensor:
        """Return the last hidden states of new tokens, whose keys and values go to the cache.

        Args:
            tokens: (batch, n), int64: the last n of their slots; or of a pack, (1, tokens).
            cache: has room for them: see `KVCache.reserve`.
            slots: (batch,), int32, -1 for none; of the parts of a pack.
            counts: (batch,), int32: how many of them there are; None: all.
            pack: how its tokens belong together; None: rows are as they are.

        Returns:
            (batch, n, hidden), or (1, tokens, hidden), before the last norm.

        Raises:
            ValueError: slots may become longer than the model has positions for.
        """
        x = self._embedded(tokens, cache, slots, counts, pack)
        return self._after_layers(x, cache, slots, counts, pack, None).total

    def embedded(self, tokens: Tensor, cache: KVCache, slots: Tensor) -> Tensor:
        """Return the first hidden states of one new token of each slot.

        Args:
            tokens: (batch, 1), int64.
            cache: as of `hidden`, as are slots.

        Returns:
            (batch, 1, hidden).

        Raises:
            ValueError: as `hidden`.
        """
        return self._embedded(tokens, cache, slots, None, None)

    def step(self, x: Tensor, cache: KVCache, slots: Tensor) -> Tensor:
        """Return the logits after one new token of each slot, of which x is what `embedded` says.

        They are those of `hidden`, only that the last norm is done as the others are.

        Returns:
            (batch, vocabulary).
        """
        weights = self.weights
        assert weights.head is not None
        joins = weights.project_out is None and weights.head.joins_norms
        last_norm = weights.final_norm if joins else None
        state = self._after_layers(x, cache, slots, None, None, last_norm)
        if state.normed is not None:
            x, squares, eps = state.normed
            return self._capped(weights.head(Undivided(x[:, 0], squares[:, 0], eps)))
        return self.logits(state.total[:, 0])

    def _after_layers(
        self,
        x: Tensor,
        cache: KVCache,
        slots: Tensor,
        counts: Tensor | None,
        pack: Pack | None,
        last_norm: NormWeights | None,
    ) -> _Between:
        """Return what the layers leave to whoever reads last_norm, or to nobody."""
        block = self._parallel_block if self.of.parallel else self._block
        if self.of.norm_place == "after":
            block = self._block_with_norms_after
        state, has_few_rows, layers = _Between(x), are_few(x), self.weights.layers
        for i, layer in enumerate(layers):
            next_norm = layers[i + 1].attention_norm if i + 1 < len(layers) else last_norm
            place = _Place(i, cache.layer(i), slots, counts, pack, has_few_rows, next_norm)
            state = block(layer, state, place)
        return state

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits that belong to last hidden states.

        Args:
            hidden: (..., hidden).

        Returns:
            (..., vocabulary).
        """
        assert self.weights.head is not None
        x = self._normed(hidden, self.weights.final_norm)
        if self.weights.project_out is not None:
            x = self.weights.project_out(x)
        return self._capped(self.weights.head(x))

    def _capped(self, out: Tensor) -> Tensor:
        softcap = self.of.logit_softcap
        return softcap * torch.tanh(out / softcap) if softcap > 0 else out

    def _embedded(
        self,
        tokens: Tensor,
        cache: KVCache,
        slots: Tensor,
        counts: Tensor | None,
        pack: Pack | None,
    ) -> Tensor:
        """Return the first hidden states."""
        weights = self.weights
        x = F.embedding(tokens, weights.embedding)
        if self._embedding_scale != 1:
            x = x * self._embedding_scale
        if weights.project_in is not None:
            x = weights.project_in(x)
        if weights.positions is not None:
            looked = partial(
                self._positions, weights.positions, cache.capacity, cache.layer(0).lengths
            )
            if pack is None:
                x = x + looked(tokens.shape[1], slots, counts)
            else:
                parts = looked(pack.spread.shape[1], slots, counts)
                x = x + _packed(looked(1, pack.going, None), parts, pack)
        return self._normed(x, weights.embedding_norm)

    def _positions(
        self,
        table: Tensor,
        capacity: int,
        lengths: Tensor,
        n: int,
        slots: Tensor,
        counts: Tensor | None,
    ) -> Tensor:
        """Return the rows of learned positions of n tokens each; any row for what is none."""
        offset = self.of.position_offset
        if capacity > len(table) - offset:
            raise ValueError(
                f"decoder: the cache has capacity {capacity}, expected at most"
                f" {len(table) - offset}, as many as the model has positions"
            )
        lengths = lengths.index_select(0, slots.clamp(min=0))
        begins, first = (lengths, offset - n) if counts is None else (lengths - counts, offset)
        steps: int | Tensor = first
        if n > 1:
            steps = torch.arange(first, first + n, dtype=torch.int32, device=slots.device)
        rows = begins.unsqueeze(1) + steps
        return F.embedding(rows.clamp(0, len(table) - 1), table)

    def _block(self, layer: Layer, state: _Between, place: _Place) -> _Between:
        """Return hidden states after a layer."""
        h, x = self._normed_sum(state, layer.attention_norm)
        mixed, post_norm = self._attention(layer, h, place), layer.attention_post_norm
        state = self._added(layer.out, mixed, x, post_norm, place, layer.mlp_norm)
        h, x = self._normed_sum(state, layer.mlp_norm)
        wide, post_norm = self._widened(layer, h), layer.mlp_post_norm
        return self._added(layer.down, wide, x, post_norm, place, place.next_norm)

    def _parallel_block(self, layer: Layer, state: _Between, place: _Place) -> _Between:
        """Return the same where attention and feed-forward block read the same."""
        h, x = self._sum_normed(state.x, state.left, layer.attention_norm)
        mixed = self._attention(layer, h, place)
        if layer.mlp_norm is not None:
            h = self._normed(x, layer.mlp_norm)
        x = layer.out(mixed, residual=x)
        return self._added(layer.down, self._widened(layer, h), x, None, place)

    def _block_with_norms_after(self, layer: Layer, state: _Between, place: _Place) -> _Between:
        """Return the same where each norm is over a sum; nothing is left."""
        mixed = self._attention(layer, state.x, place)
        state = self._added(layer.out, mixed, state.x, None, place)
        x, _ = self._sum_normed(state.x, state.left, layer.attention_norm)
        state = self._added(layer.down, self._widened(layer, x), x, None, place)
        return _Between(self._sum_normed(state.x, state.left, layer.mlp_norm)[0])

    def _widened(self, layer: Layer, h: Tensor | Undivided) -> Tensor:
        return layer.up(h, activation=self.of.activation, gated=self.of.gated)

    def _added(
        self,
        linear: Linear,
        h: Tensor,
        x: Tensor,
        post_norm: NormWeights | None,
        place: _Place,
        next_norm: NormWeights | None = None,
    ) -> _Between:
        """Return x + post_norm(linear(h)), and what is known of next_norm of that."""
        if post_norm is not None or not place.has_few_rows:
            return _Between(x, self._normed(linear(h), post_norm))
        if next_norm is None or not self._joins_norms:
            return _Between(linear(h, residual=x))
        norm = NextNorm(next_norm.weight, self.of.eps, self.of.norm_offset)
        total, normed = linear.before_norm(h, norm, residual=x)
        return _Between(total, None, normed)

    def _attention(self, layer: Layer, h: Tensor | Undivided, place: _Place) -> Tensor:
        qkv, pack = layer.qkv(h), place.pack
        if pack is None:
            return self._attended(layer, qkv, place.slots, place.counts, place)
        going = qkv[0, : len(pack.going), None]
        going = self._attended(layer, going, pack.going, None, place)
        parts = F.embedding(pack.spread, qkv[0])
        return _packed(going, self._attended(layer, parts, place.slots, place.counts, place), pack)

    def _attended(
        self, layer: Layer, qkv: Tensor, slots: Tensor, counts: Tensor | None, place: _Place
    ) -> Tensor:
        """Return what attention makes of the projections of some rows, which are written."""
        of = self.of
        batch, n, _ = qkv.shape
        qkv = qkv.view(batch, n, of.heads + 2 * of.kv_heads, of.head_dim)
        q, k, v = qkv.split((of.heads, of.kv_heads, of.kv_heads), 2)
        frequencies, scale = self._rotations[place.i]
        appending: dict[str, Any] = dict(
            slots=slots,
            counts=counts,
            q_weight=layer.q_norm,
            k_weight=layer.k_norm,
            eps=of.eps,
            weight_offset=of.norm_offset,
            interleaved=of.interleaved,
        )
        attending: dict[str, Any] = dict(
            scale=of.attention_scale,
            alibi_slopes=self._slopes,
            window=of.windows[place.i],
            softcap=of.softcap,
        )
        if n == 1:
            mixed = append_and_attend_(
                q, k, v, place.kv, frequencies, rotation_scale=scale, **appending, **attending
            )
        else:
            rope_append_(q, k, v, place.kv, frequencies, scale=scale, **appending)
            mixed = prefill_attention(q, place.kv, slots=slots, counts=counts, **attending)
        assert isinstance(mixed, Tensor)
        return mixed.view(batch, n, of.heads * of.head_dim)

    def _normed(self, x: Tensor, norm: NormWeights | None) -> Tensor:
        return self._sum_normed(x, None, norm)[0]

    def _normed_sum(
        self, state: _Between, norm: NormWeights | None
    ) -> tuple[Tensor | Undivided, Tensor]:
        """Return norm(x + left), maybe but for the division, and x + left."""
        if state.normed is not None:
            return state.normed, state.x
        return self._sum_normed(state.x, state.left, norm)

    def _sum_normed(
        self, x: Tensor, left: Tensor | None, norm: NormWeights | None
    ) -> tuple[Tensor, Tensor]:
        """Return norm(x + left), and x + left."""
        of = self.of
        if norm is None:
            total = x if left is None else x + left
            return total, total
        x, residual = (x, None) if left is None else (left, x)
        if of.norm == "rms":
            out = rms_norm(
                x, norm.weight, residual=residual, eps=of.eps, weight_offset=of.norm_offset
            )
        else:
            out = layer_norm(
                x,
                norm.weight,
                norm.bias,
                residual=residual,
                eps=of.eps,
                weight_offset=of.norm_offset,
            )
        return (out, x) if isinstance(out, Tensor) else out


def _packed(going: Tensor, parts: Tensor, pack: Pack) -> Tensor:
    """Return rows, (rows, 1, width) and (batch, n, width), end to end without what is none."""
    return torch.cat([going[:, 0], F.embedding(pack.back, parts.flatten(0, 1))])[None]

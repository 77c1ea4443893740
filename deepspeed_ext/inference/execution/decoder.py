"""A decoder: from tokens that a cache has reserved to the logits of the next ones."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from deepspeed_ext.inference.execution.experts import expert_sums
from deepspeed_ext.inference.execution.kv_cache import KVCache
from deepspeed_ext.inference.execution.layer_context import (
    HiddenState,
    LayerContext,
    PackedPrefill,
    Rows,
)
from deepspeed_ext.inference.execution.layer_stream import LayerStream
from deepspeed_ext.inference.model.architecture import Architecture
from deepspeed_ext.inference.model.positions import alibi_slopes
from deepspeed_ext.inference.weights.experts import ExpertWeights
from deepspeed_ext.inference.weights.linear import Linear
from deepspeed_ext.inference.weights.loader import Layer, NormWeights, Weights
from deepspeed_ext.ops import (
    NextNorm,
    Undivided,
    append_and_attend_,
    layer_norm,
    prefill_attention,
    rms_norm,
    rope_append_,
)
from deepspeed_ext.ops.linear.few_rows import are_few


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
        stream: brings the layers, which rest elsewhere; None: they are on the device.
    """

    def __init__(
        self, architecture: Architecture, weights: Weights, stream: LayerStream | None = None
    ) -> None:
        if stream is not None:
            weights = replace(weights, layers=stream.layers)
        self.of, self.weights, self.stream = architecture, weights, stream
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
            part
            for each in weights.layers
            for part in (each.qkv, each.out, each.up, each.down)
            if part is not None
        ]
        self._fuses_norms = (
            of.norm == "rms"
            and of.norm_place == "before"
            and of.hidden % 8 == 0
            and dtype in (torch.float32, torch.bfloat16)
            and all(linear.fuses_norms for linear in linears)
        )
        self._embedding_scale = torch.tensor(of.embedding_scale, dtype=dtype, device="cpu").item()

    def hidden(
        self,
        tokens: Tensor,
        cache: KVCache,
        slots: Tensor,
        counts: Tensor | None = None,
        pack: PackedPrefill | None = None,
    ) -> Tensor:
        """Return the last hidden states of new tokens, whose keys and values go to the cache.

        Args:
            tokens: (batch, n), int64: the last n of their slots; or of a pack, (1, tokens).
            cache: has them reserved: see `KVCache.reserve`.
            slots: (batch,), int32, -1 for none; of the parts of a pack.
            counts: (batch,), int32: how many of them there are; None: all.
            pack: how its tokens belong together; None: rows are as they are.

        Returns:
            (batch, n, hidden), or (1, tokens, hidden), before the last norm.

        Raises:
            ValueError: slots may become longer than the model has positions for.
        """
        x = self.embedded(tokens, cache, slots, counts, pack)
        return self.pass_over([Rows(x, slots, counts, pack)], cache)[0]

    def step(self, x: Tensor, cache: KVCache, slots: Tensor) -> Tensor:
        """Return the logits after one new token of each slot, of which x is what `embedded` says.

        They are those of `hidden`, only that the last norm is done as the others are.

        Returns:
            (batch, vocabulary).
        """
        return self.pass_over([Rows(x, slots, is_step=True)], cache)[0]

    def pass_over(self, some: Sequence[Rows], cache: KVCache) -> list[Tensor]:
        """Go through the layers once with rows that know nothing of each other.

        Each has the bits that it has alone, and each layer is there once for all of them.

        Args:
            some: no slot is there twice.
            cache: as of `hidden`.

        Returns:
            Of each what `hidden` returns, or `step`.
        """
        block = self._parallel_block if self.of.parallel else self._block
        if self.of.norm_place == "after":
            block = self._block_with_norms_after
        states, layers = [HiddenState(rows.x) for rows in some], self.weights.layers
        last_norms = [self._norm_in_last_layer if rows.is_step else None for rows in some]
        for i, layer in enumerate(layers if self.stream is None else self.stream.turns()):
            for k, (x, slots, counts, pack, _, wanted) in enumerate(some):
                next_norm = last_norms[k]
                if i + 1 < len(layers):
                    next_norm, wanted = layers[i + 1].attention_norm, None
                context = LayerContext(
                    i, cache.layer(i), slots, counts, pack, are_few(x), next_norm, wanted
                )
                states[k] = block(layer, states[k], context)
        both = zip(some, states, strict=True)
        return [self._logits_of(state) if rows.is_step else state.total for rows, state in both]

    @property
    def _norm_in_last_layer(self) -> NormWeights | None:
        """What the last layer does of the last norm in a step, where the head does the rest."""
        weights = self.weights
        assert weights.head is not None
        fuses = weights.project_out is None and weights.head.fuses_norms
        return weights.final_norm if fuses else None

    def _logits_of(self, state: HiddenState) -> Tensor:
        """Return the logits of a step."""
        weights = self.weights
        assert weights.head is not None
        h, _ = self._norm_of_state(state, weights.final_norm)
        if isinstance(h, Undivided):
            return self._capped(weights.head(Undivided(h.x[:, 0], h.squares[:, 0], h.eps)))
        return self._head(h[:, 0])

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits that belong to last hidden states.

        Args:
            hidden: (..., hidden).

        Returns:
            (..., vocabulary).
        """
        return self._head(self._normed(hidden, self.weights.final_norm))

    def _head(self, x: Tensor) -> Tensor:
        """Return the logits that belong to last hidden states after the last norm."""
        weights = self.weights
        assert weights.head is not None
        x = x if weights.project_out is None else weights.project_out(x)
        return self._capped(weights.head(x))

    def _capped(self, out: Tensor) -> Tensor:
        softcap = self.of.logit_softcap
        return softcap * torch.tanh(out / softcap) if softcap > 0 else out

    def embedded(
        self,
        tokens: Tensor,
        cache: KVCache,
        slots: Tensor,
        counts: Tensor | None = None,
        pack: PackedPrefill | None = None,
    ) -> Tensor:
        """Return the first hidden states of new tokens; all arguments are as of `hidden`.

        Returns:
            (batch, n, hidden), or (1, tokens, hidden).

        Raises:
            ValueError: as `hidden`.
        """
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
                parts = looked(pack.to_padded.shape[1], slots, counts)
                x = x + _packed(looked(1, pack.running, None), parts, pack)
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

    def _block(self, layer: Layer, state: HiddenState, context: LayerContext) -> HiddenState:
        """Return hidden states after a layer."""
        h, x = self._norm_of_state(state, layer.attention_norm)
        mixed = self._attention(layer, h, context)
        return context.after_attention(partial(self._rest_of_block, layer), mixed, x)

    def _rest_of_block(
        self, layer: Layer, context: LayerContext, mixed: Tensor, x: Tensor
    ) -> HiddenState:
        post_norm = layer.attention_post_norm
        if layer.experts is not None:
            state = self._added(layer.out, mixed, x, post_norm, context)
            return self._after_experts(layer, layer.experts, state)
        state = self._added(layer.out, mixed, x, post_norm, context, layer.mlp_norm)
        h, x = self._norm_of_state(state, layer.mlp_norm)
        assert layer.down is not None
        wide, post_norm = self._widened(layer, h), layer.mlp_post_norm
        return self._added(layer.down, wide, x, post_norm, context, context.next_norm)

    def _after_experts(
        self, layer: Layer, experts: ExpertWeights, state: HiddenState
    ) -> HiddenState:
        """Return hidden states, to which the sums of experts are left to be added."""
        of = self.of
        assert of.experts is not None
        h, x = self._add_and_norm(state.x, state.left, layer.mlp_norm)
        sums = expert_sums(experts, of.experts, h, of.activation, of.gated)
        return HiddenState(x, self._normed(sums, layer.mlp_post_norm))

    def _parallel_block(
        self, layer: Layer, state: HiddenState, context: LayerContext
    ) -> HiddenState:
        """Return the same where attention and feed-forward block read the same."""
        h, x = self._add_and_norm(state.x, state.left, layer.attention_norm)
        mixed = self._attention(layer, h, context)
        return context.after_attention(partial(self._rest_of_parallel_block, layer), mixed, x, h)

    def _rest_of_parallel_block(
        self, layer: Layer, context: LayerContext, mixed: Tensor, x: Tensor, h: Tensor
    ) -> HiddenState:
        if layer.mlp_norm is not None:
            h = self._normed(x, layer.mlp_norm)
        x = layer.out(mixed, residual=x)
        assert layer.down is not None
        return self._added(layer.down, self._widened(layer, h), x, None, context)

    def _block_with_norms_after(
        self, layer: Layer, state: HiddenState, context: LayerContext
    ) -> HiddenState:
        """Return the same where each norm is over a sum; nothing is left."""
        mixed, rest = self._attention(layer, state.x, context), self._rest_with_norms_after
        return context.after_attention(partial(rest, layer), mixed, state.x)

    def _rest_with_norms_after(
        self, layer: Layer, context: LayerContext, mixed: Tensor, x: Tensor
    ) -> HiddenState:
        state = self._added(layer.out, mixed, x, None, context)
        x, _ = self._add_and_norm(state.x, state.left, layer.attention_norm)
        assert layer.down is not None
        state = self._added(layer.down, self._widened(layer, x), x, None, context)
        return HiddenState(self._add_and_norm(state.x, state.left, layer.mlp_norm)[0])

    def _widened(self, layer: Layer, h: Tensor | Undivided) -> Tensor:
        assert layer.up is not None
        return layer.up(h, activation=self.of.activation, gated=self.of.gated)

    def _added(
        self,
        linear: Linear,
        h: Tensor,
        x: Tensor,
        post_norm: NormWeights | None,
        context: LayerContext,
        next_norm: NormWeights | None = None,
    ) -> HiddenState:
        """Return x + post_norm(linear(h)), and what is known of next_norm of that."""
        if post_norm is not None or not context.has_few_rows:
            return HiddenState(x, self._normed(linear(h), post_norm))
        if next_norm is None or not self._fuses_norms:
            return HiddenState(linear(h, residual=x))
        norm = NextNorm(next_norm.weight, self.of.eps, self.of.norm_offset)
        total, normed = linear.before_norm(h, norm, residual=x)
        return HiddenState(total, None, normed)

    def _attention(self, layer: Layer, h: Tensor | Undivided, context: LayerContext) -> Tensor:
        qkv, pack = layer.qkv(h), context.pack
        if pack is None:
            return self._attended(layer, qkv, context.slots, context.counts, context)
        running = qkv[0, : len(pack.running), None]
        running = self._attended(layer, running, pack.running, None, context)
        parts = F.embedding(pack.to_padded, qkv[0])
        return _packed(
            running, self._attended(layer, parts, context.slots, context.counts, context), pack
        )

    def _attended(
        self,
        layer: Layer,
        qkv: Tensor,
        slots: Tensor,
        counts: Tensor | None,
        context: LayerContext,
    ) -> Tensor:
        """Return what attention makes of the projections of some rows, which are written."""
        of = self.of
        batch, n, _ = qkv.shape
        qkv = qkv.view(batch, n, of.heads + 2 * of.kv_heads, of.head_dim)
        q, k, v = qkv.split((of.heads, of.kv_heads, of.kv_heads), 2)
        if of.whole_norms:
            q, k = self._normed_whole(q, layer.q_norm), self._normed_whole(k, layer.k_norm)
        frequencies, scale = self._rotations[context.i]
        appending: dict[str, Any] = dict(
            slots=slots,
            counts=counts,
            q_weight=None if of.whole_norms else layer.q_norm,
            k_weight=None if of.whole_norms else layer.k_norm,
            eps=of.eps,
            weight_offset=of.norm_offset,
            interleaved=of.interleaved,
        )
        attending: dict[str, Any] = dict(
            scale=of.attention_scale,
            alibi_slopes=self._slopes,
            window=of.windows[context.i],
            softcap=of.softcap,
            sinks=layer.sinks,
        )
        if n == 1:
            mixed = append_and_attend_(
                q, k, v, context.kv, frequencies, rotation_scale=scale, **appending, **attending
            )
        else:
            rope_append_(q, k, v, context.kv, frequencies, scale=scale, **appending)
            mixed = prefill_attention(q, context.kv, slots=slots, counts=counts, **attending)
        assert isinstance(mixed, Tensor)
        return mixed.view(batch, n, of.heads * of.head_dim)

    def _normed_whole(self, heads: Tensor, weight: Tensor | None) -> Tensor:
        """Return heads, (batch, n, heads, head_dim), after a norm of all of them together."""
        assert weight is not None
        norm = rms_norm(
            heads.flatten(2), weight, eps=self.of.eps, weight_offset=self.of.norm_offset
        )
        assert isinstance(norm, Tensor)
        return norm.view(heads.shape)

    def _normed(self, x: Tensor, norm: NormWeights | None) -> Tensor:
        return self._add_and_norm(x, None, norm)[0]

    def _norm_of_state(
        self, state: HiddenState, norm: NormWeights | None
    ) -> tuple[Tensor | Undivided, Tensor]:
        """Return norm(x + left), maybe but for the division, and x + left."""
        if state.normed is not None:
            return state.normed, state.x
        return self._add_and_norm(state.x, state.left, norm)

    def _add_and_norm(
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


def _packed(running: Tensor, parts: Tensor, pack: PackedPrefill) -> Tensor:
    """Return rows, (rows, 1, width) and (batch, n, width), end to end without what is none."""
    return torch.cat([running[:, 0], F.embedding(pack.to_packed, parts.flatten(0, 1))])[None]

"""ModelRunner: the device's side of generation, in steps that never wait for the host.

All that a step reads and writes is in tensors that stay where they are, one row for each slot, and
one more for rows of a batch that are nobody's.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from deepspeed_ext.inference.execution.decoder import Decoder
from deepspeed_ext.inference.execution.graphs import Graphs, Recordings
from deepspeed_ext.inference.execution.kv_cache import KVCache
from deepspeed_ext.inference.execution.layer_context import PackedPrefill, Rows
from deepspeed_ext.inference.execution.sampling import (
    History,
    Kind,
    Parameters,
    SamplingOptions,
    sample,
)
from deepspeed_ext.inference.execution.scoring import SCORED, score
from deepspeed_ext.inference.execution.to_device import ready_to_send

ROWS = 64  # of a step at most: up to so many, a row has the same bits in any batch


class Answer:
    """What a step finds, on its way to the host.

    Args:
        rows: see `sample`.
    """

    def __init__(self, rows: Tensor) -> None:
        self._rows, self._event = rows, None
        if rows.is_cuda:
            self._rows = torch.empty(rows.shape, dtype=rows.dtype, device="cpu", pin_memory=True)
            self._rows.copy_(rows, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> list[list[float]]:
        """Wait for the step, and return its rows."""
        if self._event is not None:
            self._event.synchronize()
        rows: list[list[float]] = self._rows.tolist()
        return rows


class Prefilled(NamedTuple):
    """Last hidden states of a pass over parts of prompts.

    Args:
        last: (rows, hidden): those of running requests, then of the last token of each part.
        parts: (tokens, hidden) each: those of all tokens of a part, or None, where only the last
            are wanted: then the last layer computes no others. They are views of what the pass
            leaves, all of which is kept as long as they are.
    """

    last: Tensor
    parts: list[Tensor] | list[None]


class PromptPart(NamedTuple):
    """The next tokens of a prompt.

    Args:
        slot: of the cache, which has reserved them.
        tokens: of the prompt, after those that the slot has.
        wants_all: whether hidden states of all of them are wanted, not of the last one alone.
    """

    slot: int
    tokens: list[int]
    wants_all: bool = False


class Inputs(NamedTuple):
    """What a step reads of the host's: memory that stays, one for each number of rows.

    Args:
        slots: (batch,), int32: of the cache, -1 for none.
        places: (batch,), int64: the rows of the tensors of `ModelRunner`; the last one for none.
        uniforms: (batch,), float64: see `sample`.
    """

    slots: Tensor
    places: Tensor
    uniforms: Tensor


class ModelRunner:
    """Computes steps of a model: parts of prompts are prefilled, running requests decoded.

    Args:
        decoder: the model.
        cache: has the keys and values; whoever calls reserves first.
        slots: of the cache.
        cuda_graphs: whether steps are recorded and replayed, on CUDA.
    """

    def __init__(
        self, decoder: Decoder, cache: KVCache, slots: int, cuda_graphs: bool = True
    ) -> None:
        self._decoder, self._cache, self._slots = decoder, cache, slots
        self._device = device = decoder.weights.embedding.device
        self._tokens = torch.zeros(slots + 1, dtype=torch.int64, device=device)  # the last ones
        shape = (slots + 1, len(Parameters._fields))
        self._parameters = torch.ones(shape, dtype=torch.float64, device=device)
        self._true = torch.ones((), dtype=torch.bool, device=device)
        self._history = History()  # a row for each slot, once a request needs it; most need none
        self._inputs: dict[int, Inputs] = {}
        self._now: dict[int, list[int]] = {}  # the slots that inputs have
        self.pads = device.type == "cuda"  # as a graph is for one number of rows
        # Layers that are brought are waited for by the host, or by streams: one by one.
        is_still = decoder.stream is None
        self._graphs = Graphs(device) if self.pads and cuda_graphs and is_still else None
        self._recordings = Recordings() if device.type == "cpu" and is_still else None

    def start(self, slot: int, prompt: list[int], options: SamplingOptions) -> None:
        """Let a slot be for another request."""
        row = ready_to_send(Parameters.row(options), torch.float64, self._device)
        self._parameters[slot].copy_(row, non_blocking=True)
        kind = options.kind
        if kind.penalized:
            seen = self._history_of("seen", torch.bool)
            seen[slot] = False
            seen[slot, self._sent(prompt, torch.int64)] = True
        if kind.counted:
            self._history_of("counts", torch.int32)[slot] = 0
        if kind.biased or self._history.bias is not None:  # of the request before
            bias = self._history_of("bias", torch.float32)
            bias[slot] = 0.0
        if kind.biased:
            tokens, values = zip(*options.biases, strict=True)
            bias[slot, self._sent(list(tokens), torch.int64)] = ready_to_send(
                list(values), torch.float32, self._device
            ).to(self._device, non_blocking=True)

    def _history_of(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return what is kept for all slots under this name, made when it is first asked for."""
        kept: Tensor | None = getattr(self._history, name)
        if kept is None:
            shape = (self._slots + 1, self._decoder.of.vocabulary)
            kept = torch.zeros(shape, dtype=dtype, device=self._device)
            self._history = self._history._replace(**{name: kept})
        return kept

    def prefill(self, part: PromptPart, pad_to: int) -> Prefilled:
        """Prefill a part of a prompt; a multiple of so many tokens is computed."""
        rows = self._rows_of(part, pad_to)
        return _prefilled(self._decoder.pass_over([rows], self._cache)[0], part)

    def _rows_of(self, part: PromptPart, pad_to: int) -> Rows:
        """Return what goes into the first layer of a part of a prompt."""
        count = len(part.tokens)
        padded = part.tokens + [0] * (-count % pad_to)
        counts = None if len(padded) == count else self._sent([count], torch.int32)
        slots = self._sent([part.slot], torch.int32)
        sent = self._sent(padded, torch.int64)[None]
        x = self._decoder.embedded(sent, self._cache, slots, counts)
        # The last token by itself in any case, so that it is the same whoever wants others, too.
        last = slice(count - 1, count)
        return Rows(x, slots, counts, wanted=(slice(count), last) if part.wants_all else (last,))

    def prefill_packed(
        self, running: list[int], slots: list[int], parts: list[list[int]], pad_to: int
    ) -> Prefilled:
        """Prefill parts of prompts, and decode the next token of running requests, in one pass.

        Args:
            running: slots of running requests, with a token reserved in each.
            slots: of the parts, reserved likewise. No slot is there twice.
            parts: of prompts; see `prefill`.
            pad_to: a multiple of this many tokens is computed.
        """
        longest, before = max(map(len, parts)), len(running)
        tokens, to_packed, begins = list[int](), list[int](), list[int]()
        last = list(range(before))
        for i, part in enumerate(parts):
            begins.append(before + len(tokens))
            tokens += part
            to_packed += range(i * longest, i * longest + len(part))
            last.append(before + len(tokens) - 1)
        nobody = -(before + len(tokens)) % pad_to
        tokens, to_packed = tokens + [0] * nobody, to_packed + [0] * nobody
        places = torch.arange(longest, device=self._device)
        to_padded = (self._sent(begins, torch.int64)[:, None] + places).clamp(max=last[-1])
        pack = PackedPrefill(
            self._sent(running, torch.int32), to_padded, self._sent(to_packed, torch.int64)
        )
        counts = self._sent([len(part) for part in parts], torch.int32)
        own = self._tokens[self._sent(running, torch.int64)]
        sent = torch.cat([own, self._sent(tokens, torch.int64)])[None]
        slots_of_parts = self._sent(slots, torch.int32)
        hidden = self._decoder.hidden(sent, self._cache, slots_of_parts, counts, pack)
        of_parts = [
            hidden[0, begin : begin + len(part)] for begin, part in zip(begins, parts, strict=True)
        ]
        return Prefilled(hidden[0, self._sent(last, torch.int64)], of_parts)

    def score(self, hidden: Tensor, tokens: list[int], count: int) -> Answer:
        """Score tokens, each by the last hidden state of the one before it; see `score`.

        Logits are there of a part of the tokens at a time.

        Args:
            hidden: (n, hidden).
            tokens: n of them.
            count: how many of the likeliest tokens are told with each.
        """
        if not tokens:
            return Answer(hidden.new_empty(0, 0))
        came = self._sent(tokens, torch.int64)
        count = min(count, self._decoder.of.vocabulary)
        parts = zip(hidden.split(SCORED), came.split(SCORED), strict=True)
        return Answer(torch.cat([score(self._decoder.logits(x), some, count) for x, some in parts]))

    def write_logits(self, hidden: Tensor, out: Tensor) -> Answer:
        """Write the logits of last hidden states, (n, vocabulary); the answer has no rows."""
        for x, into in zip(hidden.split(SCORED), out.split(SCORED), strict=True):
            into.copy_(self._decoder.logits(x))
        return Answer(hidden.new_empty(0, 0))

    def sample(self, slots: list[int], hidden: Tensor, uniforms: list[float], kind: Kind) -> Answer:
        """Sample the next token of each slot, of which the last hidden states are known.

        Args:
            slots: up to 64.
            hidden: (batch, hidden).
            uniforms: for each; none if nothing is drawn.
            kind: of all together.
        """
        inputs = self._inputs_for(slots, uniforms)
        nobody = len(inputs.slots) - len(slots)
        padded = F.pad(hidden, (0, 0, 0, nobody)) if nobody else hidden
        return Answer(self._sample_logits(inputs, self._decoder.logits(padded), kind))

    def decode(self, slots: list[int], uniforms: list[float], kind: Kind) -> Answer:
        """Decode: sample the next token of each slot, which has the one before reserved.

        Args:
            slots: up to 64.
            uniforms: for each; none if nothing is drawn.
            kind: of all together.
        """
        inputs = self._inputs_for(slots, uniforms)
        if self._graphs is None:
            return Answer(self._decode(inputs, kind))
        key = len(inputs.slots), kind
        return Answer(self._graphs.run(key, lambda: self._decode(inputs, kind)))

    @property
    def shares_passes(self) -> bool:
        """Whether layers have to be brought for each pass, so that `pass_over` saves some."""
        return self._decoder.stream is not None

    def pass_over(
        self,
        running: Sequence[tuple[list[int], list[float], Kind]],
        parts: Sequence[PromptPart],
        pad_to: int,
    ) -> tuple[list[Answer], list[Prefilled]]:
        """Do what some calls of `decode` and of `prefill` would, and go through the layers once.

        Args:
            running: what `decode` is given.
            parts: what `prefill` is given, likewise pad_to.
        """
        decoder, cache = self._decoder, self._cache
        inputs, rows = list[Inputs](), list[Rows]()
        for slots, uniforms, _ in running:
            # Copies, as those of one size share memory.
            inputs.append(Inputs(*(each.clone() for each in self._inputs_for(slots, uniforms))))
            own = self._tokens[inputs[-1].places][:, None]
            x = decoder.embedded(own, cache, inputs[-1].slots)
            rows.append(Rows(x, inputs[-1].slots, is_step=True))
        rows += [self._rows_of(part, pad_to) for part in parts]
        found = decoder.pass_over(rows, cache)
        kinds = [kind for *_, kind in running]
        answers = [
            Answer(self._sample_logits(*each)) for each in zip(inputs, found, kinds, strict=False)
        ]
        hidden = zip(found[len(running) :], parts, strict=True)
        return answers, [_prefilled(x, part) for x, part in hidden]

    def _decode(self, inputs: Inputs, kind: Kind) -> Tensor:
        """Queue a step, from memory that stays to memory that stays, as a graph has to."""
        decoder, cache, slots = self._decoder, self._cache, inputs.slots
        x = decoder.embedded(self._tokens[inputs.places][:, None], cache, slots)
        step = partial(decoder.step, cache=cache, slots=slots)
        logits = step(x) if self._recordings is None else self._recordings.run(len(x), step, x)
        return self._sample_logits(inputs, logits, kind)

    def _sample_logits(self, inputs: Inputs, logits: Tensor, kind: Kind) -> Tensor:
        """Sample tokens, and keep them for the next step."""
        places, parameters, kept = inputs.places, None, self._history
        if kind.drawn or kind.penalized or kind.counted:
            parameters = Parameters(*self._parameters[places].split(1, -1))
        wanted = zip(kept, (kind.penalized, kind.counted, kind.biased), strict=True)
        rows_of = (of[places] if is_wanted and of is not None else None for of, is_wanted in wanted)
        history = History(*rows_of)
        rows = sample(logits, kind, parameters, inputs.uniforms, history)
        tokens = rows[:, 0].long()
        self._tokens[places] = tokens
        if history.seen is not None and kept.seen is not None:
            kept.seen.index_put_((places, tokens), self._true)
        if history.counts is not None and kept.counts is not None:
            counts = history.counts.gather(1, tokens[:, None])[:, 0]
            kept.counts.index_put_((places, tokens), counts + 1)  # no place but nobody's is twice
        return rows

    def _inputs_for(self, slots: list[int], uniforms: list[float]) -> Inputs:
        """Return inputs with these in them; what they have already is not sent again."""
        batch = 1 << (len(slots) - 1).bit_length() if self.pads else len(slots)
        inputs = self._inputs.get(batch)
        if inputs is None:
            inputs = self._inputs[batch] = Inputs(
                torch.empty(batch, dtype=torch.int32, device=self._device),
                torch.empty(batch, dtype=torch.int64, device=self._device),
                torch.zeros(batch, dtype=torch.float64, device=self._device),
            )
        if self._now.get(batch) != slots:
            self._now.pop(batch, None)
            nobody = batch - len(slots)
            inputs.slots.copy_(self._sent(slots + [-1] * nobody, torch.int32))
            inputs.places.copy_(self._sent(slots + [self._slots] * nobody, torch.int64))
            self._now[batch] = list(slots)
        if uniforms:
            sent = ready_to_send(uniforms, torch.float64, self._device)
            inputs.uniforms[: len(slots)].copy_(sent, non_blocking=True)
        return inputs

    def _sent(self, numbers: list[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor on the device."""
        return ready_to_send(numbers, dtype, self._device).to(self._device, non_blocking=True)


def _prefilled(hidden: Tensor, part: PromptPart) -> Prefilled:
    """Return hidden states, (1, tokens, hidden), of those tokens of a part that are wanted."""
    if not part.wants_all:
        return Prefilled(hidden[:, 0], [None])
    return Prefilled(hidden[:, -1].clone(), [hidden[0, :-1]])

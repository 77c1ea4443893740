"""InferenceEngine: a model with our kernels inside, that continues prompts."""

import os
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from typing import Any, Literal, NoReturn, SupportsIndex, overload

import torch
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from deepspeed_ext.inference.execution.decoder import Decoder
from deepspeed_ext.inference.execution.kv_cache import KVCache
from deepspeed_ext.inference.execution.memory_budget import check_positions
from deepspeed_ext.inference.execution.runner import ModelRunner
from deepspeed_ext.inference.execution.sampling import MOST_LOGPROBS, SamplingOptions, key_of
from deepspeed_ext.inference.requests.async_stream import AsyncStream
from deepspeed_ext.inference.requests.detokenizer import Detokenizer, run_byte_of
from deepspeed_ext.inference.requests.logits import Logits, rows_of
from deepspeed_ext.inference.requests.prompts import Mask, PromptReader, Prompts
from deepspeed_ext.inference.requests.request import Call, Completion, Prompt, Request, Score
from deepspeed_ext.inference.requests.stream import Stream
from deepspeed_ext.inference.requests.tokenizer import Tokenizer
from deepspeed_ext.inference.serving.fair_lock import FairLock
from deepspeed_ext.inference.serving.scheduler import Scheduler
from deepspeed_ext.inference.serving.step_thread import StepThread

Options = SamplingOptions | Sequence[SamplingOptions]
_NAMES = tuple(field.name for field in fields(SamplingOptions))


class InferenceEngine:
    """Continue prompts, many at a time.

    Batch-invariant: a completion has the same tokens and log-probabilities alone and beside any
    others, whenever they come and whichever slot it has; not with pack_prefill. Several threads may
    call one engine: whoever waits for tokens computes a step for all, and an engine that nobody
    waits for rests. If a step fails, or Ctrl-C interrupts it, the completions under way are given
    up, and the engine takes others. Within a step, as in a signal handler that comes then, streams
    may be closed, but nothing can be computed.

    An engine holds the weights and the cache; `close`, or letting go of it, gives the memory back.
    It belongs to its process and to the stream that was current when it was made.

    Args:
        decoder: the model.
        max_batch: slots, which is how many completions are computed at a time.
        max_tokens: of a prompt and its completion together.
        kv_quantized: None, or "int8" or "fp8": what keys and values are kept as.
        pages: of 64 tokens, for all slots together; None for as many as all need at max_tokens.
            With fewer, completions wait until there is room for all that they may become.
        tokenizer: None, or for prompts that are text, and completions: `encode` and `decode`.
        stop_tokens: that end completions, where a call says nothing else.
        pad_tokens: that rows of one length are filled up with; see `generate`.
        cuda_graphs: whether steps are recorded once and replayed, on CUDA.
        pack_prefill: whether parts of prompts, 1024 tokens at most, are prefilled together, and
            running requests decoded in the same pass, so that weights are read once for all. That
            is faster where prompts come all the time, but not batch-invariant: how the floats of a
            completion are rounded then depends on which others it meets.
        report: what quantizing has done to the weights, or None.

    Raises:
        ValueError: a size is none that a cache may have.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        max_batch: int,
        max_tokens: int,
        kv_quantized: str | None = None,
        pages: int | None = None,
        tokenizer: Tokenizer | None = None,
        stop_tokens: Sequence[int] = (),
        pad_tokens: Sequence[int] = (),
        cuda_graphs: bool = True,
        pack_prefill: bool = False,
        report: Any = None,
    ) -> None:
        of, embedding = decoder.of, decoder.weights.embedding
        check_positions(of, decoder.weights.positions, max_tokens)
        self.decoder, self.device = decoder, embedding.device
        self.max_batch, self.max_tokens = max_batch, max_tokens
        self.tokenizer = tokenizer
        self.stop_tokens, self.pad_tokens = tuple(stop_tokens), tuple(pad_tokens)
        self.cuda_graphs, self.report = cuda_graphs, report
        self.cache = KVCache(
            max_batch,
            max_tokens,
            of.kv_heads,
            of.head_dim,
            layers=of.layers,
            dtype=embedding.dtype,
            quantized=kv_quantized,
            pages=pages,
            device=self.device,
        )
        is_cuda = self.device.type == "cuda"
        self._stream = torch.cuda.current_stream(self.device) if is_cuda else None
        self._scheduler = Scheduler(
            ModelRunner(decoder, self.cache, max_batch, cuda_graphs),
            self.cache,
            max_batch,
            self.cache.free_pages,
            ahead=is_cuda,
            packs=pack_prefill,
        )
        self._lock = FairLock()
        self._steps = StepThread(self._advance, self._sweep)
        self._process = os.getpid()
        self._vocabulary = of.vocabulary
        self._asked: tuple[Tokenizer, int | None] | None = None
        self._is_open, self._has_given_back = True, False

    @overload
    def generate(
        self,
        prompts: Prompts,
        options: Options | None = None,
        *,
        attention_mask: Mask | None = None,
        stream: Literal[False] = False,
        progress: bool = False,
        **changes: Any,
    ) -> list[Completion]: ...

    @overload
    def generate(
        self,
        prompts: Prompts,
        options: Options | None = None,
        *,
        attention_mask: Mask | None = None,
        stream: Literal[True],
        progress: bool = False,
        **changes: Any,
    ) -> Stream: ...

    def generate(
        self,
        prompts: Prompts,
        options: Options | None = None,
        *,
        attention_mask: Mask | None = None,
        stream: bool = False,
        progress: bool = False,
        **changes: Any,
    ) -> list[Completion] | Stream:
        """Return what follows prompts:

            engine.generate("Once upon a time", max_new_tokens=64)[0].text
            for piece in engine.generate([[1, 15, 8], [1, 4]], temperature=0.8, stream=True): ...

        Args:
            prompts: text, or the numbers of tokens; or several of either, or none, as an empty
                list is. A prompt itself has a token at least. Each token of a list counts. So does
                each of a tensor, but for one of several rows with padding, which is refused
                without a mask: if a row begins or ends in a pad token. Such are those that the
                generation config, the config and the tokenizer name, or, where none does, the stop
                tokens of the engine, as many tokenizers have no other; that each row begins with
                one stop token is no padding. Without any of these nothing can be told from padding.
            attention_mask: 1 or True for each token of prompts that counts, wherever it is, and 0
                or False for the others, which are left out; None if all count.
            options: for all prompts, or a sequence of them, one for each.
            stream: whether to return an iterator of pieces at once, in place of completions in the
                end. Closing it, or letting go of it, cancels what is not done, and waits for
                nobody: the next step begins with that.
            progress: whether to draw a bar of tokens on stderr while all are waited for, if that
                is a terminal.
            changes: of the options, by the names that `SamplingOptions` has.

        Returns:
            A `Completion` of each prompt, or n of each, those of the first prompt first. With
            `stream` a `Stream`.

        Raises:
            TypeError: an argument is of a wrong kind.
            ValueError: an argument breaks a rule; a prompt is empty, has a token that is none, or
                does not fit with what is to follow it. Nothing is computed then.
            RuntimeError: logits are not finite; a step failed for another caller; the engine is
                closed, belongs to another process, or computes a step within which this is called.
                All completions of the call are cancelled.
        """
        some = self._tokens_of(prompts, attention_mask)
        call = self._ask(some, self._options(options, changes, len(some)), stream)
        if not stream:
            return self._completed(call, progress)
        running = Stream(call, self._advance, self._scheduler.cancel, self._sweep)
        self._scheduler.submit(call.requests)
        return running

    def stream(
        self,
        prompts: Prompts,
        options: Options | None = None,
        *,
        attention_mask: Mask | None = None,
        **changes: Any,
    ) -> AsyncStream:
        """Return pieces of completions as they come, in a coroutine:

            async for piece in engine.stream("Once upon a time", max_new_tokens=64): ...

        One thread computes steps for all coroutines while one of them waits. It ends then.

        Args:
            prompts, options, attention_mask, changes: as of `generate`.

        Raises:
            TypeError, ValueError: as `generate`.
            RuntimeError: no event loop runs; the engine is closed. What else `generate` raises, the
                stream does.
        """
        some = self._tokens_of(prompts, attention_mask)
        call = self._ask(some, self._options(options, changes, len(some)), True)
        running = Stream(call, self._advance, self._scheduler.cancel, self._sweep, tells_ends=True)
        return self._steps.follow(call, running, lambda: self._scheduler.submit(call.requests))

    def score(
        self, prompts: Prompts, *, attention_mask: Mask | None = None, top_logprobs: int = 0
    ) -> list[Score]:
        """Return the log-probability of each token of texts but the first, after those before.

        A text goes through the model once, as a prompt does, beside others and beside completions
        of other threads; logits are there of some of its tokens at a time. With `pack_prefill`
        others may change how it is rounded.

        Args:
            prompts: as of `generate`; max_tokens of the engine at most.
            attention_mask: likewise.
            top_logprobs: how many of the likeliest tokens, 0 to 20, are to be told in each place.

        Returns:
            A `Score` of each.

        Raises:
            TypeError, ValueError, RuntimeError: as `generate`.
        """
        if type(top_logprobs) is not int:
            raise TypeError(f"score: top_logprobs is {top_logprobs!r}, expected an int")
        if not 0 <= top_logprobs <= MOST_LOGPROBS:
            raise ValueError(
                f"score: top_logprobs is {top_logprobs}, expected 0 to {MOST_LOGPROBS}"
            )
        some = self._tokens_of(prompts, attention_mask)
        wanted = SamplingOptions(max_new_tokens=0, prompt_logprobs=top_logprobs)
        call = self._ask(some, [wanted] * len(some), False)
        found = zip(some, self._completed(call), strict=True)
        return [
            Score(tokens, one.prompt_logprobs or [], one.prompt_top_logprobs)
            for tokens, one in found
        ]

    def __call__(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Logits:
        """Return the logits after each token, as the model does; they have no gradients.

        All of them are there at once; `score` tells log-probabilities without.

        Args:
            input_ids: (texts, n), whole numbers, on any device.
            attention_mask: the same shape: 1 or True for tokens that count, and 0 or False for
                padding, on the left or on the right; None: all count.

        Returns:
            Logits of the dtype and on the device of the engine, 0 for padding.

        Raises:
            TypeError: an argument is no tensor.
            ValueError: an argument does not fit; a text has more tokens than max_tokens.
            RuntimeError: as `generate`; logits that are not finite are returned as they are.
        """
        self._check_usable()
        rows = rows_of(input_ids, attention_mask, self._vocabulary)
        call, wanted = Call(), SamplingOptions(max_new_tokens=0)
        with self._here():
            dtype, shape = (
                self.decoder.weights.embedding.dtype,
                (*input_ids.shape, self._vocabulary),
            )
            out = torch.zeros(shape, dtype=dtype, device=self.device)
        for text, begin, tokens in rows:
            prompt = Prompt(text, tokens, logits=out[text, begin : begin + len(tokens)])
            self._add(call, Request(prompt, wanted, 0, 0, 0, frozenset(), None, None))
        self._completed(call)
        if self._stream is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(self._stream)
            out.record_stream(current)
        return Logits(out)

    def _completed(self, call: Call, progress: bool = False) -> list[Completion]:
        """Let a call take part, and return what comes of it."""
        running = Stream(call, self._advance, self._scheduler.cancel, self._sweep)
        total = sum(request.options.max_new_tokens for request in call.requests)
        try:
            self._scheduler.submit(call.requests)
            # Where no bar is wanted there is none: it takes a lock of the whole process, which an
            # interruption may leave taken.
            with _bar(total) if progress else nullcontext() as bar:
                while not running.is_done:
                    running.advance()
                    if bar is not None:
                        bar.update(call.tokens - bar.n)
            return running.completions()
        finally:
            running.close()

    def _options(
        self, options: Options | None, changes: dict[str, Any], count: int
    ) -> list[SamplingOptions]:
        """Return the options of each prompt."""
        for name in changes:
            if name not in _NAMES:
                raise TypeError(f"generate: option is {name}, expected one of {', '.join(_NAMES)}")
        if options is None:
            return [SamplingOptions(**changes)] * count
        some = _several(options, count)
        if len(some) != count:
            raise ValueError(f"generate: options have length {len(some)}, expected {count}")
        return [replace(each, **changes) for each in some]

    @property
    def load(self) -> tuple[int, int]:
        """How many completions have a slot, and how many wait for one."""
        return self._scheduler.load

    def _tokens_of(self, prompts: Prompts, mask: Mask | None) -> list[list[int]]:
        self._check_usable()
        reader = PromptReader(self.tokenizer, self._vocabulary, self.stop_tokens, self.pad_tokens)
        return reader.tokens_of(prompts, mask)

    def _ask(self, prompts: list[list[int]], options: list[SamplingOptions], stream: bool) -> Call:
        """Make a request for each completion, all of which have room when they are alone."""
        call = Call()
        for i, (tokens, wanted) in enumerate(zip(prompts, options, strict=True)):
            if wanted.stop and self.tokenizer is None:
                raise ValueError(
                    f"generate: stop is {wanted.stop}, expected none, as the engine has no"
                    " tokenizer"
                )
            prompt = Prompt(i, tokens)
            seed = secrets.randbits(63) if wanted.seed is None else wanted.seed
            stop = self.stop_tokens if wanted.stop_tokens is None else wanted.stop_tokens
            for sample in range(wanted.n):
                text = None
                if self.tokenizer is not None:
                    decode, byte = self.tokenizer.decode, self._run_byte(self.tokenizer)
                    text = Detokenizer(decode, wanted.stop, in_pieces=stream, run_byte=byte)
                key, news = key_of(seed, sample), deque[tuple[int, str]]() if stream else None
                one = Request(prompt, wanted, sample, seed, key, frozenset(stop), text, news)
                self._add(call, one)
        return call

    def _add(self, call: Call, request: Request) -> None:
        """Make a request part of a call, if it has room when it is alone."""
        self._scheduler.check_capacity(request, self.max_tokens)
        call.add(request)

    def _run_byte(self, tokenizer: Tokenizer) -> int | None:
        """Return what `run_byte_of` does, which is asked once for a tokenizer."""
        if self._asked is None or self._asked[0] is not tokenizer:
            self._asked = tokenizer, run_byte_of(tokenizer.encode, tokenizer.decode)
        return self._asked[1]

    def _advance(self, is_enough: Callable[[], bool]) -> None:
        """Compute a step for all, or wait for another thread to; not if it is enough by then."""
        self._check_usable()  # as a fork may have left the turn with nobody
        if self._lock.is_mine:
            raise RuntimeError(
                "generate: the engine computes a step, expected no other within it, as a signal"
                " handler, a finalizer or a tokenizer may ask for"
            )
        self._lock.run(self._step, is_enough)

    def _step(self) -> None:
        self._check_usable()  # once more, as it may have been closed meanwhile
        with torch.inference_mode(), self._here():
            self._scheduler.step()

    def _sweep(self, is_enough: Callable[[], bool] = lambda: False) -> None:
        """Take slots back from what was cancelled, or failed, unless it is enough before."""
        if self._process == os.getpid() and not self._lock.is_mine:
            self._lock.run(self._sweep_now, is_enough)

    def _sweep_now(self) -> None:
        if self._is_open:
            with torch.inference_mode(), self._here():
                self._scheduler.sweep()

    @contextmanager
    def _here(self) -> Iterator[None]:
        """On the engine's stream, whatever the caller's is; in the dtypes of the model."""
        on_stream = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        with on_stream, torch.autocast(self.device.type, enabled=False):
            yield

    def _check_usable(self) -> None:
        if self._process != os.getpid():
            raise RuntimeError(
                f"generate: the engine belongs to process {self._process}, expected to be used"
                " there; start processes by spawn, and make an engine in each, as torch's threads"
                " do not outlive a fork"
            )
        if not self._is_open:
            raise RuntimeError("generate: the engine is closed, expected one that is open")

    def close(self) -> None:
        """Give the memory back. Completions under way are given up.

        Raises:
            RuntimeError: it is called within a step, as by a signal handler.
        """
        if self._process != os.getpid():
            return
        if self._lock.is_mine:
            raise RuntimeError(
                "close: the engine computes a step in this thread, expected it to be over"
            )
        self._is_open = False  # no thread begins another step
        self._lock.run(self._give_back, lambda: self._has_given_back)

    def _give_back(self) -> None:
        self._scheduler.close()
        for name in ("decoder", "cache"):
            vars(self).pop(name, None)  # an interruption may have come in between once before
        self._has_given_back = True

    def __enter__(self) -> "InferenceEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            "inference: an engine was to be copied or pickled, expected init_inference once more,"
            " as it holds a cache, and completions under way"
        )


def _bar(total: int) -> Any:
    """Return a bar of tokens, on stderr if that is a terminal."""
    return tqdm(total=total, unit="token", disable=None)


def _several(options: Options, count: int) -> list[SamplingOptions]:
    """Return so many options, or those that are given one by one."""
    if isinstance(options, SamplingOptions):
        return [options] * count
    if isinstance(options, Iterable) and not isinstance(options, Mapping):
        some = list(options)
        if all(isinstance(each, SamplingOptions) for each in some):
            return some
    raise TypeError(
        f"generate: options is {options!r:.60}, expected SamplingOptions, or a sequence of them;"
        " one option may be given by its name, as n=2"
    )

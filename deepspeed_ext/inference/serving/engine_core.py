"""What an engine is below its calls: its model and memory, and steps that threads take in turn."""

import os
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn, SupportsIndex, TypeVar

import torch
from tqdm import tqdm  # type: ignore[import-untyped]

from deepspeed_ext.inference.execution.decoder import Decoder
from deepspeed_ext.inference.execution.kv_cache import KVCache
from deepspeed_ext.inference.execution.memory_budget import check_positions
from deepspeed_ext.inference.execution.runner import ModelRunner
from deepspeed_ext.inference.execution.sampling import SamplingOptions, key_of
from deepspeed_ext.inference.requests.chat import ChatTemplates
from deepspeed_ext.inference.requests.detokenizer import Detokenizer, run_byte_of
from deepspeed_ext.inference.requests.options import with_room
from deepspeed_ext.inference.requests.request import Call, Completion, Prompt, Request
from deepspeed_ext.inference.requests.stream import Stream
from deepspeed_ext.inference.requests.tokenizer import Tokenizer
from deepspeed_ext.inference.serving.fair_lock import FairLock
from deepspeed_ext.inference.serving.scheduler import Scheduler
from deepspeed_ext.inference.serving.step_thread import StepThread

Engine = TypeVar("Engine", bound="EngineCore")


class EngineCore:
    """See InferenceEngine, which is this with what users call."""

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
        chat_templates: ChatTemplates = ChatTemplates({}, {}),
    ) -> None:
        of, embedding = decoder.of, decoder.weights.embedding
        check_positions(of, decoder.weights.positions, max_tokens)
        self.decoder, self.device = decoder, embedding.device
        self.max_batch, self.max_tokens = max_batch, max_tokens
        self.tokenizer = tokenizer
        self.stop_tokens, self.pad_tokens = tuple(stop_tokens), tuple(pad_tokens)
        self.cuda_graphs, self.report = cuda_graphs, report
        self.chat_templates = chat_templates
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
            # Of layers that are brought, the first ones come while the host reads a step; and one
            # that is computed in vain takes as long as any.
            ahead=is_cuda and decoder.stream is None,
            packs=pack_prefill,
        )
        self._lock = FairLock()
        self._steps = StepThread(self._advance, self._sweep)
        self._process = os.getpid()
        self._vocabulary = of.vocabulary
        self._asked: tuple[Tokenizer, int | None] | None = None
        self._is_open, self._has_given_back = True, False

    def _completed(self, call: Call, progress: bool = False) -> list[Completion]:
        """Let a call take part, and return what comes of it."""
        running = Stream(call, self._advance, self._scheduler.cancel, self._sweep)
        total = sum(request.max_new_tokens for request in call.requests)
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

    @property
    def load(self) -> tuple[int, int]:
        """How many completions have a slot, and how many wait for one."""
        return self._scheduler.load

    def _ask(
        self,
        prompts: list[list[int]],
        options: list[SamplingOptions],
        stream: bool,
        op: str = "generate",
    ) -> Call:
        """Make a request for each completion, all of which have room when they are alone."""
        call = Call()
        for i, (tokens, asked) in enumerate(zip(prompts, options, strict=True)):
            wanted = with_room(asked, self._scheduler.room_behind(len(tokens), self.max_tokens))
            biased = [token for token, _ in wanted.biases]
            for name, some in (("logit_bias", biased), ("stop_tokens", wanted.stop_tokens or ())):
                unknown = [token for token in some if token >= self._vocabulary]
                if unknown:
                    raise ValueError(
                        f"generate: {name} has token {unknown[0]}, expected 0 to"
                        f" {self._vocabulary - 1}"
                    )
            if wanted.stop and self.tokenizer is None:
                raise ValueError(
                    f"generate: stop is {wanted.stop}, expected none, as the engine has no"
                    " tokenizer"
                )
            prompt = Prompt(i, tokens, op=op)
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
                "inference: the engine computes a step, expected no other within it, as a signal"
                " handler, a finalizer or a tokenizer may ask for"
            )
        self._lock.run(self._step, is_enough)

    def _step(self) -> None:
        self._check_usable()  # once more, as it may have been closed meanwhile
        try:
            with torch.inference_mode(), self._here():
                self._scheduler.step()
        finally:
            self._steps.ring()

    def _sweep(self, is_enough: Callable[[], bool] = lambda: False) -> None:
        """Take slots back from what was cancelled, or failed, unless it is enough before."""
        if self._process == os.getpid() and not self._lock.is_mine:
            self._lock.run(self._sweep_now, is_enough)

    def _sweep_now(self) -> None:
        try:
            if self._is_open:
                with torch.inference_mode(), self._here():
                    self._scheduler.sweep()
        finally:
            self._steps.ring()

    @contextmanager
    def _here(self) -> Iterator[None]:
        """On the engine's stream, whatever the caller's is; in the dtypes of the model."""
        on_stream = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        with on_stream, torch.autocast(self.device.type, enabled=False):
            yield

    def _check_usable(self) -> None:
        if self._process != os.getpid():
            raise RuntimeError(
                f"inference: the engine belongs to process {self._process}, expected to be used"
                " there; start processes by spawn, and make an engine in each, as torch's threads"
                " do not outlive a fork"
            )
        if not self._is_open:
            raise RuntimeError("inference: the engine is closed, expected one that is open")

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
        self._steps.ring()
        decoder = getattr(self, "decoder", None)
        if decoder is not None and decoder.stream is not None:
            decoder.stream.close()
        for name in ("decoder", "cache"):
            vars(self).pop(name, None)  # an interruption may have come in between once before
        self._has_given_back = True

    def __enter__(self: Engine) -> Engine:
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

"""InferenceEngine: a model with our kernels inside, that continues prompts."""

import os
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, NoReturn, SupportsIndex, overload

import torch
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from deepspeed_ext.inference.execution.decoder import Decoder
from deepspeed_ext.inference.execution.kv_cache import KVCache
from deepspeed_ext.inference.execution.memory_budget import check_positions
from deepspeed_ext.inference.execution.runner import ModelRunner
from deepspeed_ext.inference.execution.sampling import SamplingOptions, key_of
from deepspeed_ext.inference.requests.chat import (
    ChatTemplates,
    Conversation,
    templates_of,
    texts_of,
)
from deepspeed_ext.inference.requests.detokenizer import Detokenizer, run_byte_of
from deepspeed_ext.inference.requests.options import Options, options_of, with_room
from deepspeed_ext.inference.requests.prompts import Mask, PromptReader, Prompts, given_of
from deepspeed_ext.inference.requests.request import Call, Completion, Prompt, Request
from deepspeed_ext.inference.requests.sequences import tensor_form
from deepspeed_ext.inference.requests.stream import Stream
from deepspeed_ext.inference.requests.tokenizer import Tokenizer, encoded_whole
from deepspeed_ext.inference.serving.fair_lock import FairLock
from deepspeed_ext.inference.serving.scheduler import Scheduler


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
        chat_templates: of the folder, for a tokenizer that has none itself.

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
            ahead=is_cuda,
            packs=pack_prefill,
        )
        self._lock = FairLock()
        self._process = os.getpid()
        self._vocabulary = of.vocabulary
        self._asked: tuple[Tokenizer, int | None] | None = None
        self._is_open, self._has_given_back = True, False

    @overload
    def generate(
        self,
        prompts: Prompts | None = None,
        options: Options | None = None,
        *,
        attention_mask: Mask | None = None,
        add_special_tokens: bool = True,
        generation_config: Any = None,
        return_tensors: None = None,
        stream: Literal[False] = False,
        progress: bool = False,
        **changes: Any,
    ) -> list[Completion]: ...

    @overload
    def generate(
        self,
        prompts: Prompts | None = None,
        options: Options | None = None,
        *,
        attention_mask: Mask | None = None,
        add_special_tokens: bool = True,
        generation_config: Any = None,
        return_tensors: None = None,
        stream: Literal[True],
        progress: bool = False,
        **changes: Any,
    ) -> Stream: ...

    @overload
    def generate(
        self,
        prompts: Prompts | None = None,
        options: Options | None = None,
        *,
        attention_mask: Mask | None = None,
        add_special_tokens: bool = True,
        generation_config: Any = None,
        return_tensors: Literal["pt"],
        stream: Literal[False] = False,
        progress: bool = False,
        **changes: Any,
    ) -> Tensor: ...

    def generate(
        self,
        prompts: Prompts | None = None,
        options: Options | None = None,
        *,
        attention_mask: Mask | None = None,
        add_special_tokens: bool = True,
        generation_config: Any = None,
        return_tensors: Literal["pt"] | None = None,
        stream: bool = False,
        progress: bool = False,
        **changes: Any,
    ) -> list[Completion] | Stream | Tensor:
        """Return what follows prompts:

            engine.generate("Once upon a time", max_new_tokens=64)[0].text
            for piece in engine.generate([[1, 15, 8], [1, 4]], temperature=0.8, stream=True): ...

        Args:
            prompts: text, or the numbers of tokens; or several of either, or none, as an empty
                list is; or what a tokenizer of transformers returns for these, also as
                `**encoding` and as `input_ids=`. A prompt itself has a token at least. Text begins
                once: where it has the token that the tokenizer puts before it, that is not put
                there a second time. Each token of a list counts. So does
                each of a tensor, but for one of several rows with padding, which is refused
                without a mask: if a row begins or ends in a pad token. Such are those that the
                generation config, the config and the tokenizer name, or, where none does, the stop
                tokens of the engine, as many tokenizers have no other; that each row begins with
                one stop token is no padding. Without any of these nothing can be told from padding.
            options: for all prompts, or a sequence of them, one for each; also as transformers'
                GenerationConfig, whose do_sample then counts.
            attention_mask: 1 or True for each token of prompts that counts, and 0 or False for
                others before or behind them, which are left out; None if all count.
            add_special_tokens: False for text that has all special tokens in it.
            generation_config: another name for options.
            return_tensors: "pt" for what transformers' generate returns, in place of completions:
                (prompts and new tokens), int64, with the token that ended them, and padding.
            stream: whether to return an iterator of pieces at once, in place of completions in the
                end. Closing it, or letting go of it, cancels what is not done, and waits for
                nobody: the next step begins with that.
            progress: whether to draw a bar of tokens on stderr while all are waited for, if that
                is a terminal.
            changes: of the options, by the names that `SamplingOptions` has, or transformers'
                generate, where it means the same: do_sample (with its temperature of 1 and top_k
                of 50 if nobody says another), eos_token_id, max_length, stop_strings,
                num_return_sequences. Others of its names are refused with what to use instead,
                unless they change no token.

        Returns:
            A `Completion` of each prompt, or n of each, those of the first prompt first. With
            `stream` a `Stream`, with return_tensors a tensor.

        Raises:
            TypeError: an argument is of a wrong kind.
            ValueError: an argument breaks a rule; a prompt is empty, has a token that is none, or
                does not fit with what is to follow it. Nothing is computed then.
            RuntimeError: logits are not finite; a step failed for another caller; the engine is
                closed, belongs to another process, or computes a step within which this is called.
                All completions of the call are cancelled.
        """
        self._check_usable()
        if options is not None and generation_config is not None:
            raise TypeError("generate: options and generation_config are given, expected one")
        options = generation_config if options is None else options
        given = given_of(prompts, attention_mask, changes)
        reader = self._reader(add_special_tokens)
        read, call = reader.read(given.prompts, given.mask), Call()
        wanted = options_of(options, given.others, read.tokens)
        form = None
        if return_tensors is not None:
            form = tensor_form(return_tensors, stream, reader, options, given.others, read)
        self._ask(call, read.tokens, wanted, stream)
        running = Stream(call, self._advance, self._scheduler.cancel, self._sweep)
        if stream:
            self._scheduler.submit(call.requests)
            return running
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
            found = running.completions()
            return found if form is None else form.of(found)
        finally:
            running.close()

    @overload
    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        options: Options | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        template_arguments: Mapping[str, Any] | None = None,
        stream: Literal[False] = False,
        **others: Any,
    ) -> list[Completion]: ...

    @overload
    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        options: Options | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        template_arguments: Mapping[str, Any] | None = None,
        stream: Literal[True],
        **others: Any,
    ) -> Stream: ...

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        options: Options | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        template_arguments: Mapping[str, Any] | None = None,
        stream: bool = False,
        **others: Any,
    ) -> list[Completion] | Stream:
        """Return what follows conversations, which a chat template makes text of:

            engine.chat([{"role": "user", "content": "Who are you?"}])[0].text

        The template is code of a stranger: it runs in jinja2's sandbox, and sees copies of nothing
        but plain values. An endless one is not stopped.

        Args:
            messages: each with role and content, which is text, or parts of text; or several
                conversations of such.
            options: as of `generate`.
            chat_template: a template, or the name of one of the tokenizer's; None for its usual
                one, or that of the folder.
            add_generation_prompt: whether the text ends with what begins an answer; None for that,
                unless continue_final_message.
            continue_final_message: whether the text ends with that of the last message, to be gone
                on with.
            template_arguments: variables of the template, such as enable_thinking.
            stream: as of `generate`.
            others: likewise.

        Raises:
            TypeError: messages are of another kind.
            ValueError: there is no tokenizer, or no template; it refuses the messages, or fails.
            As generate.
        """
        self._check_usable()
        if self.tokenizer is None:
            raise ValueError("chat: the engine has no tokenizer, expected one, for text")
        texts = texts_of(
            messages,
            templates_of(self.tokenizer, self.chat_templates),
            chat_template,
            template_arguments,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        tokens = [encoded_whole(self.tokenizer, text) for text in texts]
        found: Any = self.generate(tokens, options, stream=stream, **others)  # type: ignore[call-overload]
        answer: list[Completion] | Stream = found
        return answer

    def _reader(self, adds_special_tokens: bool) -> PromptReader:
        if type(adds_special_tokens) is not bool:
            raise TypeError(
                f"generate: add_special_tokens is {adds_special_tokens!r:.60}, expected True or"
                " False"
            )
        return PromptReader(
            self.tokenizer, self._vocabulary, self.stop_tokens, self.pad_tokens, adds_special_tokens
        )

    def _ask(
        self,
        call: Call,
        prompts: list[list[int]],
        options: list[SamplingOptions],
        stream: bool,
    ) -> None:
        """Make a request for each completion, all of which have room when they are alone."""
        for i, (tokens, asked) in enumerate(zip(prompts, options, strict=True)):
            wanted = with_room(asked, self._scheduler.room_behind(len(tokens), self.max_tokens))
            unknown = [token for token, _ in wanted.biases if token >= self._vocabulary]
            if unknown:
                raise ValueError(
                    f"generate: logit_bias has token {unknown[0]}, expected 0 to"
                    f" {self._vocabulary - 1}"
                )
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
                self._scheduler.check_capacity(one, self.max_tokens)
                call.add(one)

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

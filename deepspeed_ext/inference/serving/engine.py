"""InferenceEngine: a model with our kernels inside, that continues prompts."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from deepspeed_ext.inference.execution.sampling import MOST_LOGPROBS, SamplingOptions, int_of
from deepspeed_ext.inference.requests.async_stream import AsyncStream
from deepspeed_ext.inference.requests.chat import Conversation, templates_of, texts_of
from deepspeed_ext.inference.requests.logits import Logits, rows_of
from deepspeed_ext.inference.requests.options import Options, options_of
from deepspeed_ext.inference.requests.prompts import Mask, PromptReader, Prompts, given_of
from deepspeed_ext.inference.requests.request import Call, Completion, Prompt, Request, Score
from deepspeed_ext.inference.requests.sequences import tensor_form
from deepspeed_ext.inference.requests.stream import Stream
from deepspeed_ext.inference.requests.tokenizer import encoded_whole
from deepspeed_ext.inference.serving.engine_core import EngineCore


class InferenceEngine(EngineCore):
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
        pack_prefill: whether parts of prompts, 2048 tokens at most, are prefilled together, and
            running requests decoded in the same pass, so that weights are read once for all. That
            is faster where prompts come all the time, but not batch-invariant: how the floats of a
            completion are rounded then depends on which others it meets.
        report: what quantizing has done to the weights, or None.
        chat_templates: of the folder, for a tokenizer that has none itself.

    Raises:
        ValueError: a size is none that a cache may have.
    """

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
        given = given_of("generate", prompts, attention_mask, changes)
        reader = self._reader(add_special_tokens)
        read = reader.read(given.prompts, given.mask)
        wanted = options_of(options, given.others, read.tokens)
        form = None
        if return_tensors is not None:
            form = tensor_form(return_tensors, stream, reader, options, given.others, read)
        call = self._ask(read.tokens, wanted, stream)
        if not stream:
            found = self._completed(call, progress)
            return found if form is None else form.of(found)
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
        self._check_usable()
        given = given_of("generate", prompts, attention_mask, changes)
        some = self._reader(True).read(given.prompts, given.mask).tokens
        call = self._ask(some, options_of(options, given.others, some), True)
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
        count = int_of(top_logprobs)
        if count is None:
            raise TypeError(f"score: top_logprobs is {top_logprobs!r:.60}, expected an int")
        if not 0 <= count <= MOST_LOGPROBS:
            raise ValueError(f"score: top_logprobs is {count}, expected 0 to {MOST_LOGPROBS}")
        self._check_usable()
        given = given_of("score", prompts, attention_mask, {})
        some = self._reader(True, "score").read(given.prompts, given.mask).tokens
        wanted = SamplingOptions(max_new_tokens=0, prompt_logprobs=count)
        call = self._ask(some, [wanted] * len(some), False, "score")
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
            own = out[text, begin : begin + len(tokens)]
            prompt = Prompt(text, tokens, logits=own, op="InferenceEngine")
            self._add(call, Request(prompt, wanted, 0, 0, 0, frozenset(), None, None))
        self._completed(call)
        if self._stream is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(self._stream)
            out.record_stream(current)
        return Logits(out)

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
        but plain values. One that does not end is stopped after a second.

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
        tokens = self.chat_tokens(
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_arguments=template_arguments,
        )
        found: Any = self.generate(tokens, options, stream=stream, **others)  # type: ignore[call-overload]
        answer: list[Completion] | Stream = found
        return answer

    def chat_tokens(
        self,
        messages: Conversation | Sequence[Conversation],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> list[list[int]]:
        """Return the tokens of each conversation, which `chat` has as its prompts; see there."""
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
        return [encoded_whole(self.tokenizer, text) for text in texts]

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` needs no template to be given."""
        return bool(templates_of(self.tokenizer, self.chat_templates).texts)

    def _reader(self, adds_special_tokens: bool, op: str = "generate") -> PromptReader:
        if type(adds_special_tokens) is not bool:
            raise TypeError(
                f"generate: add_special_tokens is {adds_special_tokens!r:.60}, expected True or"
                " False"
            )
        return PromptReader(
            self.tokenizer,
            self._vocabulary,
            self.stop_tokens,
            self.pad_tokens,
            adds_special_tokens,
            op,
        )

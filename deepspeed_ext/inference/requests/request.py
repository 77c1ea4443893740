"""What is asked of an engine, how far it is, and what comes of it."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from deepspeed_ext.inference.execution.sampling import USUAL_NEW_TOKENS, SamplingOptions
from deepspeed_ext.inference.requests.detokenizer import Detokenizer
from deepspeed_ext.inference.requests.state import NEXT, State
from deepspeed_ext.ops.attention.paged_kv import PAGE

FinishReason = Literal["length", "stop", "cancelled"]


@dataclass(frozen=True)
class Completion:
    """What follows a prompt.

    Args:
        tokens: without the stop token that ended them.
        text: of the tokens, up to the stop string that ended it; None without a tokenizer.
        finish_reason: "length" after max_new_tokens; "stop" at a stop string or token; "cancelled".
        stop: the string or token that ended it, or None.
        logprobs: None, or of each token the logarithm of its probability by the model: without
            penalty, temperature and filters.
        top_logprobs: None, or for each token the likeliest tokens, with their logprobs.
        prompt: its number in the call.
        sample: the number of the completion of that prompt.
        seed: of its draws.
        prompt_logprobs: None, or likewise of each token of the prompt but the first; fewer if it
            was cancelled before all were computed.
        prompt_top_logprobs: None, or for each of those the likeliest tokens, with their logprobs.
    """

    tokens: list[int]
    text: str | None
    finish_reason: FinishReason
    stop: str | int | None
    logprobs: list[float] | None
    top_logprobs: list[list[tuple[int, float]]] | None
    prompt: int
    sample: int
    seed: int
    prompt_logprobs: list[float] | None = None
    prompt_top_logprobs: list[list[tuple[int, float]]] | None = None

    def __str__(self) -> str:
        return str(self.tokens) if self.text is None else self.text


@dataclass(frozen=True)
class Score:
    """What a model thinks of a text.

    Args:
        tokens: of the text.
        logprobs: of each token but the first the logarithm of its probability after those before.
        top_logprobs: None, or for each of these the likeliest tokens in its place, with theirs.
    """

    tokens: list[int]
    logprobs: list[float]
    top_logprobs: list[list[tuple[int, float]]] | None


@dataclass(eq=False)
class Prompt:
    """A prompt, of which there may be several completions, and what they share while they run.

    Args:
        number: in the call.
        tokens: of the prompt.
        slots: those that hold it now.
        hidden: its last hidden state, once there is one, (1, hidden).
        logits: None, or what the logits of its tokens are written to, (tokens, vocabulary).
        logprobs: of its tokens but the first, as far as they are known, if they are wanted.
        top_logprobs: likewise.
        op: the call, for errors.
    """

    number: int
    tokens: list[int]
    slots: list[int] = field(default_factory=list)
    hidden: Tensor | None = None
    logits: Tensor | None = None
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    op: str = "generate"

    @property
    def called(self) -> str:
        """What errors call it, and the call."""
        return f"{self.op}: {'prompt' if self.logits is None else 'row'} {self.number}"

    @property
    def last_hidden(self) -> Tensor:
        """The last hidden state of a prompt that is prefilled."""
        assert self.hidden is not None
        return self.hidden

    @property
    def shared_pages(self) -> int:
        """Pages that all completions read and none writes."""
        return len(self.tokens) // PAGE


@dataclass(eq=False)
class Call:
    """What the requests of one call have come to, so that nobody has to look at each.

    Args:
        requests: all, their order that of the completions.
        open: how many are not done.
        tokens: of all.
        error: of the first that failed.
        ready: those that have told something since, if that is wanted; some more than once.
        notify: is called, within a step, whenever there is something new; or None.
    """

    requests: "list[Request]" = field(default_factory=list)
    open: int = 0
    tokens: int = 0
    error: Exception | None = None
    ready: "deque[Request]" = field(default_factory=deque)
    notify: Callable[[], None] | None = None

    def add(self, request: "Request") -> None:
        """Make a request part of the call; one that is for nothing is done at once.

        What is wanted of the prompt itself comes with its first completion.
        """
        request.call = self
        self.requests.append(request)
        self.open += 1
        is_for_prompt = request.tells_of_prompt and request.sample == 0
        if request.max_new_tokens == 0 and not is_for_prompt:
            request._finish("length")

    def recount(self) -> None:
        """Find out again what an interruption may have left wrong."""
        self.ready.extend(request for request in self.requests if request.news is not None)
        self.open = sum(not request.is_done for request in self.requests)
        if self.notify is not None:
            self.notify()


@dataclass(eq=False)
class Request:
    """One completion on its way, in one of four states; only the scheduler changes it.

    Its methods are what may happen to it. What may not happen in its state raises RuntimeError, but
    for what would end it once more: the first end stays.

    Args:
        prompt: that it follows.
        options: of the caller.
        sample: its number among those of the prompt.
        seed: of the caller, or drawn.
        key: of its draws.
        stop_tokens: those of the options, or of the engine.
        detokenizer: None without a tokenizer.
        news: tokens and pieces of text that nobody has taken yet; None if nobody will.
        call: that it is part of; see `Call.add`.
        state: how far it is.
        prefilled: tokens of the prompt that have been.
        queued: tokens whose computation is.
    """

    prompt: Prompt
    options: SamplingOptions
    sample: int
    seed: int
    key: int
    stop_tokens: frozenset[int]
    detokenizer: Detokenizer | None
    news: deque[tuple[int, str]] | None
    call: Call = field(init=False, repr=False)
    state: State = State.WAITING
    slot: int = -1
    prefilled: int = 0
    queued: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop: str | int | None = None
    error: Exception | None = None

    @property
    def max_new_tokens(self) -> int:
        """How many tokens it may have."""
        most = self.options.max_new_tokens
        return USUAL_NEW_TOKENS if most is None else most

    @property
    def is_done(self) -> bool:
        """Whether nothing more will come of it."""
        return self.state is State.DONE

    @property
    def left(self) -> int:
        """How many tokens of the prompt are still to be prefilled."""
        return len(self.prompt.tokens) - self.prefilled

    @property
    def wants_token(self) -> bool:
        """Whether fewer tokens are queued than it may have."""
        return self.queued < self.max_new_tokens

    @property
    def tells_of_prompt(self) -> bool:
        """Whether something is wanted of all tokens of the prompt, or of all but the first."""
        is_scored = self.options.prompt_logprobs is not None and len(self.prompt.tokens) > 1
        return is_scored or self.prompt.logits is not None

    @property
    def kept_tokens(self) -> int:
        """How many tokens its slot will have: the last new one is not put in."""
        return len(self.prompt.tokens) + max(self.max_new_tokens - 1, 0)

    @property
    def own_pages(self) -> int:
        """Pages that it needs beside those that it shares."""
        return -(-self.kept_tokens // PAGE) - self.prompt.shared_pages

    def next_tokens(self, count: int) -> list[int]:
        """Return so many tokens of the prompt, after those that are prefilled."""
        return self.prompt.tokens[self.prefilled : self.prefilled + count]

    def admit(self, slot: int) -> None:
        """Let it have a slot, after which it may be prefilled."""
        self._become(State.PREFILLING)
        self.slot = slot

    def prefill(self, count: int) -> None:
        """Note that so many more tokens of the prompt are in its slot."""
        self._expect(State.PREFILLING)
        self.prefilled += count

    def queue_token(self) -> None:
        """Note that its next token is queued: the first one as soon as all of its prompt is."""
        if self.state is State.PREFILLING and self.left == 0:
            self._become(State.RUNNING)
        self._expect(State.RUNNING)
        self.queued += 1

    def accept(self, row: list[float]) -> None:
        """Take the next token, which may be the last; see `sample` for the row."""
        self._expect(State.RUNNING)
        token, best = int(row[0]), row[1]
        if not math.isfinite(best):
            self._refuse(f"token {len(self.tokens)} after", best)
            return
        if token in self.stop_tokens:
            self.stop = token
            self._finish("stop")
            return
        self.tokens.append(token)
        self.call.tokens += 1
        if self.options.logprobs is not None:
            self._tell_logprobs(row)
        piece = "" if self.detokenizer is None else self.detokenizer.add(token)
        self._tell(token, piece)
        if self.detokenizer is not None and self.detokenizer.stopped is not None:
            self._finish("stop")
        elif len(self.tokens) == self.max_new_tokens:
            self._finish("length")

    def accept_part(self, begin: int, end: int, rows: list[list[float]]) -> None:
        """Take what is told of the prompt's tokens from begin to end; see `score` for the rows.

        A row is about the token behind its own. A part may come again, after another completion of
        the prompt was cancelled, and is the same then.
        """
        prompt, scored, top = self.prompt, [], []
        for i, (largest, logprob, *rest) in enumerate(rows, begin + 1):
            if not math.isfinite(largest):
                self._refuse(f"token {i} of", largest)
                return
            scored.append(logprob)
            half = len(rest) // 2
            pairs = zip(map(int, rest[:half]), rest[half:], strict=True)
            top.append(list(pairs))
        prompt.logprobs[begin : begin + len(rows)] = scored
        prompt.top_logprobs[begin : begin + len(rows)] = top
        if end == len(prompt.tokens) and self.max_new_tokens == 0:
            self._finish("length")

    def _refuse(self, which: str, largest: float) -> None:
        self.fail(
            f"{self.prompt.op}: the logits for {which} prompt {self.prompt.number} have {largest}"
            " as the largest, expected finite ones; a weight is not finite, or numbers become too"
            " large for the dtype"
        )

    def cancel(self) -> None:
        """End it as it is."""
        if not self.is_done:
            self._finish("cancelled")

    def fail(self, error: Exception | str) -> None:
        """End it with an error, whose text may be given alone."""
        if not self.is_done:
            self.error = RuntimeError(error) if isinstance(error, str) else error
            self.call.error = self.call.error or self.error
            self._become(State.DONE)
            self._end()

    def _tell(self, token: int, piece: str) -> None:
        """Add to the news; -1 is no token."""
        if self.news is not None:
            self.news.append((token, piece))
            self.call.ready.append(self)
            if self.call.notify is not None:
                self.call.notify()

    def _end(self) -> None:
        """Let the call know that it is done."""
        if self.news is not None:
            self.call.ready.append(self)
        self.call.open -= 1  # last: whoever finds that none is open has been told of all
        if self.call.notify is not None:
            self.call.notify()

    def _become(self, state: State) -> None:
        if state not in NEXT[self.state]:
            before = " or ".join(each.name for each in State if state in NEXT[each])
            raise RuntimeError(
                f"request: state is {self.state.name}, expected {before}, to become {state.name}"
            )
        self.state = state

    def _expect(self, state: State) -> None:
        if self.state is not state:
            raise RuntimeError(f"request: state is {self.state.name}, expected {state.name}")

    def _tell_logprobs(self, row: list[float]) -> None:
        whole = math.log(row[3])  # less the largest logit
        self.logprobs.append(row[2] + whole)
        count = self.options.logprobs or 0
        half = (len(row) - 4) // 2
        tokens, logits = row[4 : 4 + half], row[4 + half :]
        pairs = zip(tokens[:count], logits[:count], strict=True)
        self.top_logprobs.append([(int(token), logit + whole) for token, logit in pairs])

    def _finish(self, reason: FinishReason) -> None:
        if self.detokenizer is not None:
            rest = self.detokenizer.finish()
            if rest:
                self._tell(-1, rest)
            if self.detokenizer.stopped is not None:
                reason, self.stop = "stop", self.detokenizer.stopped
        self.finish_reason = reason
        self._become(State.DONE)
        self._end()

    def completion(self) -> Completion:
        """Return what came of it."""
        assert self.finish_reason is not None
        wants, of_prompt = self.options.logprobs, self.options.prompt_logprobs
        return Completion(
            self.tokens,
            None if self.detokenizer is None else self.detokenizer.value,
            self.finish_reason,
            self.stop,
            None if wants is None else self.logprobs,
            None if not wants else self.top_logprobs,
            self.prompt.number,
            self.sample,
            self.seed,
            None if of_prompt is None else self.prompt.logprobs,
            None if not of_prompt else self.prompt.top_logprobs,
        )

"""How the next token is sampled: what a caller may ask for, and the sampling itself.

Sampling is batch-invariant: a token does not depend on others of the batch. Sums of floats do, as
their order may change with the shape of a batch. So probabilities, which our softmax gives each row
alone, become integers: those add up to the same whatever the order.
"""

import operator
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from deepspeed_ext.ops import softmax

MOST_LOGPROBS = 20
USUAL_NEW_TOKENS = 128
_WHOLE = 2.0**40  # what a probability of 1 is as an integer
_RUN = 256  # weights that are added up first, so that a draw goes through few sums
_LIKELY = 1024  # tokens that are ordered first on the CPU, as they mostly are enough for top_p
_TINY, _HUGE = 2.0**-126, 2.0**127  # of float32
_MOST = sys.float_info.max
_WORD = 2**64 - 1
_STEP = 0x9E3779B97F4A7C15
_NO_ITEMS = (bytes, bytearray, Mapping)  # although whole numbers, or strings, may come out of them

_FLOATS: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("temperature", lambda value: value >= 0, "0 or more"),
    ("top_p", lambda value: 0 < value <= 1, "over 0, and 1 at most"),
    ("min_p", lambda value: 0 <= value <= 1, "0 to 1"),
    ("repetition_penalty", lambda value: value > 0, "more than 0"),
    ("presence_penalty", lambda value: -2 <= value <= 2, "-2 to 2"),
    ("frequency_penalty", lambda value: -2 <= value <= 2, "-2 to 2"),
)
_MOST_BIAS = 100
Bias = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class SamplingOptions:
    """What a request asks for.

    Logits go through logit_bias, repetition_penalty, frequency_penalty, presence_penalty,
    temperature, top_k, top_p and min_p, in this order. Tokens that are as likely as the last one
    that is kept are kept, too. Numbers may be numpy's.

    Args:
        max_new_tokens: after so many tokens a completion ends; 0 gives an empty one; None for 128,
            or as many as the engine has room for behind the prompt, if that is less.
        temperature: logits are divided by it; 0 takes the likeliest token each time.
        top_k: of how many of the likeliest tokens one is drawn; 0 for all.
        top_p: a token is left out if those that are likelier have this share of the probability
            together; 1 for none.
        min_p: a token is left out if its probability is below this share of that of the likeliest.
        repetition_penalty: logits of tokens that the prompt or the completion has are divided by
            it if they are positive, and multiplied by it if they are negative; 1 for nothing.
        presence_penalty: is taken off the logit of each token that the completion has, whatever
            the prompt has; -2 to 2, as OpenAI defines it.
        frequency_penalty: likewise, for each time that the completion has it.
        logit_bias: by token, what is added to its logit: -100 to 100, of which the ends forbid a
            token, or allow hardly another one. It is kept as pairs, in the order of tokens.
        stop: strings, or one, of which the first that a completion has ends it, and is cut off.
            Special tokens, which most tokenizers leave out of text, are for stop_tokens.
        stop_tokens: tokens, or one, that end a completion, of which they are no part; None for
            those of the engine, () for none.
        seed: of the draws: the same seed, options and prompt give the same completion, but for what
            rounding changes of it with pack_prefill. None for one that nobody knows beforehand.
        n: how many completions of the prompt, each with draws of its own.
        logprobs: None, or how many of the likeliest tokens, 0 to 20, are to be told with each token
            beside its own log-probability.
        prompt_logprobs: None, or the same for the tokens of the prompt but the first.

    Raises:
        TypeError: an argument is of a wrong kind.
        ValueError: an argument breaks a rule above.
    """

    max_new_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | Bias = ()
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] | None = None
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, want in (("stop", "strings"), ("stop_tokens", "ints or None")):
            value = getattr(self, name)
            if value is not None or name == "stop":
                object.__setattr__(self, name, _several(name, value, want))
        for name, low, high in (
            ("max_new_tokens", 0, 2**31 - 1),
            ("top_k", 0, 2**31 - 1),
            ("n", 1, 2**31 - 1),
            ("seed", 0, _WORD),
            ("logprobs", 0, MOST_LOGPROBS),
            ("prompt_logprobs", 0, MOST_LOGPROBS),
        ):
            value = getattr(self, name)
            if value is not None or name in ("top_k", "n"):
                object.__setattr__(self, name, _checked_int(name, value, low, high))
        for name, is_right, want in _FLOATS:
            value = _checked_float(name, getattr(self, name))
            if not (is_right(value) and value <= _MOST):
                raise ValueError(f"generate: {name} is {value}, expected {want}")
            object.__setattr__(self, name, value)
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"generate: stop has {text!r}, expected strings, none empty")
        if self.stop_tokens is not None:
            some = (_checked_int("stop_tokens", each, 0, 2**31 - 1) for each in self.stop_tokens)
            object.__setattr__(self, "stop_tokens", tuple(some))
        object.__setattr__(self, "logit_bias", _bias_of(self.logit_bias))

    @property
    def biases(self) -> Bias:
        """What is added to logits, in the order of tokens."""
        assert isinstance(self.logit_bias, tuple)
        return self.logit_bias

    @property
    def kind(self) -> "Kind":
        """What sampling takes."""
        drawn = self.temperature > 0
        candidates = None
        if drawn and self.top_k > 0:
            candidates = 1 << (self.top_k - 1).bit_length()
        elif drawn and self.top_p < 1:
            candidates = 0
        elif drawn and self.min_p > 0:
            candidates = 1
        penalized = self.repetition_penalty != 1
        logprobs = -1 if self.logprobs is None else MOST_LOGPROBS if self.logprobs else 0
        counted = self.presence_penalty != 0 or self.frequency_penalty != 0
        return Kind(drawn, candidates, penalized, logprobs, counted, bool(self.logit_bias))


def _several(name: str, value: Any, want: str) -> tuple[Any, ...]:
    """Return the items of what may be one, or several; a tensor is neither."""
    if isinstance(value, str | int) or int_of(value) is not None:
        return (value,)
    if not isinstance(value, Iterable) or isinstance(value, _NO_ITEMS) or hasattr(value, "tolist"):
        raise TypeError(f"generate: {name} is {value!r:.60}, expected {want}")
    return tuple(value)


def int_of(value: Any) -> int | None:
    """Return a whole number as Python's, whoever's it is; None for what is none, as a tensor."""
    if isinstance(value, bool | Tensor) or getattr(value, "shape", ()) != ():
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _checked_int(name: str, value: Any, low: int, high: int) -> int:
    found = int_of(value)
    if found is None:
        raise TypeError(f"generate: {name} is {value!r:.60}, expected an int")
    if not low <= found <= high:
        raise ValueError(f"generate: {name} is {found}, expected {low} to {high}")
    return found


def _checked_float(name: str, value: Any) -> int | float:
    """Return a number as Python's, whoever's it is."""
    if isinstance(value, int | float) and type(value) in (int, float):
        return value
    kind = getattr(getattr(value, "dtype", None), "kind", "")  # of numpy
    if kind not in ("f", "i", "u") or getattr(value, "shape", None) != ():
        raise TypeError(f"generate: {name} is {value!r:.60}, expected a float")
    return float(value)


def _bias_of(given: Any) -> Bias:
    """Return the pairs of a bias in the order of tokens, none of which is there twice."""
    pairs = list(given.items()) if isinstance(given, Mapping) else given
    is_right = isinstance(pairs, list | tuple)
    if not is_right or not all(isinstance(each, tuple) and len(each) == 2 for each in pairs):
        raise TypeError(
            f"generate: logit_bias is {given!r:.60}, expected a number for each of some tokens, as"
            " {50256: -100}"
        )
    found = dict[int, float]()
    for token, value in pairs:
        number = _checked_int("logit_bias", token, 0, 2**31 - 1)
        bias = _checked_float(f"logit_bias[{number}]", value)
        if not abs(bias) <= _MOST_BIAS:
            want = f"-{_MOST_BIAS} to {_MOST_BIAS}"
            raise ValueError(f"generate: logit_bias[{number}] is {bias}, expected {want}")
        if number in found:
            raise ValueError(f"generate: logit_bias has token {number} twice, expected once")
        found[number] = float(bias)
    return tuple(sorted(found.items()))


class Kind(NamedTuple):
    """What the rows of a batch take together; a row has the same results by any that has its own.

    Args:
        drawn: whether a token is drawn at random.
        candidates: how many of the likeliest tokens must be put in order for filters, 0 for all;
            None for no filters.
        penalized: whether there are repetition penalties.
        logprobs: how many of the likeliest tokens are to be told; -1 for not even the
            log-probability of the token.
        counted: whether there are penalties for what completions have.
        biased: whether something is added to logits.
    """

    drawn: bool = False
    candidates: int | None = None
    penalized: bool = False
    logprobs: int = -1
    counted: bool = False
    biased: bool = False

    def __or__(self, other: "Kind") -> "Kind":
        some = [c for c in (self.candidates, other.candidates) if c is not None]
        return Kind(
            self.drawn or other.drawn,
            (0 if 0 in some else max(some)) if some else None,
            self.penalized or other.penalized,
            max(self.logprobs, other.logprobs),
            self.counted or other.counted,
            self.biased or other.biased,
        )


class Parameters(NamedTuple):
    """The numbers of each row of a batch, (batch, 1) each, float64; see `SamplingOptions`."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor

    @classmethod
    def row(cls, options: SamplingOptions) -> list[float]:
        """Return the numbers of one row, which as float32 are 0 only if they are, and finite."""
        numbers = [float(getattr(options, name)) for name in cls._fields]
        return [min(max(number, _TINY), _HUGE) if number > 0 else number for number in numbers]


class History(NamedTuple):
    """What each row of a batch does to its logits, of all tokens; None where nobody needs it.

    Args:
        seen: (batch, vocabulary), bool: tokens that a repetition penalty is for.
        counts: (batch, vocabulary), int32: how often the completion has each.
        bias: (batch, vocabulary), float32: what is added.
    """

    seen: Tensor | None = None
    counts: Tensor | None = None
    bias: Tensor | None = None


def key_of(seed: int, sample: int) -> int:
    """Return what the draws of one completion are made from."""
    return _mixed(_mixed(seed) + sample)


def uniform(key: int, index: int) -> float:
    """Return a number in [0, 1), the same for the same key and index of a token.

    See: Steele, Lea & Flood, "Fast Splittable Pseudorandom Number Generators", 2014, figure 17.
    """
    return (_mixed(key + (index + 1) * _STEP) >> 11) * 2.0**-53


def _mixed(word: int) -> int:
    word &= _WORD
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _WORD
    return word ^ (word >> 31)


def sample(
    logits: Tensor,
    kind: Kind,
    parameters: Parameters | None = None,
    uniforms: Tensor | None = None,
    history: History = History(),
) -> Tensor:
    """Sample a token for each row, as if it were alone; nothing is read by the host on CUDA.

    Args:
        logits: (batch, vocabulary), float32, bfloat16 or float16.
        kind: what the rows take together; it says which of the others are read.
        parameters: of the rows, for draws and penalties.
        uniforms: (batch,), float64, in [0, 1), of which tokens are drawn.
        history: likewise, for penalties and biases.

    Returns:
        (batch, 4 + 2 logprobs), float64: the token; the largest logit, which is not finite if no
        token can be sampled; with log-probabilities the logit of the token less the largest one of
        the model, and the probability of that; then the likeliest tokens, and their logits less
        the largest one.
    """
    x = raw = logits if kind == Kind() else logits.float()  # as they are, only to be compared
    x = _changed(x, kind, parameters, history)
    best, token = _largest(x)
    if kind.drawn:
        assert parameters is not None and uniforms is not None
        drawn = _drawn(weights_of(x - best[:, None], kind, parameters), uniforms)
        token = torch.where(parameters.temperature[:, 0] > 0, drawn, token)
    columns = [token, best]
    if kind.logprobs >= 0:
        largest = raw.amax(-1, keepdim=True)
        columns += [raw.gather(1, token[:, None])[:, 0] - largest[:, 0], softmax(raw).amax(-1)]
        if kind.logprobs > 0:
            tokens = likeliest(raw, min(kind.logprobs, raw.shape[-1]))
            columns += [*tokens.unbind(1), *(raw.gather(1, tokens) - largest).unbind(1)]
    return torch.stack([column.double() for column in columns], -1)


def _changed(x: Tensor, kind: Kind, parameters: Parameters | None, history: History) -> Tensor:
    """Return logits after biases and penalties; what a row has not asked for leaves it as it is."""
    if kind.biased:
        assert history.bias is not None
        x = x + history.bias
    if kind.penalized:
        assert parameters is not None and history.seen is not None
        penalty = parameters.repetition_penalty.float()
        x = torch.where(history.seen, torch.where(x < 0, x * penalty, x / penalty), x)
    if kind.counted:
        assert parameters is not None and history.counts is not None
        x = x - parameters.frequency_penalty.float() * history.counts
        x = x - parameters.presence_penalty.float() * (history.counts > 0)
    return x


def _largest(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest element of each row, and its place: the first of equal ones.

    On CUDA in two steps, as few processors take part in one of few rows.
    """
    batch, vocabulary = x.shape
    if not x.is_cuda or vocabulary % _RUN:
        return x.max(-1)
    of_runs, places = x.reshape(batch, -1, _RUN).max(-1)
    best, run = of_runs.max(-1, keepdim=True)
    return best[:, 0], torch.add(places.gather(1, run), run, alpha=_RUN)[:, 0]


def weights_of(x: Tensor, kind: Kind, parameters: Parameters) -> Tensor:
    """Return what each token is drawn with, int64, 0 for those that filters leave out.

    Args:
        x: (batch, vocabulary), logits less the largest of their row.
        kind: as of `sample`.
        parameters: likewise.
    """
    temperature = torch.where(parameters.temperature > 0, parameters.temperature, 1.0)
    chances = softmax(x / temperature.float())
    weights = (chances.double() * _WHOLE).long()
    if kind.candidates is not None:
        weights = weights * (weights >= _lowest_kept(weights, kind.candidates, parameters))
    return weights


def _lowest_kept(weights: Tensor, candidates: int, parameters: Parameters) -> Tensor:
    """Return below which weight tokens are left out, (batch, 1)."""
    vocabulary = weights.shape[-1]
    if 0 < candidates <= vocabulary:
        lowest, _ = _lowest_of(weights.topk(candidates).values, weights, parameters)
        return lowest
    if not weights.is_cuda and vocabulary > _LIKELY:  # ordering all of them takes far longer
        lowest, is_enough = _lowest_of(weights.topk(_LIKELY).values, weights, parameters)
        if bool(is_enough.all()):
            return lowest
    return _lowest_of(weights.sort(descending=True).values, weights, parameters)[0]


def _lowest_of(first: Tensor, weights: Tensor, parameters: Parameters) -> tuple[Tensor, Tensor]:
    """Return what is asked for, of the largest weights, and whether these were enough for it."""
    some = first.shape[-1]
    top_k = parameters.top_k.long()
    at_k = first.gather(1, (top_k - 1).clamp(0, some - 1)) * (top_k > 0)
    before = first.cumsum(-1) - first
    all_kept = (weights * (weights >= at_k)).sum(-1, keepdim=True)
    limit = parameters.top_p * all_kept.double()
    count = (before.double() < limit).sum(-1, keepdim=True).clamp(min=1)
    at_p = first.gather(1, count - 1)
    at_p = torch.where(parameters.top_p < 1, at_p, 0)
    at_min = (parameters.min_p * first[:, :1].double()).ceil().long()
    is_enough = torch.where(top_k > 0, top_k <= some, (parameters.top_p == 1) | (count < some))
    return torch.maximum(torch.maximum(at_k, at_p), at_min), is_enough


def _drawn(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return for each row the first token up to which weights add up to over its share."""
    batch, vocabulary = weights.shape
    runs = F.pad(weights, (0, -vocabulary % _RUN)).view(batch, -1, _RUN)
    of_runs = runs.sum(-1)
    ends = of_runs.cumsum(-1)
    whole = ends[:, -1:]
    share = torch.minimum((uniforms[:, None] * whole.double()).long(), whole - 1)
    run = torch.searchsorted(ends, share, right=True).clamp(max=ends.shape[1] - 1)
    rest = share - (ends - of_runs).gather(1, run)
    inside = runs.gather(1, run[:, :, None].expand(-1, -1, _RUN))[:, 0].cumsum(-1)
    place = torch.searchsorted(inside, rest, right=True)
    return (run * _RUN + place)[:, 0].clamp(0, vocabulary - 1)  # whatever it is after NaN


def likeliest(x: Tensor, count: int) -> Tensor:
    """Return the tokens of the largest logits, the first of equal ones first: (batch, count)."""
    bits = x.contiguous().view(torch.int32)
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()  # ordered as floats are
    places = torch.arange(x.shape[-1], device=x.device)
    keys = (order << 32) + (2**32 - 1 - places)  # none twice, so that there is one answer
    return 2**32 - 1 - (keys.topk(count).values & (2**32 - 1))

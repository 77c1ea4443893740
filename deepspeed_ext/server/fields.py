"""The fields of a request, and what they are to the engine."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from deepspeed_ext.inference.execution.sampling import SamplingOptions
from deepspeed_ext.server.errors import ApiError, wrong

_OURS = {  # what fields are called that SamplingOptions has under another name
    "max_new_tokens": "max_tokens",
    "stop_tokens": "stop_token_ids",
    "prompt_logprobs": "logprobs",
}
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_PLAIN = ("temperature", "top_p", "min_p", *_PENALTIES)
_COMMON = {
    *("model", "max_tokens", "n", "stop", "seed", "stream", "stream_options", "user", "logprobs"),
    *("top_k", "stop_token_ids", "logit_bias", *_PLAIN),
}
COMPLETION_FIELDS = {*_COMMON, "prompt", "echo"}
CHAT_FIELDS = {*_COMMON, "messages", "max_completion_tokens", "top_logprobs"}


def _is_nothing(value: Any) -> bool:
    return value in (None, "", [], {})


# What is not done: whether a value asks for nothing.
_REFUSED: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("suffix", "tools", "functions", "function_call"), _is_nothing),
    "tool_choice": lambda value: value in (None, "none", "auto"),
    "best_of": lambda value: value is None or (value == 1 and type(value) is int),
    "response_format": lambda value: value in (None, {"type": "text"}),
}


@dataclass(frozen=True)
class Fields:
    """What a request asks for, beside its prompts.

    Args:
        options: of the engine, but for max_new_tokens.
        max_tokens: None for as many as there is room for.
        logprobs: None, or how many of the likeliest tokens are told with each.
        echo: whether the prompt is a part of the answer.
        stream: whether the answer comes in pieces.
        include_usage: whether the last of them counts tokens.
    """

    options: dict[str, Any]
    max_tokens: int | None
    logprobs: int | None
    echo: bool
    stream: bool
    include_usage: bool

    @property
    def n(self) -> int:
        """How many completions of each prompt there are to be."""
        count: int = self.options.get("n", 1)
        return count

    def for_prompt(self, room: int) -> SamplingOptions:
        """Return the options for a prompt behind which there is so much room.

        Raises:
            ApiError: a value is none that may be.
        """
        most = max(room, 0) if self.max_tokens is None else self.max_tokens
        options = self.options | dict(max_new_tokens=most, logprobs=self.logprobs)
        if self.echo and self.logprobs is not None:
            options["prompt_logprobs"] = self.logprobs
            if most == 1:  # the token that evaluation tools count on, whichever it is
                options["stop_tokens"] = ()
        try:
            return SamplingOptions(**options)
        except (TypeError, ValueError) as error:
            raise as_api_error(error) from None


def fields_of(given: dict[str, Any], known: set[str], usual_max: int | None) -> Fields:
    """Return the fields of a request, checked.

    Raises:
        ApiError: a field is unknown, or has what it may not.
    """
    for name, value in given.items():
        if name in _REFUSED:
            if not _REFUSED[name](value):
                raise ApiError(400, f"{name} is not supported, expected null", name)
        elif name not in known:
            raise ApiError(400, f"{name} is no field that is known here", name, "unknown_field")
    found = {name: value for name, value in given.items() if value is not None}
    most = found.get("max_completion_tokens", found.get("max_tokens", usual_max))
    if most is not None and type(most) is not int:
        raise wrong("max_tokens", most, "an integer")
    stream_options = found.get("stream_options", {})
    if not isinstance(stream_options, dict) or set(stream_options) - {"include_usage"}:
        raise wrong("stream_options", stream_options, "an object with include_usage or nothing")
    return Fields(
        _options_of(found),
        most,
        _logprobs_of(found, "messages" in known),
        _flag(found, "echo"),
        _flag(found, "stream"),
        _flag(stream_options, "include_usage"),
    )


def _options_of(found: Mapping[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {"temperature": 1.0, "n": found.get("n", 1)}
    options |= {name: found[name] for name in _PLAIN if name in found}
    if "stop" in found:
        stop = found["stop"]
        options["stop"] = stop if isinstance(stop, list) else [stop]
    if "stop_token_ids" in found:
        options["stop_tokens"] = found["stop_token_ids"]
    if "seed" in found:
        if type(found["seed"]) is not int:
            raise wrong("seed", found["seed"], "an integer")
        options["seed"] = found["seed"] % 2**64  # a negative one is as good as any
    if "top_k" in found:
        options["top_k"] = 0 if found["top_k"] == -1 else found["top_k"]
    if "logit_bias" in found:
        options["logit_bias"] = _bias_of(found["logit_bias"])
    return options


def _bias_of(value: Any) -> dict[int, float]:
    expected = "an object of numbers, by the number of a token"
    if not isinstance(value, dict):
        raise wrong("logit_bias", value, expected)
    for token, bias in value.items():
        if not re.fullmatch(r"\d{1,9}", token, re.ASCII) or type(bias) not in (int, float):
            raise ApiError(400, f"logit_bias has {token!r:.20}, expected {expected}", "logit_bias")
    return {int(token): float(bias) for token, bias in value.items()}


def _logprobs_of(found: Mapping[str, Any], is_chat: bool) -> int | None:
    if not is_chat:
        value = found.get("logprobs")
        if value is not None and type(value) is not int:
            raise wrong("logprobs", value, "an integer")
        return value
    top, wants = found.get("top_logprobs"), _flag(found, "logprobs")
    if top is not None and (type(top) is not int or not wants):
        raise wrong("top_logprobs", top, "an integer, with logprobs true")
    return (top or 0) if wants else None


def _flag(found: Mapping[str, Any], name: str) -> bool:
    value = found.get(name, False)
    if value is not None and type(value) is not bool:
        raise wrong(name, value, "true or false")
    return bool(value)


def as_api_error(error: Exception, param: str | None = None) -> ApiError:
    """Return what a client is told of an error of the engine's that is the client's."""
    text = str(error)
    if at := re.match(r"\w+: (\w+)(?:\[\d+\])? (?:is|has) ", text):
        ours = at.group(1)
        if ours in _OURS or ours in COMPLETION_FIELDS:
            param = _OURS.get(ours, ours)
            text = text.replace(ours, param, 1)
    code = "context_length_exceeded" if "max_tokens of the engine" in text else None
    text = text.replace("max_new_tokens", "max_tokens")
    return ApiError(400, re.sub(r"^\w+: ", "", text), param, code)

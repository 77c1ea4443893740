"""What is asked of each prompt, in our names or in those of transformers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from typing import Any, NamedTuple

from deepspeed_ext.inference.execution.sampling import USUAL_NEW_TOKENS, SamplingOptions

Options = SamplingOptions | Sequence[Any] | Any  # a GenerationConfig of transformers may be one
_NAMES = tuple(field.name for field in fields(SamplingOptions))
_THEIR_TOP_K = 50  # of transformers' generate, where nobody says anything else


class _Unless(NamedTuple):
    """A name of transformers' that is refused, unless its value changes nothing."""

    nothing: tuple[Any, ...]
    instead: str


_BIAS = "logit_bias, which adds -100 to 100 to the logits of some tokens"
_TOKENS = "stop_tokens=() with max_new_tokens, for so many tokens whatever they are"
_BEAMS = "n with temperature and logprobs, and the best of these"
_LOGITS = "none: logits are changed by the options alone"
_TOP = "top_k, top_p or min_p"
_LOGPROBS = "logprobs"
_REFUSED: Mapping[str, _Unless] = {
    **dict.fromkeys(("num_beams", "num_beam_groups"), _Unless((1,), _BEAMS)),
    "diversity_penalty": _Unless((0,), _BEAMS),
    "penalty_alpha": _Unless((0,), "repetition_penalty or frequency_penalty"),
    "dola_layers": _Unless((), _TOP),
    **dict.fromkeys(("bad_words_ids", "suppress_tokens"), _Unless(([],), _BIAS)),
    **dict.fromkeys(("begin_suppress_tokens", "sequence_bias"), _Unless(([], {}), _BIAS)),
    **dict.fromkeys(("force_words_ids", "constraints"), _Unless(([],), _BIAS)),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id"), _Unless((), _BIAS)),
    **dict.fromkeys(("min_length", "min_new_tokens"), _Unless((0,), _TOKENS)),
    "max_time": _Unless((), "stream=True, and close it in time"),
    "typical_p": _Unless((1,), _TOP),
    "top_h": _Unless((), _TOP),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), _Unless((0,), "min_p")),
    "encoder_repetition_penalty": _Unless((1,), "repetition_penalty"),
    "no_repeat_ngram_size": _Unless((0,), "frequency_penalty"),
    "encoder_no_repeat_ngram_size": _Unless((0,), "frequency_penalty"),
    "exponential_decay_length_penalty": _Unless((), "max_new_tokens"),
    "remove_invalid_values": _Unless((False,), "none: logits that are not finite are an error"),
    "token_healing": _Unless((False,), "a prompt that ends with a whole word"),
    "guidance_scale": _Unless((1,), "none: a step computes one row for a completion"),
    "watermarking_config": _Unless((), "none: tokens are drawn from the model's probabilities"),
    "assistant_ensemble_weight": _Unless((), "none: no model helps another one"),
    "cache_implementation": _Unless(
        ("dynamic", "static", "offloaded", "offloaded_static", "hybrid", "sliding_window"),
        "kv_dtype of init_inference",
    ),
    **dict.fromkeys(("output_scores", "output_logits"), _Unless((False,), _LOGPROBS)),
    "return_dict_in_generate": _Unless((False,), "completions, which have tokens and logprobs"),
    **dict.fromkeys(
        ("output_attentions", "output_hidden_states"), _Unless((False,), "the model itself")
    ),
    **dict.fromkeys(("logits_processor", "prefix_allowed_tokens_fn"), _Unless(([],), _LOGITS)),
    "stopping_criteria": _Unless(([],), "stop, stop_tokens, or stream=True and its close"),
    "streamer": _Unless((), "stream=True"),
    "negative_prompt_ids": _Unless((), "none: a step computes one row for a completion"),
    "negative_prompt_attention_mask": _Unless((), "none: there are no negative prompts"),
    "inputs_embeds": _Unless((), "input_ids"),
    "position_ids": _Unless((), "attention_mask: what it counts has places 0, 1, 2 ..."),
    "past_key_values": _Unless((), "the whole prompt"),
    "custom_generate": _Unless((), "the model itself"),
    # Of vLLM and of OpenAI's clients.
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), _Unless((), "max_new_tokens")),
    "stop_token_ids": _Unless((), "stop_tokens"),
    "ignore_eos": _Unless((False,), "stop_tokens=()"),
    "min_tokens": _Unless((0,), _TOKENS),
    "best_of": _Unless((1,), _BEAMS),
    "chat_template_kwargs": _Unless(({},), "template_arguments of chat"),
    **dict.fromkeys(("tools", "documents"), _Unless(([],), "template_arguments of chat")),
    "use_tqdm": _Unless((False,), "progress"),
    "lora_request": _Unless((), "adapter of init_inference"),
    "sampling_params": _Unless((), "SamplingOptions of deepspeed_ext.inference"),
}
# These change no token: how it is computed, or what only beams and encoders read.
_PASSED_OVER = frozenset(
    (
        *("use_cache", "pad_token_id", "bos_token_id", "decoder_start_token_id", "cache_config"),
        *("max_cache_len", "return_legacy_cache", "compile_config", "disable_compile"),
        *("prefill_chunk_size", "continuous_batching_config", "length_penalty", "early_stopping"),
        *("renormalize_logits", "low_memory", "synced_gpus", "is_assistant", "assistant_model"),
        *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_early_exit"),
        *("assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind"),
        *("prompt_lookup_num_tokens", "max_matching_ngram_size", "speculation_type", "use_mtp"),
        *("assistant_tokenizer", "tokenizer", "transformers_version", "trust_remote_code"),
    )
)
_OF_TRANSFORMERS: Mapping[str, str] = {
    "eos_token_id": "stop_tokens",
    "stop_strings": "stop",
    "num_return_sequences": "n",
}


def options_of(
    options: Options | None, changes: Mapping[str, Any], prompts: Sequence[Sequence[int]]
) -> list[SamplingOptions]:
    """Return the options of each prompt, for which it is still open how much room they have.

    Args:
        options: of all, or of each; see `InferenceEngine.generate`.
        changes: of these, by names of ours or of transformers.
        prompts: the tokens of each, behind which max_length counts.
    """
    if options is None:
        wanted = _Wanted(SamplingOptions(), changes, is_theirs=False)
        return [wanted.behind(i, len(tokens)) for i, tokens in enumerate(prompts)]
    several = _several(options)
    each_of = [options] * len(prompts) if several is None else several
    if len(each_of) != len(prompts):
        raise ValueError(f"generate: options have length {len(each_of)}, expected {len(prompts)}")
    made: dict[int, _Wanted] = {}
    found = []
    for i, (each, tokens) in enumerate(zip(each_of, prompts, strict=True)):
        if id(each) not in made:
            made[id(each)] = _wanted_of(each, changes)
        found.append(made[id(each)].behind(i, len(tokens)))
    return found


def with_room(options: SamplingOptions, room: int) -> SamplingOptions:
    """Return options that say how many tokens there may be: what is left, where nobody says.

    Args:
        room: how many have room behind the prompt; of none the engine then says that it is full.
    """
    if options.max_new_tokens is not None:
        return options
    return replace(options, max_new_tokens=max(min(USUAL_NEW_TOKENS, room), 1))


class _Wanted:
    """What was asked for, but for what depends on the length of a prompt.

    Args:
        base: that which changes are of.
        given: changes.
        is_theirs: whether these are of a GenerationConfig: without do_sample it draws nothing.
    """

    def __init__(self, base: SamplingOptions, given: Mapping[str, Any], *, is_theirs: bool) -> None:
        ours = {_OF_TRANSFORMERS.get(name, name): name for name in given}
        for name in given:
            other = ours[_OF_TRANSFORMERS.get(name, name)]
            if other != name and given[name] is not None and given[other] is not None:
                raise TypeError(f"generate: {name} and {other} are given, expected one of them")
        found = {
            _OF_TRANSFORMERS.get(name, name): _plain(name, value)
            for name, value in given.items()
            if _is_ours(name, value)
        }
        counts = found.get("max_new_tokens") is not None  # then max_length does not
        self._most = None if counts else given.get("max_length")
        _draw(found, given.get("do_sample"), is_theirs, base)
        self._options = replace(base, **found)

    def behind(self, number: int, length: int) -> SamplingOptions:
        """Return the options of a prompt of so many tokens."""
        if self._most is None:
            return self._options
        most = replace(SamplingOptions(), max_new_tokens=self._most).max_new_tokens or 0
        if most <= length:
            raise ValueError(
                f"generate: max_length is {most} and prompt {number} has {length} tokens, expected"
                " more than that, or max_new_tokens, which counts new ones alone"
            )
        return replace(self._options, max_new_tokens=most - length)


def _wanted_of(options: Any, changes: Mapping[str, Any]) -> _Wanted:
    if isinstance(options, SamplingOptions):
        return _Wanted(options, changes, is_theirs=False)
    theirs = {name: value for name, value in options.to_dict().items() if value is not None}
    theirs = {name: value for name, value in theirs.items() if not name.startswith("_")}
    ours = {_OF_TRANSFORMERS.get(name, name) for name in changes}
    kept = {n: v for n, v in theirs.items() if _OF_TRANSFORMERS.get(n, n) not in ours}
    if "max_new_tokens" in changes or "max_length" in changes:  # as in transformers
        kept = {n: v for n, v in kept.items() if n not in ("max_new_tokens", "max_length")}
    return _Wanted(SamplingOptions(), kept | dict(changes), is_theirs=True)


def _is_ours(name: str, value: Any) -> bool:
    """Return whether a name says something that has to be translated; what it may not is refused.

    None says nothing but where it is the default of one of our options.
    """
    if name in _NAMES or name in _OF_TRANSFORMERS:
        return value is not None or name in ("seed", "logprobs", "stop_tokens", "max_new_tokens")
    if name in ("do_sample", "max_length") or name in _PASSED_OVER or name.startswith("_"):
        return False
    if name not in _REFUSED:
        near = get_close_matches(name, [*_NAMES, "do_sample", *_OF_TRANSFORMERS], 1)
        expected = near[0] if near else f"one of {', '.join(_NAMES)}"
        raise TypeError(f"generate: option is {name}, expected {expected}")
    rule = _REFUSED[name]
    if value is not None and not any(_is_same(value, nothing) for nothing in rule.nothing):
        raise ValueError(f"generate: {name} is {value!r:.60}, expected {rule.instead}")
    return False


def _is_same(value: Any, nothing: Any) -> bool:
    """Return whether a value is the one that changes nothing; an array is none."""
    if isinstance(nothing, list | dict | str):
        return isinstance(value, type(nothing)) and value == nothing
    return getattr(value, "shape", ()) == () and bool(value == nothing)


def _draw(found: dict[str, Any], do_sample: Any, is_theirs: bool, base: SamplingOptions) -> None:
    """Let options say what transformers means by do_sample: with it, its own defaults count."""
    if do_sample is None and not is_theirs:
        return
    if do_sample not in (True, False, None):
        raise TypeError(f"generate: do_sample is {do_sample!r:.60}, expected True or False")
    if not do_sample:
        found["temperature"] = 0.0
        return
    if found.get("temperature") == 0:
        raise ValueError(
            "generate: temperature is 0 and do_sample is True, expected more than 0, or False"
        )
    if base.temperature == 0:
        found.setdefault("temperature", 1.0)
        found.setdefault("top_k", base.top_k or _THEIR_TOP_K)


def _plain(name: str, value: Any) -> Any:
    """Return a list in the place of a tensor of end tokens, as transformers takes."""
    return value.tolist() if name == "eos_token_id" and hasattr(value, "tolist") else value


def _several(options: Any) -> list[Any] | None:
    """Return options that are given one by one; None for one."""
    if _is_one(options):
        return None
    if isinstance(options, Iterable) and not isinstance(options, Mapping):
        some = list(options)
        if all(map(_is_one, some)):
            return some
    raise TypeError(
        f"generate: options is {options!r:.60}, expected SamplingOptions, or a sequence of them;"
        " one option may be given by its name, as n=2"
    )


def _is_one(options: Any) -> bool:
    kinds = (kind.__name__ for kind in type(options).__mro__)
    to_dict: Callable[[], Any] | None = getattr(options, "to_dict", None)
    is_theirs = callable(to_dict) and "GenerationConfig" in kinds
    return isinstance(options, SamplingOptions) or is_theirs

"""The config of DeepSpeedTransformerLayer."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import inf
from os import PathLike
from pathlib import Path
from typing import Any

from deepspeed_ext.ops._kinds import check_flags, check_kinds, check_reals, check_whole

_NAME = "DeepSpeedTransformerConfig"
_SIZES = ("hidden_size", "heads", "intermediate_size")
_RATES = ("attn_dropout_ratio", "hidden_dropout_ratio")


@dataclass
class DeepSpeedTransformerConfig:
    """What a ``DeepSpeedTransformerLayer`` is made by, with DeepSpeed's names and defaults.

    A value of -1 is one that was not given. The layer refuses it where it needs one.

    Args:
        batch_size: not heeded: the layer takes any.
        hidden_size: the last dimension of what the layer takes.
        intermediate_size: of the feed-forward part; -1, as all below 1, for 4 times hidden_size.
        heads: of the attention, by which hidden_size is divisible.
        attn_dropout_ratio: of probabilities, from 0 to 1.
        hidden_dropout_ratio: of the attention's output and the feed-forward part's.
        num_hidden_layers: of the model, for adjust_init_range.
        initializer_range: the deviation of the weights that the layer starts with.
        layer_norm_eps: added to the variance by norms.
        local_rank: not heeded: the layer is where its parameters are.
        seed: -1: torch's generator draws what is dropped. 0 or more: one of the layer's own, which
            starts with this seed.
        fp16: not heeded: the layer computes in the dtype of its parameters.
        pre_layer_norm: norms come before attention and feed-forward part, not behind the sums.
        normalize_invertible: backward works out what norms were given from what they returned.
        gelu_checkpoint: backward works out the activation's result again.
        adjust_init_range: weights before sums start smaller, by sqrt(2 * num_hidden_layers).
        attn_dropout_checkpoint: changes nothing: probabilities are never kept.
        stochastic_mode: changes nothing: there is no faster kernel that is less exact.
        return_tuple: the layer returns a tuple of one tensor.
        training: False: the layer starts as ``eval()`` would leave it.
    """

    batch_size: int = -1
    hidden_size: int = -1
    intermediate_size: int = -1
    heads: int = -1
    attn_dropout_ratio: float = -1
    hidden_dropout_ratio: float = -1
    num_hidden_layers: int = -1
    initializer_range: float = -1
    layer_norm_eps: float = 1e-12
    local_rank: int = -1
    seed: int = -1
    fp16: bool = False
    pre_layer_norm: bool = True
    normalize_invertible: bool = False
    gelu_checkpoint: bool = False
    adjust_init_range: bool = True
    attn_dropout_checkpoint: bool = False
    stochastic_mode: bool = False
    return_tuple: bool = False
    training: bool = True

    def __post_init__(self) -> None:
        if self.intermediate_size <= 0 < self.hidden_size:
            self.intermediate_size = 4 * self.hidden_size

    @classmethod
    def from_dict(cls, json_object: Mapping[str, Any]) -> "DeepSpeedTransformerConfig":
        """Return the config of a dict.

        Args:
            json_object: arguments by name; `huggingface` is an earlier name of return_tuple. Other
                keys, as configs of models have, become attributes.
        """
        check_kinds(_NAME, json_object=(json_object, Mapping))
        given = dict(json_object)
        if "huggingface" in given:
            given.setdefault("return_tuple", given.pop("huggingface"))
        names = {field.name for field in fields(cls)}
        config = cls(**{name: value for name, value in given.items() if name in names})
        for name, value in given.items():
            if name not in names:
                setattr(config, name, value)
        return config

    @classmethod
    def from_json_file(cls, json_file: str | PathLike[str]) -> "DeepSpeedTransformerConfig":
        """Return the config of a file of JSON, in UTF-8 or UTF-16."""
        return cls.from_dict(json.loads(Path(json_file).read_bytes()))


def check_config(config: DeepSpeedTransformerConfig) -> None:
    """Refuse what no layer can be made of.

    Raises:
        TypeError: a value is of another kind.
        ValueError: one is missing, or out of its range.
    """
    values = vars(config)
    numbers = (*_RATES, "initializer_range", "layer_norm_eps")
    check_whole(_NAME, **{name: values[name] for name in (*_SIZES, "num_hidden_layers", "seed")})
    check_reals(_NAME, **{name: values[name] for name in numbers})
    check_flags(_NAME, **{each.name: values[each.name] for each in fields(config)
                          if isinstance(each.default, bool)})  # fmt: skip

    def expect(is_right: bool, name: str, want: str) -> None:
        if not is_right:
            got = getattr(config, name)
            raise ValueError(f"{_NAME}: {name} is {got!r}, expected {want}")

    for name in _SIZES:
        expect(getattr(config, name) > 0, name, "more than 0")
    whole = config.hidden_size % config.heads == 0
    expect(whole, "hidden_size", f"a multiple of heads, {config.heads}")
    for name in _RATES:
        expect(0 <= getattr(config, name) <= 1, name, "a number from 0 to 1")
    expect(0 <= config.layer_norm_eps < inf, "layer_norm_eps", "0 or more")
    expect(config.seed < 2**63, "seed", "less than 2**63")

"""Configurations, of older files and of new ones: the same model, or a sentence that refuses it."""

import json
import re
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from family_cases import CASES, InDouble, config_of
from older_configs import OLDER

from deepspeed_ext.inference.model.architecture import Architecture, architecture_of
from deepspeed_ext.inference.model.policies import POLICIES, policy_of
from deepspeed_ext.inference.model.policies.gpt_neox import GPT_NEOX
from deepspeed_ext.inference.model.policies.llama import LLAMA
from deepspeed_ext.inference.model.policy import Config, Key, Policy, Windows
from deepspeed_ext.inference.model.positions import Rotation, alibi_slopes

Comparable = dict[str, Any]


def understood(config: Config) -> Comparable:
    """All numbers of a model, comparable."""
    architecture = architecture_of(policy_of(config), config)
    return asdict(replace(architecture, rotations=())) | {"rotations": plain(architecture)}


def plain(architecture: Architecture) -> list[tuple[list[float], float] | None]:
    return [
        None if each is None else (each.frequencies.tolist(), each.scale)
        for each in architecture.rotations
    ]


def as_transformers_reads(config: dict[str, Any]) -> Any:
    """What transformers makes of a config.json."""
    from transformers import AutoConfig

    kind = dict(config).pop("model_type")
    return AutoConfig.for_model(kind, **{k: v for k, v in config.items() if k != "model_type"})


@pytest.mark.parametrize("name", OLDER)
def test_older_files_mean_what_transformers_makes_of_them(name: str) -> None:
    older = OLDER[name]
    newer = as_transformers_reads(json.loads(json.dumps(older)))
    file = json.loads(newer.to_json_string(use_diff=True))
    want = understood(newer.to_dict())
    assert understood(older) == want
    assert understood(file) == want


_BY_TYPE = dict(
    full_attention=dict(rope_type="yarn", factor=8.0, rope_theta=100.0),
    sliding_attention=dict(rope_type="default", rope_theta=10000.0),
)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gpt_neox", dict(rope_theta=100.0, partial_rotary_factor=0.5)),
        ("gpt_neox", dict(rope_theta=100.0, rotary_emb_base=1000.0, rotary_pct=1.0)),
        ("gemma3", dict(rope_parameters=_BY_TYPE, original_max_position_embeddings=64)),
        ("gemma3", dict(_sliding_window_pattern=2)),
    ],
)
def test_of_what_is_said_twice_the_same_counts(name: str, changes: dict[str, Any]) -> None:
    names = ("rotary_", "rope_", "sliding_window_pattern")
    config = {k: v for k, v in OLDER[name].items() if not k.startswith(names)} | changes
    try:
        newer = as_transformers_reads(json.loads(json.dumps(config))).to_dict()
    except KeyError as error:
        pytest.skip(f"this transformers refuses it: {error}")
    newer.pop("original_max_position_embeddings", None)  # it stands where it counts by now
    assert understood(config) == understood(newer)


_SIZES = dict(  # and activation and eps, which no table guesses
    vocab_size=97,
    hidden_size=64,
    num_hidden_layers=7,
    num_attention_heads=4,
    num_key_value_heads=4,
    intermediate_size=96,
    ffn_dim=96,
    max_position_embeddings=64,
    n_positions=64,
    rms_norm_eps=1e-6,
)


@pytest.mark.parametrize("family", sorted(n for p in POLICIES if p.causal for n in p.families))
def test_what_is_not_said_means_what_it_means_to_transformers(family: str) -> None:
    """Files leave out what is usual."""
    sizes: Config = _SIZES
    sizes = dict(text_config=sizes) if family == "gemma3" else sizes
    sizes = {"model_type": family} | sizes
    usual = as_transformers_reads(sizes).to_dict()
    of_llama = ("llama", "mistral", "qwen", "phi", "gpt_neox", "mixtral", "olmoe", "gpt_oss")
    if family.startswith(of_llama):
        sizes |= {"hidden_act": usual["hidden_act"]}
    assert understood(sizes) == understood(usual)


@pytest.mark.parametrize("case", CASES)
def test_files_mean_what_models_say(case: str) -> None:
    config = config_of(case)
    file = json.loads(config.to_json_string(use_diff=True))
    assert understood(file) == understood(config.to_dict())


def test_rotations_are_those_of_transformers() -> None:
    """As far as it computes them in float64, as ours are."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rules: list[dict[str, Any]] = [
        dict(rope_type="linear", factor=3.0),
        dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0),
        dict(rope_type="yarn", factor=4.0),
        dict(rope_type="yarn", factor=4.0, attention_factor=1.25, beta_fast=16.0, beta_slow=2.0),
        dict(rope_type="yarn", factor=40.0, mscale=0.707, mscale_all_dim=1.0, truncate=False),
        dict(rope_type="yarn", factor=40.0, mscale=0.707),
    ]
    for i, rule in enumerate(rules):
        rule |= dict(rope_theta=50000.0, original_max_position_embeddings=64)
        at_top = (
            dict(original_max_position_embeddings=32) if i % 2 else {}
        )  # counts, if it is there
        config = config_of("llama", rope_parameters=dict(rule), head_dim=48, **at_top)
        with InDouble():
            want, scale = ROPE_INIT_FUNCTIONS[rule["rope_type"]](config, "cpu")
        older = dict(rope_scaling=rule, head_dim=48, rope_theta=50000.0) | at_top
        got = rotations_of(OLDER["llama-oldest"] | older)[0]
        assert got is not None and abs(got.scale - scale) < 1e-12, rule
        off = (got.frequencies - want).abs()
        assert want.dtype == torch.float64 and bool((off <= 1e-13).all()), rule


def rotations_of(config: Config) -> tuple[Rotation | None, ...]:
    return architecture_of(policy_of(config), config).rotations


def test_slopes_for_heads_that_are_no_power_of_two() -> None:
    """With 8 heads they end at 2^-8; 12 heads add every second one of 16."""
    assert alibi_slopes(1) == [2**-8]
    assert alibi_slopes(8) == [2**-i for i in range(1, 9)]
    assert alibi_slopes(12) == [2**-i for i in range(1, 9)] + [2 ** -(i / 2) for i in (1, 3, 5, 7)]
    for heads in range(1, 65):
        assert len(alibi_slopes(heads)) == heads


_LLAMA = OLDER["llama-oldest"]
_YARN = dict(rope_type="yarn", factor=2.0)
_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no family": (dict(model_type="mamba"), "model_type is 'mamba', expected one of bert, bloom"),
    "a size that is missing": (
        dict(hidden_size=None),
        "config has no 'hidden_size', expected it for model_type 'llama'",
    ),
    "a size that is none": (dict(vocab_size=-1), "vocab_size is -1, expected 1 to 2^31 - 1"),
    "heads in groups": (
        dict(num_key_value_heads=3),
        "num_attention_heads is 4, expected a multiple of num_key_value_heads, 3",
    ),
    "a wide head": (dict(head_dim=320), "head_dim is 320, expected 1 to 256"),
    "a number that is none": (
        dict(rms_norm_eps="1e-5"),
        "rms_norm_eps is '1e-5', expected a number above",
    ),
    "a number that is beyond all": (
        dict(rms_norm_eps=10**400),
        "rms_norm_eps is 1000",
    ),
    "a number that is not finite": (
        dict(rms_norm_eps=float("nan")),
        "rms_norm_eps is nan, expected a number above 0",
    ),
    "activation": (dict(hidden_act="mish"), "hidden_act is 'mish', expected one of gelu, gelu_new"),
    "rope type": (
        dict(rope_scaling=dict(type="dynamic", factor=2.0)),
        "rope_type is 'dynamic', expected one of default, linear, llama3, yarn",
    ),
    "rope type that is none": (
        dict(rope_scaling=dict(rope_type=["yarn"])),
        "rope_type is ['yarn'], expected one of default, linear, llama3, yarn",
    ),
    "rope option": (
        dict(rope_scaling=_YARN | dict(long_factor=[1.0])),
        "rope_parameters has 'long_factor', expected nothing of this name for rope_type 'yarn'",
    ),
    "rope option that is missing": (
        dict(rope_scaling=dict(type="linear")),
        "rope_parameters has no 'factor', expected it for rope_type 'linear'",
    ),
    "rope that is a word": (
        dict(rope_scaling="linear"),
        "rope_parameters is 'linear', expected names and values",
    ),
    "rope of other layers": (
        dict(rope_scaling=dict(sliding_attention=dict(rope_theta=1e4))),
        "rope_parameters has no 'full_attention', expected it for layers of this type",
    ),
    "rope option that is none": (
        dict(rope_scaling=_YARN | dict(factor="2")),
        "factor is '2', expected a number",
    ),
    "windows of a family that has none": (
        dict(sliding_window=16),
        "sliding_window is 16, expected None: the table of model_type 'llama' has no place for it",
    ),
    "types of layers of a family that has one": (
        dict(layer_types=["full_attention", "sliding_attention", "full_attention"]),
        "layer_types is 'sliding_attention', expected 'full_attention': the table",
    ),
    "something else that changes the result": (
        dict(logit_scale=0.5),
        "logit_scale is 0.5, expected 1: the table of model_type 'llama' has no place for it",
    ),
    "a model of embeddings": (dict(is_causal=False), "is_causal is False, expected True: the"),
    "a part of a head, of a family whose heads turn as a whole": (
        dict(partial_rotary_factor=0.5),
        "partial_rotary_factor is 0.5, expected 1.0: the table of model_type 'llama' has no place",
    ),
    "the same among the parameters of rotation": (
        dict(rope_scaling=dict(rope_type="default", partial_rotary_factor=0.3)),
        "partial_rotary_factor is 0.3, expected 1.0: the table of model_type 'llama' has no place",
    ),
    "two kinds of parameters of rotation that differ": (
        dict(
            rope_scaling=dict(rope_type="linear", factor=2.0),
            rope_parameters=dict(partial_rotary_factor=0.5),
        ),
        "rope_scaling is {'rope_type': 'linear', 'factor': 2.0}, expected what rope_parameters has",
    ),
    "one of several layers": (
        dict(no_rope_layers=[1, 1, 0]),
        "no_rope_layers is 0, expected 1: the table",
    ),
}
_REFUSED_OF_OTHERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "scales by layer": (
        "gpt2",
        dict(scale_attn_by_inverse_layer_idx=True),
        "scale_attn_by_inverse_layer_idx is True, expected False",
    ),
    "norms of heads": ("phi", dict(qk_layernorm=True), "qk_layernorm is True, expected False"),
    "both directions": (
        "gemma2",
        dict(use_bidirectional_attention=True),
        "use_bidirectional_attention is True, expected False",
    ),
    "scores that transformers does not cap, either": (
        "gemma3",
        dict(attn_logit_softcapping=50.0),
        "attn_logit_softcapping is 50.0, expected None",
    ),
    "no last norm": (
        "opt",
        dict(_remove_final_layer_norm=True),
        "_remove_final_layer_norm is True, expected False: the table of model_type 'opt'",
    ),
    "biases that are left out": (
        "bloom",
        dict(slow_but_exact=True, pretraining_tp=2),
        "slow_but_exact is True, expected False: the table of model_type 'bloom'",
    ),
    "a size by two names": (
        "gpt2",
        dict(n_positions=256, max_position_embeddings=128),
        "max_position_embeddings is 128, expected 256, as n_positions says",
    ),
    "a value that stands for nothing": (
        "opt",
        dict(do_layer_norm_before="yes"),
        "do_layer_norm_before is 'yes', expected one of True, False, for model_type 'opt'",
    ),
    "no part": (
        "gemma3-with-images",
        dict(text_config=None),
        "config has no 'text_config', expected it for model_type 'gemma3'",
    ),
    "too few types": (
        "gemma2",
        dict(layer_types=["full_attention"]),
        "layer_types has length 1, expected 3, as many as layers",
    ),
    "types that are not known": (
        "gemma2",
        dict(layer_types=["chunked_attention"] * 3),
        "layer_types is 'chunked_attention', expected one of full_attention, sliding_attention",
    ),
    "types of layers beside windows of all": (
        "mistral",
        dict(sliding_window=16, layer_types=["full_attention"] * 3),
        "layer_types is 'full_attention', expected 'sliding_attention': the table of model_type",
    ),
    "types of layers beside no windows": (
        "mistral-without-windows",
        dict(layer_types=["sliding_attention"] * 3),
        "layer_types is 'sliding_attention', expected 'full_attention': the table of model_type",
    ),
    "more than a head": (
        "phi",
        dict(partial_rotary_factor=7),
        "partial_rotary_factor is 7, expected a number above 0, and 1 at most",
    ),
    "a window that is none": ("mistral", dict(sliding_window=0), "sliding_window is 0, expected 1"),
}


def refuse(config: Config, policy: Policy | None, text: str) -> None:
    with pytest.raises(ValueError, match="^init_inference: " + re.escape(text)):
        architecture_of(policy or policy_of(config), config)


@pytest.mark.parametrize("why", _REFUSED)
def test_refused(why: str) -> None:
    changes, text = _REFUSED[why]
    refuse({k: v for k, v in (_LLAMA | changes).items() if v is not None}, None, text)


@pytest.mark.parametrize("why", _REFUSED_OF_OTHERS)
def test_refused_of_other_families(why: str) -> None:
    name, changes, text = _REFUSED_OF_OTHERS[why]
    refuse(OLDER[name] | changes, None, text)


def test_tables_that_ask_for_what_there_is_not() -> None:
    refuse(_LLAMA, replace(LLAMA, position="sinus"), "position is 'sinus', expected one of rotary")
    refuse(
        _LLAMA, replace(LLAMA, norm_place=Key("rms_norm_eps")), "rms_norm_eps is 1e-06, expected"
    )
    side_by_side = replace(LLAMA, norm_place="both", parallel=True)
    refuse(_LLAMA, side_by_side, "norm_place is 'both', expected 'before' where parallel is True")
    headless = replace(LLAMA, names=replace(LLAMA.names, head=None))
    refuse(_LLAMA, headless, "the table has no name for head, expected one of a decoder")
    padded = replace(LLAMA, position_padding=1)
    refuse(_LLAMA, padded, "the table has position_padding, expected none of a decoder")
    for name in ("token_types", "pooler", "attention_post_norm", "mlp_post_norm"):
        unused = replace(LLAMA, names=replace(LLAMA.names, **{name: "some"}))
        text = (
            f"the table has a name for {name}, expected none of a decoder with norm_place 'before'"
        )
        refuse(_LLAMA, unused, text)
    grouped = OLDER["gpt_neox"] | dict(num_key_value_heads=2)
    refuse(
        grouped,
        GPT_NEOX,
        "num_key_value_heads is 2, expected 4, as many as heads, where queries, keys",
    )


def test_types_beside_windows_of_some_layers() -> None:
    """Each has to be what the table says of its layer."""
    windows = Windows(size=Key("sliding_window"), first=1, by_types=False)
    policy, kinds = replace(LLAMA, windows=windows), ["full_attention"] * 3
    config = _LLAMA | dict(sliding_window=16, layer_types=kinds)
    refuse(config, policy, "layer_types is 'full_attention', expected 'sliding_attention': the")
    kinds[1:] = ["sliding_attention"] * 2
    assert architecture_of(policy, config).windows == (0, 16, 16)
    kinds[0] = "sliding_attention"
    refuse(config, policy, "layer_types is 'sliding_attention', expected 'full_attention': the")


def test_null_is_not_what_is_usual() -> None:
    assert understood(OLDER["mistral-without-windows"])["windows"] == (0, 0, 0)
    older = dict(OLDER["mistral-without-windows"])
    del older["sliding_window"]
    assert understood(older)["windows"] == (4096, 4096, 4096)


def test_what_a_table_reads_is_not_refused() -> None:
    """And what a configuration says in vain is no reason, either."""
    scaled = replace(LLAMA, attention_scale=Key("attention_multiplier", default=None))
    config = _LLAMA | dict(attention_multiplier=0.5)
    assert architecture_of(scaled, config).attention_scale == 0.5
    refuse(config, LLAMA, "attention_multiplier is 0.5, expected None")
    unused = _LLAMA | dict(logit_scale=1.0, layer_types=["full_attention"] * 3, clip_qkv=None)
    assert architecture_of(LLAMA, unused).logit_softcap == 0
    assert understood(_LLAMA | dict(partial_rotary_factor=1)) == understood(_LLAMA)
    types = dict(sliding_window=16, layer_types=["sliding_attention"] * 3)
    assert understood(OLDER["mistral"] | types)["windows"] == (16, 16, 16)
    unused = _LLAMA | dict(sliding_window=4096, use_sliding_window=False)
    assert architecture_of(LLAMA, unused).windows == (0, 0, 0)

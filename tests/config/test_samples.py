"""None of 50 configs is misread, and those of no missing part are hardly ever refused."""

import copy
import re
from collections.abc import Mapping

import pytest
from configs_of_parts import SAMPLES
from pydantic import BaseModel

from deepspeed_ext.config import Config, read
from deepspeed_ext.config.tree import Root
from deepspeed_ext.config.walk import key_of

_ACCEPTED = [name for name, sample in SAMPLES.items() if not sample.refused]
_REFUSED = [name for name, sample in SAMPLES.items() if sample.refused]


def leaves(block, path=""):
    """Yield the path and value of each key of the tree that acts."""
    for name in type(block).model_fields:
        value = getattr(block, name)
        if isinstance(value, BaseModel):
            yield from leaves(value, f"{path}{name}.")
        elif key_of(type(block), name).effect.name == "DOES" and value is not None:
            yield f"{path}{name}", value


def plain(value):
    if isinstance(value, Mapping):
        return dict(value)
    return str(value).removeprefix("torch.") if "torch" in type(value).__module__ else value


def names_in(sentences):
    """Return the key that each sentence begins with."""
    return [re.match(r"config: (\S+) ", sentence)[1] for sentence in sentences]


def test_there_are_fifty():
    assert len(SAMPLES) == 50


@pytest.mark.parametrize("name", _ACCEPTED)
def test_what_acts_is_read_and_all_else_is_as_by_default(name):
    sample = SAMPLES[name]
    before = copy.deepcopy(sample.config)
    config = read(sample.config)
    assert sample.config == before
    empty = {"optimizer.params": {}, "scheduler.params": {}}
    assert {path: plain(value) for path, value in leaves(config)} == {
        **{path: plain(value) for path, value in leaves(Root())},
        **({k: v for k, v in empty.items() if k.replace("params", "type") in sample.acts}),
        **sample.acts,
    }


@pytest.mark.parametrize("name", _ACCEPTED)
def test_each_key_that_changes_nothing_is_named_once(name):
    sample = SAMPLES[name]
    assert sorted(names_in(read(sample.config).warnings)) == sorted(sample.warned)


@pytest.mark.parametrize("name", _REFUSED)
def test_each_key_that_is_refused_is_named_once(name):
    sample = SAMPLES[name]
    before = copy.deepcopy(sample.config)
    with pytest.raises(ValueError) as caught:
        read(sample.config)
    assert sample.config == before
    sentences = str(caught.value).splitlines()
    assert sorted(names_in(sentences)) == sorted(sample.refused)
    assert all(", expected " in sentence for sentence in sentences)


def test_hardly_any_is_refused_without_a_part_that_is_missing():
    mine = [sample for sample in SAMPLES.values() if not sample.is_owned]
    assert sum(bool(sample.refused) for sample in mine) <= len(mine) // 10


@pytest.mark.parametrize("name", _ACCEPTED)
def test_the_dict_of_a_config_reads_as_the_same(name):
    config = read(SAMPLES[name].config)
    given = config.as_dict()
    assert given.keys() == SAMPLES[name].config.keys()
    again = read(given)
    assert isinstance(again, Config) and again == config and again.as_dict() == given

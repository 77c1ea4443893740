"""train = micro x steps x processes, whatever is given of it."""

import itertools
import re

import pytest

from deepspeed_ext.config import BatchSizes, read

_TRAIN = "train_batch_size"
_MICRO = "train_micro_batch_size_per_gpu"
_STEPS = "gradient_accumulation_steps"


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
def test_two_give_the_third(processes):
    for micro, steps in itertools.product((1, 2, 5), (1, 3, 4)):
        sizes = BatchSizes(micro * steps * processes, micro, steps)
        whole = dict(zip((_TRAIN, _MICRO, _STEPS), sizes, strict=True))
        assert read(whole).batch_sizes(processes) == sizes
        for name in whole:
            two = {key: value for key, value in whole.items() if key != name}
            assert read(two).batch_sizes(processes) == sizes


def test_one_alone_means_one_micro_step():
    assert read({_TRAIN: 8}).batch_sizes(4) == (8, 2, 1)
    assert read({_MICRO: 8}).batch_sizes(4) == (32, 8, 1)


@pytest.mark.parametrize(
    ("given", "processes", "sentence"),
    [
        ({}, 1, f"{_TRAIN} is not given, expected {_TRAIN} or {_MICRO}"),
        ({_STEPS: 2}, 1, f"{_TRAIN} is not given, expected {_TRAIN} or {_MICRO}"),
        (
            {_TRAIN: 10, _MICRO: 4},
            2,
            f"{_TRAIN} is 10, expected a multiple of {_MICRO} (4) x processes (2) = 8",
        ),
        (
            {_TRAIN: 10, _STEPS: 3},
            1,
            f"{_TRAIN} is 10, expected a multiple of {_STEPS} (3) x processes (1) = 3",
        ),
        (
            {_TRAIN: 3},
            2,
            f"{_TRAIN} is 3, expected a multiple of {_STEPS} (1) x processes (2) = 2",
        ),
        (
            {_TRAIN: 4, _MICRO: 8},
            1,
            f"{_TRAIN} is 4, expected a multiple of {_MICRO} (8) x processes (1) = 8",
        ),
        (
            {_TRAIN: 16, _MICRO: 2, _STEPS: 2},
            2,
            f"{_TRAIN} is 16, expected {_MICRO} (2) x {_STEPS} (2) x processes (2) = 8; leave out"
            " one of the three",
        ),
        ({_TRAIN: 1}, 0, "processes is 0, expected 1 or more"),
    ],
)
def test_what_does_not_fit_together_is_named(given, processes, sentence):
    config = read(given)
    with pytest.raises(ValueError, match=f"^{re.escape(f'config: {sentence}')}$"):
        config.batch_sizes(processes)

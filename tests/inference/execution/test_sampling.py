"""How a token is sampled: against plain float64, against transformers, and in any batch."""

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed_ext.inference.execution.sampling import (
    History,
    Kind,
    Parameters,
    SamplingOptions,
    key_of,
    sample,
    uniform,
    weights_of,
)

_NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
ON_BOTH = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=_NEEDS_GPU)])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
FILTERS: tuple[dict[str, Any], ...] = (
    {},
    dict(top_k=1),
    dict(top_k=5),
    dict(top_k=5000),
    dict(top_p=0.05),
    dict(top_p=0.9),
    dict(top_p=0.999),
    dict(min_p=0.1),
    dict(top_k=20, top_p=0.7),
    dict(top_k=100, top_p=0.9, min_p=0.05),
    dict(temperature=0.3, top_p=0.9),
    dict(temperature=5.0, top_k=40),
    dict(repetition_penalty=1.3, top_p=0.9),
    dict(repetition_penalty=0.7, top_k=7),
)


def logits_of(rows: int, vocabulary: int, device: str = "cpu", seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocabulary, generator=generator) * 4).to(device)


def parameters_of(options: list[SamplingOptions], device: str = "cpu") -> Parameters:
    rows = torch.tensor([Parameters.row(each) for each in options], dtype=torch.float64)
    return Parameters(*rows.to(device).split(1, -1))


def kind_of(options: list[SamplingOptions]) -> Kind:
    kind = Kind()
    for each in options:
        kind |= each.kind
    return kind


def weights_ref(logits: Tensor, seen: Tensor, options: SamplingOptions) -> Tensor:
    """The probabilities of one row in float64, 0 for what is left out, token by token."""
    values = logits.double().tolist()
    penalty = options.repetition_penalty
    for i in seen.nonzero().flatten().tolist():
        values[i] = values[i] * penalty if values[i] < 0 else values[i] / penalty
    top = max(values)
    chances = [math.exp((value - top) / options.temperature) for value in values]
    if options.top_k:
        kth = sorted(chances, reverse=True)[min(options.top_k, len(chances)) - 1]
        chances = [chance if chance >= kth else 0.0 for chance in chances]
    whole, before, last = math.fsum(chances), 0.0, 0.0
    if options.top_p < 1:
        for chance in sorted(chances, reverse=True):
            if before >= options.top_p * whole:
                break
            before, last = before + chance, chance
        chances = [chance if chance >= last else 0.0 for chance in chances]
    least = options.min_p * max(chances)
    chances = [chance if chance >= least else 0.0 for chance in chances]
    whole = math.fsum(chances)
    return torch.tensor([chance / whole for chance in chances])


@ON_BOTH
@pytest.mark.parametrize("vocabulary", [97, 3000])
@pytest.mark.parametrize("changes", FILTERS, ids=str)
def test_weights_are_those_of_float64(
    changes: dict[str, Any], vocabulary: int, device: str
) -> None:
    """Probabilities in float32 err by some 2^-20, relatively, and weights by 2^-40 more."""
    options = SamplingOptions(**dict(temperature=1.0) | changes)
    logits = logits_of(4, vocabulary, device)
    seen = torch.arange(vocabulary, device=device).expand(4, -1) % 7 == 0
    penalty = options.repetition_penalty
    x = torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
    x = x - x.amax(-1, keepdim=True)
    weights = weights_of(x, options.kind, parameters_of([options] * 4, device)).double().cpu()
    got = weights / weights.sum(-1, keepdim=True)
    for row in range(4):
        expected = weights_ref(logits[row].cpu(), seen[row].cpu(), options)
        assert ((got[row] - expected).abs() <= expected * 2**-18 + 2**-38).all()
        sure = expected > 2**-36
        assert torch.equal(got[row][sure] > 0, expected[sure] > 0)
        assert (got[row][expected == 0] == 0).all()


@ON_BOTH
def test_top_p_keeps_more_than_the_tokens_that_are_ordered_first(device: str) -> None:
    """Of logits that are nearly flat most tokens are kept, beside a row that ends early."""
    options = [SamplingOptions(temperature=1.0, top_p=p) for p in (0.95, 0.5, 0.95)]
    logits = logits_of(3, 3000, device) * torch.tensor([[0.01], [1.0], [0.05]], device=device)
    x = logits - logits.amax(-1, keepdim=True)
    weights = weights_of(x, kind_of(options), parameters_of(options, device)).cpu()
    for row in (0, 2):
        kept = weights_ref(logits[row].cpu(), torch.zeros(3000, dtype=torch.bool), options[row]) > 0
        assert kept.sum() > 2000 and abs(int((weights[row] > 0).sum() - kept.sum())) <= 1


@ON_BOTH
def test_a_token_at_the_very_share_of_top_p_is_left_out(device: str) -> None:
    """Those that are likelier have just that share: half of all, exactly."""
    x = torch.tensor([[0.0, -math.log(2), -math.log(2), -math.inf]], device=device)
    options = SamplingOptions(temperature=1.0, top_p=0.5)
    weights = weights_of(x, options.kind, parameters_of([options], device))
    assert weights.tolist() == [[2**39, 0, 0, 0]]


@pytest.mark.parametrize("changes", FILTERS[1:12], ids=str)
def test_what_is_left_out_is_what_transformers_leaves_out(changes: dict[str, Any]) -> None:
    from transformers.generation import logits_process as theirs

    options = SamplingOptions(**dict(temperature=1.0) | changes)
    logits = logits_of(8, 2000, seed=1)
    wanted = theirs.TemperatureLogitsWarper(options.temperature)(None, logits.clone())
    if options.top_k:
        wanted = theirs.TopKLogitsWarper(min(options.top_k, 2000))(None, wanted)
    if options.top_p < 1:
        wanted = theirs.TopPLogitsWarper(options.top_p)(None, wanted)
    if options.min_p:
        wanted = theirs.MinPLogitsWarper(options.min_p)(None, wanted)
    chances = wanted.double().softmax(-1)
    x = logits - logits.amax(-1, keepdim=True)
    weights = weights_of(x, options.kind, parameters_of([options] * 8))
    sure = (chances == 0) | (chances > 2**-36)
    assert torch.equal((weights > 0)[sure], (chances > 0)[sure])


def test_a_penalty_is_that_of_transformers() -> None:
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    logits, ids = logits_of(1, 97), torch.tensor([[3, 5, 5, 90]])
    options = SamplingOptions(repetition_penalty=3.0)
    wanted = RepetitionPenaltyLogitsProcessor(3.0)(ids, logits.clone())
    seen = torch.zeros(1, 97, dtype=torch.bool)
    seen[0, ids[0]] = True
    for token in wanted[0].argsort(descending=True)[:20].tolist():
        row = sample(logits, options.kind, parameters_of([options]), None, History(seen))
        assert row[0].tolist() == [token, wanted[0, token].item()]
        logits[0, token] = wanted[0, token] = -100.0


@ON_BOTH
@DTYPES
def test_sampling_is_batch_invariant(device: str, dtype: torch.dtype) -> None:
    """With its own kind of work, and with that which all rows take together."""
    draw = random.Random(0)
    options = [
        SamplingOptions(
            temperature=draw.choice([0.0, 0.5, 1.0, 1.0, 2.0]),
            logprobs=draw.choice([None, 0, 3]),
            **{k: v for k, v in draw.choice(FILTERS).items() if k != "temperature"},
        )
        for _ in range(64)
    ]
    logits = logits_of(64, 1500, device).to(dtype)
    chances = torch.rand(64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    chances = chances.to(device)
    seen = logits_of(64, 1500, device, seed=2) > 0
    for count in (64, 33, 7, 2):
        rows = torch.randperm(64, generator=torch.Generator().manual_seed(count))[:count]
        some = [options[i] for i in rows.tolist()]
        at = rows.to(device)
        together = sample(
            logits[at], kind_of(some), parameters_of(some, device), chances[at], History(seen[at])
        )
        for i, row in enumerate(rows.tolist()):
            one = parameters_of([options[row]], device)
            here = slice(row, row + 1)
            alone = sample(
                logits[here], options[row].kind, one, chances[here], History(seen[here])
            )[0]
            both = min(len(alone), together.shape[1], 4)
            assert torch.equal(alone[:both], together[i, :both]), options[row]
            if options[row].logprobs:
                assert torch.equal(alone, together[i])


@ON_BOTH
@pytest.mark.parametrize("vocabulary", [1, 97, 256, 1000])
def test_every_token_is_drawn_from_its_part_of_the_whole(device: str, vocabulary: int) -> None:
    options = SamplingOptions(temperature=1.0)
    logits = logits_of(1, vocabulary, device)
    chances = logits[0].double().softmax(-1).cpu()
    ends = chances.cumsum(-1)
    sure = (chances > 1e-5).nonzero().flatten()
    middles = (ends - chances / 2)[sure].to(device)
    rows = sample(
        logits.expand(len(sure), -1),
        options.kind,
        parameters_of([options] * len(sure), device),
        middles,
    )
    assert torch.equal(rows[:, 0].cpu().long(), sure)
    for end in (0.0, 1 - 2**-53):
        some = torch.tensor([end], dtype=torch.float64, device=device)
        token = int(sample(logits, options.kind, parameters_of([options], device), some)[0, 0])
        assert chances[token] > 2**-40


def test_draws_of_equal_sums_differ() -> None:
    """Of seed 1 and sample 1, and seed 2 and sample 0, say: no number comes twice."""
    some = range(9)
    found = {uniform(key_of(seed, sample), i) for seed in some for sample in some for i in some}
    assert len(found) == 9**3


@pytest.mark.parametrize("by", ["index", "seed", "sample"])
def test_draws_are_as_likely_as_they_should_be(by: str) -> None:
    """By chi square with a false alarm in a million; the numbers are the same in each run."""
    count, vocabulary = 20000, 97
    keys = {
        "index": [(key_of(1, 0), i) for i in range(count)],
        "seed": [(key_of(i, 0), 0) for i in range(count)],
        "sample": [(key_of(1, i), 7) for i in range(count)],
    }[by]
    chances = torch.tensor([uniform(*key) for key in keys], dtype=torch.float64)
    assert chances.min() >= 0 and chances.max() < 1
    options = SamplingOptions(temperature=1.0, min_p=0.001)
    logits = logits_of(1, vocabulary) / 2
    expected = weights_ref(logits[0], torch.zeros(vocabulary), options).double() * count
    tokens = torch.cat(
        [
            sample(
                logits.expand(len(part), -1),
                options.kind,
                parameters_of([options] * len(part)),
                part,
            )[:, 0].long()
            for part in chances.split(2000)
        ]
    )
    found = torch.bincount(tokens, minlength=vocabulary).double()
    assert (found[expected == 0] == 0).all()
    some = expected >= 5
    square = ((found - expected)[some] ** 2 / expected[some]).sum()
    square += (found[~some].sum() - expected[~some].sum()) ** 2 / max(expected[~some].sum(), 1)
    freedom = int(some.sum())
    high = freedom * (1 - 2 / (9 * freedom) + 4.7534 * math.sqrt(2 / (9 * freedom))) ** 3
    assert square < high  # Wilson and Hilferty's approximation


def test_numbers_are_those_of_the_generator_that_is_named() -> None:
    """The first words of SplitMix64 from 0, of which 53 bits are taken."""
    words = 0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F
    assert [uniform(0, i) for i in range(3)] == [(word >> 11) * 2.0**-53 for word in words]


@ON_BOTH
def test_the_likeliest_is_the_first_of_equal_ones(device: str) -> None:
    logits = torch.zeros(3, 300, device=device)
    logits[0, [7, 200]] = 1.0
    logits[1, 299] = 1.0
    options = SamplingOptions(logprobs=3)
    rows = sample(logits, options.kind)
    assert rows[:, 0].tolist() == [7, 299, 0]
    assert rows[0, 4:7].tolist() == [7, 200, 0] and rows[1, 4:7].tolist() == [299, 0, 1]
    mixed = torch.tensor([[-1.0, 0.0, -0.0, -2.0, -math.inf]], device=device)
    assert sample(mixed, options.kind)[0, 4:9].tolist() == [1, 2, 0, 3, 4]


@ON_BOTH
@DTYPES
def test_log_probabilities_are_those_of_the_model(device: str, dtype: torch.dtype) -> None:
    logits = logits_of(8, 1000, device).to(dtype)
    options = SamplingOptions(temperature=3.0, top_k=400, logprobs=5)
    chances = torch.rand(8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows = sample(logits, options.kind, parameters_of([options] * 8, device), chances.to(device))
    expected = logits.double().log_softmax(-1).cpu()
    whole = rows[:, 3].log().cpu()
    got = rows[:, 2].cpu() + whole
    wanted = expected.gather(1, rows[:, :1].cpu().long())[:, 0]
    assert ((got - wanted).abs() <= 2**-20 + wanted.abs() * 2**-22).all()
    tokens, values = rows[:, 4:24].cpu(), rows[:, 24:].cpu() + whole[:, None]
    wanted = expected.gather(1, tokens.long())
    assert ((values - wanted).abs() <= 2**-20 + wanted.abs() * 2**-22).all()
    assert torch.equal(wanted, expected.topk(20).values)


@ON_BOTH
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_no_token_is_made_of_logits_that_are_not_finite(wrong: float, device: str) -> None:
    """The largest one tells; other rows are as they are alone, whatever the options."""
    logits = logits_of(3, 97, device)
    logits[1] = wrong
    options = [SamplingOptions(temperature=t, top_p=0.9, logprobs=1) for t in (1.0, 1.0, 0.0)]
    chances = torch.full((3,), 0.5, dtype=torch.float64, device=device)
    rows = sample(logits, kind_of(options), parameters_of(options, device), chances)
    assert rows[:, 1].isfinite().tolist() == [True, False, True]
    assert 0 <= rows[1, 0] < 97
    logits[1] = 0
    other = sample(logits, kind_of(options), parameters_of(options, device), chances)
    assert torch.equal(rows[[0, 2]], other[[0, 2]])
    logits[1, :96] = -math.inf  # as masks are made
    assert sample(logits, Kind())[1].tolist() == [96, 0]


def test_extreme_numbers_have_a_meaning() -> None:
    logits = logits_of(1, 97)
    half = torch.tensor([0.5], dtype=torch.float64)
    cold = SamplingOptions(temperature=1e-300)
    row = sample(logits, cold.kind, parameters_of([cold]), half)
    assert row[0, 0] == logits.argmax()
    for temperature in (1e30, 1e300):
        hot = SamplingOptions(temperature=temperature, repetition_penalty=temperature)
        seen = logits == logits.min()
        rows = sample(logits, hot.kind, parameters_of([hot]), half, History(seen))
        assert 47 <= rows[0, 0] <= 49  # the middle of all, as the others are as likely


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("max_new_tokens", -1, "is -1, expected 0 to 2147483647"),
        ("temperature", -0.5, "is -0.5, expected 0 or more"),
        ("temperature", math.nan, "is nan, expected 0 or more"),
        ("temperature", math.inf, "is inf, expected 0 or more"),
        pytest.param("temperature", 2**1024, f"is {2**1024}, expected 0 or more", id="not a float"),
        ("top_k", -1, "is -1, expected 0 to 2147483647"),
        ("top_p", 0.0, "is 0.0, expected over 0, and 1 at most"),
        ("min_p", 1.5, "is 1.5, expected 0 to 1"),
        ("repetition_penalty", 0, "is 0, expected more than 0"),
        ("stop", "", "has '', expected strings, none empty"),
        ("stop", ("a", None), "has None, expected strings, none empty"),
        ("stop", True, "has True, expected strings, none empty"),
        ("stop", [["a"]], "has ['a'], expected strings, none empty"),
        ("stop_tokens", (-1,), "is -1, expected 0 to 2147483647"),
        ("seed", -1, "is -1, expected 0 to 18446744073709551615"),
        ("n", 0, "is 0, expected 1 to 2147483647"),
        ("logprobs", 21, "is 21, expected 0 to 20"),
    ],
)
def test_a_number_that_cannot_be_is_refused(name: str, value: Any, text: str) -> None:
    with pytest.raises(ValueError) as error:
        SamplingOptions(**{name: value})
    assert str(error.value) == f"generate: {name} {text}"


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("top_k", 1.5, "is 1.5, expected an int"),
        ("top_p", "1", "is '1', expected a float"),
        ("stop", None, "is None, expected strings"),
        ("stop", torch.tensor(5), "is tensor(5), expected strings"),
        ("stop", b"ab", "is b'ab', expected strings"),
        ("stop", {"ab": 1}, "is {'ab': 1}, expected strings"),
        ("stop_tokens", 2.5, "is 2.5, expected ints or None"),
        ("stop_tokens", torch.tensor([5]), "is tensor([5]), expected ints or None"),
        ("stop_tokens", b"ab", "is b'ab', expected ints or None"),
        ("stop_tokens", {5: "ab"}, "is {5: 'ab'}, expected ints or None"),
        ("stop_tokens", [True], "is True, expected an int"),
        ("stop_tokens", [None], "is None, expected an int"),
        ("stop_tokens", [[5]], "is [5], expected an int"),
    ],
)
def test_another_kind_of_value_is_refused(name: str, value: Any, text: str) -> None:
    with pytest.raises(TypeError) as error:
        SamplingOptions(**{name: value})
    assert str(error.value) == f"generate: {name} {text}"

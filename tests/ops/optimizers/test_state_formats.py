"""Compact optimizer state: codes, stochastic rounding and split floats, alone and in Adam steps."""

import itertools
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import warm_python
from format_cases import (
    BF16,
    F16,
    F32,
    NUMBERS,
    STATES,
    Arguments,
    buffers,
    coded,
    digest,
    everything,
    halved,
    noise_for,
    plain,
    random_bits,
    rounded,
    to,
    written,
)
from torch import Tensor

from deepspeed_ext.ops import adam_step_
from deepspeed_ext.ops.optimizers.state_formats import (
    BLOCK,
    blocks_of,
    decode_blocks,
    encode_blocks,
    in_memory_order,
    join_float32,
    split_float32,
)

SIGNED = {"exp_avgs": True, "exp_avg_sqs": False, "max_exp_avg_sqs": False}


def spread(n: int, signed: bool) -> Tensor:
    """Values over 20 decades, some zero."""
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(n, generator=generator) * 10 ** (
        20 * torch.rand(n, generator=generator) - 15
    )
    values[::17] = 0
    return values if signed else values.abs()


def bound(values: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """How far a code may be off: one step."""
    each = scales.double().repeat_interleave(BLOCK)[: values.numel()]
    return (values.double().abs() + each * (2.0**-7 if signed else 2.0**-15)) / 16


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_within_half_a_step(signed: bool) -> None:
    values = spread(10_001, signed)
    codes, scales = encode_blocks(values, signed=signed)
    assert codes.dtype == torch.uint8 and scales.shape == (blocks_of(10_001),)
    decoded = decode_blocks(codes, scales, signed=signed)
    # the least code of an unsigned value is a whole step up
    steps = torch.where(decoded <= scales.repeat_interleave(BLOCK)[:10_001] * 2.0**-19, 1.0, 0.51)
    error = (decoded.double() - values).abs()
    assert (error <= bound(values, scales, signed) * (0.51 if signed else steps)).all()
    assert codes.unique().numel() > 200
    again = decode_blocks(*encode_blocks(decoded, signed=signed, were_coded=True), signed=signed)
    assert torch.equal(again, decoded)


@pytest.mark.parametrize("signed", [True, False])
def test_any_codes_stay_as_they_are(signed: bool) -> None:
    """A step rounds up or down at random: no block may change by being decoded and encoded."""
    generator = torch.Generator().manual_seed(4)
    values = spread(400 * BLOCK, signed)
    codes, scales = encode_blocks(values, signed=signed)
    nudged = (codes.int() + torch.randint(-1, 2, codes.shape, generator=generator)).clamp(1, 255)
    nudged = torch.where(torch.isin(codes.int() & 0x7F, torch.tensor([0, 1, 0x7F])), codes, nudged)
    decoded = decode_blocks(nudged.to(torch.uint8), scales, signed=signed)
    again = decode_blocks(*encode_blocks(decoded, signed=signed, were_coded=True), signed=signed)
    assert torch.equal(again, decoded)


@pytest.mark.parametrize("signed", (True, False))
def test_codes_of_a_block_that_is_not_full_stay_as_they_are(signed: bool) -> None:
    """The scale may be one that no rounding to the nearest would choose."""
    codes = torch.tensor([64, 100, 127 if signed else 255], dtype=torch.uint8)
    for scale in (2.0**-23, 1.0, 2.0**20):
        decoded = decode_blocks(codes, torch.tensor([scale]), signed=signed)
        again = encode_blocks(decoded, signed=signed, were_coded=True)
        assert torch.equal(decode_blocks(*again, signed=signed), decoded)


@pytest.mark.parametrize("signed", [True, False])
def test_codes_of_special_blocks(signed: bool) -> None:
    values = torch.ones(6 * BLOCK)
    values[:BLOCK] = 0
    values[BLOCK] = float("inf")
    values[2 * BLOCK] = float("nan")
    values[3 * BLOCK : 4 * BLOCK] = 1e-40  # subnormal
    values[4 * BLOCK] = 2.0**125
    decoded = decode_blocks(*encode_blocks(values, signed=signed), signed=signed).view(6, BLOCK)
    assert torch.equal(decoded[0], torch.zeros(BLOCK))
    assert decoded[1].isnan().all() and decoded[2].isnan().all() and decoded[4].isnan().all()
    assert ((decoded[3] / 1e-40 - 1).abs() < 0.05).all()
    assert ((decoded[5] - 1).abs() <= 1 / 32).all()


def test_codes_keep_shape_and_layout() -> None:
    values = spread(6000, True).view(60, 100).t()
    codes, scales = encode_blocks(values, signed=True)
    assert codes.shape == values.shape and codes.stride() == values.stride()
    flat, flat_scales = encode_blocks(values.t().flatten(), signed=True)
    assert torch.equal(in_memory_order(codes), flat) and torch.equal(scales, flat_scales)
    assert encode_blocks(torch.zeros(0), signed=True)[1].shape == (0,)


def test_split_floats_are_restored_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=generator)
    ties = (torch.arange(0x10000) << 16 | 0x8000).to(torch.int32)
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 3.4028235e38, 1e-45])
    values = torch.cat([bits.to(torch.int32).view(F32), ties.view(F32), special])
    upper, lower = split_float32(values)
    assert upper.dtype == BF16 and lower.dtype == torch.int16
    restored = join_float32(upper, lower)
    number = ~values.isnan()
    assert torch.equal(restored.view(torch.int32)[number], values.view(torch.int32)[number])
    assert upper[~number].isnan().all() and restored[~number].isnan().all()
    nearest = values.to(BF16)
    is_tie = (values.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(upper[number & ~is_tie], nearest[number & ~is_tie])


def test_a_zero_written_over_a_split_float_is_zero(device: str) -> None:
    masters = [torch.linspace(-1, 1, 400)]
    arguments = to(device, halved(plain([400], BF16, BF16) | dict(max_exp_avg_sqs=[]), masters))
    assert (arguments["master_params"][0] < 0).any()
    zeros = torch.zeros(400, device=device)
    zeros[::2] = -0.0
    arguments["params"][0].copy_(zeros)
    joined = join_float32(arguments["params"][0], arguments["master_params"][0])
    assert joined.isfinite().all() and joined.abs().max() < 1e-38
    arguments["grads"][0].zero_()
    arguments["exp_avgs"][0].zero_()
    adam_step_(**arguments, **NUMBERS)
    assert arguments["params"][0].abs().max() < 1e-38


@pytest.mark.parametrize("bad", [torch.arange(8.0)[::2], torch.ones(1).expand(4)])
def test_formats_refuse_gaps_and_other_dtypes(bad: Tensor) -> None:
    with pytest.raises(ValueError, match="expected a dense layout, without gaps or overlaps"):
        encode_blocks(bad, signed=True)
    with pytest.raises(ValueError, match=r"values is torch\.float64, expected float32"):
        split_float32(bad.double())


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("noisy", [False, True])
def test_codes_are_those_of_the_step_in_float32(amsgrad: bool, noisy: bool, device: str) -> None:
    """The step computes in float32 what it would with float32 state, then rounds to codes."""
    exact = plain(grad=BF16)
    if not amsgrad:
        exact["max_exp_avg_sqs"] = []
    got = to(device, coded(exact))
    for name in STATES:
        exact[name] = [
            decode_blocks(got[name][i].cpu(), got["scales"][at].cpu(), signed=SIGNED[name])
            for i, at in enumerate(range(*places(name, len(exact["params"]))))
            if got[name]
        ]
    noise = noise_for(exact) if noisy else None
    adam_step_(**got, **NUMBERS, noise=noise)
    adam_step_(**exact, **NUMBERS)
    for i, param in enumerate(exact["params"]):
        assert torch.equal(got["params"][i].cpu(), param), i
        for j, name in enumerate(STATES[: 3 if amsgrad else 2]):
            codes, scales = encode_with(exact, noise, name, i, j)
            at = places(name, len(exact["params"]))[0] + i
            assert torch.equal(got["scales"][at].cpu(), scales), (name, i)
            assert torch.equal(got[name][i].cpu(), codes), (name, i)


def places(name: str, n: int) -> tuple[int, int]:
    """Where the scales of a state argument are in their list."""
    j = STATES.index(name)
    return j * n, (j + 1) * n


def encode_with(
    exact: Arguments, noise: Tensor | None, name: str, i: int, j: int
) -> tuple[Tensor, Tensor]:
    """The codes of a float32 state tensor, with the random bits that the step is to use."""
    values = exact[name][i]
    codes, scales = encode_blocks(values, signed=SIGNED[name])
    if noise is None:
        return codes, scales
    key, first = noise[i].tolist()
    random = random_bits(key, exact["steps"][i].item(), first, values.numel())
    part = (random & 0xFFFF if j % 2 == 0 else random >> 16) << 3
    flat = in_memory_order(values)
    each = scales.repeat_interleave(BLOCK)[: flat.numel()]
    inverse = ((254 << 23) - each.view(torch.int32)).view(F32)
    if SIGNED[name]:
        floor = torch.full_like(flat, 2.0**-7).copysign(flat)
        sums = ((flat * inverse + floor).view(torch.int32).long() & 0xFFFFFFFF) + part
        expected = (sums >> 19 & 0x7F) | (sums >> 24 & 0x80)
    else:
        sums = (flat * inverse + 2.0**-15).view(torch.int32).long() + part
        expected = (sums >> 19).clamp(min=(0x38000000 >> 19) + 1) & 0xFF
    in_memory_order(codes).copy_(expected)
    return codes, scales


@pytest.mark.parametrize("param", [F32, BF16, F16])
def test_bfloat16_state_is_rounded_with_the_bits_of_the_hash(
    param: torch.dtype, device: str
) -> None:
    exact = plain(param=param, grad=F16) | dict(max_exp_avg_sqs=[])
    low = {name: [t.to(BF16) for t in exact[name]] for name in STATES}
    got = to(device, exact | low)
    exact |= {name: [t.float() for t in low[name]] for name in STATES}
    noise = noise_for(exact)
    adam_step_(**got, **NUMBERS, noise=noise)
    adam_step_(**exact, **NUMBERS)
    for i, step in enumerate(exact["steps"]):
        key, first = noise[i].tolist()
        random = random_bits(key, step.item(), first, exact["params"][i].numel())
        assert torch.equal(got["params"][i].cpu(), exact["params"][i])
        for j, name in enumerate(("exp_avgs", "exp_avg_sqs")):
            expected = rounded(in_memory_order(exact[name][i]), random, j)
            assert torch.equal(in_memory_order(got[name][i]).cpu(), expected), (name, i)


@pytest.mark.parametrize("form", ["bfloat16", "codes"])
def test_rounding_is_right_on_average(form: str, device: str) -> None:
    """Of many steps with different keys the mean is the exact value: no drift in long runs."""
    exact = plain([512], grad=BF16) | dict(max_exp_avg_sqs=[])
    keys = 4000
    start = (
        coded(exact)
        if form == "codes"
        else exact | {name: [t.to(BF16) for t in exact[name]] for name in STATES}
    )
    many = {name: [t for t in value for _ in range(keys)] for name, value in start.items()}
    many = to(device, many)
    noise = torch.tensor([[123_457 * i, 0] for i in range(keys)])
    signed = {"exp_avgs": True, "exp_avg_sqs": False}
    for j, name in enumerate(signed):
        if form == "codes":
            exact[name] = [decode_blocks(start[name][0], start["scales"][j], signed=signed[name])]
        else:
            exact[name] = [start[name][0].float()]
    adam_step_(**many, **NUMBERS, noise=noise)
    adam_step_(**exact, **NUMBERS)
    for j, name in enumerate(signed):
        got = torch.stack(many[name]).cpu()
        scales = many["scales"][j * keys].cpu() if form == "codes" else torch.zeros(2)
        if form == "codes":
            rows = [decode_blocks(row, scales, signed=signed[name]) for row in got]
            got = torch.stack(rows)
        want = exact[name][0].double()
        step = bound(want, scales, signed[name]) if form == "codes" else want.abs() / 128
        off = (got.double().mean(0) - want).abs()
        floor = scales.double().repeat_interleave(BLOCK)[:512] * 2.0**-19
        unclipped = want.abs() > floor if name == "exp_avg_sqs" else want == want
        # six standard deviations of a mean of values that are up to a step apart
        assert (off <= step * (6 * 0.5 / keys**0.5) + 1e-12)[unclipped].all(), name
        assert (got.double() - want).abs().le(step * 1.001 + floor).all()


@pytest.mark.parametrize("noisy", [False, True])
def test_noise_does_not_depend_on_the_split(noisy: bool, device: str) -> None:
    whole = plain([10_000]) | dict(max_exp_avg_sqs=[])
    whole |= {name: [t.to(BF16) for t in whole[name]] for name in STATES}
    whole = to(device, whole)
    cuts = [0, 1, 300, 4096, 7777, 10_000]
    split = {
        name: [t[a:b].clone() for t in tensors for a, b in itertools.pairwise(cuts)]
        for name, tensors in whole.items()
        if name != "steps"
    } | dict(steps=[torch.zeros((), device=device) for _ in cuts[1:]])
    key = 99
    rows = torch.tensor([[key, cut] for cut in cuts[:-1]]) if noisy else None
    adam_step_(**whole, **NUMBERS, noise=torch.tensor([[key, 0]]) if noisy else None)
    adam_step_(**split, **NUMBERS, noise=rows)
    for name in ("params", "exp_avgs", "exp_avg_sqs"):
        assert torch.equal(torch.cat(split[name]), whole[name][0]), name


@pytest.mark.parametrize("form", ["float32", "codes"])
def test_split_params_are_their_float32_masters(form: str, device: str) -> None:
    base = plain(grad=BF16) | dict(max_exp_avg_sqs=[])
    masters = [t.clone() for t in base["params"]]
    base = coded(base) if form == "codes" else base
    exact = to(device, base)
    got = to(device, halved(base, masters))
    for _ in range(3):
        adam_step_(**got, **NUMBERS)
        adam_step_(**exact, **NUMBERS)
    for i, master in enumerate(exact["params"]):
        upper, lower = split_float32(master)
        assert torch.equal(got["params"][i], upper) and torch.equal(got["master_params"][i], lower)
        for name in STATES[:2]:
            assert torch.equal(got[name][i], exact[name][i])


def test_buffers_are_as_lists(device: str) -> None:
    lists = coded(plain(grad=BF16))
    in_buffers = to(device, buffers(lists))
    lists = to(device, lists)
    noise = noise_for(lists)
    adam_step_(**lists, **NUMBERS, noise=noise)
    adam_step_(**in_buffers, **NUMBERS, noise=noise)
    for name in STATES:
        for i, codes in enumerate(lists[name]):
            begin = int(in_buffers["offsets"][i])
            piece = in_buffers[name][0][begin : begin + codes.numel()]
            assert torch.equal(piece, in_memory_order(codes)), (name, i)
    n = len(lists["params"])
    for j in range(3):
        assert torch.equal(torch.cat(lists["scales"][j * n : (j + 1) * n]), in_buffers["scales"][j])


expected = cache(digest)  # the bits of the widest ISA


def test_every_isa(isa: str) -> None:
    environment = os.environ | {"DSX_FORCE_ISA": isa}
    run = warm_python.run(Path(__file__).with_name("format_cases.py"), env=environment)
    assert run.stdout.strip() == expected(), run.stderr


def test_cpu_as_cuda(cuda: str) -> None:
    for arguments in everything():
        on_cpu, on_cuda = to("cpu", arguments), to(cuda, arguments)
        adam_step_(**on_cpu, **NUMBERS)
        adam_step_(**on_cuda, **NUMBERS)
        for a, b in zip(written(on_cpu), written(on_cuda), strict=True):
            assert torch.equal(a, b.cpu())


def test_unaligned_tensors(device: str) -> None:
    aligned = {**coded(plain([1000], grad=BF16)), "max_exp_avg_sqs": []}
    aligned["scales"] = aligned["scales"][:2]
    shifted = {
        name: [torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape) for t in value]
        for name, value in aligned.items()
    }
    aligned, shifted = to(device, aligned), {
        name: [torch.cat([t[:1], t.flatten()]).to(device)[1:] if t.dim() else t.to(device).clone()
               for t in value]
        for name, value in shifted.items()
    }  # fmt: skip
    adam_step_(**aligned, **NUMBERS)
    adam_step_(**shifted, **NUMBERS)
    assert all(map(torch.equal, written(aligned), written(shifted)))


def changed(name: str, change: Callable[[list[Tensor]], object]) -> Callable[[], Arguments]:
    def make() -> Arguments:
        arguments = coded(plain([300, 4]) | dict(max_exp_avg_sqs=[]))
        return arguments | {name: change(arguments.get(name, []))}

    return make


def in_buffers(name: str, change: Callable[[Tensor], object]) -> Callable[[], Arguments]:
    def make() -> Arguments:
        arguments = buffers(coded(plain([300, 4]) | dict(max_exp_avg_sqs=[])))
        value = arguments[name]
        return arguments | {name: [change(value[0]), *value[1:]] if name == "scales"
                            else change(value)}  # fmt: skip

    return make


REFUSED = {
    "scales has length 3, expected 4": changed("scales", lambda x: x[:3]),
    "scales has length 6, expected 0": lambda: coded(plain([300, 4])) | plain([300, 4]),
    "scales[0] has 1 elements, expected at least 2":
        changed("scales", lambda x: [x[0][:1], *x[1:]]),
    "scales[1] is float64, expected float32":
        changed("scales", lambda x: [x[0], x[1].double(), *x[2:]]),
    "scales[2] is overlapping scales[0], expected separate memory":
        changed("scales", lambda x: [x[0], x[1], x[0], x[3]]),
    "exp_avg_sqs[0] is float32, expected uint8":
        changed("exp_avg_sqs", lambda x: [t.float() for t in x]),
    "offsets[1] is 513, expected a multiple of 256":
        in_buffers("offsets", lambda x: x + torch.tensor([0, 1])),
    "scales[0] has 2 elements, expected at least 3": in_buffers("scales", lambda x: x[:2]),
    "scales has length 1, expected 2": lambda: (a := in_buffers("slots", lambda x: x)()) | dict(
        scales=a["scales"][:1]),
    "noise is int32, expected int64":
        changed("noise", lambda _: torch.zeros(2, 2, dtype=torch.int32)),
    "noise has shape [2] and strides [1], expected [n, 2], contiguous":
        changed("noise", lambda _: torch.zeros(2, dtype=torch.int64)),
    "noise has length 3, expected 2":
        changed("noise", lambda _: torch.zeros(3, 2, dtype=torch.int64)),
    "noise is a tensor, expected None with float16 state":
        lambda: plain([4], F16) | dict(noise=torch.zeros(1, 2, dtype=torch.int64)) | {
            name: [torch.zeros(4, dtype=F16)] for name in STATES},
    "params[0] is float16, expected bfloat16 with master_params of int16":
        lambda: plain([4], F16) | dict(master_params=[torch.zeros(4, dtype=torch.int16)]),
    "master_params[1] is float32, expected int16":
        lambda: plain([4, 4], BF16) | dict(master_params=[torch.zeros(4, dtype=torch.int16),
                                                          torch.zeros(4)]),
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_refuses(text: str) -> None:
    arguments = REFUSED[text]()
    before = [tensor.clone() for tensor in written(arguments)]
    with pytest.raises(ValueError) as raised:
        adam_step_(**arguments, **NUMBERS)
    assert str(raised.value) == f"adam_step_: {text}"
    for tensor, kept in zip(written(arguments), before, strict=True):
        assert torch.equal(tensor, kept)

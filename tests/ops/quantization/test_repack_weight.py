"""repack_weight_: each code where it is drawn, element by element, and what it refuses.

What is expected is worked out here from the drawings, by loops, and not by our code.
"""

import hashlib
import re
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from deepspeed_ext.ops import repack_weight_, repack_weight_ref_

OPS = torch.ops.deepspeed_ext
BITS = {"int8": 8, "int4": 4, "nf4": 4}
ZERO = {"int8": 0, "int4": 8, "nf4": 7}
KINDS = [("int8", False), ("int4", False), ("nf4", False), ("int4", True)]  # and whether across
SIZES = (
    *((0, 8), (8, 0), (8, 1), (16, 31), (24, 32), (40, 33), (8, 255), (136, 256), (16, 257)),
    *((264, 300), (8, 1024), (16, 1025), (128, 2100), (1200, 40)),
)
ODD_ROWS = ((1, 1), (3, 7), (17, 40), (15, 2049), (33, 8))  # of words along them
each_kind = pytest.mark.parametrize("kind", KINDS, ids=str)
Kind = tuple[str, bool]


def words_for(kind: Kind, n: int, length: int, seed: int = 0) -> Tensor:
    """Random words; the last one of a row has bits beyond its end."""
    in_word = 32 // BITS[kind[0]]
    shape = (n // 8, length) if kind[1] else (n, -(-length // in_word))
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, shape, generator=generator).int()


def order_for(length: int) -> Tensor:
    return torch.randperm(length, generator=torch.Generator().manual_seed(length))


def codes_for(kind: Kind, n: int, length: int, device: str = "cpu") -> Tensor:
    """Where to write, full of something else."""
    of_row = -(-length * BITS[kind[0]] // 1024) * 128
    return torch.full((n, of_row), 99, dtype=torch.uint8, device=device)


def code_of(words: list[list[int]], kind: Kind, row: int, element: int) -> int:
    """Return one code of a word."""
    bits, in_word = BITS[kind[0]], 32 // BITS[kind[0]]
    if kind[1]:
        word = words[row // 8][element]
        place = [0, 2, 4, 6, 1, 3, 5, 7].index(row % 8)
    else:
        word, place = words[row][element // in_word], element % in_word
    return (word & 0xFFFFFFFF) >> bits * place & (1 << bits) - 1


def wanted(
    words: Tensor, kind: Kind, n: int, length: int, order: Tensor | None, biased: bool
) -> Tensor:
    """Return the bytes: a run of 16 has 4 words, each as packed_weight.h writes it out."""
    bits = BITS[kind[0]]
    listed = words.tolist()
    places = order.tolist() if order is not None else range(length)
    made = codes_for(kind, n, length).tolist()
    for row in range(n):
        for byte in range(len(made[row])):
            run, word, in_word = byte // 16, byte % 16 // 4, byte % 4
            two = 2 * word
            if bits == 4:
                drawn = [two, 8 + two, 16 + two, 24 + two]
                drawn += [place + 1 for place in drawn]
                elements = [32 * run + place for place in drawn[2 * in_word : 2 * in_word + 2]]
            else:
                elements = [16 * run + [two, 8 + two, two + 1, 9 + two][in_word]]
            value = 0
            for number, element in enumerate(elements):
                code = ZERO[kind[0]]
                if element < length:
                    code = code_of(listed, kind, row, places[element])
                    code ^= 128 if biased and bits == 8 else 0
                value |= code << 4 * number
            made[row][byte] = value
    return torch.tensor(made, dtype=torch.uint8).view(codes_for(kind, n, length).shape)


def repacked(
    words: Tensor, kind: Kind, n: int, length: int, order: Tensor | None = None, biased: bool = True
) -> Tensor:
    codes = codes_for(kind, n, length, str(words.device))
    options = dict(format=kind[0], length=length, biased=biased, across=kind[1])
    repack_weight_(words, codes, order, **options)
    return codes


def sizes_of(kind: Kind) -> Iterator[tuple[int, int]]:
    yield from SIZES
    yield from () if kind[1] else ODD_ROWS


@each_kind
def test_each_code_is_where_it_is_drawn(kind: Kind, device: str) -> None:
    for number, (n, length) in enumerate(sizes_of(kind)):
        words, biased = words_for(kind, n, length), number % 2 == 0
        for order in (None, order_for(length)):
            want = wanted(words, kind, n, length, order, biased)
            there = None if order is None else order.to(device)
            got = repacked(words.to(device), kind, n, length, there, biased)
            assert torch.equal(got.cpu(), want), (n, length, order is None)
            of_ref = codes_for(kind, n, length)
            options = dict(format=kind[0], length=length, biased=biased, across=kind[1])
            repack_weight_ref_(words, of_ref, order, **options)
            assert torch.equal(of_ref, want), (n, length, "reference")


def test_both_ways_of_8_bits(device: str) -> None:
    words = words_for(("int8", False), 5, 33)
    plain, biased = (
        repacked(words.to(device), ("int8", False), 5, 33, None, way) for way in (False, True)
    )
    elements = wanted(words, ("int8", False), 5, 33, None, False) != 0
    assert bool(((plain ^ biased).cpu()[elements] == 128).all())


@each_kind
def test_any_strides_and_addresses(kind: Kind, device: str) -> None:
    for n, length in ((48, 200), (16, 1030), (8, 33)):
        words = words_for(kind, n, length).to(device)
        want = repacked(words, kind, n, length)
        wide = torch.zeros(words.shape[0] * 2, words.shape[1] * 3, dtype=torch.int32, device=device)
        wide[1::2, 2::3] = words
        for other in (words.t().contiguous().t(), wide[1::2, 2::3]):
            assert torch.equal(repacked(other, kind, n, length), want)
        one = words[:1].expand_as(words)
        assert torch.equal(
            repacked(one, kind, n, length), repacked(one.contiguous(), kind, n, length)
        )
        room = torch.full((want.numel() + 16,), 99, dtype=torch.uint8, device=device)
        codes = room[3 : 3 + want.numel()].view(want.shape)
        options = dict(format=kind[0], length=length, biased=True, across=kind[1])
        repack_weight_(words, codes, **options)
        assert torch.equal(codes, want)
        assert bool((room[:3] == 99).all()) and bool((room[3 + want.numel() :] == 99).all())


def digest(device: str = "cpu") -> str:
    """Return a digest of the bits of results."""
    found = hashlib.sha256()
    for kind in KINDS:
        for n, length in sizes_of(kind):
            for order in (None, order_for(length).to(device)):
                made = repacked(words_for(kind, n, length).to(device), kind, n, length, order)
                found.update(made.cpu().numpy().tobytes())
    return found.hexdigest()


def test_cuda_has_the_bits_of_the_cpu(cuda: str) -> None:
    assert digest(cuda) == digest()


def test_an_order_beyond_the_length_stands_for_0_on_cuda(cuda: str) -> None:
    """Nothing is read beyond the words; elements 1 and 2 are in the third and the fifth byte."""
    kind, beyond = ("int4", False), torch.tensor([5, -1, 1 << 40, 0, 1, 2, 3, 4], device=cuda)
    words = words_for(kind, 3, 8).to(cuda)
    want = repacked(words, kind, 3, 8, beyond.where(beyond.clamp(0, 7) == beyond, 0))
    for byte in (2, 4):
        want[:, byte] = want[:, byte] & 240 | 8
    assert torch.equal(repacked(words, kind, 3, 8, beyond), want)


@each_kind
def test_opcheck(kind: Kind, device: str) -> None:
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    checks += ["test_aot_dispatch_dynamic"]
    for order in (None, order_for(40).to(device)):
        arguments = (words_for(kind, 16, 40).to(device), order, codes_for(kind, 16, 40, device))
        options = dict(format=list(BITS).index(kind[0]), length=40, biased=True, across=kind[1])
        checked = torch.library.opcheck(
            OPS.repack_weight_.default, arguments, options, test_utils=checks
        )
        assert set(checked.values()) == {"SUCCESS"}


def test_versions_go_up_and_meta_is_taken() -> None:
    codes = codes_for(("int4", False), 3, 8)
    before = codes._version
    options = dict(format="int4", length=8)
    repack_weight_(words_for(("int4", False), 3, 8), codes, **options)
    assert codes._version == before + 1
    repack_weight_(words_for(("int4", False), 3, 8).to("meta"), codes.to("meta"), **options)


W, C = words_for(("int4", False), 16, 40), codes_for(("int4", False), 16, 40)
A = words_for(("int4", True), 16, 40)
ORDER = order_for(40)


def _with(order: dict[int, int]) -> Tensor:
    changed = ORDER.clone()
    for place, value in order.items():
        changed[place] = value
    return changed


call = partial(repack_weight_, format="int4", length=40)
REFUSED: dict[str, Callable[[], object]] = {
    "words is int64, expected int32": lambda: call(W.long(), C),
    "words is float32, expected int32": lambda: call(W.float(), C),
    "words has shape [16, 4], expected [16, 5]": lambda: call(W[:, :4], C),
    "words has shape [80], expected [16, 5]": lambda: call(W.flatten(), C),
    "words has shape [2, 40], expected [16, 5]": lambda: call(A, C),
    "words has shape [16, 5], expected [2, 40]": lambda: call(W, C, across=True),
    "words has shape [16, 5], expected [16, 10]": lambda: call(W, C, format="int8"),
    "format is 'int3', expected one of int8, int4, nf4, fp8_e4m3, fp8_e5m2":
        lambda: call(W, C, format="int3"),
    "format is 3, expected 0, 1 or 2, which are int8, int4 and nf4":
        lambda: call(W, C, format="fp8_e4m3"),
    "format is -1, expected 0, 1 or 2, which are int8, int4 and nf4":
        lambda: OPS.repack_weight_(W, None, C, format=-1, length=40, biased=False, across=False),
    "length is -1, expected 0 to 2147483647": lambda: call(W, C, length=-1),
    "length is 2147483648, expected 0 to 2147483647": lambda: call(W, C, length=2**31),
    "across is True, expected False, as only words of 4 bits are across rows":
        lambda: call(W, C, format="int8", across=True),
    "codes has 15 rows, expected a multiple of 8, as many as share a word":
        lambda: call(A, C[:15], across=True),
    "codes is int8, expected uint8": lambda: call(W, C.char()),
    "codes has shape [16, 128], expected [16, 256]": lambda: call(W, C, length=257),
    "codes has shape [2048], expected [2048, 128]": lambda: call(W, C.flatten()),
    "codes has strides [1, 16] for shape [16, 128], expected a contiguous tensor":
        lambda: call(W, C.t().contiguous().t()),
    "codes is on meta, expected cpu": lambda: call(W, C.to("meta")),
    "order is int32, expected int64": lambda: call(W, C, ORDER.int()),
    "order has shape [39], expected [40]": lambda: call(W, C, ORDER[:39]),
    "order has strides [2] for shape [40], expected a contiguous tensor":
        lambda: call(W, C, ORDER.repeat_interleave(2)[::2]),
    "order[7] is 40, expected each of 0 to 39 once": lambda: call(W, C, _with({7: 40})),
    "order[7] is -1, expected each of 0 to 39 once": lambda: call(W, C, _with({7: -1})),
    f"order[39] is {int(ORDER[0])}, expected each of 0 to 39 once":
        lambda: call(W, C, _with({39: int(ORDER[0])})),
    "codes is overlapping words, expected separate memory":
        lambda: call(C.view(torch.int32)[:, :5], C),
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_refuses(text: str) -> None:
    call(W, C.clone())  # loads the library, so that it is the one that refuses
    with pytest.raises(ValueError, match=rf"^repack_weight_: {re.escape(text)}$"):
        REFUSED[text]()
    assert bool((C == 99).all()), "it wrote before it refused"


def test_refuses_other_kinds() -> None:
    with pytest.raises(TypeError, match=r"^repack_weight_: words is \[1\], expected a tensor"):
        call([1], C)

"""fingerprints: the same of the same bytes everywhere, and others of whatever else."""

from collections.abc import Callable

import pytest
import torch
from fingerprint_cases import BLOCK, CHUNK, ROW, SIZES, STARTS, make
from torch import Tensor

from deepspeed_ext.ops import fingerprints, fingerprints_ref

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int64]
DTYPES += [torch.bool, torch.complex64, torch.float8_e4m3fn]


def of(tensor: Tensor) -> int:
    return int(fingerprints([tensor]).item())


def assert_as_defined(tensors: list[Tensor]) -> None:
    got = fingerprints(tensors)
    want = fingerprints_ref([tensor.cpu() for tensor in tensors])
    assert got.dtype == torch.int64 and got.device == tensors[0].device
    assert got.tolist() == want.tolist()


@pytest.mark.parametrize("start", STARTS)
def test_bytes(start: int, device: str) -> None:
    tensors = make(device, start)
    before = [tensor.clone() for tensor in tensors]
    assert_as_defined(tensors)
    assert all(map(torch.equal, tensors, before))
    assert fingerprints(tensors).tolist() == fingerprints(make("cpu")).tolist()
    assert len(set(fingerprints(tensors).tolist())) == len(SIZES)


def test_the_definition_is_this_one() -> None:
    """What was kept by one version is held against another's."""
    numbers = torch.arange(5000, dtype=torch.int32)
    want = [0, 3246223653305573299, 6944987207947899760]
    assert fingerprints_ref([numbers[:0], numbers[:3], numbers]).tolist() == want


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype: torch.dtype, device: str) -> None:
    """Also from places where only elements are aligned; a view as bytes is the same."""
    for start in (0, 1, 3):
        memory = make(device)[-1]
        memory = memory % 2 if dtype is torch.bool else memory
        tensor = memory[: memory.numel() // 8 * 8].view(dtype)[start:]
        assert_as_defined([tensor])
        assert of(tensor) == of(tensor.view(torch.uint8))


def test_more_tensors_than_a_launch_takes(device: str) -> None:
    tensors = [torch.full((i % 5,), i, device=device) for i in range(3001)]
    assert_as_defined(tensors)


def test_any_layout(device: str) -> None:
    """Dense ones are read as they lie; expanded, sliced and overlapping ones by their indices."""
    base = torch.randn(6, 10, 7, device=device)
    dense = [
        base.permute(2, 0, 1),
        base.reshape(6, 10, 7, 1).to(memory_format=torch.channels_last),
        base[2, 3, 4],
        base[:0],
        base[:1].transpose(0, 2),
    ]
    gappy = [
        base[:, ::2],
        base[..., 3:5],
        base[0, 0, :1].expand(5000),
        base[:1].expand(5, 10, 7),
        base.flatten().as_strided((100, 50), (2, 1)),
        base.half()[:, 1:],
        torch.view_as_complex(base[..., :2].contiguous()).conj(),
        torch.view_as_complex(base[..., :2].contiguous()).conj().imag,
    ]
    assert_as_defined([*dense, *gappy])
    assert of(dense[0]) == of(base) and all(of(t) == of(t.contiguous()) for t in gappy)


def test_nothing(device: str) -> None:
    empty = fingerprints([])
    assert empty.shape == (0,) and empty.dtype == torch.int64
    assert fingerprints_ref([]).shape == (0,)
    tensors = [torch.empty(0, device=device), torch.empty(3, 0, device=device)]
    assert fingerprints(tensors).tolist() == [0, 0] == fingerprints_ref(tensors).tolist()
    assert fingerprints([*tensors, torch.ones(1, device=device)])[2].item() != 0


@pytest.mark.parametrize("fill", [0.0, 1.0])
def test_one_element_in_every_place(fill: float, device: str) -> None:
    """Among equal ones, where nothing but the place tells two changes apart."""
    n = (BLOCK + 2 * ROW) // 4
    tensors = torch.full((n, n), fill, device=device)
    tensors.fill_diagonal_(2.0)
    found = fingerprints([*tensors, torch.full((n,), fill, device=device)])
    assert len(set(found.tolist())) == n + 1


def test_every_bit_of_a_row(device: str) -> None:
    memory = torch.randint(256, (ROW + 3,), dtype=torch.uint8).to(device)
    changed = [memory.clone() for _ in range(8 * len(memory))]
    for i, tensor in enumerate(changed):
        tensor[i // 8] ^= 1 << i % 8
    assert len({of(memory), *fingerprints(changed).tolist()}) == len(changed) + 1


# What happens to gradients and weights: of how many elements, and what becomes of them.
Change = Callable[[Tensor, torch.Generator], Tensor]


def _one_of(x: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randint(x.numel(), (1,), generator=generator)


def _swapped(x: Tensor, generator: torch.Generator) -> Tensor:
    i, j = torch.randperm(x.numel(), generator=generator)[:2].tolist()
    order = torch.arange(x.numel())
    order[[i, j]] = order[[j, i]]
    return x[order]


def _next_bits(x: Tensor, generator: torch.Generator) -> Tensor:
    bits = x.view(torch.int16 if x.element_size() == 2 else torch.int32).clone()
    bits[_one_of(x, generator)] ^= 1
    return bits.view(x.dtype)


CHANGES: dict[str, Change] = {
    "one is the next number": _next_bits,
    "one changes its sign": lambda x, g: x.index_copy(0, i := _one_of(x, g), -x[i]),
    "all change their signs": lambda x, g: -x,
    "half of all change their signs": lambda x, g: torch.where(
        torch.arange(len(x)) % 2 == 0, x, -x
    ),
    "times 0.5": lambda x, g: x * 0.5,
    "times a clip coefficient": lambda x, g: x * 0.875,
    "two change places": _swapped,
    "neighbours change places": lambda x, g: x.view(-1, 2).flip(1).flatten(),
    "halves change places": lambda x, g: x.roll(len(x) // 2),
    "by one place": lambda x, g: x.roll(1),
    "backwards": lambda x, g: x.flip(0),
    "one more": lambda x, g: torch.cat([x, x.new_zeros(1)]),
    "one less": lambda x, g: x[:-1],
    "an infinity": lambda x, g: x.index_fill(0, _one_of(x, g), float("inf")),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CHANGES)
def test_changes(name: str, dtype: torch.dtype) -> None:
    """Of many random tensors each change is seen, and no two of any are the same."""
    generator = torch.Generator().manual_seed(0)
    change, tensors = CHANGES[name], []
    for n in [4, 6, 34, 128, 130, 1000, 4096, 5000] * 40:
        x = torch.randn(n, generator=generator).to(dtype)
        tensors += [x, change(x, generator)]
    found = fingerprints(tensors).tolist()
    assert len(set(found)) == len(found)
    assert found == fingerprints_ref(tensors).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_zeros_ones_and_nans(dtype: torch.dtype) -> None:
    """Where few bits differ, and differ alike in all elements: in tensors of each length."""
    integers = torch.int32 if dtype.itemsize == 4 else torch.int16
    values = [torch.tensor([x]).to(dtype) for x in (0.0, -0.0, 1.0, -1.0, 0.5, 2.0, float("inf"))]
    infinity = values[-1].view(integers)
    values += [(infinity | payload).view(dtype) for payload in (1, 2, 64, -(2**15))]  # NaNs
    tensors = [x.expand(n).contiguous() for x in values for n in [*range(1, 70), 512, 4096, 9000]]
    assert len(set(fingerprints(tensors).tolist())) == len(tensors)


def test_tensors_that_pass_an_element_on() -> None:
    """As where two slices of one buffer begin elsewhere: all fingerprints are others."""
    buffer = torch.randn(10_000)
    before = [buffer[:5000], buffer[5000:]]
    after = [buffer[:4999], buffer[4999:]]
    shifted = [buffer.roll(1)[:5000], buffer.roll(1)[5000:]]
    found = fingerprints([*before, *after, *shifted]).tolist()
    assert len(set(found)) == 6


def test_blocks_and_rows_that_change_places(device: str) -> None:
    memory = torch.randint(256, (2 * CHUNK,), dtype=torch.uint8).to(device)
    for unit in (4, 16, 128, ROW, 4 * ROW, BLOCK, CHUNK):
        units = memory.view(-1, unit)
        for i in (1, len(units) - 1):
            order = torch.arange(len(units))
            order[[0, i]] = order[[i, 0]]
            assert of(units[order.to(device)]) != of(memory), (unit, i)
    same = torch.zeros(2, BLOCK, dtype=torch.uint8, device=device)
    same[1] = 7  # also where there is one value in each
    assert of(same) != of(same.flip(0))

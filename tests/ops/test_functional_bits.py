"""Functional ops: the same bits with every instruction set and number of threads, in every run, and
of a row wherever it is.

One process for each instruction set but the widest, with the digests of all ops, as importing the
tests takes most of the time.
"""

import hashlib
import os
from collections.abc import Callable
from functools import cache, partial
from operator import itemgetter

import pytest
import softmax_cases
import sparse_cases
import test_cross_entropy
import test_grouped_few_rows
import test_moe_contract
import test_norms_around
import test_quantize_contract
import test_quantize_packed
import test_quantized_linear_contract
import test_repack_weight
import test_skinny_linear_contract
import test_tokens_contract
import torch
import warm_python
from functional_cases import CASES, FORMULAS, Case, call_of
from samples import BF16, DTYPES, F32
from torch import Tensor


def digest_of(case: Case, device: str = "cpu") -> str:
    """Return a digest of the bits of results and gradients, of rows long and short."""
    found = hashlib.sha256()
    for dtype in DTYPES:
        for rows, n in ((41, 2), (41, 9), (300, 64), (41, 5001), (5, 20_000)):
            call = call_of(case, rows, n, dtype, device)
            for tensor in call.run():
                found.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


MODULES = (  # with digests of their own, for ops that take more than a case has
    softmax_cases,
    sparse_cases,
    test_cross_entropy,
    test_moe_contract,
    test_grouped_few_rows,
    test_skinny_linear_contract,
    test_tokens_contract,
    test_quantized_linear_contract,
    test_norms_around,
    test_quantize_contract,
    test_quantize_packed,
    test_repack_weight,
)
DIGESTS: dict[str, Callable[..., str]] = {
    **{name: partial(digest_of, case) for name, case in (CASES | FORMULAS).items()},
    **{module.__name__: module.digest for module in MODULES},
}
SLOW_ISAS = [pytest.param(name, marks=pytest.mark.long) for name in ("scalar", "sse2")]
each_case_of_rows = pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if not case.by_place]
)
AMONG_MANY = ("rms_norm", "layer_norm", "softmax")
each_digest = pytest.mark.parametrize("name", DIGESTS)


@cache
def digests() -> str:
    """Return a line for each op, here with the widest instruction set."""
    return "\n".join(f"{name} {digest()}" for name, digest in DIGESTS.items())


@pytest.mark.parametrize("isa", [*SLOW_ISAS, "neon", "avx2", "avx512"], indirect=True)
def test_every_isa(isa: str) -> None:
    done = warm_python.run(__file__, env=os.environ | {"DSX_FORCE_ISA": isa})
    assert done.stdout.strip().split("\n") == digests().split("\n"), done.stderr


@each_digest
def test_any_thread_count(name: str) -> None:
    before, found = torch.get_num_threads(), set()
    try:
        for count in (1, 3, 7):
            torch.set_num_threads(count)
            found.add(DIGESTS[name]())
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1


@each_digest
def test_every_run_on_cuda(name: str, cuda: str) -> None:
    assert len({DIGESTS[name](cuda) for _ in range(5)}) == 1


def moved(tensor: Tensor) -> Tensor:
    """The last 5 rows, one element further on, after a row of NaN."""
    filler = float("nan") if tensor.is_floating_point() else 1
    row = tensor[0].numel()
    room = torch.full((6 * row + 1,), filler, dtype=tensor.dtype, device=tensor.device)
    found = room[1:].view(6, *tensor.shape[1:])
    found[1:] = tensor[-5:]
    return found


@pytest.mark.parametrize("n", [64, 1000, 1001, 4096, 5000, 16384, 16400, 20_001])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each_case_of_rows
def test_a_row_is_the_same_in_any_batch(name: str, dtype: torch.dtype, n: int, device: str) -> None:
    """Alone, at another place, at another address, among rows that are not finite."""
    rows = 67 if n < 4096 else 17
    if "heads" in name and n >= 5000:
        rows = 7
    call = call_of(CASES[name], rows, n, dtype, device, scale=4.0)
    want = call.run_rows()
    for row in (0, 1, rows // 2, rows - 1):
        one = slice(row, row + 1)
        alone = call.with_rows(itemgetter(one)).run_rows()
        for got, expected in zip(alone, want, strict=True):
            assert torch.equal(got[0], expected[row])
    for got, expected in zip(call.with_rows(moved).run_rows(), want, strict=True):
        assert torch.equal(got[1:], expected[-5:])


@pytest.mark.parametrize("dtypes", [(F32, BF16), (BF16, F32)], ids=str)
@each_case_of_rows
def test_a_row_of_mixed_dtypes_is_the_same_in_any_batch(
    name: str, dtypes: tuple[torch.dtype, ...], device: str
) -> None:
    call = call_of(CASES[name], 67, 264, dtypes[0], device, others=dtypes[1])
    want = call.run_rows()
    for changed, part in ((itemgetter(slice(33, 34)), slice(33, 34)), (moved, slice(-5, None))):
        for got, expected in zip(call.with_rows(changed).run_rows(), want, strict=True):
            assert torch.equal(got[-len(expected[part]) :], expected[part])


@pytest.mark.parametrize(("rows", "n"), [(4500, 1032), (2500, 4096), (700, 16384)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(AMONG_MANY)])
def test_a_row_is_the_same_among_thousands(
    name: str, dtype: torch.dtype, rows: int, n: int, cuda: str
) -> None:
    """CUDA has kernels for many rows, which have the bits of those for few."""
    call = call_of(CASES[name], rows, n, dtype, cuda, scale=4.0)
    want = call.run_rows()
    for part in (slice(0, 1), slice(rows // 2, rows // 2 + 1), slice(rows - 40, rows)):
        few = call.with_rows(itemgetter(part)).run_rows()
        for got, expected in zip(few, want, strict=True):
            assert torch.equal(got, expected[part])


if __name__ == "__main__":
    print(digests())

"""The manifest of a checkpoint: chunks that are all of a tensor, and files that are beside it."""

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from deepspeed_ext.zero.checkpoint import manifest
from deepspeed_ext.zero.checkpoint.manifest import BLOCK, BadManifest, Piece

Chunk = tuple[Sequence[int], Sequence[int]]  # offsets, sizes


def row(shape: Sequence[int], chunks: Sequence[Chunk], **change: object) -> dict[str, Any]:
    pieces = [
        {"offsets": o, "sizes": s, "file": "f", "offset": 0, "nbytes": math.prod(s)}
        | {"crc32c": [1] * (math.prod(s) > 0)}
        | change
        for o, s in chunks
    ]
    return {"name": "a", "dtype": "uint8", "shape": shape, "chunks": pieces}


def decoded(rows: Sequence[object]) -> Metadata:
    """Read a manifest that was made on purpose, with a right seal."""
    document = {"format": 1, "entries": rows, "planner": "null"}
    body = json.dumps(document, separators=(",", ":"))[:-1].encode()
    return manifest.decode(body + manifest._seal(body), "p")


def encoded(shape: Sequence[int], chunks: Sequence[Chunk]) -> bytes:
    inside = [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in chunks]
    properties = TensorProperties(dtype=torch.uint8)
    entry = TensorStorageMetadata(properties, torch.Size(shape), inside)
    pieces = {MetadataIndex("a", torch.Size(o)): Piece("f", 0, math.prod(s), ()) for o, s in chunks}
    return manifest.encode(Metadata({"a": entry}, None, pieces))


GRID = [([r, c], [h, w]) for r, h in ((0, 2), (2, 1)) for c, w in ((0, 3), (3, 2), (5, 0))]
WHOLE = {
    "one": ([3], [([0], [3])]),
    "in any order": ([5], [([3], [2]), ([0], [3])]),
    "a grid": ([3, 5], GRID),
    "bricks": ([2, 4], [([0, 0], [1, 3]), ([0, 3], [1, 1]), ([1, 0], [1, 1]), ([1, 1], [1, 3])]),
    "no dimensions": ([], [([], [])]),
    "nothing": ([0, 4], [([0, 0], [0, 4])]),
}
NOT_WHOLE = {  # all have as many elements as the tensor, but the last two
    "an element twice, next to each other": ([5], [([0], [3]), ([2], [2])]),
    "an element twice, one inside": ([6], [([0], [4]), ([1], [2])]),
    "a chunk twice": ([4], [([0], [2]), ([0], [2])]),
    "an element twice, far apart": ([6], [([0], [3]), ([3], [1]), ([2], [2])]),
    "a corner twice": ([2, 4], [([0, 0], [2, 2]), ([1, 1], [1, 3]), ([0, 2], [1, 1])]),
    "too few": ([4], [([0], [3])]),
    "too many": ([4], [([0], [4]), ([3], [1])]),
}


@pytest.mark.parametrize("shape, chunks", WHOLE.values(), ids=WHOLE)
def test_chunks_that_are_all_of_a_tensor(shape: list[int], chunks: list[Chunk]) -> None:
    entry = decoded([row(shape, chunks)]).state_dict_metadata["a"]
    assert isinstance(entry, TensorStorageMetadata)
    assert [(list(c.offsets), list(c.sizes)) for c in entry.chunks] == chunks
    encoded(shape, chunks)


@pytest.mark.parametrize("shape, chunks", NOT_WHOLE.values(), ids=NOT_WHOLE)
def test_chunks_that_are_not_each_element_once(shape: list[int], chunks: list[Chunk]) -> None:
    """Neither written nor believed: some elements would be whatever memory had."""
    with pytest.raises(BadManifest, match="chunks of 'a' that are not all of it"):
        decoded([row(shape, chunks)])
    with pytest.raises(ValueError, match=r"zero\.save: 'a' has parts of \d+ elements, expected"):
        encoded(shape, chunks)


@pytest.mark.parametrize(
    "offsets, sizes",
    [([0, 0], [2, 1]), ([0], [2, 1]), ([0, 0], [2]), ([], []), ([1], [2])],
    ids=str,
)
def test_chunks_of_other_dimensions(offsets: list[int], sizes: list[int]) -> None:
    with pytest.raises(BadManifest, match="a chunk of 'a' that lies outside of it"):
        decoded([row([2], [(offsets, sizes)])])


@pytest.mark.parametrize("file", ["", ".", "..", "../f", "/f", "a/b", "f\0", 1, None])
def test_files_that_are_not_beside_the_manifest(file: object) -> None:
    with pytest.raises(BadManifest, match=r"for 'a', expected one beside it"):
        decoded([row([2], [([0], [2])], file=file)])
    value = {"file": file, "offset": 0, "nbytes": 2, "crc32c": [1]}
    with pytest.raises(BadManifest, match=r"for 'v', expected one beside it"):
        decoded([{"name": "v", "value": value}])


@pytest.mark.parametrize("nbytes", [0, 1, BLOCK, BLOCK + 1])
def test_a_checksum_for_each_block(nbytes: int) -> None:
    blocks = -(-nbytes // BLOCK)
    value = {"file": "f", "offset": 0, "nbytes": nbytes}
    decoded([{"name": "v", "value": value | {"crc32c": [1] * blocks}}])
    for count in {max(blocks - 1, 0), blocks + 1} - {blocks}:
        with pytest.raises(BadManifest, match="other checksums for 'v' than one for each block"):
            decoded([{"name": "v", "value": value | {"crc32c": [1] * count}}])

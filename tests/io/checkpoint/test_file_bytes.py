"""file_bytes says how long the file will be that save makes, of tensors on meta too."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from deepspeed_ext.io import file_bytes, save

WHOLE = torch.arange(100_000, dtype=torch.float32)
CASES: dict[str, dict[str, Tensor]] = {
    "nothing": {},
    "some": {"a": WHOLE, "b": torch.ones(3, 5, dtype=torch.bfloat16), "c": torch.tensor(1)},
    "empty": {"a": torch.empty(0, 4), "b": torch.ones(1)},
    "ties": {"a": WHOLE, "b": WHOLE, "c": torch.ones(3)},
    "views": {"a": WHOLE[:50_000], "b": WHOLE[50_000:], "c": WHOLE[50_000:], "d": WHOLE[::2]},
    "equal": {"a": torch.zeros(9), "b": torch.zeros(9)},
}


def on_meta(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors that lie in storages on meta as these do in theirs."""
    storages: dict[int, Tensor] = {}
    found = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        elements = storage.nbytes() // tensor.element_size()
        made = torch.empty(elements, dtype=tensor.dtype, device="meta")
        whole = storages.setdefault(storage.data_ptr() or id(tensor), made)
        found[name] = whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("metadata", [None, {"format": "pt", "text": "x" * 5000}])
def test_is_the_length_of_the_file(
    tmp_path: Path, case: str, metadata: dict[str, str] | None
) -> None:
    tensors = CASES[case]
    save(tensors, tmp_path / "file", metadata=metadata, durable=False)
    want = (tmp_path / "file").stat().st_size
    assert file_bytes(tensors, metadata=metadata) == want
    assert file_bytes(on_meta(tensors), metadata=metadata) == want


def test_refuses_what_save_refuses() -> None:
    with pytest.raises(
        TypeError, match=r"^io\.file_bytes: state_dict\['a'\] is an int, expected a"
    ):
        file_bytes({"a": 3})  # type: ignore[dict-item]
    with pytest.raises(
        TypeError, match=r"^io\.file_bytes: state_dict is a list, expected a mapping"
    ):
        file_bytes([])  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"\['a'\] has layout torch\.sparse_coo, expected torch\.str"
    ):
        file_bytes({"a": torch.eye(2).to_sparse()})
    with pytest.raises(
        TypeError, match=r"^io\.save: state_dict\['a'\] is on meta, expected cpu or"
    ):
        save({"a": torch.ones(1, device="meta")}, "nowhere")

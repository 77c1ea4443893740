"""Files written before rooms were made load, bit for bit, and go on as they did then."""

import shutil
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent))

from older_files import KINDS, assert_same

FOLDER = Path(__file__).parent
EACH = [(kind, name) for kind, (_, _, names) in KINDS.items() for name in names]


@pytest.mark.parametrize(("kind", "name"), EACH)
def test_loads_and_goes_on(kind: str, name: str, tmp_path: Path) -> None:
    """From a copy, as stores are written to."""
    shutil.copytree(FOLDER / kind, tmp_path, dirs_exist_ok=True)
    before, after = KINDS[kind][1](tmp_path, name)
    expected = torch.load(FOLDER / kind / f"{name}.expected.pt", weights_only=True)
    assert_same(before, expected["before"])
    assert_same(after, expected["after"])

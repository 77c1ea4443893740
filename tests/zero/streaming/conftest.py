import sys
from pathlib import Path

from stream_cases import each_device, each_rest, late

sys.path.append(str(Path(__file__).parents[2] / "offload"))

__all__ = ["each_device", "each_rest", "late"]

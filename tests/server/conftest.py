"""What the server's tests share: this folder and that of the inference tests, and one thread."""

import sys
from pathlib import Path

from one_thread import one_thread as one_thread

sys.path.append(str(Path(__file__).parent.parent / "inference"))

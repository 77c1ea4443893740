"""What the tests of DeepSpeed's names share: the ZeRO tests' model, one thread, and processes."""

import sys
from pathlib import Path

from one_thread import one_thread as one_thread

sys.path += [str(Path(__file__).parents[1] / name) for name in ("zero", "optim")]

from process_groups import groups as groups, shared_groups as shared_groups

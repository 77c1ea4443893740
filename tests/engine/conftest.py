"""What the tests of the engine share: the model of the ZeRO tests, one thread, and processes."""

import sys
from pathlib import Path

from one_thread import one_thread as one_thread

sys.path += [str(Path(__file__).parents[1] / name) for name in ("zero", "optim")]

from process_groups import groups as groups, shared_groups as shared_groups

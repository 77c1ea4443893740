"""What the tests of patched models share: helpers, one thread, groups of processes."""

import sys
from pathlib import Path

from one_thread import one_thread as one_thread

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "optim")]

from process_groups import groups as groups, shared_groups as shared_groups

"""One process that wants the tiny op: prints `ok <library>`, or dies of the BuildError."""

import logging
import sys
from pathlib import Path

from building import build

from deepspeed_ext.op_builder import OpSpec

logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
print("ok", build(OpSpec("tiny", "cpu", ("tiny/tiny.cpp",), needs=()), Path(sys.argv[1])))

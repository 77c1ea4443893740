"""What lets Ctrl-C come at each point of code at which it can.

These points are those of Python 3.11.
"""

import dis
import sys
from pathlib import Path

import pytest

import deepspeed_ext

SOURCES = (str(Path(deepspeed_ext.__file__).parent),)

needs_its_points = pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="its points are those of Python 3.11"
)


class Interrupt:
    """KeyboardInterrupt at one of the points where a signal is looked for, of those in some code.

    That is in a call, at the beginning of a function, and where a loop goes on.

    Args:
        at: which of these points in the order in which the main thread comes to them.
        sources: what names of its files begin with.
    """

    def __init__(self, at, sources=SOURCES):
        self.at, self.count, self.where = at, 0, ""
        self._sources = sources
        self._points = {}

    def during(self, work):
        """Work, unless it comes in between."""
        sys.settrace(self._enter)
        try:
            work()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)

    def _enter(self, frame, event, arg):
        if not frame.f_code.co_filename.startswith(self._sources):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame, event, arg):
        code = frame.f_code
        if code not in self._points:
            self._points[code] = set(_points(code))
        if event == "opcode" and frame.f_lasti in self._points[code]:
            self.count += 1
            if self.count == self.at:
                self.where = f"{code.co_qualname if hasattr(code, 'co_qualname') else code.co_name}"
                self.where += f" in line {frame.f_lineno} of {code.co_filename}"
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._step


def _points(code):
    """Yield where to raise as a signal's handler would: the handlers of errors are the same there.

    Python looks for signals within a call. What comes next may be behind the end of a `with`, of
    which the call is the last in it: there nobody would let go of a lock.
    """
    bytecode = dis.Bytecode(code)

    def handler(offset):
        ranges = (e for e in bytecode.exception_entries if e.start <= offset < e.end)
        return next((entry.target for entry in ranges), None)

    before = None
    for instruction in bytecode:
        if instruction.opname == "JUMP_BACKWARD":
            yield instruction.offset
        elif before is not None and before.opname in ("RESUME", "CALL", "CALL_FUNCTION_EX"):
            is_same = handler(before.offset) == handler(instruction.offset)
            yield from [instruction.offset] if is_same else []
        before = instruction

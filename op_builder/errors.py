"""The exception for an op library that cannot be had, and the finding it is made from."""

from collections.abc import Iterable
from pathlib import Path


class Unavailable(Exception):
    """Something that building or loading needs is missing or wrong: a cause and its fix.

    Raised inside; at the border, where the op is known, it becomes a BuildError.
    """

    def __init__(self, cause: str, fix: str, log: Path | None = None) -> None:
        super().__init__(cause, fix)
        self.cause = cause
        self.fix = fix
        self.log = log  # of the compiler, if it ran

    def __str__(self) -> str:
        return f"{self.cause}; {self.fix}"


class BuildError(RuntimeError):
    """An op library could not be found, built or loaded.

    The last line of its text is the cause and the fix; the lines above it are the routes tried.

    Args:
        op: the name of the op.
        cause: what went wrong, for a compiler its first error line.
        fix: the command or change that mends it.
        routes: one line for each way that was tried.
        log: the compiler's whole output.
    """

    def __init__(
        self, op: str, cause: str, fix: str, routes: tuple[str, ...] = (), log: Path | None = None
    ) -> None:
        super().__init__(
            op, cause, fix, routes, log
        )  # as the arguments are, so that pickling works
        self.op = op
        self.cause = cause
        self.fix = fix
        self.routes = routes
        self.log = log

    @classmethod
    def of(cls, op: str, missing: Unavailable, routes: Iterable[str] = ()) -> "BuildError":
        """Say of which op something is missing."""
        return cls(op, missing.cause, missing.fix, tuple(routes), missing.log)

    def __str__(self) -> str:
        lines = [f"{self.op}: no library could be loaded"] if self.routes else []
        lines += [f"  {route}" for route in self.routes]
        if self.log is not None:
            lines.append(f"  log: {self.log}")
        return "\n".join([*lines, f"{self.op}: {self.cause}; {self.fix}"])

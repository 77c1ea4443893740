"""What was replaced in a model and what not, as a table."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Report:
    """What ``patch`` has done; printed, it is a table.

    Args:
        replaced: by the name of a module, the ops that its forward calls now.
        left: by the name of a module that was left as it is, why.
        classes: by the name of each of these, that of its class.
    """

    replaced: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    left: Mapping[str, str] = field(default_factory=dict)
    classes: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return a line for each kind of modules."""
        lines: dict[tuple[str, str], list[str]] = {}
        for name, ops in self.replaced.items():
            lines.setdefault((self.classes[name], ", ".join(ops)), []).append(name)
        for name, reason in self.left.items():
            lines.setdefault((self.classes[name], f"left: {reason}"), []).append(name)
        rows = [("class", "modules", "first", "forward")]
        rows += [(k, str(len(names)), names[0] or ".", by) for (k, by), names in lines.items()]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        return "\n".join(
            "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)),
                       row[3]])
            for row in rows
        )  # fmt: skip

"""What the tables of docs/benchmarks.md are made of: lines, columns, and the texts of cells."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
Run = Mapping[str, Any]


@dataclass(frozen=True)
class Line:
    """A line of a table.

    Args:
        label: its first cell; empty for the row's own title.
        bench: which benchmark, as in the name of its module.
        work: the name of the work.
    """

    label: str
    bench: str
    work: str


class Machine:
    """What was measured on one machine.

    Args:
        record: the contents of its file.
    """

    def __init__(self, record: Mapping[str, Any]) -> None:
        self.name: str = record["name"]
        self._found: dict[tuple[str, str, int], tuple[Row, Run]] = {
            (row["bench"], row["work"], row["threads"]): (row, run)
            for run in record["runs"]
            for row in run["rows"]
        }

    def find(self, line: Line, threads: int) -> tuple[Row, Run] | None:
        """Return a row and the run that it is of, or None."""
        return self._found.get((line.bench, line.work, threads))


@dataclass(frozen=True)
class Column:
    """A column: a machine and the number of threads; what goes into a cell, given a row.

    Args:
        title: of the column.
        machine: name of the file of the machine.
        threads: as in the row.
        cell: makes the text.
    """

    title: str
    machine: str
    threads: int
    cell: Callable[[Row], str]


@dataclass(frozen=True)
class Table:
    """A table; lines that no machine has are left out.

    Args:
        title: of the first column.
        columns: the others.
        lines: in order.
    """

    title: str
    columns: Sequence[Column]
    lines: Sequence[Line]


def rendered(table: Table, machines: Mapping[str, Machine]) -> str:
    """Return a table and where its figures come from; nothing if none was measured."""
    heads = [table.title, *(column.title for column in table.columns)]
    lines = [_cells(heads), _cells(["---"] * len(heads))]
    commands: dict[str, dict[str, None]] = {}  # by where they were run; these are ordered sets
    for line in table.lines:
        cells, title = [], ""
        for column in table.columns:
            machine = machines[column.machine]
            row, run = machine.find(line, column.threads) or (None, {})
            cells.append(column.cell(row) if row else "")
            if row:
                title = title or line.label or row.get("title", row["work"])
                command = f"`{run['command'].rpartition('-m benchmarks.')[2]}`"
                commands.setdefault(_source(machine.name, run), {})[command] = None
        if title:
            lines.append(_cells([title, *cells]))
    if not commands:
        return ""
    lines.append("")
    lines += [f"- {source}: {', '.join(found)}" for source, found in commands.items()]
    return "\n".join(lines) + "\n"


def _cells(texts: Sequence[str]) -> str:
    return f"| {' | '.join(texts)} |"


def _source(machine: str, run: Run) -> str:
    """Return where and when a run was."""
    known = run["environment"]
    words = [machine, known.get("processor", ""), f"torch {known['torch']}", known.get("fio", "")]
    kept = "from the README of" if run.get("transcribed") else "at"
    return f"{', '.join(filter(None, words))}, {run['date']}, {kept} {run['commit']}"


def ours(row: Row) -> Mapping[str, float]:
    """Return what was measured of ours."""
    found: Mapping[str, float] = next(iter(row["contenders"].values()))
    return found


def best_rivals(row: Row) -> list[str]:
    """Return of each kind of rival the fastest; the kind is the first word of its name."""
    best: dict[str, str] = {}
    for name in row["times"]:
        kind = re.split(r"\W", name)[0]
        if name not in row["ceilings"] and (
            kind not in best or row["times"][name] < row["times"][best[kind]]
        ):
            best[kind] = name
    return list(best.values())


def milliseconds(row: Row, name: str) -> str:
    """Return what a contender took, or nothing if that is not known."""
    found = row["contenders"].get(name, {})
    return digits(1e3 * found["median"]) if "median" in found else ""


def rate(row: Row, name: str) -> str:
    """Return how many GB/s a contender moved."""
    found = row["contenders"].get(name, {})
    return f"{row['bytes'] / found['median'] / 1e9:.2f}" if "median" in found else ""


def times(row: Row, name: str) -> str:
    """Return how many times as fast as a contender ours is."""
    value: float = row["times"][name]
    return f"{value:.2f}" if value < 10 else digits(value)


def digits(value: float) -> str:
    """Return a number with three significant digits, without an exponent."""
    short = f"{value:#.3g}"
    return f"{float(short):.0f}" if "e" in short else short.rstrip(".")


def our_time(row: Row) -> str:
    """Ours, in milliseconds and TB/s."""
    return f"{milliseconds(row, _name_of_ours(row))} ms, {terabytes(row)}"


def terabytes(row: Row) -> str:
    """Ours, in TB/s, or nothing if that is not known."""
    median = ours(row).get("median")
    return f"{row['bytes'] / median / 1e12:.2f} TB/s" if median else ""


def rates(row: Row) -> str:
    """GB/s of ours, then of the best of each kind: how many times as fast ours is."""
    return "; ".join(filter(None, [rate(row, _name_of_ours(row)), _rivals(row, rate, "")]))


def _name_of_ours(row: Row) -> str:
    return str(next(iter(row["contenders"])))


def rivals(row: Row) -> str:
    """The best of each kind: its milliseconds, and how many times as fast ours is."""
    return _rivals(row, milliseconds, " ms")


def all_others(row: Row) -> str:
    """All but ceilings: milliseconds, and how many times as fast ours is."""
    names = [name for name in row["times"] if name not in row["ceilings"]]
    return _beside(row, names, milliseconds, " ms")


def _rivals(row: Row, value: Callable[[Row, str], str], unit: str) -> str:
    return _beside(row, best_rivals(row), value, unit)


def _beside(row: Row, names: Sequence[str], value: Callable[[Row, str], str], unit: str) -> str:
    texts = []
    for name in names:
        known = value(row, name)
        texts.append(f"{name}{known and f' {known}{unit}'}: {times(row, name)}")
    return "; ".join(texts)


def beside_ceiling(row: Row) -> str:
    """How near ours comes to what only moves as many bytes, the fastest of them."""
    near = [row["times"][name] for name in row["ceilings"] if name in row["times"]]
    return f"{min(near):.2f}" if near else ""


def in_short(row: Row) -> str:
    """Milliseconds of ours and of the best rival: how often as fast (beside the ceiling)."""
    name = min(best_rivals(row), key=lambda name: float(row["times"][name]))
    near = beside_ceiling(row)
    both = f"{milliseconds(row, _name_of_ours(row))}, {milliseconds(row, name)}"
    return f"{both}: {times(row, name)}{near and f' ({near})'}"


def cpu_per_gib(row: Row, contender: int) -> str:
    """Return the seconds of the CPU that the first, second, ... contender takes for a GiB."""
    spent: float = [*row["contenders"].values()][contender]["cpu"]
    return f"{spent / (row['bytes'] / 2**30):.3f}"


def seconds(row: Row) -> str:
    """Ours, in seconds."""
    return f"{ours(row)['median']:.3g} s"


def cpu_functional(row: Row) -> str:
    """Ours, in GB/s; how many times as fast it is as the best of torch, and as each ceiling."""
    moved = rate(row, _name_of_ours(row))
    others = [*best_rivals(row), *row["ceilings"]]
    return "; ".join([moved, *(times(row, name) for name in others)])

"""What quantize_model has done: bytes and errors of each layer, and what was left and why."""

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_LEAST_NAME = 12  # columns
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_FIGURES = f"{'before':>11}{'after':>11}{'largest':>9}{'rms':>10}"


@dataclass(frozen=True)
class LayerReport:
    """One layer.

    Args:
        shape: of its weight, (out, in).
        bytes_before: of the weight as floats.
        bytes_after: of codes, scales and offsets.
        largest_error: of an element, in parts of what its group allows: half the scale, and of nf4
            and fp8 half the widest step between codes. It keeps to 1, but for the rounding of
            floats, with offsets 2^-15. That code * scale + offset is rounded to float32 does not
            count; it comes on top where elements differ by little beside their size. NaN if the
            weight is not finite.
        rms_error: of all elements.
        also: other names of the same layer.
    """

    shape: tuple[int, int]
    bytes_before: int
    bytes_after: int
    largest_error: float
    rms_error: float
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """A model.

    Args:
        format: of the weights.
        layers: what was quantized, by name.
        kept: linear layers that were not, with the reason.
        bytes_before: of all parameters and buffers of the model, but for sparse ones.
        bytes_after: the same now.
    """

    format: str
    layers: Mapping[str, LayerReport]
    kept: Mapping[str, str]
    bytes_before: int
    bytes_after: int

    def table(self, columns: int | None = None) -> str:
        """Return all of it as lines.

        Args:
            columns: that a line may have, 60 or more; None: those of the terminal, or 80.
        """
        room = shutil.get_terminal_size().columns if columns is None else columns
        return "\n".join(self._lines(max(room, 60)))

    def __str__(self) -> str:
        return self.table()

    def _lines(self, columns: int) -> Iterator[str]:
        longest = max(map(len, (*self.layers, *self.kept)), default=0)
        width = max(min(longest, columns - len(_FIGURES)), _LEAST_NAME)
        if self.layers:
            yield f"{self.format:<{width}}{_FIGURES}"
        for name, layer in self.layers.items():
            errors = f"{layer.largest_error:>9.3f}{layer.rms_error:>10.2e}"
            sizes = f"{_shown(layer.bytes_before):>11}{_shown(layer.bytes_after):>11}"
            yield f"{_cut(name, width):<{width}}{sizes}{errors}"
            for other in layer.also:
                yield f"{_cut(other, width)}: {_cut(f'is {name}', columns - width - 2)}"
        for name, reason in self.kept.items():
            yield f"{_cut(name, width)}: {_cut(reason, columns - width - 2)}"
        part = self.bytes_after / self.bytes_before if self.bytes_before else 1
        of_all = f"{_shown(self.bytes_before)} to {_shown(self.bytes_after)} ({part:.1%})"
        yield f"{len(self.layers)} layers quantized, {len(self.kept)} kept"
        yield f"model {of_all}"


def _cut(text: str, width: int) -> str:
    """Return a text of a width at most; of a name both ends tell more than the middle."""
    if len(text) <= width:
        return text
    first = (width - 3) // 2
    return f"{text[:first]}...{text[len(text) - (width - 3 - first) :]}"


def _shown(count: int) -> str:
    """Write a size, such as 1.25 MiB."""
    value, unit = float(count), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.4g} {_UNITS[unit]}"

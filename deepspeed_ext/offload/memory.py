"""How much host memory an offloaded optimizer may take beside weights and state."""

from typing import NamedTuple


class Memory(NamedTuple):
    """Most bytes of host memory for this and that.

    Attributes:
        shadow: for shadow buffers, which speculative steps write to.
        gradients: for gradients on their way; None: for all of them.
    """

    shadow: int
    gradients: int | None = None

    @property
    def spare(self) -> int:
        """`shadow`, by its older name."""
        return self.shadow

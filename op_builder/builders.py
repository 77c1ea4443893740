"""The builder classes that users know, such as CPUAdamBuilder, made from the registry."""

from collections.abc import Callable
from typing import Any, ClassVar

from . import loading
from .log import logger
from .registry import OPS, spec_of

_ACRONYMS = {"cpu": "CPU", "io": "IO", "ltd": "LTD", "sgd": "SGD"}


class OpBuilder:
    """Builds and loads one op; its subclasses only name it."""

    NAME = ""
    # What `load` returns, from the op's name. The package around this one sets it; alone, it is the
    # path of the library, as of `op_builder.load`.
    interface_of: ClassVar[Callable[[str], Any]] = staticmethod(loading.load)

    def load(self, verbose: bool = True) -> Any:
        """Load the op's library, compiling it when there is none yet.

        Args:
            verbose: taken for code that passes it; what is compiled is logged either way.

        Returns:
            A module with the functions of the op; for async_io, with what deepspeed_ext.io has.

        Raises:
            BuildError: every route to the library failed.
        """
        loading.load(self.NAME)
        return type(self).interface_of(self.NAME)

    def is_compatible(self, verbose: bool = False) -> bool:
        """Tell whether `load` would work here; with `verbose`, log the reasons why not."""
        _, reasons = loading.status(spec_of(self.NAME))
        for reason in reasons if verbose else []:
            logger.warning("%s: %s", self.NAME, reason)
        return not reasons


def class_name(op: str) -> str:
    """Return the builder's name: cpu_adam gives CPUAdamBuilder."""
    return "".join(_ACRONYMS.get(word, word.capitalize()) for word in op.split("_")) + "Builder"


BUILDERS: dict[str, type[OpBuilder]] = {
    class_name(spec.name): type(
        class_name(spec.name), (OpBuilder,), {"NAME": spec.name, "__module__": __name__}
    )
    for spec in OPS
}


def __getattr__(name: str) -> type[OpBuilder]:
    try:
        return BUILDERS[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None

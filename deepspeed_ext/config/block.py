"""Block: what all objects of the typed tree have in common."""

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict

from deepspeed_ext.config.kinds import Key


class Block(BaseModel):
    """An object of the config. `place` is its path, with a dot behind it."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)
    place: ClassVar[str] = ""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return a key by another of its names."""
            for field, info in type(self).model_fields.items():
                if any(isinstance(each, Key) and name in each.older for each in info.metadata):
                    return getattr(self, field)
            return super().__getattr__(name)

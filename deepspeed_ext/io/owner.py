"""Objects that own what there is once: open files, locked memory, transfers under way."""

from typing import Any


class Owner:
    """Refuses copy, deepcopy and pickle, which all ask here: the end of one would be another's."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{type(self).__name__}: it was to be copied or pickled, expected no copy of what has"
            " open files, locked memory or transfers; share it, or make another one"
        )

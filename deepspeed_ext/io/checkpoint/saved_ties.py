"""How a file notes which names stand for the tensor of another one.

Each such name is in the metadata, with the name of the tensor that is kept as its text, as the
safetensors package notes them too. Any program may write a text that happens to be the name of a
tensor, so one more entry lists the names that `save` means; without it there are none, but in
files of the first versions, which are known by their layout.
"""

import json
import reprlib
from collections.abc import Container, Mapping

from deepspeed_ext.io.checkpoint.format import Header
from deepspeed_ext.io.checkpoint.saved_tensors import NEVER_TIED, TORCH_DTYPES, order_of

LIST = "deepspeed_ext.tied"
_PAGES = (4096, 16384, 65536)  # of machines that may have saved a file
_PAGE = _PAGES[0]


def texts_with_ties(
    metadata: Mapping[str, str], tensors: Container[str], ties: Mapping[str, str]
) -> dict[str, str]:
    """Return the metadata of a file.

    It stays what it is where nothing looks like a tie: readers may refuse what they do not expect.

    Args:
        metadata: of the caller.
        tensors: names of all tensors.
        ties: names with the names of the tensors that are kept.

    Raises:
        TypeError: metadata are no strings.
        ValueError: a name stands for something in the file.
    """
    for name, text in metadata.items():
        if not isinstance(name, str) or not isinstance(text, str):
            got = f"{reprlib.repr(name)}: {reprlib.repr(text)}"  # may be large, or contain itself
            raise TypeError(f"io.save: metadata has {got}, expected strings")
        if name in ties:
            raise ValueError(
                f"io.save: metadata[{name!r}] is another name of a tensor, expected something else:"
                " the file notes tied tensors in this way"
            )
    if LIST in metadata or LIST in ties:
        what = "metadata" if LIST in metadata else "state_dict"
        raise ValueError(
            f"io.save: {what} has the name {LIST!r}, under which the file lists tied tensors,"
            " expected another one"
        )
    texts = {**metadata, **ties}
    if not any(_may_be_tie(name, text, tensors) for name, text in metadata.items()) and not ties:
        return texts
    return {**texts, LIST: json.dumps(sorted(ties))}


def ties_in(header: Header) -> dict[str, str]:
    """Return the names that stand for tensors of other names, with these."""
    tensors = header.tensors
    found = {n: text for n, text in header.metadata.items() if _may_be_tie(n, text, tensors)}
    if LIST in header.metadata:
        listed = _names(header.metadata[LIST])
        return {name: kept for name, kept in found.items() if name in listed}
    return found if found and _is_of_a_first_version(header, found) else {}


def without_ties(metadata: Mapping[str, str], ties: Container[str]) -> dict[str, str]:
    """Return what the caller of `save` gave as metadata."""
    return {name: text for name, text in metadata.items() if name not in ties and name != LIST}


def _may_be_tie(name: str, text: str, tensors: Container[str]) -> bool:
    return text in tensors and name not in tensors and name != NEVER_TIED


def _names(text: str) -> list[str]:
    """Return the names in a list; of a text that `save` has not written, none."""
    try:
        names = json.loads(text)
    except (ValueError, RecursionError):
        return []
    return names if isinstance(names, list) else []


def _is_of_a_first_version(header: Header, ties: Mapping[str, str]) -> bool:
    """Tell whether `save` made a file before it listed ties.

    Its data begin on a page, and lie in an order of its own; the tensor that is kept has the first
    of its names.
    """
    if header.data_start % _PAGE:
        return False
    if any(kept > name and kept != NEVER_TIED for name, kept in ties.items()):
        return False
    return any(_is_laid_out(header, page) for page in _PAGES)


def _is_laid_out(header: Header, page: int) -> bool:
    tensors = header.tensors
    if not all(entry.dtype in TORCH_DTYPES for entry in tensors.values()):
        return False
    position = 0
    for name in sorted(
        tensors,
        key=lambda name: order_of(
            name,
            tensors[name].end - tensors[name].begin,
            TORCH_DTYPES[tensors[name].dtype].itemsize,
            page,
        ),
    ):
        if tensors[name].begin != position:
            return False
        position = tensors[name].end
    return True

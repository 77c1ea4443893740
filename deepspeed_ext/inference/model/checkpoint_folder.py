"""A model's folder: what it says of itself, and its tensors, read a layer at a time."""

import re
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from deepspeed_ext.io import AsyncIO, SavedTensor, inspect
from deepspeed_ext.io.checkpoint.neighbour_reader import BESIDE_BYTES, ReusedPages
from deepspeed_ext.io.checkpoint.shards import Shards, read_json
from deepspeed_ext.quantization.files import saved_buffers
from deepspeed_ext.quantization.filling import notes_in
from deepspeed_ext.quantization.layout import MOST_NOTE_BYTES, WeightLayout
from deepspeed_ext.quantization.linear import NOTE
from deepspeed_ext.quantization.published import packing_of, settings_in
from deepspeed_ext.quantization.stored_weight import Packing
from deepspeed_ext.threads import AwaitedThread, answer

_OP = "init_inference"
_ADAPTER = "adapter_config.json"  # transformers loads what it names on top of the weights
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_LAYERS_AT_ONCE = 2  # one is waited for or worked on, one read
_CODES = (torch.int32, torch.int64, torch.int8, torch.uint8)


class ModelFolder:
    """A folder as Hugging Face's libraries save it; nothing of it is run, and nothing downloaded.

    Args:
        path: of the folder.

    Attributes:
        path: likewise.
        config: of config.json.
        layers: those that `save_quantized` has saved, by name, with layout and dtype.
        buffers: that it has saved, too, by name; of these `shards` knows nothing.
        packing: how weights are stored that others have quantized; None: as floats, or as `layers`.
        generation_config: of generation_config.json; empty if there is none.
        shards: the files with tensors.

    Raises:
        ValueError: a file is not what it should be.
        OSError: a file is missing or cannot be read.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise FileNotFoundError(
                f"{_OP}: model is {str(path)!r}, expected a module, or a folder with config.json"
                " and safetensors files; nothing is downloaded"
            )
        self.path = path
        self._check_adapter()
        self.config = _fields(path / "config.json")
        self.generation_config = self.fields_of("generation_config.json")
        self.shards = Shards(_OP, path)
        self.layers = self._saved_layers()
        self.buffers = self._saved_buffers() if self.layers else {}
        self.packing: Packing | None = None
        settings = settings_in(_OP, path, self.config)
        if settings is not None and not self.layers:  # else they tell of before it was loaded
            self.packing = packing_of(f"{_OP}: {path}", settings)

    def described(self) -> "Described":
        """Return the tensors without values."""
        return Described(self.shards.tensors)

    def fields_of(self, name: str) -> dict[str, Any]:
        """Return what a file of the folder says, nothing if it is not there."""
        path = self.path / name
        return _fields(path) if path.exists() else {}

    def _saved_layers(self) -> dict[str, tuple[WeightLayout, torch.dtype]]:
        files = self.shards.files
        notes = [
            n for n in files if n.endswith(f".{NOTE}") and f"{n.removesuffix(NOTE)}codes" in files
        ]
        for name in notes:
            if self.shards.tensors[name].nbytes > MOST_NOTE_BYTES:
                raise ValueError(f"{_OP}: {self.path}: {name} is no note of a quantized layer")
        with AsyncIO() as engine:
            loaded = self.shards.load(notes, torch.device("cpu"), engine) if notes else {}
        return notes_in(f"{_OP}: {self.path}", loaded)

    def _saved_buffers(self) -> dict[str, Tensor]:
        """Take those out that are in no state dict."""
        names = set[str]()
        for file in set(self.shards.files.values()):
            names |= saved_buffers(inspect(file).metadata)
        names &= self.shards.files.keys()
        with AsyncIO() as engine:
            found = self.shards.load(sorted(names), torch.device("cpu"), engine) if names else {}
        for name in names:
            del self.shards.files[name], self.shards.tensors[name]
        return found

    def _check_adapter(self) -> None:
        if (self.path / _ADAPTER).exists():  # of which the other files say nothing
            raise ValueError(
                f"{_OP}: {self.path} has {_ADAPTER}, expected a model without an adapter beside it;"
                " give the folder of the adapter as adapter, or remove it"
            )


class Described(Mapping[str, Tensor]):
    """Tensors on meta in the place of others; it notes which were asked for.

    Args:
        tensors: those others.
        parts: the last names of tensors that may have whole numbers.

    Attributes:
        asked: names, in the order in which they were asked for.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor] | Mapping[str, SavedTensor],
        parts: Collection[str] = (),
    ) -> None:
        self._tensors, self._parts = tensors, parts
        self.asked: dict[str, None] = {}

    def __getitem__(self, name: str) -> Tensor:
        of = self._tensors[name]
        may_be_codes = name.rpartition(".")[2] in self._parts
        if of.dtype not in (_FLOATS + _CODES if may_be_codes else _FLOATS):
            dtype = of.format_dtype if isinstance(of, SavedTensor) else of.dtype
            raise ValueError(
                f"{_OP}: {name} has dtype {dtype}, expected float32, bfloat16, float16 or float64"
            )
        self.asked[name] = None
        return torch.empty(of.shape, dtype=of.dtype, device="meta")

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class FolderTensors(Mapping[str, Tensor]):
    """The tensors of files, read when they are asked for, each once.

    Those of a layer are read together, as are those between layers, and the next ones while these
    are worked on, so that no more than two layers lie about. On the CPU these share memory, which
    is used again and again: a tensor of a layer has its values until one of another group is asked
    for. Those of no layer have memory of their own, and may be kept.

    Use it as a context: it has a thread and an I/O engine.

    Args:
        shards: the files.
        names: of all tensors that will be asked for, in this order.
        device: where they are to be; cuda with its number.
        progress: whether a bar is drawn on stderr, where that is a terminal.
        on_host: the last names of tensors that stay on the CPU.

    Attributes:
        own: the names of tensors that are of no layer.
    """

    def __init__(
        self,
        shards: Shards,
        names: Sequence[str],
        device: torch.device,
        progress: bool = False,
        on_host: Collection[str] = (),
    ) -> None:
        self._shards, self._device, self._on_host = shards, device, on_host
        self._groups = _by_layer(names)
        self.own = frozenset(name for name in names if _layer_of(name) is None)
        self._room = max((self._room_of(group) for group in self._groups), default=0)
        self._pages: deque[tuple[Sequence[str], ReusedPages]] = deque()  # the next to use first
        self._group_of = {name: i for i, group in enumerate(self._groups) for name in group}
        self._held: dict[str, Tensor] = {}
        self._taken = 0  # groups, of which all before were taken, too
        self._ahead: Future[dict[str, Tensor]] | None = None  # of the next group
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._engine = AsyncIO(threads=2)  # memory is fresh: each thread has it cleared
        self._readers: deque[AwaitedThread] = deque()  # those that may not be over
        self._bar = _bar(sum(shards.tensors[n].nbytes for n in names)) if progress else None

    def __enter__(self) -> "FolderTensors":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            with ExitStack() as each:  # all of them, whichever is interrupted
                for reader in self._readers:
                    each.callback(_await, reader)
        finally:
            self._ahead = None
            self._held.clear()
            self._pages.clear()
            self._engine.close()
            if self._bar is not None:
                self._bar.close()

    def __getitem__(self, name: str) -> Tensor:
        number = self._group_of[name]
        while name not in self._held and self._taken <= number:
            self._take_next()
        if name in self._held:
            return self._held.pop(name)
        return self._begin([name]).result()[name]  # once more

    def __contains__(self, name: object) -> bool:
        return name in self._shards.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._shards.tensors)

    def __len__(self) -> int:
        return len(self._shards.tensors)

    def _take_next(self) -> None:
        """Hold the tensors of the next group, and have the one after it read.

        It begins before this one has ended: between the two the disk would have nothing to do.
        """
        names, ahead = self._groups[self._taken], self._ahead
        if ahead is None:
            ahead = self._begin_group(self._taken)
        self._ahead = None
        self._taken += 1
        if self._taken < len(self._groups):
            self._ahead = self._begin_group(self._taken)
        self._held.update(ahead.result())
        if self._bar is not None:
            self._bar.update(sum(self._shards.tensors[name].nbytes for name in names))

    def _begin_group(self, number: int) -> Future[dict[str, Tensor]]:
        names = self._groups[number]
        if names[0] in self.own:
            self._pages.clear()  # mostly after the last layer
            return self._begin(names)
        if len(self._pages) < _LAYERS_AT_ONCE:
            pages = ReusedPages(self._room)
        else:
            before, pages = self._pages.popleft()
            for name in before:  # that nobody has asked for
                self._held.pop(name, None)
            pages.give_again()
        self._pages.append((names, pages))
        return self._begin(names, pages)

    def _begin(
        self, names: Sequence[str], pages: ReusedPages | None = None
    ) -> Future[dict[str, Tensor]]:
        """Have tensors read by a thread, when the one before the last is over."""
        while len(self._readers) >= _LAYERS_AT_ONCE:
            _await(self._readers[0])
            self._readers.popleft()
        future: Future[dict[str, Tensor]] = Future()
        work = partial(answer, future, partial(self._load, names, pages))
        reader = AwaitedThread(work, "deepspeed_ext.inference.model.checkpoint_folder")
        self._readers.append(reader)
        reader.start()
        return future

    def _load(self, names: Sequence[str], pages: ReusedPages | None) -> dict[str, Tensor]:
        apart = [name for name in names if self._is_on_host(name)]
        with torch.cuda.stream(self._stream):  # that of who asks; of the CPU there is none
            if pages is not None or not apart:
                return self._shards.load(names, self._device, self._engine, pages, apart)
            rest = [name for name in names if name not in apart]
            on_host = self._shards.load(apart, torch.device("cpu"), self._engine)
            return on_host | self._shards.load(rest, self._device, self._engine)

    def _is_on_host(self, name: str) -> bool:
        return name.rpartition(".")[2] in self._on_host

    def _room_of(self, names: Sequence[str]) -> int:
        """Return what the memory of a layer has to have on the CPU."""
        if _layer_of(names[0]) is None:
            return 0
        on_cpu = self._device.type == "cpu"
        some = [name for name in names if on_cpu or self._is_on_host(name)]
        return sum(self._shards.tensors[name].nbytes + BESIDE_BYTES for name in some)


def _await(reader: AwaitedThread) -> None:
    if reader.ident:  # else it could not be started
        reader.await_end()


def _bar(total: int) -> Any:
    """Return a bar of bytes; it comes with a thread, also where it is not drawn."""
    return tqdm(total=total, desc="loading", unit="B", unit_scale=True, disable=None, leave=False)


def reading_bytes(shards: Shards, names: Sequence[str]) -> int:
    """Return how many bytes of files lie about at most while all are taken."""
    groups = _by_layer(names)
    nbytes = [sum(shards.tensors[name].nbytes for name in group) for group in groups]
    is_layer = [_layer_of(group[0]) is not None for group in groups]
    largest = max((n for n, is_one in zip(nbytes, is_layer, strict=True) if is_one), default=0)
    sizes = [largest if is_one else n for n, is_one in zip(nbytes, is_layer, strict=True)]
    return max(map(sum, zip(sizes, [*sizes[1:], 0], strict=True)), default=0)


def _layer_of(name: str) -> str | None:
    """Return how the names of a layer begin, up to their first number; None: it is of none."""
    found = re.match(r"(?:[^.]*\.)*?\d+\.", name)
    return found.group() if found else None


def _by_layer(names: Sequence[str]) -> list[list[str]]:
    """Cut names into those of a layer, alike up to their first number, and of none in between."""
    groups: list[list[str]] = []
    last = None
    for name in dict.fromkeys(names):
        layer = _layer_of(name)
        if groups and layer == last:
            groups[-1].append(name)
        else:
            groups.append([name])
        last = layer
    return groups


def _fields(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(
            f"{_OP}: {path.parent} has no {path.name}, expected the folder of a model, as"
            " save_pretrained writes it"
        )
    fields = read_json(_OP, path)
    if not isinstance(fields, dict):
        raise ValueError(f"{_OP}: {path} has {fields!r:.60}, expected an object")
    return fields

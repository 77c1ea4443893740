"""Init: models built without memory, then filled in shards, block by block."""

import contextlib
import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed_ext.dtensors import first_index, is_cut_in_rows, is_dtensor, local, part_for
from deepspeed_ext.io import AsyncIO
from deepspeed_ext.io.engine.window import Window
from deepspeed_ext.zero.drawing import Drawing, is_untouched
from deepspeed_ext.zero.memory import allocate, is_empty, note_filled
from deepspeed_ext.zero.names import plain_name
from deepspeed_ext.zero.saved_model import TensorSlice, read_rows, slices_in
from deepspeed_ext.zero.streaming import computes_on
from deepspeed_ext.zero.units import Unit, named_tensors, units_of

_OP = "zero.Init"
_SHOWN = 8  # names in an error
_HELD = 256 << 20  # bytes that are read at once
Files = str | os.PathLike[str]


class Init:
    """Build a model without memory; after zero.shard, give each process its own part of it.

        with zero.Init(seed=0) as init:
            model = GPT(config)
        zero.shard(model, stage=3)
        init.fill(model)

    Values come from files, of which each process reads its own rows; what is not in them from the
    modules' reset_parameters and from `init`. These run on all processes for a whole block at a
    time, with the same random numbers, and each process keeps its part: the numbers are the same
    for any number of processes. They are those of a model that is built without this after
    torch.manual_seed(seed) on the same device, if its modules are listed in the order in which they
    were made, and its constructor draws in reset_parameters and then, at the end, by apply(init). A
    tied parameter is reset by the first module that has it, and for others init may only write it.

    Args:
        seed: of the random numbers.
        files: a safetensors file, Hugging Face's index, a folder with either, or several of these.
        rename: turns a name in the files into one in the model's state dict, None leaves the
            tensor out; None: they are the same. What torch.compile and checkpoint_wrapper put into
            names is left out on both sides.
        init: called with each module, those inside of it first, when it was reset; writes what
            reset_parameters does not, or writes it anew.

    See: torch.device("meta"), under which the model is built.
    """

    def __init__(
        self,
        seed: int = 0,
        files: Files | Iterable[Files] = (),
        rename: Callable[[str], str | None] | None = None,
        init: Callable[[nn.Module], object] | None = None,
    ) -> None:
        self._seed = seed
        self._files = [files] if isinstance(files, str | os.PathLike) else list(files)
        self._rename = rename
        self._init = init
        self._meta: list[contextlib.AbstractContextManager[Any]] = []

    def __enter__(self) -> "Init":
        meta = torch.device("meta")
        meta.__enter__()
        self._meta.append(meta)
        return self

    def __exit__(self, *error: Any) -> None:
        self._meta.pop().__exit__(*error)

    def fill(self, model: nn.Module, device: torch.device | str | None = None) -> nn.Module:
        """Give all parameters and buffers on meta memory and values; others stay as they are.

        Those of a model that streams, which have memory to rest in, get values there.

        Nothing is exchanged between processes.

        Args:
            model: sharded, or not: then it is filled whole.
            device: of what is not sharded, and where random numbers are drawn; None: that of the
                mesh, or where a model that streams computes, or the CPU.

        Returns:
            The model.

        Raises:
            ValueError: something is filled by nothing, a file has what the model has not, or in
                another shape. The text names it, and the model is of no use then.
            OSError: a file cannot be read.
        """
        device = _device_of(model) if device is None else torch.device(device)
        wanted = {n: t for n, t in named_tensors(model) if is_empty(t)}
        slices = self._slices(wanted, set(map(plain_name, model.state_dict())))
        units = units_of(model, set(wanted))
        with torch.no_grad():
            for tensor in dict.fromkeys(wanted.values()):
                if tensor.is_meta:
                    allocate(tensor, device)
            unfilled = self._draw(units, set(slices), device)
            if unfilled:
                _refuse_unfilled(unfilled)
            self._read(model, slices)
        for tensor in wanted.values():
            note_filled(tensor)
        return model

    def _slices(self, wanted: dict[str, Tensor], known: set[str]) -> dict[str, TensorSlice]:
        """Return where the values of tensors lie that are in files, all checked."""
        found: dict[str, TensorSlice] = {}
        for path in self._files:
            for name, saved in slices_in(_OP, path).items():
                renamed = name if self._rename is None else self._rename(name)
                if renamed is None:
                    continue
                renamed = plain_name(renamed)
                if renamed not in known:
                    raise ValueError(
                        f"{_OP}: {saved.path} has {renamed!r}, expected names in the model's state"
                        " dict; let rename give None for what is to be left out"
                    )
                if renamed in wanted:
                    _check_fits(renamed, saved, wanted[renamed])
                    found[renamed] = saved
        # A tied tensor may be saved under one of its names.
        of_tensor = {wanted[name]: saved for name, saved in found.items()}
        return {name: of_tensor[t] for name, t in wanted.items() if t in of_tensor}

    def _draw(self, units: list[Unit], read: set[str], device: torch.device) -> list[str]:
        """Let modules fill what no file has; return the names of what they did not."""
        drawing = Drawing(self._seed, self._init, device)
        missing = [Unit(unit.modules, unit.tensors, unit.wanted - read) for unit in units]
        missing = [unit for unit in missing if unit.wanted]
        return drawing.fill(missing, _keep)

    def _read(self, model: nn.Module, slices: dict[str, TensorSlice]) -> None:
        done: set[Tensor] = set()
        window = Window(_HELD)
        with AsyncIO() as engine, contextlib.ExitStack() as stack:
            stack.callback(window.abandon)
            for name, tensor in named_tensors(model):
                if name in slices and tensor not in done:
                    done.add(tensor)
                    _read_part(engine, window, slices[name], tensor)
            window.finish()


def _keep(whole: Tensor, tensor: Tensor, *, is_again: bool = False) -> None:
    kept = local(tensor)
    part = part_for(whole, tensor).to(kept.device)
    kept.copy_(torch.where(is_untouched(part), kept, part) if is_again else part)


def _read_part(engine: AsyncIO, window: Window, saved: TensorSlice, tensor: Tensor) -> None:
    if not is_dtensor(tensor) or is_cut_in_rows(tensor):
        part = local(tensor)
        first = first_index(tensor) if part.numel() else 0
        read_rows(engine, window, saved, first, part.detach())
        return
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=local(tensor).device)
    read_rows(engine, window, saved, 0, whole, partial(_keep, whole, tensor))


def _check_fits(name: str, saved: TensorSlice, tensor: Tensor) -> None:
    kinds = [dtype.is_floating_point for dtype in (saved.dtype, tensor.dtype)]
    if saved.shape != tuple(tensor.shape) or (saved.dtype != tensor.dtype and not all(kinds)):
        raise ValueError(
            f"{_OP}: tensor {name!r} of {saved.path} has shape {list(saved.shape)} of"
            f" {saved.dtype}, expected {list(tensor.shape)} of {tensor.dtype}"
        )


def _device_of(model: nn.Module) -> torch.device:
    for param in model.parameters():
        if is_dtensor(param):
            return torch.device(param.device_mesh.device_type)
    return computes_on(model) or torch.device("cpu")


def _refuse_unfilled(names: list[str]) -> None:
    shown = ", ".join(map(repr, names[:_SHOWN])) + (", ..." if len(names) > _SHOWN else "")
    raise ValueError(
        f"{_OP}: {shown} {'is' if len(names) == 1 else 'are'} filled by no file, reset_parameters"
        " or init=, expected values for all parameters and buffers; write them in init="
    )

"""A checkpoint of this library, written as a universal one of DeepSpeed's.

See: DeepSpeed 0.19, runtime/base_optimizer.py and runtime/zero/stage3.py, for what they load.
"""

import errno
import os
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from deepspeed_ext.io import AsyncIO
from deepspeed_ext.io.checkpoint.new_file import NewFile
from deepspeed_ext.io.regular_file import naming, path_text, sync_folder
from deepspeed_ext.optim.formats import MASTER, REMAINDER
from deepspeed_ext.zero.checkpoint.consolidate import SavedWeights
from deepspeed_ext.zero.checkpoint.folder import folder_of
from deepspeed_ext.zero.checkpoint.saving import CLIENT, name_of_process
from deepspeed_ext.zero.checkpoint.training_state import COMMON, OPTIMIZER, TrainingReader
from deepspeed_ext.zero.checkpoint.weight_files import Progress
from deepspeed_ext.zero.counters import told
from deepspeed_ext.zero.deepspeed_folders.model_file import OWN, PASSED_ON
from deepspeed_ext.zero.deepspeed_folders.shard_files import LATEST_UNIVERSAL, PARAMETERS, REST
from deepspeed_ext.zero.deepspeed_folders.universal import STEP, WEIGHT

_OP = "zero.export_deepspeed"
_VERSION = "0.19.8"  # of DeepSpeed, whose layout this is
_MODELS = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
_ASIDE = ".exporting-"


def export_deepspeed(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    tag: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write a checkpoint of `zero.save`, or of an engine, as a universal one of DeepSpeed's.

        zero.export_deepspeed("checkpoints", "deepspeed_run")

    DeepSpeed loads it with `{"checkpoint": {"load_universal": true}}` in its config, on any number
    of processes, in stages 1, 2 and 3, with the optimizer of the same groups. Weights and state are
    in float32 there; a parameter that was never stepped has zeros as its state. DeepSpeed reads
    neither frozen parameters nor buffers of such folders: they are in the model file, for
    `import_deepspeed`. It takes options of all groups from the first one in stage 3. A loss scale
    is not in the folder: DeepSpeed's begins. One parameter is in memory at a time.

    Args:
        folder: that `zero.save` was given, or save_checkpoint here.
        out: made if it is not there; gets a folder of the checkpoint's tag.
        tag: of the checkpoint; None: the latest.
        progress: called with bytes that were written.

    Returns:
        The folder of the checkpoint, out/tag, which latest_universal names.

    Raises:
        OSError: a file cannot be read or written, EBADMSG: bytes are not what was saved, ENOSPC:
            the disk is full; FileExistsError: out has a folder of this tag.
        ValueError: there is no optimizer in the checkpoint; parameters of a group have taken
            different numbers of steps; state is not of a parameter's shape; or a name of the
            client's is one of DeepSpeed's own.
    """
    path, home = folder_of(_OP, folder, tag), Path(path_text(_OP, out))
    made = home / path.name
    if made.exists():
        raise FileExistsError(
            errno.EEXIST, f"{_OP}: {made} is there, expected no checkpoint of this tag"
        )
    saved = _Saved(path)
    home.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(home).free
    if saved.nbytes > free:
        raise OSError(
            errno.ENOSPC,
            f"{_OP}: {made} has {saved.nbytes} bytes, expected at most the {free} that are free",
        )
    with tempfile.TemporaryDirectory(prefix=_ASIDE, dir=home) as aside, AsyncIO() as engine:
        inside = Path(aside) / path.name
        inside.mkdir()
        _write(saved, inside, Path(aside) / "scratch", engine, progress)
        os.rename(inside, made)
        sync_folder(home)
    with NewFile(home / LATEST_UNIVERSAL) as new, AsyncIO() as engine:
        text = torch.frombuffer(bytearray(path.name.encode()), dtype=torch.uint8)
        engine.write(text, new.file).result()
        new.publish()
    return made


class _Saved:
    """What a checkpoint has, as DeepSpeed wants it.

    Args:
        path: the folder of the checkpoint.

    Attributes:
        groups: of parameters, as they were saved.
        keys: of the state of each trained parameter.
        others: names of weights that were not trained, and of buffers.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = TrainingReader(path)
        self._metadata = self._reader.read_metadata()
        common = self._reader.value(self._metadata, COMMON)
        self.groups: list[dict[str, Any]] = common["groups"]
        self.extra: dict[str, Any] = common.get("extra", {})
        own = self._reader.value(self._metadata, name_of_process(0))
        self.counters, self.client = told(own[CLIENT])
        self.client.pop("loss_scaler", None)
        if not self.groups:
            raise ValueError(f"{_OP}: {path} has no state of an optimizer, expected one")
        for name in sorted(self.client.keys() & (OWN - set(PASSED_ON))):
            raise ValueError(
                f"{_OP}: {path} has {name!r} in the client's state, expected none of DeepSpeed's"
                " own names"
            )
        self._weights = SavedWeights(path, None)
        trained = {name for group in self.groups for name in group["params"]}
        self.others = [name for name in self._weights.described if name not in trained]
        self.keys: dict[str, list[str]] = {name: [] for name in trained}
        for full in self._metadata.state_dict_metadata:
            name, _, key = full.removeprefix(OPTIMIZER).rpartition(".")
            if full.startswith(OPTIMIZER) and key not in (MASTER, REMAINDER):
                self.keys[name].append(key)
        for name in trained:
            self._check(name)
        self.steps = [self._step(i, group["params"]) for i, group in enumerate(self.groups)]

    @property
    def nbytes(self) -> int:
        """What will be written, but for small files."""
        shapes = [(self.shape(name).numel(), len(keys)) for name, keys in self.keys.items()]
        others = sum(self._weights.described[name].nbytes for name in self.others)
        return sum(4 * numel * max(1, count) for numel, count in shapes) + others

    def shape(self, name: str) -> torch.Size:
        """Return the shape of a weight."""
        return self._weights.described[name].shape

    def state_keys(self, group: Mapping[str, Any]) -> list[str]:
        """Return the keys of the state that parameters of a group have, but the step."""
        return sorted({key for name in group["params"] for key in self.keys[name]} - {STEP})

    def weight(self, name: str, engine: AsyncIO) -> Tensor:
        """Return a weight, that which was trained."""
        return self._weights.read(name, engine)

    def state(self, name: str, key: str, engine: AsyncIO) -> Tensor:
        """Return state of a parameter; zeros if it was never stepped."""
        if key not in self.keys[name]:
            return torch.zeros(self.shape(name), device="cpu")
        return self._reader.tensor(self._metadata, engine, f"{OPTIMIZER}{name}.{key}")

    def _check(self, name: str) -> None:
        if name not in self._weights.described:
            raise ValueError(f"{_OP}: {self.path} has no weight {name!r}, expected that of a group")
        if "/" in name or "\0" in name:
            raise ValueError(f"{_OP}: {self.path} has the name {name!r:.80}, expected no path")
        for key in self.keys[name]:
            entry = self._metadata.state_dict_metadata[f"{OPTIMIZER}{name}.{key}"]
            shape = entry.size if isinstance(entry, TensorStorageMetadata) else None
            if key != STEP and shape != self.shape(name):
                raise ValueError(
                    f"{_OP}: {self.path} has shape {shape and list(shape)} for state {key!r} of"
                    f" {name!r}, expected {list(self.shape(name))} as the weight has"
                )

    def _step(self, index: int, names: list[str]) -> float | None:
        """Return the step of all parameters of a group that were stepped, None if none was."""
        with AsyncIO() as engine:
            steps = {
                name: float(self.state(name, STEP, engine))
                for name in names
                if STEP in self.keys[name]
            }
        first = next(iter(steps), "")
        for name, step in steps.items():
            if step != steps[first]:
                raise ValueError(
                    f"{_OP}: {self.path} has step {step:g} for {name!r} of group {index}, expected"
                    f" {steps[first]:g} as {first!r} has: DeepSpeed has one for a group"
                )
        return steps.get(first)


def _write(
    saved: _Saved, inside: Path, scratch: Path, engine: AsyncIO, progress: Progress | None
) -> None:
    """Write the files of a checkpoint."""
    for group, step in zip(saved.groups, saved.steps, strict=True):
        for name in group["params"]:
            home = inside / PARAMETERS / name
            home.mkdir(parents=True)
            tensors = {WEIGHT: saved.weight(name, engine)}
            for key in (WEIGHT, *saved.state_keys(group)):
                whole = tensors.pop(key, None)
                whole = saved.state(name, key, engine) if whole is None else whole
                _save({"cat_dim": 0, "param": whole.float()}, home / f"{key}.pt")
                if progress is not None:
                    progress(4 * whole.numel())
            if step is not None:
                _save(torch.tensor(step, device="cpu"), home / f"{STEP}.pt")
    groups = [{**group, "params": [i]} for i, group in enumerate(saved.groups)]
    steps = {
        i: {STEP: torch.tensor(s, device="cpu")} for i, s in enumerate(saved.steps) if s is not None
    }
    rest = {
        "param_groups": groups,  # for stages 1 and 2; the next one for stage 3
        "optimizer_state_dict": {"state": steps, "param_groups": groups},
        "ds_version": _VERSION,
    }
    _save(rest, inside / PARAMETERS / REST)
    others = {name: _mapped(saved, name, scratch, engine) for name in saved.others}
    for name, module in zip(_MODELS, ({**others, **saved.extra}, {}), strict=True):
        _save(_model(saved, module), inside / name)


def _model(saved: _Saved, module: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a model file has; of stage 3 it has no weights."""
    shapes = [OrderedDict((n, saved.shape(n)) for n in g["params"]) for g in saved.groups]
    passed_on = {key: saved.client.get(key) for key in PASSED_ON}
    counts = ("global_steps", "global_samples", "skipped_steps")
    return {
        **saved.client,
        "module": OrderedDict(module),
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": shapes,
        "frozen_param_shapes": None,
        "shared_params": {},
        "frozen_param_fragments": None,
        **passed_on,
        **{name: saved.counters.get(name, 0) for name in counts},
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": _VERSION,
    }


def _mapped(saved: _Saved, name: str, scratch: Path, engine: AsyncIO) -> Tensor:
    """Return a weight in a file of its own, so that all of them need no memory."""
    found = saved.weight(name, engine)
    if not found.numel():
        return found
    scratch.mkdir(exist_ok=True)
    path = os.fspath(scratch / str(len(os.listdir(scratch))))
    flat = torch.from_file(path, shared=True, size=found.numel(), dtype=found.dtype)
    return flat.view(found.shape).copy_(found)


def _save(content: object, path: Path) -> None:
    """Write a file of torch.save to the disk."""
    with naming(_OP, f"writing {path}"), open(path, "xb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())

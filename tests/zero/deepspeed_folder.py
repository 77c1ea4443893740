"""Makes folders as DeepSpeed 0.19's save_checkpoint does, without DeepSpeed, which tests lack.

Names of files and fields, their order, types and classes, alignment and padding are those of its
files, against which this was held once, field by field.
"""

import contextlib
import enum
import math
import sys
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

VERSION = "0.19.8"
KEYS = ("fp32", "exp_avg", "exp_avg_sq")


class LossScaler:
    def __init__(self, **saved: Any) -> None:
        vars(self).update(saved)


class DynamicLossScaler(LossScaler):
    pass


class ZeroStageEnum(int, enum.Enum):
    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3


@dataclass
class fragment_address:
    numel: int
    start: int


_CLASSES = {
    "deepspeed.runtime.fp16.loss_scaler": (LossScaler, DynamicLossScaler),
    "deepspeed.runtime.zero.config": (ZeroStageEnum,),
    "deepspeed.utils.tensor_fragment": (fragment_address,),
}


@contextlib.contextmanager
def _as_deepspeed() -> Iterator[None]:
    """Let pickle find the classes above where DeepSpeed has its own."""
    kept = {kind: kind.__module__ for kinds in _CLASSES.values() for kind in kinds}
    names = {".".join(n.split(".")[:i]) for n in _CLASSES for i in range(1, n.count(".") + 2)}
    modules = {name: ModuleType(name) for name in names}
    for name, kinds in _CLASSES.items():
        for kind in kinds:
            setattr(modules[name], kind.__name__, kind)
            kind.__module__ = name
    try:
        sys.modules.update(modules)
        yield
    finally:
        for name in modules:
            del sys.modules[name]
        for kind, module in kept.items():
            kind.__module__ = module


def save(content: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with _as_deepspeed():
        torch.save(content, path)


@dataclass
class Run:
    """What a training of DeepSpeed has in the moment of a save.

    Args:
        groups: trained parameters: for each group, for each name, float32 tensors by KEYS.
        stage: of ZeRO.
        processes: their number.
        dtype: of the model.
        frozen: parameters, in the dtype of the model.
        buffers: persistent ones.
        ties: names of parameters that are others, with the names of those.
        options: of the groups, beside those that all have.
        step: of the optimizer; None: state has none.
        scaler: attributes of a dynamic loss scaler.
        sub_group: so many elements, in each process, end a flat tensor of stage 3.
        client: client_state.
        is_wrapped: by BF16_Optimizer: no stage, no scaler, padding stays.
        is_elastic: with elastic_checkpoint.
    """

    groups: list[dict[str, dict[str, Tensor]]]
    stage: int = 2
    processes: int = 2
    dtype: torch.dtype = torch.float32
    frozen: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    options: list[dict[str, Any]] = field(default_factory=list)
    step: float | None = 4.0
    scaler: dict[str, Any] | None = None
    sub_group: int = 1 << 30
    client: dict[str, Any] = field(default_factory=dict)
    is_wrapped: bool = False
    is_elastic: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

    def write(self, home: Path, tag: str = "global_step4") -> Path:
        """Write a folder, and return that of the tag."""
        folder = home / tag
        prefix = "bf16_" * (self.dtype == torch.bfloat16)
        for rank in range(self.processes):
            name = f"zero_pp_rank_{rank}_mp_rank_00"
            inside = self._each(rank) if self.stage == 3 else self._across(rank)
            content = {"optimizer_state_dict": inside, "ds_config": {"a": 1}, "ds_version": VERSION}
            save(content, folder / f"{prefix}{name}_optim_states.pt")
            if self.stage == 3:
                save(self._model(rank), folder / f"{name}_model_states.pt")
        if self.stage < 3:
            save(self._model(0), folder / "mp_rank_00_model_states.pt")
        (home / "latest").write_text(tag)
        return folder

    def write_universal(self, home: Path, tag: str = "global_step4_universal") -> Path:
        """Write what ds_to_universal makes of the folder, and return that of the tag."""
        folder, rest = home / tag, self._each(0) if self.stage == 3 else self._across(0)
        for name, value in ((n, v) for group in self.groups for n, v in group.items()):
            for key, tensor in value.items():
                whole: Any = {"cat_dim": 0, "param": tensor.clone()}
                if self.stage == 3:
                    whole = tensor.reshape(-1).clone()
                save(whole, folder / "zero" / name / f"{key}.pt")
            if self.stage < 3 and self.step is not None:
                save(torch.tensor(self.step), folder / "zero" / name / "step.pt")
        if self.stage == 3:
            rest["param_groups"] = rest["optimizer_state_dict"]["param_groups"]
            for rank in range(self.processes):
                save(self._model(rank), folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        else:
            model = self._model(0)
            for name, tensor in model["module"].items():
                if not (folder / "zero" / name).exists():
                    save({"param": tensor.float()}, folder / "zero" / name / "fp32.pt")
            save(model, folder / "mp_rank_00_model_states.pt")
            rest["param_groups"] = rest.pop("base_optimizer_state")["param_groups"]
            del rest["param_slice_mappings"], rest["single_partition_of_fp32_groups"]
        save(rest, folder / "zero" / "optimizer_state.pt")
        (home / "latest_universal").write_text(tag)
        return folder

    def sub_groups(self) -> list[tuple[int, dict[str, dict[str, Tensor]]]]:
        """Return the flat tensors of stage 3, with their groups: cut after enough elements."""
        made: list[tuple[int, dict[str, dict[str, Tensor]]]] = []
        for i, group in enumerate(self.groups):
            room = 0
            for name, value in group.items():
                if room <= 0:
                    made.append((i, {}))
                    room = self.sub_group
                made[-1][1][name] = value
                room -= math.ceil(value["fp32"].numel() / self.processes)
        return made

    def part(self, tensor: Tensor, rank: int) -> Tensor:
        """Return what a process has of a tensor in stage 3, padding included."""
        size = math.ceil(tensor.numel() / self.processes)
        padded = torch.zeros(size * self.processes, dtype=tensor.dtype)
        padded[: tensor.numel()] = tensor.reshape(-1)
        return padded[rank * size : (rank + 1) * size].clone()

    def _model(self, rank: int) -> dict[str, Any]:
        trained = {n: v["fp32"] for group in self.groups for n, v in group.items()}
        weights = {n: t.to(self.dtype) for n, t in trained.items()} | self.frozen
        shown = {n: t if self.stage < 3 else t.new_empty(0) for n, t in weights.items()}
        shown |= {name: shown[kept] for name, kept in self.ties.items()}
        has_frozen = self.stage >= 2
        listed = [names for _, names in self.sub_groups()] if self.stage == 3 else self.groups
        shapes = [OrderedDict((n, v["fp32"].shape) for n, v in names.items()) for names in listed]
        parts = self.frozen
        if self.stage == 3:
            parts = {name: self.part(tensor, rank) for name, tensor in self.frozen.items()}
        frozen = OrderedDict((n, t.shape) for n, t in self.frozen.items())
        return {
            "module": OrderedDict({**self.buffers, **shown, **self.extra}),
            "buffer_names": list(self.buffers),
            "optimizer": None,
            "param_shapes": shapes,
            "frozen_param_shapes": frozen if has_frozen else None,
            "shared_params": self.ties if rank == 0 else {},
            "frozen_param_fragments": OrderedDict(parts) if has_frozen else None,
            "lr_scheduler": {"last_batch_iteration": 3},
            "data_sampler": None,
            "random_ltd": None,
            "skipped_steps": 1,
            "global_steps": 5,
            "global_samples": 60,
            "dp_world_size": self.processes,
            "mp_world_size": 1,
            "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
            "ds_config": {"zero_optimization": {"stage": self.stage}},
            "ds_version": VERSION,
            **self.client,
        }

    def _scaler(self) -> dict[str, Any]:
        scaler = LossScaler(cur_scale=1.0, dynamic=False)
        if self.scaler is not None:
            scaler = DynamicLossScaler(**self.scaler)
        is_dynamic = self.scaler is not None
        return {"loss_scaler": scaler, "dynamic_loss_scale": is_dynamic, "overflow": False}

    def _groups(self, params: list[list[int]]) -> list[dict[str, Any]]:
        common = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
        common |= {"amsgrad": False, "maximize": False, "foreach": None, "capturable": False}
        common |= {"differentiable": False, "fused": None, "decoupled_weight_decay": True}
        own = self.options or [{} for _ in self.groups]
        return [common | o | {"params": p} for o, p in zip(own, params, strict=True)]

    def _entry(self, exp_avg: Tensor, exp_avg_sq: Tensor) -> dict[str, Any]:
        step = {} if self.step is None else {"step": torch.tensor(self.step)}
        return {**step, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}

    def _across(self, rank: int) -> dict[str, Any]:
        """Return what an optimizer file of stages 1 and 2 has."""
        weights, state, paddings, fragments = [], {}, [], []
        for i, group in enumerate(self.groups):
            numel = sum(value["fp32"].numel() for value in group.values())
            unit = 2 * self.processes
            total = math.ceil(numel / unit) * unit
            size = total // self.processes
            flats = {}
            for key in KEYS:
                whole = torch.zeros(total)
                whole[:numel] = torch.cat([value[key].reshape(-1) for value in group.values()])
                flats[key] = whole[rank * size : (rank + 1) * size].clone()
            padding = total - numel if rank == self.processes - 1 else 0
            paddings.append(padding)
            lean = {key: flat[: size - padding] for key, flat in flats.items()}
            weights.append(lean["fp32"] if not self.is_wrapped else flats["fp32"])
            kept = lean if self.is_elastic else flats
            state[i] = self._entry(kept["exp_avg"], kept["exp_avg_sq"])
            fragments.append(_fragments(group, rank * size, size))
        base: Any = {"state": state, "param_groups": self._groups([[i] for i in state])}
        if self.is_elastic:
            base = list(state.values())
        counts = [self.processes] * len(self.groups)
        scaler = {} if self.is_wrapped else self._scaler()
        stage = {} if self.is_wrapped else {"zero_stage": ZeroStageEnum(self.stage)}
        aligned = {"param_alignment_paddings": [[0] * len(group) for group in self.groups]}
        return {
            **scaler,
            "clip_grad": 0.0,
            "base_optimizer_state": base,
            "single_partition_of_fp32_groups": weights,
            **stage,
            "group_paddings": paddings,
            **({} if self.is_wrapped else aligned),
            "partition_count": counts,
            "ds_version": VERSION,
            "param_slice_mappings": fragments,
        }

    def _each(self, rank: int) -> dict[str, Any]:
        """Return what an optimizer file of stage 3 has."""
        weights, state = [], {}
        params: list[list[int]] = [[] for _ in self.groups]
        for i, (group, names) in enumerate(self.sub_groups()):
            flats = {
                key: torch.cat([self.part(value[key], rank) for value in names.values()])
                for key in KEYS
            }
            weights.append(flats["fp32"])
            state[i] = self._entry(flats["exp_avg"], flats["exp_avg_sq"])
            params[group].append(i)
        return {
            "zero_stage": ZeroStageEnum.weights,
            **self._scaler(),
            "partition_count": self.processes,
            "optimizer_state_dict": {"state": state, "param_groups": self._groups(params)},
            "fp32_flat_groups": weights,
        }


def _fragments(group: dict[str, Any], first: int, size: int) -> "OrderedDict[str, Any]":
    """Return where each parameter lies in the part of a process, if it does."""
    found, begin = OrderedDict(), 0
    for name, value in group.items():
        end = begin + value["fp32"].numel()
        low, high = max(begin, first), min(end, first + size)
        if low < high:
            found[name] = fragment_address(high - low, low - first)
        begin = end
    return found


def drawn(shapes: dict[str, tuple[int, ...]]) -> dict[str, dict[str, Tensor]]:
    """Return values of parameters by name, by KEYS."""
    return {name: {key: torch.rand(shape) for key in KEYS} for name, shape in shapes.items()}

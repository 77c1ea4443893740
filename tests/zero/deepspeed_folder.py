"""Makes folders as DeepSpeed's save_checkpoint does, without DeepSpeed, which tests lack.

Names of files and fields, their order, types and classes, alignment and padding are those of its
files, against which this was held once, field by field: 0.19.8, with pipelines and experts on two
processes, and 0.9.5 on one, in stages 1 and 2.
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

VERSION, OLD_VERSION = "0.19.8", "0.9.5"
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
        is_old: as DeepSpeed 0.9 does.
        pipe: number of the stage of a pipeline, whose parameters are called <layer>.<name>.
        kinds: of processes, which have other experts each; the last group has all experts; 0: none.
        is_flat: FusedAdam's of stage 0, in 16 bits.
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
    is_old: bool = False
    pipe: int | None = None
    kinds: int = 0
    is_flat: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

    def write(self, home: Path, tag: str = "global_step4") -> Path:
        """Write a folder, and return that of the tag."""
        folder = home / tag
        prefix = "bf16_" * (self.dtype == torch.bfloat16)
        number = f"mp_rank_{self.pipe or 0:02d}"
        for rank in range(self.processes if self.stage else 0):
            name = f"zero_pp_rank_{rank}_{number}"
            inside = self._each(rank) if self.stage == 3 else self._across(rank)
            content = {"optimizer_state_dict": inside, "ds_config": {"a": 1}}
            save(content | {"ds_version": self.version}, folder / f"{prefix}{name}_optim_states.pt")
            if self.stage == 3:
                save(self._model(rank), folder / f"{name}_model_states.pt")
        if self.stage < 3:
            save(self._model(0), folder / f"{number}_model_states.pt")
        self._write_apart(folder)
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

    @property
    def version(self) -> str:
        return OLD_VERSION if self.is_old else VERSION

    def _write_apart(self, folder: Path) -> None:
        """Write the files of layers, or of experts."""
        if self.kinds:
            experts: dict[str, dict[str, Tensor]] = {}
            for name, value in self.groups[-1].items():
                number = name.split("deepspeed_experts.")[1].split(".")[0]
                experts.setdefault(number, {})[name] = value["fp32"].to(self.dtype)
            for number, state in experts.items():
                save(state, folder / f"layer_0_expert_{number}_mp_rank_00_model_states.pt")
        if self.pipe is not None:
            layers: dict[str, dict[str, Tensor]] = {}
            for name, value in ((n, v) for group in self.groups for n, v in group.items()):
                number, _, rest = name.partition(".")
                if number.isdecimal():  # else it is tied
                    layers.setdefault(number, {})[rest] = value["fp32"].to(self.dtype)
            for number, state in layers.items():
                save(OrderedDict(state), folder / f"layer_{int(number):02d}-model_states.pt")

    def _share(self, i: int, rank: int) -> tuple[dict[str, dict[str, Tensor]], int, int]:
        """Return what processes share out with this one of a group, its place, and their number."""
        group = self.groups[i]
        if self.kinds < 2 or i < len(self.groups) - 1:
            return group, rank, self.processes
        number, names = len(group) // self.kinds, list(group)
        first = rank % self.kinds * number
        mine = {
            own: group[name]
            for own, name in zip(names, names[first : first + number], strict=False)
        }
        return mine, rank // self.kinds, self.processes // self.kinds

    def _whole(self) -> dict[str, Any]:
        """Return the optimizer's state of stage 0."""
        values = [[value for value in group.values()] for group in self.groups]
        if self.is_flat:
            join = [{k: torch.cat([v[k].reshape(-1) for v in g]) for k in KEYS} for g in values]
            values = [[one] for one in join]
        flat = [value for group in values for value in group]
        numbers, first = [], 0
        for group in values:
            numbers.append(list(range(first, first + len(group))))
            first += len(group)
        state = {i: self._entry(v["exp_avg"], v["exp_avg_sq"]) for i, v in enumerate(flat)}
        inner = {"state": state, "param_groups": self._groups(numbers)}
        if self.dtype == torch.float32:
            return inner
        scaler = self.scaler or {"cur_scale": 1.0, "cur_iter": 4}
        outer = {"dynamic_loss_scale": self.scaler is not None, **scaler}
        weights = [[value["fp32"] for value in group] for group in values]
        kept = {"fp32_groups_flat": [w[0] for w in weights]} if self.is_flat else None
        return outer | {"optimizer_state_dict": inner} | (kept or {"fp32_groups": weights})

    def _model(self, rank: int) -> dict[str, Any]:
        trained = {n: v["fp32"] for group in self.groups for n, v in group.items()}
        if self.kinds:
            trained = {n: t for n, t in trained.items() if n not in self.groups[-1]}
        weights = {n: t.to(self.dtype) for n, t in trained.items()} | self.frozen
        shown = {n: t if self.stage < 3 else t.new_empty(0) for n, t in weights.items()}
        shown |= {name: shown[kept] for name, kept in self.ties.items()}
        has_frozen = self.stage >= 2
        listed = [self._share(i, 0)[0] for i in range(len(self.groups))]
        if self.stage == 3:
            listed = [names for _, names in self.sub_groups()]
        shapes = [OrderedDict((n, v["fp32"].shape) for n, v in names.items()) for names in listed]
        parts = self.frozen
        if self.stage == 3:
            parts = {name: self.part(tensor, rank) for name, tensor in self.frozen.items()}
        frozen = OrderedDict((n, t.shape) for n, t in self.frozen.items())
        module = OrderedDict({**self.buffers, **shown, **self.extra})
        has_ties = self.stage == 3 or (self.stage and not self.is_old)  # else they share memory
        newer = {"checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1}}
        return {
            "module": module if self.pipe is None else None,
            "buffer_names": list(self.buffers),
            "optimizer": None if self.stage else self._whole(),
            "param_shapes": shapes if self.stage else None,
            "frozen_param_shapes": frozen if has_frozen else None,
            "shared_params": (self.ties if rank == 0 else {}) if has_ties else None,
            "frozen_param_fragments": OrderedDict(parts) if has_frozen else None,
            "lr_scheduler": {"last_batch_iteration": 3},
            "data_sampler": None,
            "random_ltd": None,
            **({"sparse_tensor_module_names": {"a"}} if self.is_old else {}),
            "skipped_steps": 1,
            "global_steps": 5,
            "global_samples": 60,
            "dp_world_size": self.processes,
            "mp_world_size": 1 if self.pipe is None else 2,
            **({} if self.is_old else newer),
            "ds_config": {"zero_optimization": {"stage": self.stage}},
            "ds_version": self.version,
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
        weights, state, paddings, fragments, counts = [], {}, [], [], []
        for i in range(len(self.groups)):
            group, place, processes = self._share(i, rank)
            counts.append(processes)
            numel = sum(value["fp32"].numel() for value in group.values())
            unit = 2 * processes
            total = math.ceil(numel / unit) * unit
            size = total // processes
            flats = {}
            for key in KEYS:
                whole = torch.zeros(total)
                whole[:numel] = torch.cat([value[key].reshape(-1) for value in group.values()])
                flats[key] = whole[place * size : (place + 1) * size].clone()
            padding = total - numel if place == processes - 1 else 0
            paddings.append(padding)
            lean = {key: flat[: size - padding] for key, flat in flats.items()}
            weights.append(lean["fp32"] if not self.is_wrapped else flats["fp32"])
            kept = lean if self.is_elastic else flats
            state[i] = self._entry(kept["exp_avg"], kept["exp_avg_sq"])
            fragments.append(_fragments(group, place * size, size))
        base: Any = {"state": state, "param_groups": self._groups([[i] for i in state])}
        if self.is_elastic:
            base = list(state.values())
        scaler = {} if self.is_wrapped else self._scaler()
        stage = {} if self.is_wrapped else {"zero_stage": ZeroStageEnum(self.stage)}
        lengths = [len(self._share(i, rank)[0]) for i in range(len(self.groups))]
        aligned = {"param_alignment_paddings": [[0] * length for length in lengths]}
        return {
            **scaler,
            "clip_grad": 0.0,
            "base_optimizer_state": base,
            "single_partition_of_fp32_groups": weights,
            **stage,
            "group_paddings": paddings,
            **({} if self.is_wrapped or self.is_old else aligned),
            "partition_count": counts,
            "ds_version": self.version,
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

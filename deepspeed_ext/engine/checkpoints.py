"""What an engine saves and loads: checkpoints to go on from, and the model for others."""

import logging
import os
import tempfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed_ext import zero
from deepspeed_ext.dtensors import is_dtensor, part_for, spread
from deepspeed_ext.engine.resuming import counted
from deepspeed_ext.engine.settings import Settings
from deepspeed_ext.engine.stepping import Stepping
from deepspeed_ext.io.checkpoint.shards import INDEX, ONE_FILE
from deepspeed_ext.io.regular_file import sync_folder
from deepspeed_ext.offload import OffloadOptimizer
from deepspeed_ext.zero.agreement import all_or_none, check_agreement
from deepspeed_ext.zero.checkpoint.master_weights import keeping_float32
from deepspeed_ext.zero.checkpoint.weight_files import write_weight_file
from deepspeed_ext.zero.counters import COUNTERS, told
from deepspeed_ext.zero.loading import checkpoint_of
from deepspeed_ext.zero.whole_weights import WholeWeights, in_first_process

_log = logging.getLogger("deepspeed_ext")
_DROPPED = "random_ltd"  # what DeepSpeed calls the state of its scheduler in a checkpoint
_FLAG = "stage3_gather_16bit_weights_on_model_save"


class Checkpoints(Settings):
    """The part of an engine that saves and loads."""

    module: nn.Module
    optimizer: torch.optim.Optimizer | None
    lr_scheduler: Any
    random_ltd_scheduler: Any
    global_steps: int
    _stepping: Stepping | None

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> None:
        """Save all by `zero.save`, whose text says what holds; all processes call it.

        Args:
            save_dir: that all processes see.
            tag: its name; None: global_step and the number.
            client_state: what comes back from load_checkpoint, plain values.
            save_latest: name it the latest one.
            exclude_frozen_parameters: leave out those that need no gradient; load_checkpoint takes
                what is left with load_module_strict=False.

        Raises:
            RuntimeError: it is called between micro-steps.
        """
        self._end_unused()
        parts = self._parts()
        if self.random_ltd_scheduler is not None:
            parts[_DROPPED] = self.random_ltd_scheduler
        zero.save(
            save_dir,
            f"global_step{self.global_steps}" if tag is None else str(tag),
            self.module,
            self.optimizer,
            exclude_frozen=exclude_frozen_parameters,
            names_latest=save_latest,
            engine={name: getattr(self, name) for name in COUNTERS},
            client=dict(client_state or {}),
            **parts,
        )

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any]]:
        """Go on from what `save_checkpoint` left, on any number of processes and in any stage.

        DeepSpeed's folders are read too, and those that `zero.import_deepspeed` has written.

        Args:
            load_dir: that save_checkpoint was given, ours or DeepSpeed's.
            tag: of the checkpoint; None: the latest.
            load_module_strict: False: weights that only the model has stay as they are, those that
                only the checkpoint has are not read.
            load_optimizer_states: False: the optimizer and the scale of the loss begin.
            load_lr_scheduler_states: False: the schedule begins.
            load_module_only: only weights and random numbers, not the counters either.

        Returns:
            The folder of the checkpoint, and the client_state. None, if there is no checkpoint and
            no tag was given; a warning says so then.

        Raises:
            OSError, ValueError, RuntimeError: as `zero.load`.
        """
        op, name = "engine.load_checkpoint", None if tag is None else str(tag)
        path: Path | None = None
        with all_or_none(op, self._mesh):
            try:
                path, _ = checkpoint_of(op, load_dir, name)
            except FileNotFoundError:
                if tag is not None:
                    raise
        check_agreement(op, [f"the checkpoint {path and path.name}"], self._mesh)
        if path is None:
            text = "%s: load_dir is %s without a checkpoint named as the latest; nothing is loaded"
            _log.warning(text, op, load_dir)
            return None, {}
        self._end_unused()
        loads_optimizer = load_optimizer_states and not load_module_only
        parts = self._parts()
        if not loads_optimizer:
            parts.pop("loss_scaler", None)
        if not load_lr_scheduler_states or load_module_only:
            parts.pop("lr_scheduler", None)
        found = zero.load(
            load_dir,
            name,
            self.module,
            self.optimizer if loads_optimizer else None,
            strict=load_module_strict,
            has_masters=None if loads_optimizer else self.optimizer,
            **parts,
        )
        counters, client = told(found)
        if self.random_ltd_scheduler is not None and not load_module_only:
            state = client.pop(_DROPPED, None)
            if state is None:
                _log.warning("%s: %s has no state of random_ltd, whose counts begin", op, path)
            else:
                self.random_ltd_scheduler.load_state_dict(state)
        if not load_module_only:
            for counter, count in counted(counters, self._sizes).items():
                setattr(self, counter, count)
        return str(path), client

    def _end_unused(self) -> None:
        """End micro-steps that had a forward only, such as evaluations with gradients on."""
        if self._accumulation.backwards == 0:
            self._accumulation.end()

    def _parts(self) -> dict[str, Any]:
        scaler = None if self._stepping is None else self._stepping.scaler
        parts = {"lr_scheduler": self.lr_scheduler, "loss_scaler": scaler}
        return {name: part for name, part in parts.items() if hasattr(part, "state_dict")}

    # The model for others

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Tell whether `save_16bit_model` saves in stage 3, as the config says."""
        return self._config.zero_optimization.stage3_gather_16bit_weights_on_model_save

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = ONE_FILE,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write whole weights to one file, in the dtype that computes; all processes call it.

        The first process writes. Each weight goes to it alone, one after another; into a file of
        safetensors it is written at once, for one of torch all are kept in host memory first. With
        the config.json of the model beside it, which this does not write, transformers'
        from_pretrained opens the folder, and init_inference one with model.safetensors.

        Args:
            save_dir: a folder, made if it is not there.
            save_filename: what ends in .safetensors is such a file, all else one of torch.save,
                such as "pytorch_model.bin", DeepSpeed's default.
            exclude_frozen_parameters: leave out those that need no gradient.

        Returns:
            Whether it was written: in stage 3 the config has to ask for it, and a warning says so.

        Raises:
            OSError: the file cannot be written.
            ValueError: save_filename is no name of a file.
            RuntimeError: it is called between micro-steps, or another process failed.
        """
        name, in_stage_3 = "engine.save_16bit_model", self.zero_optimization_stage() == 3
        if not save_filename or Path(save_filename).name != save_filename:
            raise ValueError(
                f"{name}: save_filename is {save_filename!r}, expected the name of a file"
            )
        if in_stage_3 and not self.zero_gather_16bit_weights_on_model_save():
            _log.warning("%s: nothing is saved, as zero_optimization.%s is not true", name, _FLAG)
            return False
        home = Path(save_dir)

        def write(weights: WholeWeights) -> None:
            home.mkdir(parents=True, exist_ok=True)
            if Path(save_filename).suffix == ".safetensors":
                described, path = weights.described, home / save_filename
                write_weight_file(path, described, lambda n, _: weights.read(n), weights.ties)
                return
            _write_torch_file(home, save_filename, _state_of(weights))
            stale = [n for n in (ONE_FILE, INDEX) if (home / n).exists()]
            if stale:
                text = "%s: %s has %s too, which is what others open rather than %s"
                _log.warning(text, name, home, stale[0], save_filename)

        self._in_first_process(name, write, exclude_frozen_parameters)
        return True

    def _consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> OrderedDict[str, Tensor] | None:
        """Return whole weights on the CPU in the first process, None in others; all call it.

        Args:
            exclude_frozen_parameters: leave out those that need no gradient.
        """
        state: OrderedDict[str, Tensor] | None = self._in_first_process(
            "engine._consolidated_16bit_state_dict", _state_of, exclude_frozen_parameters
        )
        return state

    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict

    def _in_first_process(self, name: str, take: Any, exclude_frozen: bool) -> Any:
        self._end_unused()
        if isinstance(self.optimizer, OffloadOptimizer):
            self.optimizer.synchronize()
        dtypes = {torch.bfloat16: self.bfloat16_enabled(), torch.float16: self.fp16_enabled()}
        used = next((dtype for dtype, is_used in dtypes.items() if is_used), None)
        return in_first_process(name, self.module, take, dtype=used, exclude_frozen=exclude_frozen)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load what `state_dict` returned, or whole tensors by the same names.

        Where the model streams, float32 tensors are the master weights that the optimizer has.

        Args:
            state_dict: shards, or the same whole tensors in each process.
            strict: of torch's.
            assign: False; shards stay where they are.

        Raises:
            ValueError: assign is True.
        """
        if assign:
            raise ValueError("engine.load_state_dict: assign is True, expected False for shards")
        placed = OrderedDict(state_dict)
        for name, param in self.state_dict(keep_vars=True).items():
            given = placed.get(name)
            if not isinstance(param, Tensor) or not is_dtensor(param):
                continue
            if not isinstance(given, Tensor) or is_dtensor(given):
                continue
            if given.shape == param.shape:  # else torch says what is wrong
                placed[name] = spread(part_for(given.to(param.device), param), param)
        with keeping_float32(self.module, self.optimizer):
            return super().load_state_dict(placed, strict)


def _state_of(weights: WholeWeights) -> OrderedDict[str, Tensor]:
    state = OrderedDict((name, weights.read(name)) for name in weights.described)
    for name, kept in weights.ties.items():
        state[name] = state[kept]
    return state


def _write_torch_file(home: Path, name: str, state: Mapping[str, Tensor]) -> None:
    """Put a file into a folder, whole, or not at all."""
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=home) as aside:
        made = Path(aside) / "file"
        with made.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(made, home / name)
    sync_folder(home)

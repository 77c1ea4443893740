"""Config: a whole config, read and checked."""

from collections.abc import Mapping
from typing import Any

from pydantic import PrivateAttr, ValidationError

from deepspeed_ext.config.batch_sizes import BatchSizes, solve
from deepspeed_ext.config.kinds import AUTO, Dtype, shown, thawed
from deepspeed_ext.config.reading import Source, plain
from deepspeed_ext.config.tree import Root
from deepspeed_ext.config.walk import Found, Row, walk


class Config(Root):
    """A config of DeepSpeed's, read; nothing changes it.

    Its attributes are the keys, those of blocks below them: `config.zero_optimization.stage`.
    `optimizer` and `scheduler` are None where no type is given.
    """

    _given: dict[str, Any] = PrivateAttr(default_factory=dict)
    _paths: frozenset[str] = PrivateAttr(default=frozenset())
    _warnings: tuple[str, ...] = PrivateAttr(default=())

    @property
    def warnings(self) -> tuple[str, ...]:
        """A sentence for each key that changes nothing."""
        return self._warnings

    @property
    def low_precision(self) -> bool:
        """Whether weights are bfloat16, without master weights."""
        return self.bf16.enabled and self.bf16.bf16_master_weights_and_grads

    @property
    def offloads_params(self) -> bool:
        """Whether parameters rest in host memory or on disk, where they are stepped."""
        zero = self.zero_optimization
        return zero.stage == 3 and zero.offload_param.device != "none"

    @property
    def used_dtype(self) -> Dtype | None:
        """That weights are used in; None: their own."""
        if not (self.bf16.enabled or self.fp16.enabled):
            return None
        import torch

        return torch.bfloat16 if self.bf16.enabled else torch.float16

    @property
    def has_masters(self) -> bool:
        """Whether there are master weights beside those that are used."""
        return self.used_dtype is not None and not self.low_precision

    @property
    def is_plain(self) -> bool:
        """Whether one process may train without casts and reductions, below stage 3."""
        reduces_unused = not self.zero_optimization.ignore_unused_parameters
        return not (self.used_dtype or self.communication_data_type or reduces_unused)

    @property
    def state_dtype(self) -> Dtype | None:
        """Of the state of the optimizer that the config names; None: as its class has it."""
        if not (self.low_precision and self.bf16.bf16_optimizer_states):
            return None
        import torch

        return torch.bfloat16

    def is_set(self, key: str) -> bool:
        """Tell whether a key is given, such as "zero_optimization.stage"; null and "auto" are not.

        Args:
            key: its path, but of no argument in `params`; where a key has several names, that of
                the documents.
        """
        return key in self._paths

    def as_dict(self) -> dict[str, Any]:
        """Return the config as it was given, with numbers and flags for texts that say them."""
        values: dict[str, Any] = thawed(self._given)
        return values

    def batch_sizes(self, processes: int) -> BatchSizes:
        """Return the three batch sizes, of which two give the third.

        Args:
            processes: how many take different samples.

        Raises:
            ValueError: too little is given, or it does not fit together.
        """
        return solve(
            self.train_batch_size,
            self.train_micro_batch_size_per_gpu,
            self.gradient_accumulation_steps,
            processes,
        )


def read(source: "Source | Config") -> Config:
    """Read a config of DeepSpeed's: each key does something, is named in `warnings`, or is refused.

    Args:
        source: a dict, which is not changed; the path of a JSON file, or of an Hjson file where
            hjson is installed; a text that is base64 of JSON; or a config, which is returned.

    Raises:
        ValueError: keys that are unknown, refused or have values that do not fit, a line for each;
            or keys that are "auto" and wait for a value.
    """
    if isinstance(source, Config):
        return source
    examined = examine(source)
    lines = [*examined.problems, *open_sentence(examined.found.left_open)]
    if lines or examined.config is None:
        raise ValueError("\n".join(lines))
    return examined.config


class Examined:
    """What is known of a config, also of one that is refused.

    Args:
        found: what the walk over its keys has found.
    """

    def __init__(self, found: Found) -> None:
        self.found = found
        self.problems = list(found.problems)
        self.config = self._validated()

    @property
    def rows(self) -> list[Row]:
        """Each key that is given, in the order of the file."""
        return self.found.rows

    def _validated(self) -> Config | None:
        values = self.found.values
        for name in ("optimizer", "scheduler"):
            block = values.get(name)
            if block is not None and "type" not in block:
                self._without_type(name, values)
        try:
            config = Config.model_validate(values)
        except ValidationError as error:
            self.problems += [self._sentence(each) for each in error.errors()]
            return None
        self.problems += self._conflicts(config)
        if self.problems:
            return None
        config._given = self._as_read(config)
        config._paths = frozenset(self.found.paths)
        config._warnings = tuple(self.found.warnings)
        return config

    def _without_type(self, name: str, values: dict[str, Any]) -> None:
        """A block without its type makes nothing, in DeepSpeed neither."""
        del values[name]
        refused_or_open = [path for path, _ in self.found.left_open]
        refused_or_open += [row.path for row in self.rows if row.effect.startswith("refused")]
        if f"{name}.type" not in refused_or_open:
            path = self.found.paths[name]
            self.found.warnings.append(f"config: {path} acts nowhere: it has no type")

    def _sentence(self, error: Mapping[str, Any]) -> str:
        place = ".".join(map(str, error["loc"]))
        path = self.found.paths.get(place, place)
        cause = error.get("ctx", {}).get("error")
        return f"config: {path} {cause if cause is not None else error['msg']}"

    def _conflicts(self, config: Config) -> list[str]:
        """Return what is wrong with several keys together."""
        problems = []
        if config.bf16.enabled and config.fp16.enabled:
            problems.append(
                "config: bf16.enabled is true beside fp16.enabled, expected one of them"
            )
        if config.bf16.bf16_optimizer_states and not config.bf16.bf16_master_weights_and_grads:
            problems.append(
                "config: bf16.bf16_optimizer_states is true, expected"
                " bf16.bf16_master_weights_and_grads true beside it"
            )
        fp16 = config.fp16
        first = 2.0**fp16.initial_scale_power
        if fp16.enabled and not fp16.loss_scale and fp16.min_loss_scale > first:
            problems.append(
                f"config: fp16.min_loss_scale is {shown(fp16.min_loss_scale)}, expected at most"
                f" {first:g}, 2 to the power fp16.initial_scale_power"
            )
        sent = config.communication_data_type
        added = config.data_types.grad_accum_dtype
        if None not in (sent, added) and sent != added:
            problems.append(
                f"config: data_types.grad_accum_dtype is {added} beside communication_data_type"
                f" {sent}, expected one dtype, as gradients are added up as they are sent"
            )
        if config.low_precision and added is not None:
            problems.append(
                f"config: data_types.grad_accum_dtype is {added} beside"
                " bf16.bf16_master_weights_and_grads, expected one of them, as gradients are added"
                " up in bfloat16 then"
            )
        path = self.found.paths.get("activation_checkpointing.cpu_checkpointing")
        if config.activation_checkpointing.cpu_checkpointing and config.compile.compiles:
            self.found.warnings.append(
                f"config: {path} acts nowhere in what torch.compile compiles, which decides itself"
                " what it keeps"
            )
        problems += self._of_random_ltd(config)
        self._warn_of_other_patterns(config)
        zero = config.zero_optimization
        for block in (zero.offload_optimizer, zero.offload_param):
            if block.device == "nvme" and block.nvme_path == "":
                problems.append(
                    f'config: {block.place}nvme_path is "" beside device "nvme", expected the path'
                    " of a folder"
                )
        if zero.offload_param.device != "none":
            paths, old = self.found.paths, "zero_optimization.cpu_offload_params"
            path = paths.get("zero_optimization.offload_param.device", old)
            if zero.stage < 3:
                self.found.warnings.append(f"config: {path} acts nowhere: it is for stage 3")
            elif zero.offload_optimizer.ratio < 1:
                path = paths["zero_optimization.offload_optimizer.ratio"]
                self.found.warnings.append(f"config: {path} acts nowhere: parameters rest")
        return problems

    def _of_random_ltd(self, config: Config) -> list[str]:
        """Return what a config lacks whose layers are to drop tokens."""
        efficiency = config.data_efficiency
        block = efficiency.data_routing.random_ltd
        outer = (efficiency, efficiency.data_routing)
        problems = [
            f"config: {each.place}enabled is false beside {block.place}enabled true, expected true"
            for each in outer
            if block.enabled and not each.enabled
        ]
        return problems + [
            f"config: {path} is missing, expected a value beside enabled true"
            for path in block.missing()
        ]

    def _warn_of_other_patterns(self, config: Config) -> None:
        block = config.sparse_attention
        if block is None:
            return
        for name, info in type(block).model_fields.items():
            if name not in block.acting and getattr(block, name) != info.default:
                path = self.found.paths[f"{block.place}{name}"]
                self.found.warnings.append(
                    f"config: {path} acts nowhere: mode is {shown(block.mode)}"
                )

    def _as_read(self, config: Config) -> dict[str, Any]:
        """Return what was given with the numbers and flags that were read."""
        given = self.found.given  # a copy of what the caller has
        for place, path in self.found.paths.items():
            value: Any = config
            for name in place.split("."):
                value = getattr(value, name, None)
            *blocks, last = path.split(".")
            block: Any = given
            for name in blocks:
                block = block.get(name) if isinstance(block, dict) else None
            if not isinstance(block, dict):
                continue  # a flag in place of a block
            if isinstance(value, bool | int | float):
                block[last] = value
            elif isinstance(value, Mapping):
                block[last] |= thawed(value)
        return given


def examine(source: Source) -> Examined:
    """Look at a config and return all that is to be said of it.

    Raises:
        ValueError: it cannot be read at all.
    """
    return Examined(walk(plain(source)))


def open_sentence(left_open: list[tuple[str, str]]) -> list[str]:
    """Return the error on keys that are "auto", all of them in one, if there are any.

    Args:
        left_open: the path of each, and who fills it.
    """
    if not left_open:
        return []
    by_filler: dict[str, list[str]] = {}
    for path, filler in left_open:
        by_filler.setdefault(filler or "you", []).append(path)
    names = ", ".join(path for path, _ in left_open)
    who = "; ".join(
        f"{filler} {'fill' if filler == 'you' else 'fills'} {', '.join(paths)}"
        for filler, paths in by_filler.items()
    )
    verb = "are" if len(left_open) > 1 else "is"
    return [f'config: {names} {verb} "{AUTO}", expected a value for each: {who}']

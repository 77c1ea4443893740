"""The block data_efficiency: of it random-LTD is here, layers that see some of the tokens."""

from typing import Annotated, Any, ClassVar

from deepspeed_ext.config.block import Block
from deepspeed_ext.config.kinds import (
    ANYTHING,
    FLAG,
    NUMBERS,
    TEXT,
    choice,
    does,
    nowhere,
    so_anyway,
    whole,
)

_LTD = "data_efficiency.data_routing.random_ltd."


class RandomLtdScheduleConfig(Block):
    """The line by which the number of tokens grows."""

    place: ClassVar[str] = f"{_LTD}random_ltd_schedule.schedule_config."

    require_steps: Annotated[
        int | None, whole(1), does("steps until all tokens are kept, but for rounding")
    ] = None
    seq_per_step: Annotated[
        int | None, whole(1), does("the number of tokens kept is a multiple of it")
    ] = None


class RandomLtdSchedule(Block):
    """How many tokens are kept, step by step."""

    place: ClassVar[str] = f"{_LTD}random_ltd_schedule."

    min_value: Annotated[int | None, whole(1), does("tokens kept in the first step")] = None
    max_value: Annotated[int | None, whole(1), does("tokens kept at last: all of a sequence")] = (
        None
    )
    schedule_type: Annotated[str, choice("fixed_linear"), does("along a line")] = "fixed_linear"
    schedule_config: Annotated[RandomLtdScheduleConfig, does("along which line")] = (
        RandomLtdScheduleConfig()
    )


class RandomLtd(Block):
    """Layers that see some of the tokens; convert_to_random_ltd has been called on the model."""

    place: ClassVar[str] = _LTD

    enabled: Annotated[bool, FLAG, does("layers drop tokens")] = False
    total_layer_num: Annotated[int | None, whole(1), does("layers of the model, for counts")] = None
    random_ltd_layer_num: Annotated[int | None, whole(1), does("layers that drop tokens")] = None
    random_ltd_layer_id: Annotated[
        tuple[int, ...] | None,
        NUMBERS,
        does("which layers these are, by the last number in their names"),
    ] = None
    model_mask_name: Annotated[
        str | None, TEXT, does("the layer's argument that is the attention mask; null: none")
    ] = None
    model_type: Annotated[
        str,
        choice("encoder", "decoder"),
        so_anyway("the part of the mask is that of the tokens that are kept, which fits both"),
    ] = "decoder"
    hidden_state_order: Annotated[
        str,
        choice("batch_seq_dim", "seq_batch_dim"),
        does("what is the first dimension of hidden states, and the second"),
    ] = "batch_seq_dim"
    random_ltd_schedule: Annotated[RandomLtdSchedule, does("how many tokens are kept")] = (
        RandomLtdSchedule()
    )

    def missing(self) -> list[str]:
        """Return the paths of keys that are needed and not given, if layers drop tokens."""
        blocks: tuple[Block, ...] = (self, self.random_ltd_schedule)
        blocks = (*blocks, self.random_ltd_schedule.schedule_config)
        return [
            f"{block.place}{name}"
            for block in blocks
            for name in type(block).model_fields
            if self.enabled and name != "model_mask_name" and getattr(block, name) is None
        ]


class DataRouting(Block):
    """Which tokens go through which layers."""

    place: ClassVar[str] = "data_efficiency.data_routing."

    enabled: Annotated[bool, FLAG, does("true where random_ltd.enabled is")] = False
    random_ltd: Annotated[RandomLtd, does("layers that see some of the tokens")] = RandomLtd()


class DataEfficiency(Block):
    """Fewer tokens; what chooses samples is not here."""

    place: ClassVar[str] = "data_efficiency."

    enabled: Annotated[bool, FLAG, does("true where random_ltd.enabled is")] = False
    seed: Annotated[Any, ANYTHING, nowhere("of data_sampling, which is not here")] = None
    data_routing: Annotated[DataRouting, does("which tokens go through which layers")] = (
        DataRouting()
    )

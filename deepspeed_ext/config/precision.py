"""The blocks of the typed tree that say in which precision a model computes."""

from collections.abc import Callable
from typing import Annotated, Any, ClassVar

from pydantic import ValidationInfo, field_validator

from deepspeed_ext.config.block import Block
from deepspeed_ext.config.kinds import (
    ANYTHING,
    FLAG,
    HUGGING_FACE,
    does,
    nowhere,
    number,
    number_of,
    so_anyway,
    whole,
)


class Fp16(Block):
    """float16 with a scaled loss."""

    place: ClassVar[str] = "fp16."

    enabled: Annotated[
        bool,
        FLAG,
        does("computes in float16 with float32 master weights", filler=HUGGING_FACE),
    ] = False
    loss_scale: Annotated[
        float, number(0), does("0: the scale of the loss follows overflows; else it is this")
    ] = 0.0
    initial_scale_power: Annotated[
        int, whole(0, 126), does("the scale that follows begins at 2 to this power")
    ] = 16
    loss_scale_window: Annotated[
        int, whole(1), does("so many steps without overflow double the scale")
    ] = 1000
    hysteresis: Annotated[
        int, whole(1), does("so many overflows halve the scale; each skips its step")
    ] = 2
    min_loss_scale: Annotated[float, number(0, above=True), does("the scale is never below it")] = (
        1.0
    )
    auto_cast: Annotated[bool, FLAG, so_anyway("floating inputs are cast to float16")] = False
    opt_level: Annotated[Any, ANYTHING, nowhere("of NVIDIA's Apex")] = None
    fp16_scale_tolerance: Annotated[Any, ANYTHING, nowhere("of fairseq")] = None

    @field_validator("loss_scale_window", "min_loss_scale", mode="wrap")
    @classmethod
    def _unless_idle(cls, value: object, read: Callable[[Any], Any], info: ValidationInfo) -> Any:
        """Let them be any number where no scale follows overflows, as in files with fp16 off."""
        try:
            return read(value)
        except ValueError:
            if info.data.get("enabled") and not info.data.get("loss_scale"):
                raise
            try:
                return number_of(value)
            except (ValueError, TypeError):
                pass
            raise


class Bf16(Block):
    """bfloat16."""

    place: ClassVar[str] = "bf16."

    enabled: Annotated[
        bool,
        FLAG,
        does("computes in bfloat16 with float32 master weights", filler=HUGGING_FACE),
    ] = False
    check_grad_overflow: Annotated[
        bool,
        FLAG,
        does("a step with inf or NaN in a gradient is skipped; false: it is taken"),
    ] = True
    bf16_master_weights_and_grads: Annotated[
        bool,
        FLAG,
        does("weights are bfloat16 themselves, and gradients are reduced and added up in it"),
    ] = False
    bf16_optimizer_states: Annotated[
        bool,
        FLAG,
        does("the state of the optimizer of the config is bfloat16, beside such weights"),
    ] = False
    immediate_grad_update: Annotated[
        bool, FLAG, so_anyway("gradients are reduced as backward makes them")
    ] = False

"""How many tokens random-LTD keeps, step by step."""

from collections.abc import Mapping
from math import inf
from numbers import Real
from typing import Any

from deepspeed_ext.ops._kinds import check_kinds

_STATE = ("consumed_layer_tokens", "current_steps", "current_value", "min_value", "max_value")


class RandomLTDScheduler:
    """Tokens that layers keep: in each step some more, by a line from the fewest to the most.

    At step s it is min_value + (max_value - min_value) x s / require_steps, rounded down to a
    multiple of seq_per_step, and max_value at the most. The engine asks for it before each step's
    forwards; a loop of your own calls `update_seq` between two steps, not between a forward and its
    backward: layers in an activation checkpoint ask anew.

    Args:
        config: DeepSpeed's block random_ltd, and beside its keys global_batch_size: the samples of
            a step, which only the count of tokens needs.

    Raises:
        ValueError: a key is missing, or its value does not fit.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        check_kinds("RandomLTDScheduler", config=(config, Mapping))
        schedule = _needed(config, "random_ltd_schedule")
        kind = _needed(schedule, "schedule_type", "random_ltd_schedule.")
        if kind != "fixed_linear":
            raise ValueError(
                f"RandomLTDScheduler: schedule_type is {kind!r}, expected 'fixed_linear'"
            )
        if dict(config.get("layer_token_lr_schedule") or {}).get("enabled"):
            raise ValueError(
                "RandomLTDScheduler: layer_token_lr_schedule.enabled is True, expected False; give"
                " a schedule of rates"
            )
        steps = _needed(schedule, "schedule_config", "random_ltd_schedule.")
        inside = "random_ltd_schedule.schedule_config."
        self._require_steps = _number(steps, "require_steps", 1, inside)
        self._per_step = _number(steps, "seq_per_step", 1, inside)
        self._min = _number(schedule, "min_value", self._per_step, "random_ltd_schedule.")
        self._max = _number(schedule, "max_value", self._min, "random_ltd_schedule.")
        self.model_layer_num = _number(config, "total_layer_num", 1)
        self.random_ltd_layer_num = _number(config, "random_ltd_layer_num", 0)
        self.global_batch_size = _number(config, "global_batch_size", 1)
        self.state: dict[str, int] = {}
        self.reset_to_init()

    def get_value(self, global_steps: int) -> int:
        """Return how many tokens a layer keeps at a step."""
        grown = (self._max - self._min) * int(global_steps) // self._require_steps + self._min
        return min(grown - grown % self._per_step, self._max)

    def get_current_seq(self) -> int:
        """Return how many tokens a layer keeps now."""
        return self.state["current_value"]

    def set_current_seq(self, seq_length: int) -> None:
        """Let layers keep so many tokens, 1 or more, until the next `update_seq`."""
        self.state["current_value"] = _number({"seq_length": seq_length}, "seq_length", 1)

    def update_seq(self, global_steps: int) -> None:
        """Go to a step, of which the tokens are counted when it is a new one."""
        state = self.state
        state["current_value"] = self.get_value(global_steps)
        if global_steps != state["current_steps"]:
            others = self.model_layer_num - self.random_ltd_layer_num
            tokens = state["current_value"] * self.random_ltd_layer_num + self._max * others
            state["consumed_layer_tokens"] += self.global_batch_size * tokens
            state["current_steps"] = int(global_steps)

    def get_total_layer_tokens(self, train_iters: int) -> int:
        """Go through so many steps, and return the tokens of all layers so far."""
        for step in range(train_iters):
            self.update_seq(step)
        return self.state["consumed_layer_tokens"]

    def get_random_ltd_layer_num(self) -> int:
        """Return how many layers drop tokens."""
        return self.random_ltd_layer_num

    def reset_to_init(self) -> None:
        """Go back to before the first step."""
        self.state = dict(zip(_STATE, (0, -1, self._min, self._min, self._max), strict=True))

    def get_state(self) -> dict[str, int]:
        """Return the state itself."""
        return self.state

    def set_state(self, state: Mapping[str, int]) -> None:
        """Go on from a state."""
        self.load_state_dict(state)

    def state_dict(self) -> dict[str, int]:
        """Return a copy of the state, with DeepSpeed's keys."""
        return dict(self.state)

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Go on from what `state_dict` returned, here or in DeepSpeed.

        The fewest and the most tokens are of the config, as in the engine's other schedules.
        """
        least = {"consumed_layer_tokens": 0, "current_steps": -1, "current_value": 1}
        self.state |= {name: _number(state_dict, name, number) for name, number in least.items()}


def _needed(config: Mapping[str, Any], name: str, inside: str = "") -> Any:
    if config.get(name) is None:
        raise ValueError(f"RandomLTDScheduler: {inside}{name} is missing, expected a value")
    return config[name]


def _number(config: Mapping[str, Any], name: str, least: int, inside: str = "") -> int:
    value = _needed(config, name, inside)
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not least <= value < inf or int(value) != value:
        raise ValueError(
            f"RandomLTDScheduler: {inside}{name} is {value!r}, expected a whole number, {least} or"
            " more"
        )
    return int(value)

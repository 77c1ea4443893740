"""Random-LTD as a config asks for it: layers of the model that drop tokens, and their schedule."""

from typing import Any

from torch import nn

from deepspeed_ext.config import BatchSizes, Config
from deepspeed_ext.config.data_efficiency import RandomLtd
from deepspeed_ext.config.kinds import thawed
from deepspeed_ext.random_ltd import RandomLayerTokenDrop, RandomLTDScheduler

_OP = "initialize"


class TokenDropping:
    """The layers that are to drop tokens, found before anything is changed.

    Args:
        model: that convert_to_random_ltd was called on, if the config asks for random_ltd.
        config: that was read.
        sizes: of its batches.

    Raises:
        ValueError: the model does not have the layers that the config names.
    """

    def __init__(self, model: nn.Module, config: Config, sizes: BatchSizes) -> None:
        block = config.data_efficiency.data_routing.random_ltd
        self._layers: list[RandomLayerTokenDrop] = []
        self._config: dict[str, Any] = {}
        self.scheduler: RandomLTDScheduler | None = None
        if not block.enabled:
            return
        self._layers = _layers_of(model, block)
        self._config = thawed(block.model_dump())
        self._config["global_batch_size"] = sizes.train
        self.scheduler = RandomLTDScheduler(self._config)

    def begin(self) -> None:
        """Let the layers drop tokens, as many as the schedule says."""
        if self.scheduler is not None:
            for number, layer in enumerate(self._layers):
                layer.init_config(self._config, self.scheduler, number)


def _layers_of(model: nn.Module, block: RandomLtd) -> list[RandomLayerTokenDrop]:
    ids = block.random_ltd_layer_id or ()
    if len(ids) != block.random_ltd_layer_num:
        raise ValueError(
            f"{_OP}: {block.place}random_ltd_layer_num is {block.random_ltd_layer_num}, expected"
            f" {len(ids)}, the length of random_ltd_layer_id"
        )
    found: dict[int, RandomLayerTokenDrop] = {}
    for name, module in model.named_modules():
        numbers = [int(part) for part in name.split(".") if part.isdecimal()]
        if not isinstance(module, RandomLayerTokenDrop) or not numbers:
            continue
        if numbers[-1] in found:
            raise ValueError(
                f"{_OP}: model has two layers of number {numbers[-1]} that may drop tokens,"
                " expected one; convert those of one list alone"
            )
        found[numbers[-1]] = module
    lacking = [number for number in ids if number not in found]
    if lacking:
        raise ValueError(
            f"{_OP}: {block.place}random_ltd_layer_id has {lacking[0]}, expected the number of a"
            f" RandomLayerTokenDrop in model, one of {sorted(found)}; call"
            " deepspeed_ext.random_ltd.convert_to_random_ltd before"
        )
    return [found[number] for number in sorted(ids)]

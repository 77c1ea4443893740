"""A layer of which each forward in training sees some tokens, drawn anew."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from deepspeed_ext.ops import mask_gather_bert, token_gather, token_scatter
from deepspeed_ext.ops.random_ltd.dropping_utils import sampled_ids
from deepspeed_ext.random_ltd.scheduler import RandomLTDScheduler

_ORDERS = {"batch_seq_dim": True, "seq_batch_dim": False}
_NAME = "RandomLayerTokenDrop"


class RandomLayerTokenDrop(nn.Module):
    """A layer around which tokens go that it is not to see; it is as without that until
    `init_config`, and in evaluation.

    Tokens are drawn in each forward, for each sample, by torch's generator of the device, as those
    of dropout are, and belong to that forward alone: nothing of them is kept in the layer, the
    schedule or the process. An activation checkpoint around the layer draws the same ones again
    where it keeps the state of the generator, as torch's does unless told otherwise.

    With the tokens come what belongs to them: of the mask, whatever the kind of model, so that it
    may hide padding as well as the future; of position_ids and position_embeddings. What has the
    layer's other attributes asked for is the layer.

    Args:
        layer: takes hidden states first, (samples, tokens, n) or (tokens, samples, n), and returns
            them so, or a tuple that begins with them.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.random_ltd_layer = layer
        self.random_ltd_scheduler: RandomLTDScheduler | None = None
        self.random_ltd_layer_id: int | None = None
        self.mask_name: str | None = None
        self.batch_first = True
        self._names: tuple[str, ...] = ()

    def init_config(
        self,
        config: Mapping[str, Any],
        scheduler: RandomLTDScheduler,
        random_ltd_layer_id: int,
    ) -> None:
        """Let tokens be dropped from now on.

        Args:
            config: DeepSpeed's block random_ltd. Its model_mask_name names the mask among the
                arguments of the layer, None: there is none; hidden_state_order is batch_seq_dim or
                seq_batch_dim.
            scheduler: says how many tokens are kept.
            random_ltd_layer_id: number of the layer among those that drop tokens.

        Raises:
            ValueError: hidden_state_order is another one.
        """
        order = config.get("hidden_state_order", "batch_seq_dim")
        if order not in _ORDERS:
            raise ValueError(
                f"{_NAME}: hidden_state_order is {order!r}, expected one of {', '.join(_ORDERS)}"
            )
        self.batch_first = _ORDERS[order]
        self.mask_name = config.get("model_mask_name")
        self.random_ltd_scheduler = scheduler
        self.random_ltd_layer_id = random_ltd_layer_id
        self._names = tuple(inspect.signature(self.random_ltd_layer.forward).parameters)[1:]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or name == "random_ltd_layer":
                raise
            return getattr(self.random_ltd_layer, name)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Call the layer with some tokens, and return these among all.

        Raises:
            ValueError: the mask is not given under its name, or is not of these tokens.
            TypeError: the layer returns something else, or the mask is no tensor.
        """
        scheduler = self.random_ltd_scheduler
        along = 1 if self.batch_first else 0
        if scheduler is None or not self.training:
            return self.random_ltd_layer(hidden_states, *args, **kwargs)
        kept, tokens = scheduler.get_current_seq(), hidden_states.shape[along]
        if kept >= tokens:
            return self.random_ltd_layer(hidden_states, *args, **kwargs)
        samples, device = hidden_states.shape[1 - along], hidden_states.device
        [ids] = sampled_ids(_NAME, kept, tokens, samples, 1, device)
        given = dict(zip(self._names, args, strict=False)) | kwargs
        if self.mask_name is not None and self.mask_name not in given:
            raise ValueError(
                f"{_NAME}: {self.mask_name} is not given to the layer, expected it, as it is the"
                f" model_mask_name; given are {', '.join(given) or 'no arguments'}"
            )
        part = token_gather(hidden_states, ids, self.batch_first)
        known = zip(self._names, args, strict=False)
        positional = [self._of_kept(name, value, ids, tokens) for name, value in known]
        named = {name: self._of_kept(name, value, ids, tokens) for name, value in kwargs.items()}
        rest = args[len(positional) :]
        found = self.random_ltd_layer(part, *positional, *rest, **named)
        if isinstance(found, Tensor):
            return self._among_all(hidden_states, found, ids)
        if isinstance(found, tuple) and found and isinstance(found[0], Tensor):
            return (self._among_all(hidden_states, found[0], ids), *found[1:])
        raise TypeError(
            f"{_NAME}: the layer returns a {type(found).__name__}, expected a tensor, or a tuple"
            " that begins with one"
        )

    def _among_all(self, hidden_states: Tensor, part: Tensor, ids: Tensor) -> Tensor:
        """Return all tokens in the dtype of the layer, which autocast may have made another."""
        return token_scatter(hidden_states.to(part.dtype), part, ids, self.batch_first)

    def _of_kept(self, name: str, value: Any, ids: Tensor, tokens: int) -> Any:
        """Return the part of an argument that belongs to the tokens that are kept."""
        if value is None:
            return None
        if name == self.mask_name:
            return _mask_of(name, value, ids, tokens)
        if name == "position_ids":
            return _numbers_of(value, ids)
        if name == "position_embeddings":
            return tuple(token_gather(t.expand(len(ids), *t.shape[1:]), ids) for t in value)
        return value


def _numbers_of(numbers: Tensor, ids: Tensor) -> Tensor:
    """Return those of the kept tokens, of numbers (samples or 1, tokens)."""
    each = numbers.expand(len(ids), numbers.shape[-1])
    return token_gather(each[..., None], ids)[..., 0]


def _mask_of(name: str, mask: Any, ids: Tensor, tokens: int) -> Tensor:
    """Return the part of a mask that belongs to the kept tokens of each sample.

    Args:
        name: of the mask.
        mask: (samples or 1, tokens), or (samples or 1, [heads,] tokens or 1, tokens).
        ids: of the kept tokens.
        tokens: how many there are.
    """
    if not isinstance(mask, Tensor):
        raise TypeError(f"{_NAME}: {name} is a {type(mask).__name__}, expected a tensor")
    first = {1, len(ids)}
    if mask.dim() not in (2, 3, 4) or mask.shape[-1] != tokens or mask.shape[0] not in first:
        raise ValueError(
            f"{_NAME}: {name} has shape {list(mask.shape)}, expected two to four dimensions, the"
            f" last of {tokens}, the tokens, and the first of 1 or {len(ids)}, the samples"
        )
    if mask.dim() == 2:
        return _numbers_of(mask, ids)
    four = mask if mask.dim() == 4 else mask[:, None]
    found = mask_gather_bert(four.expand(len(ids), *four.shape[1:]), ids[None])[0]
    return found if mask.dim() == 4 else found[:, 0]

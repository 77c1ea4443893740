"""SparseAttentionUtils: what makes a model with dense self-attention one with a sparse one."""

import copy
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed_ext.ops._kinds import check_kinds, check_whole
from deepspeed_ext.ops.sparse_attention.bert_sparse_self_attention import BertSparseSelfAttention
from deepspeed_ext.ops.sparse_attention.sparsity_config import SparsityConfig

_LOGGER = logging.getLogger("deepspeed_ext")
_RESERVED = {"bert": 0, "roberta": 2}  # rows of the positions' embedding that are of no position


class SparseAttentionUtils:
    """Functions for BERT and RoBERTa models that exist, of transformers or of another make.

    A model is one with a head, which has the rest as `bert` or `roberta`, or that rest itself,
    whose config.model_type says which of the two it is.
    """

    @staticmethod
    def extend_position_embedding(model: nn.Module, max_position: int) -> nn.Module:
        """Make a model one for longer sequences: its positions begin again where they end.

        All of max_position positions are there afterwards; in DeepSpeed 0.9.0 a BERT has whole
        copies only, and a RoBERTa what was in memory where its positions end, and in the two rows
        before its positions.

        Args:
            model: is changed; weights stay the same parameters.
            max_position: tokens of the longest sequence, more than it has positions.

        Returns:
            model.

        Raises:
            ValueError: the model is of neither kind, or has as many positions.
        """
        body, reserved = _body_of("extend_position_embedding", model)
        check_whole("extend_position_embedding", max_position=max_position)
        max_position = int(max_position)  # a config takes no number of numpy
        positions = body.embeddings.position_embeddings
        before = positions.weight.shape[0] - reserved
        if max_position <= before:
            raise ValueError(
                f"extend_position_embedding: max_position is {max_position}, expected more than"
                f" {before}, the positions of the model"
            )
        rows = reserved + torch.arange(max_position, device=positions.weight.device) % before
        with torch.no_grad():
            kept = positions.weight[:reserved]
            positions.weight.data = torch.cat([kept, positions.weight[rows]])
        positions.weight.grad = None
        positions.num_embeddings = count = reserved + max_position
        of_positions = {"position_ids": torch.arange(count), "token_type_ids": torch.zeros(count)}
        for name, values in of_positions.items():
            buffer = getattr(body.embeddings, name, None)
            if isinstance(buffer, Tensor):
                setattr(body.embeddings, name, values[None].to(buffer))
        config: Any = model.config
        config.max_position_embeddings = count
        _LOGGER.info("extend_position_embedding: %d positions, before %d", max_position, before)
        return model

    @staticmethod
    def update_tokenizer_model_max_length(tokenizer: Any, max_position: int) -> Any:
        """Set how many tokens a tokenizer cuts texts at, and return it."""
        tokenizer.model_max_length = max_position
        tokenizer.init_kwargs["model_max_length"] = max_position
        _LOGGER.info("update_tokenizer_model_max_length: %d tokens", max_position)
        return tokenizer

    @staticmethod
    def replace_model_self_attention_with_sparse_self_attention(
        model: nn.Module, max_position: int, sparsity_config: SparsityConfig | None = None
    ) -> nn.Module:
        """Put BertSparseSelfAttention in the place of the self-attention of all layers.

        Weights stay the same parameters under the same names. Probabilities are no longer dropped
        out, in DeepSpeed neither. There the model itself has to have a method that does this; one
        of transformers has none.

        Args:
            model: is changed.
            max_position: tokens of the longest sequence; at most the positions that it has, see
                extend_position_embedding.
            sparsity_config: the pattern; None for FixedSparsityConfig with the model's heads. Of
                one with a seed, each layer has the seed after that of the layer before it, as
                layers draw random blocks of their own in DeepSpeed.

        Returns:
            model.

        Raises:
            ValueError: the model is of neither kind, is a decoder, or has fewer positions; or the
                pattern has another number of heads.
        """
        op = "replace_model_self_attention_with_sparse_self_attention"
        body, reserved = _body_of(op, model)
        there = body.embeddings.position_embeddings.weight.shape[0] - reserved
        if max_position > there:
            raise ValueError(
                f"{op}: max_position is {max_position}, expected at most {there}, the positions of"
                " the model; use extend_position_embedding"
            )
        if getattr(model.config, "is_decoder", False):
            raise ValueError(f"{op}: model.config.is_decoder is True, expected False: an encoder")
        _replace(model.config, body.encoder.layer, sparsity_config, max_position)
        return model

    @staticmethod
    def replace_self_attention_layer_with_sparse_self_attention_layer(
        config: Any, layers: Iterable[nn.Module], sparsity_config: SparsityConfig | None = None
    ) -> Iterable[nn.Module]:
        """Do the same for layers, each with an attention.self, and return them.

        Args:
            config: of the model; its max_position_embeddings are the tokens of the longest
                sequence, 2,048 if it has none.
            layers: are changed.
            sparsity_config: the pattern, likewise.
        """
        _replace(config, layers, sparsity_config, getattr(config, "max_position_embeddings", 2048))
        return layers

    @staticmethod
    def pad_to_block_size(
        block_size: int,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        pad_token_id: int,
        model_embeddings: Callable[[Tensor], Tensor] | None,
    ) -> tuple[int, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Pad the inputs of a model to whole blocks, with tokens that the mask leaves out.

        SparseSelfAttention does not need that; that of DeepSpeed does.

        Args:
            block_size: of the pattern.
            input_ids: (batch, tokens), or None with inputs_embeds; padded with pad_token_id.
            attention_mask: (batch, tokens), 1 or True where a token takes part; None for all, of
                which one is made where there is padding. Theirs fails then, and likewise with None
                for token_type_ids.
            token_type_ids: None, or (batch, tokens); padded with 0.
            position_ids: None, or (batch, tokens); padded with pad_token_id.
            inputs_embeds: None, or (batch, tokens, size); padded with what model_embeddings gives.
            pad_token_id: of the model.
            model_embeddings: takes ids, gives embeddings; None without inputs_embeds.

        Returns:
            How many tokens of padding there are, and the five inputs in the order above.

        Raises:
            ValueError: input_ids and inputs_embeds are both None, or inputs_embeds has no
                model_embeddings beside it.
        """
        given = inputs_embeds if input_ids is None else input_ids
        if given is None:
            raise ValueError(
                "pad_to_block_size: input_ids is None beside inputs_embeds None, expected one of"
                " them"
            )
        batch, tokens = given.shape[:2]
        padding = -tokens % block_size
        if padding == 0:
            return 0, input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds
        if inputs_embeds is not None:
            if model_embeddings is None:
                raise ValueError(
                    "pad_to_block_size: model_embeddings is None, expected what gives inputs_embeds"
                )
            ids = torch.full((batch, padding), pad_token_id, device=inputs_embeds.device)
            embedded = model_embeddings(ids).to(inputs_embeds.dtype)
            inputs_embeds = torch.cat([inputs_embeds, embedded], dim=1)
        if attention_mask is None:
            attention_mask = torch.ones(batch, tokens, dtype=torch.int64, device=given.device)
        return (
            padding,
            _longer(input_ids, padding, pad_token_id),
            _longer(attention_mask, padding, 0),
            _longer(token_type_ids, padding, 0),
            _longer(position_ids, padding, pad_token_id),
            inputs_embeds,
        )

    @staticmethod
    def unpad_sequence_output(pad_len: int, sequence_output: Tensor) -> Tensor:
        """Return (batch, tokens, ...) without the last pad_len tokens."""
        return sequence_output[:, : sequence_output.shape[1] - pad_len]


class _OfTransformers(BertSparseSelfAttention):
    """What layers of transformers call, and unpack."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *others: Any,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Return the context of each token, and None for probabilities, which are not there."""
        named = {f"argument {i}": value for i, value in enumerate(others, 3)}
        for name in ("cache", "past_key_values", "past_key_value", "encoder_hidden_states"):
            named[name] = options.get(name)
        named |= {name: options.get(name) for name in ("head_mask", "output_attentions")}
        for name, value in named.items():
            if value is not None and value is not False:
                raise ValueError(
                    f"BertSparseSelfAttention: {name} is a {type(value).__name__}, expected None:"
                    " it is self-attention of an encoder, without probabilities in memory"
                )
        return self.attend(hidden_states, **_masks_of(attention_mask)), None


def _masks_of(mask: Tensor | None) -> dict[str, Tensor | None]:
    """Return a mask of transformers' as one of keys if it is the same for all queries."""
    if mask is None:
        return {}
    check_kinds("BertSparseSelfAttention", attention_mask=(mask, Tensor))
    if not mask.is_floating_point():
        mask = mask != 0
    if mask.dim() < 4:
        return {"key_padding_mask": mask}
    is_of_keys = mask.shape[1] == 1 and (mask.shape[2] == 1 or mask.stride(2) == 0)
    return {"key_padding_mask": mask[:, 0, 0]} if is_of_keys else {"attn_mask": mask}


def _body_of(op: str, model: Any) -> tuple[Any, int]:
    """Return the part of a model with embeddings and layers, and how many rows are reserved."""
    for kind, reserved in _RESERVED.items():
        body = getattr(model, kind, None)
        if body is None and getattr(getattr(model, "config", None), "model_type", "") == kind:
            body = model
        if hasattr(body, "embeddings"):
            return body, reserved
    raise ValueError(f"{op}: model is a {type(model).__name__}, expected a BERT or a RoBERTa")


def _replace(
    config: Any, layers: Iterable[Any], sparsity_config: SparsityConfig | None, tokens: int
) -> None:
    for number, layer in enumerate(layers):
        mine = sparsity_config
        if mine is not None and hasattr(mine, "seed"):
            mine = copy.copy(mine)
            mine.seed += number
        layer.attention.self = _instead_of(layer.attention.self, config, mine, tokens)


def _instead_of(
    before: Any, config: Any, sparsity_config: SparsityConfig | None, tokens: int
) -> BertSparseSelfAttention:
    block = 16 if sparsity_config is None else sparsity_config.block
    makers = {each.__module__.partition(".")[0] for each in type(before).__mro__}
    is_called_so = "transformers" in makers or isinstance(before, _OfTransformers)
    kind = _OfTransformers if is_called_so else BertSparseSelfAttention
    with torch.device("meta"):  # its own layers go
        after = kind(config, sparsity_config, -(-tokens // block) * block)
    attention = after.sparse_self_attention
    attention.attn_mask_mode = "add"
    for name in ("query", "key", "value"):
        setattr(after, name, getattr(before, name))
    device = after.query.weight.device
    if device.type != "meta":
        attention.to(device)
    return after.train(before.training)


def _longer(ids: Tensor | None, padding: int, value: int) -> Tensor | None:
    return None if ids is None else F.pad(ids, (0, padding), value=value)

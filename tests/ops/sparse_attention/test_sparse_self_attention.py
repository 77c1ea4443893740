"""SparseSelfAttention and what is around it: by the op's definition, and by models of others."""

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from samples import BF16, DTYPES, F32, make
from torch import Tensor, nn

from deepspeed_ext.ops import block_sparse_attention_ref
from deepspeed_ext.ops.sparse_attention import (
    BertSparseSelfAttention,
    BigBirdSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    SparseAttentionUtils,
    SparseSelfAttention,
    SparsityConfig,
)


def inputs(tokens: int, dtype: torch.dtype = F32, device: str = "cpu") -> list[Tensor]:
    shape = (2, 4, tokens, 16)
    return [make(shape, dtype, seed, device).requires_grad_() for seed in range(3)]


def module(**options: Any) -> SparseSelfAttention:
    pattern = BigBirdSparsityConfig(4, 16, True, num_random_blocks=2)
    return SparseSelfAttention(pattern, max_seq_length=128, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [128, 64, 50])
def test_values_and_gradients(tokens: int, dtype: torch.dtype, device: str) -> None:
    attention = module().to(device)
    given = inputs(tokens, dtype, device)
    wide = [t.detach().double().requires_grad_() for t in given]
    of_keys = make((2, tokens), F32, 4, device)
    of_pairs = (make((tokens, tokens), F32, 5, device) > -1).to(dtype)
    rpe = make((4, tokens, tokens), dtype, 6, device)
    out = attention(*given, rpe, of_keys[:, None, None], of_pairs)
    layout = attention.get_layout(tokens)
    want = block_sparse_attention_ref(
        *wide, layout, 16, key_padding_mask=of_keys, attn_mask=of_pairs != 0, rpe=rpe
    )
    assert out.dtype == dtype
    error = max(torch.finfo(dtype).eps * 4, 1e-5)
    torch.testing.assert_close(out.double(), want, rtol=error, atol=error)
    grad = make(tuple(out.shape), dtype, 7, device)
    got = torch.autograd.grad(out, given, grad)
    for mine, right in zip(got, torch.autograd.grad(want, wide, grad.double()), strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=error * 4, atol=error * 8)


def test_masks_in_both_modes() -> None:
    q, k, v = inputs(64)
    keep = make((2, 64), F32, 4) > -1
    want = module()(q, k, v, key_padding_mask=keep)
    added = torch.zeros(2, 64).masked_fill(~keep, -torch.inf)
    assert torch.equal(module()(q, k, v, key_padding_mask=added), want)
    kept = module(key_padding_mask_mode="mul")
    for mask in (keep.int(), keep.double(), keep):
        assert torch.equal(kept(q, k, v, key_padding_mask=mask), want)
    pairs = torch.ones(64, 64).tril()
    causal = module(causal=True)(q, k, v)
    torch.testing.assert_close(module()(q, k, v, attn_mask=pairs), causal)
    bias = torch.zeros(64, 64, dtype=torch.float64).masked_fill(pairs == 0, -torch.inf)
    torch.testing.assert_close(module(attn_mask_mode="add")(q, k, v, attn_mask=bias), causal)


def test_a_key_that_is_transposed() -> None:
    q, k, v = inputs(64)
    assert torch.equal(module()(q, k.mT, v), module()(q, k, v))


def test_the_layout_is_in_the_state_dict() -> None:
    first, second = module(), module()
    assert list(first.state_dict()) == ["master_layout"]
    assert first.master_layout.data_ptr() != second.master_layout.data_ptr()
    other = SparseSelfAttention(BigBirdSparsityConfig(4, 16, True, 2, seed=9), max_seq_length=128)
    assert not torch.equal(first.master_layout, other.master_layout)
    other.load_state_dict(first.state_dict())
    q, k, v = inputs(64)
    assert torch.equal(other(q, k, v), first(q, k, v))
    assert first.half().master_layout.dtype == torch.int64
    assert torch.equal(copy.deepcopy(first)(q, k, v), second(q, k, v))
    # Two objects with other patterns and as many tokens: those of the older package mixed them up.
    dense = SparseSelfAttention(DenseSparsityConfig(4), max_seq_length=64)
    assert not torch.equal(dense(q, k, v), second(q, k, v))
    assert SparseSelfAttention().master_layout.shape == (4, 128, 128)


class Own(SparsityConfig):
    """Four heads, and a layout that is what it is."""

    def __init__(self, layout: Any) -> None:
        super().__init__(4)
        self.layout = layout

    def make_layout(self, seq_len: int) -> Tensor:
        return self.layout  # type: ignore[no-any-return]


def refusals(q: Tensor, short: Tensor) -> list[tuple[Any, str]]:
    mask = torch.ones(64, 64, requires_grad=True)
    return [
        (lambda: module()(q, short, short), "SparseSelfAttention: key has shape [2, 4, 50, 16], e"),
        (lambda: module()(q, q, short), "SparseSelfAttention: value has shape [2, 4, 50, 16], exp"),
        (lambda: module()(q[0], q[0], q[0]), "SparseSelfAttention: key has shape [4, 64, 16], exp"),
        (lambda: module()(q, q, None), "SparseSelfAttention: value is None, expected a tensor"),
        (
            lambda: module()(*[torch.ones(1, 4, 130, 16)] * 3),
            "SparseSelfAttention: query has 130 tokens, expected at most max_seq_length, 128",
        ),
        (
            lambda: module()(q[:, :3], q[:, :3], q[:, :3]),
            "block_sparse_attention: layout has shape",
        ),
        (lambda: module()(q, q, q, attn_mask=mask), "SparseSelfAttention: a mask requires a grad"),
        (lambda: module()(q, q, q, rpe=mask), "block_sparse_attention: rpe requires a gradient"),
        (
            lambda: module()(q, q, q, key_padding_mask=torch.ones(2, 64, dtype=torch.int64)),
            "block_sparse_attention: key_padding_mask is int64, expected bool, float32",
        ),
        (lambda: module(attn_mask_mode="or"), "SparseSelfAttention: attn_mask_mode is 'or', expe"),
        (lambda: SparseSelfAttention(4), "SparseSelfAttention: sparsity_config is a int, expecte"),
        (
            lambda: SparseSelfAttention(DenseSparsityConfig),  # type: ignore[arg-type]
            "SparseSelfAttention: sparsity_config is a type, expected a SparsityConfig",
        ),
        (lambda: module(causal="no"), "SparseSelfAttention: causal is 'no', expected True or Fa"),
        *(
            (lambda layout=layout: SparseSelfAttention(Own(layout), max_seq_length=32), text)
            for layout, text in (
                (None, "SparseSelfAttention: layout is None, expected a tensor"),
                (torch.ones(2, 2).long(), "SparseSelfAttention: layout has shape [2, 2], expected"),
                (
                    torch.ones(4, 2, 3),
                    "SparseSelfAttention: layout has shape [4, 2, 3], expected [",
                ),
                (
                    torch.ones(1, 2, 2),
                    "SparseSelfAttention: layout is float32, expected bool, uint",
                ),
            )
        ),
        (lambda: SparseSelfAttention(SparsityConfig(4)), "SparsityConfig: make_layout is not def"),
        (
            lambda: SparseSelfAttention(max_seq_length=100),
            "FixedSparsityConfig: seq_len is 100, expected a multiple of block, 16",
        ),
    ]


def test_what_is_refused() -> None:
    q, short = inputs(64)[0], inputs(50)[0]
    for call, text in refusals(q, short):
        with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
            call()
        assert str(caught.value).startswith(text)


def sizes(**more: Any) -> SimpleNamespace:
    return SimpleNamespace(hidden_size=64, num_attention_heads=4, **more)


def test_the_part_of_a_bert() -> None:
    attention = BertSparseSelfAttention(sizes(), FixedSparsityConfig(4), max_seq_length=128)
    hidden, mask = make((2, 96, 64), F32, 0).requires_grad_(), torch.zeros(2, 1, 1, 96)
    mask[1, ..., 70:] = -10_000.0
    out = attention(hidden, mask)
    q, k, v = (
        attention.transpose_for_scores(part(hidden))
        for part in (attention.query, attention.key, attention.value)
    )
    want = attention.sparse_self_attention(q, k, v, key_padding_mask=mask[:, 0, 0])
    assert torch.equal(out, want.transpose(1, 2).reshape(2, 96, 64))
    out.sum().backward()
    assert all(p.grad is not None for p in attention.parameters())
    assert attention(hidden).shape == (2, 96, 64)
    assert BertSparseSelfAttention(sizes()).sparse_self_attention.sparsity_config.num_heads == 4
    for wrong, pattern, text in (
        (sizes(), FixedSparsityConfig(2), "sparsity_config.num_heads is 2, expected 4"),
        (SimpleNamespace(hidden_size=65, num_attention_heads=4), None, "config.hidden_size is 65"),
    ):
        with pytest.raises(ValueError, match=f"^BertSparseSelfAttention: {text}"):
            BertSparseSelfAttention(wrong, pattern)


def a_bert(implementation: str = "sdpa") -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=32,
        max_position_embeddings=64,
        attn_implementation=implementation,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    return transformers.BertForMaskedLM(config).eval()


replace = SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_dense_pattern_in_a_model_changes_nothing(implementation: str) -> None:
    model = a_bert(implementation)
    ids = torch.randint(50, (2, 60), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, 40:] = 0
    of_keys = mask[:, None, None].bool()  # of which transformers makes no larger one
    before = [model(ids).logits, *[model(ids, attention_mask=mask).logits] * 2]
    weights = dict(model.named_parameters())
    for _ in range(2):  # one that was replaced is replaced by another as well
        assert replace(model, 60, DenseSparsityConfig(4)) is model
    for name, weight in model.named_parameters():
        assert weight is weights[name]
    after = [model(ids), model(ids, attention_mask=mask), model(ids, attention_mask=of_keys)]
    for got, want in zip(after, before, strict=True):
        torch.testing.assert_close(got.logits[mask.bool()], want[mask.bool()], rtol=1e-4, atol=1e-5)
    replace(model, 64, FixedSparsityConfig(4, num_local_blocks=2))
    assert not torch.allclose(model(ids).logits, before[0], rtol=1e-2)
    model.train()
    loss = model(ids, labels=ids).loss
    loss.backward()
    assert all(weights[name].grad is not None for name in weights if "self.query" in name)
    with pytest.raises(ValueError, match=r"^BertSparseSelfAttention: output_attentions is a bool"):
        model.bert.encoder.layer[0].attention.self(torch.ones(1, 16, 32), output_attentions=True)


def test_layers_draw_random_blocks_of_their_own() -> None:
    model = a_bert()
    pattern = BigBirdSparsityConfig(4, num_random_blocks=1, num_sliding_window_blocks=1, seed=3)
    SparseAttentionUtils.extend_position_embedding(model, 250)
    replace(model, 250, pattern)
    first, second = (
        layer.attention.self.sparse_self_attention for layer in model.bert.encoder.layer
    )
    assert torch.equal(first.master_layout, pattern.make_layout(256)) and pattern.seed == 3
    assert not torch.equal(first.master_layout, second.master_layout)
    assert model(torch.zeros(1, 250, dtype=torch.int64)).logits.isfinite().all()


def test_positions_begin_again() -> None:
    model = a_bert()
    weight = model.bert.embeddings.position_embeddings.weight
    before = weight.detach().clone()
    assert SparseAttentionUtils.extend_position_embedding(model, 150) is model
    assert model.bert.embeddings.position_embeddings.weight is weight
    assert torch.equal(weight, before[torch.arange(150) % 64])
    assert model.config.max_position_embeddings == 150
    assert model(torch.zeros(1, 150, dtype=torch.int64)).logits.shape == (1, 150, 50)
    with pytest.raises(ValueError, match=r"max_position is 150, expected more than 150"):
        SparseAttentionUtils.extend_position_embedding(model, 150)
    with pytest.raises(ValueError, match=r"max_position is 151, expected at most 150"):
        replace(model, 151)
    with pytest.raises(TypeError, match=r"max_position is 200\.5, expected a whole number"):
        SparseAttentionUtils.extend_position_embedding(model, 200.5)  # type: ignore[arg-type]
    assert len(weight) == 150
    SparseAttentionUtils.extend_position_embedding(model, np.int64(160))  # type: ignore[arg-type]
    assert type(model.config.max_position_embeddings) is int and len(weight) == 160


def test_two_rows_of_a_roberta_are_of_no_position() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.RobertaConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=32,
        max_position_embeddings=66,
    )
    model = transformers.RobertaModel(config).eval()
    weight = model.embeddings.position_embeddings.weight
    before = weight.detach().clone()
    SparseAttentionUtils.extend_position_embedding(model, 200)
    assert torch.equal(weight[:66], before) and torch.equal(weight[66:130], before[2:])
    assert torch.equal(weight[194:], before[2:10]) and model.config.max_position_embeddings == 202
    replace(model, 200)
    ids = torch.full((1, 200), 7)
    assert model(ids).last_hidden_state.isfinite().all()


def test_models_that_are_not_taken() -> None:
    model = a_bert()
    model.config.is_decoder = True
    with pytest.raises(ValueError, match=r"model\.config\.is_decoder is True, expected False"):
        replace(model, 64)
    for call in (replace, SparseAttentionUtils.extend_position_embedding):
        with pytest.raises(ValueError, match=r"model is a Linear, expected a BERT or a RoBERTa$"):
            call(nn.Linear(2, 2), 64)


def test_layers_of_another_make() -> None:
    """They are called with a mask, and give a tensor."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(64, 64) for _ in range(3))

    layer = nn.Module()
    layer.attention = nn.Module()
    layer.attention.self = before = Attention().eval()
    layers = [layer]
    replaced = SparseAttentionUtils.replace_self_attention_layer_with_sparse_self_attention_layer(
        sizes(max_position_embeddings=100), layers
    )
    after: Any = layer.attention.self
    assert replaced is layers and type(after) is BertSparseSelfAttention
    assert after.query is before.query and not after.training
    assert after.sparse_self_attention.master_layout.shape == (4, 7, 7)
    assert after(torch.ones(1, 100, 64), torch.zeros(1, 1, 1, 100)).shape == (1, 100, 64)


def test_padding() -> None:
    pad, unpad = SparseAttentionUtils.pad_to_block_size, SparseAttentionUtils.unpad_sequence_output
    ids, mask = torch.arange(40).view(2, 20), torch.ones(2, 20, dtype=torch.bool)
    got = pad(16, ids, mask, ids * 0 + 1, ids, None, 9, None)
    padding, *padded = got
    assert padding == 12 and got[5] is None
    for values, before, value in zip(padded, (ids, mask, ids * 0 + 1, ids), (9, 0, 0, 9),
                                     strict=False):  # fmt: skip
        assert values is not None and values.dtype == before.dtype
        assert torch.equal(values[:, :20], before) and (values[:, 20:] == value).all()
    table = nn.Embedding(10, 3)
    embeds = torch.ones(2, 20, 3, dtype=BF16)
    _, none, mask_made, no_types, no_positions, longer = pad(
        16, None, None, None, None, embeds, 9, table
    )
    assert none is no_types is no_positions is None and longer is not None
    assert longer.dtype == BF16 and torch.equal(longer[:, 20:], table.weight[9].to(BF16).expand(
        2, 12, 3))  # fmt: skip
    assert mask_made is not None and mask_made.sum(1).tolist() == [20, 20]
    assert torch.equal(unpad(12, longer), embeds) and unpad(0, longer).shape == longer.shape
    whole = pad(20, ids, None, None, None, None, 9, None)
    assert whole[0] == 0 and whole[1] is ids and whole[2] is None
    with pytest.raises(ValueError, match=r"^pad_to_block_size: input_ids is None beside inputs_em"):
        pad(16, None, mask, None, None, None, 9, None)
    with pytest.raises(ValueError, match=r"^pad_to_block_size: model_embeddings is None, expected"):
        pad(16, None, mask, None, None, embeds, 9, None)


def test_a_tokenizer_cuts_later() -> None:
    tokenizer = SimpleNamespace(model_max_length=512, init_kwargs={})
    assert SparseAttentionUtils.update_tokenizer_model_max_length(tokenizer, 4096) is tokenizer
    assert tokenizer.model_max_length == tokenizer.init_kwargs["model_max_length"] == 4096

"""Block-sparse attention for models that were written for DeepSpeed: its classes, by its names.

- sparsity_config: patterns of blocks, of which layouts are made.
- sparse_self_attention: attention of such a layout, by the op block_sparse_attention.
  bert_sparse_self_attention: the part of a BERT around it. sparse_attention_utils: models that
  exist.
- tile_groups: where the blocks of a layout lie. matmul, softmax: products and softmax of tiles.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepspeed_ext.ops.sparse_attention.bert_sparse_self_attention import (
        BertSparseSelfAttention,
    )
    from deepspeed_ext.ops.sparse_attention.matmul import MatMul
    from deepspeed_ext.ops.sparse_attention.softmax import Softmax
    from deepspeed_ext.ops.sparse_attention.sparse_attention_utils import SparseAttentionUtils
    from deepspeed_ext.ops.sparse_attention.sparse_self_attention import SparseSelfAttention
    from deepspeed_ext.ops.sparse_attention.sparsity_config import (
        BigBirdSparsityConfig,
        BSLongformerSparsityConfig,
        DenseSparsityConfig,
        FixedSparsityConfig,
        LocalSlidingWindowSparsityConfig,
        SparsityConfig,
        VariableSparsityConfig,
    )

__all__ = [
    "BSLongformerSparsityConfig",
    "BertSparseSelfAttention",
    "BigBirdSparsityConfig",
    "DenseSparsityConfig",
    "FixedSparsityConfig",
    "LocalSlidingWindowSparsityConfig",
    "MatMul",
    "Softmax",
    "SparseAttentionUtils",
    "SparseSelfAttention",
    "SparsityConfig",
    "VariableSparsityConfig",
]

_HOMES = {
    "BertSparseSelfAttention": "bert_sparse_self_attention",
    "MatMul": "matmul",
    "Softmax": "softmax",
    "SparseAttentionUtils": "sparse_attention_utils",
    "SparseSelfAttention": "sparse_self_attention",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES.get(name, "sparsity_config")
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

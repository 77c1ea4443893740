"""block_sparse_attention on CUDA by torch's batched products, until it has a kernel there."""

from typing import Any, NoReturn


def forward(*arguments: Any, **options: Any) -> NoReturn:
    """Refuse."""
    raise RuntimeError(
        "block_sparse_attention: q is on cuda, expected cpu, as it has no kernel there yet; use"
        " torch.nn.attention.flex_attention"
    )


backward = forward

"""The block of the typed tree that names a pattern of blocks, for the model to compute with."""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from deepspeed_ext.config.block import Block
from deepspeed_ext.config.kinds import FLAG, WHOLES, choice, does, thawed, whole

if TYPE_CHECKING:
    from deepspeed_ext.ops.sparse_attention import SparsityConfig

_RANDOM = ("num_random_blocks", "seed")
_LISTED = ("global_block_indices", "global_block_end_indices")
_BAND = ("different_layout_per_head", "num_sliding_window_blocks", "attention")
_WINDOWS = ("different_layout_per_head", "attention", "horizontal_global_attention")
_OF_MODE: dict[
    str, tuple[str, tuple[str, ...]]
] = {  # a class, and which keys it takes beside block
    "dense": ("DenseSparsityConfig", ()),
    "fixed": (
        "FixedSparsityConfig",
        (
            *(*_WINDOWS, "num_local_blocks", "num_global_blocks"),
            "num_different_global_patterns",
        ),
    ),
    "variable": ("VariableSparsityConfig", (*_WINDOWS, "local_window_blocks", *_LISTED, *_RANDOM)),
    "bigbird": ("BigBirdSparsityConfig", (*_BAND, "num_global_blocks", *_RANDOM)),
    "bslongformer": ("BSLongformerSparsityConfig", (*_BAND, *_LISTED)),
}
_FIRST, _FOUR = [0], [4]


class SparseAttention(Block):
    """A pattern for block-sparse attention, which the model asks for by `sparsity_config`."""

    place: ClassVar[str] = "sparse_attention."

    mode: Annotated[str, choice(*_OF_MODE), does("the pattern; keys of others act nowhere")] = (
        "fixed"
    )
    block: Annotated[int, whole(1), does("tokens in a block")] = 16
    different_layout_per_head: Annotated[
        bool, FLAG, does("heads have layouts of their own, where the pattern has several")
    ] = False
    num_local_blocks: Annotated[int, whole(1), does("fixed: blocks in a window")] = 4
    num_global_blocks: Annotated[
        int, whole(0), does("fixed, bigbird: blocks, of a window or the first ones, that all see")
    ] = 1
    attention: Annotated[
        str,
        choice("bidirectional", "unidirectional"),
        does("unidirectional: no block behind the diagonal; in DeepSpeed not for all patterns"),
    ] = "bidirectional"
    horizontal_global_attention: Annotated[
        bool, FLAG, does("fixed, variable: blocks that all see also see all")
    ] = False
    num_different_global_patterns: Annotated[
        int, whole(1), does("fixed: how many places of such blocks heads take turns in")
    ] = 1
    num_random_blocks: Annotated[
        int, whole(0), does("variable, bigbird: random blocks in a row")
    ] = 0
    local_window_blocks: Annotated[
        list[int], WHOLES, does("variable: sizes of windows; the last one goes on")
    ] = _FOUR
    global_block_indices: Annotated[
        list[int], WHOLES, does("variable, bslongformer: blocks that all see")
    ] = _FIRST
    global_block_end_indices: Annotated[
        list[int] | None, WHOLES, does("where groups of such blocks end")
    ] = None
    num_sliding_window_blocks: Annotated[
        int, whole(0), does("bigbird, bslongformer: the width of the band")
    ] = 3
    seed: Annotated[int, whole(0), does("of random blocks; a key of ours")] = 0

    @property
    def acting(self) -> tuple[str, ...]:
        """The keys that the mode has."""
        return ("mode", "block", *_OF_MODE[self.mode][1])

    def as_dict(self) -> dict[str, Any]:
        """Return these, as DeepSpeedConfig.sparse_attention has them."""
        return {name: thawed(getattr(self, name)) for name in self.acting}

    def sparsity_config(self, num_heads: int) -> "SparsityConfig":
        """Return the pattern.

        Args:
            num_heads: of the attention, which no config says.

        Raises:
            ValueError: the keys do not fit together.
        """
        from deepspeed_ext.ops import sparse_attention  # a config is read without torch

        options = self.as_dict()
        name, _ = _OF_MODE[options.pop("mode")]
        pattern: SparsityConfig = getattr(sparse_attention, name)(num_heads, **options)
        return pattern

"""Where weights are on the CPU: pieces of huge pages, which overlap nothing and go with tensors."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from page_flags import flags_at

from deepspeed_ext import init_inference
from deepspeed_ext.inference.weights import host_memory as weight_memory
from deepspeed_ext.inference.weights.host_memory import WeightMemory
from deepspeed_ext.quantization.layout import TensorLayout

KIB = 1 << 10
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


def test_tensors_lie_side_by_side() -> None:
    memory = WeightMemory()
    shapes: list[tuple[tuple[int, ...], torch.dtype]] = [
        ((300, 1001), torch.bfloat16),
        ((256 * KIB,), torch.uint8),
        ((3, 70001), torch.float32),
        ((70 * KIB * KIB,), torch.uint8),  # more than a piece has
        ((5, 7), torch.float32),
        ((0, 9), torch.float32),
        ((), torch.float32),
    ]
    made = [memory.empty(*each) for each in shapes]
    for i, (tensor, (shape, dtype)) in enumerate(zip(made, shapes, strict=True)):
        assert (tuple(tensor.shape), tensor.dtype, tensor.is_contiguous()) == (shape, dtype, True)
        assert tensor.data_ptr() % 64 == 0 or tensor.numel() == 0
        tensor.fill_(i)
    assert all(bool((tensor == i).all()) for i, tensor in enumerate(made))
    first, second = made[:2]
    assert 0 < second.data_ptr() - first.data_ptr() - first.nbytes < 128


def test_zeros_by_name() -> None:
    wanted = {
        "a": TensorLayout((600, 500), torch.float32),
        "b": TensorLayout((3, 4), torch.uint8),
    }
    made = WeightMemory().zeros(wanted)
    assert {name: (tuple(t.shape), t.dtype) for name, t in made.items()} == wanted
    assert not any(tensor.any() for tensor in made.values())


def test_a_piece_goes_with_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[Any] = []
    real = weight_memory.FreshPages.take

    class Piece(bytearray):
        """That a weak reference can be to."""

    def take(self: Any, nbytes: int) -> Any:
        assert len(real(self, nbytes)) == nbytes
        piece = Piece(nbytes)
        pieces.append(weakref.ref(piece))
        return piece

    monkeypatch.setattr(weight_memory.FreshPages, "take", take)
    memory = WeightMemory()
    kept = memory.empty((256 * KIB,), torch.uint8)
    del memory
    assert pieces[0]() is not None
    del kept
    gc.collect()
    assert pieces[0]() is None


@pytest.mark.skipif(not HUGE_PAGES.exists(), reason="needs a kernel with huge pages")
@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_weights_of_an_engine_are_there(
    quantize: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of blocks, embedding and head, and floats on their way to codes are not."""
    from transformers import LlamaConfig, LlamaForCausalLM

    monkeypatch.setattr(
        "deepspeed_ext.io.checkpoint.fresh_pages._seconds_of_a_page", lambda pages: 0.0
    )
    config = LlamaConfig(
        vocab_size=3000,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=1,
        num_attention_heads=4,
    )
    torch.manual_seed(0)
    engine = init_inference(LlamaForCausalLM(config), quantize=quantize, quantize_head=quantize)
    weights = engine.decoder.weights
    assert weights.head is not None
    tensors: list[Any] = [linear.weight for linear in (weights.head, weights.layers[0].up)]
    tensors = [weights.embedding, *(t if quantize is None else t.codes for t in tensors)]
    assert all("hg" in flags_at(each.data_ptr()) for each in tensors)
    used = {each.untyped_storage().data_ptr() for each in tensors}
    assert len(used) == 1 and len(engine.generate([[1, 2, 3]], max_new_tokens=3)[0].tokens) == 3

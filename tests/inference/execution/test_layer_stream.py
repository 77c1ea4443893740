"""Layers that come when their turn comes: the bits are those of layers that are always there."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases import CASES, VOCABULARY, cache_for, decoder_of, model_of, run
from published_cases import METHODS, Published
from torch import Tensor

from deepspeed_ext.inference.execution.decoder import Decoder
from deepspeed_ext.inference.execution.layer_stream import LayerStream, slot_sizes
from deepspeed_ext.inference.initialize import init_inference
from deepspeed_ext.inference.weights.flat_layer import (
    copied_to,
    flat_bytes,
    travelling,
    view_of,
    without_memory,
)
from deepspeed_ext.inference.weights.loader import Layer
from deepspeed_ext.inference.weights.quantize_on_load import bytes_of

CPU = torch.device("cpu")
TOKENS = torch.randint(VOCABULARY, (70,), generator=torch.manual_seed(1)).tolist()
CUTS = (66, 69)  # many rows, few, one


class Late:
    """Layers that are there at the last moment, in memory that is garbage as soon as it may be.

    So what is read a moment too early, or too late, is NaN, or no code at all.
    """

    def __init__(self) -> None:
        self.flats: list[Tensor] = []
        self.brought: list[int] = []
        self.is_over = False
        self.fails_at: int | None = None

    def add(self, layer: Layer) -> Layer:
        flat = torch.full((flat_bytes(layer),), 0xFF, dtype=torch.uint8)
        copied_to(layer, flat)
        self.flats.append(flat)
        return without_memory(layer)

    def bring(self, i: int, into: Tensor) -> Callable[[], object]:
        self.brought.append(i)
        into.fill_(0xFF)
        is_first = True

        def come() -> None:
            nonlocal is_first
            if len(self.brought) == self.fails_at:
                raise OSError("a layer is lost")
            if is_first:
                into.copy_(self.flats[i])
            is_first = False

        return come

    def settle(self) -> None:
        self.is_over = True

    def close(self) -> None:
        self.flats.clear()


def streamed(decoder: Decoder) -> tuple[Decoder, Late]:
    """Return the same decoder with layers that come late."""
    rest = Late()
    layers = [rest.add(layer) for layer in decoder.weights.layers]
    stream = LayerStream(layers, rest, CPU)
    return Decoder(decoder.of, replace(decoder.weights, layers=[]), stream), rest


def assert_same(decoder: Decoder, other: Decoder) -> None:
    """Compare hidden states of many and few rows, and logits of a step."""
    want, got = run(decoder, TOKENS, CUTS), run(other, TOKENS, CUTS)
    assert bool(want.isfinite().all()) and torch.equal(want, got)
    steps = []
    for each in (decoder, other):
        cache, slots = cache_for(each, 2), torch.tensor([0, 1], dtype=torch.int32)
        logits = []
        for token in TOKENS[:3]:
            cache.reserve([0, 1], 1)
            x = each.embedded(torch.tensor([[token], [token + 1]]), cache, slots)
            logits.append(each.step(x, cache, slots))
        steps.append(torch.stack(logits))
    assert bool(steps[0].isfinite().all()) and torch.equal(*steps)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_each_family(case: str) -> None:
    model = model_of(case)
    decoder = decoder_of(model.config.to_dict(), model.state_dict(), torch.float32)
    other, rest = streamed(decoder)
    assert_same(decoder, other)
    count = len(other.weights.layers)
    order = [i for i in range(count) if i >= 2]
    assert rest.brought[: 2 + len(order)] == [0, 1, *order]


@pytest.mark.parametrize(
    ("method", "case"),
    [("gptq-act-order", "llama"), ("awq", "gpt2"), ("pack-8-zeros", "qwen3_moe")],
)
@torch.no_grad()
def test_weights_that_come_quantized(method: str, case: str, tmp_path: Path) -> None:
    Published(tmp_path, case, METHODS[method])
    decoder = init_inference(tmp_path, device="cpu").decoder
    assert_same(decoder, streamed(decoder)[0])


@torch.no_grad()
def test_parts_that_stay_apart(tmp_path: Path) -> None:
    """Queries, keys and values in orders of their own: a stack of parts."""
    Published(tmp_path, "llama", METHODS["gptq-act-order"], shares_order=False)
    decoder = init_inference(tmp_path, device="cpu").decoder
    assert_same(decoder, streamed(decoder)[0])


@pytest.mark.parametrize("case", ["llama", "qwen2_moe", "gpt_oss"])
@torch.no_grad()
def test_a_flat_layer_has_all_and_nothing_twice(case: str) -> None:
    model = model_of(case)
    for layer in decoder_of(
        model.config.to_dict(), model.state_dict(), torch.float32
    ).weights.layers:
        flat = torch.zeros(flat_bytes(layer), dtype=torch.uint8)
        copied_to(layer, flat)
        ghost = without_memory(layer)
        there = view_of(ghost, flat)
        assert bytes_of(travelling(layer)) == bytes_of(travelling(there)) <= len(flat)
        before, after = tensors_in(travelling(layer)), tensors_in(travelling(there))
        assert len(before) == len(after) > 0
        assert all(each.is_meta for each in tensors_in(travelling(ghost)))
        end = 0
        for old, new in zip(before, after, strict=True):
            assert old.dtype == new.dtype and torch.equal(old, new)
            begin = new.data_ptr() - flat.data_ptr()
            assert begin >= end and begin % 256 == 0
            end = begin + new.nbytes
        assert end == len(flat)
        # Norms stay: the layer before reads them when this one may not have come.
        assert there.attention_norm is layer.attention_norm and there.mlp_norm is layer.mlp_norm


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [each for part in value for each in tensors_in(part)]
    names = getattr(value, "__dataclass_fields__", ())
    return [each for name in names for each in tensors_in(getattr(value, name))]


@pytest.mark.parametrize("count", [1, 2, 3, 6, 7])
@torch.no_grad()
def test_any_number_of_layers(count: int) -> None:
    """Passes follow each other; of one or two layers none comes twice."""
    model = model_of("llama", num_hidden_layers=count)
    decoder = decoder_of(model.config.to_dict(), model.state_dict(), torch.float32)
    other, rest = streamed(decoder)
    passes = 3
    for _ in range(passes):
        want, got = run(decoder, TOKENS[:5], ()), run(other, TOKENS[:5], ())
        assert torch.equal(want, got)
    each = [0] if count == 1 else [0, 1] if count == 2 else None
    if each is not None:
        assert rest.brought == each and other.stream is not None and other.stream.nbytes == 0
        return
    assert other.stream is not None
    moves = [i for i in range(count) if count > 3 or i != 1]  # layer 1 of 3 has a slot for itself
    assert sorted(rest.brought) == sorted([*moves * passes, 0, 1])
    assert other.stream.nbytes == sum(len(rest.flats[i]) for i in moves)


@torch.no_grad()
def test_layers_have_the_same_memory_at_any_time() -> None:
    """Two slots, each as long as the longest layer that it takes."""
    model = model_of("qwen3_moe")  # whose second layer has no experts
    decoder = decoder_of(model.config.to_dict(), model.state_dict(), torch.float32)
    other, _ = streamed(decoder)
    assert other.stream is not None
    layers = other.stream.layers
    sizes = [flat_bytes(layer) for layer in layers]
    assert slot_sizes(sizes) == [max(sizes[0], sizes[2]), sizes[1]] and sizes[0] > sizes[1]
    pointers = [[t.data_ptr() for t in tensors_in(travelling(each))] for each in layers]
    assert pointers[0] == pointers[2] and not {*pointers[0]} & {*pointers[1]}
    run(other, TOKENS[:3], ())
    assert pointers == [[t.data_ptr() for t in tensors_in(travelling(e))] for e in layers]
    assert slot_sizes([]) == [] and slot_sizes([5]) == [5]


@pytest.mark.parametrize("where", range(8))
@torch.no_grad()
def test_a_pass_that_does_not_end(where: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it left in the slots, the next pass has the right layers."""
    model = model_of("llama", num_hidden_layers=5)
    decoder = decoder_of(model.config.to_dict(), model.state_dict(), torch.float32)
    other, rest = streamed(decoder)
    want = run(decoder, TOKENS[:5], ())
    calls, real = 0, Decoder._attention

    def interrupted(self: Decoder, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == where + 1:
            raise KeyboardInterrupt
        return real(self, *arguments)

    with monkeypatch.context() as patch:
        if where < 5:
            patch.setattr(Decoder, "_attention", interrupted)
            with pytest.raises(KeyboardInterrupt):
                run(other, TOKENS[:5], ())
        else:
            rest.fails_at = len(rest.brought) + where - 4
            with pytest.raises(OSError, match="a layer is lost"):
                run(other, TOKENS[:5], ())
            with pytest.raises(OSError, match="a layer is lost"):
                rest.fails_at = len(rest.brought) + 1
                run(other, TOKENS[:5], ())
            rest.fails_at = None
    for _ in range(2):
        assert torch.equal(want, run(other, TOKENS[:5], ()))


@pytest.mark.parametrize("half", [False, True], ids=["before it began", "when it has begun"])
@torch.no_grad()
def test_an_interruption_while_a_layer_is_asked_for(
    half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("llama", num_hidden_layers=5)
    decoder = decoder_of(model.config.to_dict(), model.state_dict(), torch.float32)
    other, _ = streamed(decoder)
    want, real = run(decoder, TOKENS[:5], ()), Late.bring

    def interrupted(self: Late, i: int, into: Tensor) -> Callable[[], object]:
        if half:
            real(self, i, into)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Late, "bring", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(other, TOKENS[:5], ())
    assert torch.equal(want, run(other, TOKENS[:5], ()))


def test_slots_outlive_copies_to_them() -> None:
    """Who lets go of a decoder in the middle of a pass waits for what is under way."""
    model = model_of("llama")
    decoder = decoder_of(model.config.to_dict(), model.state_dict(), torch.float32)
    other, rest = streamed(decoder)
    assert not rest.is_over
    del other
    assert rest.is_over

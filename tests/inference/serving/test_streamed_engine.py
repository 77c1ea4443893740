"""Engines whose layers rest in host memory or on a disk: the same bits, and nothing is lost."""

import asyncio
import errno
import functools
import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_folder
import torch
from torch import Tensor

from deepspeed_ext.inference.execution import memory_budget
from deepspeed_ext.inference.execution.runner import ModelRunner
from deepspeed_ext.inference.initialize import init_inference
from deepspeed_ext.inference.serving import step_plan
from deepspeed_ext.inference.serving.engine import InferenceEngine
from deepspeed_ext.inference.weights import resting_layers
from deepspeed_ext.inference.weights.flat_layer import travelling
from deepspeed_ext.inference.weights.loader import Layer
from deepspeed_ext.inference.weights.quantize_on_load import bytes_of
from deepspeed_ext.inference.weights.resting_layers import HostLayers, StoredLayers
from deepspeed_ext.io import TensorStore

_NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
ON_BOTH = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=_NEEDS_GPU)])
BOTH_KINDS = pytest.mark.parametrize("kind", ["cpu", "nvme"])
CONFIG = tiny_folder.CONFIG | dict(num_hidden_layers=5)
PROMPTS = [[3, 5, 7], [11] * 70, [13, 17]]
SAMPLED: dict[str, Any] = dict(max_new_tokens=8, temperature=1.0, seed=1, logprobs=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder.write(tmp_path_factory.mktemp("model"), CONFIG)


def made(folder: Path, kind: str | None, device: str = "cpu", **options: Any) -> InferenceEngine:
    where = {} if kind is None else {"offload": kind}
    path = {"nvme_path": folder} if kind == "nvme" else {}
    options = dict(tokenizer=tiny.Bytes(), max_batch=4, max_tokens=256) | options
    engine = init_inference(folder, device=device, **where, **path, **options)
    assert isinstance(engine, InferenceEngine)
    return engine


async def streamed(engine: InferenceEngine) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in PROMPTS]
    async for piece in engine.stream(PROMPTS, **SAMPLED):
        found[piece.prompt] += piece.tokens
    return found


def results_of(engine: InferenceEngine) -> list[Any]:
    """Return what each call makes of some prompts."""
    logits = engine(torch.tensor([PROMPTS[1], PROMPTS[1]])).logits.cpu()
    assert bool(logits.isfinite().all())
    return [
        engine.generate(PROMPTS, **SAMPLED, n=2),
        engine.generate([[i] for i in range(9)], max_new_tokens=5, prompt_logprobs=1, seed=2),
        asyncio.run(streamed(engine)),
        engine.score(PROMPTS, top_logprobs=2),
        logits.tolist(),
    ]


@functools.cache
def expected_of(folder: Path, device: str, **options: Any) -> list[Any]:
    with made(folder, None, device, **options) as engine:
        return results_of(engine)


@ON_BOTH
@BOTH_KINDS
@pytest.mark.parametrize(
    "options",
    [{}, {"quantize": "int4", "kv_dtype": "int8"}, {"quantize": "int8", "pack_prefill": True}],
    ids=str,
)
def test_the_bits_are_those_of_layers_on_the_device(
    options: dict[str, Any], kind: str, device: str, folder: Path
) -> None:
    if device == "cuda":  # there rows that share a pass may be rounded by which they are
        options = {name: value for name, value in options.items() if name != "pack_prefill"}
    want = expected_of(folder, device, **options)
    with made(folder, kind, device, **options) as engine:
        assert results_of(engine) == want
        tiny.check_all_is_free(engine)
        with made(folder, None, device, **options) as other:
            assert engine.report == other.report


@pytest.mark.parametrize("packs", [False, True])
def test_passes_and_what_comes_for_them(
    packs: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token is a pass, and each layer comes once for it; nothing is computed in vain."""
    with made(folder, "cpu", pack_prefill=packs) as engine:
        assert engine.decoder.stream is not None
        brought: list[int] = []
        real = HostLayers.bring

        def noted(self: HostLayers, i: int, into: Tensor) -> Callable[[], object]:
            brought.append(len(into))
            return real(self, i, into)

        monkeypatch.setattr(HostLayers, "bring", noted)
        engine.generate([[1], [2], [3]], max_new_tokens=6)
        assert sum(brought) == 6 * engine.decoder.stream.nbytes and len(brought) == 6 * 5


def test_prompts_and_running_requests_side_by_side(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share passes, and have the bits that they have alone, parts of prompts included."""
    for name, value in {"CHUNK": 32, "PACKED": 80, "_LEAST": 8}.items():
        monkeypatch.setattr(step_plan, name, value)
    prompts = [[i + 1] * n for i, n in enumerate((100, 3, 70, 64, 33, 1))]
    options = SAMPLED | dict(prompt_logprobs=1)
    with made(folder, None) as engine:
        want = [engine.generate([prompt], **options)[0] for prompt in prompts]
    with made(folder, "cpu") as engine:
        first = engine.generate(prompts[:1], **options, stream=True)
        pieces = [next(first) for _ in range(3)]
        found = engine.generate(prompts[1:], **options)
        pieces += list(first)
        assert [replace(one, prompt=0) for one in found] == want[1:]
        assert first.completions() == want[:1]
        assert [token for piece in pieces for token in piece.tokens] == want[0].tokens
        tiny.check_all_is_free(engine)


def test_more_running_requests_than_rows_of_a_step(folder: Path) -> None:
    """Two batches of one size in one pass do not share what they read."""
    prompts = [[1 + i % 90, i // 90 + 1] for i in range(128)]
    options: dict[str, Any] = dict(max_batch=128, max_tokens=64)
    with made(folder, None, **options) as one, made(folder, "cpu", **options) as two:
        want = one.generate(prompts, **SAMPLED, stop_tokens=())
        assert two.generate(prompts, **SAMPLED, stop_tokens=()) == want


def _delayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every second copy to the device, and every second step, begin late."""
    count = 0
    real_bring, real_decode = HostLayers.bring, ModelRunner.decode

    def bring(self: HostLayers, i: int, into: Tensor) -> Callable[[], object]:
        nonlocal count
        count += 1
        if count % 2:
            with torch.cuda.stream(self._stream):
                torch.cuda._sleep(5_000_000)
        elif count % 3:
            torch.cuda._sleep(5_000_000)
        return real_bring(self, i, into)

    def decode(self: ModelRunner, *arguments: Any) -> Any:
        torch.cuda._sleep(3_000_000)
        return real_decode(self, *arguments)

    monkeypatch.setattr(HostLayers, "bring", bring)
    monkeypatch.setattr(ModelRunner, "decode", decode)


@_NEEDS_GPU
def test_copies_that_are_late(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want = expected_of(folder, "cuda")[0]
    with made(folder, "cpu", "cuda") as engine:
        _delayed(monkeypatch)
        for _ in range(3):
            assert engine.generate(PROMPTS, **SAMPLED, n=2) == want


def read_badly(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Let a read of a layer fail as those of a broken disk do."""
    left, real = after, TensorStore.get_async

    def get(store: TensorStore, name: str, out: Tensor | None = None) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            raise OSError(errno.EIO, "the disk is broken")
        return real(store, name, out)

    monkeypatch.setattr(TensorStore, "get_async", get)


@pytest.mark.parametrize("after", [1, 2, 9])
def test_a_read_that_fails_is_told_and_tried_again(
    after: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = expected_of(folder, "cpu")[0]
    with made(folder, "nvme") as engine:
        with monkeypatch.context() as patch:
            read_badly(patch, after)
            with pytest.raises(OSError, match="the disk is broken"):
                engine.generate(PROMPTS, **SAMPLED, n=2)
        tiny.check_all_is_free(engine)
        assert engine.generate(PROMPTS, **SAMPLED, n=2) == want


@ON_BOTH
def test_a_file_that_is_cut_off_is_an_error_each_time(device: str, folder: Path) -> None:
    """A read is whole, or fails: nothing is computed with what was in a slot before."""
    with made(folder, "nvme", device) as engine:
        assert engine.decoder.stream is not None
        rest = engine.decoder.stream._rest
        assert isinstance(rest, StoredLayers)
        rest.settle()
        engine.generate([[1]], max_new_tokens=2)
        rest.settle()
        rest._store._file.truncate(0)
        for _ in range(2):
            with pytest.raises(OSError, match="the file ends at 0"):
                engine.generate([[1]], max_new_tokens=4)


@BOTH_KINDS
def test_interruptions_at_any_moment(kind: str, folder: Path) -> None:
    """Signals, as Ctrl-C sends them, wherever the program is; then all is as before."""
    want, hits = expected_of(folder, "cpu")[0], 0
    with made(folder, kind) as engine:
        gc.collect()  # of loops and streams that are over: not within what is interrupted
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            for i in range(30):
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0.0011 * (i + 1))
                    engine.generate(PROMPTS, **SAMPLED, n=2)
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    hits += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert hits > 5
        assert engine.generate(PROMPTS, **SAMPLED, n=2) == want
        tiny.check_all_is_free(engine)


def test_threads_and_two_engines(folder: Path) -> None:
    """One engine serves threads in turn; another one has slots of its own."""
    want = expected_of(folder, "cpu")[0]
    with made(folder, "cpu") as one, made(folder, "nvme") as two:
        found: list[Any] = [None] * 4

        def work(t: int) -> None:
            found[t] = (one, two)[t % 2].generate(PROMPTS, **SAMPLED, n=2)

        threads = [threading.Thread(target=work, args=(t,)) for t in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert found == [want] * 4


@BOTH_KINDS
def test_a_fork_takes_nothing_away(kind: str, folder: Path) -> None:
    want = expected_of(folder, "cpu")[0]
    engine = made(folder, kind)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            engine.generate([[1]], max_new_tokens=1)
        except RuntimeError as error:
            status = 0 if "belongs to process" in str(error) else 2
        del engine
        gc.collect()
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert engine.generate(PROMPTS, **SAMPLED, n=2) == want
    engine.close()


def descriptors_of_this(folder: Path) -> int:
    """Return how many are open, with those that CUDA keeps once memory has been pinned."""
    made(folder, "nvme").close()
    return len(os.listdir("/proc/self/fd"))


@BOTH_KINDS
@pytest.mark.parametrize("closes", [True, False])
def test_all_is_given_back(closes: bool, kind: str, folder: Path) -> None:
    descriptors = descriptors_of_this(folder)
    engine = made(folder, kind)
    engine.generate([[1]], max_new_tokens=2)
    stream = engine.decoder.stream
    assert stream is not None
    slots = [weakref.ref(slot.untyped_storage()) for slot in stream._slots]
    if kind == "nvme":
        assert len(os.listdir("/proc/self/fd")) > descriptors
    del stream
    if closes:
        engine.close()
        engine.close()
    else:
        del engine
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert not any(slot() for slot in slots)


@pytest.mark.parametrize("quantize", [None, "int8"])
@BOTH_KINDS
def test_layers_are_put_away_one_by_one(
    kind: str, quantize: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the next one is taken, the last one is not on the device any more."""
    where = HostLayers if kind == "cpu" else StoredLayers
    real, seen = where.add, list[weakref.ref[Any]]()

    def add(self: Any, layer: Layer) -> Layer:
        gc.collect()
        assert not any(ref() for ref in seen)
        weights = [each.weight for each in (layer.qkv, layer.up)]  # type: ignore[union-attr]
        codes = [each if isinstance(each, Tensor) else each.codes for each in weights]  # type: ignore[union-attr]
        seen.extend(weakref.ref(each.untyped_storage()) for each in codes)
        return real(self, layer)

    monkeypatch.setattr(where, "add", add)
    with made(folder, kind, quantize=quantize):
        assert len(seen) == 2 * 5


@BOTH_KINDS
@pytest.mark.parametrize("quantize", [None, "int4"])
def test_the_memory_budget(
    quantize: str | None, kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights on the device are two slots and what does not travel."""
    budgets: list[memory_budget.MemoryBudget] = []
    real = memory_budget.check_capacity

    def noted(*arguments: Any) -> None:
        real(*arguments)
        budgets.append(arguments[4](arguments[1]))

    monkeypatch.setattr("deepspeed_ext.inference.initialize.check_capacity", noted)
    with made(folder, kind, quantize=quantize) as engine, made(folder, None, quantize=quantize):
        weights, stream = engine.decoder.weights, engine.decoder.stream
        assert stream is not None
        moving = sum(bytes_of(travelling(layer)) for layer in weights.layers)
        slots = sum(slot.nbytes for slot in stream._slots)
        assert budgets[0].weights == bytes_of(weights) - moving + slots
        assert budgets[0].host == (stream.nbytes if kind == "cpu" else 0)
        assert budgets[0].cache == budgets[1].cache == engine.cache.nbytes
        assert budgets[0].weights < budgets[1].weights


def test_too_little_host_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before anything is read, by what there is."""
    monkeypatch.setattr(memory_budget, "free_bytes", lambda device: 1 << 40)
    monkeypatch.setattr(memory_budget, "free_memory", lambda: 5 << 20)
    monkeypatch.setattr(resting_layers, "HostLayers", None)
    text = (
        r"^init_inference: host memory has 5.0 MiB free, expected \d+\.\d MiB: 0.6 MiB of layers"
        r" that rest there; what fits may be offload='nvme'$"
    )
    with pytest.raises(MemoryError, match=text):
        made(folder, "cpu", max_tokens=4096)


@pytest.mark.parametrize(("host", "ends"), [(500, "what fits is offload='cpu'"), (499, "nothing")])
def test_a_device_without_room_may_do_with_offload(
    host: int, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_budget, "free_bytes", lambda device: 150)
    monkeypatch.setattr(memory_budget, "free_memory", lambda: host)
    budgets = [memory_budget.MemoryBudget(*sizes) for sizes in ((500, 50), (100, 50, 0, 0, 500))]
    on_device, rest = (lambda quantize: budgets[0]), (lambda quantize: budgets[1])
    with pytest.raises(MemoryError, match=rf"; {ends}"):
        memory_budget.check_capacity(torch.device("cuda"), None, 1, 64, on_device, (), rest)
    if host == 500:
        memory_budget.check_capacity(torch.device("cuda"), None, 1, 64, rest)


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def reserve(self: TensorStore, nbytes: int, in_parts: bool = False) -> None:
        raise OSError(errno.ENOSPC, f"{nbytes} bytes are too many")

    monkeypatch.setattr(TensorStore, "reserve", reserve)
    yield


def test_a_disk_without_room(no_room: None, folder: Path) -> None:
    text = r"nvme_path is .* with too little room: 6\d+ bytes are too many"
    with pytest.raises(OSError, match=text) as error:
        made(folder, "nvme")
    assert error.value.errno == errno.ENOSPC


def test_a_write_that_fails_is_told_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that of the last layer; no descriptor stays."""
    descriptors = descriptors_of_this(folder)
    real = TensorStore.put_async

    def put(store: TensorStore, name: str, tensor: Tensor) -> Any:
        if name == "4":
            store._file.close()
        return real(store, name, tensor)

    monkeypatch.setattr(TensorStore, "put_async", put)
    with pytest.raises((OSError, ValueError)):
        made(folder, "nvme")
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        (dict(offload="disk"), ValueError, "offload is 'disk', expected None, cpu or nvme"),
        (dict(offload=True), ValueError, "offload is True, expected None, cpu or nvme"),
        (dict(offload="nvme"), ValueError, "nvme_path is None, expected a folder with offload"),
        (
            dict(offload="nvme", nvme_path=""),
            ValueError,
            "nvme_path is '', expected a folder with offload",
        ),
        (
            dict(offload="nvme", nvme_path=3),
            TypeError,
            "nvme_path is int, expected a folder's path",
        ),
        (
            dict(offload="cpu", nvme_path="x"),
            ValueError,
            "nvme_path is given, expected offload='nvme' with it",
        ),
        (
            dict(offload="nvme", nvme_path="no/such/folder"),
            OSError,
            "nvme_path is /.*no/such/folder, expected a folder to write in: .*No such file",
        ),
    ],
)
def test_what_is_refused(
    options: dict[str, Any], kind: type[Exception], text: str, folder: Path
) -> None:
    with pytest.raises(kind, match=f"init_inference: {text}"):
        init_inference(folder, device="cpu", **options)


def test_an_encoder_is_refused() -> None:
    model = torch.nn.Linear(1, 1)
    sizes = dict(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8)
    model.config = dict(
        model_type="bert", vocab_size=9, hidden_act="gelu", layer_norm_eps=1e-5, **sizes
    )  # type: ignore[assignment]
    with pytest.raises(ValueError, match="offload is 'cpu', expected None, as an encoder"):
        init_inference(model, device="cpu", offload="cpu")

"""TensorStore: what its calls do, in scratch and in durable stores, and what they refuse."""

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from aio_cases import bytes_of, payload

from deepspeed_ext import io
from deepspeed_ext.io.store.manifest import _DTYPES
from deepspeed_ext.io.store.tensor_store import TensorStore

Open = Callable[..., TensorStore]


@pytest.fixture(params=["scratch", "durable"])
def durable(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "durable")


@pytest.fixture
def store(tmp_path: Path, durable: bool) -> Iterator[TensorStore]:
    with TensorStore(tmp_path / "store" if durable else tmp_path, durable=durable) as opened:
        yield opened


def dtypes() -> Iterator[torch.dtype]:
    for dtype in sorted(set(_DTYPES.values()), key=str):
        if not str(dtype).startswith(("torch.q", "torch.bits")):  # quantized; without storage
            yield dtype


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_dtype(store: TensorStore) -> None:
    kept = {}
    for dtype in dtypes():
        tensor = payload(24 * dtype.itemsize, seed=dtype.itemsize).view(dtype)
        if dtype is torch.bool:
            tensor = torch.arange(24) % 3 == 0
        store.put_async(str(dtype), tensor)
        kept[str(dtype)] = tensor
    assert store.wait() == len(kept) > 15
    for name, tensor in kept.items():
        got = store.get(name)
        assert got.dtype == tensor.dtype
        assert bytes_of(got) == bytes_of(tensor)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor(3.5),
        lambda: torch.empty(0),
        lambda: torch.empty(4, 0, 3, dtype=torch.int16),
        lambda: torch.arange(30).reshape(5, 6).t(),
        lambda: torch.arange(1000)[::7],
        lambda: torch.zeros(1).expand(2000, 3),
        lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda: torch.randn(7, dtype=torch.complex64).conj(),
        lambda: torch.randn(7, dtype=torch.complex64).conj().imag,
        lambda: torch.randn(5, requires_grad=True),
        lambda: torch.nn.Parameter(torch.randn(5000)),
        lambda: payload(3 * 4096 + 1)[1:],
    ],
)
def test_every_layout(store: TensorStore, make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    store.put("x", tensor)
    got = store.get("x")
    assert got.shape == tensor.shape
    assert got.is_contiguous() and not got.requires_grad
    assert torch.equal(got, tensor)
    info = store.info("x")
    assert (info.dtype, info.shape) == (tensor.dtype, tuple(tensor.shape))
    assert info.nbytes == tensor.numel() * tensor.element_size()
    assert (info.checksum is not None) == store.durable


def test_out(store: TensorStore) -> None:
    tensor = torch.randn(50, 40)
    store.put("x", tensor)
    plain, wide = torch.zeros(50, 40), torch.zeros(100, 50)
    turned, strided = torch.zeros(40, 50).t(), wide[::2, 3:43]
    for out in (plain, turned, strided):
        version = out._version
        assert store.get("x", out=out) is out
        assert torch.equal(out, tensor)
        assert out._version > version, "autograd has to notice"
    assert wide[1::2].count_nonzero() == 0
    assert wide[:, :3].count_nonzero() == wide[:, 43:].count_nonzero() == 0
    leaf = torch.zeros(50, 40, requires_grad=True)
    assert torch.equal(store.get("x", leaf), tensor)
    complex_ = torch.randn(9, dtype=torch.complex64)
    store.put("c", complex_)
    conjugated = torch.zeros_like(complex_).conj()
    assert torch.equal(store.get("c", conjugated), complex_)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda(store: TensorStore) -> None:
    tensor = torch.randn(3000, 7, device="cuda")
    store.put("x", tensor.t())
    assert torch.equal(store.get("x"), tensor.t().cpu())
    out = torch.zeros(7, 3000, device="cuda")
    assert torch.equal(store.get("x", out), tensor.t())


def test_names(store: TensorStore) -> None:
    names = ["a/b", "..", "\0", "\ud800", "ü" * 3000, "model.layers.0.weight", " "]
    for number, name in enumerate(names):
        store.put(name, torch.tensor(number))
    assert store.names() == list(store) == names
    assert len(store) == len(names)
    assert all(name in store for name in names)
    assert "b" not in store and 3 not in store
    for number, name in enumerate(names):
        assert store.get(name).item() == number


def test_put_again(store: TensorStore) -> None:
    for tensor in (torch.zeros(5000), torch.ones(5000), torch.randn(9000), torch.tensor(3)):
        store.put("x", tensor)
        assert torch.equal(store.get("x"), tensor)
        assert store.stats()["tensors"] == len(store) == 1
    store.put("y", torch.ones(3))
    store.delete("x")
    assert store.names() == ["y"]
    with pytest.raises(KeyError, match="'x' is not in"):
        store.get("x")
    store.put("x", torch.ones(1))
    assert store.names() == ["y", "x"]


def test_async(store: TensorStore) -> None:
    tensors = {f"t{i}": torch.randn(i * 37) for i in range(60)}
    for name, tensor in tensors.items():
        assert store.put_async(name, tensor).result(60) is tensor or True
    futures = {name: store.get_async(name) for name in tensors}
    for name, future in futures.items():
        assert torch.equal(future.result(60), tensors[name])
        assert future.done() and future.exception() is None
    assert store.wait(60) == 120
    assert store.wait(0) == 0
    assert store.stats()["in_flight"] == 0


def test_get_sees_the_put_before_it(store: TensorStore) -> None:
    for number in range(20):
        tensor = torch.full((20_000,), number)
        store.put_async("x", tensor)
        assert torch.equal(store.get_async("x").result(), tensor)


def test_stats_and_reserve(store: TensorStore) -> None:
    store.put("x", torch.zeros(4097, dtype=torch.uint8))
    stats = store.stats()
    assert stats["file_bytes"] == stats["used_bytes"] == 8192
    assert stats["free_bytes"] == stats["in_flight"] == 0
    assert stats["disk_free_bytes"] > 0
    store.reserve(100_000)
    assert store.stats()["free_bytes"] == 102_400
    for number in range(25):
        store.put(str(number), torch.zeros(4096, dtype=torch.uint8))
    for number in range(25):
        store.delete(str(number))
    assert store.stats()["file_bytes"] == 8192 + 102_400, "what was reserved stays"
    store.reserve(0)
    store.reserve(4)
    assert store.stats()["file_bytes"] == 8192 + 102_400


def test_an_engine_that_is_given_stays_open(tmp_path: Path, durable: bool) -> None:
    with io.AsyncIO() as engine:
        for number in range(2):
            folder = tmp_path / str(number)
            folder.mkdir()
            with TensorStore(folder, durable=durable, engine=engine) as store:
                store.put("x", torch.ones(100))
                assert torch.equal(store.get("x"), torch.ones(100))
        engine.write(torch.ones(1), tmp_path / "file").result()


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda s: s.put("", torch.ones(1)), ValueError, "name is '', expected some text"),
        (lambda s: s.put(3, torch.ones(1)), TypeError, "name is int, expected str"),
        (lambda s: s.put("x", [1]), TypeError, "put: tensor is a list"),
        (
            lambda s: s.put("x", torch.eye(3).to_sparse()),
            TypeError,
            "tensor has layout torch.sparse_coo",
        ),
        (lambda s: s.put("x", torch.ones(3, device="meta")), TypeError, "tensor is on meta"),
        (lambda s: s.get("no"), KeyError, "'no' is not in"),
        (lambda s: s.info("no"), KeyError, "'no' is not in"),
        (lambda s: s.delete("no"), KeyError, "'no' is not in"),
        (
            lambda s: s.get("w", torch.ones(3, dtype=torch.int32)),
            ValueError,
            r"out has dtype torch.int32, expected torch.float32 as 'w' has",
        ),
        (
            lambda s: s.get("w", torch.ones(1, 3)),
            ValueError,
            r"out has shape \[1, 3\], expected \[3\] as 'w' has",
        ),
        (lambda s: s.get("w", torch.ones(1).expand(3)), ValueError, "do not share memory"),
        (lambda s: s.get("w", "out"), TypeError, "get: out is a str"),
        (lambda s: s.reserve(-1), ValueError, "nbytes is -1, expected 0 or more"),
        (lambda s: s.reserve(1.5), ValueError, "nbytes is 1.5"),
    ],
)
def test_refuses(
    store: TensorStore, call: Callable[[TensorStore], object], error: type[Exception], text: str
) -> None:
    store.put("w", torch.ones(3))
    with pytest.raises(error, match=text):
        call(store)
    assert store.names() == ["w"]
    assert torch.equal(store.get("w"), torch.ones(3)), "it goes on working"
    assert store.stats()["in_flight"] == 0


def test_closed(store: TensorStore) -> None:
    future = store.put_async("x", torch.ones(100_000))
    store.close()
    store.close()
    assert future.done()
    assert future.result() is not None
    for call in (
        lambda: store.put("x", torch.ones(1)), lambda: store.get("x"), lambda: store.delete("x"),
        lambda: len(store), lambda: "x" in store, lambda: store.info("x"), store.stats,
        lambda: store.reserve(1),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match="is closed, expected an open store"):
            call()


def test_a_dropped_store_ends_its_requests(tmp_path: Path, durable: bool) -> None:
    before = len(os.listdir("/proc/self/fd"))
    store = TensorStore(tmp_path / "s" if durable else tmp_path, durable=durable)
    tensor = payload(1 << 20)
    future = store.put_async("x", tensor)
    del store
    assert future.done() and torch.equal(future.result(), tensor)
    assert len(os.listdir("/proc/self/fd")) == before
    if durable:
        TensorStore(tmp_path / "s", durable=True).close()  # the lock is gone too


def test_scratch_needs_its_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing"):
        TensorStore(tmp_path / "missing")
    with pytest.raises(ValueError, match="read_only is True for scratch"):
        TensorStore(tmp_path, read_only=True)
    with TensorStore(tmp_path) as store:
        with pytest.raises(RuntimeError, match="commit of a scratch store"):
            store.commit()
        assert list(tmp_path.iterdir()) == [], "nothing is to be seen"


def test_durable_needs_a_parent(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        TensorStore(tmp_path / "missing" / "store", durable=True)
    for path in (tmp_path / "store", tmp_path):
        with pytest.raises(FileNotFoundError, match=r", expected a store$"):
            TensorStore(path, durable=True, read_only=True)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        TensorStore(tmp_path / "file", durable=True)


def test_foreign_data_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"precious")
    for _ in range(2):
        with pytest.raises(FileExistsError, match=r"has a file named data but no manifest\.json"):
            TensorStore(tmp_path, durable=True)
    assert (tmp_path / "data").read_bytes() == b"precious"


def test_read_only(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with TensorStore(path, durable=True) as store:
        store.put("x", torch.arange(5000))
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with (
        TensorStore(path, durable=True, read_only=True) as one,
        TensorStore(str(path), durable=True, read_only=True) as two,
    ):
        for store in (one, two):
            assert torch.equal(store.get("x"), torch.arange(5000))
            for call in (
                lambda store=store: store.put("x", torch.ones(1)),
                lambda store=store: store.delete("x"),
                lambda store=store: store.reserve(1), store.commit,
            ):  # fmt: skip
                with pytest.raises(RuntimeError, match="is open with read_only=True"):
                    call()
        with pytest.raises(BlockingIOError, match="in use by processes that read it") as caught:
            TensorStore(path, durable=True)
        assert caught.value.errno == errno.EAGAIN
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    (path / "store.lock").unlink()
    with TensorStore(path, durable=True, read_only=True) as store:  # a copy without a lock
        assert len(store) == 1


def test_one_writer(tmp_path: Path) -> None:
    with TensorStore(tmp_path / "s", durable=True):
        for read_only in (False, True):
            with pytest.raises(BlockingIOError, match=f"by a writer, process {os.getpid()} on "):
                TensorStore(tmp_path / "s", durable=True, read_only=read_only)
    TensorStore(tmp_path / "s", durable=True).close()


def test_leaving_a_block(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with TensorStore(path, durable=True) as store:
        store.put_async("x", torch.ones(3))
    with pytest.raises(ZeroDivisionError), TensorStore(path, durable=True) as store:
        store.put("x", torch.zeros(3))
        store.put("y", torch.zeros(3))
        raise ZeroDivisionError
    with TensorStore(path, durable=True) as store:
        assert store.names() == ["x"]
        assert torch.equal(store.get("x"), torch.ones(3))
        store.put("x", torch.zeros(3))
        store.close()
    store = TensorStore(path, durable=True)
    assert torch.equal(store.get("x"), torch.ones(3)), "close does not commit"
    store.delete("x")
    store.commit()
    store.close()
    with TensorStore(path, durable=True, read_only=True) as store:
        assert len(store) == 0
    assert (path / "data").stat().st_size == 0


def test_the_working_directory_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with TensorStore("store", durable=True) as store:
        store.put("x", torch.ones(3))
        monkeypatch.chdir("/")
    with TensorStore(tmp_path / "store", durable=True, read_only=True) as store:
        assert torch.equal(store.get("x"), torch.ones(3))

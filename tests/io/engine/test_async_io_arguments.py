"""What AsyncIO refuses before anything happens, each text once."""

import errno
import re
from pathlib import Path

import pytest
import torch
from aio_cases import bytes_of, payload

from deepspeed_ext import io


def refused(text, kind=ValueError):
    return pytest.raises(kind, match=f"^{re.escape(text)}$")


OPTIONS = [
    ({"block_size": 0}, ValueError, "AsyncIO: block_size is 0, expected 1 to 1073741824"),
    ({"block_size": -1}, ValueError, "AsyncIO: block_size is -1, expected 1 to 1073741824"),
    (
        {"block_size": (1 << 30) + 1},
        ValueError,
        "AsyncIO: block_size is 1073741825, expected 1 to 1073741824",
    ),
    (
        {"block_size": 1 << 70},
        ValueError,
        f"AsyncIO: block_size is {1 << 70}, expected 1 to 1073741824",
    ),
    ({"queue_depth": 0}, ValueError, "AsyncIO: queue_depth is 0, expected 1 to 4096"),
    ({"queue_depth": 4097}, ValueError, "AsyncIO: queue_depth is 4097, expected 1 to 4096"),
    ({"threads": 0}, ValueError, "AsyncIO: threads is 0, expected 1 to 256"),
    ({"threads": 257}, ValueError, "AsyncIO: threads is 257, expected 1 to 256"),
    ({"block_size": 1.5}, TypeError, "AsyncIO: block_size is a float, expected an int"),
    ({"queue_depth": "8"}, TypeError, "AsyncIO: queue_depth is a str, expected an int"),
    ({"threads": None}, TypeError, "AsyncIO: threads is a NoneType, expected an int"),
    ({"threads": True}, TypeError, "AsyncIO: threads is a bool, expected an int"),
    (
        {"backend": "aio"},
        ValueError,
        "AsyncIO: backend is 'aio', expected auto, io_uring, libaio or threads",
    ),
]


@pytest.mark.parametrize(("options", "kind", "text"), OPTIONS, ids=lambda value: str(value)[:40])
def test_options(options, kind, text):
    with refused(text, kind):
        io.AsyncIO(**options)


def test_the_environment(monkeypatch):
    monkeypatch.setenv("DS_EXT_AIO_BACKEND", "aio")
    with pytest.raises(ValueError, match="'aio', expected auto, io_uring, libaio or threads"):
        io.AsyncIO()


TOO_FAR = (1 << 63) - 5
OFFSETS = [
    *(
        (offset, ValueError, f"offset is {offset}, expected 0 to 2^63 - 1 - 10 bytes")
        for offset in (-1, TOO_FAR, 1 << 80, -1 << 80)
    ),
    (1.0, TypeError, "offset is a float, expected an int"),
    ("0", TypeError, "offset is a str, expected an int"),
]


@pytest.mark.parametrize(("offset", "kind", "text"), OFFSETS, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("what", ["read", "write"])
def test_offsets(engine, tmp_path, what, offset, kind, text):
    (tmp_path / "file").write_bytes(b"content")
    with refused(f"AsyncIO.{what}: {text}", kind):
        getattr(engine, what)(payload(10), tmp_path / "file", offset=offset)
    assert (tmp_path / "file").read_bytes() == b"content"
    assert engine.wait() == 0


def test_an_offset_that_no_file_has(engine, tmp_path):
    """The kernel says how far a file may reach; nothing is computed wrongly on the way there."""
    for offset in ((1 << 63) - 1 - 5 * 8192, (1 << 63) - 1 - 8193):
        tensor = payload(8192)
        error = engine.write(tensor, tmp_path / "file", offset=offset).exception()
        assert isinstance(error, OSError) and error.errno in (errno.EFBIG, errno.EINVAL)
        error = engine.read(tensor, tmp_path / "file", offset=offset).exception()
        assert isinstance(error, OSError) and f" at offset {offset} of " in str(error)
        assert torch.equal(tensor, payload(8192))


PATHS = [
    (None, TypeError, "path is a NoneType, expected a str, os.PathLike or File"),
    (7, TypeError, "path is an int, expected a str, os.PathLike or File"),
    ("", ValueError, "path is '', expected the path of a file"),
    ("a\0b", ValueError, "path is 'a\\x00b', expected one without zero bytes"),
]


@pytest.mark.parametrize(("path", "kind", "text"), PATHS, ids=ascii)
@pytest.mark.parametrize("what", ["read", "write"])
def test_paths(engine, tmp_path, monkeypatch, what, path, kind, text):
    monkeypatch.chdir(tmp_path)
    with refused(f"AsyncIO.{what}: {text}", kind):
        getattr(engine, what)(payload(10), path)
    assert not list(tmp_path.iterdir())


class Wrapped(torch.Tensor):
    """A tensor whose elements lie in another one, as a DTensor's do."""

    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Wrapped(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError


TENSORS = [
    (lambda: torch.zeros(3).to_sparse(), "has layout torch.sparse_coo, expected torch.strided"),
    (lambda: torch.eye(3).to_sparse_csr(), "has layout torch.sparse_csr, expected torch.strided"),
    (lambda: torch.zeros(3, device="meta"), "is on meta, expected cpu or cuda"),
    (lambda: [1, 2], "is a list, expected a torch.Tensor"),
    (lambda: bytearray(4), "is a bytearray, expected a torch.Tensor"),
    (
        lambda: Wrapped(torch.zeros(3)),
        "is a Wrapped, expected a plain torch.Tensor;"
        " pass the tensor inside, such as DTensor.to_local()",
    ),
]


@pytest.mark.parametrize(("make", "text"), TENSORS)
@pytest.mark.parametrize("what", ["read", "write"])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_tensors(engine, tmp_path, what, make, text):
    path = tmp_path / "file"
    with refused(f"AsyncIO.{what}: tensor {text}", TypeError):
        getattr(engine, what)(make(), path)
    assert not path.exists()


def test_memory_that_overlaps_is_not_read_into(engine, tmp_path):
    (tmp_path / "file").write_bytes(bytes(64))
    expanded = torch.zeros(3, 1).expand(3, 4)
    text = "AsyncIO.read: tensor has shape (3, 4) and strides (1, 0)"
    with refused(text + ", expected elements that do not overlap"):
        engine.read(expanded, tmp_path / "file")
    with pytest.raises(ValueError, match="do not overlap"):
        engine.read(torch.zeros(10).as_strided((4, 4), (2, 1)), tmp_path / "file")
    single = torch.ones(4).as_strided((1, 4), (0, 1))  # one row: nothing overlaps
    assert not engine.read(single, tmp_path / "file").result().any()
    nothing = torch.zeros(1).expand(0, 4)
    engine.read(nothing, tmp_path / "file").result()


def test_timeouts(engine, tmp_path):
    future = engine.write(payload(10), tmp_path / "file")
    for use in (future.result, future.exception, engine.wait):
        for timeout in (-1.0, -1, float("nan")):
            with refused(f"aio: timeout is {timeout}, expected 0 seconds or more, or None"):
                use(timeout)
        use(float("inf"))
        for timeout in (0, 0.0, 1, 0.5, None, 1e300):
            use(timeout)


def test_a_closed_engine(backend, tmp_path: Path):
    engine = io.AsyncIO(backend=backend)
    engine.write(payload(10), tmp_path / "file")
    engine.close()
    engine.close()
    for use in (engine.read, engine.write):
        with refused("AsyncIO: engine is closed, expected an open one", RuntimeError):
            use(payload(10), tmp_path / "file")
    assert engine.wait() in (0, 1)
    assert (tmp_path / "file").read_bytes() == bytes_of(payload(10))

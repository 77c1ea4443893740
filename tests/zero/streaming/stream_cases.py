"""What the tests of streamed weights share: late copies and reads, a model of many weights."""

import copy
from functools import partial
from typing import ClassVar

import pytest
import torch
from optim_cases import needs_cuda
from torch import nn
from torch.nn import functional

from deepspeed_ext.zero.streaming import fetched, scratch, stream, streamed_model

WIDTH = 16
WORDS = 40


@pytest.fixture(name="device", params=["cpu", pytest.param("cuda", marks=needs_cuda)])
def each_device(request):
    return request.param


@pytest.fixture(name="rest", params=["cpu", "nvme"])
def each_rest(request, tmp_path):
    """Return where weights rest, as arguments of zero.stream."""
    return {} if request.param == "cpu" else on_disk(tmp_path)


def on_disk(folder):
    return {"device": "nvme", "nvme_path": folder}


class LateStreams(streamed_model.CopyStreams):
    """Of the CPU: weights arrive when a stream waits for them, gradients when the host does.

    Until then there is NaN. What is read at rest is compared with what is there when the host has
    waited: nobody may have written it meanwhile.
    """

    def send(self, copies, after):
        for target, _ in copies:
            spoil(target)
        return LateEvent(copies, keeps=True)

    def fetch(self, copies, after=None):
        for target, _ in copies:
            spoil(target)
        return LateEvent(copies, keeps=False)


def spoil(target):
    """Fill a tensor, which may be bytes of another one, with NaN."""
    target.fill_(float("nan") if target.is_floating_point() else 255)


class LateRead:
    """Of a scratch file: it is read when somebody waits for it, and there is NaN until then.

    What is read is compared with what was there when it began: nobody may have written it.
    """

    def __init__(self, read, memory, offset):
        self._read, self._memory, self._offset = read, memory, offset
        self._before = memory.clone()
        read(self._before, offset).result()
        spoil(memory)

    def result(self):
        self._read(self._memory, self._offset).result()
        if not torch.equal(self._memory, self._before):
            LateEvent.found.append("written while it was read from the file")

    def exception(self):
        pass


class LateEvent:
    found: ClassVar = []

    def __init__(self, copies, keeps):
        self._copies, self._keeps, self._taken = copies, keeps, None

    def run(self):
        if self._taken is None:
            self._taken = [source.clone() for _, source in self._copies]
            with torch.no_grad():
                for target, source in self._copies:
                    target.copy_(source)

    def synchronize(self):
        self.run()
        for (_, source), taken in zip(self._copies, self._taken, strict=True):
            if self._keeps and not torch.equal(source, taken):
                LateEvent.found.append("written while it was read")
        self._copies, self._taken = [], []

    def query(self):
        return False

    def __del__(self):
        if self._taken and self._keeps:
            LateEvent.found.append("let go of before it was over")


class LateStream:
    def wait_event(self, event):
        event.run()

    def __eq__(self, other):
        return type(self) is type(other)

    __hash__ = None


@pytest.fixture(autouse=True)
def late(request, monkeypatch):
    """Copies are late on the CPU, and streams of copies sleep on CUDA."""
    if request.node.get_closest_marker("prompt"):
        return
    LateEvent.found.clear()
    read = scratch.ScratchMemory.read
    monkeypatch.setattr(
        scratch.ScratchMemory, "read", lambda self, *where: LateRead(partial(read, self), *where)
    )
    of_cuda = fetched._current_stream
    monkeypatch.setattr(streamed_model, "CopyStreams", _late_streams)
    monkeypatch.setattr(
        fetched, "_current_stream", lambda d: LateStream() if d.type == "cpu" else of_cuda(d)
    )
    yield
    assert LateEvent.found == []


def _late_streams(device):
    if device.type == "cpu":
        return LateStreams(device)
    made = _Streams(device)
    return made


class _Streams(streamed_model.CopyStreams):
    """Of CUDA: each copy comes after a sleep."""

    def _run(self, copies, on, name):
        with torch.cuda.stream(on):
            torch.cuda._sleep(300_000)
        return super()._run(copies, on, name)


class Block(nn.Module):
    def __init__(self, width=WIDTH, unused=False, shared=None):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.ones(width))
        self.tables = nn.ParameterList([torch.randn(width, width) / width])
        if shared is not None:
            self.up.weight = shared
        if unused:
            self.unused = nn.Linear(width, width)

    def forward(self, x):
        y = functional.gelu(self.up(self.norm(x)))
        return x + self.down(y) * self.scale + x @ self.tables[0]


def call(block, x):
    return block(x)


class Model(nn.Module):
    def __init__(self, layers=4, unused=False, shared=False, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH)
        one = nn.Parameter(torch.randn(4 * WIDTH, WIDTH) / WIDTH) if shared else None
        self.layers = nn.ModuleList(Block(unused=unused, shared=one) for _ in range(layers))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.calls = [*range(layers)]
        self.wrap = call
        self.to(dtype)

    def forward(self, ids):
        x = self.words(ids)
        for i in self.calls:
            x = self.wrap(self.layers[i], x)
        return self.head(x)


def loss_of(model, ids):
    return functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())


def some_ids(device, seed):
    made = torch.Generator().manual_seed(seed)
    return torch.randint(WORDS, (2, 5), generator=made).to(device)


def pair(device, change=lambda model: None, rest=None, **kinds):
    """Return a model that is streamed, its like in memory of the device, and the stream."""
    kept = Model(**kinds)
    change(kept)
    streamed = copy.deepcopy(kept)
    return streamed, kept.to(device), stream(streamed, to=device, **rest or {})


def assert_equal_models(streamed, kept, gradients=False):
    """All parameters have the same bits."""
    both = zip(streamed.named_parameters(), kept.named_parameters(), strict=True)
    for (name, param), (_, other) in both:
        assert torch.equal(param.cpu(), other.cpu()), name
        if gradients:
            assert (param.grad is None) == (other.grad is None), name
            if param.grad is not None:
                assert param.grad.device == param.device
                assert param.grad.stride() == other.grad.stride(), name
                assert torch.equal(param.grad.cpu(), other.grad.cpu()), name

"""Weights on their way: whoever touches one gets the new value, by whichever way it is come by."""

import copy
import io
import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from offload_cases import WARM, Gate, Pair, await_speculation, small_parts
from optim_cases import assert_same_bits
from torch import Tensor, nn
from torch.nn import Parameter, functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import AveragedModel

from deepspeed_ext.optim import DeepSpeedCPUAdam


class Net(nn.Module):
    """What reads weights without calling the modules that they are in, beside what does."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
        self.lstm = nn.LSTM(8, 4)
        self.adapters = nn.ParameterDict({"a": torch.ones(2, 8), "b": torch.ones(8, 2)})
        self.head = nn.Linear(8, 8)


class UnderWay:
    """A net whose weights are on their way until `gate` opens, and a twin that was stepped.

    Args:
        monkeypatch: for as long as the worker is held.
        settings: of the optimizers.
        net: the model.
    """

    def __init__(self, monkeypatch, net=None, **settings):
        small_parts(monkeypatch, piece=64, most=128)
        self.net = Net() if net is None else net
        self.twin = copy.deepcopy(self.net)
        self.pair = Pair(params=self.net.parameters(), model=self.net, **settings)
        self.pair.train(WARM)
        self.gate = Gate(monkeypatch, "adopt")
        self.step()

    def step(self):
        self.pair.backward()
        self.pair.give()
        await_speculation(self.pair.ours)
        self.pair.ours.step()
        self.gate.await_thread()
        self.pair.plain.step()
        with torch.no_grad():
            for mine, theirs in zip(self.twin.parameters(), self.pair.twins, strict=True):
                mine.copy_(theirs)
        self.pair.zero_grad()

    def is_arriving(self):
        """Whether a parameter is, of each."""
        return [type(param) not in (Tensor, Parameter) for param in self.net.parameters()]

    def finish(self):
        """All weights are those of the twin, and are what they were."""
        self.gate.open()
        self.pair.ours.synchronize()
        assert not any(self.is_arriving())
        assert not any(vars(param) for param in self.net.parameters())
        assert_same_bits(self.net.parameters(), self.twin.parameters())


X = torch.linspace(-1, 1, 24).view(3, 8)


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


def merged(net):
    """As PEFT merges an adapter."""
    net.head.weight.data += net.adapters["b"].data @ net.adapters["a"].data * 0.5
    return net.head.weight


def averaged(net):
    """As Lightning averages weights after each batch."""
    mean = AveragedModel(net.head, avg_fn=lambda mean, new, count: 0.75 * mean + 0.25 * new)
    mean.update_parameters(net.head)
    with torch.no_grad():
        for param in net.head.parameters():
            param.mul_(2)
    mean.update_parameters(net.head)
    return list(mean.parameters())


def stepped(net, made):
    """By another optimizer."""
    for param in net.head.parameters():
        param.grad = torch.ones_like(X[0]).expand_as(param).clone()
    made(list(net.head.parameters()), lr=0.5).step()
    return list(net.head.parameters())


def parametrized(net):
    head = parametrizations.weight_norm(net.head)
    out = head(X)
    parametrize.remove_parametrizations(head, "weight")
    return out


def swapped(net):
    torch.utils.swap_tensors(net.head.weight, Parameter(torch.zeros(8, 8)))
    return net.head.weight


def set_memory(net):
    net.head.weight.set_(torch.ones(8, 8))
    return net.head.weight


def shared(net):
    """As a model is sent to a process that is to share its memory."""
    data = bytes(ForkingPickler.dumps(net.head.weight))
    assert b"_rebuild_parameter" not in data  # which is by value
    made = pickle.loads(data)
    assert made.is_shared() and net.head.weight.is_shared()
    return made


def loaded(net):
    """The best weights so far, as early stopping brings them back."""
    net.load_state_dict({k: torch.full_like(v, 3.0) for k, v in net.state_dict().items()})
    return list(net.parameters())


def loaded_alone(net):
    best = {k: torch.full(shape, 3.0) for k, shape in {"weight": (8, 8), "bias": (8,)}.items()}
    net.head.load_state_dict(best)
    return list(net.head.parameters())


def in_inference(net):
    net.eval()
    with torch.no_grad():
        return net.layer(X[None])


def scripted(net):
    layer = nn.Linear(8, 8, bias=False)
    layer.weight = net.head.weight
    return torch.jit.script(layer)(X)


TOUCHES = {
    "linear": lambda net: F.linear(X, net.head.weight, net.head.bias),
    "by keyword": lambda net: F.linear(X, weight=net.head.weight),
    "in a mode": lambda net: _in_a_mode(lambda: F.linear(X, net.head.weight)),
    "adapters": lambda net: X @ net.adapters["a"].T @ net.adapters["b"].T,
    "attention": lambda net: net.layer.self_attn(X, X, X)[0],
    "encoder layer": lambda net: net.layer(X[None]),
    "fast path": in_inference,
    "module in a module": lambda net: net.layer.self_attn.out_proj.weight @ X[0],
    "lstm": lambda net: net.lstm(X)[0],
    "list": lambda net: torch.cat([net.head.weight, net.adapters["a"]]),
    "foreach": lambda net: torch._foreach_mul(list(net.head.parameters()), 2.0),
    "foreach in place": lambda net: torch._foreach_mul_(list(net.head.parameters()), 2.0),
    "operator": lambda net: torch.ops.aten.mul.Tensor(X[0], other=net.head.bias),
    "out": lambda net: torch.mul(X[0], 2, out=net.head.bias),
    "copied from": lambda net: torch.zeros(8).copy_(net.head.bias),
    "index": lambda net: net.head.weight[1:, 2],
    "detach": lambda net: net.head.weight.detach(),
    "data": lambda net: net.head.weight.data,
    "set data": lambda net: setattr(net.head.weight, "data", X @ X.T) or net.head.weight,
    "numpy": lambda net: torch.from_numpy(net.head.weight.detach().numpy().copy()),
    "dlpack": lambda net: torch.from_dlpack(net.head.weight.detach()),
    "storage": lambda net: torch.tensor(net.head.weight.untyped_storage().tolist()),
    "address": lambda net: _at(net.head.weight.data_ptr(), 64),
    "tolist": lambda net: torch.tensor(net.head.weight.tolist()),
    "repr": lambda net: torch.tensor(bytearray(repr(net.head.weight), "ascii")),
    "new parameter": lambda net: Parameter(net.head.weight),
    "new parameter, frozen": lambda net: Parameter(net.head.weight, requires_grad=False),
    "its class": lambda net: type(net.head.weight)(net.head.weight.data * 2),
    "as_subclass": lambda net: net.head.weight.as_subclass(Tensor),
    "set_": lambda net: set_memory(net),
    "copy": lambda net: copy.copy(net.head.weight),
    "deepcopy": lambda net: copy.deepcopy(net.head.weight),
    "deepcopy of all": lambda net: list(copy.deepcopy(net).parameters()),
    "pickle": lambda net: pickle.loads(pickle.dumps(net.head.weight)),
    "without attributes": lambda net: torch.tensor(len(net.head.weight.__reduce_ex__(2)[1])),
    "save": lambda net: saved([net.head.weight])[0],
    "save of a model": lambda net: saved(net.state_dict()),
    "state_dict": lambda net: dict(net.state_dict()),
    "state_dict of a layer": lambda net: dict(net.head.state_dict()),
    "state_dict with variables": lambda net: dict(net.head.state_dict(keep_vars=True)),
    "load_state_dict": loaded,
    "load_state_dict of a layer": loaded_alone,
    "merge": merged,
    "averaged": averaged,
    "functional_call": lambda net: torch.func.functional_call(
        net.head, dict(net.head.named_parameters()), X
    ),
    "vmap": lambda net: torch.vmap(lambda w: w * 2)(net.head.weight),
    "vmap around": lambda net: torch.vmap(lambda x: net.head.weight @ x)(X),
    "grad around": lambda net: torch.func.grad(lambda x: (net.head.weight @ x).sum())(X[0]),
    "torch SGD": lambda net: stepped(net, torch.optim.SGD),
    "torch Adam": lambda net: stepped(net, torch.optim.Adam),
    "our Adam": lambda net: stepped(net, DeepSpeedCPUAdam),
    "parametrized": parametrized,
    "swapped": swapped,
    "moved": lambda net: list(net.to(torch.float64).parameters()),
    "shared": shared,
    "flattened": lambda net: nn.utils.parameters_to_vector(net.parameters()),
    "script": scripted,
    "checkpoint": lambda net: torch.utils.checkpoint.checkpoint(
        lambda w: w * 2, net.head.weight, use_reentrant=False
    ),
    "nested": lambda net: torch.nested.nested_tensor([net.head.weight.detach()]).values(),
}


def _in_a_mode(run):
    with torch.device("cpu"):
        return run()


def _at(address, count):
    import ctypes

    return torch.tensor(list((ctypes.c_float * count).from_address(address)))


def tensors(value):
    values = value.values() if isinstance(value, dict) else value
    return [values] if isinstance(values, Tensor) else list(values)


@pytest.mark.parametrize("touch", TOUCHES)
def test_a_touch_waits(touch, monkeypatch):
    """It gets what it would have got after a plain step, bit for bit, and of the same class."""
    under_way = UnderWay(monkeypatch)
    under_way.gate.open_soon()
    with torch.set_grad_enabled(touch not in ("out", "set_", "foreach in place")):
        got, wanted = (tensors(TOUCHES[touch](net)) for net in (under_way.net, under_way.twin))
    assert list(map(type, got)) == list(map(type, wanted))
    assert [g.requires_grad for g in got] == [w.requires_grad for w in wanted]
    assert_same_bits(got, wanted)
    under_way.gate.open()
    under_way.pair.ours.synchronize()
    if touch not in ("swapped", "moved", "parametrized"):
        assert_same_bits(under_way.net.parameters(), under_way.twin.parameters())
    assert not any(under_way.is_arriving())

"""Experts: slices of stacked parameters through a module, and all at once, with gradients."""

import copy
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F
from layer_cases import WIDTH, Mlp, assert_near, inputs, sequence, varied
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from deepspeed_ext.moe import Experts
from deepspeed_ext.moe.expert_forms import form_of


class Gated(nn.Module):
    expert_form = ("gate_proj", F.silu, "up_proj", "down_proj")

    def __init__(self, bias=False):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, 12, bias=bias) for _ in range(2))
        self.down_proj = nn.Linear(12, WIDTH, bias=bias)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Plain(Mlp):
    expert_form = ("up", "act", "down")

    def __init__(self):
        super().__init__()
        self.act = nn.Tanh()

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Tied(nn.Module):
    """One weight for both ways, a buffer that forward replaces, a bias that is None."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, WIDTH)
        self.down.weight = self.up.weight
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("scale", torch.full((WIDTH,), 0.5), persistent=False)

    def forward(self, x):
        self.calls = self.calls + 1
        return self.down(torch.tanh(self.up(x))) * self.scale


def twice():
    layer = nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(layer, nn.ReLU(), layer)


def one_bias():
    expert = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    expert[2].bias = expert[0].bias
    return expert


MAKE = {
    "sequence": (sequence, True),
    "gated": (Gated, True),
    "gated, biases": (lambda: Gated(True), True),
    "plain": (Plain, True),
    "any": (Mlp, False),
    "tied": (Tied, False),
    "one layer twice": (twice, False),
    "one bias": (one_bias, False),
    "long": (lambda: nn.Sequential(*sequence(), nn.ReLU(), nn.Linear(8, 8), nn.Softplus()), True),
    "no linear": (lambda: nn.Sequential(nn.Tanh()), False),
    "not first": (lambda: nn.Sequential(nn.Softplus(), nn.Linear(WIDTH, WIDTH)), False),
}


def ends(*sizes):
    return torch.tensor(sizes).cumsum(0).int()


def alone(experts, number, like):
    """Return one expert as a module of its own, in float64."""
    module = copy.deepcopy(like)
    values = {name: p[number].detach() for name, p in experts.named_parameters()}
    with torch.no_grad():
        for name, param in module.named_parameters():
            param.copy_(values[name])
    return module.double()


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("sizes", [(2, 0, 3), (0, 0, 0), (6, 0, 0)])
def test_rows_go_through_their_experts(name, sizes):
    make, is_fast = MAKE[name]
    like = make()
    experts = varied(Experts(like, 3))
    assert (form_of(like) is not None) is is_fast
    x = inputs(sum(sizes) + 2)  # two rows are nobody's
    with torch.no_grad():
        x[-2:] = torch.nan
    out = experts(x, ends(*sizes))
    (out.sin() * 2).sum().backward()
    assert out.shape == x.shape and (out[-2:] == 0).all() and (x.grad[-2:] == 0).all()
    begin = 0
    for number, size in enumerate(sizes):
        module = alone(experts, number, like)
        own = x[begin : begin + size].detach().double().requires_grad_()
        want = module(own)
        want = want[0] if isinstance(want, tuple) else want
        (want.sin() * 2).sum().backward()
        assert_near(out[begin : begin + size], want)
        assert_near(x.grad[begin : begin + size], own.grad)
        for key, param in module.named_parameters():
            assert_near(experts.get_parameter(key).grad[number], param.grad)
        begin += size


def test_names_copies_and_buffers():
    experts = varied(Experts(Tied(), 3))
    assert dict(experts.named_parameters()).keys() == {"up.weight", "down.bias"}
    assert experts.down.weight is experts.up.weight and experts.up.bias is None
    assert experts.state_dict().keys() == {"up.weight", "down.weight", "down.bias", "calls"}
    assert not any(type(module) is nn.Linear for module in experts.modules())
    x, offsets = inputs(5), ends(2, 0, 3)
    want = experts(x, offsets)
    for other in (copy.deepcopy(experts), pickle.loads(pickle.dumps(experts))):
        assert torch.equal(other(x, offsets), want)
        assert other.calls.tolist() == [2, 0, 2]
    assert experts.calls.tolist() == [1, 0, 1]
    assert repr(experts).startswith("Experts(\n  3 of Tied")
    given = Mlp()
    experts = Experts(given, 2)
    assert all(
        torch.equal(stack, torch.stack([given.up.weight] * 2)) for stack in [experts.up.weight]
    )
    with torch.no_grad():
        given.up.weight.zero_()
    assert (experts.up.weight != 0).any()


def test_dropout_hooks_and_modes():
    like = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))
    seen = []
    for expert in (like, nn.Sequential(nn.Sequential(like))):
        experts = Experts(expert, 2)
        x = torch.ones(40, WIDTH)
        assert (experts(x, ends(20, 20)) == 0).sum() > 40
        experts.eval()
        assert (experts(x, ends(20, 20)) != 0).all()
    like[0].register_forward_hook(lambda *args: seen.append(len(args[2])))
    experts = Experts(like, 2)
    experts(x, ends(15, 25))
    assert seen == [15, 25]


def test_parts_have_modes_of_their_own():
    class Frozen(nn.Sequential):
        def train(self, mode=True):
            super().train(mode)
            self[1].eval()
            return self

    for make in (nn.Sequential, Frozen):
        parts = make(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))
        parts[1].eval()
        experts, x, is_frozen = Experts(parts, 2), torch.ones(40, WIDTH), make is Frozen
        assert (experts(x, ends(20, 20)) != 0).all()  # as the module was
        assert experts.training and not experts.get_submodule("1").training
        nn.Sequential(experts).train()
        assert (experts(x, ends(20, 20)) != 0).all() == is_frozen
        assert experts.get_submodule("1").training is not is_frozen
        experts.get_submodule("1").eval()
        assert (experts(x, ends(20, 20)) != 0).all()
        experts.train()
        for module in experts.modules():
            module.training = False  # as what puts modes back does
        assert (experts(x, ends(20, 20)) != 0).all()
        assert (copy.deepcopy(experts)(x, ends(20, 20)) != 0).all()


def test_only_what_is_known_is_run_at_once():
    class Other(nn.Sequential):
        def forward(self, x):
            return super().forward(x) * 2

    class Below(Gated):
        def forward(self, x):
            return super().forward(x) * 2

    class Double(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    replaced = Gated()
    replaced.up_proj = Double(WIDTH, 12)
    more = Gated()
    more.norm = nn.LayerNorm(WIDTH)
    patched = sequence()
    patched.forward = lambda x: x
    scaled = sequence()
    parametrizations.weight_norm(scaled[0])
    normed = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
    others = [Other(*sequence()), Below(), nn.Sequential(Double(8, 8)), replaced, more, patched]
    assert not any(form_of(module) for module in [*others, scaled, normed])
    Below.expert_form = ("gate_proj", "up_proj")
    with pytest.raises(TypeError, match=r"^Experts: Below.expert_form is \('gate_proj', 'up_proj'"):
        Experts(Below(), 2)


def test_dtypes_and_parametrizations():
    experts = varied(Experts(sequence(), 2)).double()
    x = inputs(5).detach()
    want = experts(x.double(), ends(2, 3))
    assert want.dtype == torch.float64  # one by one
    assert_near(experts.float()(x, ends(2, 3)), want)
    got = experts.bfloat16()(x.bfloat16(), ends(2, 3))
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), want, rtol=0.05, atol=0.05)
    experts = varied(Experts(Mlp(), 2))

    class Twice(nn.Module):
        def forward(self, weight):
            return 2 * weight

    before = experts(x, ends(2, 3))
    with torch.no_grad():
        experts.up.weight.div_(2)
    parametrize.register_parametrization(experts.up, "weight", Twice())
    torch.testing.assert_close(experts(x, ends(2, 3)), before)


def test_threads_do_not_meet():
    experts = varied(Experts(Mlp(), 4)).requires_grad_(False)
    x, offsets = inputs(8).detach(), ends(2, 2, 2, 2)
    want, wrong = experts(x, offsets), []

    def run():
        wrong.extend(0 for _ in range(30) if not torch.equal(experts(x, offsets), want))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_reset_parameters_draws_one_and_copies_it():
    experts = Experts(Tied().to("meta"), 3).to_empty(device="cpu")
    experts.calls.copy_(torch.arange(3))
    experts.reset_parameters()
    assert (experts.up.weight == experts.up.weight[0]).all()
    assert experts.up.weight.std() > 0.1 and experts.calls.tolist() == [0, 1, 2]
    plain = Experts(sequence().to("meta"), 2).to_empty(device="cpu")
    torch.manual_seed(4)
    plain.reset_parameters()
    torch.manual_seed(4)
    first, _, last = sequence()
    assert torch.equal(plain.get_submodule("0").weight[1], first.weight)
    assert torch.equal(plain.get_submodule("2").bias[1], last.bias)

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Module()
            self.inner.weight = nn.Parameter(torch.ones(2))

    with pytest.raises(TypeError, match=r"^Experts: inner is a Module, expected a module with res"):
        Experts(Own(), 2).reset_parameters()


def refused():
    hooked = Mlp()
    hooked.up.weight.register_hook(lambda grad: grad)
    loading = Mlp()
    loading.up.register_load_state_dict_pre_hook(lambda *args: None)
    named = nn.Module()
    named.num_experts = nn.Linear(2, 2)
    return [
        ((3, 2), TypeError, "expert is 3, expected a Module"),
        ((Mlp(), 0), ValueError, "count is 0, expected at least 1"),
        ((Mlp(), 1.5), TypeError, "count is 1.5, expected a whole number"),
        (
            (nn.LazyLinear(3), 2),
            ValueError,
            "weight is not initialized, expected one that has a sh",
        ),
        ((hooked, 2), ValueError, "up.weight has hooks, expected none"),
        ((loading, 2), ValueError, "up has hooks on its state dict, expected none"),
        ((named, 2), ValueError, "Module has a attribute 'num_experts' already exists"),
    ]


def test_what_is_refused():
    for arguments, kind, text in refused():
        with pytest.raises(kind, match=f"^Experts: {text}"):
            Experts(*arguments)
    experts = Experts(Mlp(), 2)
    x = torch.ones(4, WIDTH)
    for offsets, text in (
        (ends(1, 1, 1), r"offsets has shape \[3\], expected \[2\]"),
        (torch.tensor([3, 2]).int(), r"offsets\[1\] is 2, expected a number from 3 to 4"),
        (torch.tensor([1, 5]).int(), r"offsets\[1\] is 5, expected a number from 1 to 4"),
    ):
        with pytest.raises(ValueError, match=f"^Experts: {text}"):
            experts(x, offsets)
    for wide in (nn.Sequential(nn.Linear(WIDTH, 3)), nn.Linear(WIDTH, 3)):
        with pytest.raises(
            ValueError, match=r"^Experts: expert returned shape \[\d, 3\], expected"
        ):
            Experts(wide, 2)(x, ends(2, 2))

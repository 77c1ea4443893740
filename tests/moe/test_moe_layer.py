"""MoE against a plain loop in float64, and what it promises beside numbers."""

import copy

import pytest
import torch
from layer_cases import (
    EXPERTS,
    WIDTH,
    Loop,
    Mlp,
    assert_gradients_near,
    assert_near,
    inputs,
    sequence,
    varied,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepspeed_ext.moe import MoE, split_params_into_different_moe_groups_for_optimizer

DROPS = dict(capacity_factor=0.6, min_capacity=1, use_rts=False)
CASES = {
    "k1": dict(k=1, drop_tokens=False),
    "k1 drops": dict(k=1, **DROPS),
    "k2": dict(k=2, capacity_factor=100.0),
    "k2 drops, residual": dict(k=2, use_residual=True, **DROPS),
    "k3 drops": dict(k=3, **DROPS),
    "k3 min_capacity": dict(k=3, capacity_factor=0.01, min_capacity=3, use_rts=False),
    "k8": dict(k=8, drop_tokens=False),
    "k8 drops": dict(k=8, **DROPS),
}


def layer_of(expert=None, **options):
    return varied(MoE(WIDTH, expert or sequence(), EXPERTS, **options))


@pytest.mark.parametrize(
    ("name", "make"),
    [*((name, sequence) for name in CASES), ("k1", Mlp), ("k2 drops, residual", Mlp), ("k8", Mlp)],
)
def test_output_loss_and_all_gradients_are_those_of_a_loop(name, make):
    layer = layer_of(make(), **CASES[name])
    loop = Loop(layer)
    x = inputs(3, 8)
    wide = x.detach().double().requires_grad_()
    used = None if name[:2] != "k3" else torch.arange(24) % 5 != 0
    got, want = layer(x, used), loop(wide, used)
    assert got[0].shape == x.shape and got[1].dtype == torch.float32
    for value, expected in zip(got, want, strict=True):
        assert_near(value, expected)
    assert got[2].dtype == torch.int64
    for out, l_aux, _ in (got, want):
        (out.sin().sum() + 3 * l_aux).backward()
    assert_gradients_near(layer, loop, [(x, wide)])


def test_evaluation_has_a_capacity_of_its_own():
    layer = layer_of(k=2, capacity_factor=0.1, eval_capacity_factor=1.2, use_rts=False).eval()
    x = inputs(40)
    assert_near(layer(x)[0], Loop(layer)(x.double())[0])
    few = layer.train()(x)[0]
    assert (few == 0).all(-1).sum() > (layer.eval()(x)[0] == 0).all(-1).sum()


@pytest.mark.parametrize("make", [sequence, Mlp])
def test_no_tokens_one_expert_for_all_and_no_room(make):
    layer = layer_of(make(), k=2, use_residual=True)
    x = inputs(2, 0)
    out, l_aux, counts = layer(x)
    (out.sum() + l_aux).backward()
    assert out.shape == x.shape and l_aux == 0 and counts.tolist() == [0] * EXPERTS
    assert all((p.grad == 0).all() for p in layer.parameters())
    layer = layer_of(make(), drop_tokens=False)
    nn.init.zeros_(layer.gate.weight)  # all are as likely: the first one wins
    x = inputs(9)
    out, _, counts = layer(x)
    assert counts.tolist() == [9] + [0] * (EXPERTS - 1)
    assert_near(out, Loop(layer)(x.double())[0])
    out.square().sum().backward()
    grads = [p.grad for p in layer.experts.parameters()]
    assert all((grad[0] != 0).any() and (grad[1:] == 0).all() for grad in grads)
    layer = layer_of(make(), k=2, capacity_factor=0.0, min_capacity=0)
    out, l_aux, counts = layer(x)
    assert (out == 0).all() and counts.sum() == 18
    (out.sum() + l_aux).backward()
    assert all((p.grad == 0).all() for p in layer.experts.parameters())
    assert (layer.gate.weight.grad != 0).any()


def test_twenty_steps_are_those_of_the_loop():
    layer = layer_of(Mlp(), k=2, capacity_factor=0.8, min_capacity=1, use_rts=False)
    loop = Loop(layer)
    ways = ((layer, layer, torch.float32), (loop, loop.layer, torch.float64))
    losses = []
    for run, module, dtype in ways:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
        losses.append([])
        for step in range(20):
            x = inputs(10, seed=step).detach().to(dtype)
            out, l_aux, _ = run(x)
            loss = (out - x.flip(0)).square().mean() + 0.1 * l_aux
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=1e-4, atol=1e-5, check_dtype=False)
    assert losses[0][-1] < losses[0][0]


def test_a_layer_that_is_run_again_routes_alike():
    """With all that is random: which tokens are dropped, second experts, dropout."""
    expert = nn.Sequential(*sequence(), nn.Dropout(0.3))
    for policy in ("RSample", "Jitter"):
        layer = layer_of(expert, k=2, noisy_gate_policy=policy, capacity_factor=0.5, min_capacity=0)
        grads = []
        for again in (False, True):
            torch.manual_seed(3)
            x = inputs(32)
            way = (lambda *args: checkpoint(*args, use_reentrant=False)) if again else None
            out, l_aux, _ = way(layer, x) if way else layer(x)
            (out.square().sum() + l_aux).backward()
            grads.append([x.grad, *(p.grad for p in layer.parameters())])
            layer.zero_grad()
        assert all(map(torch.equal, *grads))
        with torch.no_grad():
            assert not torch.equal(layer(x)[0], layer(x)[0])


def test_a_random_order_drops_others_and_as_many():
    layer = layer_of(capacity_factor=0.5, min_capacity=0).eval()
    layer.eval_capacity_factor = 0.5
    x = inputs(64)
    torch.manual_seed(0)
    [first, again] = [(layer(x)[0] == 0).all(-1) for _ in range(2)]
    torch.manual_seed(0)
    assert torch.equal((layer(x)[0] == 0).all(-1), first)
    assert not torch.equal(first, again) and first.sum() == again.sum() > 0


def test_noise_draws_the_second_expert_and_only_in_training():
    layer = layer_of(k=2, noisy_gate_policy="RSample", drop_tokens=False)
    x = inputs(1).expand(4000, WIDTH)
    probability = layer.gate(x[0]).softmax(-1)
    first = int(probability.argmax())
    counts = layer(x)[2]
    assert counts[first] == 4000 and counts.sum() == 8000
    others = probability.clone()
    others[first] = 0
    want = 4000 * others / others.sum()
    assert ((counts - want)[others > 0].abs() < 5 * want[others > 0].sqrt() + 1).all()
    assert layer.eval()(x)[2].count_nonzero() == 2
    layer.k = 1
    assert (layer.train()(x)[2] - 4000 * probability).abs().max() < 200


def test_autocast():
    layer = layer_of(k=2, drop_tokens=False, use_residual=True)
    x = inputs(30)
    want, loss, _ = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        got, l_aux, counts = layer(x)
        assert layer.experts(x, x.new_full((EXPERTS,), 30, dtype=torch.int32)).dtype == x.dtype
    assert torch.equal(loss, l_aux) and counts.sum() == 60
    torch.testing.assert_close(got.float(), want, rtol=0.03, atol=0.05)
    got.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in layer.parameters())
    layer = layer.bfloat16()
    assert layer(x.bfloat16())[0].dtype == torch.bfloat16


def test_it_is_one_graph():
    layer = layer_of(k=2, use_residual=True)
    x = inputs(2, 6)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.manual_seed(0)
    want = layer(x)
    torch.manual_seed(0)
    got = compiled(x)
    for value, expected in zip(got, want, strict=True):
        torch.testing.assert_close(value, expected)
    want[0].sum().backward()
    grads = [p.grad for p in layer.experts.parameters()]
    layer.zero_grad()
    got[0].sum().backward()
    torch.testing.assert_close([p.grad for p in layer.experts.parameters()], grads)


def test_an_error_in_an_expert_is_its_own_and_the_layer_works_on():
    class Fails(Mlp):
        fails = True

        def forward(self, x):
            out = super().forward(x)
            if Fails.fails:
                raise ArithmeticError("no more")
            return out

    layer = layer_of(Fails(), drop_tokens=False)
    x = inputs(12)
    with pytest.raises(ArithmeticError, match="no more"):
        layer(x)
    Fails.fails = False
    assert_near(layer(x)[0], Loop(layer)(x.double())[0])


@pytest.mark.parametrize("make", [sequence, Mlp])
def test_frozen_weights_have_no_gradients(make):
    layer = layer_of(make(), drop_tokens=False)
    frozen = [name for name, _ in layer.named_parameters() if "weight" in name]
    for name in frozen:
        layer.get_parameter(name).requires_grad_(False)
    layer(inputs(12))[0].sum().backward()
    assert all((p.grad is None) == (n in frozen) for n, p in layer.named_parameters())
    layer.requires_grad_(False)
    x = inputs(12)
    layer(x)[0].sum().backward()
    assert (x.grad != 0).any()
    assert not layer(x.detach())[0].requires_grad


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_token_that_is_no_number_is_seen_in_its_result_alone(bad):
    layer = layer_of(k=2, drop_tokens=False)
    x = inputs(12).detach()
    want = layer(x)[0]
    x[5] = bad
    got = layer(x)[0]
    others = torch.arange(12) != 5
    torch.testing.assert_close(got[others], want[others])
    assert got[5].isnan().all()


def test_state_dicts_with_deepspeeds_names_load():
    layer = layer_of(Mlp(), k=2, use_residual=True)
    ours = layer.state_dict()
    assert {"gate.weight", "experts.up.weight", "mlp.up.bias", "coefficient.weight"} < set(ours)
    assert ours["experts.up.weight"].shape == (EXPERTS, 12, WIDTH)
    theirs = {f"block.{n}": v for n, v in ours.items() if n.split(".")[0] in ("mlp", "coefficient")}
    theirs["block.deepspeed_moe.gate.wg.weight"] = ours["gate.weight"]
    for name in ("up.weight", "up.bias", "down.weight", "down.bias"):
        for i in range(EXPERTS):
            key = f"block.deepspeed_moe.experts.deepspeed_experts.{i}.{name}"
            theirs[key] = ours[f"experts.{name}"][i]
    kept = dict(theirs)
    other = nn.ModuleDict({"block": varied(MoE(WIDTH, Mlp(), EXPERTS, use_residual=True), seed=5)})
    assert str(other.load_state_dict(theirs)) == "<All keys matched successfully>"
    assert all(torch.equal(value, ours[name]) for name, value in other.block.state_dict().items())
    assert theirs.keys() == kept.keys()
    other.block.load_state_dict(ours)
    del theirs[key]
    with pytest.raises(RuntimeError, match=r"experts\.7\.down\.bias is missing, expected one for"):
        other.load_state_dict(theirs)
    theirs[key] = torch.ones(3)
    with pytest.raises(RuntimeError, match=r"experts\.7\.down\.bias has shape \[3\], expected \[8"):
        other.load_state_dict(theirs)
    theirs = {**kept, key.replace(".7.", ".8."): kept[key]}
    with pytest.raises(RuntimeError, match=r"Unexpected.*deepspeed_experts\.8\.down\.bias"):
        other.load_state_dict(theirs)


def test_copies_and_meta_device():
    layer = layer_of(Mlp(), use_rts=False)
    x = inputs(20)
    assert torch.equal(copy.deepcopy(layer)(x)[0], layer(x)[0])
    with torch.device("meta"):
        empty = MoE(WIDTH, Mlp(), EXPERTS, use_rts=False)
    empty.to_empty(device="cpu").load_state_dict(layer.state_dict())
    assert torch.equal(empty(x)[0], layer(x)[0])


def test_groups_of_parameters_stay_as_they_are():
    groups = [{"params": [nn.Parameter(torch.ones(2))]}, {"params": []}]
    split = split_params_into_different_moe_groups_for_optimizer
    assert split(groups) == tuple(groups) and split(groups[0]) == (groups[0],)


@pytest.mark.parametrize(("options", "text"), [
    (dict(k=0), "k is 0, expected at least 1"),
    (dict(k=9), "k is 9, expected at most 8, all"),
    (dict(k="2"), "k is '2', expected a whole number"),
    (dict(num_experts=2000), "num_experts is 2000, expected at most 1024"),
    (dict(capacity_factor=-1.0), "capacity_factor is -1.0, expected a number from 0"),
    (dict(eval_capacity_factor=torch.inf), "eval_capacity_factor is inf, expected a number from 0"),
    (dict(k=True), "k is True, expected a whole number"),
    (dict(num_experts=True, k=1), "num_experts is True, expected a whole number"),
    (dict(capacity_factor=1e30), "capacity_factor is 1e[+]30, expected a number from 0 to 2147"),
    (dict(capacity_factor=True), "capacity_factor is True, expected a number"),
    (dict(min_capacity=2**40), "min_capacity is 1099511627776, expected a number from 0 to 2147"),
    (dict(drop_tokens="no"), "drop_tokens is 'no', expected True or False"),
    (dict(use_rts=torch.ones(1)), r"use_rts is a tensor of shape \[1\], expected True or False"),
    (dict(mesh=3), "mesh is 3, expected a DeviceMesh"),
    (dict(noisy_gate_policy="rsample"), "noisy_gate_policy is 'rsample', expected None"),
    (dict(use_tutel=True), "use_tutel is True, expected False"),
    (dict(enable_expert_tensor_parallelism=True), "enable_expert_tensor_parallelism is True, exp"),
    (dict(ep_size=2), "ep_size is 2, expected 1 where torch.distributed has no process group"),
])  # fmt: skip
def test_arguments_that_are_refused(options, text):
    with pytest.raises((TypeError, ValueError), match=f"^MoE: {text}"):
        MoE(WIDTH, sequence(), **{"num_experts": EXPERTS, **options})


def test_calls_that_are_refused():
    layer = layer_of()
    with pytest.raises(
        ValueError, match=r"^MoE: hidden_states has shape \[3, 7\], expected \(..., 8"
    ):
        layer(torch.ones(3, 7))
    with pytest.raises(ValueError, match=r"^MoE: used_token has 4 elements, expected one for each"):
        layer(torch.ones(3, 8), torch.ones(4))

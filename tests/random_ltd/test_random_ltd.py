"""Layers that drop tokens: what they see, gradients, and that no two forwards ever meet."""

import copy
import re
from typing import Any

import pytest
import torch
from one_thread import one_thread as one_thread
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

import deepspeed_ext
from deepspeed_ext.compat.runtime.data_pipeline.data_routing.basic_layer import (
    RandomLayerTokenDrop as TheirName,
)
from deepspeed_ext.random_ltd import (
    RandomLayerTokenDrop,
    RandomLTDScheduler,
    convert_to_random_ltd,
    save_without_random_ltd,
)

F64 = torch.float64
SCHEDULE = {
    "min_value": 4,
    "max_value": 12,
    "schedule_type": "fixed_linear",
    "schedule_config": {"require_steps": 6, "seq_per_step": 2},
}
BLOCK: dict[str, Any] = {
    "total_layer_num": 3,
    "random_ltd_layer_num": 2,
    "random_ltd_layer_id": [0, 2],
    "hidden_state_order": "batch_seq_dim",
    "random_ltd_schedule": SCHEDULE,
    "global_batch_size": 8,
}


class Layer(nn.Module):
    """Mixes tokens, so that it matters which there are; notes what it is given."""

    def __init__(self, n: int = 6) -> None:
        super().__init__()
        self.up = nn.Linear(n, n, dtype=F64)
        self.seen: list[tuple[Any, ...]] = []

    def forward(self, x: Tensor, attention_mask: Tensor | None = None, **others: Any) -> Tensor:
        self.seen.append((x.detach(), attention_mask, others))
        return self.up(x).sin() + x.mean(-2, keepdim=True)


class Net(nn.Module):
    """Three layers, each in a checkpoint or not."""

    def __init__(self, drops: bool = True, reentrant: bool | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.reentrant = reentrant
        if drops:
            convert_to_random_ltd(self, Layer)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.reentrant is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def begun(model: nn.Module, **options: Any) -> RandomLTDScheduler:
    """Let all layers of a model drop tokens, from 12 to 4."""
    scheduler = RandomLTDScheduler(BLOCK)
    for number, layer in enumerate(m for m in model.modules() if type(m) is RandomLayerTokenDrop):
        layer.init_config(BLOCK | options, scheduler, number)
    return scheduler


def hidden(seed: int = 0, samples: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 12, 6, dtype=F64, generator=generator).requires_grad_()


def gradients(model: nn.Module, x: Tensor, out: Tensor) -> list[Tensor]:
    """Return those of x and of all parameters; one kind of checkpoint knows backward alone."""
    leaves = [x, *model.parameters()]
    for leaf in leaves:
        leaf.grad = None
    out.pow(2).sum().backward()
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def test_the_schedule() -> None:
    scheduler = RandomLTDScheduler(BLOCK)
    assert (scheduler.get_current_seq(), scheduler.get_random_ltd_layer_num()) == (4, 2)
    values, tokens = [], 0
    for step in range(9):
        scheduler.update_seq(step)
        scheduler.update_seq(step)  # of another micro-step
        values.append(scheduler.get_current_seq())
        tokens += 8 * (2 * values[-1] + 12)
    assert values == [4, 4, 6, 8, 8, 10, 12, 12, 12]
    assert scheduler.state_dict() == {
        "consumed_layer_tokens": tokens, "current_steps": 8, "current_value": 12, "min_value": 4,
        "max_value": 12,
    }  # fmt: skip
    other = RandomLTDScheduler(BLOCK)
    other.load_state_dict(scheduler.state_dict())
    assert other.get_state() == scheduler.get_state()
    scheduler.reset_to_init()
    assert scheduler.get_total_layer_tokens(9) == tokens and other.get_current_seq() == 12
    scheduler.set_current_seq(6)
    assert scheduler.get_current_seq() == 6


def test_the_schedule_is_deepspeeds() -> None:
    """Its formula in floats, with numbers that do not divide."""
    schedule = {**SCHEDULE, "min_value": 17, "max_value": 250}
    schedule["schedule_config"] = {"require_steps": 100, "seq_per_step": 16}
    scheduler = RandomLTDScheduler({**BLOCK, "random_ltd_schedule": schedule})
    for step in range(130):
        grown = int(step / 100 * (250 - 17) + 17)
        assert scheduler.get_value(step) == min(grown - grown % 16, 250)


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_gradients(reentrant: bool | None) -> None:
    """In checkpoints or not, as those of the same tokens by torch's indexing."""
    torch.manual_seed(3)
    model = Net(reentrant=reentrant).train()
    begun(model)
    x = hidden()
    torch.manual_seed(7)
    out = model(x)
    seen = [layer.random_ltd_layer.seen[0][0] for layer in model.layers]
    assert [tuple(t.shape) for t in seen] == [(3, 4, 6)] * 3
    grads = gradients(model, x, out)
    for layer in model.layers:
        if reentrant is not None:  # the same tokens again
            assert torch.equal(*(each[0] for each in layer.random_ltd_layer.seen))
    want = x
    for layer, part in zip(model.layers, seen, strict=True):
        found = (want.detach()[:, :, None] == part[:, None]).all(-1)
        ids = found.long().argmax(1)
        assert found.any(1).all() and (ids.diff() > 0).all()
        rows = ids[..., None].expand(3, 4, 6)
        inner = layer.random_ltd_layer
        want = want.scatter(1, rows, inner(want.gather(1, rows)))
    torch.testing.assert_close(out, want)
    expected = gradients(model, x, want)
    for got, right in zip(grads, expected, strict=True):
        torch.testing.assert_close(got, right)


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_forwards_never_meet(reentrant: bool | None) -> None:
    """Two of one model and one of another before any backward, evaluations between: all gradients
    are those of each alone."""
    torch.manual_seed(3)
    models = [Net(reentrant=reentrant).train() for _ in range(2)]
    for model in models:
        begun(model)
    calls = [(models[0], hidden(0)), (models[1], hidden(1)), (models[0], hidden(0)),
             (models[0], hidden(2, 5))]  # fmt: skip

    alone = []
    for i, (model, x) in enumerate(calls):
        torch.manual_seed(i)
        alone.append(gradients(model, x, model(x)))
    outs = []
    for i, (model, x) in enumerate(calls):
        torch.manual_seed(i)
        outs.append(model(x))
        with torch.no_grad():
            model.eval().reentrant = None
            assert torch.equal(model(x), model(x))
            model.train().reentrant = reentrant
    for i in (2, 0, 3, 1):
        model, x = calls[i]
        for got, want in zip(gradients(model, x, outs[i]), alone[i], strict=True):
            assert torch.equal(got, want)
    assert not torch.equal(alone[0][0], alone[2][0])


def test_until_it_is_told_to_it_drops_nothing() -> None:
    torch.manual_seed(3)
    model = Net().train()
    plain = Net(drops=False)
    plain.load_state_dict(save_without_random_ltd(model))
    x = hidden()
    assert torch.equal(model(x), plain(x))
    scheduler = begun(model)
    assert not torch.equal(model(x), plain(x))
    assert torch.equal(model.eval()(x), plain(x))
    model.train()
    scheduler.update_seq(6)
    assert torch.equal(model(x), plain(x))
    scheduler.set_current_seq(11)
    copied = copy.deepcopy(model)
    copied.layers[0].random_ltd_scheduler.set_current_seq(12)
    assert torch.equal(copied(x), plain(x)) and not torch.equal(model(x), plain(x))


def test_a_layer_can_be_compiled() -> None:
    """In one graph, gradients too, with the same draw and bits, whatever is kept."""
    layer = RandomLayerTokenDrop(nn.Linear(6, 6, dtype=F64)).train()
    scheduler, x = RandomLTDScheduler(BLOCK), hidden()
    layer.init_config(BLOCK, scheduler, 0)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for step in (0, 2, 6):
        scheduler.update_seq(step)
        found = []
        for way in (compiled, layer):
            torch.manual_seed(0)
            found.append(gradients(layer, x, way(x)))
        assert all(map(torch.equal, *found))


def test_tokens_first() -> None:
    """Hidden states (tokens, samples, n), and a layer that returns more than these."""

    class Both(Layer):
        def forward(self, x: Tensor, *others: Any, **more: Any) -> Any:
            return x * 2, "more"

    layer = RandomLayerTokenDrop(Both()).train()
    layer.init_config(BLOCK | {"hidden_state_order": "seq_batch_dim"}, RandomLTDScheduler(BLOCK), 0)
    x = hidden().detach().transpose(0, 1)
    out, more = layer(x)
    ratio = (out / x)[..., 0]
    assert more == "more" and out.shape == x.shape
    assert ((ratio == 2).sum(0) == 4).all() and ((ratio == 1).sum(0) == 8).all()


def tokens_of(mask: Tensor) -> Tensor:
    return torch.arange(mask.shape[-1])


def test_what_belongs_to_tokens_comes_with_them() -> None:
    """Masks of any form, given by place or by name; positions; other arguments as they are."""
    samples = torch.arange(3)[:, None] * 1000
    numbers = samples + torch.arange(12)
    forms: dict[str, Tensor] = {
        "two": numbers,
        "three": (samples[..., None] + torch.arange(12)[:, None] * 20 + torch.arange(12)),
        "four": numbers[:, None, None],
        "one for all": (torch.arange(12)[:, None] * 20 + torch.arange(12))[None, None],
    }
    for name, mask in forms.items():
        for by_place in (True, False):
            inner = Layer()
            layer = RandomLayerTokenDrop(inner).train()
            layer.init_config(BLOCK | {"model_mask_name": "attention_mask"},
                              RandomLTDScheduler(BLOCK), 0)  # fmt: skip
            x = hidden().detach()
            x[..., 0] = torch.arange(12)
            given = (mask,) if by_place else ()
            named: dict[str, Any] = {} if by_place else {"attention_mask": mask}
            cos = torch.arange(12.0)[None, :, None].expand(1, 12, 2)
            positions = dict(position_ids=torch.arange(12)[None], position_embeddings=(cos, -cos))
            layer(x, *given, **named, **positions, flag=5)
            part, got, others = inner.seen[0]
            ids = part[..., 0].long()
            of_sample = (samples if mask.shape[0] == 3 else samples * 0)[..., None]
            if name == "two":
                assert torch.equal(got, of_sample[..., 0] + ids)
            elif name == "four":
                assert torch.equal(got[:, 0, 0], of_sample[..., 0] + ids)
            else:
                square = got if name == "three" else got[:, 0]
                assert torch.equal(square, of_sample + ids[..., None] * 20 + ids[:, None])
            assert torch.equal(others["position_ids"], ids) and others["flag"] == 5
            assert torch.equal(others["position_embeddings"][1][..., 1], -ids.float())


def test_a_layer_of_another_dtype() -> None:
    """As autocast makes them: all tokens have that of the layer, as without random-LTD."""

    class Wide(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.float()

    layer, x = RandomLayerTokenDrop(Wide()).train(), hidden().detach().bfloat16().requires_grad_()
    layer.init_config(BLOCK, RandomLTDScheduler(BLOCK), 0)
    found = layer(x)
    assert torch.equal(found, x.float())
    found.sum().backward()
    assert x.grad is not None and (x.grad == 1).all()


def test_what_is_refused() -> None:
    layer = RandomLayerTokenDrop(Layer()).train()
    scheduler = RandomLTDScheduler(BLOCK)
    layer.init_config(BLOCK | {"model_mask_name": "attention_mask"}, scheduler, 0)
    with pytest.raises(ValueError, match=r"attention_mask is not given to the layer, expected it"):
        layer(hidden())
    layer(hidden(), attention_mask=None)
    with pytest.raises(TypeError, match=r"attention_mask is a int, expected a tensor$"):
        layer(hidden(), 5)
    with pytest.raises(
        ValueError, match=r"attention_mask has shape \[3, 13\], expected two to four"
    ):
        layer(hidden(), torch.ones(3, 13))
    with pytest.raises(
        ValueError, match=r"has shape \[12, 12\], .*, and the first of 1 or 3, the s"
    ):
        layer(hidden(), torch.ones(12, 12))
    with pytest.raises(TypeError, match=r"^convert_to_random_ltd: convert_type is 'Layer', expect"):
        convert_to_random_ltd(nn.Sequential(Layer()), "Layer")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^RandomLTDScheduler: config is \[\], expected a Mapping"):
        RandomLTDScheduler([])  # type: ignore[arg-type]
    for kept in (0, -3, "4", 2.5, True, float("inf")):
        with pytest.raises(
            ValueError, match=r"^RandomLTDScheduler: seq_length is .*, expected a w"
        ):
            scheduler.set_current_seq(kept)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"^RandomLTDScheduler: current_value is .*, expected"):
            scheduler.load_state_dict(scheduler.state_dict() | {"current_value": kept})  # type: ignore[dict-item]
    assert scheduler.get_current_seq() == 4
    with pytest.raises(ValueError, match=r"hidden_state_order is 'x', expected one of batch_seq_"):
        layer.init_config(BLOCK | {"hidden_state_order": "x"}, scheduler, 0)
    wrong = RandomLayerTokenDrop(nn.LSTM(6, 6)).train()
    wrong.forward = None  # type: ignore[assignment]
    for key, value, text in (
        (
            "random_ltd_schedule",
            {**SCHEDULE, "min_value": 1},
            "min_value is 1, expected a whole num",
        ),
        (
            "random_ltd_schedule",
            {**SCHEDULE, "max_value": 3},
            "max_value is 3, expected a whole num",
        ),
        (
            "random_ltd_schedule",
            {**SCHEDULE, "schedule_type": "x"},
            "schedule_type is 'x', expected",
        ),
        ("global_batch_size", None, "global_batch_size is missing, expected a value"),
        ("layer_token_lr_schedule", {"enabled": True}, "layer_token_lr_schedule.enabled is True"),
    ):
        with pytest.raises(ValueError, match=f"^RandomLTDScheduler: .*{re.escape(text)}|{text}"):
            RandomLTDScheduler({**BLOCK, key: value})


def test_conversion() -> None:
    """Of all layers of a class, each once; names of the state are as before."""
    model = nn.Sequential(Layer(), nn.Linear(6, 6), nn.ModuleDict({"a": Layer()}))
    model.add_module("again", model[0])
    names = list(model.state_dict())
    assert convert_to_random_ltd(model, Layer) is model
    assert type(model[0]) is RandomLayerTokenDrop is TheirName
    assert model.get_submodule("again") is model[0] and type(model[2]["a"]) is RandomLayerTokenDrop
    assert list(save_without_random_ltd(model)) == names and list(model.state_dict()) != names
    assert model[0].up is model[0].random_ltd_layer.up
    for kind in (Layer, nn.Conv2d):
        with pytest.raises(
            ValueError, match=r"^convert_to_random_ltd: convert_type is .* expected a "
        ):
            convert_to_random_ltd(model, kind)
    with pytest.raises(
        ValueError, match=r"^convert_to_random_ltd: model is a Layer, expected a mod"
    ):
        convert_to_random_ltd(Layer(), Layer)


SMALL = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
             vocab_size=50, max_position_embeddings=16)  # fmt: skip


def test_models_of_transformers() -> None:
    """Rope, causal masks with padding, masks by place, their checkpoints: numbers are those of the
    layer called with the tokens that are kept."""
    torch.manual_seed(0)
    ids = torch.randint(50, (2, 12))
    padded = torch.ones(2, 12, dtype=torch.long)
    padded[0, 9:] = 0
    llama = LlamaForCausalLM(LlamaConfig(**SMALL, attn_implementation="eager"))
    bert = BertModel(BertConfig(**SMALL, attn_implementation="eager"), add_pooling_layer=False)
    for model, layers, tokens in (
        (llama, llama.model.layers, padded),
        (bert, bert.encoder.layer, padded),
    ):
        convert_to_random_ltd(model, type(layers[1]))
        model.train()
        layers[0].eval()
        scheduler = begun(model, model_mask_name="attention_mask")
        for kept in (11, 12):
            scheduler.set_current_seq(kept)
            torch.manual_seed(1)
            out = model(ids, attention_mask=tokens)[0]
            out.float().square().mean().backward()
        grads = [p.grad for p in layers[1].parameters()]
        assert all(g is not None and g.isfinite().all() for g in grads)
    # A row of a decoder depends on what is before it alone: tokens at the end, dropped or padding,
    # change nothing before them, whatever the mask hides.
    llama.model.layers[2].eval()
    scheduler = begun(llama, model_mask_name="attention_mask")
    scheduler.set_current_seq(8)
    torch.manual_seed(5)
    first = llama(ids[:1], attention_mask=padded[:1])[0]
    other = ids[:1].clone()
    other[:, 9:] = 3
    torch.manual_seed(5)
    assert torch.equal(llama(other, attention_mask=padded[:1])[0][:, :9], first[:, :9])


CONFIG: dict[str, Any] = {
    "train_batch_size": 6,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
    "data_efficiency": {
        "enabled": True,
        "data_routing": {
            "enabled": True,
            "random_ltd": {**{k: v for k, v in BLOCK.items() if k != "global_batch_size"},
                           "enabled": True},
        },
    },
}  # fmt: skip


def test_an_engine_drops_tokens(tmp_path: Any) -> None:
    """By its config: these layers, as many tokens as the step says, in training alone; what a
    checkpoint has goes on."""
    torch.manual_seed(0)
    model = Net().float().train()
    with deepspeed_ext.initialize(model=model, config=CONFIG)[0] as engine:
        inner = [layer.random_ltd_layer for layer in engine.module.layers]
        for step in range(4):
            for micro in range(2):
                x = hidden(2 * step + micro).float().to(engine.device)
                engine.backward(engine(x).square().mean())
                engine.eval()
                with torch.no_grad():
                    engine(hidden().float().to(engine.device))
                engine.train()
                engine.step()
        shapes = [[each[0].shape[1] for each in layer.seen] for layer in inner]
        kept = [4, 12, 4, 12, 4, 12, 4, 12, 6, 12, 6, 12, 8, 12, 8, 12]
        assert shapes == [kept, [12] * 16, kept]
        state = engine.random_ltd_scheduler.state_dict()
        assert state["consumed_layer_tokens"] == 6 * sum(2 * n + 12 for n in (4, 4, 6, 8))
        engine.save_checkpoint(tmp_path)
        assert engine.load_checkpoint(tmp_path)[1] == {}
    with deepspeed_ext.initialize(model=Net().float().train(), config=CONFIG)[0] as engine:
        assert engine.random_ltd_scheduler.get_current_seq() == 4
        _, client = engine.load_checkpoint(tmp_path)
        assert client == {} and engine.random_ltd_scheduler.state_dict() == state


def test_what_an_engine_refuses() -> None:
    def changed(**options: Any) -> dict[str, Any]:
        config = copy.deepcopy(CONFIG)
        config["data_efficiency"]["data_routing"]["random_ltd"] |= options
        return config

    off = copy.deepcopy(CONFIG)
    off["data_efficiency"]["enabled"] = False
    at = "data_efficiency.data_routing.random_ltd"
    for model, config, text in (
        (
            Net(drops=False),
            CONFIG,
            f"{at}.random_ltd_layer_id has 0, expected the number of a Random",
        ),
        (Net(), changed(random_ltd_layer_id=[0, 3]), "random_ltd_layer_id has 3, expected the num"),
        (
            Net(),
            changed(random_ltd_layer_num=3),
            "random_ltd_layer_num is 3, expected 2, the length",
        ),
        (
            Net(),
            changed(random_ltd_layer_id=[1, 1]),
            "is [1, 1], expected a list of different whole",
        ),
        (
            Net(),
            changed(total_layer_num=None),
            f"{at}.total_layer_num is missing, expected a value",
        ),
        (Net(), off, f"data_efficiency.enabled is false beside {at}.enabled true, expected true"),
        (nn.ModuleList([Net(), Net()]), CONFIG, "model has two layers of number 0 that may drop"),
    ):
        with pytest.raises(ValueError, match=re.escape(text)):
            deepspeed_ext.initialize(model=model, config=config)

"""patch and unpatch: what they leave alone, copies, and what is put around a patched model."""

import copy
import io
import pickle
import sys
from functools import partial
from typing import Any

import pytest
import torch
from patch_cases import batch, model_of, numbers_of
from processes import Case
from torch import Tensor, nn

from deepspeed_ext import init_inference, patch, unpatch


def forwards(model: nn.Module) -> list[str]:
    """Return the names of modules that have a forward of their own."""
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


def assert_same(found: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Bit by bit."""
    assert found.keys() == want.keys()
    assert [name for name in want if not torch.equal(found[name], want[name])] == []


def test_taken_out_again() -> None:
    """Nothing is left but what was there, in a copy and in a pickled one too."""
    model, inputs = model_of("Llama"), batch()
    before = numbers_of(model, **inputs)
    attributes = [sorted(vars(module)) for module in model.modules()]
    state = [*model.state_dict()]
    classes = [type(module) for module in model.modules()]
    patch(model)
    patched = numbers_of(model, **inputs)
    assert [*model.state_dict()] == state
    assert [type(module) for module in model.modules()] == classes
    model.zero_grad()
    room = io.BytesIO()
    torch.save(model, room)
    room.seek(0)
    for each in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(room, weights_only=False),
    ):
        assert_same(numbers_of(each, **inputs), patched)
        with torch.no_grad():  # it has weights of its own
            each.lm_head.weight.mul_(2)
            each.model.norm.weight.zero_()
        unpatch(each)
        assert [sorted(vars(module)) for module in each.modules()] == attributes
    assert_same(numbers_of(model, **inputs), patched)
    unpatch(model)
    assert_same(numbers_of(model, **inputs), before)
    assert [sorted(vars(module)) for module in model.modules()] == attributes
    unpatch(model)


def test_twice_is_once_and_two_models_do_not_meet() -> None:
    model, other, inputs = model_of("Mixtral"), model_of("Mixtral"), batch()
    other.set_experts_implementation("eager")
    before = numbers_of(other, **inputs)
    first = patch(model)
    want = numbers_of(model, **inputs)
    there = [vars(module).get("forward") for module in model.modules()]
    with pytest.raises(TypeError, match=r"^patch: loss is 'no', expected True or False"):
        patch(model, loss="no")  # type: ignore[arg-type]
    assert patch(model) == first
    assert [vars(module).get("forward") for module in model.modules()] == there
    assert_same(numbers_of(model, **inputs), want)
    assert not forwards(other)
    assert_same(numbers_of(other, **inputs), before)


def test_what_others_have_replaced_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = model_of("Llama"), batch()
    layers = model.model.layers

    class Own(type(layers[0].mlp)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    norm = layers[0].input_layernorm
    theirs = norm.forward = partial(type(norm).forward, norm)
    layers[1].mlp.__class__ = Own
    model.loss_function = nn.functional.mse_loss
    monkeypatch.setattr(type(layers[0].self_attn), "forward", lambda self, *a, **k: None)
    report = patch(model)
    assert report.left == {
        "": "its loss function is mse_loss, expected ForCausalLMLoss of transformers",
        "model.layers.0.input_layernorm": "its forward has been replaced by another",
        "model.layers.0.self_attn": "the forward of its class has been replaced by another",
        "model.layers.1.self_attn": "the forward of its class has been replaced by another",
        "model.layers.1.mlp": f"its class is of {Own.__module__}, expected one of transformers",
    }
    assert norm.forward is theirs and "left: its forward has been" in str(report)
    assert "forward" not in vars(layers[1].mlp) and "forward" in vars(layers[0].mlp)
    monkeypatch.undo()
    del model._loss_function
    unpatch(model)
    assert norm.forward is theirs
    assert model(**inputs).logits is not None


def test_a_class_that_computes_something_else_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever its name: as if a version of transformers had changed it."""
    model = model_of("Llama")
    files = sys.modules[type(model).__module__]
    norm, block = type(model.model.norm), type(model.model.layers[0].mlp)

    def changed(kind: type, function: Any) -> None:
        function.__module__ = kind.__module__
        function.__qualname__ = f"{kind.__qualname__}.forward"
        monkeypatch.setattr(kind, "forward", function)

    changed(norm, lambda self, x: x * self.weight)
    changed(block, lambda self, x: self.down_proj(self.up_proj(x)))
    own = files.apply_rotary_pos_emb

    def backwards(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return own(q, k, cos, -sin)

    backwards.__module__ = own.__module__
    monkeypatch.setattr(files, "apply_rotary_pos_emb", backwards)
    monkeypatch.setattr(files, "eager_attention_forward", lambda *a, **k: None)
    report = patch(model)
    reasons = {"model.norm": "its forward", "model.layers.0.mlp": "its forward"}
    for name, what in reasons.items():
        assert report.left[name] == f"{what} computes something else"
    reason = "apply_rotary_pos_emb computes something else; eager_attention_forward has been"
    assert report.left["model.layers.1.self_attn"].startswith(reason)


def test_a_forward_around_ours_is_kept_and_ours_taken_out() -> None:
    """As accelerate puts one there for autocast, and binds ours to the model afterwards."""
    model, inputs = model_of("Qwen2"), batch()
    want = numbers_of(model, **inputs)
    patch(model)
    norm, ours = model.model.norm, model.model.norm.forward
    norm.forward = lambda x: ours(x) * 1
    bound = model.forward
    model.forward = type(norm.__call__)(bound, model)
    assert model(**inputs).logits is None
    unpatch(model)
    assert forwards(model) == ["", "model.norm"]
    assert_same(numbers_of(model, **inputs), want)


def test_what_our_ops_do_not_take_runs_as_it_is() -> None:
    model, inputs = model_of("Gemma2").double(), batch()
    want = numbers_of(model, **inputs)
    patch(model)
    assert_same(numbers_of(model, **inputs), want)


def test_logits() -> None:
    """There in evaluation, without labels, and where they are asked for."""
    model, inputs = model_of("Gemma2"), batch()
    want = model(**inputs)
    patch(model)
    found = model(**inputs)
    assert found.logits is None and "logits" not in found and found[0] is found.loss
    as_tuple = model(**inputs, return_dict=False)
    assert torch.equal(as_tuple[0], found.loss) and all(t is not None for t in as_tuple)
    assert len(as_tuple) == len(want.to_tuple()) - 1
    kept = model(**(inputs | dict(labels=inputs["labels"][:, -4:])), logits_to_keep=4)
    assert kept.logits.shape[1] == 4 and kept.loss is not None
    shown = model(**inputs, output_hidden_states=True)
    assert len(shown.hidden_states) == 3 and shown.logits is None
    for call in (
        lambda: model.eval()(**inputs),
        lambda: model.train()(inputs["input_ids"], inputs["attention_mask"]),
    ):
        torch.testing.assert_close(call().logits, want.logits, atol=1e-5, rtol=1e-5)
    patch(model, loss=False)  # takes the loss out
    torch.testing.assert_close(model(**inputs).logits, want.logits, atol=1e-5, rtol=1e-5)


def test_who_reads_logits_gets_them() -> None:
    """A hook on the head, and a loss function of one's own that is set later."""
    model, inputs = model_of("Llama"), batch()
    patched = copy.deepcopy(model)
    patch(patched)

    def assert_near() -> None:
        found, want = patched(**inputs), model(**inputs)
        torch.testing.assert_close(found.logits, want.logits)
        torch.testing.assert_close(found.loss, want.loss)

    def watch(register: str, hook: Any) -> None:
        hooks = [getattr(each.lm_head, register)(hook) for each in (model, patched)]
        assert_near()
        patched(**inputs).loss.backward()
        for each in hooks:
            each.remove()

    seen: list[Any] = []
    watch("register_forward_hook", lambda module, given, out: out * 3)
    watch("register_full_backward_hook", lambda module, grads, more: seen.append(more[0].shape))
    assert len(seen) == 1
    assert patched(**inputs).logits is None
    for each in (model, patched):
        each.loss_function = lambda logits, labels, **more: logits.square().sum()
    assert_near()


def test_two_calls_at_once_are_refused() -> None:
    """Of the head in a forward, whose rows are of another layer, and of the model."""
    model, inputs = model_of("Llama"), batch()
    patch(model)
    layer = model.model.layers[0]

    def guess(module: nn.Module, given: Any, out: Tensor) -> None:
        model.lm_head(out)

    early = layer.register_forward_hook(guess)
    with pytest.raises(RuntimeError, match=r"^patch: the head is called twice in a forward"):
        model(**inputs)
    early.remove()
    again = layer.register_forward_pre_hook(lambda module, given: model(**inputs) and None)
    with pytest.raises(RuntimeError, match=r"^patch: the model is called within a call"):
        model(**inputs)
    again.remove()
    assert model(**inputs).loss.isfinite()


def test_what_is_changed_later_counts() -> None:
    """In modules that are replaced already."""
    model, inputs = model_of("Llama"), batch()
    patched = copy.deepcopy(model)
    patch(patched)
    for change in (
        lambda each: setattr(each.model.norm, "variance_epsilon", 0.5),
        lambda each: each.model.layers[0].mlp.act_fn.register_forward_hook(lambda m, x, y: y * 3),
        lambda each: setattr(each.model.layers[1].mlp, "act_fn", nn.Tanh()),
    ):
        before = model(**inputs).loss
        change(model)
        change(patched)
        want, found = (each(**inputs).loss for each in (model, patched))
        torch.testing.assert_close(found, want)
        assert (want - before).abs() > 1e-4


def test_what_the_loss_is_told() -> None:
    """As Trainer tells it: how many items a step has, and labels that are shifted already."""
    model, inputs = model_of("Llama"), batch()
    patched = copy.deepcopy(model)
    patch(patched)
    shifted = nn.functional.pad(inputs["labels"], (0, 1), value=-100)[:, 1:]
    for told in (
        dict(num_items_in_batch=torch.tensor(40)),
        dict(num_items_in_batch=7),
        dict(shift_labels=shifted.roll(1, 0)),
        dict(ignore_index=int(inputs["labels"][0, 1])),
    ):
        given = inputs | dict(labels=inputs["labels"].clamp(min=0)) | told
        want, found = (each(**given).loss for each in (model, patched))
        torch.testing.assert_close(found, want)
    none = inputs | dict(labels=torch.full_like(inputs["labels"], -100))
    assert patched(**none).loss.isnan()
    with pytest.raises(ValueError, match="targets has 61 as its element number 0"):
        patched(**(inputs | dict(labels=inputs["labels"].clamp(max=0) + 61)))
    torch.testing.assert_close(patched(**inputs).loss, model(**inputs).loss)  # after an error


def test_generates_the_same() -> None:
    for family in ("Llama", "Gemma3"):
        model, ids = model_of(family).eval(), batch()["input_ids"]
        options = dict(max_new_tokens=8, do_sample=False, pad_token_id=0)
        want = model.generate(ids, **options)
        patch(model)
        assert torch.equal(model.generate(ids, **options), want)
        assert torch.equal(model.train().generate(ids, **options), want)
    engine = init_inference(model_of("Llama"), max_batch=2)
    model = model_of("Llama")
    patch(model)  # an engine reads its weights all the same
    patched = init_inference(model, max_batch=2)
    found, expected = (each.generate(ids.tolist(), max_new_tokens=8) for each in (patched, engine))
    assert [each.tokens for each in found] == [each.tokens for each in expected]


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool) -> None:
    """Blocks that are computed again have the same bits."""
    model, inputs = model_of("Qwen3"), batch()
    patch(model)
    want = numbers_of(model, **inputs)
    model.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
    model.enable_input_require_grads()
    assert_same(numbers_of(model, **inputs), want)


@pytest.mark.long
def test_can_be_compiled() -> None:
    """Into one graph, with the same ops and bits; and taken out again."""
    torch.compiler.reset()
    model, inputs = model_of("Gemma2", num_hidden_layers=1), batch()
    del inputs["attention_mask"]
    plain = model(**inputs).loss.detach()
    patch(model)
    want = numbers_of(model, **inputs)
    model.zero_grad()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = compiled(**inputs)
    assert found.logits is None and torch.equal(found.loss, want["loss"])
    found.loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    assert_same(grads, {name: want[name] for name in grads})
    unpatch(compiled)
    again = compiled(**inputs)
    assert again.logits is not None and torch.equal(again.loss, plain)


def test_adapters() -> None:
    """LoRA of peft, put there before or after; a head that is trained whole makes logits."""
    peft = pytest.importorskip("peft", reason="needs peft")
    inputs = batch()
    found = []
    for order in ("never", "before", "after"):
        model = model_of("Llama")
        if order == "before":
            patch(model)
        torch.manual_seed(1)
        config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
        adapted = peft.get_peft_model(model, config)
        if order == "after":
            report = patch(adapted)
            assert not report.left
        out = adapted(**inputs)
        assert (out.logits is None) == (order != "never")
        out.loss.backward()
        found.append({n: p.grad for n, p in adapted.named_parameters() if p.requires_grad})
    for grads in found[1:]:
        for name, grad in grads.items():
            torch.testing.assert_close(grad, found[0][name], atol=1e-6, rtol=1e-4)
    for modules in (dict(modules_to_save=["lm_head"]), dict(target_modules=["q_proj", "lm_head"])):
        model = model_of("Llama")
        patch(model)
        options = dict(target_modules=["q_proj"]) | modules
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, **options))
        assert adapted(**inputs).logits is not None
        assert patch(adapted).left == {}


def test_trainer(tmp_path: Any) -> None:
    """Steps of several micro-steps and an evaluation give the same losses, without logits."""
    from transformers import Trainer, TrainingArguments

    rows = [{k: v[i] for k, v in batch(12).items()} for i in range(12)]
    losses = []
    for patched in (False, True):
        model = model_of("Llama")
        options: dict[str, Any] = dict(
            output_dir=str(tmp_path),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=3,
            learning_rate=1e-2,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
        )
        if patched:
            patch(model)
        trainer = Trainer(model, TrainingArguments(**options), train_dataset=rows)
        assert trainer.model_accepts_loss_kwargs
        trainer.train()
        history = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        losses.append([*history, trainer.evaluate(rows)["eval_loss"]])
    assert len(losses[0]) == 4
    torch.testing.assert_close(losses[1], losses[0], atol=1e-4, rtol=1e-4)


def test_other_models() -> None:
    """What is no language model has its norms replaced, and says why not its loss."""
    import transformers

    config = transformers.LlamaConfig(**batch_of_sizes(), num_labels=3)
    model = transformers.LlamaForSequenceClassification(config)
    report = patch(model)
    assert report.left[""].startswith("its loss function is ForSequenceClassificationLoss, ")
    assert report.replaced["model.norm"] == ("rms_norm",)

    class Mine(transformers.LlamaForCausalLM):  # type: ignore[misc]
        pass

    own = patch(Mine(config))
    assert own.left[""] == f"its class is of {__name__}, expected one of transformers"
    assert "lm_head" not in own.replaced
    plain = nn.Sequential(nn.LayerNorm(4), nn.RMSNorm(4), nn.Linear(4, 4))
    assert patch(plain).replaced == {"0": ("layer_norm",), "1": ("rms_norm",)}
    for function in (patch, unpatch):
        with pytest.raises(TypeError, match=r"model is 3, expected a torch\.nn\.Module"):
            function(3)  # type: ignore[arg-type]


def batch_of_sizes() -> dict[str, Any]:
    """Return sizes of a model without a head."""
    return dict(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        pad_token_id=0,
    )


def test_transformers_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # an import would raise
    model = nn.Sequential(nn.LayerNorm(4), nn.ReLU())
    assert patch(model).replaced == {"0": ("layer_norm",)}
    unpatch(model)
    assert not forwards(model)


def sharded(row: str, folder: Any) -> None:
    """Compare a model that is sharded before or after with one that is not, in each process."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    from deepspeed_ext import zero

    inputs = batch()
    alone = model_of("Llama")
    patch(alone)
    want = numbers_of(alone, **inputs)
    model = model_of("Llama")
    if row == "before":
        patch(model)
    if row == "the head alone":
        for part in (*model.model.layers, model.lm_head, model):
            fully_shard(part)
    else:
        zero.shard(model, 3)
    report = patch(model)
    assert not report.left and report.replaced[""] == ("linear_cross_entropy",)
    for _ in range(2):
        model.zero_grad()
        out = model(**inputs)
        assert out.logits is None
        out.loss.backward()
    torch.testing.assert_close(out.loss.detach(), want["loss"])
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        whole = parameter.grad.full_tensor()
        torch.testing.assert_close(whole, want[name], atol=1e-6, rtol=1e-4)
    unpatch(model)
    assert forwards(model) == []


CASES = [Case(2, "sharded", row) for row in ("before", "after", "the head alone")]


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.row)
def test_sharded(groups: Any, case: Case) -> None:
    groups.run(case)

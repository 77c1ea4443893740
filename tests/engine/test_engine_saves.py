"""What engines save for others, whole weights and parts of checkpoints."""

import logging

import pytest
import torch
import torch.distributed as dist
from processes import Case
from test_training_loops import config
from zero_cases import Net, loss_of, whole

import deepspeed_ext
from deepspeed_ext import io
from deepspeed_ext.dtensors import local

FLAG = "stage3_gather_16bit_weights_on_model_save"
FROZEN = "blocks.1.down.weight"
DTYPES = {"float32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def made(stage, precision="float32", gathers=True, seed=0):
    given = config(stage, precision)
    given["zero_optimization"][FLAG] = gathers
    return deepspeed_ext.initialize(model=Net(seed), config=given)[0]


def train(engine, number):
    engine.backward(loss_of(engine, number))
    engine.step()


def wholes(engine):
    return {name: whole(tensor) for name, tensor in engine.module.state_dict().items()}


def saves_models(row, folder):
    """Whole weights of the dtype that computes, in the first process alone."""
    stage, precision = row.split("-")
    engine = made(int(stage), precision)
    engine.module.register_buffer("seen", torch.arange(3.0))
    train(engine, 0)
    wanted = {n: t if n == "seen" else t.to(DTYPES[precision]) for n, t in wholes(engine).items()}
    home = folder / row
    state = engine._zero3_consolidated_16bit_state_dict()
    assert (state is None) == (dist.get_rank() > 0)
    assert engine.save_16bit_model(home)
    assert engine.save_16bit_model(home, "pytorch_model.bin", exclude_frozen_parameters=True)
    if state is not None:
        files = {
            "state": state,
            "safetensors": io.load(home / "model.safetensors"),
            "bin": torch.load(home / "pytorch_model.bin"),
        }
        for kind, found in files.items():
            assert found.keys() == wanted.keys() - ({FROZEN} if kind == "bin" else set()), kind
            for name, tensor in found.items():
                assert tensor.dtype == wanted[name].dtype, (kind, name)
                assert torch.equal(tensor.cpu(), wanted[name].cpu()), (kind, name)
        assert state["head.weight"] is state["embedding.weight"]
        own = {local(t).untyped_storage().data_ptr() for t in engine.module.state_dict().values()}
        assert not own & {t.untyped_storage().data_ptr() for t in state.values()}
    train(engine, 1)  # the engine goes on
    with pytest.raises((OSError, RuntimeError)) as caught:  # in all processes
        engine.save_16bit_model(home / "model.safetensors")
    assert isinstance(caught.value, OSError) == (dist.get_rank() == 0)


def saves_nothing(row, folder):
    """In stage 3 without the key that asks for it."""
    engine = made(3, gathers=False)
    assert not engine.zero_gather_16bit_weights_on_model_save()
    assert not engine.save_16bit_model(folder / "nothing")
    assert not (folder / "nothing").exists()


def leaves_out_frozen(row, folder):
    """Checkpoints without frozen parameters, and loads of parts."""
    engine = made(2, "bf16")
    train(engine, 0)
    engine.save_checkpoint(folder / "frozen", exclude_frozen_parameters=True)
    engine.save_checkpoint(folder / "frozen", tag=7, save_latest=False)
    wanted = wholes(engine)
    second = made(3, "fp16", seed=1)
    with pytest.raises(ValueError, match=f"the checkpoint has no '{FROZEN}', expected all that"):
        second.load_checkpoint(folder / "frozen")
    before = wholes(second)
    where, _ = second.load_checkpoint(
        folder / "frozen", load_module_strict=False, load_module_only=True
    )
    assert where.endswith("global_step1") and second.global_steps == 0
    assert not second.optimizer.state
    for name, tensor in wholes(second).items():
        assert torch.equal(tensor, before[name] if name == FROZEN else wanted[name]), name
    scale = second._stepping.scaler.get_scale()
    where, _ = second.load_checkpoint(folder / "frozen", tag=7, load_optimizer_states=False)
    assert where.endswith("/7") and second.global_steps == 1
    assert second._stepping.scaler.get_scale() == scale and not second.optimizer.state
    assert torch.equal(wholes(second)[FROZEN], wanted[FROZEN])


def loads_whole_tensors(row, folder):
    """As scripts keep them, by the names of the engine."""
    engine = made(2)
    kept = {f"module.{name}": tensor.clone() for name, tensor in wholes(engine).items()}
    assert engine.state_dict().keys() == kept.keys()
    train(engine, 0)
    engine.load_state_dict(kept)
    plain = made(2)
    for each in (engine, plain):
        each.optimizer.load_state_dict(plain.optimizer.state_dict())
        train(each, 1)
    pairs = zip(wholes(engine).values(), wholes(plain).values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    engine.load_state_dict(plain.state_dict())
    with pytest.raises(RuntimeError, match="size mismatch"):
        engine.load_state_dict(kept | {"module.unused.bias": torch.zeros(3)})
    with pytest.raises(ValueError, match="assign is True"):
        engine.load_state_dict(kept, assign=True)


CASES = [
    *(Case(2, "saves_models", row) for row in ("3-bf16", "0-fp16", "2-float32")),
    *(Case(2, name, "") for name in ("saves_nothing", "leaves_out_frozen", "loads_whole_tensors")),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.function}-{case.row}-{case.world}")
def test_processes(case, groups):
    groups.run(case)


def test_others_open_the_folder(tmp_path, caplog) -> None:
    """transformers and init_inference, after a training in stage 3."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=64,
            eos_token_id=None,
            tie_word_embeddings=True,
        )
    )
    given = config(3, "bf16")
    given["zero_optimization"][FLAG] = True
    tokens = torch.arange(8)[None]
    with deepspeed_ext.initialize(model=model, config=given)[0] as engine:
        engine.backward(engine(tokens, labels=tokens).loss)
        engine.step()
        engine.save_16bit_model(tmp_path)
        model.config.save_pretrained(tmp_path)
        wanted = engine._consolidated_16bit_state_dict()
        opened = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
        assert all(torch.equal(t, wanted[n]) for n, t in opened.state_dict().items())
        server = deepspeed_ext.init_inference(str(tmp_path), max_batch=1, max_tokens=32)
        assert len(server.generate([[1, 2, 3]], max_new_tokens=2)[0].tokens) == 2
        (tmp_path / "model.safetensors").rename(tmp_path / "aside")
        engine.save_16bit_model(tmp_path, "pytorch_model.bin")
        opened = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
        assert all(torch.equal(t, wanted[n]) for n, t in opened.state_dict().items())
        (tmp_path / "aside").rename(tmp_path / "model.safetensors")
        with caplog.at_level(logging.WARNING, "deepspeed_ext"):
            engine.save_16bit_model(tmp_path, "pytorch_model.bin")
        assert "has model.safetensors too, which is what others open" in caplog.text

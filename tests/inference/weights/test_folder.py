"""Engines of a folder: the weights are those of the files, each read once, a layer at a time."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_folder
import torch
from family_cases import model_of
from torch import Tensor

import deepspeed_ext
from deepspeed_ext.inference.initialize import init_inference
from deepspeed_ext.inference.model import checkpoint_folder as folder_module
from deepspeed_ext.inference.serving.engine import InferenceEngine
from deepspeed_ext.io.checkpoint.shards import Shards

PROMPT = [3, 5, 7, 11, 13, 17]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif("not torch.cuda.is_available()"))]


def weights_by_name(engine: InferenceEngine) -> dict[str, Tensor]:
    """Return what the engine has, by the names of the files."""
    weights = engine.decoder.weights
    found = {"model.embed_tokens.weight": weights.embedding}
    for i, layer in enumerate(weights.layers):
        at = f"model.layers.{i}"
        q, k, v = layer.qkv.weight.split((64, 32, 32))
        gate, up = layer.up.weight.chunk(2)
        found |= {
            f"{at}.self_attn.q_proj.weight": q,
            f"{at}.self_attn.k_proj.weight": k,
            f"{at}.self_attn.v_proj.weight": v,
            f"{at}.self_attn.o_proj.weight": layer.out.weight,
            f"{at}.mlp.gate_proj.weight": gate,
            f"{at}.mlp.up_proj.weight": up,
            f"{at}.mlp.down_proj.weight": layer.down.weight,
            f"{at}.input_layernorm.weight": layer.attention_norm.weight,
            f"{at}.post_attention_layernorm.weight": layer.mlp_norm.weight,
        }
    found["model.norm.weight"] = weights.final_norm.weight
    found["lm_head.weight"] = weights.head.weight
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_those_of_the_files(
    dtype: torch.dtype, files: int, device: str, tmp_path: Path
) -> None:
    tensors = tiny_folder.tensors_of()
    tiny_folder.write(tmp_path, tensors=tensors, files=files)
    engine = init_inference(tmp_path, dtype=dtype, device=device)
    found = weights_by_name(engine)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name].cpu(), tensor.to(dtype)), name
        assert found[name].device.type == device


def test_a_folder_and_a_module_give_the_same_engine(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {k: v for k, v in tiny_folder.CONFIG.items() if k not in ("model_type", "dtype")}
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(set(tiny_folder.read_index(tmp_path).values())) > 2
    of_folder = deepspeed_ext.init_inference(str(tmp_path), device="cpu")
    found, expected = weights_by_name(of_folder), model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    engines = of_folder, init_inference(model, device="cpu")
    texts = [engine.generate([PROMPT], max_new_tokens=8)[0].tokens for engine in engines]
    assert texts[0] == texts[1] and texts[0]


def test_each_tensor_is_read_once_and_the_next_layer_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nothing needs is not read."""
    extra = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(8) for i in range(3)}
    tiny_folder.write(tmp_path, tensors=tiny_folder.tensors_of() | extra, files=2)
    calls: list[list[str]] = []
    load = Shards.load

    def noted(self: Shards, names: Any, *rest: Any) -> dict[str, Tensor]:
        calls.append(list(names))
        return load(self, names, *rest)

    monkeypatch.setattr(Shards, "load", noted)
    init_inference(tmp_path)
    names = [name for call in calls for name in call]
    assert len(names) == len(set(names)) and set(names) == set(tiny_folder.tensors_of())
    assert sorted(len(call) for call in calls) == [1, 2, 9, 9, 9]
    layers = [call for call in calls if len(call) == 9]
    assert all(len({name.split(".")[2] for name in call}) == 1 for call in layers)


def test_a_tensor_may_be_asked_for_again(tmp_path: Path) -> None:
    tensors = tiny_folder.tensors_of()
    shards = Shards("test", tiny_folder.write(tmp_path, tensors=tensors))
    names = list(tensors)
    with folder_module.FolderTensors(shards, names, torch.device("cpu")) as lazy:
        for name in (names[3], names[0], names[3], names[-1], names[2]):  # in any order
            assert torch.equal(lazy[name], tensors[name])


def test_layers_share_memory_that_is_used_again(tmp_path: Path) -> None:
    """What was not asked for in time is read again, and is not what lies there now."""
    tensors = tiny_folder.tensors_of()
    shards = Shards("test", tiny_folder.write(tmp_path, tensors=tensors))
    names = list(tensors)
    layers = [[n for n in names if n.startswith(f"model.layers.{i}.")] for i in range(3)]
    with folder_module.FolderTensors(shards, names, torch.device("cpu")) as lazy:
        assert lazy.own == set(names) - {name for layer in layers for name in layer}
        held = [lazy[layer[0]] for layer in layers]
        places = [each.untyped_storage().data_ptr() for each in held]
        assert places[0] == places[2] != places[1]
        assert torch.equal(held[1], tensors[layers[1][0]])
        for name in [*layers[0][1:], *layers[2][1:], *layers[1][1:]]:
            assert torch.equal(lazy[name], tensors[name]), name


def test_what_is_of_no_layer_stays_where_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_folder.write(tmp_path, tensors=tiny_folder.tensors_of(), files=2)
    read: dict[str, int] = {}
    load = Shards.load

    def noted(self: Shards, *rest: Any) -> dict[str, Tensor]:
        loaded = load(self, *rest)
        read.update({name: tensor.data_ptr() for name, tensor in loaded.items()})
        return loaded

    monkeypatch.setattr(Shards, "load", noted)
    engine = init_inference(tmp_path, dtype=torch.float32, device="cpu")
    found = weights_by_name(engine)
    kept = {name for name, tensor in found.items() if tensor.data_ptr() == read[name]}
    assert kept == {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    other = weights_by_name(init_inference(tmp_path, dtype=torch.bfloat16, device="cpu"))
    for name, tensor in tiny_folder.tensors_of().items():
        assert torch.equal(found[name], tensor)
        assert torch.equal(other[name], tensor.bfloat16())


def test_links_are_followed(tmp_path: Path) -> None:
    """So are the folders of Hugging Face's cache."""
    tiny_folder.write(tmp_path / "files")
    (tmp_path / "snapshot").mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.move(tmp_path / "files" / name, tmp_path / name[::-1])
        (tmp_path / "snapshot" / name).symlink_to(tmp_path / name[::-1])
    engine = init_inference(tmp_path / "snapshot", device="cpu")
    assert torch.equal(
        engine.decoder.weights.embedding, tiny_folder.tensors_of()["model.embed_tokens.weight"]
    )


@pytest.mark.parametrize(
    ("named", "stored", "expected"),
    [
        ({"dtype": "bfloat16"}, torch.float32, torch.bfloat16),
        ({"torch_dtype": "float16"}, torch.float32, torch.float16),
        ({}, torch.bfloat16, torch.bfloat16),
    ],
)
def test_the_dtype_is_what_the_folder_says(
    named: dict[str, str], stored: torch.dtype, expected: torch.dtype, tmp_path: Path
) -> None:
    config = {k: v for k, v in tiny_folder.CONFIG.items() if k != "dtype"} | named
    tiny_folder.write(tmp_path, config, tensors=tiny_folder.tensors_of(dtype=stored))
    assert init_inference(tmp_path).decoder.weights.embedding.dtype == expected


@pytest.mark.parametrize(
    ("of_config", "of_generation", "expected"),
    [(2, None, (2,)), (2, [5, 6], (5, 6)), (None, 7, (7,)), (None, None, ())],
)
def test_stop_tokens_are_those_of_the_folder(
    of_config: Any, of_generation: Any, expected: tuple[int, ...], tmp_path: Path
) -> None:
    tiny_folder.write(tmp_path, {**tiny_folder.CONFIG, "eos_token_id": of_config})
    if of_generation is not None:
        text = json.dumps({"eos_token_id": of_generation})
        (tmp_path / "generation_config.json").write_text(text)
    assert init_inference(tmp_path).stop_tokens == expected


@pytest.mark.parametrize(
    ("of_config", "of_generation", "of_tokenizer", "expected"),
    [
        (None, None, None, ()),
        (3, None, None, (3,)),
        (-1, 4, None, (4,)),
        (3, 4, "!", (4, 3, 1)),
        (None, None, {"content": "!", "lstrip": False}, (1,)),
        (None, None, "nowhere", ()),
        (0, 0, None, (0,)),
    ],
)
def test_pad_tokens_are_all_that_are_named(
    of_config: Any, of_generation: Any, of_tokenizer: Any, expected: Any, tmp_path: Path
) -> None:
    import tokenizers

    tiny_folder.write(tmp_path, {**tiny_folder.CONFIG, "pad_token_id": of_config})
    (tmp_path / "generation_config.json").write_text(json.dumps({"pad_token_id": of_generation}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"pad_token": of_tokenizer}))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "!": 1}, unk_token="a"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    engine = init_inference(tmp_path)
    rows = torch.tensor([[5, 6], [5, 6], [5, 6]])
    for pad in expected or (2,):  # the stop token, where there is no other
        rows[1, 1] = pad
        with pytest.raises(ValueError, match=f"^generate: prompt 1 ends with token {pad}, which"):
            engine.generate(rows)
    for token in {0, 1, 2, 3, 4} - set(expected or (2,)):
        rows[1, 1] = token
        assert len(engine.generate(rows, max_new_tokens=0)) == 3
    tokenizer.enable_padding(pad_id=7)
    given = init_inference(tmp_path, tokenizer=tokenizer)
    rows[1, 1] = 7
    with pytest.raises(ValueError, match=r"^generate: prompt 1 ends with token 7, which"):
        given.generate(rows)


@pytest.mark.parametrize(
    ("of_whole", "of_part", "expected"),
    [(None, [1, 50], (1, 50)), (3, [1, 50], (3,)), (None, None, ())],
)
def test_stop_tokens_of_a_part(
    of_whole: Any, of_part: Any, expected: tuple[int, ...], tmp_path: Path
) -> None:
    """Where only what describes the decoder says them."""
    model_of("gemma3-with-images").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["eos_token_id"], config["text_config"]["eos_token_id"] = of_whole, of_part
    file.write_text(json.dumps(config))
    assert init_inference(tmp_path).stop_tokens == expected


@pytest.mark.parametrize(
    ("case", "name", "table", "before"),
    [
        ("gpt2", "n_positions", "transformer.wpe", 0),
        ("opt", "max_position_embeddings", "model.decoder.embed_positions", 2),
    ],
)
def test_refuses_more_positions_than_there_are(
    case: str,
    name: str,
    table: str,
    before: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before a tensor is read; a model that is made for fewer than it has room for is one."""
    model_of(case).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    for said in (1024, 100):
        file.write_text(json.dumps(config | {name: said}))
        if said == 100:
            assert init_inference(tmp_path).max_tokens == 100
            with monkeypatch.context() as patch:
                patch.setattr(Shards, "load", None)
                with pytest.raises(ValueError, match="max_tokens is 101, expected at most 100, as"):
                    init_inference(tmp_path, max_tokens=101)
            continue
        with pytest.raises(ValueError) as error:
            init_inference(tmp_path)
        assert str(error.value) == (
            f"init_inference: {table}.weight has {256 + before} rows, expected {1024 + before} or"
            f" more, for 1024 positions from row {before} on, as config says"
        )


def test_the_bar_counts_bytes_and_needs_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tiny_folder.write(tmp_path)
    bars: list[Any] = []
    bar = folder_module.tqdm

    def noted(**options: Any) -> Any:
        bars.append(bar(**options | {"disable": False}))
        return bars[-1]

    init_inference(tmp_path, progress=True)
    assert capfd.readouterr() == ("", "")
    monkeypatch.setattr(folder_module, "tqdm", noted)
    init_inference(tmp_path, progress=True)
    nbytes = sum(tensor.nbytes for tensor in tiny_folder.tensors_of().values())
    assert bars[0].n == bars[0].total == nbytes


MEMORY = """
import re, sys
from pathlib import Path
from deepspeed_ext.inference.initialize import init_inference
from deepspeed_ext.inference.weights.quantize_on_load import bytes_of

def memory(name):
    return int(re.search(name + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

small, large = sys.argv[1:]
init_inference(small, quantize="int8", device="cpu")  # libraries, and memory that threads keep
before = memory("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
engine = init_inference(large, quantize="int8", max_batch=1, max_tokens=64, device="cpu")
print(memory("VmHWM") - before, bytes_of(engine.decoder.weights))
"""


def test_two_layers_lie_about_at_most(tmp_path: Path) -> None:
    sizes = dict(hidden_size=512, intermediate_size=1024, num_hidden_layers=24)
    config = {**tiny_folder.CONFIG, **sizes}
    tensors = tiny_folder.tensors_of(config)
    tiny_folder.write(tmp_path / "large", config, tensors=tensors)
    tiny_folder.write(tmp_path / "small")
    # Whatever is not small goes back when it is freed: the peak is what was alive at once.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", MEMORY, tmp_path / "small", tmp_path / "large"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    peak, result = map(int, done.stdout.split())
    # Two layers of 24 lie about, floats of the matrix that is quantized, and as many again.
    assert peak < result + 4 * sum(t.nbytes for t in tensors.values()) / 24

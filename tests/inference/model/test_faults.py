"""Folders and modules that are not what they should be: one sentence for each, before reading."""

import ast
import json
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_folder
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from deepspeed_ext.inference.execution import memory_budget as room
from deepspeed_ext.inference.initialize import init_inference
from deepspeed_ext.io.checkpoint.shards import Shards
from deepspeed_ext.moe.sending import Gate

FIRST = "model-00001-of-00003.safetensors"


@pytest.fixture(autouse=True)
def unread(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note the names of tensors that are read."""
    names: list[str] = []
    load = Shards.load

    def noted(self: Shards, some: Any, *rest: Any) -> Any:
        names.extend(some)
        return load(self, some, *rest)

    monkeypatch.setattr(Shards, "load", noted)
    return names


def change_index(folder: Path, change: Callable[[dict[str, str]], Any]) -> None:
    named = tiny_folder.read_index(folder)
    change(named)
    tiny_folder.write_index(folder, named)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)  # at once: a reader may be at work


def twice(folder: Path) -> None:
    """Let two files have a tensor, which the index says of one."""
    tensors = tiny_folder.tensors_of()
    part = {name: tensors[name] for name in list(tensors)[1::3]}
    part["lm_head.weight"] = tensors["lm_head.weight"]
    tiny_folder.save(part, folder / "model-00002-of-00003.safetensors")


SHARDED = {  # what is done to a folder with an index, and what is said then
    "a file is missing": (
        lambda folder: (folder / FIRST).unlink(),
        FileNotFoundError,
        rf"index.json names the file '{FIRST}', expected it beside the index; fetch the folder",
    ),
    "a file is cut short": (
        lambda folder: cut(folder / FIRST),
        ValueError,
        rf"{FIRST} has \d+ bytes, expected \d+ by its header: it was cut short$",
    ),
    "the index names a file that has no such tensor": (
        lambda folder: change_index(folder, lambda named: named.update({"lm_head.weight": FIRST})),
        ValueError,
        rf"says that {FIRST} has the tensor 'lm_head.weight', expected a file that has it",
    ),
    "the index leaves a tensor out": (
        lambda folder: change_index(folder, lambda named: named.pop("lm_head.weight")),
        ValueError,
        r"index.json does not name 'lm_head.weight', expected all tensors of model-0000\d",
    ),
    "a tensor is in two files": (
        twice,
        ValueError,
        r"has the tensor 'lm_head.weight', expected it in model-0000\d-of-00003.safetensors only",
    ),
    "a file of another folder": (
        lambda folder: change_index(folder, lambda n: n.update(a="../x.safetensors")),
        ValueError,
        r"has the weight_map .*, expected names of files in the same folder",
    ),
    "an absolute path": (
        lambda folder: change_index(folder, lambda n: n.update(a="/etc/passwd")),
        ValueError,
        "expected names of files in the same folder",
    ),
    "the folder above": (
        lambda folder: change_index(folder, lambda n: n.update(a="..")),
        ValueError,
        "expected names of files in the same folder",
    ),
    "no map": (
        lambda folder: tiny_folder.write_index(folder, ["model.safetensors"]),
        ValueError,
        r"has the weight_map \['model.safetensors'\], expected names of files",
    ),
    "an index that is no JSON": (
        lambda folder: (folder / "model.safetensors.index.json").write_text("{"),
        ValueError,
        "index.json is not JSON: ",
    ),
    "a name twice": (
        lambda folder: (folder / "model.safetensors.index.json").write_text(
            '{"weight_map": {"a": "b", "a": "c"}}'
        ),
        ValueError,
        "index.json is not JSON: the name 'a' stands twice",
    ),
}


@pytest.mark.parametrize("what", SHARDED)
def test_refuses_files(what: str, unread: list[str], tmp_path: Path) -> None:
    change, error, text = SHARDED[what]
    tiny_folder.write(tmp_path, files=3)
    change(tmp_path)
    with pytest.raises(error, match=text):
        init_inference(tmp_path)
    assert not unread


def changed(**config: Any) -> Callable[[Path], Any]:
    return lambda folder: (folder / "config.json").write_text(
        json.dumps({**tiny_folder.CONFIG, **config})
    )


def with_tensors(**some: torch.Tensor | None) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        tensors = tiny_folder.tensors_of() | {n.replace("__", "."): t for n, t in some.items()}
        kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        tiny_folder.write(folder, tensors=kept)

    return change


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


UNFIT = {
    "no configuration": (
        lambda folder: (folder / "config.json").unlink(),
        FileNotFoundError,
        r"has no config.json, expected the folder of a model, as save_pretrained writes it",
    ),
    "an adapter beside the weights": (
        lambda folder: (folder / "adapter_config.json").write_text("{}"),
        ValueError,
        r"has adapter_config.json, expected a model without an adapter beside it; give the folder",
    ),
    "no JSON": (
        lambda folder: (folder / "config.json").write_text("<html>"),
        ValueError,
        r"config.json is not JSON: ",
    ),
    "no object": (
        lambda folder: (folder / "config.json").write_text("[1]"),
        ValueError,
        r"config.json has \[1\], expected an object",
    ),
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        FileNotFoundError,
        r"has no weights, expected model.safetensors, or model.safetensors.index.json and the",
    ),
    "pickled weights": (
        pickled,
        ValueError,
        r"has its weights as pytorch_model.bin, expected model.safetensors, .*; pickled files can"
        r" run anything, so convert them where you trust them: save_pretrained",
    ),
    "another family": (
        changed(model_type="t5"),
        ValueError,
        r"model_type is 't5', expected one of .*llama.*; give a table of your own as policy",
    ),
    "a vocabulary of another size": (
        changed(vocab_size=98),
        ValueError,
        r"model.embed_tokens.weight has shape \[97, 64\], expected \[98, 64\]",
    ),
    "more layers than there are": (
        changed(num_hidden_layers=4),
        ValueError,
        r"has no tensor 'model.layers.3.*', expected it for model_type 'llama'",
    ),
    "more layers than any model has": (
        changed(num_hidden_layers=2_000_000_000),
        ValueError,
        "num_hidden_layers is 2000000000, expected 1 to 10000",
    ),
    "fewer layers than there are": (
        changed(num_hidden_layers=2),
        ValueError,
        r"model has 'model.layers.2.*', expected no tensor of this name",
    ),
    "whole numbers": (
        with_tensors(model__norm__weight=torch.ones(64, dtype=torch.int8)),
        ValueError,
        r"model.norm.weight has dtype I8, expected float32, bfloat16, float16 or float64",
    ),
    "8-bit floats without scales": (
        with_tensors(model__norm__weight=torch.ones(64).to(torch.float8_e4m3fn)),
        ValueError,
        r"model.norm.weight has dtype F8_E4M3, expected float32",
    ),
    "quantized weights": (
        changed(quantization_config={"quant_method": "bitsandbytes"}),
        ValueError,
        r"has weights quantized by 'bitsandbytes', expected floats, 4 .* quantize='int4' or 'int8'",
    ),
    "an unknown dtype": (
        changed(dtype="float8_e4m3fn"),
        ValueError,
        r"dtype is 'float8_e4m3fn', expected float32, bfloat16 or float16; for fewer bits there is",
    ),
    "a stop token that is none": (
        changed(eos_token_id="</s>"),
        ValueError,
        r"eos_token_id is '</s>', expected whole numbers",
    ),
}


@pytest.mark.parametrize("what", UNFIT)
def test_refuses_folders(what: str, unread: list[str], tmp_path: Path) -> None:
    change, error, text = UNFIT[what]
    tiny_folder.write(tmp_path)
    change(tmp_path)
    with pytest.raises(error, match=rf"^init_inference: .*{text}"):
        init_inference(tmp_path)
    assert not unread


def test_refuses_what_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"model is 'a/name', expected a module, or a folder with config"
    ):
        init_inference("a/name")
    with pytest.raises(TypeError, match="model is dict, expected a module or the path of a folder"):
        init_inference({})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="model has the config NoneType, expected one of Hugging"):
        init_inference(nn.Linear(2, 2))
    model = nn.Linear(2, 2, device="meta")
    model.config = tiny_folder.CONFIG  # type: ignore[assignment]
    with pytest.raises(ValueError, match="weight is on meta, expected values; give the folder"):
        init_inference(model)


def test_refuses_a_state_dict_with_other_things_than_tensors() -> None:
    """As those of layers that torch's own quantization has made."""
    from transformers import LlamaConfig, LlamaForCausalLM

    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"scale": 2.0}

    sizes = {k: v for k, v in tiny_folder.CONFIG.items() if k not in ("model_type", "dtype")}
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    model.lm_head = Extra(64, 97)
    with pytest.raises(TypeError, match=r"head\._extra_state is dict, expected a tensor; give"):
        init_inference(model)


def _doubled(*parts: Any) -> Any:
    return 2 * parts[-1]


class _OtherGate(Gate):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


class _Louder(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


CHANGES: dict[str, Callable[[nn.Linear], object]] = {
    "forward hooks": lambda layer: layer.register_forward_hook(_doubled),
    "forward hooks, expected": lambda layer: layer.register_forward_pre_hook(_doubled),
    "a forward of its own": lambda layer: setattr(layer, "forward", _doubled),
    "a forward of its own, of _Louder": lambda layer: setattr(layer, "__class__", _Louder),
}


def test_a_router_of_ours_is_read_and_another_is_not() -> None:
    model = nn.Sequential(Gate(32, 4))
    model.config = tiny_folder.CONFIG  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"^init_inference: model has no tensor"):
        init_inference(model)
    model[0].__class__ = _OtherGate
    with pytest.raises(ValueError, match=r"^init_inference: 0 has a forward of its own, of _Other"):
        init_inference(model)


@pytest.mark.parametrize("lost", CHANGES)
def test_refuses_code_that_would_not_run(lost: str) -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    model.config = tiny_folder.CONFIG  # type: ignore[assignment]
    CHANGES[lost](model[0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"^init_inference: 0 has {lost}.* calls no module"):
        init_inference(model)


@pytest.mark.parametrize(
    "register",
    [
        nn.modules.module.register_module_forward_hook,
        nn.modules.module.register_module_forward_pre_hook,
    ],
)
def test_refuses_hooks_of_all_modules(register: Callable[[Any], Any]) -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    model.config = tiny_folder.CONFIG  # type: ignore[assignment]
    handle = register(_doubled)
    try:
        with pytest.raises(ValueError, match="torch has forward hooks for all modules"):
            init_inference(model)
    finally:
        handle.remove()


def test_refuses_an_average_of_models() -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    model.config = tiny_folder.CONFIG  # type: ignore[assignment]
    told = "AveragedModel, expected the module inside of it; give model.module"
    with pytest.raises(TypeError, match=f"^init_inference: model is {told}$"):
        init_inference(AveragedModel(model))


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "torch.compile": torch.compile,
    "DataParallel": nn.DataParallel,
    "both": lambda model: torch.compile(nn.DataParallel(model)),
    "the other way round": lambda model: nn.DataParallel(torch.compile(model)),
}


@pytest.mark.parametrize("kind", WRAPPERS)
def test_looks_through_what_stands_around_a_model(kind: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_folder.write(tmp_path / "model"))
    wrapped = WRAPPERS[kind](model)
    expected = init_inference(model).generate([5, 6], max_new_tokens=4)[0].tokens
    assert init_inference(wrapped).generate([5, 6], max_new_tokens=4)[0].tokens == expected
    wrapped.register_forward_hook(_doubled)
    with pytest.raises(ValueError, match=f"^init_inference: {type(wrapped).__name__} has forward"):
        init_inference(wrapped)


def test_looks_through_distributed_data_parallel(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_folder.write(tmp_path / "model"))
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        found = init_inference(nn.parallel.DistributedDataParallel(model))
    finally:
        torch.distributed.destroy_process_group()
    expected = init_inference(model).generate([5, 6], max_new_tokens=4)
    assert found.generate([5, 6], max_new_tokens=4)[0].tokens == expected[0].tokens


@pytest.mark.parametrize(
    ("device", "there"),
    [
        ("mps", "cpu or cuda$"),
        ("cpu:3", "cpu$"),
        ("cuda:99", "(cpu, as torch finds no GPU|cuda:0 to cuda:[0-9]+)$"),
    ],
)
def test_refuses_devices(device: str, there: str, tmp_path: Path) -> None:
    tiny_folder.write(tmp_path)
    with pytest.raises(ValueError, match=rf"^init_inference: device is {device}, expected {there}"):
        init_inference(tmp_path, device=device)


def test_a_file_that_is_cut_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread and the engine that read are gone, and the whole folder loads again."""
    init_inference(tiny_folder.write(tmp_path, files=3))  # libraries are loaded then
    whole, before = (tmp_path / FIRST).read_bytes(), descriptors()
    load = Shards.load

    def then_cut(self: Shards, names: Any, *rest: Any) -> Any:
        loaded = load(self, names, *rest)
        cut(tmp_path / FIRST)
        return loaded

    with monkeypatch.context() as patch:
        patch.setattr(Shards, "load", then_cut)
        # Whoever opens it next finds that, or who reads it already.
        with pytest.raises((ValueError, OSError), match=r"it was cut short|the file ends at"):
            init_inference(tmp_path)
    assert descriptors() == before
    assert not [thread for thread in threading.enumerate() if "folder" in thread.name]
    (tmp_path / FIRST).write_bytes(whole)
    init_inference(tmp_path)


def descriptors() -> int:
    """Count the files that this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize(
    ("mib", "options", "fits"),
    [
        (200, {}, r"quantize=None with max_batch=8 and max_tokens=\d+$"),
        (350, {"max_tokens": 2048}, r"quantize=None with .* or quantize='int8'$"),
        (76, {}, r"quantize='int4' with max_batch=\d and max_tokens=64$"),
        (85, {"max_batch": 1, "max_tokens": 64}, r"quantize='int8'$"),
    ],
)
def test_says_what_has_room(
    mib: int,
    options: dict[str, Any],
    fits: str,
    unread: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before anything is read; and what it says is true; much more has no room."""
    sizes = dict(hidden_size=512, intermediate_size=1536, num_hidden_layers=8, vocab_size=17)
    config = {**tiny_folder.CONFIG, **sizes, "max_position_embeddings": 4096}
    tiny_folder.write(tmp_path, config)
    monkeypatch.setattr(room, "free_bytes", lambda device: mib << 20)
    text = (
        r"init_inference: cpu has \S+ \SiB free, expected \S+ \SiB: \S+ \SiB of weights, \S+ \SiB"
    )
    with pytest.raises(
        MemoryError, match=rf"^{text} of keys and values for max_batch .*{fits}"
    ) as e:
        init_inference(tmp_path, device="cpu", **options)
    assert not unread
    found = re.findall(
        r"quantize=(\S+)(?: with max_batch=(\d+) and max_tokens=(\d+))?", str(e.value)
    )
    for kind, *numbers in found:
        batch, tokens = (int(n) if n else None for n in numbers)
        advised = {"max_batch": batch, "max_tokens": tokens, "quantize": ast.literal_eval(kind)}
        given = options | {name: value for name, value in advised.items() if value}
        init_inference(tmp_path, device="cpu", **given)
        if tokens:
            with pytest.raises(MemoryError):
                init_inference(tmp_path, device="cpu", **given | {"max_tokens": 2 * tokens + 1024})


def test_says_that_nothing_has_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "free_bytes", lambda device: 1000)
    with pytest.raises(MemoryError, match=r"; nothing fits, not even quantize='int4'$"):
        init_inference(tiny_folder.write(tmp_path))


def test_what_has_no_room_is_told_without_it(tmp_path: Path) -> None:
    """A table of the pages of this cache would take 10 GB by itself."""
    with pytest.raises(MemoryError, match=r"12289.00 GiB of keys and values for max_batch 8 x"):
        init_inference(tiny_folder.write(tmp_path), max_tokens=2**31 - 1)

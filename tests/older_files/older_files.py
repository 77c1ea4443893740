"""What the kept files hold, and how they go on: the same with the code of then and of today.

The files beside this one were written by the code before its rooms were made (git af70c71), as

    python tests/older_files/older_files.py FOLDER

does, and beside each is what it was a step later. They stay as they are: whoever changes a format
adds files. All numbers are made of integers, and gradients are given, so that nothing but our own
ops, which have the same bits on every machine, has a part in them.
"""

import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed_ext import io, zero
from deepspeed_ext.offload import OffloadOptimizer
from deepspeed_ext.optim import DeepSpeedCPUAdam
from deepspeed_ext.quantization import load_quantized, quantize_model, save_quantized

Tensors = dict[str, Tensor]
SHAPES = ((3, 5), (300,), ())
OPTIONS: dict[str, Any] = {"lr": 0.0625, "weight_decay": 0.25, "adamw_mode": True}
FORMATS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {  # dtype of weights, options
    "float32": (torch.float32, {}),
    "rounded_at_random": (torch.bfloat16, {"state_dtype": torch.bfloat16, "seed": 3}),
    "8_bit": (torch.float32, {"state_dtype": torch.uint8, "seed": 3}),
    "float32_master": (torch.bfloat16, {"master_weights": True}),
    "split_master": (torch.bfloat16, {"master": "remainder", "state_dtype": torch.uint8}),
}
BITS = ("int8", "int4", "nf4", "fp8_e4m3")


def numbers(shape: tuple[int, ...], seed: int) -> Tensor:
    """Return numbers between -1 and 1."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 7919 + seed * 104729) % 1009 - 504).view(shape) / 512


def bare_params(dtype: torch.dtype) -> list[nn.Parameter]:
    return [nn.Parameter(numbers(shape, i).to(dtype)) for i, shape in enumerate(SHAPES)]


def step(optimizer: torch.optim.Optimizer, number: int) -> None:
    """Take a step with gradients that depend on its number alone."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for i, param in enumerate(params):
        grad = numbers(tuple(param.shape), 100 * number + i).to(param.dtype)
        if isinstance(param, dist.tensor.DTensor):
            grad = dist.tensor.DTensor.from_local(grad, param.device_mesh, param.placements)
        param.grad = grad
    optimizer.step()


def contents(optimizer: torch.optim.Optimizer) -> Tensors:
    """Return weights and state, whole, by names of this file's own."""
    found: Tensors = {}
    for i, param in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        for key, value in {"weight": param.detach(), **optimizer.state[param]}.items():
            whole = value.full_tensor() if isinstance(value, dist.tensor.DTensor) else value
            found[f"{i}.{key}"] = whole.cpu().clone()
    return found


# Each kind: a function that writes into a folder, and one that loads and returns what is there and
# what is there a step later.


def write_state(folder: Path, name: str) -> None:
    dtype, options = FORMATS[name]
    params = bare_params(dtype)
    optimizer = DeepSpeedCPUAdam(params, **OPTIONS, **options)
    for number in range(3):
        step(optimizer, number)
    saved = {"params": [p.detach() for p in params], "optimizer": optimizer.state_dict()}
    torch.save(saved, folder / f"{name}.pt")


def load_state(folder: Path, name: str) -> tuple[Tensors, Tensors]:
    options = FORMATS[name][1]
    saved = torch.load(folder / f"{name}.pt", weights_only=True)
    params = [nn.Parameter(param) for param in saved["params"]]
    optimizer = DeepSpeedCPUAdam(params, **OPTIONS, **options)
    optimizer.load_state_dict(saved["optimizer"])
    return gone_on(optimizer)


def gone_on(optimizer: torch.optim.Optimizer) -> tuple[Tensors, Tensors]:
    before = contents(optimizer)
    step(optimizer, 3)
    return before, contents(optimizer)


def write_pickle(folder: Path, name: str) -> None:
    dtype, options = FORMATS["split_master" if name == "optimizer" else "float32_master"]
    params = bare_params(dtype)
    made = DeepSpeedCPUAdam if name == "optimizer" else OffloadOptimizer
    optimizer = made(params, **OPTIONS, **options)
    for number in range(3):
        step(optimizer, number)
    (folder / f"{name}.pickle").write_bytes(pickle.dumps(optimizer))


def load_pickle(folder: Path, name: str) -> tuple[Tensors, Tensors]:
    return gone_on(pickle.loads((folder / f"{name}.pickle").read_bytes()))


def named() -> Tensors:
    """Return tensors of several dtypes, an empty one, and one with a name for file systems."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)
    made = {f"of/{dtype}": (numbers((5, 3), 7) * 100).to(dtype) for dtype in dtypes}
    return {**made, "empty": torch.empty(0, 4), "ü ..": torch.ones(())}


def write_store(folder: Path, name: str) -> None:
    with io.TensorStore(folder / name, durable=True) as store:
        for key, tensor in named().items():
            store.put(key, tensor)
        store.commit()


def load_store(folder: Path, name: str) -> tuple[Tensors, Tensors]:
    with io.TensorStore(folder / name, durable=True) as store:
        before = {key: store.get(key) for key in store}
        store.put("empty", torch.ones(2))
        store.commit()
    with io.TensorStore(folder / name, durable=True, read_only=True) as store:
        return before, {key: store.get(key) for key in store}


def write_checkpoint(folder: Path, name: str) -> None:
    tensors = named()
    tensors["tied"] = tensors["of/torch.float32"]
    io.save(tensors, folder / f"{name}.safetensors", metadata={"step": "3"})


def load_checkpoint(folder: Path, name: str) -> tuple[Tensors, Tensors]:
    before = io.load(folder / f"{name}.safetensors")
    assert before["tied"] is before["of/torch.float32"]
    assert io.inspect(folder / f"{name}.safetensors").metadata["step"] == "3"
    return before, {}


@contextmanager
def one_process() -> Iterator[None]:
    """Be a process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def training() -> tuple[nn.Module, DeepSpeedCPUAdam]:
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2)).to(torch.bfloat16)
    with torch.no_grad():
        for i, param in enumerate(model.parameters()):
            param.copy_(numbers(tuple(param.shape), i))
    zero.shard(model, 3)
    options = FORMATS["split_master"][1]
    return model, DeepSpeedCPUAdam(model.parameters(), **OPTIONS, **options)


def write_zero(folder: Path, name: str) -> None:
    with one_process():
        model, optimizer = training()
        for number in range(3):
            step(optimizer, number)
        note = ("text", {1: torch.ones(2)})
        zero.save(folder / name, "three", model, optimizer, step=3, note=note)


def load_zero(folder: Path, name: str) -> tuple[Tensors, Tensors]:
    with one_process():
        model, optimizer = training()
        rest = zero.load(folder / name, None, model, optimizer)
        before, after = gone_on(optimizer)
    assert rest["step"] == 3 and rest["note"][0] == "text"
    return before | {"note": rest["note"][1][1]}, after


def bare_model() -> nn.Module:
    model = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 3))
    with torch.no_grad():
        for i, param in enumerate(model.parameters()):
            param.copy_(numbers(tuple(param.shape), i))
    return model


def write_quantized(folder: Path, name: str) -> None:
    model = bare_model()
    quantize_model(model, name, group_size=16, skip=())
    save_quantized(model, folder / f"{name}.safetensors")
    torch.save(model, folder / f"{name}.pt")


def load_quantized_model(folder: Path, name: str) -> tuple[Tensors, Tensors]:
    model = load_quantized(bare_model, folder / f"{name}.safetensors")
    pickled = torch.load(folder / f"{name}.pt", weights_only=False)
    state, floats = model.state_dict(), weights(model)
    assert_same(pickled.state_dict(), state)
    assert_same(weights(pickled), floats)
    return state, floats


def weights(model: nn.Module) -> Tensors:
    """Return the weights of a quantized model as floats."""
    return {name: layer.weight.clone() for name, layer in model.named_children()}


def assert_same(got: Tensors, want: Tensors) -> None:
    """Compare names, dtypes, shapes and bits."""
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(got[name]) == bits(tensor), name


def bits(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor in the order of its indices."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


Write = Callable[[Path, str], None]
Load = Callable[[Path, str], tuple[Tensors, Tensors]]
KINDS: dict[str, tuple[Write, Load, tuple[str, ...]]] = {  # the names of what there is of each
    "states": (write_state, load_state, tuple(FORMATS)),
    "pickles": (write_pickle, load_pickle, ("optimizer", "offloaded")),
    "stores": (write_store, load_store, ("store",)),
    "checkpoints": (write_checkpoint, load_checkpoint, ("checkpoint",)),
    "zero": (write_zero, load_zero, ("training",)),
    "quantized": (write_quantized, load_quantized_model, BITS),
}


def main(folder: Path) -> None:
    """Write all, and beside each what it holds and what it holds a step later."""
    import shutil
    import tempfile

    for kind, (write, load, names) in KINDS.items():
        (folder / kind).mkdir(parents=True)
        for name in names:
            write(folder / kind, name)
            with tempfile.TemporaryDirectory() as copy:  # to go on changes some
                shutil.copytree(folder / kind, copy, dirs_exist_ok=True)
                before, after = load(Path(copy), name)
            torch.save({"before": before, "after": after}, folder / kind / f"{name}.expected.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

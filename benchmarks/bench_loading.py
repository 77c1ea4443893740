"""Loading a model from its folder: `python -m benchmarks.bench_loading --folder DIR --model "8 B"`.

Makes a folder with the shapes of a real model and random weights, in files of 4 GiB at most, and
loads it by turns: as an engine, in bfloat16 and quantized; by the package safetensors; by
transformers. Each begins with no page of the files in memory. The ceilings are the disk, which is
read into memory that is there already, and the link to a GPU, by which as many bytes are copied
from pinned memory; an engine can be as fast as the slower of both. Files that stay in memory are
read from there, with --cached. With --gptq the folder has weights of 4 bits in groups of 128, as
GPTQ packs them.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.bench_generate import MODELS
from deepspeed_ext.inference import init_inference
from deepspeed_ext.io import AsyncIO, save

_FILE_BYTES = 4 << 30
_PIECE_BYTES = 32 << 20
_DEPTH = 8
_GROUP = 128  # of GPTQ


@dataclass(frozen=True)
class Kind:
    """How weights are stored.

    Args:
        gptq: whether as GPTQ packs them, and other tensors in float16; else in bfloat16.
        act_order: whether the groups of columns are mixed.
    """

    gptq: bool = False
    act_order: bool = False

    def config(self) -> dict[str, object]:
        """Return what config.json says of it."""
        if not self.gptq:
            return {"dtype": "bfloat16"}
        packing = {"quant_method": "gptq", "bits": 4, "group_size": _GROUP, "sym": False}
        return {"dtype": "float16", "quantization_config": packing | {"desc_act": self.act_order}}

    def stored(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Size]:
        """Return the shape of each tensor of a file, of weights with these."""
        found = {}
        for name, shape in shapes.items():
            if not self.gptq or not name.endswith("_proj.weight"):
                found[name] = torch.Size(shape)
                continue
            (n, length), layer = shape, name.removesuffix(".weight")
            groups = -(-length // _GROUP)
            found[f"{layer}.qweight"] = torch.Size((length // 8, n))
            found[f"{layer}.qzeros"] = torch.Size((groups, n // 8))
            found[f"{layer}.scales"] = torch.Size((groups, n))
            found[f"{layer}.g_idx"] = torch.Size((length,))
        return found

    def dtype(self, name: str) -> torch.dtype:
        if name.endswith((".qweight", ".qzeros", ".g_idx")):
            return torch.int32
        return torch.float16 if self.gptq else torch.bfloat16


class Values:
    """Makes tensors of random values, by repeating some."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._floats = (torch.randn(1 << 22) * 0.02).to(kind.dtype(""))
        self._words = torch.randint(-(2**31), 2**31, (1 << 22,)).int()

    def __call__(self, name: str, shape: torch.Size) -> Tensor:
        """Return the values of a tensor."""
        if name.endswith(".g_idx"):
            groups = torch.arange(shape[0], dtype=torch.int32) // _GROUP
            order = torch.Generator().manual_seed(shape[0])  # one for layers that are merged
            mixed = groups[torch.randperm(shape[0], generator=order)]
            return mixed if self._kind.act_order else groups
        tile = self._words if self._kind.dtype(name) == torch.int32 else self._floats
        count = shape.numel()
        return tile.repeat(-(-count // tile.numel()))[:count].view(shape)


def config_of(model: str, kind: Kind) -> dict[str, object]:
    hidden, layers, heads, kv, wide, vocabulary, tied = MODELS[model]
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": wide,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        **kind.config(),
    }


def shapes_of(model: str) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor, by its name."""
    hidden, layers, heads, kv, wide, vocabulary, tied = MODELS[model]
    of_kv = hidden // heads * kv
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for i in range(layers):
        at = f"model.layers.{i}."
        shapes |= {f"{at}self_attn.{p}_proj.weight": (hidden, hidden) for p in "qo"}
        shapes |= {f"{at}self_attn.{p}_proj.weight": (of_kv, hidden) for p in "kv"}
        shapes |= {f"{at}mlp.{p}_proj.weight": (wide, hidden) for p in ("gate", "up")}
        shapes[f"{at}mlp.down_proj.weight"] = (hidden, wide)
        shapes |= {f"{at}{p}_layernorm.weight": (hidden,) for p in ("input", "post_attention")}
    shapes["model.norm.weight"] = (hidden,)
    return shapes if tied else shapes | {"lm_head.weight": (vocabulary, hidden)}


def write(folder: Path, model: str, kind: Kind) -> int:
    """Write the folder, if it is not there; return the bytes of its tensors."""
    shapes = kind.stored(shapes_of(model))
    nbytes = {name: shape.numel() * kind.dtype(name).itemsize for name, shape in shapes.items()}
    parts: list[list[str]] = [[]]
    for name in shapes:
        if sum(nbytes[each] for each in parts[-1]) > _FILE_BYTES:
            parts.append([])
        parts[-1].append(name)
    config = config_of(model, kind)
    there = folder / "config.json"
    if there.exists() and json.loads(there.read_text()) != config:
        raise SystemExit(f"{folder} has another model, expected {model} of this kind, or nothing")
    if not there.exists():
        folder.mkdir(parents=True, exist_ok=True)
        weight_map, values = {}, Values(kind)
        for number, part in enumerate(tqdm(parts, desc="writing", disable=None)):
            file = f"model-{number + 1:05}-of-{len(parts):05}.safetensors"
            tensors = {name: values(name, shapes[name]) for name in part}
            save(tensors, folder / file, metadata={"format": "pt"}, durable=False)
            weight_map |= dict.fromkeys(part, file)
        index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        there.write_text(json.dumps(config))
    return sum(nbytes.values())


def forget(folder: Path) -> None:
    """Give the pages of the files back, so that they are read from the disk."""
    for file in folder.glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read_all(folder: Path) -> None:
    """Read the files into the same memory again and again."""
    memory = [torch.zeros(_PIECE_BYTES, dtype=torch.uint8) for _ in range(_DEPTH)]
    with AsyncIO(threads=2) as engine:
        waiting: list[object] = []
        pieces = (
            (file, offset, min(_PIECE_BYTES, file.stat().st_size - offset))
            for file in sorted(folder.glob("*.safetensors"))
            for offset in range(0, file.stat().st_size, _PIECE_BYTES)
        )
        for number, (file, offset, nbytes) in enumerate(pieces):
            if len(waiting) == _DEPTH:
                waiting.pop(0).result()  # type: ignore[attr-defined]
            waiting.append(engine.read(memory[number % _DEPTH][:nbytes], file, offset))
        for each in waiting:
            each.result()  # type: ignore[attr-defined]


def copy_all(nbytes: int) -> None:
    """Copy as many bytes to the GPU."""
    source = torch.zeros(_PIECE_BYTES, dtype=torch.uint8).pin_memory()
    target = torch.empty_like(source, device="cuda")
    for _ in range(nbytes // _PIECE_BYTES):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()


def ways(
    folder: Path, nbytes: int, device: str, kind: Kind
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield what is timed, by name, the ceilings first."""

    def engine(**options: str) -> Callable[[], object]:
        return lambda: init_inference(folder, device=device, max_batch=1, max_tokens=64, **options)

    def by_safetensors() -> object:
        from safetensors.torch import load_file

        return [load_file(file, device=device) for file in sorted(folder.glob("*.safetensors"))]

    def by_transformers() -> object:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device)

    yield "reading", lambda: read_all(folder)
    if device == "cuda":
        yield "link", lambda: copy_all(nbytes)
    yield "deepspeed_ext", engine()
    if kind.gptq:  # transformers needs another package for it
        yield "safetensors", by_safetensors
        return
    yield "deepspeed_ext int8", engine(quantize="int8")
    yield "deepspeed_ext int4", engine(quantize="int4")
    yield "safetensors", by_safetensors
    yield "transformers", by_transformers


def seconds_of(run: Callable[[], object], folder: Path, device: str, cached: bool = False) -> float:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    if not cached:
        forget(folder)
    begin = time.perf_counter()
    kept = run()
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    del kept
    return seconds


def table(nbytes: int, seconds: Mapping[str, list[float]]) -> Iterator[str]:
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    limit = max(medians.get(name, 0.0) for name in ("reading", "link"))
    yield f"{'':24}{'seconds':>9}{'GB/s':>8}{'of the limit':>14}"
    for name, median in medians.items():
        yield f"{name:24}{median:>9.2f}{nbytes / median / 1e9:>8.2f}{median / limit:>13.2f}x"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--folder", type=Path, required=True, help="where it is, or is to be")
    parser.add_argument("--model", choices=tuple(MODELS), default="0.5 B")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", help="names of what is timed; default: all")
    parser.add_argument("--gptq", action="store_true", help="weights of 4 bits, packed by GPTQ")
    parser.add_argument("--act-order", action="store_true", help="with mixed groups of columns")
    parser.add_argument("--cached", action="store_true", help="files stay in memory")
    options = parser.parse_args()
    if options.act_order and not options.gptq:
        parser.error("--act-order needs --gptq")
    kind = Kind(options.gptq, options.act_order)
    nbytes = write(options.folder, options.model, kind)
    some = [
        (name, run)
        for name, run in ways(options.folder, nbytes, options.device, kind)
        if not options.only or name in options.only
    ]
    if options.cached:
        read_all(options.folder)
    seconds: dict[str, list[float]] = {name: [] for name, _ in some}
    for _ in tqdm(range(options.rounds), desc="rounds", disable=None):
        for name, run in some:
            seconds[name].append(seconds_of(run, options.folder, options.device, options.cached))
    what = " GPTQ" * options.gptq + " act-order" * options.act_order + " cached" * options.cached
    print(
        f"{options.model}{what}, {nbytes / 1e9:.2f} GB, {options.device}, torch {torch.__version__}"
    )
    print("\n".join(table(nbytes, seconds)))


if __name__ == "__main__":
    sys.exit(main())

"""Loading a model from its folder: `python -m benchmarks.bench_loading --folder DIR --model "8 B"`.

Makes a folder with the shapes of a real model and random weights, in files of 4 GiB at most, and
loads it by turns: as an engine, in bfloat16 and quantized; by the package safetensors; by
transformers. Each begins with no page of the files in memory. The ceilings are the disk, which is
read into memory that is there already, and the link to a GPU, by which as many bytes are copied
from pinned memory; an engine can be as fast as the slower of both.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
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


def config_of(model: str) -> dict[str, object]:
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
        "dtype": "bfloat16",
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


def write(folder: Path, model: str) -> int:
    """Write the folder, if it is not there; return the bytes of its tensors."""
    shapes, tile = shapes_of(model), (torch.randn(1 << 22) * 0.02).bfloat16()

    def values(shape: tuple[int, ...]) -> Tensor:
        count = torch.Size(shape).numel()
        return tile.repeat(-(-count // tile.numel()))[:count].view(shape)

    parts: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in shapes.items():
        if sum(2 * torch.Size(s).numel() for s in parts[-1].values()) > _FILE_BYTES:
            parts.append({})
        parts[-1][name] = shape
    if not (folder / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        weight_map = {}
        for number, part in enumerate(tqdm(parts, desc="writing", disable=None)):
            file = f"model-{number + 1:05}-of-{len(parts):05}.safetensors"
            tensors = {name: values(shape) for name, shape in part.items()}
            save(tensors, folder / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(part, file)
        index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        (folder / "config.json").write_text(json.dumps(config_of(model)))
    return sum(2 * torch.Size(shape).numel() for shape in shapes.values())


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


def ways(folder: Path, nbytes: int, device: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield what is timed, by name, the ceilings first."""

    def engine(**options: str) -> Callable[[], object]:
        return lambda: init_inference(folder, device=device, max_batch=1, max_tokens=64, **options)

    def by_safetensors() -> object:
        from safetensors.torch import load_file

        return [load_file(file, device=device) for file in sorted(folder.glob("*.safetensors"))]

    def by_transformers() -> object:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device)

    yield "disk", lambda: read_all(folder)
    if device == "cuda":
        yield "link", lambda: copy_all(nbytes)
    yield "deepspeed_ext", engine()
    yield "deepspeed_ext int8", engine(quantize="int8")
    yield "deepspeed_ext int4", engine(quantize="int4")
    yield "safetensors", by_safetensors
    yield "transformers", by_transformers


def seconds_of(run: Callable[[], object], folder: Path, device: str) -> float:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
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
    limit = max(medians.get(name, 0.0) for name in ("disk", "link"))
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
    options = parser.parse_args()
    nbytes = write(options.folder, options.model)
    some = [
        (name, run)
        for name, run in ways(options.folder, nbytes, options.device)
        if not options.only or name in options.only
    ]
    seconds: dict[str, list[float]] = {name: [] for name, _ in some}
    for _ in tqdm(range(options.rounds), desc="rounds", disable=None):
        for name, run in some:
            seconds[name].append(seconds_of(run, options.folder, options.device))
    print(f"{options.model}, {nbytes / 1e9:.2f} GB, {options.device}, torch {torch.__version__}")
    print("\n".join(table(nbytes, seconds)))


if __name__ == "__main__":
    sys.exit(main())

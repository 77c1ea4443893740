"""Writes weights as GPTQ, AWQ and compressed-tensors are published to pack them, not by our code.

An int32 has eight codes, shifted to the left by four bits more each. GPTQ: consecutive elements
along the input; AWQ: of eight consecutive outputs those in the order 0, 2, 4, 6, 1, 3, 5, 7.
compressed-tensors: four or eight codes, q + 2^(bits - 1), of a row; and of zeros those of a column.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class Source:
    """A weight of shape (n, length), as codes, zeros and scales for each group and output.

    Args:
        groups: the group of each element along the input; None: consecutive ones.
    """

    def __init__(
        self, n: int, length: int, group: int, *, groups: Tensor | None = None, seed: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        count = -(-length // group)
        self.codes = torch.randint(16, (length, n), generator=generator)
        self.zeros = torch.randint(1, 16, (count, n), generator=generator)
        self.scales = (torch.rand(count, n, generator=generator) / 50 + 0.01).half()
        self.groups = torch.arange(length) // group if groups is None else groups

    def weight(self) -> Tensor:
        """Return what it stands for: (n, length), float64."""
        centred = (self.codes - self.zeros[self.groups]).double()
        return (centred * self.scales.double()[self.groups]).t()


def in_words(values: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Return eight numbers along the last dimension in an int32 each."""
    eights = values.reshape(*values.shape[:-1], -1, 8)
    words = sum(eights[..., place].long() << (4 * i) for i, place in enumerate(order))
    assert isinstance(words, Tensor)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def gptq(source: Source, *, less: int = 1, g_idx: bool = True) -> dict[str, Tensor]:
    """Return the tensors of a layer; `less` is what zeros are stored less by."""
    tensors = {
        "qweight": in_words(source.codes.t()).t().contiguous(),
        "qzeros": in_words(source.zeros - less),
        "scales": source.scales,
    }
    return tensors | ({"g_idx": source.groups.int()} if g_idx else {})


def awq(source: Source) -> dict[str, Tensor]:
    return {
        "qweight": in_words(source.codes, ORDER),
        "qzeros": in_words(source.zeros, ORDER),
        "scales": source.scales,
    }


def packed_words(codes: Tensor, bits: int) -> Tensor:
    """Return codes along the last dimension in int32, as many as fit in each."""
    per = 32 // bits
    short = -codes.shape[-1] % per
    codes = torch.nn.functional.pad(codes.long(), (0, short)).unflatten(-1, (-1, per))
    words = (codes << torch.arange(per) * bits).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def compressed(
    source: Source, *, bits: int = 4, zeros: str | None = None, g_idx: bool = False
) -> dict[str, Tensor]:
    """Return the tensors of a layer as compressed-tensors packs them.

    Args:
        zeros: None, "packed", or as bytes, as older files have them: "bytes".
    """
    half = 1 << bits - 1
    tensors = {
        "weight_packed": packed_words(source.codes.t(), bits),
        "weight_scale": source.scales.t().contiguous(),
        "weight_shape": torch.tensor(source.codes.t().shape),
    }
    if zeros == "packed":
        tensors["weight_zero_point"] = packed_words(source.zeros, bits).t().contiguous()
    if zeros == "bytes":
        tensors["weight_zero_point"] = (source.zeros.t() - half).to(torch.int8).contiguous()
    if g_idx:
        tensors["weight_g_idx"] = source.groups.int()
    return tensors


def write(
    folder: Path,
    layers: dict[str, dict[str, Tensor]],
    rest: dict[str, Tensor],
    config: dict[str, Any],
    *,
    files: int = 1,
) -> None:
    """Write a folder with some files of tensors and a config.json."""
    tensors = {f"{name}.{part}": t for name, layer in layers.items() for part, t in layer.items()}
    tensors |= rest
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    if files == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for i in range(files):
        name = f"model-{i + 1:05}-of-{files:05}.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[i::files]}
        save_file(part, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, name))
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}

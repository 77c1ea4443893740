"""Writes checkpoints of 4 bits as GPTQ and AWQ are published to pack them; knows nothing of ours.

An int32 has eight codes, shifted to the left by four bits more each. GPTQ: consecutive elements
along the input; AWQ: of eight consecutive outputs those in the order 0, 2, 4, 6, 1, 3, 5, 7.
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

"""Folders whose weights come quantized, as each method publishes them, of small models."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from family_cases import config_of, exact, filled, made
from int4_files import AWQ, GPTQ, Source, awq, compressed, gptq
from torch import Tensor, nn

from deepspeed_ext.io import save

GROUP = 16
_SIZES: dict[str, dict[str, Any]] = {  # words have 8 rows or columns
    "gpt2": dict(n_embd=48),
    "bloom": dict(hidden_size=64, n_head=4),
    "gemma3": dict(hidden_size=64),
}
Write = Callable[[Source], dict[str, Tensor]]


def of_compressed(bits: int = 4, **weights: Any) -> dict[str, Any]:
    """Return a quantization_config of compressed-tensors."""
    usual = {"num_bits": bits, "type": "int", "symmetric": True, "dynamic": False}
    usual |= {"strategy": "group", "group_size": GROUP, "actorder": None}
    group = {"targets": ["Linear"], "weights": usual | weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group | {"output_activations": None}},
    }


class Method:
    """One way to publish weights.

    Args:
        config: what config.json says.
        write: returns the tensors of a layer.
        bits: of codes.
        group: elements along a row that share a scale; 0: all.
        symmetric: whether zeros are in the middle.
        mixed: whether the groups of columns are mixed.
        scales: their dtype.
    """

    def __init__(
        self,
        config: dict[str, Any],
        write: Write,
        *,
        bits: int = 4,
        group: int = GROUP,
        symmetric: bool = False,
        mixed: bool = False,
        scales: torch.dtype = torch.float16,
    ) -> None:
        self.config, self.write, self.bits, self.group = config, write, bits, group
        self.symmetric, self.mixed, self.scales = symmetric, mixed, scales

    def source(self, n: int, length: int, seed: int, order: int) -> Source:
        """Return a random weight; `order` is the seed of that of its columns."""
        group = self.group or length
        groups = torch.arange(length) // group
        if self.mixed:
            groups = groups[torch.randperm(length, generator=torch.manual_seed(order))]
        made = Source(n, length, group, groups=groups, seed=seed)
        most = 1 << self.bits
        if self.bits == 8:
            random = torch.Generator().manual_seed(seed)
            made.codes = torch.randint(most, made.codes.shape, generator=random)
            made.zeros = torch.randint(most, made.zeros.shape, generator=random)
            made.scales = made.scales / 16
        if self.symmetric:
            made.zeros.fill_(most // 2)
        made.scales = made.scales.to(self.scales)
        return made


_v2 = functools.partial(gptq, less=0)
_pack = functools.partial
METHODS: dict[str, Method] = {
    "gptq": Method(GPTQ, gptq),
    "gptq-symmetric": Method(GPTQ | {"sym": True}, gptq, symmetric=True),
    "gptq-in-bf16": Method(GPTQ, gptq, scales=torch.bfloat16),
    "gptq-without-g_idx": Method(GPTQ, _pack(gptq, g_idx=False)),
    "gptq-v2": Method(GPTQ | {"checkpoint_format": "gptq_v2"}, _v2),
    "gptq-rows": Method(GPTQ | {"group_size": -1}, gptq, group=0),
    "gptq-act-order": Method(GPTQ | {"desc_act": True}, gptq, mixed=True),
    "awq": Method(AWQ, awq),
    "awq-groups-of-8": Method(AWQ | {"group_size": 8}, awq, group=8),
    "pack-4": Method(of_compressed(), compressed, symmetric=True),
    "pack-4-zeros": Method(of_compressed(symmetric=False), _pack(compressed, zeros="packed")),
    "pack-4-older-zeros": Method(of_compressed(symmetric=False), _pack(compressed, zeros="bytes")),
    "pack-4-rows": Method(
        of_compressed(strategy="channel", group_size=None), compressed, symmetric=True, group=0
    ),
    "pack-4-act-order": Method(
        of_compressed(actorder="group"), _pack(compressed, g_idx=True), symmetric=True, mixed=True
    ),
    "pack-8": Method(of_compressed(8), _pack(compressed, bits=8), bits=8, symmetric=True),
    "pack-8-zeros": Method(
        of_compressed(8, symmetric=False), _pack(compressed, bits=8, zeros="packed"), bits=8
    ),
    "pack-8-act-order": Method(
        of_compressed(8, actorder="group", symmetric=False),
        _pack(compressed, bits=8, zeros="packed", g_idx=True),
        bits=8,
        mixed=True,
    ),
}


class Published:
    """A model of transformers' own, its weights those that a folder states.

    Attributes:
        folder: with them.
        sources: of each layer.
        config: of the model.
        state: its floats, in float64.
        case: of the family.
    """

    def __init__(
        self,
        folder: Path,
        case: str,
        method: Method,
        *,
        shares_order: bool = True,
        floats: tuple[str, ...] = (),
        **changes: Any,
    ) -> None:
        self.folder, self.case = folder, case
        config = config_of(case, **(_SIZES.get(case, {}) | changes))
        model = filled(made(config, case))
        self.sources: dict[str, Source] = {}
        tensors = {}
        self.state = {name: tensor.double() for name, tensor in model.state_dict().items()}
        for seed, (name, layer) in enumerate(linears_of(model).items()):
            if any(part in name for part in floats):
                continue
            is_turned = not isinstance(layer, nn.Linear)
            n, length = layer.weight.shape[:: -1 if is_turned else 1]
            source = method.source(n, length, seed, length if shares_order else seed)
            self.sources[name] = source
            weight = source.weight()
            self.state[f"{name}.weight"] = weight.t() if is_turned else weight
            tensors |= {f"{name}.{part}": t for part, t in method.write(source).items()}
        for name, tensor in model.state_dict().items():
            if tensor.dim() == 3:
                tensors |= self._experts(name, tensor, method)
        tied = "lm_head.weight" if config.tie_word_embeddings else ""
        for name, tensor in model.state_dict().items():
            is_packed = name.removesuffix(".weight") in self.sources or tensor.dim() == 3
            if not is_packed and name != tied:
                tensors[name] = tensor.contiguous()
        self.config = config
        described = config.to_dict() | {"dtype": "float32", "quantization_config": method.config}
        folder.mkdir(exist_ok=True, parents=True)
        (folder / "config.json").write_text(json.dumps(described))
        save(tensors, folder / "model.safetensors", durable=False)

    def _experts(self, name: str, weight: Tensor, method: Method) -> dict[str, Tensor]:
        """Return the tensors of experts, each of its own, with one order of columns for all."""
        at, kind = name.rpartition(".")[::2]
        parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
        tensors, of_experts = {}, []
        for i in range(len(weight)):
            rows = []
            for j, part in enumerate(parts):
                n, length = weight.shape[1] // len(parts), weight.shape[2]
                source = method.source(n, length, 100 * i + j, length)
                rows.append(source.weight())
                written = method.write(source)
                tensors |= {f"{at}.{i}.{part}.{each}": t for each, t in written.items()}
            of_experts.append(torch.cat(rows))
        self.state[name] = torch.stack(of_experts)
        return tensors

    def exact(self) -> nn.Module:
        """Return the model in float64."""
        return exact(self.case, self.state, self.config)


def linears_of(model: nn.Module) -> dict[str, Any]:
    """Return the linear layers of blocks."""
    return {
        name: layer
        for name, layer in model.named_modules()
        if type(layer).__name__ in ("Linear", "Conv1D")
        and any(p.isdigit() for p in name.split("."))
    }

"""init_inference: from a model to an engine."""

import logging
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from deepspeed_ext.inference.arguments import Settings, settings_of, usual
from deepspeed_ext.inference.execution.decoder import Decoder
from deepspeed_ext.inference.execution.encoder import Encoder
from deepspeed_ext.inference.execution.layer_stream import LayerStream, slot_sizes
from deepspeed_ext.inference.execution.memory_budget import (
    MemoryBudget,
    cache_bytes,
    check_capacity,
    check_positions,
    working_bytes,
)
from deepspeed_ext.inference.model.architecture import architecture_of
from deepspeed_ext.inference.model.buffers import check_buffers
from deepspeed_ext.inference.model.checkpoint_folder import (
    Described,
    FolderTensors,
    reading_bytes,
)
from deepspeed_ext.inference.model.policies import policy_of
from deepspeed_ext.inference.model.policy import Policy
from deepspeed_ext.inference.model_source import ModelSource
from deepspeed_ext.inference.requests.chat import templates_of_folder
from deepspeed_ext.inference.requests.tokenizer import tokenizer_of
from deepspeed_ext.inference.serving.encoder_engine import EncoderEngine
from deepspeed_ext.inference.serving.engine import InferenceEngine
from deepspeed_ext.inference.serving.step_plan import CHUNK, PACKED
from deepspeed_ext.inference.weights.adapter import Adapter
from deepspeed_ext.inference.weights.flat_layer import flat_bytes, travelling
from deepspeed_ext.inference.weights.host_memory import WeightMemory
from deepspeed_ext.inference.weights.loader import Layer, Taker, Weights
from deepspeed_ext.inference.weights.packed_layers import (
    check_asked,
)
from deepspeed_ext.inference.weights.quantize_on_load import (
    Quantizer,
    bytes_of,
    report_of,
    with_input_format,
)
from deepspeed_ext.inference.weights.resting_layers import HostLayers, RestingLayers, StoredLayers
from deepspeed_ext.quantization.report import Report

_OP = "init_inference"
_logger = logging.getLogger("deepspeed_ext")
_USUAL_TOKENS = 4096  # a cache for all of a long context would take more than the weights


def init_inference(
    model: nn.Module | str | os.PathLike[str],
    config: Mapping[str, Any] | None = None,
    *,
    dtype: torch.dtype | str | None = usual(None),
    quantize: str | None = usual(None),
    quantize_head: str | None = usual(None),
    kv_dtype: str | None = usual(None),
    input_format: str | None = usual(None),
    max_batch: int = usual(8),
    max_tokens: int | None = usual(None),
    cuda_graphs: bool = usual(True),
    pack_prefill: bool = usual(False),
    policy: Policy | None = usual(None),
    adapter: str | os.PathLike[str] | None = usual(None),
    tokenizer: Any = usual(None),
    device: torch.device | str | int | None = usual(None),
    progress: bool = usual(False),
    offload: str | None = usual(None),
    nvme_path: str | os.PathLike[str] | None = usual(None),
    **deepspeed: Any,
) -> InferenceEngine | EncoderEngine:
    """Return an engine with a model's weights in the form that our kernels read.

    A module may be what torch.compile, DataParallel or DistributedDataParallel has around it. It
    continues prompts; that of an encoder is called as the model is, and keeps nothing, so that
    max_batch, max_tokens, cuda_graphs and pack_prefill mean nothing to it.

    The weights are copied; a module stays as it is. Its tensors and its config are read, and no
    code of it runs: your hooks, those of all modules too, and a forward of its own are refused by
    name, but for what `patch` has put there. So are buffers that say something else than the
    config, such as rotary frequencies. Other attributes that were changed, such as an activation or
    a scale, are not seen.

    Tensors of a folder are read a layer at a time and quantized on the way, so that two layers as
    floats lie about at most. Names and shapes of all tensors, what the table reads of the
    configuration, and whether all has room, are checked before the first is read.

    Weights that come quantized stay so, bit for bit, and are never floats: of a folder of GPTQ, AWQ
    (4 bits), compressed-tensors (pack-quantized, 4 or 8 bits) or with a file of `save_quantized`,
    and of a module those of its `QuantizedLinear`. There is no report of them, as the floats that
    they were made of are not there.

    Of a generation config the tokens that end a text and that for padding count, and nothing else:
    how tokens are sampled is said by each call, see ``SamplingOptions``.

    Args:
        model: a module with a `config` as Hugging Face's have, or any mapping; or a folder with
            config.json and safetensors files.
        config: arguments by name, ours or of DeepSpeed's function of this name. What is given
            twice has to be the same.
        dtype: of weights and hidden states, float32, bfloat16 or float16; None: that of the model.
        quantize: what the weights of linear layers in blocks, and of experts, become: None, "int8"
            or "int4", in groups of 128 elements of a row, or on CUDA 8.9 or newer, but not of a
            mixture of experts, "fp8" (e4m3, one scale for a row). None where weights come
            quantized.
        quantize_head: the same for the head, which without it stays as it is; the embedding does
            in any case, also one that is the head.
        kv_dtype: what keys and values are kept as: None for dtype, "int8" or "fp8".
        input_format: None, or with either of these "int8": see ``quantized_linear``; faster on a
            CPU.
        max_batch: requests at a time.
        max_tokens: of a request, those of its prompt and new ones; None: what the model was made
            for, 4096 at most. More than that is computed as transformers does, with a warning, but
            for learned positions, of which there are no more.
        cuda_graphs: whether steps are recorded once and replayed, on CUDA.
        pack_prefill: whether prompts are prefilled together, and running requests decoded with
            them: faster for many requests, but not batch-invariant: how a completion is rounded
            then depends on which others are beside it.
        policy: the table of the model's family; None: one of those that are built in.
        adapter: the folder of a LoRA adapter of peft's, which is merged into the weights of a
            folder while they are read, with the bits of peft's merge_and_unload in this dtype.
        tokenizer: has encode(text) and decode(ids); None: that of the folder, if there is one.
        device: where to; None: that of the module; for a folder cuda if there is one, else cpu.
        progress: whether a bar is drawn on stderr while files are read, if that is a terminal.
        offload: where the linear layers of blocks rest when they are not computed with: None: on
            the device; "cpu": in host memory; "nvme": on a disk. Each block comes by for each
            step, while the one before is computed with: that is for models that the device has no
            room for. Steps are not recorded then.
        nvme_path: with offload="nvme", a folder on the disk to use; nothing is to be seen there.
        deepspeed: arguments of DeepSpeed's function: each does something, or is refused with what
            to use instead.

    Raises:
        TypeError: an argument is unknown, or of the wrong type.
        ValueError: an argument breaks a rule above; the model has no family that is known, or
            tensors that do not fit it; a file is not what it should be.
        OSError: a file is missing or cannot be read.
        MemoryError: the device, or the host, has too little memory free; says what would fit.
        BuildError: a native library of the device could not be built or loaded.
    """
    given = {name: value for name, value in locals().items() if name in _NAMES}
    settings = settings_of(config, given, deepspeed)
    source = ModelSource(model)
    policy = settings.policy or policy_of(source.config)
    stop_tokens = source.stop_tokens(policy)
    text_tokens = tokenizer_of(source.folder, settings.tokenizer)
    loading = _Loading(source, settings, policy)
    with torch.inference_mode(False), torch.no_grad():
        weights, report, stream = loading.run()
        if not loading.of.causal:
            encoder = Encoder(loading.of, weights)
            return EncoderEngine(encoder, tokenizer=text_tokens, report=report)
        return InferenceEngine(
            Decoder(loading.of, weights, stream),
            max_batch=settings.max_batch,
            max_tokens=loading.max_tokens,
            kv_quantized=settings.kv_dtype,
            tokenizer=text_tokens,
            stop_tokens=stop_tokens,
            pad_tokens=source.pad_tokens(policy),
            cuda_graphs=settings.cuda_graphs,
            pack_prefill=settings.pack_prefill,
            report=report,
            chat_templates=templates_of_folder(source.folder),
        )


_NAMES = frozenset(field.name for field in fields(Settings))


class _Loading:
    """Takes over weights, when it is sure that they fit their family and the device."""

    def __init__(self, source: ModelSource, settings: Settings, policy: Policy) -> None:
        self._source, self._settings, self._policy = source, settings, policy
        self.of = architecture_of(policy, source.config)
        self._adapter = None
        if settings.adapter is not None:
            if source.folder is None:
                raise ValueError(
                    f"{_OP}: adapter is {str(settings.adapter)!r} and model is a module, expected a"
                    " folder; or give the module with the adapter merged into it"
                )
            self._adapter = Adapter(Path(settings.adapter), source.folder.shards.tensors, policy)
        check_buffers(source.buffers, self.of)
        self._dtype = settings.dtype or source.dtype()
        self._device = _checked(settings.device) if settings.device else source.device()
        if self._device.type == "cuda" and self._device.index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        for name, what in (
            ("kv_dtype", "keeps no keys and values"),
            ("quantize_head", "has no head"),
            ("offload", "is small"),
        ):
            value = getattr(settings, name)
            if not self.of.causal and value is not None:
                raise ValueError(f"{_OP}: {name} is {value!r}, expected None, as an encoder {what}")
        if self.of.experts is not None and settings.quantize == "fp8":
            raise ValueError(
                f"{_OP}: quantize is 'fp8', expected None, 'int8' or 'int4' of a mixture of experts"
            )
        asked = settings.quantize, settings.quantize_head, settings.input_format
        check_asked(source.packed, *asked)
        self._asked: list[str] = []
        self._sizes: list[int] = []  # of layers that rest elsewhere
        context = self.of.context or _USUAL_TOKENS
        self.max_tokens = settings.max_tokens or min(context, _USUAL_TOKENS)
        self._say_if_beyond()

    def _say_if_beyond(self) -> None:
        """Warn where more tokens are asked for than a model of rotary positions was made for."""
        most = self.of.context
        is_open = self.of.causal and self.of.position != "learned"
        if is_open and most is not None and self.max_tokens > most:
            _logger.warning(
                "%s: max_tokens is %d, more than the %d positions that the model was made for: text"
                " beyond them is computed, as by transformers, and may be worse",
                _OP,
                self.max_tokens,
                most,
            )

    def run(self) -> tuple[Weights, Report | None, LayerStream | None]:
        """Return the weights, what quantizing has done to them, and what brings their layers.

        Raises:
            As init_inference.
        """
        settings, source = self._settings, self._source
        kinds = () if source.packed is not None else ("int8", "int4")
        is_on_device = self._device.type == "cuda" and settings.offload is None
        check_capacity(
            *(self._device, settings.quantize, settings.max_batch, self.max_tokens),
            *(partial(self._budget, settings.offload), kinds),
            partial(self._budget, "cpu") if is_on_device and self.of.causal else None,
        )
        rest = self._rest()
        try:
            weights, report = self._taken(rest)
            stream = None if rest is None else LayerStream(weights.layers, rest, self._device)
        except BaseException:
            if rest is not None:
                rest.close()
            raise
        return weights, report, stream

    def _rest(self) -> RestingLayers | None:
        """Return where layers are to rest, which has room for them."""
        settings = self._settings
        if settings.offload is None:
            return None
        if settings.offload == "cpu":
            return HostLayers(self._device)
        assert settings.nvme_path is not None
        path = os.path.abspath(os.fsdecode(settings.nvme_path))
        return StoredLayers(path, self._sizes, self._device)

    def _taken(self, rest: RestingLayers | None) -> tuple[Weights, Report | None]:
        settings, source = self._settings, self._source
        memory = WeightMemory() if self._device.type == "cpu" and rest is None else None
        quantizers = self._quantizers(settings.quantize, settings.input_format, memory)
        some = [quantizer for quantizer in quantizers if quantizer is not None]

        def put_away(layer: Layer) -> Layer:
            assert rest is not None
            left = rest.add(layer)
            for quantizer in some:
                quantizer.moved(layer, left)
            return left

        keep = None if rest is None else put_away
        if source.folder is None:
            given = cast(Mapping[str, Tensor], source.tensors)
            weights = self._take(given, quantizers, memory=memory, keep=keep)
        else:
            shards, names = source.folder.shards, self._asked
            on_host = () if source.packed is None else source.packed.on_host
            with FolderTensors(shards, names, self._device, settings.progress, on_host) as tensors:
                given = self._merged(tensors)
                weights = self._take(given, quantizers, memory=memory, own=tensors.own, keep=keep)
        return weights, report_of(weights, some) if some else None

    def _merged(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return tensors if self._adapter is None else self._adapter.merged(tensors, self._dtype)

    def _budget(self, offload: str | None, quantize: str | None) -> MemoryBudget:
        """Go through all of it without values, and return the bytes that it comes to."""
        settings, source = self._settings, self._source
        described = Described(source.tensors, source.packed.parts if source.packed else ())
        quantizers = self._quantizers(quantize, None)
        weights = self._take(described, quantizers, torch.device("meta"))
        self._asked = list(described.asked)
        nbytes, reading, rest = bytes_of(weights), 0, 0
        if source.folder is not None:
            reading = reading_bytes(source.folder.shards, self._asked)
        reading += max((q.largest_floats for q in quantizers if q is not None), default=0)
        if offload is not None:
            self._sizes = [flat_bytes(layer) for layer in weights.layers]
            rest, slots = sum(self._sizes), sum(slot_sizes(self._sizes))
            nbytes += slots - sum(bytes_of(travelling(layer)) for layer in weights.layers)
            copies = 1 if offload == "cpu" else 2  # of the layer that was read last
            reading = max(0, reading + copies * max(self._sizes, default=0) - slots)
        if not self.of.causal:  # what it works with depends on its calls
            return MemoryBudget(nbytes, 0, reading)
        check_positions(self.of, weights.positions, self.max_tokens)
        batch, tokens = settings.max_batch, self.max_tokens
        return MemoryBudget(
            nbytes,
            cache_bytes(self.of, batch, tokens, self._dtype, settings.kv_dtype),
            reading,
            working_bytes(
                self.of,
                batch,
                min(tokens, CHUNK),
                self._dtype,
                quantize is not None or source.packed is not None,
                PACKED if settings.pack_prefill else 0,
                0 if offload is None else min(batch * tokens, PACKED),
            ),
            rest if offload == "cpu" else 0,
        )

    def _quantizers(
        self, kind: str | None, input_format: str | None, memory: WeightMemory | None = None
    ) -> tuple[Quantizer | None, Quantizer | None]:
        """Return what quantizes layers, and the head."""
        made = partial(Quantizer, input_format=input_format, device=self._device, memory=memory)
        head = self._settings.quantize_head
        return (
            None if kind is None else made(kind),
            None if head is None else made(head, name="quantize_head"),
        )

    def _take(
        self,
        tensors: Mapping[str, Tensor],
        quantizers: tuple[Quantizer | None, Quantizer | None],
        device: torch.device | None = None,
        memory: WeightMemory | None = None,
        own: Collection[str] = (),
        keep: Callable[[Layer], Layer] | None = None,
    ) -> Weights:
        weights = Taker(
            self._policy,
            self._source.config,
            self.of,
            tensors,
            self._device if device is None else device,
            self._dtype,
            *quantizers,
            memory,
            self._source.packed,
            own,
            keep,
        ).take()
        rounded = self._settings.input_format
        return weights if rounded is None else with_input_format(weights, rounded)


def _checked(device: torch.device) -> torch.device:
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{_OP}: device is {device}, expected cpu or cuda")
    count = torch.cuda.device_count() if device.type == "cuda" else 1
    if (device.index or 0) >= count:
        there = f"cuda:0 to cuda:{count - 1}" if device.type == "cuda" else "cpu"
        there = there if count else "cpu, as torch finds no GPU"
        raise ValueError(f"{_OP}: device is {device}, expected {there}")
    return device

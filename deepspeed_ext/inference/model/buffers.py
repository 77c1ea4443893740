"""Tensors that a module works out from its config, and that the engine works out for itself."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from deepspeed_ext.dtensors import is_dtensor
from deepspeed_ext.inference.model.architecture import Architecture
from deepspeed_ext.inference.model.positions import Rotation

_FREQUENCIES = "inv_freq"
_SPARE = "original_inv_freq"  # from which rules that the engine refuses begin anew


def check_buffers(buffers: Mapping[str, Tensor], of: Architecture) -> None:
    """Refuse buffers of a module that say something else than its config, as only that counts.

    Casts have rounded some of them: what a 16-bit dtype holds exactly may be off by its rounding.

    Args:
        buffers: of the module, by name.
        of: what the config says.

    Raises:
        ValueError: one was changed.
    """
    for name, want in _expected(buffers, of):
        have = buffers[name].detach()
        if have.is_meta or is_dtensor(have):
            continue
        have, want = have.double().cpu(), want.double()
        if have.shape != want.shape:
            differs = f"has shape {list(have.shape)}, expected {list(want.shape)}"
        elif bool((off := ~_agree(have, want)).any()):
            at = tuple(off.nonzero()[0].tolist())
            place = f" at {list(at)}" if at else ""
            differs = f"has {have[at].item():.6g}{place}, expected {want[at].item():.6g}"
        else:
            continue
        raise ValueError(
            f"init_inference: {name} {differs}, as the engine reads the config, not this buffer;"
            " change the config, or undo what has changed the buffer"
        )


def _expected(buffers: Mapping[str, Tensor], of: Architecture) -> Iterator[tuple[str, Tensor]]:
    """Yield the names of buffers that a table's modules compute with, and what they should be."""
    frequencies = [n for n in buffers if n.endswith(_FREQUENCIES) and not n.endswith(_SPARE)]
    has_both = any(map(_is_local, frequencies))
    rotations = {w > 0: rotation for w, rotation in zip(of.windows, of.rotations, strict=True)}
    for name in frequencies:
        rotation = _rotation_for(_is_local(name), rotations, has_both)
        if rotation is not None:
            yield name, rotation.frequencies
    for name, buffer in buffers.items():
        last = name.rpartition(".")[2]
        if last == "embed_scale":
            yield name, torch.tensor(of.embedding_scale)
        elif not of.causal and last == "position_ids":
            yield name, torch.arange(buffer.shape[-1]).expand(buffer.shape)
        elif not of.causal and last == "token_type_ids":
            yield name, torch.zeros_like(buffer, device="cpu")


def _is_local(name: str) -> bool:
    """Tell whether frequencies are those of layers with windows, where these have their own."""
    return "sliding_attention" in name or "rotary_emb_local" in name


def _rotation_for(
    is_local: bool, rotations: dict[bool, Rotation | None], has_both: bool
) -> Rotation | None:
    if has_both:
        return rotations.get(is_local)
    return rotations.get(False) or rotations.get(True)


def _agree(have: Tensor, want: Tensor) -> Tensor:
    relative, absolute = 1e-5, 0.0
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal(have.to(dtype).double(), have):
            of_dtype = torch.finfo(dtype)
            relative, absolute = of_dtype.eps, of_dtype.smallest_normal * of_dtype.eps
    return have.isclose(want, rtol=relative, atol=absolute)

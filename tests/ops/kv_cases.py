"""Caches with random content for tests: pages in random order, garbage where no token is."""

import torch
from torch import Tensor

from deepspeed_ext.ops import PagedKV

PAGE = 64
ROUNDING = torch.finfo(torch.float32).eps / 2


def make_kv(
    lengths: list[int],
    heads: int,
    width: int,
    dtype: torch.dtype,
    device: str,
    *,
    seed: int = 0,
    capacity: int = 0,
    content: list[tuple[Tensor, Tensor]] | None = None,
) -> PagedKV:
    """Make the cache of these slots, float or int8 or float8_e4m3fn codes.

    Args:
        lengths: of the slots.
        heads: of keys.
        width: of a head.
        dtype: of what is stored.
        device: of all tensors.
        seed: of content and order of pages.
        capacity: pages of a slot, or as many as the longest has, and one more.
        content: for each slot keys and values (tokens, heads, width) and nothing random, of floats.
    """
    random = torch.Generator().manual_seed(seed)
    of_slot = [-(-length // PAGE) for length in lengths]
    capacity = capacity or max(of_slot, default=0) + 1
    pages = sum(of_slot) + 3
    order = torch.randperm(pages, generator=random).int()
    table = torch.full((len(lengths), capacity), -1, dtype=torch.int32)
    begin = 0
    for slot, count in enumerate(of_slot):
        table[slot, :count] = order[begin : begin + count]
        begin += count
    step = max(1, 16 // dtype.itemsize)
    shape = (pages, heads, PAGE, -(-width // step) * step)
    stored, scales = [], []
    for i in range(2):
        floats = torch.randn(shape, generator=random)
        if dtype.is_floating_point and dtype.itemsize > 1:
            made = torch.full(shape, torch.nan, dtype=dtype)
            for slot, length in enumerate(lengths):
                places = table[slot, : of_slot[slot]].long()
                values = floats[places]
                if content is not None:
                    flat = torch.zeros(len(places) * PAGE, heads, width)
                    flat[:length] = content[slot][i].float()
                    values[..., :width] = flat.unflatten(0, (-1, PAGE)).transpose(1, 2)
                values.transpose(1, 2).flatten(0, 1)[length:] = torch.nan
                keep = torch.arange(len(places) * PAGE).view(-1, 1, PAGE, 1) < length
                made[places] = torch.where(keep, values, torch.nan).to(dtype)
            stored.append(made.to(device)[..., :width])
        else:
            codes = floats.mul(40).clamp(-127, 127) if dtype == torch.int8 else floats.mul(100)
            stored.append(codes.to(dtype).to(device)[..., :width])
            scale = torch.rand(shape[:3], generator=random) * 0.02 + 0.01
            for slot, length in enumerate(lengths):  # NaN where no token is
                places = table[slot, : of_slot[slot]].long()
                keep = torch.arange(len(places) * PAGE).view(-1, 1, PAGE) < length
                scale[places] = torch.where(keep, scale[places], torch.nan)
            scales.append(scale.to(device))
    return PagedKV(
        stored[0],
        stored[1],
        table.to(device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
        *scales,
    )


def on_cpu(kv: PagedKV) -> PagedKV:
    return PagedKV(*(t if t is None else t.cpu() for t in kv))

"""A quick run of the ops of random-LTD against their references, for ds_report."""

import torch

from deepspeed_ext import ops
from deepspeed_ext.ops._compare import compare


def random_ltd(device: str) -> None:
    """Draw tokens, take them out and back, with gradients, and their part of a mask.

    Raises:
        RuntimeError: a result is not what the reference says.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 40, 12, generator=generator)
    mask = torch.rand(2, 1, 40, 40, generator=generator) < 0.5
    with torch.random.fork_rng(devices=[]):
        ids, _ = ops.gpt_sample_tokens(9, 40, 2, 3)
    shuffled = ids.flip(-1).contiguous().to(device)
    on_device = ops.token_sort_(shuffled, 40)
    compare(f"random_ltd: ids on {device}", on_device.double(), ids.double(), 0)
    got_masks = ops.mask_gather_bert(mask.to(device), on_device)
    want = ops.mask_gather_bert_ref(mask, ids)
    compare(f"random_ltd: mask on {device}", got_masks.double(), want.double(), 0)
    found = []
    for leaf, kept, end in (
        (x.to(device).requires_grad_(), on_device[1], ""),
        (x.double().requires_grad_(), ids[1], "_ref"),
    ):
        with torch.enable_grad():
            part = getattr(ops, f"token_gather{end}")(leaf, kept)
            out = getattr(ops, f"token_scatter{end}")(leaf * 2, part.sin(), kept)
            found.append([out.detach(), *torch.autograd.grad(out.square().sum(), leaf)])
    for i, (value, expected) in enumerate(zip(*found, strict=True)):
        compare(f"random_ltd: {i} of result and gradient on {device}", value, expected, 1e-5,
                of_largest=1e-5)  # fmt: skip

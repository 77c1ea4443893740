"""What each stage keeps, measured, beside the table of zero.shard."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch.distributed as dist

from benchmarks.offload_model import Decoder, Size, make_data
from benchmarks.zero_contenders import ZeroWorkload, allocated, drop_garbage, ours, peak
from deepspeed_ext import zero

_WEIGHT, _USED, _REDUCED, _STATE = 4, 2, 4, 8  # bytes: w and w', c, g, s of the table


@dataclass(frozen=True)
class Kept:
    """Bytes on the device at one moment of a step.

    Args:
        stage: of ZeRO.
        when: which moment.
        measured: what was allocated, without what was before the model; 0 on the CPU.
        expected: what the table says.
    """

    stage: int
    when: str
    measured: int
    expected: int

    def __str__(self) -> str:
        ratio = f"{self.measured / self.expected:6.3f}" if self.measured else ""
        mib = f"{self.measured / 2**20:10.1f}{self.expected / 2**20:10.1f}"
        return f"stage {self.stage}  {self.when:32}{mib} {ratio}"


def memory(size: Size, device: str) -> Iterator[Kept]:
    """Yield what each stage keeps in steps of few tokens, whose activations are small."""
    short = Size(size.layers, size.width, size.vocabulary, batch=1, length=min(64, size.length))
    for _ in _of_stage(0, Size(2, 128, size.vocabulary, 1, short.length), device):
        pass  # torch's workspaces stay
    for stage in range(4):
        drop_garbage(device)
        yield from _of_stage(stage, short, device)


def _of_stage(stage: int, size: Size, device: str) -> Iterator[Kept]:
    base = allocated(device)
    made = ours(ZeroWorkload(stage), size, device)
    data = make_data(size, device)
    total = sum(p.numel() for p in made.model.parameters())
    assert isinstance(made.model, Decoder)
    blocks = sum(p.numel() for p in made.model.blocks.parameters())
    block, rest = blocks // size.layers, total - blocks
    n = 1 if stage == 0 else dist.get_world_size()
    for _ in range(2):
        made.model(*data).backward()
        made.step()
    between, grads = (_WEIGHT + _STATE) * total // n, _WEIGHT * total // n
    gathered = _USED * (total if stage < 3 else rest)
    reducing = (_USED + _REDUCED) * block  # where blocks are reduced
    two = 2 * _USED * block if stage == 3 else 0
    yield Kept(stage, "between steps", allocated(device) - base, between)
    loss = made.model(*data)
    most, after = peak(device) - base, allocated(device) - base
    yield Kept(stage, "forward has ended", after, between + gathered)
    if stage == 3:
        yield Kept(stage, "most in forward", most, between + gathered + two)
    loss.backward()
    most, after = peak(device) - base, allocated(device) - base
    # Gathered weights go as gradients come.
    both = max(gathered, grads) if stage < 3 else gathered + two + grads * blocks // total
    yield Kept(stage, "most in backward", most, between + both + reducing)
    yield Kept(stage, "backward has ended", after, between + grads)
    made.step()
    for _ in zero.accumulate(made.model, 2):
        allocated(device)
        made.model(*data).backward()
    most = peak(device) - base
    if stage < 2:
        both = gathered + _REDUCED * total
    elif stage == 2:
        both = gathered + grads
    else:
        both = gathered + two + grads
    yield Kept(stage, "most in micro-step 2 of 2", most, between + both + reducing)
    made.step()

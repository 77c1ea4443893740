"""Let transformers and accelerate train in several processes of a CPU, as they do on GPUs."""

import contextlib
from importlib import import_module

import accelerate.state
import torch
import transformers.training_args


def pretend() -> None:
    """Without a GPU accelerate takes processes of DeepSpeed for one, and Trainer refuses bf16."""
    if not torch.cuda.is_available():
        on_cpu = "gloo", accelerate.state.DistributedType.MULTI_CPU
        accelerate.state.PartialState._prepare_backend = lambda *_, **__: on_cpu
        transformers.training_args.is_torch_bf16_gpu_available = lambda: True
    with contextlib.suppress(ImportError):  # the real DeepSpeed compiles for minutes what gloo does
        import_module("deepspeed.comm.torch").build_shm_op = lambda: None

"""rms_norm of deepspeed_ext and of torch: `python -m benchmarks.bench_rms_norm --device cpu`."""

import torch.nn.functional as F
from torch import Tensor

from benchmarks.norms import workloads_of
from benchmarks.workloads import main
from deepspeed_ext.ops import rms_norm

EPS = 1e-6


def torchs(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


WORKLOADS = workloads_of("rms_norm", rms_norm, torchs, vectors=1)

if __name__ == "__main__":
    main(__doc__, WORKLOADS)

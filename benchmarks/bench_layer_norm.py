"""layer_norm of this package and of torch: `python -m benchmarks.bench_layer_norm --device cpu`."""

import torch.nn.functional as F
from torch import Tensor

from benchmarks.norms import workloads_of
from benchmarks.workloads import main
from deepspeed_ext.ops import layer_norm

EPS = 1e-5


def torchs(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, EPS)


WORKLOADS = workloads_of("layer_norm", layer_norm, torchs, vectors=2)

if __name__ == "__main__":
    main(__doc__, WORKLOADS)

"""What floats may be stored as."""

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # in the order of csrc/common/dtype.h

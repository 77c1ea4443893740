// The device that a *_ops.cpp is compiled for: each is compiled once for the CPU and once for CUDA.
#pragma once

#ifdef USE_CUDA
#include "common/torch/cuda.h"
#define DSX_DEVICE CUDA  // as torch's registry calls it
#else
#include "common/torch/cpu.h"
#define DSX_DEVICE CPU
#endif

// Registers the CUDA kernels of quantize, dequantize and fake_quantize; the schemas are in
// deepspeed_ext/ops/quantization/.
#include <torch/csrc/stable/accelerator.h>

#include "common/torch/cuda.h"
#include "quantization/quantize_ops.h"

namespace dsx {
namespace {

struct Cuda {
  static bool measures_before(const Quantize& call) { return quantize_cuda_measures_before(call); }

  template <class Call>
  static void run(const Call& call, int device) {
    const torch::stable::accelerator::DeviceGuard guard(device);
    queue(call, current_cuda_stream(device));
  }

 private:
  static void queue(const Quantize& call, void* stream) { quantize_cuda(call, stream); }
  static void queue(const Dequantize& call, void* stream) { dequantize_cuda(call, stream); }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, CUDA, library) {
  library.impl("quantize", &boxed<&quantize<Cuda>>);
  library.impl("dequantize", &boxed<&dequantize<Cuda>>);
  library.impl("fake_quantize", &boxed<&fake_quantize<Cuda>>);
  library.impl("fake_quantize_", &boxed<&fake_quantize_<Cuda>>);
}

}  // namespace dsx

// quantized_product on CUDA: chooses how many rows of x a block has.
#include "linear/quantized_many_rows.h"

#include "linear/quantized_many_rows_cuda.cuh"

namespace dsx {
namespace {

constexpr const char* kOp = "quantized_product";

// Products beside rows that there are not cost as much as others, and making floats of codes takes
// a share of a small tile's time.
bool are_better_halved(int64_t rows) {
  const auto padded = [&](int64_t tile) { return ceil_div(rows, tile) * tile; };
  return 8 * padded(256) > 9 * padded(128);
}

}  // namespace

bool quantized_many_rows_cuda(const QuantizedManyRows& call, void* stream) {
  cuda::check(cudaPeekAtLastError(), kOp);  // of somebody before
  const cuda::Device device(kOp);
  if (device.major != 9 || device.minor != 0) return false;
  const cuda::ManyRows made{call, cuda::scales_of<DSX_BITS>(call.weight)};
  const auto queue = cudaStream_t(stream);
  const auto launch = [&](auto storage) {
    using T = decltype(storage);
    return are_better_halved(call.rows)
               ? cuda::launch_many_rows<T, DSX_BITS, 128>(made, device, queue, kOp)
               : cuda::launch_many_rows<T, DSX_BITS, 256>(made, device, queue, kOp);
  };
  return call.x.dtype == Dtype::bfloat16 ? launch(BFloat16{}) : launch(Half{});
}

}  // namespace dsx

// grouped_linear of few rows on CUDA: skinny GEMMs side by side, as linear/few_rows_kernel_cuda.cuh
// has them.
#include "linear/grouped_linear.h"

#include "linear/grouped_rows_cuda.cuh"
#include "linear/skinny_linear_products_cuda.cuh"

namespace dsx {
namespace {

constexpr const char* kOp = "grouped_linear";

template <class T_>
struct Grouped {
  using Call = GroupedLinear;
  using T = T_;
  using Weight = T;
  using X = T;
  template <int kColumnTiles>
  using Products = cuda::Products<T, kColumnTiles>;
  static constexpr int kXLines = 1;
  static constexpr bool kScaled = false;
  static constexpr bool kGrouped = true;
  static constexpr int kTogether = 1;

  DSX_HOST_DEVICE static cuda::Operand<T> weight(const Call& call) {
    return {call.weight, call.groups.experts * call.weight_rows(), call.length};
  }
  DSX_HOST_DEVICE static cuda::Operand<T> x(const Call& call) {
    return {call.x, call.rows, call.length};
  }
};

}  // namespace

void grouped_linear_cuda(const GroupedLinear& call, void* stream) {
  const cuda::Device device(kOp);
  with_storage_type(call.x.dtype, [&](auto storage) {
    cuda::with_rows_of_share(call.groups, call.rows, [&](auto tiles) {
      cuda::launch_grouped_rows<Grouped<decltype(storage)>, decltype(tiles)::value>(
          call, device, cudaStream_t(stream), kOp);
    });
  });
}

}  // namespace dsx

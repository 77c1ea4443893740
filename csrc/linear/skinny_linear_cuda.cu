// skinny_linear on CUDA: a kind of skinny GEMM, as linear/few_rows_kernel_cuda.cuh
// has them.
#include "linear/skinny_linear.h"

#include "linear/few_rows_kernel_cuda.cuh"
#include "linear/skinny_linear_products_cuda.cuh"

namespace dsx {
namespace {

constexpr const char* kOp = "skinny_linear";

template <class T_>
struct Skinny {
  using Call = SkinnyLinear;
  using T = T_;
  using Weight = T;
  using X = T;
  template <int kColumnTiles>
  using Products = cuda::Products<T, kColumnTiles>;
  static constexpr int kXLines = 1;
  static constexpr bool kScaled = false;
  static constexpr int kTogether = 1;
  template <int kColumnTiles>
  static constexpr int kMostWarps = 7;

  DSX_HOST_DEVICE static cuda::Operand<T> weight(const Call& call) {
    return {call.weight, call.weight_rows(), call.length};
  }
  DSX_HOST_DEVICE static cuda::Operand<T> x(const Call& call) {
    return {call.x, call.rows, call.length};
  }
};

}  // namespace

void skinny_linear_cuda(const SkinnyLinear& call, void* stream) {
  const cuda::Device device(kOp);
  with_storage_type(call.x.dtype, [&](auto storage) {
    cuda::with_column_tiles(call.rows, [&](auto tiles) {
      cuda::launch_few_rows<Skinny<decltype(storage)>, decltype(tiles)::value>(
          call, device, cudaStream_t(stream), kOp);
    });
  });
}

}  // namespace dsx

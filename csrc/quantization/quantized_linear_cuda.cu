// quantized_linear on CUDA: kinds of multiplication on few rows, as common/cuda/few_rows_kernel.cuh
// has them.
#include "common/cuda/few_rows_kernel.cuh"
#include "quantization/quantized_products_cuda.cuh"

namespace dsx {
namespace {

constexpr const char* kOp = "quantized_linear";

// By tensor cores, of x in 16 bits.
template <class T_, int kBits, bool kAsymmetric>
struct Codes {
  using Call = cuda::CodesCall;
  using T = T_;
  using Weight = uint8_t;
  using X = T;
  template <int kColumnTiles>
  using Products = cuda::CodeProducts<T, kBits, kColumnTiles, kAsymmetric>;
  static constexpr int kXLines = 16 / kBits, kLeastSplit = DSX_LEAST_SPLIT;
  static constexpr bool kScaled = true;
  template <int kColumnTiles>
  static constexpr int kMostWarps = kColumnTiles > 2 ? 7 : DSX_MOST_WARPS;

  DSX_HOST_DEVICE static cuda::Operand<Weight> weight(const Call& call) {
    Rows rows;
    rows.data = const_cast<uint8_t*>(call.weight.codes);
    rows.pitch = call.weight.row_bytes;
    return {rows, call.weight.rows, call.weight.row_bytes};
  }
  DSX_HOST_DEVICE static cuda::Operand<X> x(const Call& call) {
    return {call.x, call.rows, call.length};
  }
  DSX_HOST_DEVICE static const cuda::Scales& scales(const Call& call) {
    return call.scales;
  }
};

}  // namespace

void quantized_linear_cuda(const QuantizedLinear& call, void* stream) {
  const cuda::Device device(kOp);
  const cuda::CodesCall made{call, cuda::scales_of<DSX_BITS>(call.weight)};
  cuda::with_column_tiles(call.rows, [&](auto tiles) {
    constexpr int kTiles = decltype(tiles)::value;
    if (call.weight.offsets) cuda::launch_few_rows<Codes<BFloat16, DSX_BITS, true>, kTiles>(made, device, cudaStream_t(stream), kOp);
    else cuda::launch_few_rows<Codes<BFloat16, DSX_BITS, false>, kTiles>(made, device, cudaStream_t(stream), kOp);
  });
}

}  // namespace dsx

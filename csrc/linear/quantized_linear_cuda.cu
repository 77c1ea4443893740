// quantized_linear and unpack_weight on CUDA: chooses a kernel. By tensor cores it is a kind of
// skinny GEMM, as linear/few_rows_kernel_cuda.cuh has them.
#include "linear/quantized_linear.h"

#include "linear/few_rows_kernel_cuda.cuh"
#include "linear/few_rows_rings_cuda.cuh"
#include "linear/quantized_any_cuda.cuh"
#include "linear/quantized_integers_cuda.cuh"
#include "linear/quantized_products_cuda.cuh"
#include "linear/quantized_warpgroups_cuda.cuh"

namespace dsx {
namespace {

constexpr const char* kOp = "quantized_linear";
constexpr const char* kUnpack = "unpack_weight";

template <class Call_>
struct ByTensorCores {
  using Call = Call_;
  using Weight = uint8_t;
  static constexpr bool kScaled = true;
  static constexpr bool kGrouped = false;
  static constexpr int kTogether = 1;
  template <int kColumnTiles>
  static constexpr int kMostWarps = kColumnTiles > 4 ? 7 : 14;

  DSX_HOST_DEVICE static cuda::Operand<Weight> weight(const Call& call) {
    Rows rows;
    rows.data = const_cast<uint8_t*>(call.weight.codes);
    rows.pitch = call.weight.row_bytes;
    return {rows, call.weight.rows, call.weight.row_bytes};
  }
  DSX_HOST_DEVICE static const cuda::Scales& scales(const Call& call) { return call.scales; }
};

template <class T_, bool kAsymmetric>
struct AsFloats : ByTensorCores<cuda::CodesCall> {
  using T = T_;
  using X = T;
  template <int kColumnTiles>
  using Products = cuda::CodeProducts<T, DSX_BITS, kColumnTiles, kAsymmetric>;
  static constexpr int kXLines = 16 / DSX_BITS;

  DSX_HOST_DEVICE static cuda::Operand<X> x(const Call& call) {
    return {call.x, call.rows, call.length};
  }
};

// The same of groups of 128 with up to 16 rows of x, on 9.0 and newer alone.
template <class T_, bool kAsymmetric>
struct InRings : AsFloats<T_, kAsymmetric> {
  static constexpr bool kOffsets = kAsymmetric;
  template <int kColumnTiles>
  using Products = cuda::CodesOf128<T_, DSX_BITS, kColumnTiles, kAsymmetric>;
  static constexpr int kGroups = Products<1>::kGroups;
};

// The same, symmetric, with more than 16 rows of x, on 9.0 alone.
template <class T_>
struct ByWarpgroups : AsFloats<T_, false> {
  using T = T_;
  template <int kColumnTiles>
  using Products = cuda::WarpgroupProducts<T, DSX_BITS, kColumnTiles>;
  static constexpr int kTogether = cuda::kGroupWarps;
  template <int kColumnTiles>
  static constexpr int kMostWarps = 8;
};

template <class T_>
struct AsIntegers : ByTensorCores<cuda::IntegersCall> {
  using T = T_;
  using X = uint8_t;
  template <int kColumnTiles>
  using Products = cuda::IntegerTiles<kColumnTiles>;
  static constexpr int kXLines = 8 / DSX_BITS;

  DSX_HOST_DEVICE static cuda::Operand<X> x(const Call& call) {
    Rows rows;
    rows.data = call.bytes.bytes;
    rows.pitch = call.bytes.pitch;
    return {rows, call.rows, call.bytes.pitch};
  }
};

template <class T, bool kAsymmetric, int kTiles>
void launch_tensor_cores(const cuda::CodesCall& call, const cuda::Device& device,
                         cudaStream_t stream) {
  if constexpr (kTiles <= 2) {
    using Kind = InRings<T, kAsymmetric>;
    if (cuda::launch_in_rings<Kind, kTiles>(call, device, stream, kOp)) return;
  } else if constexpr (!kAsymmetric) {
    const bool fits = device.major == 9 && device.minor == 0;
    if (fits && cuda::launch_few_rows<ByWarpgroups<T>, kTiles>(call, device, stream, kOp)) return;
  }
  cuda::launch_few_rows<AsFloats<T, kAsymmetric>, kTiles>(call, device, stream, kOp);
}

// All of them give a row the same bits.
template <class T>
void launch_tensor_cores(const QuantizedLinear& call, const cuda::Device& device,
                         cudaStream_t stream) {
  const cuda::CodesCall made{call, cuda::scales_of<DSX_BITS>(call.weight)};
  cuda::with_column_tiles(call.rows, [&](auto tiles) {
    constexpr int kTiles = decltype(tiles)::value;
    if (call.weight.offsets == nullptr) {
      launch_tensor_cores<T, false, kTiles>(made, device, stream);
    } else {
      launch_tensor_cores<T, true, kTiles>(made, device, stream);
    }
  });
}

// A warp for each column, then, if there is a norm after the layer, a thread for each result.
template <class T, class... Parameters, class... Arguments>
void launch_any(void (*kernel)(QuantizedLinear, Parameters...), const QuantizedLinear& call,
                cudaStream_t stream, Arguments... arguments) {
  const int64_t blocks = ceil_div(call.columns, int64_t(cuda::kAnyWarps));
  kernel<<<unsigned(blocks), cuda::kAnyWarps * cuda::kWarp, 0, stream>>>(call, arguments...);
  if (!call.scaled.is_present()) return;
  const int64_t of_norm = ceil_div(call.rows * call.columns, int64_t(256));
  cuda::begin_norm_kernel<T><<<unsigned(of_norm), 256, 0, stream>>>(call);
}

// Runs that share a scale if these are 1, 2, 4 ... 32, or 0.
int even_runs_of(const PackedWeight& weight) {
  const int64_t runs = weight.group / cuda::kRun;
  const bool whole = weight.group % cuda::kRun == 0 && weight.group < weight.length;
  return whole && runs <= cuda::kWarp && (runs & (runs - 1)) == 0 ? int(runs) : 0;
}

template <class T>
void launch_integers(const QuantizedLinear& call, void* workspace, const cuda::Device& device,
                     cudaStream_t stream) {
  cuda::round_rows_kernel<T><<<unsigned(call.rows), 256, 0, stream>>>(call, workspace);
  if (cuda::fits_integers(call.weight)) {
    const cuda::CodesCall scaled{call, cuda::scales_of<DSX_BITS>(call.weight)};
    const cuda::IntegersCall made{scaled, cuda::RowsOfBytes(call, workspace)};
    return cuda::with_column_tiles(call.rows, [&](auto tiles) {
      cuda::launch_few_rows<AsIntegers<T>, decltype(tiles)::value>(made, device, stream, kOp);
    });
  }
  const auto kernel = call.rows == 1 ? cuda::integer_kernel<T, 1> : cuda::integer_kernel<T, 8>;
  launch_any<T>(kernel, call, stream, workspace, even_runs_of(call.weight));
}

}  // namespace

int64_t quantized_workspace_bytes(const QuantizedLinear& call) {
  return call.integer ? cuda::RowsOfBytes(call, nullptr).size(call) : 0;
}

void quantized_linear_cuda(const QuantizedLinear& call, void* workspace, void* stream) {
  cuda::check(cudaPeekAtLastError(), kOp);  // of somebody before
  const cuda::Device device(kOp);
  const auto queue = cudaStream_t(stream);
  with_storage_type(call.x.dtype, [&](auto storage) {
    using T = decltype(storage);
    if (call.integer) return launch_integers<T>(call, workspace, device, queue);
    if constexpr (sizeof(T) == 2) {
      const bool fits =
          call.weight.format != QuantFormat::nf4 && cuda::groups_fit_lines<DSX_BITS>(call.weight);
      if (fits) return launch_tensor_cores<T>(call, device, queue);
    }
    const auto kernel =
        call.rows == 1 ? cuda::quantized_any_kernel<T, 1> : cuda::quantized_any_kernel<T, 8>;
    launch_any<T>(kernel, call, queue, cuda::all_aligned({call.x}));
  });
  cuda::check(cudaPeekAtLastError(), kOp);
}

void unpack_weight_cuda(const PackedWeight& weight, const Rows& out, void* stream) {
  cuda::check(cudaPeekAtLastError(), kUnpack);  // of somebody before
  const bool even = cuda::are_eights_even(weight, out);
  const int64_t eights = ceil_div(weight.length, int64_t(8));
  const int64_t bands = ceil_div(weight.rows, int64_t(even ? cuda::kUnpackedRows : 1));
  const dim3 blocks(unsigned(ceil_div(eights, int64_t(cuda::kUnpackThreads))),
                    unsigned(std::min<int64_t>(bands, cuda::kMostGridRows)));
  with_storage_type(out.dtype, [&](auto storage) {
    using T = decltype(storage);
    const auto kernel = even ? cuda::unpack_even_kernel<T> : cuda::unpack_kernel<T>;
    kernel<<<blocks, cuda::kUnpackThreads, 0, cudaStream_t(stream)>>>(weight, out);
  });
  cuda::check(cudaPeekAtLastError(), kUnpack);
}

}  // namespace dsx

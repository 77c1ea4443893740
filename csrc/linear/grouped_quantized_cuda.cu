// grouped_quantized_linear of few rows on CUDA: by tensor cores the kind of grouped rows whose
// weights are codes; what these do not take, share by share.
#include "linear/grouped_quantized.h"

#include "linear/grouped_rows_cuda.cuh"
#include "linear/quantized_integers_cuda.cuh"
#include "linear/quantized_products_cuda.cuh"

namespace dsx {
namespace {

constexpr const char* kOp = "grouped_quantized_linear";

struct GroupedCodes : cuda::CodesCall {
  cuda::RowGroups groups;
};

struct GroupedIntegers : cuda::IntegersCall {
  cuda::RowGroups groups;
};

template <class Call_>
struct Grouped {
  using Call = Call_;
  using Weight = uint8_t;
  static constexpr bool kScaled = true;
  static constexpr bool kGrouped = true;
  static constexpr int kTogether = 1;

  DSX_HOST_DEVICE static cuda::Operand<Weight> weight(const Call& call) {
    Rows rows;
    rows.data = const_cast<uint8_t*>(call.weight.codes);
    rows.pitch = call.weight.row_bytes;
    return {rows, call.weight.rows, call.weight.row_bytes};
  }
  DSX_HOST_DEVICE static const cuda::Scales& scales(const Call& call) { return call.scales; }
};

template <class T_, bool kAsymmetric>
struct AsFloats : Grouped<GroupedCodes> {
  using T = T_;
  using X = T;
  template <int kColumnTiles>
  using Products = cuda::CodeProducts<T, DSX_BITS, kColumnTiles, kAsymmetric>;
  static constexpr int kXLines = 16 / DSX_BITS;

  DSX_HOST_DEVICE static cuda::Operand<X> x(const Call& call) {
    return {call.x, call.rows, call.length};
  }
};

template <class T_>
struct AsIntegers : Grouped<GroupedIntegers> {
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

constexpr int kTogether = 8;  // rows of a share of what follows

// What an expert's rows are, as a call of their own.
template <class T>
__device__ QuantizedLinear call_of(const GroupedCodes& call, const cuda::Share& share) {
  QuantizedLinear own = call;
  const int64_t rows = call.weight_rows(), before = share.number * rows;
  own.rows = share.rows;
  own.x.data = call.x.row<T>(share.first).address;
  own.out.data = call.out.even_row<T>(share.first).address;
  if (call.bias.is_present()) own.bias.data = call.bias.row<T>(share.number).address;
  own.weight.codes += before * call.weight.row_bytes;
  own.weight.scales += before;
  if (own.weight.offsets != nullptr) own.weight.offsets += before;
  own.weight.rows = rows;
  return own;
}

// A warp has a column of a share.
template <class T>
__global__ void __launch_bounds__(cuda::kAnyWarps* cuda::kWarp)
    grouped_any_kernel(const __grid_constant__ GroupedCodes call, cuda::RowsOfBytes bytes,
                       bool aligned) {
  __shared__ cuda::Shares<kTogether> shares;
  if (threadIdx.x < cuda::kWarp) shares.find(call.groups, int(call.rows));
  __syncthreads();
  if (int(blockIdx.y) >= shares.count()) return;
  const cuda::Share share = shares.at(int(blockIdx.y));
  const QuantizedLinear own = call_of<T>(call, share);
  bytes.bytes += share.first * bytes.pitch;
  bytes.scales += share.first;
  if (call.integer) return cuda::integer_columns<T, kTogether>(own, bytes, 0);
  cuda::any_columns<T, kTogether>(own, aligned);
}

template <class T>
__global__ void __launch_bounds__(256) clear_kernel(const __grid_constant__ GroupedCodes call) {
  const int end = call.groups.offsets[call.groups.experts - 1];
  cuda::clear_rows_of_nobody<T>(call, cuda::row_of(end, int(call.rows)));
}

template <class T>
void launch_any(const GroupedCodes& call, const cuda::RowsOfBytes& bytes, cudaStream_t stream) {
  const int64_t experts = std::min(call.groups.experts, call.rows);
  const dim3 blocks(unsigned(ceil_div(call.columns, int64_t(cuda::kAnyWarps))),
                    unsigned((call.rows + experts * (kTogether - 1)) / kTogether));
  grouped_any_kernel<T><<<blocks, cuda::kAnyWarps * cuda::kWarp, 0, stream>>>(
      call, bytes, cuda::all_aligned({call.x}));
  clear_kernel<T><<<unsigned(std::min<int64_t>(call.rows, 64)), 256, 0, stream>>>(call);
}

template <class T>
void launch_tensor_cores(const GroupedQuantized& call, const GroupedCodes& made,
                         const cuda::Device& device, cudaStream_t stream) {
  cuda::with_rows_of_share(call, [&](auto tiles) {
    constexpr int kTiles = decltype(tiles)::value;
    if (call.weight.offsets == nullptr) {
      return cuda::launch_grouped_rows<AsFloats<T, false>, kTiles>(made, device, stream, kOp);
    }
    cuda::launch_grouped_rows<AsFloats<T, true>, kTiles>(made, device, stream, kOp);
  });
}

template <class T>
void launch_integers(const GroupedQuantized& call, const GroupedCodes& made, void* workspace,
                     const cuda::Device& device, cudaStream_t stream) {
  const cuda::RowsOfBytes bytes(made, workspace);
  cuda::round_rows_kernel<T><<<unsigned(call.rows), 256, 0, stream>>>(made, workspace);
  if (!cuda::fits_integers(call.weight)) return launch_any<T>(made, bytes, stream);
  const GroupedIntegers integers{{made, bytes}, made.groups};
  cuda::with_rows_of_share(call, [&](auto tiles) {
    cuda::launch_grouped_rows<AsIntegers<T>, decltype(tiles)::value>(integers, device, stream, kOp);
  });
}

// The call as a skinny GEMM, all but that its rows have weights of their own.
GroupedCodes codes_of(const GroupedQuantized& call, const FewRows& few) {
  GroupedCodes made = {};
  static_cast<FewRows&>(made) = few;
  made.weight = call.weight;
  made.integer = call.integer;
  made.scales = cuda::scales_of<DSX_BITS>(call.weight);
  made.groups = {call.experts, call.offsets};
  return made;
}

}  // namespace

int64_t grouped_workspace_bytes(const GroupedQuantized& call) {
  const int64_t gathered = cuda::gathered_bytes(call);
  if (!call.integer) return gathered;
  FewRows few = {};
  few.rows = call.rows;
  const GroupedCodes made = codes_of(call, few);
  return gathered + cuda::RowsOfBytes(made, nullptr).size(made);
}

void grouped_quantized_cuda(const GroupedQuantized& call, void* workspace, void* stream) {
  cuda::check(cudaPeekAtLastError(), kOp);  // of somebody before
  const cuda::Device device(kOp);
  const auto queue = cudaStream_t(stream);
  const GroupedCodes made = codes_of(call, cuda::few_rows_of(call, workspace, queue, kOp));
  with_storage_type(call.x.dtype, [&](auto storage) {
    using T = decltype(storage);
    if (call.integer) {
      char* const near = static_cast<char*>(workspace) + cuda::gathered_bytes(call);
      return launch_integers<T>(call, made, near, device, queue);
    }
    if constexpr (sizeof(T) == 2) {
      const bool fits =
          call.weight.format != QuantFormat::nf4 && cuda::groups_fit_lines<DSX_BITS>(call.weight);
      if (fits) return launch_tensor_cores<T>(call, made, device, queue);
    }
    launch_any<T>(made, cuda::RowsOfBytes(made, nullptr), queue);
  });
  cuda::check(cudaPeekAtLastError(), kOp);
}

}  // namespace dsx

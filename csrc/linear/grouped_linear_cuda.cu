// grouped_linear of few rows on CUDA: the kind of grouped rows whose weights are floats.
#include "linear/grouped_linear.h"

#include "linear/grouped_rows_cuda.cuh"
#include "linear/skinny_linear_products_cuda.cuh"

namespace dsx {
namespace {

constexpr const char* kOp = "grouped_linear";

struct GroupedCall : FewRows {
  cuda::RowGroups groups;
  Rows weight;
};

template <class T_>
struct Grouped {
  using Call = GroupedCall;
  using T = T_;
  using Weight = T;
  using X = T;
  template <int kColumnTiles>
  using Products = cuda::Products<T, kColumnTiles>;
  static constexpr int kXLines = 1;
  static constexpr bool kScaled = false;
  static constexpr int kTogether = 1;

  DSX_HOST_DEVICE static cuda::Operand<T> weight(const Call& call) {
    return {call.weight, call.groups.experts * call.weight_rows(), call.length};
  }
  DSX_HOST_DEVICE static cuda::Operand<T> x(const Call& call) {
    return {call.x, call.rows, call.length};
  }
};

constexpr int kClearers = 132, kClearThreads = 256;

// A block has every so manieth row.
template <class T>
__global__ void __launch_bounds__(kClearThreads)
    clear_rows_kernel(const __grid_constant__ Rows rows, int count, int64_t columns,
                      const int32_t* end) {
  const int first = cuda::row_of(*end, count);
  for (int row = first + int(blockIdx.x); row < count; row += kClearers) {
    T* const out = rows.even_row<T>(row).address;
    for (int64_t i = threadIdx.x; i < columns; i += kClearThreads) out[i] = cuda::narrow<T>(0.0f);
  }
}

}  // namespace

void clear_rows_cuda(const Rows& rows, int64_t count, int64_t columns, const int32_t* end,
                     void* stream) {
  cuda::check(cudaPeekAtLastError(), kOp);  // of somebody before
  with_storage_type(rows.dtype, [&](auto storage) {
    clear_rows_kernel<decltype(storage)>
        <<<kClearers, kClearThreads, 0, cudaStream_t(stream)>>>(rows, int(count), columns, end);
  });
  cuda::check(cudaGetLastError(), kOp);
}

int64_t grouped_workspace_bytes(const GroupedLinear& call) { return cuda::gathered_bytes(call); }

void grouped_linear_cuda(const GroupedLinear& call, void* workspace, void* stream) {
  const cuda::Device device(kOp);
  const auto queue = cudaStream_t(stream);
  GroupedCall made{
      cuda::few_rows_of(call, workspace, queue, kOp), {call.experts, call.offsets}, call.weight};
  Rows& weight = made.weight;
  if (weight.group_pitch == weight.group * weight.pitch) weight.group = weight.group_pitch = 0;
  with_storage_type(call.x.dtype, [&](auto storage) {
    cuda::with_rows_of_share(call, [&](auto tiles) {
      cuda::launch_grouped_rows<Grouped<decltype(storage)>, decltype(tiles)::value>(made, device,
                                                                                    queue, kOp);
    });
  });
}

}  // namespace dsx

// Launches block_sparse_attention by tensor cores, for one type; each is compiled in a file of its
// own, side by side, as that takes most of the time that the library takes. With DSX_ELEMENT.
#include "attention/sparse/block_sparse_backward_cuda.cuh"
#include "attention/sparse/block_sparse_launch_cuda.cuh"

namespace dsx::cuda {
namespace {

using Element = DSX_ELEMENT;

// Small blocks come many at once, so that warps wait for each other less often.
constexpr int units_of(int width, int block_units) {
  return width <= 64 && block_units < 2 ? 8 : 4;
}
// Gradients of keys and of values, both in registers, leave less room for products.
constexpr int at_once_of_columns(int width, int block_units) {
  return width > 64 && block_units > 2 ? 2 : block_units;
}

// A warp alone has the 32 rows of a block of 32, and little memory, so that many fit.
template <int kWidth, int kBlockUnits>
using AttendShape = SparseShape<Element, kWidth, kBlockUnits == 1 ? 1 : 2, kBlockUnits, kBlockUnits,
                                kBlockUnits == 2 ? 2 : units_of(kWidth, kBlockUnits)>;
template <int kWidth, int kBlockUnits>
using RowsShape =
    SparseShape<Element, kWidth, 1, kBlockUnits, kBlockUnits, units_of(kWidth, kBlockUnits)>;
template <int kWidth, int kBlockUnits>
using ColumnsShape =
    SparseShape<Element, kWidth, 1, kBlockUnits, at_once_of_columns(kWidth, kBlockUnits),
                units_of(kWidth, kBlockUnits)>;

// `lanes`: how many arrays these are; `numbers`: bytes for each other besides.
template <class Shape, class Kernel>
bool launch(Kernel kernel, const SparseTask& task, int64_t heads, int lanes, int numbers,
            const Device& device, cudaStream_t stream) {
  const int bytes =
      lanes * task.tile * Shape::kRowBytes + 2 * (2 * Shape::kTileBytes + Shape::kTokens * numbers);
  if (bytes > device.shared_of_block) return false;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
        kSparseName);
  const unsigned blocks = unsigned(task.call.batches * heads * task.lists.tiles);
  const int threads = task.tile / Shape::kWarpLanes * 32;
  kernel<<<blocks, threads, size_t(bytes), stream>>>(task);
  check(cudaGetLastError(), kSparseName);
  return true;
}

// Calls body with the shape of this width and block.
template <template <int, int> class Shape, class Body>
bool with_shape(const BlockSparse& call, const Body& body) {
  const auto of_width = [&](auto width) {
    constexpr int kWidth = decltype(width)::value;
    if (call.block == 16 || call.masks > 0) return body(Shape<kWidth, 1>());
    if (call.block == 32) return body(Shape<kWidth, 2>());
    return body(Shape<kWidth, 4>());
  };
  if (call.width <= 64) return of_width(std::integral_constant<int, 64>());
  return of_width(std::integral_constant<int, 128>());
}

}  // namespace

template <>
bool launch_attend<Element>(const SparseTask& task, const Device& device, cudaStream_t stream) {
  return with_shape<AttendShape>(task.call, [&](auto shape) {
    using Shape = decltype(shape);
    return launch<Shape>(attend_kernel<Shape>, task, task.call.heads, 1, 0, device, stream);
  });
}

template <>
bool launch_backward_rows<Element>(const SparseTask& task, const Device& device,
                                   cudaStream_t stream) {
  return with_shape<RowsShape>(task.call, [&](auto shape) {
    using Shape = decltype(shape);
    return launch<Shape>(backward_rows_kernel<Shape>, task, task.call.heads, 2, 0, device, stream);
  });
}

template <>
bool launch_backward_columns<Element>(const SparseTask& task, const Device& device,
                                      cudaStream_t stream) {
  return with_shape<ColumnsShape>(task.call, [&](auto shape) {
    using Shape = decltype(shape);
    return launch<Shape>(backward_columns_kernel<Shape>, task, task.call.kv_heads, 2,
                         int(sizeof(RowNumbers)), device, stream);
  });
}

}  // namespace dsx::cuda

// A norm on CUDA, of the kind that DSX_NORM names: each team of threads takes a few rows one after
// the other.
#include "transformer/norm_layout_cuda.cuh"

namespace dsx {
namespace {

using cuda::kMostBlocks;
using cuda::Layout;
using cuda::RowMoments;
using cuda::Values;

// Blocks of the most threads that shall run on a multiprocessor: so many registers they have.
template <class Team, class T>
constexpr int kResident = Team::kVectors > 0 && sizeof(T) == 2 ? 2 : 1;

// Each team takes a few rows one after the other. W is the storage type of the vectors.
template <class Kind, class Team, class T, class W>
__global__ void __launch_bounds__(Team::kMostThreads, Team::kShort ? 4 : kResident<Team, T>)
    norm_kernel(const __grid_constant__ Norm norm, int64_t rows_of_team, bool is_aligned) {
  const bool aligned = !std::is_same_v<T, Any> || is_aligned;
  const auto vector_at = [&](const Rows& vector, int64_t i, int count) {
    return floats_of(cuda::fetch(vector.even_row<W>(0), i, count, aligned));
  };
  const int64_t first = int64_t(blockIdx.x) * rows_of_team * Team::kTeams + Team::team();
  const int64_t end = ::min(first + rows_of_team * Team::kTeams, norm.rows + Team::team());
  cuda::Moments<Kind, Team, T, false> moments;
#pragma unroll 1
  for (int64_t number = first; number < end; number += Team::kTeams) {
    const int64_t place = ::min(number, norm.rows - 1);
    const Pointer<T> out = norm.out.even_row<T>(place);
    cuda::RowPart<Team, T, 2> row{{norm.x.row<T>(place), norm.residual.row<T>(place)},
                                  number < norm.rows ? norm.length : 0,
                                  aligned,
                                  {}};
    row.fetch_all();
    // While the threads meet, the weight comes, and the next row from memory.
    constexpr bool kHasRoom = Team::kVectors > 0 && sizeof(W) == 2;
    cuda::RowPart<Team, W, 1> weight{{norm.weight.even_row<W>(0)}, row.length, aligned, {}};
    if (number + Team::kTeams < end && number + Team::kTeams < norm.rows) {
      cuda::fetch_ahead<Team>(norm.x.row<T>(number + Team::kTeams), norm.length);
      if (row.tensors[1]) {
        cuda::fetch_ahead<Team>(norm.residual.row<T>(number + Team::kTeams), norm.length);
      }
    }
    const float near = Kind::kCentered ? row.mean_of_first() : 0.0f;
    if (row.tensors[1]) {
      // What is not held is read again from where the sum is wanted, or will be replaced by the
      // result: that has the same dtype then.
      const bool is_wanted = norm.sum.data != nullptr;
      const Pointer<T> sum = is_wanted ? norm.sum.even_row<T>(place) : out;
      row.for_each([&](int, int64_t i, int count, auto& vectors) {
        Values value = floats_of(vectors[0]);
        if (norm.x_bias.data != nullptr) value = value + vector_at(norm.x_bias, i, count);
        value = value + floats_of(vectors[1]);
        vectors[0] = cuda::packed_for(sum, value);
        if (is_wanted || !row.kHeld) cuda::put(sum, i, count, aligned, value);
      });
      row.tensors[0] = sum;
      row.tensors[1] = {};
    }
    if constexpr (kHasRoom) {
      if (weight.tensors[0]) weight.fetch_all();
    }
    const RowMoments found = moments.of(row, near, float(norm.length), norm.eps, nullptr);
    row.for_each([&](int v, int64_t i, int count, auto& vectors) {
      Values scale(1.0f);
      if (weight.tensors[0]) {
        if constexpr (kHasRoom) {
          scale = floats_of(weight.held[v][0]);
        } else {
          scale = vector_at(norm.weight, i, count);
        }
        scale = scale + Values(norm.weight_offset);
      }
      const Values value = found.deviation_of<Kind>(floats_of(vectors[0]));
      const Values inverse(found.inverse);
      const Values result = norm.bias.data != nullptr
                                ? normalized(value, inverse, scale, vector_at(norm.bias, i, count))
                                : normalized(value, inverse, scale);
      cuda::put<cuda::Stored::streamed>(out, i, count, aligned, result);
    });
  }
}

}  // namespace

template <class Kind>
void norm_cuda(const Norm& norm, void* stream) {
  if (norm.rows == 0 || norm.length == 0) return;
  cuda::check(cudaPeekAtLastError(), Kind::kOp);  // of somebody before
  const auto vectors = {norm.weight, norm.bias, norm.x_bias};
  Layout layout(norm.rows, norm.length, {norm.x, norm.residual, norm.sum, norm.out}, vectors);
  const bool float_vectors = layout.dtype_of_vectors == Dtype::float32;
  // Of the kinds of vectors, those that people train with have a kernel.
  layout.whole = layout.whole && (float_vectors || layout.dtype_of_vectors == layout.dtype) &&
                 Layout::are_of(vectors, layout.dtype_of_vectors);
  // A few rows, so that the next one can be fetched ahead, where that leaves blocks for every
  // multiprocessor.
  int64_t rows_of_team = (layout.blocks() * layout.block.threads) >> 20;
  rows_of_team = std::clamp<int64_t>(rows_of_team, ceil_div(layout.blocks(), kMostBlocks),
                                     std::max<int64_t>(4, ceil_div(layout.blocks(), kMostBlocks)));
  rows_of_team = std::max<int64_t>(1, rows_of_team);
  const unsigned blocks = unsigned(ceil_div(layout.blocks(), rows_of_team));
  layout.with_team([&](auto team, auto storage) {
    using Team = decltype(team);
    using T = decltype(storage);
    const auto launch = [&](auto of_vectors) {
      norm_kernel<Kind, Team, T, decltype(of_vectors)>
          <<<blocks, layout.block.threads, 0, cudaStream_t(stream)>>>(norm, rows_of_team,
                                                                      layout.aligned);
    };
    if constexpr (!std::is_same_v<T, Any>) {
      if (float_vectors) return launch(float{});
    }
    launch(storage);
  });
  cuda::check(cudaGetLastError(), Kind::kOp);
}

template void norm_cuda<DSX_NORM>(const Norm&, void*);

}  // namespace dsx

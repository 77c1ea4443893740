// A norm on CUDA, of the kind that DSX_NORM names: each team of threads takes a row, backward a few
// one after the other. Gradients of vectors are added up by each block over its rows, and a small
// kernel then adds the blocks; where a row is not held in registers, a kernel of its own adds up
// its columns.
#include <climits>

#include "common/cuda/add_partials.cuh"
#include "transformer/norm_columns_cuda.cuh"
#include "transformer/norm_cuda.cuh"

namespace dsx {
namespace {

using cuda::kRowVector;
using cuda::RowMoments;
using cuda::Values;

// Blocks of the most threads that shall run on a multiprocessor: so many registers they have.
template <class Team, class T>
constexpr int kResident = Team::kVectors > 0 && sizeof(T) == 2 ? 2 : 1;

// Each team takes a row. W is the storage type of the vectors.
template <class Kind, class Team, class T, class W>
__global__ void __launch_bounds__(Team::kMostThreads, Team::kShort ? 4 : kResident<Team, T>)
    norm_kernel(const __grid_constant__ Norm norm, int64_t blocks, bool is_aligned) {
  const bool aligned = !std::is_same_v<T, Any> || is_aligned;
  const auto vector_at = [&](const Rows& vector, int64_t i, int count) {
    return floats_of(cuda::fetch(vector.even_row<W>(0), i, count, aligned));
  };
  cuda::Moments<Kind, Team, T, false> moments;
#pragma unroll 1
  for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const int64_t number = block * Team::kTeams + Team::team();
    const int64_t place = ::min(number, norm.rows - 1);
    const Pointer<T> out = norm.out.even_row<T>(place);
    cuda::RowPart<Team, T, 2> row{{norm.x.row<T>(place), norm.residual.row<T>(place)},
                                  number < norm.rows ? norm.length : 0,
                                  aligned,
                                  {}};
    row.fetch_all();
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
    const RowMoments found = moments.of(row, near, float(norm.length), norm.eps, nullptr);
    row.for_each([&](int, int64_t i, int count, auto& vectors) {
      Values weight(1.0f);
      if (norm.weight.data != nullptr) {
        weight = vector_at(norm.weight, i, count) + Values(norm.weight_offset);
      }
      const Values value = found.deviation_of<Kind>(floats_of(vectors[0]));
      Values result = normalized(value, Values(found.inverse), weight);
      if (norm.bias.data != nullptr) result = result + vector_at(norm.bias, i, count);
      cuda::put<cuda::Stored::streamed>(out, i, count, aligned, result);
    });
  }
}

// The gradient of what was normalized.
template <class Kind>
__device__ inline Values gradient(const RowMoments& row, const Values& deviation,
                                  const Values& grad, const Values& weight) {
  Values weighted = grad * weight;
  if constexpr (Kind::kCentered) weighted = weighted - Values(row.grad_mean);
  return grad_of_x(deviation, weighted, Values(row.inverse), Values(row.share));
}

// Whether a block adds up what its rows add to the gradients of vectors.
template <class Team>
constexpr bool kAddsUp = Team::kShort || Team::kVectors > 0;

// The weight where it is held for all rows of a block, or read again for each. Ones if absent.
template <class Team>
struct Weight {
  static constexpr bool kHeld = Team::kVectors > 0;
  const Rows& rows;
  float offset;
  bool aligned;
  cuda::SharedColumns<Team> held = {};

  __device__ void begin(float4* memory, int64_t length) {
    held.places = memory + threadIdx.x;
    cuda::for_each_row_vector<Team>(
        length, [&](int v, int64_t i, int count) { held.set(v, read(i, count)); });
  }
  __device__ Values get(int v, int64_t i, int count) const {
    if constexpr (kHeld) return held.get(v);
    return read(i, count);
  }

 private:
  __device__ Values read(int64_t i, int count) const {
    if (rows.data == nullptr) return 1.0f;
    return floats_of(cuda::fetch(rows.even_row<Any>(0), i, count, aligned)) + Values(offset);
  }
};

template <class Kind, class Team, class T>
__global__ void __launch_bounds__(Team::kMostThreads, Team::kShort ? 3 : 1)
    backward_kernel(const __grid_constant__ NormBackward norm, int rows_of_team,
                    OfVectors<float*> partials,  // [blocks, length] written; null: not wanted
                    RowMoments* of_rows,         // [rows] written; null: not wanted
                    bool is_aligned) {
  const bool aligned = !std::is_same_v<T, Any> || is_aligned;
  using Sum = std::conditional_t<Team::kShort, cuda::RegisterSum<Team>, cuda::SharedColumns<Team>>;
  Sum of_weight, of_bias, of_x_bias;
  Weight<Team> weight{norm.weight, norm.weight_offset, is_aligned};
  if constexpr (Team::kVectors > 0) {
    extern __shared__ __align__(16) uint4 shared_vectors[];
    float4* memory = reinterpret_cast<float4*>(shared_vectors);
    const auto next = [&] {
      float4* mine = memory;
      memory += cuda::SharedColumns<Team>::size(int(blockDim.x));
      return mine;
    };
    weight.begin(next(), norm.length);
    if constexpr (!Team::kShort) {
      if (partials.weight != nullptr) of_weight.begin(next(), norm.length);
      if (partials.bias != nullptr) of_bias.begin(next(), norm.length);
      if (partials.x_bias != nullptr) of_x_bias.begin(next(), norm.length);
    }
  }
  cuda::Moments<Kind, Team, T, true> moments;
  int64_t number = int64_t(blockIdx.x) * rows_of_team * Team::kTeams + Team::team();
#pragma unroll 1
  for (int turn = 0; turn < rows_of_team; ++turn, number += Team::kTeams) {
    const int64_t place = ::min(number, norm.rows - 1);
    const Pointer<T> grad_x = norm.grad_x.even_row<T>(place);
    cuda::RowPart<Team, T, 2> row{{norm.x.row<T>(place), norm.grad_out.row<T>(place)},
                                  number < norm.rows ? norm.length : 0,
                                  aligned,
                                  {}};
    cuda::RowPart<Team, T, 1> grad_sum{{norm.grad_sum.row<T>(place)}, 0, aligned, {}};
    if (grad_sum.tensors[0]) grad_sum.length = row.length;
    row.fetch_all();
    cuda::fetch_ahead<Team>(grad_sum.tensors[0], grad_sum.length);
    if (turn + 1 < rows_of_team && number + Team::kTeams < norm.rows) {
      cuda::fetch_ahead<Team>(norm.x.row<T>(number + Team::kTeams), norm.length);
      cuda::fetch_ahead<Team>(norm.grad_out.row<T>(number + Team::kTeams), norm.length);
    }
    const float near = Kind::kCentered ? row.mean_of_first_of(0) : 0.0f;
    const RowMoments found = moments.of(row, near, float(norm.length), norm.eps,
                                        [&](int v, int64_t i, int count, auto& vectors) {
      return floats_of(vectors[1]) * weight.get(v, i, count);
    });
    constexpr bool kHasRoom = Team::kVectors > 0 && sizeof(cuda::RowVector<T>) == 16;
    if constexpr (kHasRoom) grad_sum.fetch_all();
    row.for_each([&](int v, int64_t i, int count, auto& vectors) {
      const Values value = found.deviation_of<Kind>(floats_of(vectors[0]));
      const Values grad = floats_of(vectors[1]);
      Values result = gradient<Kind>(found, value, grad, weight.get(v, i, count));
      if (grad_sum.tensors[0]) {
        if constexpr (kHasRoom) {
          result = result + floats_of(grad_sum.held[v][0]);
        } else {
          result = result + floats_of(cuda::fetch(grad_sum.tensors[0], i, count, aligned));
        }
      }
      cuda::put(grad_x, i, count, aligned, result);
      if constexpr (kAddsUp<Team>) {
        of_weight.add(grad_of_weight(value, grad, Values(found.inverse)), v);
        of_bias.add(grad, v);
        of_x_bias.add(result, v);
      }
    });
    if (of_rows != nullptr && Team::thread() == 0 && row.length > 0) of_rows[number] = found;
  }
  if constexpr (kAddsUp<Team>) {
    const int64_t first = int64_t(blockIdx.x) * norm.length;
    const auto of_block = [&](float* all) { return all == nullptr ? nullptr : all + first; };
    of_weight.finish(of_block(partials.weight), norm.length);
    of_bias.finish(of_block(partials.bias), norm.length);
    of_x_bias.finish(of_block(partials.x_bias), norm.length);
  }
}

// What rows that are not held add to the gradients of vectors: a thread adds up eight columns of
// one group of rows.
template <class Kind>
__global__ void __launch_bounds__(256)
    columns_kernel(const __grid_constant__ NormBackward norm,
                   const RowMoments* of_rows,  // [rows]
                   int64_t rows_of_group,
                   OfVectors<float*> partials,  // [groups, length] written; null: not wanted
                   bool aligned) {
  const int64_t i = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * kRowVector;
  if (i >= norm.length) return;
  const int count = int(::min(int64_t(kRowVector), norm.length - i));
  const auto fetch = [&](const Rows& rows, int64_t row) {
    return floats_of(cuda::fetch(rows.row<Any>(row), i, count, aligned));
  };
  Values weight(1.0f);
  if (norm.weight.data != nullptr) weight = fetch(norm.weight, 0) + Values(norm.weight_offset);
  Values of_weight(0.0f), of_bias(0.0f), of_x_bias(0.0f);
  const int64_t first = int64_t(blockIdx.y) * rows_of_group;
  const int64_t end = ::min(first + rows_of_group, norm.rows);
#pragma unroll 1
  for (int64_t row = first; row < end; ++row) {
    const RowMoments found = of_rows[row];
    const Values grad = fetch(norm.grad_out, row);
    const Values value = found.deviation_of<Kind>(fetch(norm.x, row));
    of_weight = of_weight + grad_of_weight(value, grad, Values(found.inverse));
    of_bias = of_bias + grad;
    if (partials.x_bias == nullptr) continue;
    of_x_bias = of_x_bias + gradient<Kind>(found, value, grad, weight);
    if (norm.grad_sum.data != nullptr) of_x_bias = of_x_bias + fetch(norm.grad_sum, row);
  }
  const auto store = [&](float* memory, const Values& sum) {
    if (memory == nullptr) return;
    const Pointer<float> target{memory + int64_t(blockIdx.y) * norm.length + i};
    cuda::store<cuda::Access::single>(target, sum, count);
  };
  store(partials.weight, of_weight);
  store(partials.bias, of_bias);
  store(partials.x_bias, of_x_bias);
}

constexpr int64_t kMostBlocks = INT_MAX;

bool is_there(const Rows& rows) { return rows.data != nullptr; }

// How the rows of one call lie, and its vectors.
struct Layout {
  int64_t rows, length;
  Dtype dtype, dtype_of_vectors;
  bool aligned, whole;  // whole: they can be accessed as vectors of `dtype`
  cuda::RowBlock block;

  Layout(int64_t count, int64_t n, std::initializer_list<Rows> all,
         std::initializer_list<Rows> vectors)
      : rows(count),
        length(n),
        dtype(all.begin()->dtype),
        dtype_of_vectors(dtype),
        aligned(cuda::all_aligned(all) && cuda::all_aligned(vectors)),
        block(n) {
    for (const Rows& vector : vectors) {
      if (is_there(vector)) dtype_of_vectors = vector.dtype;
    }
    whole = aligned && length % kRowVector == 0 && are_of(all, dtype);
  }

  static bool are_of(std::initializer_list<Rows> some, Dtype type) {
    return std::all_of(some.begin(), some.end(),
                       [&](const Rows& each) { return !is_there(each) || each.dtype == type; });
  }

  // Calls body(team, storage).
  template <class Body>
  void with_team(const Body& body) const {
    const auto choose = [&](auto held, auto not_held) {
      if (!whole) return body(not_held, Any{});
      with_storage_type(dtype, [&](auto storage) {
        if (length <= cuda::kLongestHeldRow) return body(held, storage);
        if constexpr (!decltype(held)::kShort) {
          // Long rows of float16 are rare: they do not get kernels of their own.
          using Long =
              std::conditional_t<std::is_same_v<decltype(storage), Half>, Any, decltype(storage)>;
          body(not_held, Long{});
        }
      });
    };
    if (block.teams > 1) return choose(cuda::RowTeam<true, true>{}, cuda::RowTeam<true, false>{});
    choose(cuda::RowTeam<false, true>{}, cuda::RowTeam<false, false>{});
  }

  int64_t blocks() const { return ceil_div(rows, block.teams); }
};

// Blocks of a backward kernel that adds up rows: as many as a large device runs all at once,
// whatever the device, as sums depend on their number. A float adds up 256 rows at the most.
struct AddingGrid {
  int64_t blocks, rows_of_team;

  AddingGrid(int64_t rows, int64_t length) {
    const cuda::RowBlock block(length);
    const int resident_threads = block.teams > 1 ? 768 : 512;  // as they need registers
    const int64_t teams = 128 * (resident_threads / block.threads) * block.teams;
    rows_of_team = std::clamp<int64_t>(ceil_div(rows, teams), 1, 256);
    blocks = ceil_div(rows, rows_of_team * block.teams);
  }
};

// Groups of rows that columns_kernel adds up, in blocks that fill a large device, and the same.
struct ColumnsGrid {
  int64_t threads, blocks, groups, rows_of_group;

  ColumnsGrid(int64_t rows, int64_t length) {
    const int64_t vectors = ceil_div(length, kRowVector);
    threads = std::min<int64_t>(256, ceil_div(vectors, cuda::kWarp) * cuda::kWarp);
    blocks = ceil_div(vectors, threads);
    const int64_t wanted = std::max<int64_t>(1, (int64_t(1) << 18) / (blocks * threads));
    rows_of_group = std::clamp<int64_t>(ceil_div(rows, wanted), 1, 256);
    rows_of_group = std::max(rows_of_group, ceil_div(rows, 65535));
    groups = ceil_div(rows, rows_of_group);
  }
};

int wanted(const OfVectors<Rows>& grads) {
  return is_there(grads.weight) + is_there(grads.bias) + is_there(grads.x_bias);
}

// How a backward pass goes about its sums over rows.
struct Plan {
  Layout layout;
  bool in_blocks;    // each block adds up its rows, or columns_kernel does
  int64_t groups;    // of rows that have sums
  int shared_bytes;  // of a block, for vectors

  Plan(const NormBackward& norm, const OfVectors<Rows>& grads, const char* op)
      : layout(norm.rows, norm.length, {norm.x, norm.grad_out, norm.grad_sum, norm.grad_x},
               {norm.weight}) {
    const bool is_short = layout.block.teams > 1;
    const int sums = is_short ? 0 : wanted(grads);
    const int vectors_of_thread = is_short ? 1 : cuda::kHeldVectors;
    shared_bytes = (1 + sums) * layout.block.threads * vectors_of_thread * kRowVector * 4;
    const bool is_held = layout.whole && norm.length <= cuda::kLongestHeldRow;
    if (is_held && shared_bytes > kShared) layout.whole = shared_bytes + 2048 <= most_shared(op);
    in_blocks = is_short || (is_held && layout.whole);
    if (!is_held || !layout.whole) shared_bytes = 0;
    groups = in_blocks ? AddingGrid(norm.rows, norm.length).blocks
                       : ColumnsGrid(norm.rows, norm.length).groups;
  }

  static constexpr int kShared = 40 << 10;  // every device has so much beside what is static

  static int most_shared(const char* op) {
    int device = 0, bytes = 0;
    cuda::check(cudaGetDevice(&device), op);
    cuda::check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
                op);
    return bytes;
  }
};

// The vectors whose gradients are wanted have partial sums one after the other.
OfVectors<float*> partials_in(float* workspace, const OfVectors<Rows>& grads, int64_t floats) {
  const auto next = [&](const Rows& grad) -> float* {
    if (!is_there(grad)) return nullptr;
    float* partial = workspace;
    workspace += floats;
    return partial;
  };
  OfVectors<float*> partials;
  partials.weight = next(grads.weight);
  partials.bias = next(grads.bias);
  partials.x_bias = next(grads.x_bias);
  return partials;
}

template <class Kind>
void run_backward(const NormBackward& norm, const Plan& plan, const OfVectors<float*>& partials,
                  RowMoments* of_rows, cudaStream_t stream) {
  constexpr const char* op = Kind::kBackwardOp;
  AddingGrid grid(norm.rows, norm.length);
  if (!plan.in_blocks) {
    grid.blocks = std::min(plan.layout.blocks(), kMostBlocks);
    grid.rows_of_team = ceil_div(plan.layout.blocks(), grid.blocks);
  }
  plan.layout.with_team([&](auto team, auto storage) {
    const auto kernel = backward_kernel<Kind, decltype(team), decltype(storage)>;
    if (plan.shared_bytes > Plan::kShared) {
      cuda::check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       plan.shared_bytes),
                  op);
    }
    kernel<<<unsigned(grid.blocks), plan.layout.block.threads, plan.shared_bytes, stream>>>(
        norm, int(grid.rows_of_team), partials, of_rows, plan.layout.aligned);
  });
  cuda::check(cudaGetLastError(), op);
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
  const int64_t blocks = layout.blocks();
  layout.with_team([&](auto team, auto storage) {
    using Team = decltype(team);
    using T = decltype(storage);
    const auto launch = [&](auto of_vectors) {
      norm_kernel<Kind, Team, T, decltype(of_vectors)>
          <<<unsigned(std::min(blocks, kMostBlocks)), layout.block.threads, 0,
             cudaStream_t(stream)>>>(norm, blocks, layout.aligned);
    };
    if constexpr (!std::is_same_v<T, Any>) {
      if (float_vectors) return launch(float{});
    }
    launch(storage);
  });
  cuda::check(cudaGetLastError(), Kind::kOp);
}

template <class Kind>
int64_t norm_backward_workspace(const NormBackward& norm, const OfVectors<Rows>& grads) {
  if (wanted(grads) == 0) return 0;
  const Plan plan(norm, grads, Kind::kBackwardOp);
  const int64_t moments =
      plan.in_blocks ? 0 : norm.rows * int64_t(sizeof(RowMoments) / sizeof(float));
  return wanted(grads) * plan.groups * norm.length + moments;
}

template <class Kind>
void norm_backward_cuda(const NormBackward& norm, const OfVectors<Rows>& grads, float* workspace,
                        void* stream) {
  if (norm.length == 0) return;
  constexpr const char* op = Kind::kBackwardOp;
  const cudaStream_t queue = cudaStream_t(stream);
  cuda::check(cudaPeekAtLastError(), op);
  const Plan plan(norm, grads, Kind::kBackwardOp);
  const int64_t floats = plan.groups * norm.length;
  const OfVectors<float*> partials = partials_in(workspace, grads, floats);
  const bool in_columns = wanted(grads) > 0 && !plan.in_blocks;
  float* behind = workspace + wanted(grads) * floats;
  RowMoments* of_rows = in_columns ? reinterpret_cast<RowMoments*>(behind) : nullptr;
  if (norm.rows > 0) run_backward<Kind>(norm, plan, partials, of_rows, queue);
  if (norm.rows > 0 && in_columns) {
    const ColumnsGrid grid(norm.rows, norm.length);
    columns_kernel<Kind>
        <<<dim3(unsigned(grid.blocks), unsigned(grid.groups)), unsigned(grid.threads), 0, queue>>>(
            norm, of_rows, grid.rows_of_group, partials, plan.layout.aligned);
    cuda::check(cudaGetLastError(), op);
  }
  const auto add = [&](const float* partial, const Rows& grad) {
    if (!is_there(grad)) return;
    cuda::add_partials(partial, plan.groups, norm.length, grad, op, queue);
  };
  add(partials.weight, grads.weight);
  add(partials.bias, grads.bias);
  add(partials.x_bias, grads.x_bias);
}

template void norm_cuda<DSX_NORM>(const Norm&, void*);
template int64_t norm_backward_workspace<DSX_NORM>(const NormBackward&, const OfVectors<Rows>&);
template void norm_backward_cuda<DSX_NORM>(const NormBackward&, const OfVectors<Rows>&, float*,
                                           void*);

}  // namespace dsx

// A norm on CUDA, of the kind that DSX_NORM names: each team of threads takes a few rows one after
// the other. Gradients of vectors are added up by each block over its rows, and a small kernel then
// adds the blocks; where a row is not held in registers, a kernel of its own adds up its columns.
#include "common/cuda/add_partials.cuh"
#include "transformer/norm_columns_cuda.cuh"
#include "transformer/norm_cuda.cuh"

namespace dsx {
namespace {

using cuda::kRowVector;
using cuda::RowMoments;
using cuda::Values;

// W is the storage type of the vectors. Without the registers for a residual, twice as many rows
// are under way.
template <class Kind, class Team, class T, class W, bool kResidual>
__global__ void __launch_bounds__(Team::kMostThreads, kResidual ? 1 : 2)
    norm_kernel(const __grid_constant__ Norm norm, int rows_of_team, bool is_aligned) {
  const bool aligned = !std::is_same_v<T, Any> || is_aligned;
  using Reader = cuda::TwiceRead<Team, T, 1, cuda::WholeRowOf<T, 1>>;
  const auto row_at = [&](int64_t row) {
    if (row >= norm.rows) return typename Reader::Row{{}, 0};
    return typename Reader::Row{{norm.x.row<T>(row)}, norm.length};
  };
  Reader reader(aligned);
  reader.begin(row_at(int64_t(blockIdx.x) * rows_of_team * Team::kTeams + Team::team()));
  cuda::Moments<Kind, Team, T, false> moments;
  const cuda::HeldRow<Team, W, false> x_bias{norm.x_bias.even_row<W>(0), {}};
  cuda::for_each_row<Team>(rows_of_team, norm.rows, row_at,
                           [&](int64_t row, auto& current, const auto& next, int64_t ahead) {
    const int64_t place = ::min(row, norm.rows - 1);
    const Pointer<T> out = norm.out.even_row<T>(place);
    cuda::HeldRow<Team, T> residual = {};
    if constexpr (kResidual) residual.row = norm.residual.row<T>(place);
    const bool is_added = kResidual && residual.row;
    cuda::HeldRow<Team, W, cuda::kHasRoomFor<Team, W>> weight{norm.weight.even_row<W>(0), {}};
    const cuda::HeldRow<Team, W, false> bias{norm.bias.even_row<W>(0), {}};
    if (is_added) residual.fetch_all(current.length, aligned);
    weight.fetch_all(current.length, aligned);
    if (is_added && Team::kVectors == 0) cuda::fetch_ahead<Team>(residual.row, current.length);
    if (is_added && Team::kVectors > 0 && next.length > 0) {
      cuda::fetch_ahead<Team>(norm.residual.row<T>(ahead), next.length);
    }
    // The sum is where it is wanted, or for the time being where the result will be: it has the
    // same dtype then.
    const Pointer<T> sum = norm.sum.data != nullptr ? norm.sum.even_row<T>(place) : out;
    auto current_again = current;
    if (is_added) current_again.tensors[0] = sum;
    const auto first_value_of = [&](int v, int64_t i, int count, const Values(&read)[1]) {
      if (!is_added) return read[0];
      Values value = read[0];
      if (x_bias.row) value = value + x_bias.get(v, i, count, aligned);
      value = value + residual.get(v, i, count, aligned);
      const cuda::RowVector<T> stored = cuda::put(sum, i, count, aligned, value);
      reader.keep(v, stored);
      return floats_of(stored);
    };
    const RowMoments found = moments.of(reader, current, current_again, next, float(norm.length),
                                        norm.eps, first_value_of, nullptr);
    const Values inverse = found.inverse;
    reader.second(current, next, [&](int v, int64_t i, int count, const Values(&read)[1], bool) {
      const Values value = found.deviation_of<Kind>(read[0]);
      const Values scale = weight.weight(norm.weight_offset, v, i, count, aligned);
      Values result = normalized(value, inverse, scale);
      if (bias.row) result = result + bias.get(v, i, count, aligned);
      cuda::put(out, i, count, aligned, result);
    });
  });
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

template <class Kind, class Team, class T>
__global__ void __launch_bounds__(Team::kMostThreads)
    backward_kernel(const __grid_constant__ NormBackward norm, int rows_of_team,
                    OfVectors<float*> partials,  // [blocks, length] written; null: not wanted
                    RowMoments* of_rows,         // [rows] written; null: not wanted
                    bool is_aligned) {
  const bool aligned = !std::is_same_v<T, Any> || is_aligned;
  using Reader = cuda::TwiceRead<Team, T, 2, cuda::WholeRowOf<T, 2>>;
  using OtherSum = std::conditional_t<Team::kShort, cuda::RegisterSum<Team>, cuda::SharedSum<Team>>;
  const auto row_at = [&](int64_t row) {
    if (row >= norm.rows) return typename Reader::Row{{}, 0};
    return typename Reader::Row{{norm.x.row<T>(row), norm.grad_out.row<T>(row)}, norm.length};
  };
  cuda::RegisterSum<Team> of_weight;
  OtherSum of_bias, of_x_bias;
  if constexpr (kAddsUp<Team> && !Team::kShort) {
    extern __shared__ __align__(16) uint4 shared_vectors[];
    float4* memory = reinterpret_cast<float4*>(shared_vectors);
    if (partials.bias != nullptr) {
      of_bias.begin(memory);
      memory += OtherSum::size(int(blockDim.x));
    }
    if (partials.x_bias != nullptr) of_x_bias.begin(memory);
  }
  Reader reader(aligned);
  reader.begin(row_at(int64_t(blockIdx.x) * rows_of_team * Team::kTeams + Team::team()));
  cuda::Moments<Kind, Team, T, true> moments;
  cuda::for_each_row<Team>(rows_of_team, norm.rows, row_at,
                           [&](int64_t row, auto& current, const auto& next, int64_t /*ahead*/) {
    const int64_t place = ::min(row, norm.rows - 1);
    const Pointer<T> grad_x = norm.grad_x.even_row<T>(place);
    cuda::HeldRow<Team, T, cuda::kHasRoomFor<Team, T>> grad_sum{norm.grad_sum.row<T>(place), {}};
    const cuda::HeldRow<Team, Any, false> weight{norm.weight.even_row<Any>(0), {}};
    if (grad_sum.row) cuda::fetch_ahead<Team>(grad_sum.row, current.length);
    const auto weight_at = [&](int v, int64_t i, int count) {
      return weight.weight(norm.weight_offset, v, i, count, aligned);
    };
    const auto value_of = [&](int, int64_t, int, const Values(&read)[2]) { return read[0]; };
    const auto grad_of = [&](int v, int64_t i, int count, const Values(&read)[2]) {
      return read[1] * weight_at(v, i, count);
    };
    const RowMoments found =
        moments.of(reader, current, current, next, float(norm.length), norm.eps, value_of, grad_of);
    grad_sum.fetch_all(current.length, aligned);
    reader.second(current, next, [&](int v, int64_t i, int count, const Values(&read)[2], bool) {
      const Values value = found.deviation_of<Kind>(read[0]);
      Values result = gradient<Kind>(found, value, read[1], weight_at(v, i, count));
      if (grad_sum.row) result = result + grad_sum.get(v, i, count, aligned);
      cuda::put(grad_x, i, count, aligned, result);
      if constexpr (kAddsUp<Team>) {
        of_weight.add(grad_of_weight(value, read[1], Values(found.inverse)), v);
        of_bias.add(read[1], v);
        of_x_bias.add(result, v);
      }
    });
    if (of_rows != nullptr && Team::thread() == 0 && current.length > 0) of_rows[row] = found;
  });
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

bool is_there(const Rows& rows) { return rows.data != nullptr; }

// A block for a row of any length, of which nothing is held.
struct AnyTeam : cuda::RowTeam<false, false> {
  static constexpr int kMostThreads = cuda::LongRowTeam<false>::kMostThreads;
};

// How the rows of one call lie, and its vectors.
struct Layout {
  int64_t rows, length;
  Dtype dtype;  // of the first
  bool aligned, whole, float_vectors;

  Layout(int64_t count, int64_t n, std::initializer_list<Rows> all,
         std::initializer_list<Rows> vectors)
      : rows(count), length(n), dtype(all.begin()->dtype) {
    const auto are = [](std::initializer_list<Rows> some, Dtype type) {
      return std::all_of(some.begin(), some.end(),
                         [&](const Rows& each) { return !is_there(each) || each.dtype == type; });
    };
    aligned = cuda::all_aligned(all) && cuda::all_aligned(vectors);
    float_vectors = !are(vectors, dtype);
    whole = aligned && length % kRowVector == 0 && are(all, dtype) &&
            (!float_vectors || are(vectors, Dtype::float32));
  }

  // Calls body(team, storage, launch). Long rows of float16 are rare: they go through Any, which
  // saves a tenth of the time that it takes to compile.
  template <int kTensors, class Body>
  void with_team(const char* op, const Body& body) const {
    cuda::with_twice_read_team<kTensors>(
        rows, length, whole, dtype, op, [&](auto team, auto storage, cuda::TwiceReadLaunch launch) {
      using Team = decltype(team);
      using T = decltype(storage);
      constexpr bool kIsLongHalf = Team::kVectors == 0 && std::is_same_v<T, Half>;
      if constexpr (!Team::kShort && (std::is_same_v<T, Any> || kIsLongHalf)) {
        launch.shared_bytes = 0;
        body(AnyTeam{}, Any{}, launch);
      } else {
        body(team, storage, launch);
      }
    });
  }

  // Calls body(storage of vectors, whether there are registers for a residual): the former is one
  // that a team can hold, of those that people train with, or Any.
  template <class Team, class T, class Body>
  void with_vectors(bool has_residual, const Body& body) const {
    const auto choose = [&](auto vectors) {
      if constexpr (Team::kVectors > 0 && !Team::kShort && !std::is_same_v<T, Half>) {
        if (!has_residual) return body(vectors, std::false_type{});
      }
      body(vectors, std::true_type{});
    };
    if constexpr (Team::kVectors > 0 && std::is_same_v<T, BFloat16>) {
      if (!float_vectors) return choose(T{});
    }
    choose(Any{});
  }
};

// Blocks of a backward kernel that adds up rows: as many as a large device runs all at once,
// whatever the device, as sums depend on their number. A float adds up 256 rows at the most.
struct AddingGrid {
  int64_t blocks, rows_of_team;

  AddingGrid(int64_t rows, int64_t length) {
    const cuda::RowBlock block(length);
    const int resident_threads = block.teams > 1 ? 1024 : 512;  // as they need registers
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

// How a backward pass goes about its sums over rows.
struct Plan {
  Layout layout;
  bool in_blocks;        // each block adds up its rows, or columns_kernel does
  int64_t groups;        // of rows that have sums
  int64_t shared_bytes;  // of a block, for sums

  Plan(const NormBackward& norm, const OfVectors<Rows>& grads)
      : layout(norm.rows, norm.length, {norm.x, norm.grad_out, norm.grad_sum, norm.grad_x},
               {norm.weight}) {
    const int in_shared = is_there(grads.bias) + is_there(grads.x_bias);
    const bool is_short = norm.length <= cuda::kShortRow;
    const int64_t threads = cuda::RowBlock(norm.length).threads;
    using Team = cuda::RowTeam<false, true>;
    shared_bytes = is_short ? 0 : in_shared * cuda::SharedSum<Team>::size(int(threads)) * 16;
    in_blocks = is_short || (layout.whole && norm.length <= cuda::kLongestHeldRow);
    if (in_blocks && shared_bytes > 48 * 1024) {
      in_blocks = shared_bytes + 2048 <= cuda::DeviceLimits("norm").shared_bytes;
      layout.whole = in_blocks;
    }
    if (!in_blocks) shared_bytes = 0;
    groups = in_blocks ? AddingGrid(norm.rows, norm.length).blocks
                       : ColumnsGrid(norm.rows, norm.length).groups;
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

int wanted(const OfVectors<Rows>& grads) {
  return is_there(grads.weight) + is_there(grads.bias) + is_there(grads.x_bias);
}

int64_t rows_of_team(int64_t rows, int64_t blocks, int teams) {
  return ceil_div(rows, blocks * teams);
}

template <class Kind>
void run_backward(const NormBackward& norm, const Plan& plan, const OfVectors<float*>& partials,
                  RowMoments* of_rows, cudaStream_t stream) {
  constexpr const char* op = Kind::kBackwardOp;
  plan.layout.with_team<2>(op, [&](auto team, auto storage, auto launch) {
    using Team = decltype(team);
    const auto kernel = backward_kernel<Kind, Team, decltype(storage)>;
    int64_t rows_of_each = rows_of_team(norm.rows, launch.blocks, Team::kTeams);
    if (plan.in_blocks) {
      const AddingGrid grid(norm.rows, norm.length);
      rows_of_each = grid.rows_of_team;
      launch.blocks = unsigned(grid.blocks);
      launch.shared_bytes = int(plan.shared_bytes);
    }
    cuda::allow_shared_memory(kernel, launch, op);
    kernel<<<launch.blocks, launch.threads, launch.shared_bytes, stream>>>(
        norm, int(rows_of_each), partials, of_rows, plan.layout.aligned);
  });
  cuda::check(cudaGetLastError(), op);
}

}  // namespace

template <class Kind>
void norm_cuda(const Norm& norm, void* stream) {
  if (norm.rows == 0 || norm.length == 0) return;
  cuda::check(cudaPeekAtLastError(), Kind::kOp);  // of somebody before
  const Layout layout(norm.rows, norm.length, {norm.x, norm.residual, norm.sum, norm.out},
                      {norm.weight, norm.bias, norm.x_bias});
  layout.with_team<1>(Kind::kOp, [&](auto team, auto storage, const auto& launch) {
    using Team = decltype(team);
    using T = decltype(storage);
    layout.with_vectors<Team, T>(is_there(norm.residual), [&](auto vectors, auto has_residual) {
      constexpr bool kResidual = decltype(has_residual)::value;
      const auto kernel = norm_kernel<Kind, Team, T, decltype(vectors), kResidual>;
      cuda::allow_shared_memory(kernel, launch, Kind::kOp);
      kernel<<<launch.blocks, launch.threads, launch.shared_bytes, cudaStream_t(stream)>>>(
          norm, int(rows_of_team(norm.rows, launch.blocks, Team::kTeams)), layout.aligned);
    });
  });
  cuda::check(cudaGetLastError(), Kind::kOp);
}

template <class Kind>
int64_t norm_backward_workspace(const NormBackward& norm, const OfVectors<Rows>& grads) {
  if (wanted(grads) == 0) return 0;
  const Plan plan(norm, grads);
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
  const Plan plan(norm, grads);
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

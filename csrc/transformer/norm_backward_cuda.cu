// The gradients of a norm on CUDA, likewise. Those of vectors are added up by each block over its
// rows, then by clusters of blocks, and a small kernel adds these; or a kernel goes down the
// columns. A file of its own, so that both compile side by side.
#include "common/cuda/add_partials.cuh"
#include "transformer/norm_column_sums_cuda.cuh"
#include "transformer/norm_columns_cuda.cuh"
#include "transformer/norm_layout_cuda.cuh"

namespace dsx {
namespace {

using cuda::is_there;
using cuda::kMostBlocks;
using cuda::kRowVector;
using cuda::Layout;
using cuda::RowMoments;
using cuda::Values;

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
                    OfVectors<float*> partials,  // [clusters, length] written; null: not wanted
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
      Values result = cuda::gradient<Kind>(found, value, grad, weight.get(v, i, count));
      if (grad_sum.tensors[0]) {
        if constexpr (kHasRoom) {
          result = result + floats_of(grad_sum.held[v][0]);
        } else {
          result = result + floats_of(cuda::fetch(grad_sum.tensors[0], i, count, aligned));
        }
      }
      cuda::put(grad_x, i, count, aligned, result);
      if constexpr (kAddsUp<Team>) {
        of_weight.update(v, [&](const Values& before) {
          return add_grad_of_weight(value, grad, Values(found.inverse), before);
        });
        of_bias.add(grad, v);
        of_x_bias.add(result, v);
      }
    });
    if (of_rows != nullptr && Team::thread() == 0 && row.length > 0) of_rows[number] = found;
  }
  if constexpr (kAddsUp<Team>) {
    const cuda::Cluster cluster;
    const int64_t first = int64_t(cluster.number()) * norm.length;
    const auto of_blocks = [&](float* all) { return all == nullptr ? nullptr : all + first; };
    cluster.meet();
    of_weight.finish(cluster, of_blocks(partials.weight), norm.length);
    of_bias.finish(cluster, of_blocks(partials.bias), norm.length);
    of_x_bias.finish(cluster, of_blocks(partials.x_bias), norm.length);
    cluster.meet();  // before the memory of a block that others read is gone
  }
}

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

int wanted(const OfVectors<Rows>& grads) {
  return is_there(grads.weight) + is_there(grads.bias) + is_there(grads.x_bias);
}

// How a backward pass goes about its sums over rows: in the blocks that have the rows, if what a
// cluster of blocks adds up is little beside what is read, else down the columns.
struct Plan {
  Layout layout;
  AddingGrid grid;
  bool in_blocks;
  int cluster;       // blocks that add up together
  int64_t groups;    // of rows that have sums
  int shared_bytes;  // of a block, for vectors

  // `can_cluster`: the code can, and the device.
  Plan(const NormBackward& norm, const OfVectors<Rows>& grads, bool can_cluster, const char* op)
      : layout(norm.rows, norm.length, {norm.x, norm.grad_out, norm.grad_sum, norm.grad_x},
               {norm.weight}),
        grid(norm.rows, norm.length) {
    const bool is_short = layout.block.teams > 1;
    const int sums = is_short ? 0 : wanted(grads);
    const int vectors_of_thread = is_short ? 1 : cuda::kHeldVectors;
    shared_bytes = (1 + sums) * layout.block.threads * vectors_of_thread * kRowVector * 4;
    const bool is_held = layout.whole && norm.length <= cuda::kLongestHeldRow;
    if (is_held && shared_bytes > kShared) layout.whole = shared_bytes + 2048 <= most_shared(op);
    in_blocks = is_short || (is_held && layout.whole);
    if (!is_held || !layout.whole) shared_bytes = 0;
    cluster = in_blocks && !is_short && can_cluster ? kCluster : 1;
    grid.blocks = ceil_div(grid.blocks, cluster) * cluster;
    groups = grid.blocks / cluster;
    const int64_t of_column = norm.rows * (bytes_of(norm.x.dtype) + bytes_of(norm.grad_out.dtype));
    // Without clusters it is several times as much.
    const int64_t most = can_cluster || is_short ? of_column / 100 : of_column / 12;
    in_blocks = in_blocks && groups * wanted(grads) * int64_t(sizeof(float)) <= most;
    if (in_blocks) return;
    cluster = 1;
    grid.blocks = std::min(layout.blocks(), kMostBlocks);
    grid.rows_of_team = ceil_div(layout.blocks(), grid.blocks);
    groups = cuda::ColumnsGrid(norm.rows, norm.length).groups;
  }

  // One group goes to where the gradients are wanted.
  bool has_partials() const { return in_blocks || groups > 1; }

  static constexpr int kCluster = 8;        // as many as every device takes
  static constexpr int kShared = 40 << 10;  // every device has so much beside what is static

  static int most_shared(const char* op) {
    int device = 0, bytes = 0;
    cuda::check(cudaGetDevice(&device), op);
    cuda::check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
                op);
    return bytes;
  }
};

// Whether code was compiled for clusters that runs here: PTX for older devices has none, wherever
// it runs.
template <class Kind>
bool can_cluster() {
  cudaFuncAttributes found = {};
  const auto kernel = backward_kernel<Kind, cuda::RowTeam<false, true>, BFloat16>;
  cuda::check(cudaFuncGetAttributes(&found, kernel), Kind::kBackwardOp);
  return found.ptxVersion >= 90;
}

template <class Kind>
Plan plan_of(const NormBackward& norm, const OfVectors<Rows>& grads) {
  return {norm, grads, can_cluster<Kind>(), Kind::kBackwardOp};
}

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
  plan.layout.with_team([&](auto team, auto storage) {
    const auto kernel = backward_kernel<Kind, decltype(team), decltype(storage)>;
    if (plan.shared_bytes > Plan::kShared) {
      cuda::check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       plan.shared_bytes),
                  op);
    }
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(unsigned(plan.grid.blocks));
    config.blockDim = dim3(unsigned(plan.layout.block.threads));
    config.dynamicSmemBytes = size_t(plan.shared_bytes);
    config.stream = stream;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {unsigned(plan.cluster), 1, 1};
    config.attrs = &attribute;
    config.numAttrs = plan.cluster > 1 ? 1 : 0;
    cuda::check(cudaLaunchKernelEx(&config, kernel, norm, int(plan.grid.rows_of_team), partials,
                                   of_rows, plan.layout.aligned),
                op);
  });
}

}  // namespace

template <class Kind>
int64_t norm_backward_workspace(const NormBackward& norm, const OfVectors<Rows>& grads) {
  if (wanted(grads) == 0) return 0;
  const Plan plan = plan_of<Kind>(norm, grads);
  const int64_t moments =
      plan.in_blocks ? 0 : norm.rows * int64_t(sizeof(RowMoments) / sizeof(float));
  return (plan.has_partials() ? wanted(grads) * plan.groups * norm.length : 0) + moments;
}

template <class Kind>
void norm_backward_cuda(const NormBackward& norm, const OfVectors<Rows>& grads, float* workspace,
                        void* stream) {
  if (norm.length == 0) return;
  constexpr const char* op = Kind::kBackwardOp;
  const cudaStream_t queue = cudaStream_t(stream);
  cuda::check(cudaPeekAtLastError(), op);
  const Plan plan = plan_of<Kind>(norm, grads);
  const int64_t floats = plan.has_partials() ? plan.groups * norm.length : 0;
  const OfVectors<float*> partials =
      plan.has_partials() ? partials_in(workspace, grads, floats) : OfVectors<float*>{};
  const bool in_columns = wanted(grads) > 0 && !plan.in_blocks;
  float* behind = workspace + wanted(grads) * floats;
  RowMoments* of_rows = in_columns ? reinterpret_cast<RowMoments*>(behind) : nullptr;
  if (norm.rows > 0) run_backward<Kind>(norm, plan, partials, of_rows, queue);
  if (in_columns) {
    cuda::add_columns<Kind>(norm, of_rows, partials, grads, plan.layout.whole, plan.layout.aligned,
                            op, queue);
  }
  if (!plan.has_partials()) return;
  const auto add = [&](const float* partial, const Rows& grad) {
    if (!is_there(grad)) return;
    cuda::add_partials(partial, plan.groups, norm.length, grad, op, queue);
  };
  add(partials.weight, grads.weight);
  add(partials.bias, grads.bias);
  add(partials.x_bias, grads.x_bias);
}

template int64_t norm_backward_workspace<DSX_NORM>(const NormBackward&, const OfVectors<Rows>&);
template void norm_backward_cuda<DSX_NORM>(const NormBackward&, const OfVectors<Rows>&, float*,
                                           void*);

}  // namespace dsx

// The gradients of a norm on CUDA. Those of vectors are added up by the teams that have the rows,
// then by a small kernel; or, of few rows and of long ones, by a kernel that goes down the columns.
// A file of its own, so that both directions compile side by side.
#include "common/cuda/add_partials.cuh"
#include "norm/norm_adding_cuda.cuh"
#include "norm/norm_columns_cuda.cuh"
#include "norm/norm_grad_ring_cuda.cuh"
#include "norm/norm_layout_cuda.cuh"

#include <climits>

namespace dsx {
namespace {

using cuda::kRowVector;
using cuda::Layout;
using cuda::RowFloats;
using cuda::RowLength;
using cuda::RowMoments;

// Each team takes a row, which is held if kHeld.
template <class Kind, class Team, class T, bool kHeld>
__global__ void __launch_bounds__(Team::kMostThreads)
    rows_kernel(const __grid_constant__ NormBackward norm,
                RowMoments<Kind>* of_rows,  // [rows] written; null: not wanted
                float inverse_n, int team_threads, bool is_aligned) {
  __shared__ float reduction_memory[cuda::kReductionFloats<Kind, Team, true>];
  const bool aligned = !std::is_same_v<T, Any> || is_aligned;
  const Team team(team_threads);
  const int64_t number = team.row(), clamped = ::min(number, norm.rows - 1);
  const int64_t length = number < norm.rows ? norm.length : 0;
  const Pointer<T> x = norm.x.row<T>(clamped), grad_out = norm.grad_out.row<T>(clamped);
  const Pointer<T> grad_sum = norm.grad_sum.row<T>(clamped);
  const Pointer<T> grad_x = norm.grad_x.even_row<T>(clamped);
  const auto weight_at = [&](int64_t i, int count) {
    if (!norm.weight.is_present()) return RowFloats(1.0f);
    const auto weight = cuda::fetch(norm.weight.even_row<Any>(0), i, count, is_aligned);
    return cuda::with_offset(floats_of(weight), norm.weight_offset);
  };
  const auto weighted = [&](auto i, const auto& vectors) {
    return floats_of(vectors[1]) * weight_at(i, cuda::count_at<T>(i, cuda::Column<T>(length)));
  };
  const auto run = [&](const auto& row) {
    const float near = Kind::kCentered ? cuda::mean_of_first(x, length, aligned) : 0.0f;
    cuda::Moments<Kind, Team, T, true> moments(team, reduction_memory);
    moments.put(row, near, weighted);
    const RowMoments<Kind> found = moments.find(row, near, inverse_n, norm.eps, weighted);
    row.for_each_vector([&](auto i, int count, const auto& vectors) {
      const RowFloats value = found.standardized_of(floats_of(vectors[0]));
      RowFloats result = found.gradient(value, floats_of(vectors[1]), weight_at(i, count));
      if (grad_sum) result = result + floats_of(cuda::fetch(grad_sum, i, count, aligned));
      cuda::put(grad_x, i, count, aligned, result);
    });
    if (of_rows != nullptr && team.thread == 0 && length > 0) of_rows[number] = found;
  };
  if constexpr (kHeld) {
    cuda::HeldRow<Team, T, 2> row{team, int(length), {}};
    row.fetch_all({x, grad_out});
    run(row);
  } else {
    run(cuda::ReadRow<Team, T, 2>{team, length, aligned, {x, grad_out}});
  }
}

int wanted(const OfVectors<Rows>& grads) {
  return grads.weight.is_present() + grads.bias.is_present() + grads.x_bias.is_present();
}

// Calls body with the type of the team, as std::type_identity.
template <class Body>
void with_team(const Layout& layout, const Body& body) {
  if (layout.in_parts) {
    return body(std::type_identity<cuda::RowTeam<RowLength::in_parts>>{});
  }
  cuda::with_row_length(layout.length, body);
}

// Calls body(team, storage) for the teams that add up, where there are some.
template <class Body>
void with_adding_team(const Layout& layout, const Body& body) {
  with_team(layout, [&]<class Team>(std::type_identity<Team>) {
    if constexpr (Team::kLength == RowLength::in_parts) {
      body(std::type_identity<cuda::PartTeam>{}, BFloat16{});
    } else if constexpr (Team::kLength != RowLength::is_long) {
      with_storage_type(layout.dtype, [&](auto storage) {
        body(std::type_identity<cuda::TeamOfBlock<Team>>{}, storage);
      });
    }
  });
}

// How a backward pass goes about its sums over rows.
struct Plan {
  static constexpr int kCluster = 2;  // more of them do not fill a device
  static constexpr int64_t kOfCache = 32 << 20;

  Layout layout;
  bool adds_up;     // the teams that have the rows do, else a kernel that goes down the columns;
                    // those of parts of rows also where no sums are wanted
  int threads = 0;  // of a block that adds up
  int cluster = 1;  // its blocks add up together
  int rows_of_team = 1;
  cuda::PartOfRow part;
  int64_t blocks = 0;
  int64_t groups;  // of rows that have sums
  int pipeline_bytes = 0;
  std::optional<cuda::RingLaunch> ring;  // of `blocks`: the rows pass through it

  template <class Kind>
  static Plan of(const NormBackward& norm, const OfVectors<Rows>& grads) {
    Plan plan(norm);
    // A thread has registers for so many sums.
    const bool fits = plan.layout.whole && norm.rows > 0 && !grads.x_bias.is_present() &&
                      (Kind::kCentered || !grads.bias.is_present());
    plan.adds_up =
        fits && (wanted(grads) > 0 || plan.layout.in_parts) && plan.can_add_up<Kind>(norm, grads);
    if (!plan.adds_up) plan.groups = cuda::ColumnsGrid(norm.rows, norm.length).groups;
    return plan;
  }

  cuda::Launch launch() const {
    cuda::Launch made{0, threads, pipeline_bytes, cluster, false};
    if (ring) made = ring->launch;
    made.blocks = unsigned(blocks);
    return made;
  }

  // One group goes to where the gradients are wanted.
  bool has_partials() const { return adds_up || groups > 1; }

 private:
  explicit Plan(const NormBackward& norm)
      : layout(norm.rows, norm.length, {norm.x, norm.grad_out, norm.grad_sum, norm.grad_x},
               {norm.weight}, cuda::is_in_parts(norm.length, norm.x.dtype)),
        part{int(std::min<int64_t>(norm.length, INT_MAX)), 1} {}

  // How many blocks of teams run at once, each group of which adds up what so many teams have.
  template <class Kind>
  int64_t blocks_of_teams(const NormBackward& norm, int64_t& of_group) {
    const cuda::Device device(Kind::kBackwardOp);
    const bool in_parts = layout.in_parts;
    int64_t resident = 0;
    with_adding_team(layout, [&]<class Team, class T>(std::type_identity<Team>, T) {
      if (in_parts) part = {int(cuda::part_of(norm.length)), int(cuda::parts_of(norm.length))};
      const auto kernel = cuda::adding_kernel<Kind, Team, T>;
      threads = layout.team;
      if (!in_parts) threads *= cuda::kAddingThreads<Team, T> / layout.team;
      if (threads == 0) return;  // there is no memory for one team, of long rows of float32
      pipeline_bytes = int(cuda::RowPipeline<Kind, Team, T>::bytes(threads, part.count, norm));
      if (pipeline_bytes > device.shared_bytes) return;
      // PTX for older devices has no clusters, wherever it runs.
      const bool has_clusters = cuda::can_chain(kernel, Kind::kBackwardOp);
      if (has_clusters && !Team::kShort) cluster = in_parts ? part.blocks : kCluster;
      of_group = in_parts ? 1 : threads / layout.team * cluster;
      resident = int64_t(device.multiprocessors) * (Team::kShort ? 3 : 1);
      if (!in_parts) return;
      cuda::allow_shared_memory(kernel, pipeline_bytes, Kind::kBackwardOp);
      resident =
          has_clusters ? cluster * cuda::clusters_at_once(kernel, launch(), Kind::kBackwardOp) : 0;
    });
    return resident;
  }

  template <class Kind>
  bool can_add_up(const NormBackward& norm, const OfVectors<Rows>& grads) {
    int64_t resident = 0, of_group = 1;  // blocks that run at once; teams
    const bool in_parts = layout.in_parts;
    if (in_parts) ring = cuda::grad_ring_of<Kind>(norm);
    if (ring) {
      cluster = ring->shape.blocks;
      resident = ring->launch.blocks;
    } else {
      resident = blocks_of_teams<Kind>(norm, of_group);
    }
    // As many blocks as run at once. What fits into the cache is soon read again, so sums of it
    // need not take more than 1 % of its memory; of more, what they take is less than the time.
    // Rows in parts take several times as long without, as long as most of the device has some.
    const int64_t of_row = bytes_of(norm.x.dtype) + bytes_of(norm.grad_out.dtype);
    const bool is_cached = norm.rows * norm.length * of_row <= kOfCache;
    const int64_t divisor = is_cached ? 100 : in_parts ? 8 : 24;
    int64_t most = resident / cluster;
    if (const int64_t of_sums = wanted(grads) * int64_t(sizeof(float))) {
      most = std::min(most, norm.rows * of_row / divisor / of_sums);
    }
    most *= cluster;
    if (most == 0 || most * (in_parts ? 2 : 8) < resident) return false;
    rows_of_team = int(ceil_div(norm.rows, most / cluster * of_group));
    groups = ring ? most / cluster : ceil_div(norm.rows, rows_of_team * of_group);
    blocks = groups * cluster;
    return true;
  }
};

// The vectors whose gradients are wanted have partial sums one after the other.
OfVectors<float*> partials_in(float* workspace, const OfVectors<Rows>& grads, int64_t floats) {
  const auto next = [&](const Rows& grad) -> float* {
    if (!grad.is_present()) return nullptr;
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
void run_adding(const NormBackward& norm, const Plan& plan, const OfVectors<float*>& partials,
                cudaStream_t stream) {
  const float inverse_n = 1.0f / float(norm.length);
  if (plan.ring) {
    return cuda::launch_kernel(cuda::grad_ring_kernel<Kind>, plan.launch(), stream,
                               Kind::kBackwardOp, norm, inverse_n, plan.ring->shape, partials);
  }
  with_adding_team(plan.layout, [&]<class Team, class T>(std::type_identity<Team>, T) {
    cuda::launch_kernel(cuda::adding_kernel<Kind, Team, T>, plan.launch(), stream,
                        Kind::kBackwardOp, norm, inverse_n, plan.layout.team, plan.rows_of_team,
                        plan.part, partials);
  });
}

template <class Kind, class Team>
void run_rows(const NormBackward& norm, const Layout& layout, RowMoments<Kind>* of_rows,
              cudaStream_t stream) {
  const auto launch = [&](auto kernel) {
    kernel<<<unsigned(layout.blocks), layout.block, 0, stream>>>(
        norm, of_rows, 1.0f / float(norm.length), layout.team, layout.aligned);
  };
  if (!layout.whole) return launch(rows_kernel<Kind, cuda::ReadingTeam<Team>, Any, false>);
  with_storage_type(layout.dtype, [&](auto storage) {
    using T = decltype(storage);
    if constexpr (Team::kLength == RowLength::in_parts) {
      if constexpr (std::is_same_v<T, BFloat16>) launch(rows_kernel<Kind, Team, T, false>);
    } else if constexpr (Team::kLength != RowLength::is_long) {
      launch(rows_kernel<Kind, Team, T, true>);
    } else {  // long rows of float16 are rare
      using Long = std::conditional_t<std::is_same_v<T, Half>, Any, T>;
      launch(rows_kernel<Kind, Team, Long, false>);
    }
  });
}

}  // namespace

template <class Kind>
int64_t norm_backward_workspace(const NormBackward& norm, const OfVectors<Rows>& grads) {
  if (wanted(grads) == 0) return 0;
  const Plan plan = Plan::of<Kind>(norm, grads);
  const int64_t moments =
      plan.adds_up ? 0 : norm.rows * int64_t(sizeof(RowMoments<Kind>) / sizeof(float));
  return (plan.has_partials() ? wanted(grads) * plan.groups * norm.length : 0) + moments;
}

template <class Kind>
void norm_backward_cuda(const NormBackward& norm, const OfVectors<Rows>& grads, float* workspace,
                        void* stream) {
  if (norm.length == 0) return;
  constexpr const char* op = Kind::kBackwardOp;
  const cudaStream_t queue = cudaStream_t(stream);
  cuda::check(cudaPeekAtLastError(), op);
  const Plan plan = Plan::of<Kind>(norm, grads);
  const int64_t floats = plan.has_partials() ? plan.groups * norm.length : 0;
  const OfVectors<float*> partials =
      plan.has_partials() ? partials_in(workspace, grads, floats) : OfVectors<float*>{};
  const bool in_columns = wanted(grads) > 0 && !plan.adds_up;
  float* behind = workspace + wanted(grads) * floats;
  RowMoments<Kind>* of_rows = in_columns ? reinterpret_cast<RowMoments<Kind>*>(behind) : nullptr;
  if (norm.rows > 0) {
    if (plan.adds_up) {
      run_adding<Kind>(norm, plan, partials, queue);
    } else {
      with_team(plan.layout, [&]<class Team>(std::type_identity<Team>) {
        run_rows<Kind, Team>(norm, plan.layout, of_rows, queue);
      });
      cuda::check(cudaGetLastError(), op);
    }
  }
  if (in_columns) {
    cuda::add_columns<Kind>(norm, of_rows, partials, grads, plan.layout.whole, plan.layout.aligned,
                            op, queue);
  }
  if (!plan.has_partials()) return;
  cuda::PartialSums sums;
  sums.add(partials.weight, grads.weight);
  sums.add(partials.bias, grads.bias);
  sums.add(partials.x_bias, grads.x_bias);
  cuda::add_partials(sums, plan.groups, norm.length, op, queue);
}

template int64_t norm_backward_workspace<DSX_NORM>(const NormBackward&, const OfVectors<Rows>&);
template void norm_backward_cuda<DSX_NORM>(const NormBackward&, const OfVectors<Rows>&, float*,
                                           void*);

}  // namespace dsx

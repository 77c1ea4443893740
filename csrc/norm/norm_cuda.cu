// A norm on CUDA, of the kind that DSX_NORM names: each team of threads takes a row.
#include "common/cuda/chain.cuh"
#include "norm/norm_layout_cuda.cuh"
#include "norm/norm_long_cuda.cuh"
#include "norm/norm_ring_cuda.cuh"

namespace dsx {
namespace {

using cuda::Layout;
using cuda::RowFloats;
using cuda::RowLength;
using cuda::RowMoments;
using cuda::RowTeam;
using cuda::RowVector;

// Instead of gradients, where there are none.
struct NoGrads {};

// What is normalized: x, or the sum of it and the residual, as it is stored.
template <class T, class W>
__device__ inline RowVector<T> sum_of(const Norm& norm, Pointer<T> sum, int64_t i, int count,
                                      bool aligned, const RowVector<T>& x,
                                      const RowVector<T>& residual) {
  RowFloats value = floats_of(x);
  if (norm.x_bias.is_present()) {
    value = value + floats_of(cuda::fetch(norm.x_bias.even_row<W>(0), i, count, aligned));
  }
  return cuda::packed_for(sum, value + floats_of(residual));
}

// What a vector is multiplied by, and what is added then, as they lie in memory.
template <class W>
struct WeightAndBias {
  RowVector<W> weight, bias;

  __device__ void fetch(const Norm& norm, int64_t i, int count, bool aligned) {
    fetch_weight(norm, i, count, aligned);
    fetch_bias(norm, i, count, aligned);
  }
  __device__ void fetch_weight(const Norm& norm, int64_t i, int count, bool aligned) {
    if (norm.weight.is_present()) {
      weight = cuda::fetch(norm.weight.even_row<W>(0), i, count, aligned);
    }
  }
  __device__ void fetch_bias(const Norm& norm, int64_t i, int count, bool aligned) {
    if (norm.bias.is_present()) {
      bias = cuda::fetch(norm.bias.even_row<W>(0), i, count, aligned);
    }
  }

  // Where they are held, the compiler would hold them as floats, of which there are too many.
  __device__ void stay() {
    stay(weight);
    stay(bias);
  }

 private:
  __device__ static void stay(RowVector<W>& vector) {
#pragma unroll
    for (uint4& w : vector.words) asm volatile("" : "+r"(w.x), "+r"(w.y), "+r"(w.z), "+r"(w.w));
  }
};

// A vector of the row, normalized.
template <class Kind, class T, class W>
__device__ inline RowFloats result_of(const Norm& norm, const RowMoments<Kind>& found,
                                      const RowVector<T>& vector, const WeightAndBias<W>& vectors) {
  RowFloats weight(1.0f);
  if (norm.weight.is_present()) {
    weight = cuda::with_offset(floats_of(vectors.weight), norm.weight_offset);
  }
  const RowFloats value = found.standardized_of(floats_of(vector));
  return norm.bias.is_present() ? normalized(value, weight, floats_of(vectors.bias))
                                : normalized(value, weight);
}
// And stored.
template <class Kind, class T, class W>
__device__ inline void put_result(const Norm& norm, const RowMoments<Kind>& found, Pointer<T> out,
                                  int64_t i, int count, bool aligned, const RowVector<T>& vector,
                                  const WeightAndBias<W>& vectors) {
  cuda::put<cuda::Stored::streamed>(out, i, count, aligned,
                                    result_of<Kind>(norm, found, vector, vectors));
}

// Rows in registers. W is the storage type of the vectors; kOfSum: there is a residual. A
// multiprocessor holds so many threads that each has the registers for all its loads at once:
// with fewer registers it reads memory half as fast.
template <class Kind, class Team, class T, class W, bool kOfSum>
__global__ void __launch_bounds__(Team::kMostThreads, sizeof(T) == 2 ? 2 : 1)
    norm_kernel(const __grid_constant__ Norm norm, float inverse_n, int team_threads) {
  __shared__ float reduction_memory[cuda::kReductionFloats<Kind, Team, false>];
  cuda::let_next_begin();
  const Team team(team_threads);
  const int64_t number = team.row(), clamped = ::min(number, norm.rows - 1);
  const Pointer<T> out = norm.out.even_row<T>(clamped), x = norm.x.row<T>(clamped);
  cuda::HeldRow<Team, T, 1 + kOfSum> row{team, number < norm.rows ? int(norm.length) : 0, {}};
  cuda::wait_for_previous();
  float near = 0;
  // Asked for with the row, where there are registers for it, or it would be waited for, too.
  constexpr bool kEarly = sizeof(W) == 2 && !(Kind::kCentered && (kOfSum || Team::kShort));
  WeightAndBias<W> early[Team::kVectors];
  if constexpr (kOfSum) {
    const Pointer<T> residual = norm.residual.row<T>(clamped);
    row.fetch_all({x, residual});
    if (Kind::kCentered) {
      near = cuda::mean_of_first(x, row.length, true) +
             cuda::mean_of_first(residual, row.length, true);
    }
    const bool is_wanted = norm.sum.is_present();
    const Pointer<T> sum = norm.sum.even_row<T>(clamped);
    row.for_each([&](int v, int i, int count) {
      const RowVector<T> value =
          sum_of<T, W>(norm, sum, i, count, true, row.vectors[v][0], row.vectors[v][1]);
      row.vectors[v][0] = value;
      if (is_wanted) cuda::put_vector(sum, i, value);
    });
  } else {
    row.fetch_all({x});
    if (Kind::kCentered) near = cuda::mean_of_first(x, row.length, true);
  }
  if (kEarly) {
    row.for_each([&](int v, int i, int count) { early[v].fetch_weight(norm, i, count, true); });
  }
  cuda::Moments<Kind, Team, T, false> moments(team, reduction_memory);
  moments.put(row, near, NoGrads{});
  const RowMoments<Kind> found = moments.find(row, near, inverse_n, norm.eps, NoGrads{});
  row.for_each([&](int v, int i, int count) {
    WeightAndBias<W> vectors = early[v];
    if (!kEarly) vectors.fetch_weight(norm, i, count, true);
    vectors.fetch_bias(norm, i, count, true);
    put_result<Kind>(norm, found, out, i, count, true, row.vectors[v][0], vectors);
  });
}

// Rows that are read again each time.
template <class Kind, class Team>
__global__ void __launch_bounds__(Team::kMostThreads)
    reading_kernel(const __grid_constant__ Norm norm, float inverse_n, int team_threads,
                   bool aligned) {
  __shared__ float reduction_memory[cuda::kReductionFloats<Kind, Team, false>];
  const Team team(team_threads);
  const int64_t number = team.row(), clamped = ::min(number, norm.rows - 1);
  const Pointer<Any> out = norm.out.even_row<Any>(clamped);
  cuda::ReadRow<Team, Any, 2> row{team,
                                  number < norm.rows ? norm.length : 0,
                                  aligned,
                                  {norm.x.row<Any>(clamped), norm.residual.row<Any>(clamped)}};
  float near = 0;
  if (Kind::kCentered) {
    near = cuda::mean_of_first(row.tensors[0], row.length, aligned) +
           cuda::mean_of_first(row.tensors[1], row.length, aligned);
  }
  if (row.tensors[1]) {
    // The sum is read again from where it is wanted, or will be replaced by the result: that has
    // the same dtype then.
    const Pointer<Any> sum = norm.sum.is_present() ? norm.sum.even_row<Any>(clamped) : out;
    row.for_each_vector([&](int64_t i, int count, const auto& vectors) {
      const auto value = sum_of<Any, Any>(norm, sum, i, count, aligned, vectors[0], vectors[1]);
      cuda::put(sum, i, count, aligned, value.elements);
    });
    row.tensors[0] = sum;
    row.tensors[1] = {};
  }
  cuda::Moments<Kind, Team, Any, false> moments(team, reduction_memory);
  moments.put(row, near, NoGrads{});
  const RowMoments<Kind> found = moments.find(row, near, inverse_n, norm.eps, NoGrads{});
  row.for_each_vector([&](int64_t i, int count, const auto& vectors) {
    WeightAndBias<Any> of_columns;
    of_columns.fetch(norm, i, count, aligned);
    put_result<Kind>(norm, found, out, i, count, aligned, vectors[0], of_columns);
  });
}

// Long rows that are held.
template <class Kind, class T, class W, bool kOfSum>
__global__ void __launch_bounds__(cuda::kLongTeam, 1)
    long_kernel(const __grid_constant__ Norm norm, float inverse_n) {
  using Row = cuda::LongRow<T>;
  constexpr int kBatch = Row::kInRegisters;  // at once, as no load overtakes a store
  extern __shared__ __align__(16) uint4 long_memory[];
  __shared__ float reduction_memory[cuda::kReductionFloats<Kind, typename Row::Team, false>];
  const typename Row::Team team(cuda::kLongTeam);
  Row row{team, int(norm.length), reinterpret_cast<RowVector<T>*>(long_memory) + team.thread, {}};
  cuda::Moments<Kind, typename Row::Team, T, false> moments(team, reduction_memory);
  if (!kOfSum) row.ask_for_all(norm.x.row<T>(blockIdx.x));
#pragma unroll 1
  for (int64_t number = blockIdx.x; number < norm.rows; number += gridDim.x) {
    const Pointer<T> x = norm.x.row<T>(number), out = norm.out.even_row<T>(number);
    float near = Kind::kCentered ? cuda::mean_of_first(x, norm.length, true) : 0.0f;
    if constexpr (kOfSum) {
      const Pointer<T> residual = norm.residual.row<T>(number);
      if (Kind::kCentered) near += cuda::mean_of_first(residual, norm.length, true);
      const bool is_wanted = norm.sum.is_present();
      const Pointer<T> sum = norm.sum.even_row<T>(number);
      row.template for_each_number<kBatch>([&](int first) {
        RowVector<T> of_x[kBatch], of_residual[kBatch];
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          const int i = row.column(first + k);
          if (i >= row.length) continue;
          of_x[k] = cuda::fetch(x, i, cuda::kRowVector, true);
          of_residual[k] = cuda::fetch(residual, i, cuda::kRowVector, true);
        }
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          const int i = row.column(first + k);
          if (i >= row.length) continue;
          const auto value =
              sum_of<T, W>(norm, sum, i, cuda::kRowVector, true, of_x[k], of_residual[k]);
          if (is_wanted) cuda::put_vector(sum, i, value);
          row.set(first + k, value);
        }
      });
    } else {
      row.wait();
    }
    moments.put(row, near, NoGrads{});
    const RowMoments<Kind> found = moments.find(row, near, inverse_n, norm.eps, NoGrads{});
    const int64_t next = number + gridDim.x;
    const Pointer<T> next_x = norm.x.row<T>(::min(next, norm.rows - 1));
    row.template for_each_number<kBatch>([&](int first) {
      WeightAndBias<W> vectors[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const int i = row.column(first + k);
        if (i < row.length) vectors[k].fetch(norm, i, cuda::kRowVector, true);
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const int i = row.column(first + k);
        if (i >= row.length) continue;
        put_result<Kind>(norm, found, out, i, cuda::kRowVector, true, row.get(first + k),
                         vectors[k]);
        if (!kOfSum && next < norm.rows) row.ask(first + k, next_x);
      }
    });
  }
}

// What a block has of a row of a ring.
struct RingRow {
  const cuda::RowRing& ring;
  cuda::RowRing::Place place;

  template <class Body>
  __device__ void for_each_vector(const Body& body) const {
    ring.for_each_vector([&](int, int i) {
      const RowVector<BFloat16> vectors[1] = {ring.vector(place, i)};
      body(i, cuda::kRowVector, vectors);
    });
  }
};

// Long rows that pass through a ring. The threads of a block always have the same columns, and so
// hold their vectors in registers.
template <class Kind>
__global__ void __launch_bounds__(cuda::kMostRingThreads, 1)
    ring_kernel(const __grid_constant__ Norm norm, float inverse_n,
                const __grid_constant__ cuda::RingShape shape) {
  using T = BFloat16;
  extern __shared__ __align__(128) uint4 ring_slots[];
  __shared__ cuda::RingMemory memory;
  const cuda::RowRing ring(shape, memory, ring_slots);
  ring.begin();
  if (ring.helps()) {
    constexpr int kSums = 1 + Kind::kCentered;
    return cuda::RingReduction<cuda::RowRing, kSums>::help(ring, {&norm.x}, norm.out);
  }
  Norm of_columns = norm;
  if constexpr (!Kind::kCentered) of_columns.bias = {};  // there is none, as run_in_parts says
  WeightAndBias<T> vectors[cuda::kVectorsOfPart];
  ring.for_each_vector(
      [&](int v, int i) { vectors[v].fetch(of_columns, ring.column + i, cuda::kRowVector, true); });
  using Place = cuda::RowRing::Place;
  const auto row_at = [&](const Place& place) { return RingRow{ring, place}; };
  cuda::for_each_row<Kind, false>(ring, inverse_n, norm.eps, row_at, NoGrads{},
                                  [&](const Place& place, const RowMoments<Kind>& found) {
    const Pointer<T> out = norm.out.even_row<T>(place.row);
    ring.for_each_vector([&](int v, int i) {
      vectors[v].stay();
      const RowFloats result =
          result_of<Kind>(of_columns, found, ring.vector(place, i), vectors[v]);
      ring.set(place, i, cuda::packed_for(out, result));
    });
  });
}

// Long rows whose sums are those of parts, and whether these are such rows: by their dtypes and
// their length, not by where they lie, so that a row has the same bits anywhere. Vectors of float32
// would not fit into registers, and rows with a residual would need two slots each: they are held.
template <class Kind>
bool run_in_parts(const Norm& norm, cudaStream_t queue) {
  const auto rows = {norm.x, norm.out}, vectors = {norm.weight, norm.bias};
  if (!cuda::is_in_parts(norm.length, norm.x.dtype) || norm.residual.is_present()) return false;
  if (!Layout::are_of(rows, Dtype::bfloat16) || !Layout::are_of(vectors, Dtype::bfloat16)) {
    return false;
  }
  if (!Kind::kCentered && norm.bias.is_present()) return false;
  const auto kernel = ring_kernel<Kind>;
  const auto ring = cuda::ring_of(kernel, norm.rows, norm.length, Kind::kOp);
  if (!ring) return false;
  const float inverse_n = 1.0f / float(norm.length);
  const Layout layout(norm.rows, norm.length, rows, vectors, true);
  if (layout.whole) {
    cuda::launch_kernel(kernel, ring->launch, queue, Kind::kOp, norm, inverse_n, ring->shape);
  } else {
    reading_kernel<Kind, RowTeam<RowLength::in_parts>>
        <<<unsigned(layout.blocks), layout.block, 0, queue>>>(norm, inverse_n, layout.team,
                                                              layout.aligned);
  }
  cuda::check(cudaGetLastError(), Kind::kOp);
  return true;
}

// Calls body(storage of rows, storage of vectors), of which the latter are floats or the same.
template <class Body>
void with_storage_types(Dtype rows, bool same, const Body& body) {
  with_storage_type(rows, [&](auto storage) {
    if (same) return body(storage, storage);
    body(storage, float{});
  });
}

template <class Kind, class T, class W, bool kOfSum>
void launch_long(const Norm& norm, const cuda::Device& device, cudaStream_t queue) {
  const auto kernel = long_kernel<Kind, T, W, kOfSum>;
  const int bytes = int(cuda::LongRow<T>::shared_bytes(norm.length));
  cuda::allow_shared_memory(kernel, bytes, Kind::kOp);
  const int64_t blocks = std::min<int64_t>(norm.rows, device.multiprocessors);
  kernel<<<unsigned(blocks), cuda::kLongTeam, bytes, queue>>>(norm, 1.0f / float(norm.length));
}

// Whether there was a kernel for it.
template <class Kind>
bool run_long(const Norm& norm, Dtype dtype, bool same, cudaStream_t queue) {
  if (dtype == Dtype::float16) return false;  // rare: they do not get kernels of their own
  const cuda::Device device(Kind::kOp);
  bool done = false;
  with_storage_types(dtype, same, [&](auto storage, auto of_vectors) {
    using T = decltype(storage);
    using W = decltype(of_vectors);
    if constexpr (!std::is_same_v<T, Half>) {
      using Row = cuda::LongRow<T>;
      if (norm.length > Row::kMostVectors * Row::kStride) return;
      if (Row::shared_bytes(norm.length) > device.shared_bytes) return;
      const bool is_of_sum = norm.residual.is_present();
      (is_of_sum ? launch_long<Kind, T, W, true> : launch_long<Kind, T, W, false>)(norm, device,
                                                                                   queue);
      done = true;
    }
  });
  return done;
}

template <class Kind, class Team>
void run_held(const Norm& norm, const Layout& layout, bool same, cudaStream_t queue) {
  with_storage_types(layout.dtype, same, [&](auto storage, auto of_vectors) {
    using T = decltype(storage);
    using W = decltype(of_vectors);
    const auto kernel = norm.residual.is_present() ? norm_kernel<Kind, Team, T, W, true>
                                                   : norm_kernel<Kind, Team, T, W, false>;
    const bool chained = norm.rows <= cuda::kChainedRows && cuda::can_chain(kernel, Kind::kOp);
    cuda::launch_kernel(kernel, {unsigned(layout.blocks), int(layout.block), 0, 1, chained}, queue,
                        Kind::kOp, norm, 1.0f / float(norm.length), layout.team);
  });
}

}  // namespace

template <class Kind>
void norm_cuda(const Norm& norm, void* stream) {
  if (norm.rows == 0 || norm.length == 0) return;
  constexpr const char* op = Kind::kOp;
  const cudaStream_t queue = cudaStream_t(stream);
  cuda::check(cudaPeekAtLastError(), op);  // of somebody before
  if (run_in_parts<Kind>(norm, queue)) return;
  const auto vectors = {norm.weight, norm.bias, norm.x_bias};
  const Layout layout(norm.rows, norm.length, {norm.x, norm.residual, norm.sum, norm.out}, vectors);
  // Of the kinds of vectors, those that people train with have kernels.
  const bool same = Layout::are_of(vectors, layout.dtype);
  bool is_done = false;
  const bool can_hold = layout.whole && (same || Layout::are_of(vectors, Dtype::float32));
  cuda::with_row_length(norm.length, [&](auto team) {
    using Team = typename decltype(team)::type;
    if (can_hold) {
      if constexpr (Team::kLength == RowLength::is_long) {
        is_done = run_long<Kind>(norm, layout.dtype, same, queue);
      } else {
        run_held<Kind, Team>(norm, layout, same, queue);
        is_done = true;
      }
    }
    if (is_done) return;
    reading_kernel<Kind, cuda::ReadingTeam<Team>>
        <<<unsigned(layout.blocks), layout.block, 0, queue>>>(norm, 1.0f / float(norm.length),
                                                              layout.team, layout.aligned);
  });
  cuda::check(cudaGetLastError(), op);
}

template void norm_cuda<DSX_NORM>(const Norm&, void*);

}  // namespace dsx

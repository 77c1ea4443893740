// The gradients of block_sparse_attention on CUDA by tensor cores: those of q by tiles of rows,
// then those of k and v by tiles of keys. Weights are made again; no two blocks write the same
// place.
#pragma once

#include "attention/sparse/block_sparse_attend_cuda.cuh"

namespace dsx::cuda {

// 16 lanes of a warp: rows of q and of the gradient of the result, or keys and values. Their
// fragments are kept where registers have room for them.
template <class Shape>
class LanePair {
  static constexpr bool kKeeps = Shape::kWidth <= 64;
  static constexpr int kKept = kKeeps ? Shape::kSteps : 1;

 public:
  __device__ LanePair(unsigned near, int bytes) {
    at_[0] = near + threadIdx.x / 32 * 16 * Shape::kRowBytes;
    at_[1] = at_[0] + bytes;
  }
  __device__ void keep() {
    if constexpr (kKeeps) {
#pragma unroll
      for (int which = 0; which < 2; ++which) {
#pragma unroll
        for (int step = 0; step < kKept; ++step) read(which, step, kept_[which][step]);
      }
    }
  }
  template <int kWhich>
  __device__ void load(int step, uint32_t (&words)[4]) const {
    if constexpr (kKeeps) {
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = kept_[kWhich][step % kKept][i];
    } else {
      read(kWhich, step, words);
    }
  }

 private:
  __device__ void read(int which, int step, uint32_t (&words)[4]) const {
    load_matrices<false>(words, further<Shape>(begin_of_rows<Shape>(at_[which]), 0, step));
  }
  unsigned at_[2];
  uint32_t kept_[2][kKept][4];
};

// What is the same for both: a warp with 16 lanes, rows if kRows, else keys.
template <class Shape, bool kRows>
class BackwardLanes {
 protected:
  static constexpr int kOthers = 2 * Shape::kAtOnce;  // times 8

  __device__ BackwardLanes(const SparseTask& task, const LaneTile& lanes, unsigned near)
      : call_(task.call),
        batch_(lanes.batch),
        head_(lanes.head),
        pair_(near, task.tile * Shape::kRowBytes) {
    const int warp = threadIdx.x / 32;
    first_ = lanes.first + warp * 16;
    bit_ = warp * 16 / call_.block;
    factor_ = (has_masks() ? 1.0f : call_.scale) * kLog2E;
  }

  __device__ bool has_masks() const { return Shape::kMasks && call_.masks > 0; }

  // Calls body(first, unit) for the units of a tile that lanes see, or that see them.
  template <class Body>
  __device__ void for_each_unit(const Pieces& pieces, const Body& body) const {
    const unsigned seen = __ballot_sync(0xffffffff, (pieces.names >> bit_ & 1) != 0);
#pragma unroll 1
    for (int unit = 0; unit < Shape::kUnits; unit += Shape::kAtOnce) {
      const int piece = unit / Shape::kBlockUnits;
      if ((seen >> piece & 1) == 0) continue;
      const int first =
          __shfl_sync(0xffffffff, pieces.token, piece) + unit % Shape::kBlockUnits * 16;
      if (first >= call_.tokens || is_hidden(first)) continue;
      body(first, unit);
    }
  }

  // Products of lanes and others, of q and k, and of the gradient of the result and v.
  __device__ void multiply(unsigned with_first, unsigned with_second) {
    set_to_0(scores_);
    set_to_0(grads_);
    multiply_rows<Shape>([&](int step, uint32_t (&words)[4]) {
      pair_.template load<0>(step, words);
    }, with_first, scores_);
    multiply_rows<Shape>([&](int step, uint32_t (&words)[4]) {
      pair_.template load<1>(step, words);
    }, with_second, grads_);
  }

  // From products to weights, and to gradients of scores; two_rows(n) knows the numbers of the rows
  // of product n.
  template <class TwoRows>
  __device__ void weigh(int first, const TwoRows& two_rows) {
    const int last = first + 16 * Shape::kAtOnce - 1;
    const bool at_edge = kRows ? last >= call_.tokens || (call_.causal && last > first_)
                               : call_.causal && first < first_ + 15;
    if (has_masks() || at_edge) {
      weigh_shaped(first, two_rows);
      return;
    }
    for_each_product(two_rows, [&](int n, int i, const RowNumbers& row) {
      const float weight = fast_exp2(__fmaf_rn(scores_[n][i], factor_, -row.shift));
      scores_[n][i] = weight;
      grads_[n][i] = weight * (grads_[n][i] - row.delta);
    });
  }

  const BlockSparse& call_;
  int batch_, head_, first_, bit_;
  float factor_;  // of scores, as powers of 2
  LanePair<Shape> pair_;
  float scores_[kOthers][4], grads_[kOthers][4];

 private:
  __device__ bool is_hidden(int first) const {
    if (!call_.causal) return false;
    return kRows ? first >= first_ + 16 : first + 16 * Shape::kAtOnce <= first_;
  }

  // Calls body(n, i, row) for element i of product n, and its row.
  template <class TwoRows, class Body>
  __device__ static void for_each_product(const TwoRows& two_rows, const Body& body) {
#pragma unroll
    for (int n = 0; n < kOthers; ++n) {
      const TwoNumbers rows = two_rows(n);
#pragma unroll
      for (int i = 0; i < 4; ++i) body(n, i, rows.row[kRows ? i / 2 : i % 2]);
    }
  }

  template <class TwoRows>
  __device__ void weigh_shaped(int first, const TwoRows& two_rows) {
    const float factor = has_masks() ? call_.scale : 1.0f;
    for_each_product(two_rows, [&](int n, int i, const RowNumbers& row) {
      const int lane = first_ + i / 2 * 8 + threadIdx.x % 32 / 4;
      const int other = first + n * 8 + threadIdx.x % 4 * 2 + i % 2;
      const int token = kRows ? lane : other, key = kRows ? other : lane;
      const float score =
          score_of<Shape::kMasks>(call_, batch_, head_, token, key, scores_[n][i], factor);
      const float weight = fast_exp2(__fmaf_rn(score, factor_, -row.shift));
      scores_[n][i] = score == -INFINITY ? 0.0f : weight;
      const float grad = weight * (grads_[n][i] - row.delta);
      grads_[n][i] = score == -INFINITY || weight == 0 ? 0.0f : grad;
    });
  }
};

template <class Shape>
class BackwardRows : BackwardLanes<Shape, true> {
  using Base = BackwardLanes<Shape, true>;

 public:
  __device__ BackwardRows(const SparseTask& task, const LaneTile& lanes, unsigned near)
      : Base(task, lanes, near) {
    const int64_t head = int64_t(this->batch_) * this->call_.heads + this->head_;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = this->first_ + i * 8 + threadIdx.x % 32 / 4;
      numbers_.row[i] = {0, 0};
      if (row < this->call_.tokens) numbers_.row[i] = task.numbers[head * this->call_.tokens + row];
    }
    set_to_0(sums_);
  }
  __device__ void keep() { this->pair_.keep(); }

  __device__ void take(const Pieces& pieces, unsigned keys, unsigned values) {
    this->for_each_unit(pieces, [&](int first, int unit) {
      const unsigned place = unit * 16 * Shape::kRowBytes;
      this->multiply(keys + place, values + place);
      this->weigh(first, [&](int) { return numbers_; });
      add_rows<Shape>(this->grads_, keys + place, sums_);
    });
  }

  __device__ void store(const SparseTask& task) const {
    using T = typename Shape::T;
    const HeadTokens& to = task.grad_q;
    const int tokens = int(this->call_.tokens),
              strips = int(ceil_div(this->call_.tokens, int64_t(16)));
    bool bad[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = this->first_ + i * 8 + threadIdx.x % 32 / 4;
      T* const target = static_cast<T*>(to.data) + this->batch_ * to.of_batch +
                        this->head_ * to.of_head + row * to.of_token;
      bad[i] =
          !store_lane(target, int(this->call_.width), sums_, i, this->call_.scale, row < tokens);
    }
    const uint32_t spoiled = rows_marked(bad[0], bad[1]);
    const int64_t head = int64_t(this->batch_) * this->call_.heads + this->head_;
    const int strip = this->first_ / 16;
    if (threadIdx.x % 32 == 0 && strip < strips) task.spoiled[head * strips + strip] = spoiled;
  }

 private:
  TwoNumbers numbers_;
  float sums_[Shape::kWidth / 8][4];
};

template <class Shape>
class BackwardColumns : BackwardLanes<Shape, false> {
  using Base = BackwardLanes<Shape, false>;

 public:
  __device__ BackwardColumns(const SparseTask& task, const LaneTile& lanes, unsigned near)
      : Base(task, lanes, near), kv_head_(lanes.head) {
    set_to_0(of_k_);
    set_to_0(of_v_);
  }
  __device__ void keep() { this->pair_.keep(); }
  __device__ void begin_head(int head) { this->head_ = head; }

  __device__ void take(const Pieces& pieces, unsigned queries, unsigned grads, unsigned numbers) {
    this->for_each_unit(pieces, [&](int first, int unit) {
      const unsigned place = unit * 16 * Shape::kRowBytes;
      this->multiply(queries + place, grads + place);
      const unsigned begin = numbers + (unit * 16 + threadIdx.x % 4 * 2) * sizeof(RowNumbers);
      this->weigh(
          first, [&](int n) { return load_numbers(begin + unsigned(n * 8 * sizeof(RowNumbers))); });
      add_rows<Shape>(this->scores_, grads + place, of_v_);
      add_rows<Shape>(this->grads_, queries + place, of_k_);
    });
  }

  __device__ void store(const SparseTask& task) const {
    const int tokens = int(this->call_.tokens),
              strips = int(ceil_div(this->call_.tokens, int64_t(16)));
    bool bad[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = this->first_ + i * 8 + threadIdx.x % 32 / 4;
      bad[i] = !store(task.grad_k, of_k_, key, i, this->call_.scale, key < tokens);
      if (!store(task.grad_v, of_v_, key, i, 1, key < tokens)) bad[i] = true;
    }
    const uint32_t spoiled = rows_marked(bad[0], bad[1]);
    const int64_t head = int64_t(this->batch_) * this->call_.kv_heads + kv_head_;
    const int strip = this->first_ / 16;
    if (threadIdx.x % 32 == 0 && strip < strips) task.spoiled[head * strips + strip] = spoiled;
  }

 private:
  __device__ bool store(const HeadTokens& to, const float (&sums)[Shape::kWidth / 8][4], int key,
                        int i, float factor, bool is_there) const {
    using T = typename Shape::T;
    T* const target = static_cast<T*>(to.data) + this->batch_ * to.of_batch +
                      kv_head_ * to.of_head + key * to.of_token;
    return store_lane(target, int(this->call_.width), sums, i, factor, is_there);
  }

  int kv_head_;
  float of_k_[Shape::kWidth / 8][4], of_v_[Shape::kWidth / 8][4];
};

template <class Shape>
__global__ void __launch_bounds__(Shape::kMostThreads)
    backward_rows_kernel(const __grid_constant__ SparseTask task) {
  extern __shared__ __align__(1024) char shared_bytes[];
  using T = typename Shape::T;
  const BlockSparse& call = task.call;
  const int tokens = int(call.tokens), width = int(call.width);
  const int lane_bytes = task.tile * Shape::kRowBytes;
  const unsigned near = unsigned(__cvta_generic_to_shared(shared_bytes));
  const LaneTile at(task, int(call.heads));
  const int kv_head = at.head / int(call.group());
  fetch_lanes<Shape>(call.q, at.batch, at.head, at.first, task.tile, tokens, width, near);
  fetch_lanes<Shape>(task.grad_out, at.batch, at.head, at.first, task.tile, tokens, width,
                     near + lane_bytes);
  BackwardRows<Shape> rows(task, at, near);
  const char* const heads[] = {head_of<T>(call.k, at.batch, kv_head),
                               head_of<T>(call.v, at.batch, kv_head)};
  const int64_t of_token[] = {call.k.of_token, call.v.of_token};
  for_each_tile<Shape>(task.lists.of(at.head, at.tile), call.block, near + 2 * lane_bytes,
                       2 * Shape::kTileBytes, [&](const Pieces& pieces, unsigned to) {
    fetch_pieces<Shape>(heads, of_token, pieces, tokens, width, to);
  }, [&](const Pieces& pieces, unsigned here, int tile) {
    if (tile == 0) rows.keep();
    rows.take(pieces, here, here + Shape::kTileBytes);
  });
  wait_for_fetches<0>();
  rows.store(task);
}

// Begins to fetch the numbers of the rows of a tile; those that are not there become 0.
template <class Shape>
__device__ inline void fetch_numbers(const RowNumbers* head, const Pieces& pieces, int tokens,
                                     char* near) {
  for (int row = threadIdx.x; row < Shape::kTokens; row += blockDim.x) {
    const int first = __shfl_sync(0xffffffff, pieces.token, row / Shape::kPieceTokens);
    const int token = first + row % Shape::kPieceTokens;
    auto* const to = reinterpret_cast<RowNumbers*>(near) + row;
    if (unsigned(token) < unsigned(tokens)) {
      fetch_bytes<8>(to, head + token);
    } else {
      *to = {0, 0};
    }
  }
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kMostThreads)
    backward_columns_kernel(const __grid_constant__ SparseTask task) {
  extern __shared__ __align__(1024) char shared_bytes[];
  using T = typename Shape::T;
  constexpr int kNumbers = Shape::kTokens * int(sizeof(RowNumbers));
  const BlockSparse& call = task.call;
  const int tokens = int(call.tokens), width = int(call.width), group = int(call.group());
  const int lane_bytes = task.tile * Shape::kRowBytes,
            tile_bytes = 2 * Shape::kTileBytes + kNumbers;
  const unsigned near = unsigned(__cvta_generic_to_shared(shared_bytes));
  const LaneTile at(task, int(call.kv_heads));
  fetch_lanes<Shape>(call.k, at.batch, at.head, at.first, task.tile, tokens, width, near);
  fetch_lanes<Shape>(call.v, at.batch, at.head, at.first, task.tile, tokens, width,
                     near + lane_bytes);
  BackwardColumns<Shape> columns(task, at, near);
  bool is_first = true;
#pragma unroll 1
  for (int head = at.head * group; head < (at.head + 1) * group; ++head) {
    const char* const heads[] = {head_of<T>(call.q, at.batch, head),
                                 head_of<T>(task.grad_out, at.batch, head)};
    const int64_t of_token[] = {call.q.of_token, task.grad_out.of_token};
    const RowNumbers* const numbers = task.numbers + (at.batch * call.heads + head) * tokens;
    columns.begin_head(head);
    for_each_tile<Shape>(task.lists.of(head, at.tile), call.block, near + 2 * lane_bytes,
                         tile_bytes, [&](const Pieces& pieces, unsigned to) {
      fetch_pieces<Shape>(heads, of_token, pieces, tokens, width, to);
      fetch_numbers<Shape>(numbers, pieces, tokens,
                           shared_bytes + (to - near) + 2 * Shape::kTileBytes);
    }, [&](const Pieces& pieces, unsigned here, int) {
      if (is_first) columns.keep();
      is_first = false;
      columns.take(pieces, here, here + Shape::kTileBytes, here + 2 * Shape::kTileBytes);
    });
  }
  wait_for_fetches<0>();
  columns.store(task);
}

}  // namespace dsx::cuda

// The loops of block_sparse_attention over strips of tokens. The others that a layout names go by
// in tiles; what a row has found so far is scaled as its largest score grows. Products with what is
// not finite would be NaN where its weight is 0: a strip whose results are not all finite is worked
// out again, in which such products have no part.
#include "common/simd/row_sums.inl"
#include "attention/sparse/block_sparse_tiles_cpu.inl"
#include "attention/sparse/block_sparse_scores_cpu.inl"

struct Copies {
  alignas(64) float floats[kStripTokens * kLargestHead];
};

// Elements of a piece of others as floats: where they are, or as copies.
inline FloatRows rows_of(const HeadTokens& tokens, int64_t batch, int64_t head,
                         const Others::Piece& piece, int64_t width, Copies& copies) {
  const Pointer<Any> source = tokens.at(batch, head, piece.token);
  if (tokens.dtype == Dtype::float32) {
    return {static_cast<const float*>(source.address), tokens.of_token};
  }
  float* const target = copies.floats + piece.first * width;
  for (int t = 0; t < piece.count; ++t) {
    for_each_vector(0, width, [&](int64_t i, int count) {
      Vec::load(source + (t * tokens.of_token + i), count).store(target + t * width + i, count);
    });
  }
  return {target, width};
}

template <bool kRows>
inline void read_lanes(const HeadTokens& tokens, const Strip<kRows>& strip, int64_t head,
                       int64_t width, Lanes& lanes) {
  alignas(64) float elements[kLargestHead] = {};
  for (int t = 0; t < strip.panels * kLine; ++t) {
    float* target = lanes.floats + t / kLine * (width * kLine) + t % kLine;
    if (t < strip.count) {
      const Pointer<Any> source = tokens.at(strip.batch, head, strip.first + t);
      for_each_vector(0, width, [&](int64_t i, int count) {
        Vec::load(source + i, count).store(elements + i, count);
      });
    } else if (t == strip.count) {
      for (int64_t i = 0; i < width; ++i) elements[i] = 0;
    }
    for (int64_t i = 0; i < width; ++i) target[i * kLine] = elements[i];
  }
}

inline void clear_lanes(int panels, int64_t width, Lanes& lanes) {
  for_each_vector(0, panels * width * kLine,
                  [&](int64_t i, int count) { Vec(0.0f).store(lanes.floats + i, count); });
}

// Writes lanes, each times its factor. False: something is not finite.
template <bool kRows>
inline bool write_lanes(const HeadTokens& tokens, const Strip<kRows>& strip, int64_t head,
                        int64_t width, const Lanes& lanes, const float* factors) {
  bool finite = true;
  alignas(64) float elements[kLargestHead];
  for (int t = 0; t < strip.count; ++t) {
    const float* source = lanes.floats + t / kLine * (width * kLine) + t % kLine;
    for (int64_t i = 0; i < width; ++i) elements[i] = source[i * kLine];
    const Pointer<Any> target = tokens.at(strip.batch, head, strip.first + t);
    for_each_vector(0, width, [&](int64_t i, int count) {
      const Vec value = Vec::load(elements + i, count) * Vec(factors[t]);
      finite &= !any(!(abs(value) < Vec(INFINITY)));
      value.store(target + i, count);
    });
  }
  return finite;
}

template <bool kRows>
inline Strip<kRows> strip_of(const BlockSparse& call, int64_t number, int64_t heads) {
  const int64_t strips = call.strips(), rest = number / strips;
  const int64_t first = number % strips * call.strip(), left = call.tokens - first;
  const int count = int(left < call.strip() ? left : call.strip());
  return {rest / heads, rest % heads, first, count, (count + kLine - 1) / kLine};
}

// What the rows of a strip have found.
struct Found {
  Lanes sums;                               // of values, weighted
  alignas(64) float largest[kStripTokens];  // score
  alignas(64) float total[kStripTokens];    // of weights
  alignas(64) float rescale[kStripTokens];  // of it and of sums, when another tile is added
};

// From products to weights, of lanes [lane, lane + Vec::size). False: nothing is to be rescaled.
template <bool kPlain>
inline bool weigh_lanes(const Scores<true>& scores, int count, int lane, float* tile,
                        Found& found) {
  const Vec before = Vec::load(found.largest + lane, Vec::size);
  Vec largest = before;
  for (int o = 0; o < count; ++o) {
    const Vec score = scores.at<kPlain>(Vec::load(tile + o * kLine, Vec::size), o, lane);
    largest = select(largest < score, score, largest);
    score.store(tile + o * kLine, Vec::size);
  }
  const Vec shift = shift_of(largest), rescale = exp_of_negative(before - shift);
  Vec sum(0.0f);
  for (int o = 0; o < count; ++o) {
    const Vec weight = exp_of_negative(Vec::load(tile + o * kLine, Vec::size) - shift);
    sum = sum + weight;
    weight.store(tile + o * kLine, Vec::size);
  }
  multiply_add(Vec::load(found.total + lane, Vec::size), rescale, sum)
      .store(found.total + lane, Vec::size);
  largest.store(found.largest + lane, Vec::size);
  rescale.store(found.rescale + lane, Vec::size);
  return any(rescale != Vec(1.0f));
}

inline void rescale_sums(int panels, int64_t width, Found& found) {
  for_each_lane(panels, [&](auto side, int p, int lane) {
    for (int s = 0; s < side.value; ++s) {
      const Vec rescale = Vec::load(found.rescale + (p + s) * kLine + lane, Vec::size);
      float* const sums = found.sums.floats + (p + s) * (width * kLine) + lane;
      for (int64_t i = 0; i < width; ++i) {
        (Vec::load(sums + i * kLine, Vec::size) * rescale).store(sums + i * kLine, Vec::size);
      }
    }
  });
}

inline void weigh(const BlockSparse& call, const Strip<true>& strip, const Others& others,
                  Tile& tile, Found& found) {
  const Scores<true> scores(call, strip, others);
  bool grown = false;
  with_scores(scores, [&](auto plain) {
    for (int lane = 0; lane < strip.panels * kLine; lane += Vec::size) {
      float* const of_lane = tile.floats + lane / kLine * Tile::kPanel + lane % kLine;
      grown |= weigh_lanes<plain.value>(scores, others.count, lane, of_lane, found);
    }
  });
  if (grown) rescale_sums(strip.panels, call.width, found);
}

inline bool write_found(const BlockSparse& call, const Strip<true>& strip, const Found& found) {
  alignas(64) float factors[kStripTokens], lse[kStripTokens];
  for (int lane = 0; lane < strip.panels * kLine; lane += Vec::size) {
    const Vec total = Vec::load(found.total + lane, Vec::size);
    inverse_of(total).store(factors + lane, Vec::size);
    (log(total) + shift_of(Vec::load(found.largest + lane, Vec::size)))
        .store(lse + lane, Vec::size);
  }
  const int64_t row = (strip.batch * call.heads + strip.head) * call.tokens + strip.first;
  for (int t = 0; t < strip.count; ++t) call.lse[row + t] = lse[t];
  return write_lanes(call.out, strip, strip.head, call.width, found.sums, factors);
}

template <bool kSafe>
inline bool attend_strip(const BlockSparse& call, const Strip<true>& strip, const Lanes& q,
                         Found& found) {
  const int64_t width = call.width, kv_head = strip.head / call.group();
  clear_lanes(strip.panels, width, found.sums);
  for (int t = 0; t < kStripTokens; ++t) found.largest[t] = -INFINITY, found.total[t] = 0;
  Walk<true> walk(call, strip);
  Others keys;
  Tile tile;
  Copies copies;
  while (walk.next(keys)) {
    for (int i = 0; i < keys.used; ++i) {
      const Others::Piece& piece = keys.pieces[i];
      const FloatRows k = rows_of(call.k, strip.batch, kv_head, piece, width, copies);
      multiply_tile(q, strip.panels, k, piece.count, width, tile, piece.first);
    }
    weigh(call, strip, keys, tile, found);
    for (int i = 0; i < keys.used; ++i) {
      const Others::Piece& piece = keys.pieces[i];
      const FloatRows v = rows_of(call.v, strip.batch, kv_head, piece, width, copies);
      add_tile<kSafe>(found.sums, strip.panels, v, piece.count, width, tile, piece.first);
    }
  }
  return write_found(call, strip, found);
}

inline void attend_rows(const BlockSparse& call, int64_t begin, int64_t end) {
  Lanes q;
  Found found;
  for (int64_t number = begin; number < end; ++number) {
    const auto strip = strip_of<true>(call, number, call.heads);
    read_lanes(call.q, strip, strip.head, call.width, q);
    if (!attend_strip<false>(call, strip, q, found)) attend_strip<true>(call, strip, q, found);
  }
}

// What backward knows of rows: of lanes, or of others.
struct RowNumbers {
  alignas(64) float shift[kStripTokens];  // that makes weights of scores
  alignas(64) float delta[kStripTokens];

  void set(const BlockSparseBackward& call, int64_t row, int i) {
    const float lse = call.forward.lse[row];
    shift[i] = lse == -INFINITY ? 0.0f : lse;
    delta[i] = call.deltas[row];
  }
};

// From products of q and k to weights, and from those of the gradient of the result and v to the
// gradients of scores.
template <bool kRows, bool kPlain>
inline void weigh_backward_of_lanes(const Scores<kRows>& scores, int count, int lane, float* tile,
                                    float* grads, const RowNumbers& rows) {
  Vec shift, delta;
  if constexpr (kRows) {
    shift = Vec::load(rows.shift + lane, Vec::size);
    delta = Vec::load(rows.delta + lane, Vec::size);
  }
  for (int o = 0; o < count; ++o) {
    if constexpr (!kRows) shift = Vec(rows.shift[o]), delta = Vec(rows.delta[o]);
    const int64_t at = o * kLine;
    const Vec score = scores.template at<kPlain>(Vec::load(tile + at, Vec::size), o, lane);
    Vec weight = exp_of_negative(score - shift);
    // The shift of a row that is not finite is NaN, also for what it does not see.
    if constexpr (!kPlain) weight = select(score == Vec(-INFINITY), Vec(0.0f), weight);
    grad_of_score(weight, Vec::load(grads + at, Vec::size), delta).store(grads + at, Vec::size);
    weight.store(tile + at, Vec::size);
  }
}

template <bool kRows>
inline void weigh_backward(const BlockSparse& call, const Strip<kRows>& strip, const Others& others,
                           const RowNumbers& rows, Tile& tile, Tile& grads) {
  const Scores<kRows> scores(call, strip, others);
  with_scores(scores, [&](auto plain) {
    for (int lane = 0; lane < strip.panels * kLine; lane += Vec::size) {
      const int64_t at = lane / kLine * Tile::kPanel + lane % kLine;
      weigh_backward_of_lanes<kRows, plain.value>(scores, others.count, lane, tile.floats + at,
                                                  grads.floats + at, rows);
    }
  });
}

// For each row, the dot product of its result and the gradient of that, less what comes back for
// the logarithm of its sum.
inline void find_deltas(const BlockSparseBackward& call, const Strip<true>& strip) {
  const BlockSparse& forward = call.forward;
  const int64_t first = (strip.batch * forward.heads + strip.head) * forward.tokens + strip.first;
  for (int t = 0; t < strip.count; ++t) {
    const Pointer<Any> out = forward.out.at(strip.batch, strip.head, strip.first + t);
    const Pointer<Any> grad = call.grad_out.at(strip.batch, strip.head, strip.first + t);
    float sum[1];
    add_row(forward.width, sum, [&](int64_t i, int count, Vec(&terms)[1]) {
      terms[0] = Vec::load(out + i, count) * Vec::load(grad + i, count);
    });
    call.deltas[first + t] = sum[0] - (call.grad_lse == nullptr ? 0.0f : call.grad_lse[first + t]);
  }
}

struct Scale {  // of all lanes
  float factors[kStripTokens];

  explicit Scale(float scale) {
    for (float& factor : factors) factor = scale;
  }
};

template <bool kSafe>
inline bool backward_of_row_strip(const BlockSparseBackward& call, const Strip<true>& strip,
                                  const Lanes& q, const Lanes& grad_out, Lanes& grad_q) {
  const BlockSparse& forward = call.forward;
  const int64_t width = forward.width, kv_head = strip.head / forward.group();
  const int64_t first = (strip.batch * forward.heads + strip.head) * forward.tokens + strip.first;
  clear_lanes(strip.panels, width, grad_q);
  RowNumbers rows = {};
  for (int t = 0; t < strip.count; ++t) rows.set(call, first + t, t);
  Walk<true> walk(forward, strip);
  Others keys;
  Tile tile, grads;
  Copies copies_of_k, copies_of_v;
  FloatRows k[kPanels];
  while (walk.next(keys)) {
    for (int i = 0; i < keys.used; ++i) {
      const Others::Piece& piece = keys.pieces[i];
      k[i] = rows_of(forward.k, strip.batch, kv_head, piece, width, copies_of_k);
      const FloatRows v = rows_of(forward.v, strip.batch, kv_head, piece, width, copies_of_v);
      multiply_tile(q, strip.panels, k[i], piece.count, width, tile, piece.first);
      multiply_tile(grad_out, strip.panels, v, piece.count, width, grads, piece.first);
    }
    weigh_backward(forward, strip, keys, rows, tile, grads);
    for (int i = 0; i < keys.used; ++i) {
      const Others::Piece& piece = keys.pieces[i];
      add_tile<kSafe>(grad_q, strip.panels, k[i], piece.count, width, grads, piece.first);
    }
  }
  const Scale scale(forward.scale);
  return write_lanes(call.grad_q, strip, strip.head, width, grad_q, scale.factors);
}

inline void backward_of_rows(const BlockSparseBackward& call, int64_t begin, int64_t end) {
  Lanes q, grad_out, grad_q;
  for (int64_t number = begin; number < end; ++number) {
    const auto strip = strip_of<true>(call.forward, number, call.forward.heads);
    find_deltas(call, strip);
    if (call.grad_q.data == nullptr) continue;
    read_lanes(call.forward.q, strip, strip.head, call.forward.width, q);
    read_lanes(call.grad_out, strip, strip.head, call.forward.width, grad_out);
    if (backward_of_row_strip<false>(call, strip, q, grad_out, grad_q)) continue;
    backward_of_row_strip<true>(call, strip, q, grad_out, grad_q);
  }
}

struct KeyLanes {
  Lanes k, v, grad_k, grad_v;
};

// Adds what the rows of one head of q give.
template <bool kSafe>
inline void add_rows_of_head(const BlockSparseBackward& call, const Strip<false>& strip,
                             KeyLanes& lanes) {
  const BlockSparse& forward = call.forward;
  const int64_t width = forward.width, batch = strip.batch, head = strip.head;
  Walk<false> walk(forward, strip);
  Others others;
  Tile tile, grads;
  Copies copies_of_q, copies_of_grad;
  RowNumbers rows;
  FloatRows q[kPanels], grad_out[kPanels];
  while (walk.next(others)) {
    for (int i = 0; i < others.count; ++i) {
      rows.set(call, (batch * forward.heads + head) * forward.tokens + others.token[i], i);
    }
    for (int i = 0; i < others.used; ++i) {
      const Others::Piece& piece = others.pieces[i];
      q[i] = rows_of(forward.q, batch, head, piece, width, copies_of_q);
      grad_out[i] = rows_of(call.grad_out, batch, head, piece, width, copies_of_grad);
      multiply_tile(lanes.k, strip.panels, q[i], piece.count, width, tile, piece.first);
      multiply_tile(lanes.v, strip.panels, grad_out[i], piece.count, width, grads, piece.first);
    }
    weigh_backward(forward, strip, others, rows, tile, grads);
    for (int i = 0; i < others.used; ++i) {
      const Others::Piece& piece = others.pieces[i];
      add_tile<kSafe>(lanes.grad_v, strip.panels, grad_out[i], piece.count, width, tile,
                      piece.first);
      add_tile<kSafe>(lanes.grad_k, strip.panels, q[i], piece.count, width, grads, piece.first);
    }
  }
}

template <bool kSafe>
inline bool backward_of_column_strip(const BlockSparseBackward& call, const Strip<false>& strip,
                                     KeyLanes& lanes) {
  const BlockSparse& forward = call.forward;
  const int64_t width = forward.width, group = forward.group();
  clear_lanes(strip.panels, width, lanes.grad_k);
  clear_lanes(strip.panels, width, lanes.grad_v);
  for (int64_t g = 0; g < group; ++g) {
    Strip<false> of_head = strip;
    of_head.head = strip.head * group + g;
    add_rows_of_head<kSafe>(call, of_head, lanes);
  }
  const Scale scale(forward.scale), one(1.0f);
  const bool k = write_lanes(call.grad_k, strip, strip.head, width, lanes.grad_k, scale.factors);
  return write_lanes(call.grad_v, strip, strip.head, width, lanes.grad_v, one.factors) && k;
}

inline void backward_of_columns(const BlockSparseBackward& call, int64_t begin, int64_t end) {
  const BlockSparse& forward = call.forward;
  KeyLanes lanes;
  for (int64_t number = begin; number < end; ++number) {
    const auto strip = strip_of<false>(forward, number, forward.kv_heads);  // head: of k
    read_lanes(forward.k, strip, strip.head, forward.width, lanes.k);
    read_lanes(forward.v, strip, strip.head, forward.width, lanes.v);
    if (backward_of_column_strip<false>(call, strip, lanes)) continue;
    backward_of_column_strip<true>(call, strip, lanes);
  }
}

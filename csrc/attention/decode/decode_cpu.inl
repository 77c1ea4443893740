// The loops of decode_attention: what some rows of a head find in a chunk of keys; then what a row
// has found in all of them. Rows go side by side through the same keys, each as if it were alone.
#include "common/simd/row_sums.inl"
#include "common/simd/largest.inl"
#include "attention/cache/paged_kv_cpu.inl"
#include "common/softmax_math.inl"

constexpr int kMostRows = 4;  // at a time
constexpr int kParts = kLine / Vec::size;
// How many keys, and vectors of a value, so many rows have sums for in registers.
constexpr bool kManyRegisters = Vec::size == kLine && Vec::registers == 1;
constexpr int kKeysAtATime = kManyRegisters ? 4 : 1;
constexpr int kVecsAtATime = kManyRegisters ? 4 : 1;

// A chunk of one slot for one head of keys.
struct ChunkOfKeys {
  Sequence sequence;
  int64_t head, first;  // of the keys, the position in the sequence
  int64_t pages[kChunkPages];
  int64_t following;  // the page that is worked on after these
};

// Some rows, which see keys [begin, end) of the chunk.
template <int kRows>
struct RowsOfChunk {
  int64_t row[kRows], position[kRows];
  int begin[kRows], end[kRows];
  int all_begin, all_end;  // what any of them sees
  alignas(64) float q[kRows][kLargestWidth];
  alignas(64) float scores[kRows][kChunkTokens];  // then weights
};

// Products of queries and one to four keys, side by side in memory or at their distance.
template <class T, int kRows, int kKeys>
inline void multiply_keys(const RowsOfChunk<kRows>& rows, const T* keys, int64_t of_token,
                          int64_t width, float (&products)[kRows][kKeys]) {
  Vec sums[kRows][kKeys][kParts];
  for (auto& of_row : sums) {
    for (auto& of_key : of_row) {
      for (Vec& sum : of_key) sum = Vec(0.0f);
    }
  }
  const auto add = [&](int64_t i, int part, int count) {
    Vec key[kKeys];
    for (int k = 0; k < kKeys; ++k) key[k] = load_kv(keys + k * of_token + i, count);
    for (int r = 0; r < kRows; ++r) {
      const Vec q = Vec::load(rows.q[r] + i, Vec::size);
      for (int k = 0; k < kKeys; ++k) sums[r][k][part] = multiply_add(q, key[k], sums[r][k][part]);
    }
  };
  const int64_t whole = width / kLine * kLine;
  for (int64_t i = 0; i < whole; i += kLine) {
    for (int part = 0; part < kParts; ++part) add(i + part * Vec::size, part, Vec::size);
  }
  for (int part = 0; part < kParts; ++part) {
    const int64_t i = whole + part * Vec::size;
    if (i < width) add(i, part, int(width - i < Vec::size ? width - i : Vec::size));
  }
  if constexpr (kKeys == 4) {
    for (int r = 0; r < kRows; ++r) store_lane_sums(sums[r], products[r]);
  } else {  // four rows, or some that are not there
    Vec of_rows[4][kParts];
    for (int r = 0; r < 4; ++r) {
      for (int part = 0; part < kParts; ++part) {
        of_rows[r][part] = r < kRows ? sums[r < kRows ? r : 0][0][part] : Vec(0.0f);
      }
    }
    float of_key[4];
    store_lane_sums(of_rows, of_key);
    for (int r = 0; r < kRows; ++r) products[r][0] = of_key[r];
  }
}

// The part of a page that keys [begin, end) of the chunk are in; some keys before them as well.
struct PartOfPage {
  int page;            // of the chunk
  int64_t begin, end;  // rows of the page
  bool none;
};
inline PartOfPage part_of_page(int page, int64_t begin, int64_t end) {
  const int64_t first = page * kPageTokens;
  const int64_t from = begin < first ? 0 : begin - first;
  const int64_t to = end - first < kPageTokens ? end - first : kPageTokens;
  return {page, from, to, from >= to};
}

// Asks for the rows of a page that the loop over another one is to be followed by: into the second
// cache, as the first one has no room for two. On a Zen 4, reads are 1.4 times as fast for it.
template <class T>
inline void ask_for_row(const T* page, int64_t of_token, int64_t token, int64_t width) {
  const char* row = reinterpret_cast<const char*>(page + token * of_token);
  for (int64_t i = 0; i < width * int64_t(sizeof(T)); i += 64) __builtin_prefetch(row + i, 0, 2);
}

template <class T, int kRows>
inline void score_page(const PagedKv& kv, RowsOfChunk<kRows>& rows, const PartOfPage& part,
                       const T* keys, const T* next) {
  const int64_t begin = part.begin / kKeysAtATime * kKeysAtATime;  // a page has all of them
  for (int64_t t = begin; t < part.end; t += kKeysAtATime) {
    for (int k = 0; k < kKeysAtATime; ++k) ask_for_row(next, kv.of_token, t + k, kv.width);
    float products[kRows][kKeysAtATime];
    multiply_keys(rows, keys + t * kv.of_token, kv.of_token, kv.width, products);
    for (int r = 0; r < kRows; ++r) {
      for (int k = 0; k < kKeysAtATime; ++k) {
        rows.scores[r][part.page * kPageTokens + t + k] = products[r][k];
      }
    }
  }
}

// From products to weights, of one row; tells the largest score and the sum of the weights.
template <class T, int kRows>
inline void weigh(const DecodeAttention& call, const ChunkOfKeys& chunk, RowsOfChunk<kRows>& rows,
                  int r, float* sum_and_largest) {
  float* scores = rows.scores[r];
  const int64_t q_head = chunk.head * call.group + rows.row[r] % call.group;
  const int begin = rows.begin[r] / 32 * 32, end = rows.end[r];
  const Vec scale(call.scale), lane = lane_numbers();
  const float soft_cap = call.soft_cap;
  Largest largest;
  for (int i = begin; i < end; i += Vec::size) {
    Vec score = Vec::load(scores + i, Vec::size) * scale;
    if constexpr (T::kQuantized) {
      const int64_t page = chunk.pages[i / kPageTokens];
      const int64_t place = call.kv.scale_place(page, chunk.head, i % kPageTokens);
      score = score * Vec::load(call.kv.key_scales + place, Vec::size);
    }
    if (soft_cap > 0) score = capped(score, soft_cap);
    if (call.alibi_slopes != nullptr) {
      const Vec distance = Vec(float(rows.position[r] - chunk.first - i)) - lane;
      score = biased(score, distance, call.alibi_slopes[q_head]);
    }
    if (i < rows.begin[r] || i + Vec::size > end) {
      const Mask seen = (lane >= Vec(float(rows.begin[r] - i))) & (lane < Vec(float(end - i)));
      score = select(seen, score, Vec(-INFINITY));
    }
    score.store(scores + i, Vec::size);
    largest.take(score, i);
  }
  const float most = largest.of_all();
  const Vec shift = shift_of(Vec(most));
  RowSums<1> sums;
  sums.add(begin, end, [&](int64_t i, int, Vec(&terms)[1]) {
    terms[0] = exp_of_negative(Vec::load(scores + i, Vec::size) - shift);
    terms[0].store(scores + i, Vec::size);
  });
  float sum[1];
  sums.store(sum);
  sum_and_largest[0] = sum[0];
  sum_and_largest[1] = most;
}

// Multiplies the weights by the scales of values; keys that a row does not see are left alone.
template <int kRows>
inline void scale_weights(const PagedKv& kv, const ChunkOfKeys& chunk, RowsOfChunk<kRows>& rows,
                          int r) {
  for (int t = rows.begin[r]; t < rows.end[r]; ++t) {
    const int64_t page = chunk.pages[t / kPageTokens];
    rows.scores[r][t] *= kv.value_scales[kv.scale_place(page, chunk.head, t % kPageTokens)];
  }
}

// Adds the values of tokens [begin, end) of a page, each times its weight, to elements from i on.
template <class T, int kRows, int kVecs>
inline void add_values(const float* const (&weights)[kRows], const T* values, int64_t of_token,
                       int64_t begin, int64_t end, int64_t i, int count, const T* next,
                       float* const (&targets)[kRows]) {
  Vec sums[kRows][kVecs];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVecs; ++v) {
      sums[r][v] = Vec::load(targets[r] + i + v * Vec::size, Vec::size);
    }
  }
  for (int64_t t = begin; t < end; ++t) {
    const T* value = values + t * of_token + i;
    ask_for_row(next + i, of_token, t, kVecs * Vec::size);
    Vec elements[kVecs];
    for (int v = 0; v < kVecs; ++v) elements[v] = load_kv(value + v * Vec::size, count);
    for (int r = 0; r < kRows; ++r) {
      const Vec weight(weights[r][t]);
      for (int v = 0; v < kVecs; ++v) sums[r][v] = multiply_add(weight, elements[v], sums[r][v]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVecs; ++v) {
      sums[r][v].store(targets[r] + i + v * Vec::size, Vec::size);
    }
  }
}

template <class T, int kRows>
inline void add_values_of_page(const float* const (&weights)[kRows], const T* values,
                               const PagedKv& kv, int64_t begin, int64_t end, const T* next,
                               float* const (&targets)[kRows]) {
  if (begin >= end) return;
  constexpr int64_t kAtATime = kVecsAtATime * Vec::size;
  int64_t i = 0;
  for (; i + kAtATime <= kv.width; i += kAtATime) {
    add_values<T, kRows, kVecsAtATime>(weights, values, kv.of_token, begin, end, i, Vec::size, next,
                                       targets);
  }
  for (; i < kv.width; i += Vec::size) {
    const int count = int(kv.width - i < Vec::size ? kv.width - i : Vec::size);
    add_values<T, kRows, 1>(weights, values, kv.of_token, begin, end, i, count, next, targets);
  }
}

// What rows see alone goes first and last, what all of them see in between: for each row that is
// the order of the tokens.
template <class T, int kRows>
inline void take_values(const RowsOfChunk<kRows>& rows, const PagedKv& kv, const PartOfPage& part,
                        const T* values, const T* next, float* const (&targets)[kRows]) {
  const int64_t first = part.page * kPageTokens;
  int64_t begin = part.begin, end = part.end;  // of what all see
  for (int r = 0; r < kRows; ++r) {
    if (rows.begin[r] - first > begin) begin = rows.begin[r] - first;
    if (rows.end[r] - first < end) end = rows.end[r] - first;
  }
  if (begin >= end) begin = end = part.end;
  const auto alone = [&](int r, int64_t from, int64_t to) {
    if (rows.begin[r] - first > from) from = rows.begin[r] - first;
    if (rows.end[r] - first < to) to = rows.end[r] - first;
    const float* const weights[1] = {rows.scores[r] + first};
    float* const target[1] = {targets[r]};
    add_values_of_page<T, 1>(weights, values, kv, from, to, next, target);
  };
  const float* weights[kRows];
  for (int r = 0; r < kRows; ++r) {
    weights[r] = rows.scores[r] + first;
    alone(r, part.begin, begin);
  }
  add_values_of_page<T, kRows>(*const_cast<const float* const(*)[kRows]>(&weights), values, kv,
                               begin, end, next, targets);
  for (int r = 0; r < kRows; ++r) alone(r, end, part.end);
}

template <int kRows>
inline void read_rows(const DecodeAttention& call, const ChunkOfKeys& chunk, int64_t batch,
                      int64_t first_row, int64_t end_row, RowsOfChunk<kRows>& rows) {
  rows.all_begin = kChunkTokens;
  rows.all_end = 0;
  for (int r = 0; r < kRows; ++r) {
    // Beyond the last one, that one again.
    const int64_t row = first_row + r < end_row ? first_row + r : end_row - 1;
    const int64_t token = row / call.group;
    rows.row[r] = row;
    rows.position[r] = chunk.sequence.position(token);
    const Seen seen = seen_at(rows.position[r], call.window);
    const auto in_chunk = [&](int64_t key) {
      key -= chunk.first;
      return int(key < 0 ? 0 : key > kChunkTokens ? kChunkTokens : key);
    };
    rows.begin[r] = in_chunk(seen.begin);
    rows.end[r] = in_chunk(seen.end);
    if (rows.begin[r] < rows.all_begin) rows.all_begin = rows.begin[r];
    if (rows.end[r] > rows.all_end) rows.all_end = rows.end[r];
    const int64_t head = chunk.head * call.group + row % call.group;
    const auto source = call.q.at<Any>(batch, token, head);
    for (int64_t i = 0; i < padded_width(call.kv.width); i += Vec::size) {
      const int64_t left = call.kv.width - i;
      const Vec q =
          left <= 0 ? Vec(0.0f) : Vec::load(source + i, int(left < Vec::size ? left : Vec::size));
      q.store(rows.q[r] + i, Vec::size);
    }
  }
}

template <class Kind, class T, int kRows>
inline void attend_rows(const DecodeAttention& call, const ChunkOfKeys& chunk, int64_t batch,
                        int64_t first_row, int64_t end_row, float* partials) {
  const PagedKv& kv = call.kv;
  RowsOfChunk<kRows> rows;
  read_rows(call, chunk, batch, first_row, end_row, rows);
  const int64_t padded = padded_width(kv.width), floats = partial_floats(kv.width);
  float* targets[kRows];
  alignas(64) float unused[kLargestWidth + 16];
  for (int r = 0; r < kRows; ++r) {
    const bool there = first_row + r < end_row;
    targets[r] = there ? partials + rows.row[r] * floats : unused;
    for (int64_t i = 0; i < padded; ++i) targets[r][i] = 0.0f;
  }
  const T* const keys = static_cast<const T*>(kv.keys);
  const T* const values = static_cast<const T*>(kv.values);
  const auto page_at = [&](const T* from, int page) {
    return from + kv.place(chunk.pages[page], chunk.head, 0);
  };
  int last = 0;  // page that has any
  for (int page = 0; page < kChunkPages; ++page) {
    if (!part_of_page(page, rows.all_begin, rows.all_end).none) last = page;
  }
  for (int page = 0; page <= last; ++page) {
    const PartOfPage part = part_of_page(page, rows.all_begin, rows.all_end);
    if (part.none) continue;
    const T* next = page < last ? page_at(keys, page + 1) : page_at(values, 0);
    score_page(kv, rows, part, page_at(keys, page), next);
  }
  for (int r = 0; r < kRows; ++r) {
    weigh<Kind>(call, chunk, rows, r, targets[r] + padded);
    if constexpr (Kind::kQuantized) scale_weights(kv, chunk, rows, r);
  }
  for (int page = 0; page <= last; ++page) {
    const PartOfPage part = part_of_page(page, rows.all_begin, rows.all_end);
    if (part.none) continue;
    const T* next =
        page < last ? page_at(values, page + 1) : keys + kv.place(chunk.following, chunk.head, 0);
    take_values(rows, kv, part, page_at(values, page), next,
                *const_cast<float* const(*)[kRows]>(&targets));
  }
}

template <class Kind, class T>
inline void attend_chunk(const DecodeAttention& call, const ChunkOfKeys& chunk, int64_t batch,
                         float* partials) {
  const int64_t rows = chunk.sequence.count * call.group;
  for (int64_t row = 0; row < rows; row += kMostRows) {
    if (rows - row == 1) {
      attend_rows<Kind, T, 1>(call, chunk, batch, row, rows, partials);
    } else {
      attend_rows<Kind, T, kMostRows>(call, chunk, batch, row, rows, partials);
    }
  }
}

// Says of all rows that what they have found is not a number.
inline void spoil(const DecodeAttention& call, int64_t rows, float* partials) {
  const int64_t padded = padded_width(call.kv.width), floats = partial_floats(call.kv.width);
  for (int64_t row = 0; row < rows; ++row, partials += floats) {
    for (int64_t i = 0; i < padded; ++i) partials[i] = 0.0f;
    partials[padded] = NAN;
    partials[padded + 1] = -INFINITY;
  }
}

template <class Kind, class T>
inline void decode_tasks(const DecodeAttention& call, const DecodeTasks& tasks, int64_t begin,
                         int64_t end) {
  const int64_t of_task = call.rows() * partial_floats(call.kv.width);
  int64_t batch = 0;
  for (int64_t task = begin; task < end; ++task) {
    while (tasks.first[batch + 1] <= task) ++batch;
    ChunkOfKeys chunk;
    chunk.sequence = sequence_of(call.kv, call.news, batch);
    const int64_t in_batch = task - tasks.first[batch];
    const Chunks chunks = chunks_of(chunk.sequence, call.window);
    const int64_t count = chunks.end - chunks.first;
    chunk.head = in_batch / count;
    const int64_t number = chunks.first + in_batch % count;
    chunk.first = number * kChunkTokens;
    bool wrong = false;
    int64_t any = 0;  // for pages that no row looks at
    const int64_t seen = seen_at(chunk.sequence.position(0), call.window).begin;
    for (int page = kChunkPages - 1; page >= 0; --page) {
      const int64_t i = number * kChunkPages + page;
      const bool used = i * kPageTokens < chunk.sequence.length && (i + 1) * kPageTokens > seen;
      chunk.pages[page] = used ? call.kv.page_of(chunk.sequence.slot, i) : any;
      if (used && chunk.pages[page] < 0) wrong = true;
      if (used && !wrong) any = chunk.pages[page];
    }
    const bool more = in_batch % count + 1 < count;
    chunk.following = more ? call.kv.page_of(chunk.sequence.slot, (number + 1) * kChunkPages) : -1;
    if (chunk.following < 0) chunk.following = chunk.pages[0];
    float* partials = tasks.partials + task * of_task;
    if (wrong) {
      spoil(call, chunk.sequence.count * call.group, partials);
    } else {
      attend_chunk<Kind, T>(call, chunk, batch, partials);
    }
  }
}

inline float first_of(Vec a) {
  float lanes[Vec::size];
  a.store(lanes, Vec::size);
  return lanes[0];
}

inline void merge_row(const DecodeAttention& call, const DecodeTasks& tasks, int64_t index) {
  const int64_t heads = call.q.heads, width = call.kv.width;
  const int64_t batch = index / (call.news.tokens * heads);
  const int64_t token = index / heads % call.news.tokens, head = index % heads;
  const Sequence sequence = sequence_of(call.kv, call.news, batch);
  const Pointer<Any> out = Pointer<Any>::to(call.out, call.q.dtype) + index * width;
  if (sequence.wrong || token >= sequence.count) {
    const float value = sequence.wrong ? NAN : 0.0f;
    for_each_vector(0, width, [&](int64_t i, int count) { Vec(value).store(out + i, count); });
    call.lse[index] = sequence.wrong ? NAN : -INFINITY;
    return;
  }
  const Chunks chunks = chunks_of(sequence, call.window);
  const int64_t count = chunks.end - chunks.first, floats = partial_floats(width);
  const int64_t padded = padded_width(width), of_task = call.rows() * floats;
  const int64_t task = tasks.first[batch] + head / call.group * count;
  const float* const first =
      tasks.partials + task * of_task + (token * call.group + head % call.group) * floats;
  const float sink = call.sinks == nullptr ? -INFINITY : call.sinks[head];
  float largest = sink == sink ? sink : -INFINITY;
  for (int64_t i = 0; i < count; ++i) {
    const float each = first[i * of_task + padded + 1];
    if (largest < each) largest = each;
  }
  const float shift = largest == -INFINITY ? 0.0f : largest;
  float total = first_of(exp_of_negative(Vec(sink - shift)));
  alignas(64) float sums[kLargestWidth] = {};
  for (int64_t i = 0; i < count; ++i) {
    const float* const partial = first + i * of_task;
    const float rescale = first_of(exp_of_negative(Vec(partial[padded + 1] - shift)));
    total = std::fma(partial[padded], rescale, total);
    for (int64_t k = 0; k < padded; k += Vec::size) {
      multiply_add(Vec::load(partial + k, Vec::size), Vec(rescale), Vec::load(sums + k, Vec::size))
          .store(sums + k, Vec::size);
    }
  }
  const Vec inverse = inverse_of(Vec(total));
  for_each_vector(0, width, [&](int64_t i, int lanes) {
    (Vec::load(sums + i, Vec::size) * inverse).store(out + i, lanes);
  });
  call.lse[index] = first_of(log(Vec(total))) + shift;
}

inline void merge_rows(const DecodeAttention& call, const DecodeTasks& tasks, int64_t begin,
                       int64_t end) {
  for (int64_t row = begin; row < end; ++row) merge_row(call, tasks, row);
}

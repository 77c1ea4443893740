// The loops of prefill_attention over strips of rows. Each lane of a vector is a row, so that a key
// or a value is one number for all of them, rows stay apart, and no sum depends on how wide a
// vector is. The pages of a slot go by once for a strip, each as floats; what a row has found so
// far is scaled as its largest score grows.
#include "common/simd/largest.inl"
#include "attention/cache/paged_kv_cpu.inl"
#include "common/softmax_math.inl"

constexpr int kBlockRows = 32;  // whose queries fit the first cache
constexpr int kBlocks = kStripRows / kBlockRows;
constexpr int kVecs = kBlockRows / Vec::size;
// How many vectors of rows, and keys or elements of a value, have sums in registers.
constexpr bool kManyRegisters = Vec::size == kLine && Vec::registers == 1;
constexpr int kVecsAtATime = kManyRegisters ? 2 : 1;
constexpr int kAtATime = kManyRegisters ? 8 : 4;

// Some rows of a strip, and what they have found. Rows that are not there see nothing.
struct RowBlock {
  alignas(64) float q[kLargestWidth][kBlockRows];
  alignas(64) float sums[kLargestWidth][kBlockRows];  // of values, weighted
  alignas(64) float scores[kPageTokens][kBlockRows];  // of the keys of a page, then weights
  alignas(64) float largest[kBlockRows];
  alignas(64) float total[kBlockRows];    // of weights
  alignas(64) float rescale[kBlockRows];  // of it and of sums, when another page is added
  // Keys of the page that a row sees, and where its own is, all counted from the first of the page.
  alignas(64) float begin[kBlockRows];
  alignas(64) float end[kBlockRows];
  alignas(64) float position[kBlockRows];
  alignas(64) float slope[kBlockRows];
  int used_vecs;
  int64_t first_position, last_position;
  int64_t positions[kBlockRows];  // -1: there is no such row
};

// A strip of the rows of a head of keys of one slot.
struct Strip {
  Sequence sequence;
  int64_t batch, head, first_row;
  int64_t page;        // its number in the cache
  int64_t begin, end;  // keys of the page that are worked on
  RowBlock blocks[kBlocks];
  alignas(64) float keys[kPageTokens * kLargestWidth];  // then values, unless they are floats
};

inline int64_t row_count(const PrefillAttention& call, const Strip& strip) {
  const int64_t left = strip.sequence.count * call.group - strip.first_row;
  return left < 0 ? 0 : left < kStripRows ? left : kStripRows;
}

inline void read_queries(const PrefillAttention& call, Strip& strip) {
  const int64_t rows = row_count(call, strip), width = call.kv.width;
  alignas(64) float elements[kLargestWidth];
  for (int64_t r = 0; r < kStripRows; ++r) {
    RowBlock& block = strip.blocks[r / kBlockRows];
    const int64_t lane = r % kBlockRows;
    if (lane == 0) {
      const int64_t in_block = rows - r < kBlockRows ? rows - r : kBlockRows;
      block.used_vecs = in_block <= 0 ? 0 : int((in_block + Vec::size - 1) / Vec::size);
      block.used_vecs = (block.used_vecs + kVecsAtATime - 1) / kVecsAtATime * kVecsAtATime;
    }
    block.largest[lane] = -INFINITY;
    block.total[lane] = 0.0f;
    block.slope[lane] = 0.0f;
    block.positions[lane] = -1;
    if (r >= rows) {
      for (int64_t i = 0; i < width; ++i) block.q[i][lane] = 0.0f;
      continue;
    }
    const int64_t row = strip.first_row + r, head = strip.head * call.group + row % call.group;
    const int64_t token = row / call.group;
    block.positions[lane] = strip.sequence.position(token);
    if (lane == 0) block.first_position = block.positions[0];
    block.last_position = block.positions[lane];
    if (call.alibi_slopes != nullptr) block.slope[lane] = call.alibi_slopes[head];
    const auto source = call.q.at<Any>(strip.batch, token, head);
    for_each_vector(0, width, [&](int64_t i, int count) {
      Vec::load(source + i, count).store(elements + i, count);
    });
    for (int64_t i = 0; i < width; ++i) block.q[i][lane] = elements[i];
  }
  for (RowBlock& block : strip.blocks) {
    for (int64_t i = 0; i < width; ++i) {
      for (int lane = 0; lane < kBlockRows; lane += Vec::size) {
        Vec(0.0f).store(block.sums[i] + lane, Vec::size);
      }
    }
  }
}

// Which keys of page number `page` each row sees.
inline void find_seen(const PrefillAttention& call, int64_t page, RowBlock& block) {
  const int64_t first = page * kPageTokens;
  for (int lane = 0; lane < kBlockRows; ++lane) {
    const int64_t position = block.positions[lane];
    const Seen seen = position < 0 ? Seen{0, 0} : seen_at(position, call.window);
    const auto in_page = [&](int64_t key) {
      key -= first;
      return float(key < 0 ? 0 : key > kPageTokens ? kPageTokens : key);
    };
    block.begin[lane] = in_page(seen.begin);
    block.end[lane] = in_page(seen.end);
    block.position[lane] = float(position - first);
  }
}

// The products of all queries of a block and keys [token, token + kAtATime).
inline void multiply_keys(RowBlock& block, const float* keys, int64_t of_token, int64_t width,
                          int64_t token) {
  for (int v = 0; v < block.used_vecs; v += kVecsAtATime) {
    const int lane = v * Vec::size;
    Vec sums[kAtATime][kVecsAtATime];
    for (auto& of_key : sums) {
      for (Vec& sum : of_key) sum = Vec(0.0f);
    }
    for (int64_t i = 0; i < width; ++i) {
      Vec q[kVecsAtATime];
      for (int k = 0; k < kVecsAtATime; ++k) {
        q[k] = Vec::load(block.q[i] + lane + k * Vec::size, Vec::size);
      }
      for (int t = 0; t < kAtATime; ++t) {
        const Vec key(keys[t * of_token + i]);
        for (int k = 0; k < kVecsAtATime; ++k) sums[t][k] = multiply_add(key, q[k], sums[t][k]);
      }
    }
    for (int t = 0; t < kAtATime; ++t) {
      for (int k = 0; k < kVecsAtATime; ++k) {
        sums[t][k].store(block.scores[token + t] + lane + k * Vec::size, Vec::size);
      }
    }
  }
}

// From products to weights, of keys [begin, end) of a page.
template <class Kind>
inline void weigh(const PrefillAttention& call, const Strip& strip, RowBlock& block) {
  const float *key_scales = nullptr, *value_scales = nullptr;
  if constexpr (Kind::kQuantized) {
    const int64_t place = call.kv.scale_place(strip.page, strip.head, 0);
    key_scales = call.kv.key_scales + place;
    value_scales = call.kv.value_scales + place;
  }
  const Vec scale(call.scale);
  const float soft_cap = call.soft_cap;
  for (int lane = 0; lane < block.used_vecs * Vec::size; lane += Vec::size) {
    const Vec before = Vec::load(block.largest + lane, Vec::size);
    const Vec seen_from = Vec::load(block.begin + lane, Vec::size);
    const Vec seen_to = Vec::load(block.end + lane, Vec::size);
    const Vec position = Vec::load(block.position + lane, Vec::size);
    const Vec slope = Vec::load(block.slope + lane, Vec::size);
    Vec largest = before;
    for (int64_t t = strip.begin; t < strip.end; ++t) {
      Vec score = Vec::load(block.scores[t] + lane, Vec::size) * scale;
      if constexpr (Kind::kQuantized) score = score * Vec(key_scales[t]);
      if (soft_cap > 0) score = capped(score, soft_cap);
      const Vec key((float(t)));
      if (call.alibi_slopes != nullptr) score = biased(score, position - key, slope);
      score = select((seen_from <= key) & (key < seen_to), score, Vec(-INFINITY));
      largest = select(largest < score, score, largest);
      score.store(block.scores[t] + lane, Vec::size);
    }
    const Vec shift = shift_of(largest);
    const Vec rescale = exp_of_negative(before - shift);
    Vec sum(0.0f);
    for (int64_t t = strip.begin; t < strip.end; ++t) {
      Vec weight = exp_of_negative(Vec::load(block.scores[t] + lane, Vec::size) - shift);
      sum = sum + weight;
      if constexpr (Kind::kQuantized) weight = weight * Vec(value_scales[t]);
      weight.store(block.scores[t] + lane, Vec::size);
    }
    multiply_add(Vec::load(block.total + lane, Vec::size), rescale, sum)
        .store(block.total + lane, Vec::size);
    largest.store(block.largest + lane, Vec::size);
    rescale.store(block.rescale + lane, Vec::size);
  }
}

// Adds elements [first, first + kElements) of the values of keys [begin, end), each times its
// weight. Where some rows do not see all of them, what is not finite must not reach those.
template <int kElements, bool kAllSeen>
inline void add_values(RowBlock& block, const float* values, int64_t of_token, int64_t first,
                       int64_t begin, int64_t end) {
  for (int v = 0; v < block.used_vecs; v += kVecsAtATime) {
    const int lane = v * Vec::size;
    Vec sums[kElements][kVecsAtATime], from[kVecsAtATime], to[kVecsAtATime];
    for (int k = 0; k < kVecsAtATime; ++k) {
      const int first_lane = lane + k * Vec::size;
      const Vec rescale = Vec::load(block.rescale + first_lane, Vec::size);
      from[k] = Vec::load(block.begin + first_lane, Vec::size);
      to[k] = Vec::load(block.end + first_lane, Vec::size);
      for (int i = 0; i < kElements; ++i) {
        sums[i][k] = Vec::load(block.sums[first + i] + first_lane, Vec::size) * rescale;
      }
    }
    for (int64_t t = begin; t < end; ++t) {
      const float* value = values + t * of_token + first;
      for (int k = 0; k < kVecsAtATime; ++k) {
        const Vec weight = Vec::load(block.scores[t] + lane + k * Vec::size, Vec::size);
        const Vec key((float(t)));
        for (int i = 0; i < kElements; ++i) {
          const Vec sum = multiply_add(Vec(value[i]), weight, sums[i][k]);
          if constexpr (kAllSeen) {
            sums[i][k] = sum;
          } else {
            sums[i][k] = select((from[k] <= key) & (key < to[k]), sum, sums[i][k]);
          }
        }
      }
    }
    for (int i = 0; i < kElements; ++i) {
      for (int k = 0; k < kVecsAtATime; ++k) {
        sums[i][k].store(block.sums[first + i] + lane + k * Vec::size, Vec::size);
      }
    }
  }
}

template <bool kAllSeen>
inline void add_values_of_page(RowBlock& block, const float* values, int64_t of_token,
                               int64_t width, int64_t begin, int64_t end) {
  int64_t i = 0;
  for (; i + kAtATime <= width; i += kAtATime) {
    add_values<kAtATime, kAllSeen>(block, values, of_token, i, begin, end);
  }
  for (; i < width; ++i) add_values<1, kAllSeen>(block, values, of_token, i, begin, end);
}

// Elements of tokens [begin, end) of a page as floats: where they are, or as copies.
struct FloatPage {
  const float* data;
  int64_t of_token;
};
template <class T>
inline FloatPage floats_of_page(const PagedKv& kv, const T* page, int64_t begin, int64_t end,
                                float* copies) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return {page, kv.of_token};
  } else {
    for (int64_t t = begin; t < end; ++t) {
      for_each_vector(0, kv.width, [&](int64_t i, int count) {
        load_kv(page + t * kv.of_token + i, count).store(copies + t * kLargestWidth + i, count);
      });
    }
    return {copies, kLargestWidth};
  }
}

template <class Kind, class T>
inline void attend_page(const PrefillAttention& call, int64_t number, Strip& strip) {
  const PagedKv& kv = call.kv;
  const int64_t first = number * kPageTokens, place = kv.place(strip.page, strip.head, 0);
  const auto sees = [&](const RowBlock& block) {
    return block.used_vecs > 0 && block.last_position >= first &&
           seen_at(block.first_position, call.window).begin < first + kPageTokens;
  };
  const RowBlock& last = strip.blocks[kBlocks - 1];
  const int64_t furthest = last.used_vecs > 0 ? last.last_position : strip.blocks[0].last_position;
  const int64_t least = seen_at(strip.blocks[0].first_position, call.window).begin - first;
  strip.begin = least < 0 ? 0 : least / kAtATime * kAtATime;
  strip.end = furthest + 1 - first < kPageTokens ? furthest + 1 - first : kPageTokens;
  const int64_t end = (strip.end + kAtATime - 1) / kAtATime * kAtATime;  // a page has all of them
  const FloatPage keys =
      floats_of_page(kv, static_cast<const T*>(kv.keys) + place, strip.begin, end, strip.keys);
  for (RowBlock& block : strip.blocks) {
    if (!sees(block)) continue;
    find_seen(call, number, block);
    for (int64_t t = strip.begin; t < end; t += kAtATime) {
      multiply_keys(block, keys.data + t * keys.of_token, keys.of_token, kv.width, t);
    }
    weigh<Kind>(call, strip, block);
  }
  const FloatPage values = floats_of_page(kv, static_cast<const T*>(kv.values) + place, strip.begin,
                                          strip.end, strip.keys);
  for (RowBlock& block : strip.blocks) {
    if (!sees(block)) continue;
    const bool all_seen = block.first_position >= first + strip.end - 1 &&
                          seen_at(block.last_position, call.window).begin <= first + strip.begin;
    const auto add = all_seen ? add_values_of_page<true> : add_values_of_page<false>;
    add(block, values.data, values.of_token, kv.width, strip.begin, strip.end);
  }
}

// The results of rows that are not there, or of a batch's row that cannot be.
inline void fill_row(const PrefillAttention& call, int64_t index, float value, float lse) {
  const auto out = Pointer<Any>::to(call.out, call.q.dtype) + index * call.kv.width;
  for_each_vector(0, call.kv.width,
                  [&](int64_t i, int count) { Vec(value).store(out + i, count); });
  call.lse[index] = lse;
}

inline float first_of(Vec a) {
  float lanes[Vec::size];
  a.store(lanes, Vec::size);
  return lanes[0];
}

inline void finish_row(const PrefillAttention& call, const RowBlock& block, int lane, int64_t head,
                       int64_t index) {
  const float sink = call.sinks == nullptr ? -INFINITY : call.sinks[head];
  const float most = block.largest[lane];
  const Vec shift = shift_of(Vec(sink > most ? sink : most));
  const Vec rescale = exp_of_negative(Vec(most) - shift);
  const Vec total =
      multiply_add(Vec(block.total[lane]), rescale, exp_of_negative(Vec(sink) - shift));
  const Vec factor = rescale * inverse_of(total);
  alignas(64) float elements[kLargestWidth];
  for (int64_t i = 0; i < call.kv.width; ++i) elements[i] = block.sums[i][lane];
  const auto out = Pointer<Any>::to(call.out, call.q.dtype) + index * call.kv.width;
  for_each_vector(0, call.kv.width, [&](int64_t i, int count) {
    (Vec::load(elements + i, count) * factor).store(out + i, count);
  });
  call.lse[index] = first_of(log(total) + shift);
}

inline void write_results(const PrefillAttention& call, const Strip& strip, bool wrong) {
  const int64_t rows = call.rows() - strip.first_row;
  for (int64_t r = 0; r < kStripRows && r < rows; ++r) {
    const int64_t row = strip.first_row + r, token = row / call.group;
    const int64_t head = strip.head * call.group + row % call.group;
    const int64_t index = (strip.batch * call.news.tokens + token) * call.q.heads + head;
    if (wrong) {
      fill_row(call, index, NAN, NAN);
    } else if (token >= strip.sequence.count) {
      fill_row(call, index, 0.0f, -INFINITY);
    } else {
      finish_row(call, strip.blocks[r / kBlockRows], int(r % kBlockRows), head, index);
    }
  }
}

// Whether the table has all pages that any new token of the slot looks at.
inline bool has_pages(const PrefillAttention& call, const Sequence& sequence) {
  if (sequence.count == 0) return true;
  const int64_t begin = seen_at(sequence.position(0), call.window).begin / kPageTokens;
  bool has = true;
  for (int64_t i = begin; i * kPageTokens < sequence.length; ++i) {
    has &= call.kv.page_of(sequence.slot, i) >= 0;
  }
  return has;
}

template <class Kind, class T>
inline void attend_strip(const PrefillAttention& call, Strip& strip) {
  read_queries(call, strip);
  const int64_t rows = row_count(call, strip);
  const int64_t first_token = strip.first_row / call.group;
  const int64_t last_token = (strip.first_row + rows - 1) / call.group;
  const Sequence& sequence = strip.sequence;
  const int64_t begin = seen_at(sequence.position(first_token), call.window).begin / kPageTokens;
  for (int64_t page = begin; page * kPageTokens <= sequence.position(last_token); ++page) {
    strip.page = call.kv.page_of(sequence.slot, page);
    attend_page<Kind, T>(call, page, strip);
  }
}

// Strips of all batches and heads come in pairs, one from either end, as the work of those of a
// slot grows along it, and threads get ranges.
template <class Kind>
inline void attend_strips(const PrefillAttention& call, int64_t begin, int64_t end) {
  const int64_t strips = strips_of(call), beside = call.news.batches * call.kv.heads;
  for (int64_t task = begin; task < end; ++task) {
    const int64_t number = task / beside;
    Strip strip;
    strip.batch = task % beside / call.kv.heads;
    strip.head = task % call.kv.heads;
    strip.first_row = (number % 2 == 0 ? number / 2 : strips - 1 - number / 2) * kStripRows;
    strip.sequence = sequence_of(call.kv, call.news, strip.batch);
    const bool wrong = strip.sequence.wrong || !has_pages(call, strip.sequence);
    if (!wrong && row_count(call, strip) > 0) {
      if constexpr (Kind::kQuantized) {
        attend_strip<Kind, Kind>(call, strip);
      } else {
        switch (call.kv.dtype) {
          case Dtype::bfloat16: attend_strip<Kind, BFloat16>(call, strip); break;
          case Dtype::float16: attend_strip<Kind, Half>(call, strip); break;
          case Dtype::float32: attend_strip<Kind, float>(call, strip); break;
        }
      }
    }
    write_results(call, strip, wrong);
  }
}

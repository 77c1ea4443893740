// The loops of rope over a range of tokens: a table of cosines and sines for some tokens and pairs,
// then all heads of these tokens.
#include "attention/cache/rope_math.inl"

constexpr int kPairs = 128;  // at a time
constexpr int kTokens = 8;   // of a table of so many pairs; more of fewer
constexpr int kTable = 2 * kPairs * kTokens;

// For each token one row of cosines and one of sines. Interleaved ones have each twice, the sine of
// the first of a pair with the other sign, so that elements are worked on as they lie.
struct RotationTable {
  alignas(64) float cos[kTable];
  alignas(64) float sin[kTable];
};

// The frequencies of pairs [first, first + count).
struct PairFrequencies {
  uint64_t in_turns[kPairs];
  float not_finite[kPairs];  // NaN, or 0
};

inline void read_frequencies(const Frequencies& frequencies, int64_t first, int count,
                             PairFrequencies& target) {
  for (int j = 0; j < count; ++j) {
    const double radians = frequencies.at(first + j);
    target.in_turns[j] = is_finite(radians) ? in_turns(radians) : 0;
    target.not_finite[j] = float(radians - radians);
  }
}

inline void fill_row(const Rope& call, uint64_t position, const PairFrequencies& frequencies,
                     int count, float* cos, float* sin) {
  float rest[kPairs], quarter_cos[kPairs], quarter_sin[kPairs];
  for (int j = 0; j < count; ++j) {
    const Angle angle = angle_at(position, frequencies.in_turns[j]);
    rest[j] = angle.rest + frequencies.not_finite[j];
    quarter_cos[j] = angle.quarter_cos;
    quarter_sin[j] = angle.quarter_sin;
  }
  for_each_vector(0, count, [&](int64_t j, int lanes) {
    const Rotation<Vec> r = rotation(Vec::load(rest + j, lanes), Vec::load(quarter_cos + j, lanes),
                                     Vec::load(quarter_sin + j, lanes), call.scale);
    r.cos.store(cos + j, lanes);
    r.sin.store(sin + j, lanes);
  });
  if (!call.interleaved) return;
  for (int j = count - 1; j >= 0; --j) {
    cos[2 * j + 1] = cos[2 * j] = cos[j];
    sin[2 * j + 1] = sin[j];
    sin[2 * j] = -sin[2 * j + 1];
  }
}

// Pairs of interleaved elements.
template <class T>
inline void rotate_interleaved(int count, const float* cos, const float* sin, Pointer<T> source,
                               Pointer<T> target, bool past_cache) {
  if constexpr (Vec::size == 1) {
    for (int i = 0; i < 2 * count; i += 2) {
      const Rotation<Vec> r{cos[i], sin[i + 1]};
      const Vec a = Vec::load(source + i, 1), b = Vec::load(source + (i + 1), 1);
      rotated_first(a, b, r).store(target + i, 1);
      rotated_second(a, b, r).store(target + (i + 1), 1);
    }
  } else {
    for_each_vector(0, 2 * count, [&](int64_t i, int lanes) {
      const auto value = Vec::load(source + i, lanes);
      const Vec rotated =
          value * Vec::load(cos + i, lanes) + swap_neighbours(value) * Vec::load(sin + i, lanes);
      rotated.store(target + i, lanes, past_cache);
    });
  }
}

// Pairs whose elements are so far apart.
template <class T>
inline void rotate_halves(int64_t apart, int count, const float* cos, const float* sin,
                          Pointer<T> source, Pointer<T> target, bool past_cache) {
  for_each_vector(0, count, [&](int64_t i, int lanes) {
    const Rotation<Vec> r{Vec::load(cos + i, lanes), Vec::load(sin + i, lanes)};
    const Vec a = Vec::load(source + i, lanes), b = Vec::load(source + (apart + i), lanes);
    rotated_first(a, b, r).store(target + i, lanes, past_cache);
    rotated_second(a, b, r).store(target + (apart + i), lanes, past_cache);
  });
}

// Some tokens and pairs that there is a table for.
struct Tile {
  int64_t begin, end;  // tokens
  int64_t first;       // pair
  int count;           // of pairs
  int pitch;           // of the table, from token to token
};

// Whether these heads go past the cache: there are enough of them, and all that a store begins with
// begins a line.
inline bool go_past_cache(const Rope& call, const Heads& to) {
  const int64_t element = bytes_of(to.dtype);
  const int64_t bytes = call.batches * call.tokens * to.heads * call.width * element;
  const int64_t steps = to.of_batch | to.of_token | to.of_head | call.pairs;
  return !call.in_place && bytes >= kLeastPastCache && begins_line(to.data) &&
         steps * element % 64 == 0;
}

template <class T>
inline void rotate_head(const Rope& call, const Tile& tile, int64_t token, int64_t head,
                        const RotationTable& table, const Heads& from, const Heads& to,
                        bool past_cache) {
  const int64_t batch = token / call.tokens, in_batch = token - batch * call.tokens;
  const Pointer<T> source = from.at<T>(batch, in_batch, head);
  const Pointer<T> target = to.at<T>(batch, in_batch, head);
  const float* cos = table.cos + (token - tile.begin) * tile.pitch;
  const float* sin = table.sin + (token - tile.begin) * tile.pitch;
  if (call.interleaved) {
    rotate_interleaved(tile.count, cos, sin, source + 2 * tile.first, target + 2 * tile.first,
                       past_cache);
  } else {
    rotate_halves(call.pairs, tile.count, cos, sin, source + tile.first, target + tile.first,
                  past_cache);
  }
  const int64_t behind = call.width - 2 * call.pairs;
  if (tile.first == 0 && !call.in_place && behind > 0) {
    memcpy(target.address + 2 * call.pairs, source.address + 2 * call.pairs, behind * sizeof(T));
  }
}

// All heads of these tokens, in the order in which they lie in memory.
inline void rotate_heads(const Rope& call, const Tile& tile, const RotationTable& table,
                         const Heads& from, const Heads& to) {
  const bool past_cache = go_past_cache(call, to);
  with_storage_type(from.dtype, [&](auto storage) {
    const auto rotate = [&](int64_t token, int64_t head) {
      rotate_head<decltype(storage)>(call, tile, token, head, table, from, to, past_cache);
    };
    if (from.of_head > from.of_token) {
      for (int64_t head = 0; head < from.heads; ++head) {
        for (int64_t token = tile.begin; token < tile.end; ++token) rotate(token, head);
      }
    } else {
      for (int64_t token = tile.begin; token < tile.end; ++token) {
        for (int64_t head = 0; head < from.heads; ++head) rotate(token, head);
      }
    }
  });
}

inline void rotate_tokens(const Rope& call, int64_t begin, int64_t end) {
  RotationTable table;
  PairFrequencies frequencies;
  Tile tile = {};
  do {
    const int64_t left = call.pairs - tile.first;
    tile.count = int(left < kPairs ? left : kPairs);
    tile.pitch = call.interleaved ? 2 * tile.count : tile.count;
    const int64_t at_a_time = tile.count > 0 ? kTable / tile.pitch : kTable;
    read_frequencies(call.frequencies, tile.first, tile.count, frequencies);
    for (tile.begin = begin; tile.begin < end; tile.begin = tile.end) {
      tile.end = tile.begin + at_a_time < end ? tile.begin + at_a_time : end;
      for (int64_t token = tile.begin; token < tile.end; ++token) {
        const int64_t batch = token / call.tokens;
        const uint64_t position = position_of(call, batch, token - batch * call.tokens);
        const int64_t row = (token - tile.begin) * tile.pitch;
        fill_row(call, position, frequencies, tile.count, table.cos + row, table.sin + row);
      }
      rotate_heads(call, tile, table, call.q, call.q_out);
      if (call.k.is_present()) rotate_heads(call, tile, table, call.k, call.k_out);
    }
    tile.first += kPairs;
  } while (tile.first < call.pairs);
  end_past_cache();
}

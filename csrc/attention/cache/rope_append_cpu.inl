// The loop of rope_append_ over new tokens: each head as floats, from where it is to the cache.
#include "common/simd/row_sums.inl"
#include "attention/cache/rope_cpu.inl"

struct HeadFloats {
  alignas(64) float lanes[kLargestAppendedWidth];
};

// Cosines and sines of one position.
struct TokenAngles {
  alignas(64) float cos[2 * kPairs];
  alignas(64) float sin[2 * kPairs];
};

inline void read_head(Pointer<Any> source, int64_t width, HeadFloats& head) {
  for_each_vector(0, width, [&](int64_t i, int count) {
    Vec::load(source + i, count).store(head.lanes + i, count);
  });
}

inline void normalise(const RopeAppend& call, const HeadWeight& weight, HeadFloats& head) {
  if (!weight.is_present()) return;
  const int64_t width = call.kv.width;
  float squares[1];
  add_row(width, squares, [&](int64_t i, int count, Vec(&terms)[1]) {
    const Vec x = Vec::load(head.lanes + i, count);
    terms[0] = x * x;
  });
  const Vec factor = rsqrt(Vec(squares[0]) / Vec(float(width)) + Vec(call.eps));
  const auto weights = Pointer<Any>::to(weight.data, weight.dtype);
  for_each_vector(0, width, [&](int64_t i, int count) {
    const Vec x = Vec::load(head.lanes + i, count) * factor;
    (x * (Vec::load(weights + i, count) + Vec(call.weight_offset))).store(head.lanes + i, count);
  });
}

inline void rotate(const RopeAppend& call, const TokenAngles& angles, HeadFloats& head) {
  const Pointer<float> x{head.lanes};
  if (call.interleaved) {
    rotate_interleaved(int(call.pairs), angles.cos, angles.sin, x, x, false);
  } else {
    rotate_halves(call.pairs, int(call.pairs), angles.cos, angles.sin, x, x, false);
  }
}

// Codes of numbers that their scale has brought to the range of a kind.
inline Ints codes_of(Vec value, Int8Kv) { return bits_of(value + Vec(0x1.8p23f)); }
inline Ints codes_of(Vec value, Fp8Kv) {
  const Vec magnitude = abs(value);
  const Ints bits = bits_of(magnitude);
  const Ints odd = shift_right<20>(bits) & Ints(1u);
  const Ints normal = shift_right<20>(bits - Ints((127u - 7) << 23) + Ints(0x7ffffu) + odd);
  const Ints small = bits_of(magnitude * Vec(0x1p9f) + Vec(0x1p23f)) - Ints(0x4b000000u);
  const Vec code = select(magnitude < Vec(0x1p-6f), float_of(small), float_of(normal));
  return bits_of(code) | (shift_right<24>(bits_of(value)) & Ints(0x80u));
}

// Writes a head as codes with a scale: NaN if an element is not finite.
template <class Kind>
inline void write_codes(const HeadFloats& head, int64_t width, uint8_t* target, float* scale) {
  Vec most(0.0f);
  for_each_vector(0, width, [&](int64_t i, int count) {
    most = max(most, abs(Vec::load(head.lanes + i, count)));
  });
  float lanes[Vec::size], largest = 0.0f;
  most.store(lanes, Vec::size);
  for (float lane : lanes) largest = dsx::max(largest, lane);
  const bool finite = is_finite(largest);
  *scale = finite ? largest / Kind::kLargest : NAN;
  const bool none = !finite || *scale < kLeastScale;
  if (finite && none) *scale = 0.0f;
  const Vec factor(none ? 0.0f : Kind::kLargest / largest);
  for_each_vector(0, width, [&](int64_t i, int count) {
    const Vec value = none ? Vec(0.0f) : Vec::load(head.lanes + i, count) * factor;
    codes_of(value, Kind{}).store(target + i, count);
  });
}

// Writes a head of a token to the keys or values of a page.
template <class Kind>
inline void write_head(const PagedKv& kv, const HeadFloats& head, void* elements, float* scales,
                       int64_t page, int64_t number, int64_t token) {
  const int64_t place = kv.place(page, number, token);
  if constexpr (Kind::kQuantized) {
    write_codes<Kind>(head, kv.width, static_cast<uint8_t*>(elements) + place,
                      scales + kv.scale_place(page, number, token));
  } else {
    const Pointer<Any> target = Pointer<Any>::to(elements, kv.dtype) + place;
    for_each_vector(0, kv.width, [&](int64_t i, int count) {
      Vec::load(head.lanes + i, count).store(target + i, count);
    });
  }
}

template <class Kind>
inline void append_token(const RopeAppend& call, const Sequence& sequence, int64_t batch,
                         int64_t token, const TokenAngles& angles) {
  const int64_t width = call.kv.width, position = sequence.position(token);
  HeadFloats head;
  for (int64_t i = 0; i < call.q.heads; ++i) {
    const Pointer<Any> out = call.q_out.at<Any>(batch, token, i);
    read_head(call.q.at<Any>(batch, token, i), width, head);
    normalise(call, call.q_weight, head);
    rotate(call, angles, head);
    for_each_vector(0, width, [&](int64_t j, int count) {
      Vec::load(head.lanes + j, count).store(out + j, count);
    });
  }
  const int64_t page = call.kv.page_of(sequence.slot, position / kPageTokens);
  if (page < 0) {
    __atomic_store_n(call.violations, 1, __ATOMIC_RELAXED);
    return;
  }
  for (int64_t i = 0; i < call.kv.heads; ++i) {
    read_head(call.k.at<Any>(batch, token, i), width, head);
    normalise(call, call.k_weight, head);
    rotate(call, angles, head);
    write_head<Kind>(call.kv, head, call.kv.keys, call.kv.key_scales, page, i,
                     position % kPageTokens);
    read_head(call.v.at<Any>(batch, token, i), width, head);
    write_head<Kind>(call.kv, head, call.kv.values, call.kv.value_scales, page, i,
                     position % kPageTokens);
  }
}

template <class Kind>
inline void append_tokens(const RopeAppend& call, int64_t begin, int64_t end) {
  Rope rope = {};  // what the angles depend on
  rope.interleaved = call.interleaved;
  rope.scale = call.scale;
  PairFrequencies frequencies;
  read_frequencies(call.frequencies, 0, int(call.pairs), frequencies);
  TokenAngles angles;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t batch = row / call.news.tokens, token = row - batch * call.news.tokens;
    const Sequence sequence = sequence_of(call.kv, call.news, batch);
    if (sequence.wrong) __atomic_store_n(call.violations, 1, __ATOMIC_RELAXED);
    if (token >= sequence.count) continue;
    fill_row(rope, uint64_t(sequence.position(token)), frequencies, int(call.pairs), angles.cos,
             angles.sin);
    append_token<Kind>(call, sequence, batch, token, angles);
  }
}

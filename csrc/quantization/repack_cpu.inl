// The loops of repack, for 16 lanes at a time. Their words are spread to codes of a byte each,
// those of an element side by side; of these vectors of 16 lanes a run's bytes are made, in any
// order of elements; and 16 vectors, turned over, are the runs of 16 rows.

typedef uint8_t Sixteen __attribute__((vector_size(16)));

inline Sixteen load_sixteen(const void* source) {
  Sixteen bytes;
  memcpy(&bytes, source, sizeof(bytes));
  return bytes;
}

// Sees vectors as bytes whose numbers have their four highest bits say the lane, and makes these
// the lowest ones: four times both halves are interleaved.
template <int kCount>
DSX_INLINE void move_lanes_inside(Sixteen (&all)[kCount]) {
  for (int round = 0; round < 4; ++round) {
    Sixteen next[kCount];
    for (int i = 0; i < kCount / 2; ++i) {
      const Sixteen a = all[i], b = all[i + kCount / 2];
      next[2 * i] =
          __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      next[2 * i + 1] = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29,
                                                14, 30, 15, 31);
    }
    for (int i = 0; i < kCount; ++i) all[i] = next[i];
  }
}

// Where the codes of the elements of one row of each lane lie: 16 bytes for each element.
struct Spread {
  uint8_t* bytes;
  int64_t elements;  // of a row, those that are padding too

  uint8_t* place(int row_in_word, int64_t element) const {
    return bytes + (row_in_word * elements + element) * kRepackLanes;
  }
};

// Copies one step after the other, the words of all lanes side by side; lanes that are not there
// are copies of the last one.
inline void gather_words(const uint32_t* source, const Repack& call, int64_t lanes, int64_t steps,
                         uint32_t* target) {
  if (call.lane_pitch == 1 && lanes == kRepackLanes) {
    for (int64_t i = 0; i < steps; ++i) {
      memcpy(target + i * kRepackLanes, source + i * call.step_pitch, 4 * kRepackLanes);
    }
    return;
  }
  for (int64_t lane = 0; lane < kRepackLanes; ++lane) {
    const uint32_t* of_lane = source + (lane < lanes ? lane : lanes - 1) * call.lane_pitch;
    for (int64_t i = 0; i < steps; ++i) {
      target[i * kRepackLanes + lane] = of_lane[i * call.step_pitch];
    }
  }
}

template <int kBits, bool kAcrossRows>
DSX_INLINE void spread_words(const uint32_t* words, int64_t steps, uint32_t flipped,
                             const Spread& spread, int64_t element) {
  for (int64_t i = 0; i < steps; ++i) {
    Sixteen bytes[4];
    for (int k = 0; k < 4; ++k) bytes[k] = load_sixteen(words + i * kRepackLanes + 4 * k);
    move_lanes_inside(bytes);
    constexpr int kInWord = 32 / kBits;
    for (int k = 0; k < kInWord; ++k) {
      Sixteen codes;
      if constexpr (kBits == 8) {
        codes = bytes[k] ^ uint8_t(flipped);
      } else {
        const int number = kAcrossRows ? nibble_of_row(k) : k;
        codes = number % 2 ? bytes[number / 2] >> 4 : bytes[number / 2] & uint8_t(15);
      }
      uint8_t* target =
          kAcrossRows ? spread.place(k, element + i) : spread.place(0, element + kInWord * i + k);
      memcpy(target, &codes, sizeof(codes));
    }
  }
}

// Spreads elements [begin, end) of some lanes; what is beyond the length is padding.
template <int kBits, bool kAcrossRows>
inline void spread_lanes(const Repack& call, int64_t first_lane, int64_t lanes, int64_t begin,
                         int64_t end, const Spread& spread) {
  constexpr int64_t kInStep = kAcrossRows ? 1 : 32 / kBits, kAtOnce = 64;
  const uint32_t flipped = sign_of_packed(call.format, call.biased);
  uint32_t words[kAtOnce * kRepackLanes];
  const uint32_t* source = call.words + first_lane * call.lane_pitch;
  const int64_t first = begin / kInStep;
  const int64_t last = ceil_div(end < call.length ? end : call.length, kInStep);
  for (int64_t step = first; step < last; step += kAtOnce) {
    const int64_t count = last - step < kAtOnce ? last - step : kAtOnce;
    gather_words(source + step * call.step_pitch, call, lanes, count, words);
    spread_words<kBits, kAcrossRows>(words, count, flipped, spread, step * kInStep - begin);
  }
  if (end <= call.length) return;
  const int64_t padded = begin < call.length ? call.length - begin : 0;
  for (int row = 0; row < (kAcrossRows ? kAcross : 1); ++row) {
    memset(spread.place(row, padded), int(packed_padding(call.format)),
           size_t((end - begin - padded) * kRepackLanes));
  }
}

// The run of each lane that begins with an element; `codes` are those of all elements of a row.
template <int kBits>
DSX_INLINE void make_runs(const uint8_t* codes, const int64_t* order, int64_t element,
                          int64_t in_order, Sixteen (&runs)[16]) {
  const auto codes_of = [&](int number) DSX_INLINED {
    const int64_t at = element + number;
    return load_sixteen(codes + (at < in_order ? order[at] : at) * kRepackLanes);
  };
  for (int i = 0; i < kRunBytes; ++i) {
    const int word = i / 4, step = i % 4;
    if constexpr (kBits == 8) {
      runs[i] = codes_of(element_of_run(8, word, step));
    } else {
      runs[i] = codes_of(element_of_run(4, word, 2 * step)) |
                codes_of(element_of_run(4, word, 2 * step + 1)) << 4;
    }
  }
  move_lanes_inside(runs);
}

// Makes the runs of elements [first, end) of the rows of one block of lanes.
template <int kBits, bool kAcrossRows>
inline void repack_block(const Repack& call, int64_t block, int64_t first, int64_t end,
                         const Spread& spread) {
  constexpr int kRows = kAcrossRows ? kAcross : 1;
  const int64_t in_order = call.order ? call.length : 0;
  const int64_t lane = block * kRepackLanes, left = call.lanes() - lane;
  const int64_t lanes = left < kRepackLanes ? left : kRepackLanes;
  spread_lanes<kBits, kAcrossRows>(call, lane, lanes, first, end, spread);
  for (int row = 0; row < kRows; ++row) {
    uint8_t* target = call.codes + (lane * kRows + row) * call.row_bytes + first * kBits / 8;
    for (int64_t i = 0; i < end - first; i += kRunBytes * 8 / kBits, target += kRunBytes) {
      Sixteen runs[16];
      make_runs<kBits>(spread.place(row, 0), call.order, i, in_order, runs);
      for (int64_t k = 0; k < lanes; ++k) {
        memcpy(target + k * kRows * call.row_bytes, &runs[k], sizeof(Sixteen));
      }
    }
  }
}

template <int kBits, bool kAcrossRows>
inline void repack_blocks(const Repack& call, uint8_t* scratch, int64_t begin, int64_t end) {
  constexpr int64_t kTogether = 8;  // blocks, whose words lie in the same pages
  const auto least = [](int64_t a, int64_t b) { return a < b ? a : b; };
  const Spread spread{scratch, repack_elements_at_once(call)};
  const int64_t padded = call.padded_length();
  for (int64_t tile = begin; tile < end; tile += kTogether) {
    for (int64_t first = 0; first < padded; first += spread.elements) {
      const int64_t last = least(first + spread.elements, padded);
      for (int64_t block = tile; block < least(tile + kTogether, end); ++block) {
        repack_block<kBits, kAcrossRows>(call, block, first, last, spread);
      }
    }
  }
}

inline void repack_range(const Repack& call, uint8_t* scratch, int64_t begin, int64_t end) {
  if (call.bits() == 8) return repack_blocks<8, false>(call, scratch, begin, end);
  if (call.across) return repack_blocks<4, true>(call, scratch, begin, end);
  repack_blocks<4, false>(call, scratch, begin, end);
}

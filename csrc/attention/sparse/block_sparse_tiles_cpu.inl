// Products of a strip of tokens, each a lane, with other tokens, which go by one after the other:
// a number of these is one factor for all lanes, lanes stay apart, and no sum depends on how wide a
// vector is. Lanes lie in panels of a cache line, of which each has its elements, or its
// weights of the others, one behind the other.

constexpr int kPanels = kStripTokens / kLine;
// How many vectors of lanes, of panels side by side, and others have sums in registers.
constexpr bool kManyRegisters = Vec::size == kLine && Vec::registers == 1;
constexpr int kPanelsAtATime = kManyRegisters ? 2 : 1;
constexpr int kAtATime = kManyRegisters ? 8 : 6;

// [panel][element][lane]
struct Lanes {
  alignas(64) float floats[kPanels * kLargestHead * kLine];
};

// [panel][other][lane]
struct Tile {
  static constexpr int64_t kPanel = kStripTokens * kLine;
  alignas(64) float floats[kPanels * kPanel];
};

// The elements of some tokens as floats.
struct FloatRows {
  const float* data;
  int64_t pitch;

  FloatRows from(int64_t row, int64_t element) const {
    return {data + row * pitch + element, pitch};
  }
};

// Calls body(panels, panel, lane) for all vectors of lanes: so many of panels side by side, that of
// this panel from this lane on first.
template <class Body>
DSX_INLINE void for_each_lane(int panels, const Body& body) {
  int p = 0;
  if constexpr (kPanelsAtATime > 1) {
    for (; p + kPanelsAtATime <= panels; p += kPanelsAtATime) {
      body(std::integral_constant<int, kPanelsAtATime>(), p, 0);
    }
  }
  for (; p < panels; ++p) {
    for (int lane = 0; lane < kLine; lane += Vec::size)
      body(std::integral_constant<int, 1>(), p, lane);
  }
}

// Calls body(count, i) for the last `count` of them, fewer than kAtATime.
template <int kCount = kAtATime - 1, class Body>
DSX_INLINE void for_last(int64_t count, int64_t i, const Body& body) {
  if constexpr (kCount > 0) {
    if (count == kCount) return body(std::integral_constant<int, kCount>(), i);
    for_last<kCount - 1>(count, i, body);
  }
}

// Calls body(count, i) for [0, end) in steps of kAtATime, and for what is left at once.
template <class Body>
DSX_INLINE void for_each_few(int64_t end, const Body& body) {
  int64_t i = 0;
  for (; i + kAtATime <= end; i += kAtATime) body(std::integral_constant<int, kAtATime>(), i);
  for_last(end - i, i, body);
}

// The products of lanes with `count` others: target[panel][other][lane], of which `lanes` has
// `width` elements each.
template <int kOthers, int kSide>
DSX_INLINE void multiply(const float* lanes, int64_t of_panel, FloatRows others, int64_t width,
                         float* target) {
  Vec sums[kOthers][kSide];
  for (auto& of_other : sums) {
    for (Vec& sum : of_other) sum = Vec(0.0f);
  }
  for (int64_t i = 0; i < width; ++i) {
    Vec here[kSide];
    for (int s = 0; s < kSide; ++s)
      here[s] = Vec::load(lanes + s * of_panel + i * kLine, Vec::size);
    for (int o = 0; o < kOthers; ++o) {
      const Vec other(others.data[o * others.pitch + i]);
      for (int s = 0; s < kSide; ++s) sums[o][s] = multiply_add(other, here[s], sums[o][s]);
    }
  }
  for (int o = 0; o < kOthers; ++o) {
    for (int s = 0; s < kSide; ++s) {
      sums[o][s].store(target + s * Tile::kPanel + o * kLine, Vec::size);
    }
  }
}

inline void multiply_tile(const Lanes& lanes, int panels, FloatRows others, int64_t count,
                          int64_t width, Tile& tile, int64_t first) {
  const int64_t of_panel = width * kLine;
  for_each_lane(panels, [&](auto side, int p, int lane) DSX_INLINED {
    const float* source = lanes.floats + p * of_panel + lane;
    float* target = tile.floats + p * Tile::kPanel + first * kLine + lane;
    for_each_few(count, [&](auto few, int64_t o) DSX_INLINED {
      multiply<few.value, side.value>(source, of_panel, others.from(o, 0), width,
                                      target + o * kLine);
    });
  });
}

// Adds, to kElements elements of lanes, those of `count` others, each times its weight for the
// lane. kSafe: where the weight is 0, what is not finite has no part.
template <int kElements, int kSide, bool kSafe>
DSX_INLINE void add_products(float* target, int64_t of_panel, FloatRows others, int64_t count,
                             const float* weights) {
  Vec sums[kElements][kSide];
  for (int e = 0; e < kElements; ++e) {
    for (int s = 0; s < kSide; ++s) {
      sums[e][s] = Vec::load(target + s * of_panel + e * kLine, Vec::size);
    }
  }
  for (int64_t o = 0; o < count; ++o) {
    const float* other = others.data + o * others.pitch;
    Vec weight[kSide];
    for (int s = 0; s < kSide; ++s) {
      weight[s] = Vec::load(weights + s * Tile::kPanel + o * kLine, Vec::size);
    }
    for (int e = 0; e < kElements; ++e) {
      const Vec element(other[e]);
      for (int s = 0; s < kSide; ++s) {
        const Vec sum = multiply_add(element, weight[s], sums[e][s]);
        sums[e][s] = kSafe ? select(weight[s] == Vec(0.0f), sums[e][s], sum) : sum;
      }
    }
  }
  for (int e = 0; e < kElements; ++e) {
    for (int s = 0; s < kSide; ++s) {
      sums[e][s].store(target + s * of_panel + e * kLine, Vec::size);
    }
  }
}

template <bool kSafe>
inline void add_tile(Lanes& lanes, int panels, FloatRows others, int64_t count, int64_t width,
                     const Tile& tile, int64_t first) {
  const int64_t of_panel = width * kLine;
  for_each_lane(panels, [&](auto side, int p, int lane) DSX_INLINED {
    float* target = lanes.floats + p * of_panel + lane;
    const float* weights = tile.floats + p * Tile::kPanel + first * kLine + lane;
    for_each_few(width, [&](auto few, int64_t e) DSX_INLINED {
      add_products<few.value, side.value, kSafe>(target + e * kLine, of_panel, others.from(0, e),
                                                 count, weights);
    });
  });
}

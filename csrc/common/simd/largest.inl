// The largest score of a row, for softmax and cross entropy.

// 0, 1, 2 ...
inline Vec lane_numbers() {
  constexpr float kLanes[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return Vec::load(kLanes, Vec::size);
}

// The first `count` lanes, and what there is to be beyond them.
inline Vec first_lanes(Vec scores, int count, float beyond = -INFINITY) {
  if (count == Vec::size) return scores;
  return select(lane_numbers() < Vec(float(count)), scores, Vec(beyond));
}

// The largest of some scores, not counting NaN; -inf if there is none.
class Largest {
 public:
  Largest() {
    for (Vec& each : largest_) each = Vec(-INFINITY);
  }

  void take(Vec value, int64_t i) {
    Vec& so_far = largest_[i / Vec::size % kVecs];
    so_far = select(so_far < value, value, so_far);
  }

  float of_all() const {
    float lanes[kLanes];
    for (int v = 0; v < kVecs; ++v) largest_[v].store(lanes + v * Vec::size, Vec::size);
    float result = -INFINITY;
    for (float lane : lanes) result = result < lane ? lane : result;
    return result;
  }

 private:
  static constexpr int kLanes = 32, kVecs = kLanes / Vec::size;
  Vec largest_[kVecs];
};

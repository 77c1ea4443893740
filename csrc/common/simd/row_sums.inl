// Sums over the elements of a row, in float and in an order that depends on its length alone: 32
// running sums, of which element i belongs to number i % 32, whatever the width of Vec. So every
// ISA gives the same bits, and a row the same sum wherever it lies.
template <int kSums>
class RowSums {
 public:
  RowSums() {
    for (int s = 0; s < kSums; ++s) {
      for (int v = 0; v < kVecs; ++v) sums_[s][v] = Vec(0.0f);
    }
  }

  // Calls body(i, count, terms), which fills in a Vec for each sum: the terms of `count` elements
  // from number i on, and 0 in lanes beyond them. `begin` is a multiple of 32.
  template <class Body>
  void add(int64_t begin, int64_t end, const Body& body) {
    const auto add = [&](int64_t i, int count, int v) {
      Vec terms[kSums];
      body(i, count, terms);
      for (int s = 0; s < kSums; ++s) sums_[s][v] = sums_[s][v] + terms[s];
    };
    const int64_t whole = begin + (end - begin) / kLanes * kLanes;
    for (int64_t i = begin; i < whole; i += kLanes) {
      for (int v = 0; v < kVecs; ++v) add(i + v * Vec::size, Vec::size, v);
    }
    for (int v = 0; v < kVecs; ++v) {
      const int64_t i = whole + v * Vec::size;
      if (i < end) add(i, int(end - i < Vec::size ? end - i : Vec::size), v);
    }
  }

  void store(float (&totals)[kSums]) const {
    for (int s = 0; s < kSums; ++s) {
      float lanes[kLanes];
      for (int v = 0; v < kVecs; ++v) sums_[s][v].store(lanes + v * Vec::size, Vec::size);
      for (int half = kLanes / 2; half > 0; half /= 2) {
        for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
      }
      totals[s] = lanes[0];
    }
  }

 private:
  static constexpr int kLanes = 32;
  static constexpr int kVecs = kLanes / Vec::size;
  Vec sums_[kSums][kVecs];
};

// The sums over a whole row of n elements.
template <int kSums, class Body>
inline void add_row(int64_t n, float (&totals)[kSums], const Body& body) {
  RowSums<kSums> sums;
  sums.add(0, n, body);
  sums.store(totals);
}

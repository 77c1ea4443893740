// Sums over the elements of a row, in an order that depends on its length alone: 32 running sums in
// float, of which element i belongs to number i % 32, whatever the width of Vec. Each 4,096
// elements they are added to as many in double and begin anew, or a long row would lose digits: a
// float takes ever less of what is added to it as it grows. So every ISA gives the same bits, and a
// row the same sum wherever it lies.
template <int kSums>
class RowSums {
 public:
  RowSums() { begin_anew(); }

  // Calls body(i, count, terms), which fills in a Vec for each sum: the terms of `count` elements
  // from number i on, and 0 in lanes beyond them. `begin` is a multiple of 32.
  template <class Body>
  void add(int64_t begin, int64_t end, const Body& body) {
    while (begin < end) {
      if (in_float_ == kMostInFloat) add_to_far();
      const int64_t left = kMostInFloat - in_float_;
      const int64_t last = end - begin < left ? end : begin + left;
      add_in_float(begin, last, body);
      in_float_ += last - begin;
      begin = last;
    }
  }

  void store(float (&totals)[kSums]) {
    if (is_far_) add_to_far();
    for (int s = 0; s < kSums; ++s) {
      if (is_far_) {
        totals[s] = float(sum_of(far_[s]));
        continue;
      }
      float lanes[kLanes];
      for (int v = 0; v < kVecs; ++v) sums_[s][v].store(lanes + v * Vec::size, Vec::size);
      totals[s] = sum_of(lanes);
    }
  }

 private:
  static constexpr int kLanes = 32;
  static constexpr int kVecs = kLanes / Vec::size;
  static constexpr int64_t kMostInFloat = 4096;

  template <class Body>
  void add_in_float(int64_t begin, int64_t end, const Body& body) {
    Vec sums[kSums][kVecs];  // that nothing else points to: registers
    memcpy(sums, sums_, sizeof(sums));
    const auto add = [&](int64_t i, int count, int v) {
      Vec terms[kSums];
      body(i, count, terms);
      for (int s = 0; s < kSums; ++s) sums[s][v] = sums[s][v] + terms[s];
    };
    const int64_t whole = begin + (end - begin) / kLanes * kLanes;
    for (int64_t i = begin; i < whole; i += kLanes) {
      for (int v = 0; v < kVecs; ++v) add(i + v * Vec::size, Vec::size, v);
    }
    for (int v = 0; v < kVecs; ++v) {
      const int64_t i = whole + v * Vec::size;
      if (i < end) add(i, int(end - i < Vec::size ? end - i : Vec::size), v);
    }
    memcpy(sums_, sums, sizeof(sums));
  }

  void begin_anew() {
    for (int s = 0; s < kSums; ++s) {
      for (int v = 0; v < kVecs; ++v) sums_[s][v] = Vec(0.0f);
    }
    in_float_ = 0;
  }

  void add_to_far() {
    for (int s = 0; s < kSums; ++s) {
      for (int lane = 0; !is_far_ && lane < kLanes; ++lane) far_[s][lane] = 0;
      for (int v = 0; v < kVecs; ++v) add_to_doubles(sums_[s][v], far_[s] + v * Vec::size);
    }
    is_far_ = true;
    begin_anew();
  }

  // In a fixed tree, which overwrites them.
  template <class Number>
  static Number sum_of(Number (&lanes)[kLanes]) {
    for (int half = kLanes / 2; half > 0; half /= 2) {
      for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    }
    return lanes[0];
  }

  Vec sums_[kSums][kVecs];
  int64_t in_float_;  // elements that they have of
  bool is_far_ = false;
  double far_[kSums][kLanes];  // what is added up of elements before; nothing unless is_far_
};

// The sums over a whole row of n elements.
template <int kSums, class Body>
inline void add_row(int64_t n, float (&totals)[kSums], const Body& body) {
  RowSums<kSums> sums;
  sums.add(0, n, body);
  sums.store(totals);
}

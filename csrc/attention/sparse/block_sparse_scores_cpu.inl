// What tokens see of each other: strips of tokens, those that a layout names for them, and scores
// with all that is added to them or leaves them out.
#include "common/simd/largest.inl"
#include "common/softmax_math.inl"

// Tokens that are the lanes: of q if kRows, else of k and v.
template <bool kRows>
struct Strip {
  int64_t batch, head;  // of q, whichever they are of
  int64_t first;
  int count, panels;

  // The mask's place for this lane and another token, and how far it is to the next lane.
  int64_t place(const ScoreMask& mask, int lane, int64_t other) const {
    const int64_t token = first + lane, row = kRows ? token : other, key = kRows ? other : token;
    return batch * mask.of_batch + head * mask.of_head + row * mask.of_row + key * mask.of_key;
  }
  static int64_t of_lane(const ScoreMask& mask) { return kRows ? mask.of_row : mask.of_key; }
};

// Some of the other tokens that a strip looks at, up to kStripTokens: pieces of blocks.
struct Others {
  struct Piece {
    int64_t token;
    int count, first;  // place in the tile
  };
  Piece pieces[kPanels];
  int used, count;
  int64_t token[kStripTokens];
  bool at_edge;                  // of causality: not all lanes see all of them
  float distance[kStripTokens];  // from the first lane, as far as it matters there
};

// Goes through the blocks of a list, a tile at a time.
template <bool kRows>
class Walk {
 public:
  Walk(const BlockSparse& call, const Strip<kRows>& strip) : call_(call), strip_(strip) {
    const BlockLists& lists = kRows ? call.rows : call.columns;
    const int64_t head = call.layout_of_heads ? strip.head : 0;
    const int64_t list = head * call.blocks() + strip.first / call.block;
    parts_ = call.block / int(call.strip());
    next_ = lists.begins[list] * parts_;
    end_ = lists.begins[list + 1] * parts_;
    blocks_ = lists.blocks;
  }

  bool next(Others& others) {
    others.used = others.count = 0;
    others.at_edge = false;
    for (; next_ < end_; ++next_) {
      const int64_t token =
          blocks_[next_ / parts_] * int64_t(call_.block) + next_ % parts_ * call_.strip();
      const int64_t left = call_.tokens - token;
      const int count = int(left < call_.strip() ? left : call_.strip());
      if (count <= 0 || is_hidden(token, count)) continue;
      if (others.count + count > kStripTokens) break;
      add(others, token, count);
    }
    return others.count > 0;
  }

 private:
  bool is_hidden(int64_t token, int count) const {
    if (!call_.causal) return false;
    return kRows ? token >= strip_.first + strip_.count : token + count <= strip_.first;
  }

  void add(Others& others, int64_t token, int count) const {
    others.pieces[others.used++] = {token, count, others.count};
    for (int i = 0; i < count; ++i) {
      const int64_t away = token + i - strip_.first;
      others.token[others.count] = token + i;
      others.distance[others.count++] = float(away < -1             ? -1
                                              : away > kStripTokens ? kStripTokens
                                                                    : away);
    }
    const int64_t last = token + count - 1, last_lane = strip_.first + strip_.count - 1;
    others.at_edge |= call_.causal && (kRows ? last > strip_.first : token < last_lane);
  }

  const BlockSparse& call_;
  const Strip<kRows>& strip_;
  const int32_t* blocks_;
  int64_t next_, end_;  // parts of blocks
  int parts_;           // of a block
};

// What a mask that is stored like this adds to the scores of `count` lanes.
template <class T>
inline Vec gather_mask(const T* place, int64_t of_lane, int count) {
  float numbers[Vec::size] = {};
  for (int i = 0; i < count; ++i) {
    if constexpr (sizeof(T) == 1) {
      numbers[i] = place[i * of_lane] != 0 ? 0.0f : -INFINITY;
    } else {
      numbers[i] = to_float(place[i * of_lane]);
    }
  }
  return of_lane == 0 ? Vec(numbers[0]) : Vec::load(numbers, Vec::size);
}

template <class T>
inline Vec mask_of_type(const ScoreMask& mask, int64_t place, int64_t of_lane, int count) {
  const T* data = static_cast<const T*>(mask.data) + place;
  if (of_lane != 1) return gather_mask(data, of_lane, of_lane == 0 ? 1 : count);
  if constexpr (sizeof(T) == 1) {
    // As the lowest bits of a float: below 2^23 its only arithmetic is to be compared.
    const Vec bytes = float_of(Ints::load(data, count) + Ints(0x4b000000u));
    return select(bytes == Vec(0x1p23f), Vec(-INFINITY), Vec(0.0f));
  } else {
    return Vec::load(data, count);
  }
}

// What a mask adds to the scores of `count` lanes; -inf leaves out.
inline Vec mask_numbers(const ScoreMask& mask, int64_t place, int64_t of_lane, int count) {
  if (mask.kind == ScoreMask::Kind::takes_part) {
    return mask_of_type<uint8_t>(mask, place, of_lane, count);
  }
  switch (mask.dtype) {
    case Dtype::bfloat16: return mask_of_type<BFloat16>(mask, place, of_lane, count);
    case Dtype::float16: return mask_of_type<Half>(mask, place, of_lane, count);
    case Dtype::float32: return mask_of_type<float>(mask, place, of_lane, count);
  }
  __builtin_unreachable();
}

// Scores from products: of other number `o` of a tile with the lanes from this one on.
template <bool kRows>
class Scores {
 public:
  Scores(const BlockSparse& call, const Strip<kRows>& strip, const Others& others)
      : call_(call), strip_(strip), others_(others) {}

  bool is_plain() const { return call_.masks == 0 && !others_.at_edge; }

  template <bool kPlain>
  Vec at(Vec product, int o, int lane) const {
    Vec score = product * Vec(call_.scale);
    if constexpr (kPlain) return score;
    if (call_.masks > 0) score = with_mask_added(score, masks_at(o, lane));
    if (!others_.at_edge) return score;
    const Vec number = lane_numbers() + Vec(float(lane)), other(others_.distance[o]);
    return select(kRows ? other <= number : number <= other, score, Vec(-INFINITY));
  }

 private:
  Vec masks_at(int o, int lane) const {
    const int left = strip_.count - lane, count = left < Vec::size ? left : Vec::size;
    if (count <= 0) return Vec(0.0f);
    Vec sum(0.0f);
    for (int m = 0; m < call_.masks; ++m) {
      const ScoreMask& mask = call_.mask[m];
      const Vec added = mask_numbers(mask, strip_.place(mask, lane, others_.token[o]),
                                     strip_.of_lane(mask), count);
      sum = select(sum == Vec(-INFINITY), sum, with_mask_added(sum, added));
    }
    return sum;
  }

  const BlockSparse& call_;
  const Strip<kRows>& strip_;
  const Others& others_;
};

// Calls body(constant) with whether scores are products and no more.
template <bool kRows, class Body>
inline void with_scores(const Scores<kRows>& scores, const Body& body) {
  if (scores.is_plain()) {
    body(std::true_type());
  } else {
    body(std::false_type());
  }
}

// The loops of elementwise ops over a range of elements, and over tiles of a group of rows.
#include "common/activation_math.inl"
#include "common/noise_math.inl"
#include "common/dropout_math.inl"
#include "common/simd/add_partials.inl"
#include "elementwise/elementwise_math.inl"
#include "elementwise/float_blocks.inl"
#include DSX_FORMULA

// What is added up over the rows of a group, for each column from that of a block on; null: not
// wanted. The first row of a group overwrites it.
template <class Rule>
struct ColumnSums {
  float* sums[Rule::kOut] = {};
  bool is_first = false;
};

// What the ends of all blocks of a call have in common.
template <class Rule>
struct Storage {
  bool is_bfloat16 = true;  // all of it
  bool past_cache[Rule::kOut];
  DropoutMask mask;

  explicit Storage(const Elementwise<Rule>& call) : mask(mask_of(call.rule)) {
    for (const Rows& each : call.in) look_at(each);
    for (const Rows& each : call.bias) look_at(each);
    for (int k = 0; k < Rule::kOut; ++k) {
      look_at(call.out[k]);
      past_cache[k] = go_past_cache(call.out[k], call.rows, call.length);
    }
  }

  void look_at(const Rows& each) {
    if (each.is_present() && each.dtype != Dtype::bfloat16) is_bfloat16 = false;
  }
};

// Absent rows, of either type.
alignas(64) constexpr float kZeros[kBlock] = {};

template <class T, bool is_optional>
DSX_INLINE const T* read_or_zeros(const Rows& rows, int64_t row, int64_t i, int count,
                                  Block& block) {
  if (is_optional && !rows.is_present()) return reinterpret_cast<const T*>(kZeros);
  return read_block<T>(rows.row<Any>(row) + i, count, block);
}

// `count` elements of a mask, from number `first` on, as 1 or 0, in whole registers.
template <class T>
inline const T* kept_block(const DropoutMask& mask, int64_t first, int count, Block& block) {
  T* const kept = reinterpret_cast<T*>(block.floats);
  const int64_t end = ceil_div(count, Register::size) * Register::size;
  for (int64_t k = 0; k < end;) {
    const int64_t left = (int64_t(1) << 32) - uint32_t(first + k);
    const int lanes = int(left < Vec::size ? left : Vec::size);
    Ints is_kept(1u);
    if (mask.noise.on) {
      const Ints bits = unrelated_bits(noise_at(mask.noise, first + k), Ints::from(0));
      const Ints last(mask.last_dropped);
      is_kept = min(max(bits, last) - last, Ints(1u));
    }
    float_of((Ints(0u) - is_kept) & bits_of(Vec(1.0f))).store(kept + k, lanes);
    k += lanes;
  }
  return kept;
}

template <class T, class Rule, int input>
DSX_INLINE const T* input_block(const Elementwise<Rule>& call, const Storage<Rule>& storage,
                                int64_t row, int64_t i, int count, Block& block) {
  if constexpr (input == kKeptOf<Rule>) {
    return kept_block<T>(storage.mask, row * call.length + i, count, block);
  } else {
    return read_or_zeros<T, dsx::is_optional<Rule>(input)>(call.in[input], row, i, count, block);
  }
}

template <class T>
DSX_INLINE Register biased(const T* x, const T* bias, int k) {
  const Register value = Register::load(x + k, Register::size);
  return bias ? value + Register::load(bias + k, Register::size) : value;
}

// Of a rule whose sums alone are wanted: none.
template <class Rule>
DSX_INLINE Pointer<Any> place_of_result(const Rows& rows, int64_t row, int64_t i) {
  return kHasOut<Rule> ? rows.row<Any>(row) + i : Pointer<Any>{};
}

DSX_INLINE void add_up(float* sums, int k, bool is_first, const Register& result) {
  if (sums == nullptr) return;
  (is_first ? result : Register::load(sums + k, Register::size) + result)
      .store(sums + k, Register::size);
}

template <class T, class Rule, size_t... ins, size_t... outs>
inline void do_block(const Elementwise<Rule>& call, int64_t row, int64_t i, int count,
                     const ColumnSums<Rule>& columns, const Storage<Rule>& storage,
                     std::index_sequence<ins...>, std::index_sequence<outs...>) {
  constexpr int kIn = Rule::kIn, kOut = Rule::kOut;
  Block blocks[kIn + kOut], bias_blocks[kIn];
  const T* const in[] = {input_block<T, Rule, ins>(call, storage, row, i, count, blocks[ins])...};
  const T* bias[kIn];
  for (int k = 0; k < kIn; ++k) {
    const bool has_bias = Rule::is_biased(k) && call.bias[k].is_present();
    bias[k] = has_bias ? read_block<T>(call.bias[k].template row<Any>(0) + i, count, bias_blocks[k])
                       : nullptr;
  }
  const OutputBlock<T> out[] = {OutputBlock<T>(place_of_result<Rule>(call.out[outs], row, i), count,
                                               blocks[kIn + outs], storage.past_cache[outs])...};
  // What is the same for all registers is decided here, for the loop to have no branches.
  float* const sums[] = {columns.sums[outs]...};
  const bool is_first = columns.is_first;
  const Rule rule = call.rule;
  const auto loop = [&](auto option, auto has_out, auto has_sums) {
    static_assert(requires(const Register(&values)[kIn], Register(&results)[kOut]) {
      formula(rule, option, values, results);
    }, "the formula of a rule is formula(rule, option, in[kIn], out[kOut])");
    for (int k = 0; k < count; k += Register::size) {
      (ask_for(in[ins] + k), ...);
      const Register values[] = {biased(in[ins], bias[ins], k)...};
      Register results[kOut];
      formula(rule, option, values, results);
      if constexpr (has_out.value) (out[outs].store(k, results[outs]), ...);
      if constexpr (has_sums.value) (add_up(sums[outs], k, is_first, results[outs]), ...);
    }
  };
  using Yes = std::true_type;
  using No = std::false_type;
  const bool has_sums = ((sums[outs] != nullptr) || ...);
  with_option(rule, [&](auto option) {
    if constexpr (!kHasOut<Rule>) {
      loop(option, No{}, Yes{});
    } else {
      if constexpr (kHasSums<Rule>) {
        if (has_sums) return loop(option, Yes{}, Yes{});
      }
      loop(option, Yes{}, No{});
    }
  });
  if constexpr (kHasOut<Rule>) (out[outs].finish(), ...);
}

template <class Rule>
inline void do_block(const Elementwise<Rule>& call, int64_t row, int64_t i, int count,
                     const ColumnSums<Rule>& columns, const Storage<Rule>& storage) {
  constexpr std::make_index_sequence<Rule::kIn> ins;
  constexpr std::make_index_sequence<Rule::kOut> outs;
  if constexpr (Vec::size >= kLeastLanes) {
    if (storage.is_bfloat16 && are_whole(count)) {
      return do_block<BFloat16>(call, row, i, count, columns, storage, ins, outs);
    }
  }
  do_block<float>(call, row, i, count, columns, storage, ins, outs);
}

template <class Rule>
inline void do_elements(const Elementwise<Rule>& call, int64_t begin, int64_t end) {
  const Storage<Rule> storage(call);
  const ColumnSums<Rule> none;
  for_each_block(call.length, begin, end, [&](int64_t row, int64_t i, int count) {
    do_block(call, row, i, count, none, storage);
  });
  end_past_cache();
}

template <class Rule>
inline void do_tiles(const Elementwise<Rule>& call, int64_t begin, int64_t end) {
  static_assert(kColumnsOfTile % kBlock == 0);  // sums have room for whole registers
  float sums[Rule::kOut][kColumnsOfTile];
  const Storage<Rule> storage(call);
  const int64_t tiles_of_group = ceil_div(call.length, kColumnsOfTile);
  for (int64_t tile = begin; tile < end; ++tile) {
    const int64_t group = tile / tiles_of_group, column = tile % tiles_of_group * kColumnsOfTile;
    const int64_t left = call.length - column, first = group * kRowsOfGroup;
    const int64_t columns = left < kColumnsOfTile ? left : kColumnsOfTile;
    const int64_t last = first + kRowsOfGroup < call.rows ? first + kRowsOfGroup : call.rows;
    for (int64_t row = first; row < last; ++row) {
      for (int64_t i = 0; i < columns; i += kBlock) {
        const int count = int(columns - i < kBlock ? columns - i : kBlock);
        ColumnSums<Rule> of_block;
        of_block.is_first = row == first;
        for (int k = 0; k < Rule::kOut; ++k) {
          if (call.sums[k].is_present()) of_block.sums[k] = sums[k] + i;
        }
        do_block(call, row, column + i, count, of_block, storage);
      }
    }
    for (int k = 0; k < Rule::kOut; ++k) {
      if (!call.sums[k].is_present()) continue;
      const Pointer<Any> target = call.sums[k].template row<Any>(group) + column;
      for_each_vector(0, columns, [&](int64_t i, int lanes) {
        Vec::load(sums[k] + i, lanes).store(target + i, lanes);
      });
    }
  }
  end_past_cache();
}

// The loops of bias_activation over a range of elements, and over tiles of a group of rows.
#include "common/simd/add_partials.inl"
#include "common/activation_math.inl"
#include "elementwise/float_blocks.inl"

template <class T>
DSX_INLINE Values biased(const T* x, const T* bias, int i) {
  const Values value = Values::load(x + i, Values::size);
  return bias ? value + Values::load(bias + i, Values::size) : value;
}

template <class T>
inline void activate_block(const BiasActivation& call, int64_t row, int64_t i, int count,
                           bool past_cache) {
  Block blocks[3];
  const T* x = read_block<T>(call.x.row<Any>(row) + i, count, blocks[0]);
  const T* bias =
      call.bias.data ? read_block<T>(call.bias.row<Any>(0) + i, count, blocks[1]) : nullptr;
  const Room<T> out(call.out.row<Any>(row) + i, count, blocks[2], past_cache);
  with_activation(call.activation, [&](auto activation) {
    for (int k = 0; k < count; k += Values::size) {
      ask_for(x + k);
      out.store(k, activation.at(biased(x, bias, k), Values(0.0f)).value);
    }
  });
  out.finish();
}

inline void activate_elements(const BiasActivation& call, int64_t begin, int64_t end) {
  const bool past_cache = go_past_cache(call.out, call.rows, call.length);
  for_each_block(call.length, begin, end, [&](int64_t row, int64_t i, int count) {
    with_block_type(count, [&](auto storage) {
      activate_block<decltype(storage)>(call, row, i, count, past_cache);
    }, call.x, call.bias, call.out);
  });
  end_past_cache();
}

// What is added up over the rows of a group: for each column from that of a block on; null: not
// wanted. The first row of a group overwrites it.
struct ColumnSums {
  float* sums;
  bool is_first;
};

template <class T>
inline void backward_of_block(const BiasActivationBackward& call, int64_t row, int64_t i, int count,
                              const ColumnSums& columns, bool past_cache) {
  Block blocks[4];
  const T* x = read_block<T>(call.x.row<Any>(row) + i, count, blocks[0]);
  const T* grad = read_block<T>(call.grad_out.row<Any>(row) + i, count, blocks[1]);
  const T* bias =
      call.bias.data ? read_block<T>(call.bias.row<Any>(0) + i, count, blocks[2]) : nullptr;
  const Room<T> grad_x(call.grad_x.row<Any>(row) + i, count, blocks[3], past_cache);
  with_activation(call.activation, [&](auto activation) {
    for (int k = 0; k < count; k += Values::size) {
      ask_for(x + k);
      ask_for(grad + k);
      const Values result =
          activation.at(biased(x, bias, k), Values::load(grad + k, Values::size)).grad;
      grad_x.store(k, result);
      if (columns.sums == nullptr) continue;
      float* sums = columns.sums + k;
      (columns.is_first ? result : Values::load(sums, Values::size) + result)
          .store(sums, Values::size);
    }
  });
  grad_x.finish();
}

inline void backward_of_tiles(const BiasActivationBackward& call, int64_t begin, int64_t end) {
  static_assert(kColumnsOfTile % kBlock == 0);  // sums have room for whole registers
  float sums[kColumnsOfTile];
  const bool wanted = call.sums.data != nullptr;
  const bool past_cache = go_past_cache(call.grad_x, call.rows, call.length);
  const int64_t tiles_of_group = ceil_div(call.length, kColumnsOfTile);
  for (int64_t tile = begin; tile < end; ++tile) {
    const int64_t group = tile / tiles_of_group, column = tile % tiles_of_group * kColumnsOfTile;
    const int64_t left = call.length - column, first = group * kRowsOfGroup;
    const int64_t columns = left < kColumnsOfTile ? left : kColumnsOfTile;
    const int64_t last = first + kRowsOfGroup < call.rows ? first + kRowsOfGroup : call.rows;
    for (int64_t row = first; row < last; ++row) {
      for (int64_t i = column; i < column + columns; i += kBlock) {
        const int64_t here = column + columns - i;
        const int count = int(here < kBlock ? here : kBlock);
        const ColumnSums of_block{wanted ? sums + (i - column) : nullptr, row == first};
        with_block_type(count, [&](auto storage) {
          backward_of_block<decltype(storage)>(call, row, i, count, of_block, past_cache);
        }, call.x, call.grad_out, call.bias, call.grad_x);
      }
    }
    if (!wanted) continue;
    const Pointer<Any> target = call.sums.row<Any>(group) + column;
    for_each_vector(0, columns, [&](int64_t k, int lanes) {
      Vec::load(sums + k, lanes).store(target + k, lanes);
    });
  }
  end_past_cache();
}

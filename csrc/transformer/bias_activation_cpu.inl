// The loops of bias_activation over a range of elements, and over tiles of a group of rows.
#include "common/simd/add_partials.inl"
#include "transformer/activation_math.inl"
#include "transformer/float_blocks.inl"

inline void activate_elements(const BiasActivation& call, int64_t begin, int64_t end) {
  Block blocks[3];
  const bool past_cache = go_past_cache(call.out, call.rows, call.length);
  const auto activate_block = [&](int64_t row, int64_t i, int count) {
    const float* x = read_floats(call.x.row<Any>(row) + i, count, blocks[0]);
    const float* bias =
        call.bias.data ? read_floats(call.bias.row<Any>(0) + i, count, blocks[1]) : nullptr;
    const Room out(call.out.row<Any>(row) + i, blocks[2], past_cache);
    with_activation(call.activation, [&](auto activation) {
      for_each_vector(0, count, [&](int64_t k, int lanes) {
        Vec value = Vec::load(x + k, lanes);
        if (bias) value = value + Vec::load(bias + k, lanes);
        out.store(k, activation.at(value, Vec(0.0f)).value, lanes);
      });
    });
    out.finish(count);
  };
  for_each_block(call.length, begin, end, activate_block);
  end_past_cache();
}

// Adds `count` elements of this row, from number i on, to `sums` unless it is null; the first row
// of a group overwrites it.
inline void backward_of_block(const BiasActivationBackward& call, int64_t row, int64_t i, int count,
                              float* sums, bool first, bool past_cache) {
  Block blocks[4];
  const float* x = read_floats(call.x.row<Any>(row) + i, count, blocks[0]);
  const float* grad = read_floats(call.grad_out.row<Any>(row) + i, count, blocks[1]);
  const float* bias =
      call.bias.data ? read_floats(call.bias.row<Any>(0) + i, count, blocks[2]) : nullptr;
  const Room grad_x(call.grad_x.row<Any>(row) + i, blocks[3], past_cache);
  with_activation(call.activation, [&](auto activation) {
    for_each_vector(0, count, [&](int64_t k, int lanes) {
      Vec value = Vec::load(x + k, lanes);
      if (bias) value = value + Vec::load(bias + k, lanes);
      const Vec result = activation.at(value, Vec::load(grad + k, lanes)).grad;
      grad_x.store(k, result, lanes);
      if (sums == nullptr) return;
      (first ? result : Vec::load(sums + k, lanes) + result).store(sums + k, lanes);
    });
  });
  grad_x.finish(count);
}

inline void backward_of_tiles(const BiasActivationBackward& call, int64_t begin, int64_t end) {
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
        backward_of_block(call, row, i, int(here < kBlock ? here : kBlock),
                          wanted ? sums + (i - column) : nullptr, row == first, past_cache);
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

// The loops of quantize over tasks, and over the parts of large groups.
#include "common/noise_math.inl"
#include "quantization/quantize_measure.inl"

constexpr int kBlock = 512;  // elements whose codes are bytes for a while

// Where a part of a group is: `count` elements of a row from number i on.
struct Piece {
  int64_t row, i, count, group;  // the number of the group
};

// Calls body(piece) for what tasks [begin, end) have of each group, in order.
template <class Body>
inline void for_each_piece_of_tasks(const Groups& call, const QuantizeTasks& tasks, int64_t begin,
                                    int64_t end, const Body& body) {
  const int64_t of_row = tasks.of_row(call), columns = call.columns();
  for (int64_t task = begin; task < end; ++task) {
    const int64_t row = task / of_row, band = row / call.group_rows;
    int64_t i = (task - row * of_row) * tasks.length;
    const int64_t task_end = i + tasks.length < call.length ? i + tasks.length : call.length;
    int64_t column = i / call.group;
    while (i < task_end) {
      const int64_t group_end = (column + 1) * call.group;
      const int64_t piece_end = group_end < task_end ? group_end : task_end;
      body(Piece{row, i, piece_end - i, band * columns + column});
      i = piece_end;
      ++column;
    }
  }
}

// Two codes of each word of 16 bits in a byte, and the other way round. A row's element number i is
// in the upper half of its byte if it is odd.
DSX_INLINE void pack_nibbles(const uint8_t* bytes, int64_t count, int64_t i, uint8_t* row) {
  if (i % 2 != 0 && count > 0) {
    row[i / 2] = uint8_t(row[i / 2] | bytes[0] << 4);
    ++i, ++bytes, --count;
  }
  for_each_vector(0, count / 2, [&](int64_t k, int lanes) DSX_INLINED {
    uint16_t words[Vec::size];
    memcpy(words, bytes + 2 * k, size_t(lanes) * 2);
    const Ints pairs = Ints::load(words, lanes);
    ((pairs | shift_right<4>(pairs)) & Ints(0xffu)).store(row + i / 2 + k, lanes);
  });
  if (count % 2 != 0) row[(i + count) / 2] = bytes[count - 1];
}

DSX_INLINE void unpack_nibbles(const uint8_t* row, int64_t i, int64_t count, uint8_t* bytes) {
  for_each_vector(0, ceil_div(count, 2), [&](int64_t k, int lanes) DSX_INLINED {
    const Ints pairs = Ints::load(row + i / 2 + k, lanes);
    uint16_t words[Vec::size];
    ((pairs & Ints(15u)) | (shift_left<4>(pairs) & Ints(0xf00u))).store(words, lanes);
    memcpy(bytes + 2 * k, words, size_t(lanes) * 2);
  });
}

template <class Coding>
DSX_INLINE Vec value_of(const Coding& coding, Ints code, const ScaleAndOffset& scale) {
  return scaled(coding.template decode<Vec>(code), scale);
}

// Rounds a piece, whose first element has this number among all.
template <class T, class Coding>
inline void encode_piece(const Quantize& call, const Coding& coding, const Piece& piece,
                         const ScaleAndOffset& scale) {
  const Grid grid = grid_of(scale, call.asymmetric);
  const bool is_nibble = bits_of_code(call.format) == 4;
  const Ints mask(is_nibble ? grid.mask & 15 : grid.mask);
  const T* x = call.x.row<T>(piece.row).address + piece.i;
  const auto codes_of = [&](int64_t k, int lanes) DSX_INLINED {
    // The next task, before it is measured; of 16 bits the work takes longer than the memory.
    if (sizeof(T) == 4) prefetch_early(x + k, kMostGroups * int64_t(sizeof(T)));
    const Vec value = Vec::load(x + k, lanes);
    if constexpr (Coding::kIsInteger) {
      if (call.noise.on) {
        const int64_t number = piece.row * call.length + piece.i + k;
        const Ints random = random_bits(noise_from(call.noise, number), Ints::from(0));
        return coding.template encode<Ints>(value, grid, random) & mask;
      }
    }
    return coding.template encode<Ints>(value, grid) & mask;
  };
  if (call.codes == nullptr) {
    const Pointer<Any> out = call.out.row<Any>(piece.row) + piece.i;
    for_each_vector(0, piece.count, [&](int64_t k, int lanes) DSX_INLINED {
      value_of(coding, codes_of(k, lanes) & Ints(0xffu), scale).store(out + k, lanes);
    });
    return;
  }
  uint8_t* row = call.codes + piece.row * bytes_of_row(call.format, call.length);
  if (!is_nibble) {
    for_each_vector(0, piece.count, [&](int64_t k, int lanes) DSX_INLINED {
      codes_of(k, lanes).store(row + piece.i + k, lanes);
    });
    return;
  }
  uint8_t bytes[kBlock];
  for (int64_t k = 0; k < piece.count; k += kBlock) {
    const int64_t left = piece.count - k, count = left < kBlock ? left : kBlock;
    for_each_vector(0, count, [&](int64_t j, int lanes) DSX_INLINED {
      codes_of(k + j, lanes).store(bytes + j, lanes);
    });
    pack_nibbles(bytes, count, piece.i + k, row);
  }
}

// All groups of a task are measured before the first one is rounded: a scale takes as long as the
// rounding of some registers, which would wait for it.
template <class T, class Coding>
inline void quantize_task(const Quantize& call, const Coding& coding, const QuantizeTasks& tasks,
                          int64_t task) {
  ScaleAndOffset scales[kMostGroups];
  ScaleAndOffset* next = scales;
  for_each_piece_of_tasks(call, tasks, task, task + 1, [&](const Piece& piece) {
    Largest found;
    measure(call.x.row<T>(piece.row).address + piece.i, piece.count, call.asymmetric, found);
    *next = scale_of(coding, found);
    store_scale(call, piece.group, *next++);
  });
  next = scales;
  for_each_piece_of_tasks(call, tasks, task, task + 1, [&](const Piece& piece) {
    encode_piece<T>(call, coding, piece, *next++);
  });
}

inline void quantize_tasks(const Quantize& call, bool measured, int64_t begin, int64_t end) {
  const QuantizeTasks tasks(call, measured);
  with_storage_type(call.x.dtype, [&](auto storage) {
    using T = decltype(storage);
    with_coding(call.format, call.asymmetric, [&](const auto& coding) {
      if (measured) {
        return for_each_piece_of_tasks(call, tasks, begin, end, [&](const Piece& piece) {
          encode_piece<T>(call, coding, piece, stored_scale(call, piece.group));
        });
      }
      for (int64_t task = begin; task < end; ++task) quantize_task<T>(call, coding, tasks, task);
    });
  });
}

inline void measure_parts(const Quantize& call, int64_t begin, int64_t end, Largest* found) {
  const Parts parts(call);
  const auto least = [](int64_t a, int64_t b) { return a < b ? a : b; };
  for (int64_t part = begin; part < end; ++part) {
    const int64_t group = part / parts.of_group, of_group = part - group * parts.of_group;
    const int64_t band = group / call.columns(), column = group - band * call.columns();
    const int64_t down = of_group / parts.across, across = of_group - down * parts.across;
    const int64_t end_column = least((column + 1) * call.group, call.length);
    const int64_t i = column * call.group + across * parts.columns;
    const int64_t count = least(parts.columns, end_column - i);
    const int64_t first = band * call.group_rows + down * parts.rows;
    const int64_t end_row = least((band + 1) * call.group_rows, call.rows);
    with_storage_type(call.x.dtype, [&](auto storage) {
      using T = decltype(storage);
      for (int64_t row = first; row < least(first + parts.rows, end_row) && count > 0; ++row) {
        measure(call.x.row<T>(row).address + i, count, call.asymmetric, found[part]);
      }
    });
  }
}

inline void finish_scales(const Quantize& call, const Largest* found) {
  const Parts parts(call);
  for (int64_t group = 0; group < call.bands() * call.columns(); ++group) {
    Largest of_group;
    for (int64_t part = 0; part < parts.of_group; ++part, ++found) {
      of_group.magnitude_or_order =
          dsx::max(of_group.magnitude_or_order, found->magnitude_or_order);
      of_group.flipped = dsx::max(of_group.flipped, found->flipped);
    }
    with_coding(call.format, call.asymmetric,
                [&](const auto& coding) { store_scale(call, group, scale_of(coding, of_group)); });
  }
}

inline void dequantize_tasks(const Dequantize& call, int64_t begin, int64_t end) {
  const bool is_nibble = bits_of_code(call.format) == 4;
  const bool past_cache = go_past_cache(call.out, call.rows, call.length);
  with_coding(call.format, call.asymmetric, [&](const auto& coding) {
    for_each_piece_of_tasks(call, QuantizeTasks(call, true), begin, end, [&](const Piece& piece) {
      const ScaleAndOffset scale = stored_scale(call, piece.group);
      const uint8_t* row = call.codes + piece.row * bytes_of_row(call.format, call.length);
      const Pointer<Any> out = call.out.row<Any>(piece.row) + piece.i;
      uint8_t nibbles[kBlock + 2];
      for (int64_t k = 0; k < piece.count; k += kBlock) {
        const int64_t i = piece.i + k, left = piece.count - k;
        const int64_t count = left < kBlock ? left : kBlock;
        const uint8_t* bytes = row + i;
        if (is_nibble) {
          unpack_nibbles(row, i, i % 2 + count, nibbles);
          bytes = nibbles + i % 2;
        }
        const bool here = past_cache && begins_line((out + k).address);
        for_each_vector(0, count, [&](int64_t j, int lanes) DSX_INLINED {
          const Vec value = value_of(coding, Ints::load(bytes + j, lanes), scale);
          value.store(out + k + j, lanes, here && lanes == Vec::size);
        });
      }
    });
  });
  end_past_cache();
}

// How the rows of one call of a norm lie, and which team of threads takes them.
#pragma once

#include <climits>

#include "transformer/norm_cuda.cuh"

namespace dsx::cuda {

constexpr int64_t kMostBlocks = INT_MAX;

// How the rows of one call lie, and its vectors.
struct Layout {
  int64_t rows, length;
  Dtype dtype, dtype_of_vectors;
  bool aligned, whole;  // whole: they can be accessed as vectors of `dtype`
  RowBlock block;

  Layout(int64_t count, int64_t n, std::initializer_list<Rows> all,
         std::initializer_list<Rows> vectors)
      : rows(count),
        length(n),
        dtype(all.begin()->dtype),
        dtype_of_vectors(dtype),
        aligned(all_aligned(all) && all_aligned(vectors)),
        block(n) {
    for (const Rows& vector : vectors) {
      if (is_there(vector)) dtype_of_vectors = vector.dtype;
    }
    whole = aligned && length % kRowVector == 0 && are_of(all, dtype);
  }

  static bool are_of(std::initializer_list<Rows> some, Dtype type) {
    return std::all_of(some.begin(), some.end(),
                       [&](const Rows& each) { return !is_there(each) || each.dtype == type; });
  }

  // Calls body(team, storage).
  template <class Body>
  void with_team(const Body& body) const {
    const auto choose = [&](auto held, auto not_held) {
      if (!whole) return body(not_held, Any{});
      with_storage_type(dtype, [&](auto storage) {
        if (length <= kLongestHeldRow) return body(held, storage);
        if constexpr (!decltype(held)::kShort) {
          // Long rows of float16 are rare: they do not get kernels of their own.
          using Long =
              std::conditional_t<std::is_same_v<decltype(storage), Half>, Any, decltype(storage)>;
          body(not_held, Long{});
        }
      });
    };
    if (block.teams > 1) return choose(RowTeam<true, true>{}, RowTeam<true, false>{});
    choose(RowTeam<false, true>{}, RowTeam<false, false>{});
  }

  int64_t blocks() const { return ceil_div(rows, block.teams); }
};

}  // namespace dsx::cuda

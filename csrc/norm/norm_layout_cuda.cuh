// How the rows of one call of a norm lie, and which teams of threads take them.
#pragma once

#include "norm/norm_cuda.cuh"

namespace dsx::cuda {

// Of a block whose teams are warps, or halves of them.
constexpr int kThreadsOfRows = 256;

struct Layout {
  int64_t rows, length;
  Dtype dtype;
  bool aligned, whole;  // whole: they can be accessed as vectors of `dtype`
  int team, block;      // threads
  int64_t blocks;       // if each team takes a row
  bool in_parts;        // teams take parts of rows

  Layout(int64_t count, int64_t n, std::initializer_list<Rows> all,
         std::initializer_list<Rows> vectors, bool are_in_parts = false)
      : rows(count),
        length(n),
        dtype(all.begin()->dtype),
        aligned(all_aligned(all) && all_aligned(vectors)),
        whole(aligned && n % kRowVector == 0 && n < int64_t(1) << 30 && are_of(all, dtype)),
        team(threads_of_team(are_in_parts ? part_of(n) : n)),
        block(n <= kRowOfWarp ? kThreadsOfRows : team),
        blocks(ceil_div(rows, block / team)),
        in_parts(are_in_parts) {}

  static bool are_of(std::initializer_list<Rows> some, Dtype type) {
    return std::all_of(some.begin(), some.end(),
                       [&](const Rows& each) { return !each.is_present() || each.dtype == type; });
  }
};

// Calls body with a team that is a warp, whose threads have as few vectors as there may be: where
// a row is short, many of them have to be on their way.
template <class Body>
void with_warp(int64_t length, const Body& body) {
  const auto call = [&]<int kVectors>() {
    body(std::type_identity<RowTeam<RowLength::is_of_warp, true, kVectors>>{});
  };
  const int64_t vectors = ceil_div(length, int64_t(kWarp * kRowVector));
  if (vectors == 1) return call.template operator()<1>();
  if (vectors == 2) return call.template operator()<2>();
  call.template operator()<kHeldVectors>();
}

// Of rows that are read again each time, which are held by nobody: one kernel for all teams of a
// warp.
template <class Team>
using ReadingTeam = RowTeam<Team::kLength>;

// Calls body with the type of the team, as std::type_identity.
template <class Body>
void with_row_length(int64_t length, const Body& body) {
  if (length <= kShortRow) return body(std::type_identity<RowTeam<RowLength::is_short>>{});
  if (length <= kRowOfWarp) return with_warp(length, body);
  if (length <= kUsualRow) return body(std::type_identity<RowTeam<RowLength::is_usual>>{});
  body(std::type_identity<RowTeam<RowLength::is_long>>{});
}

// How many multiprocessors this device has; a block can have at most so many
// bytes of shared memory beside 2 KiB that kernels declare.
struct Device {
  int multiprocessors = 0, shared_bytes = 0;

  explicit Device(const char* op) {
    int device = 0;
    check(cudaGetDevice(&device), op);
    check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), op);
    check(cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
          op);
    shared_bytes -= 2 << 10;
  }
};

}  // namespace dsx::cuda

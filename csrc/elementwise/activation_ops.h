// What the torch side of all activations shares.
#pragma once

#include "common/torch/activation.h"
#include "common/torch/device.h"
#include "common/torch/rows.h"

namespace dsx {

// What an op is called with, but for its tensors; `view` is that of the first one.
template <class Call>
Call call_over(const char* op, const Item& item, const TensorView& view, int64_t activation) {
  const RowShape shape(op, item, view);
  Call call = {};
  call.activation = activation_of(op, activation);
  call.rows = shape.rows;
  call.length = shape.length;
  return call;
}

// Rows that all follow each other without a gap are as good as a single long one.
template <class Call>
void join_rows(Call& call, std::initializer_list<const Rows*> all) {
  for (const Rows* rows : all) {
    if (rows->pitch != call.length || rows->group > 0) return;
  }
  call.length *= call.rows;
  call.rows = 1;
}

#ifndef USE_CUDA
constexpr int64_t kElementsPerThread = 32768;  // some 10 us: less is not worth a thread

// Calls function(isa, call, begin, end) for all elements of all rows.
template <class Call>
void run_elements(const Call& call, void (*function)(Isa, const Call&, int64_t, int64_t)) {
  in_parallel(call.rows * call.length, 1, kElementsPerThread,
              [&](Isa isa, int64_t begin, int64_t end) { function(isa, call, begin, end); });
}
#endif

}  // namespace dsx

// The torch side of products with the weights of experts: checks, then tensors into the struct.
#pragma once

#include <algorithm>
#include <vector>

#include "common/torch/activation.h"
#include "common/torch/arguments.h"
#include "common/torch/rows.h"
#include "common/torch/slots.h"
#include "linear/grouped_rows.h"

namespace dsx {

// What a caller gives beside x and the weight.
struct GroupedRowsOptions {
  const torch::stable::Tensor& offsets;
  const OptionalTensor& bias;
  const OptionalTensor& slots;
  std::optional<int64_t> activation;
  bool gated;
};

// On the CPU: the rows of each expert that has some, kMostRows at a time, and where those are in x.
struct PartsOfExperts {
  std::vector<RowsOfExpert> parts;
  std::vector<int64_t> of_x;  // [the last offset]
};

// Reads a call, for an op of this name, in the order in which things are known: all but the weight
// when it is made, the rest when it is told how many rows the weight has.
template <class Call>
class GroupedRowsReader {
  using Tensor = torch::stable::Tensor;

 public:
  Call call = {};

  GroupedRowsReader(const char* op, const Tensor& x, const GroupedRowsOptions& options)
      : op_(op), options_(options), view_(x.get()), reader_(op) {
    const RowShape shape(op, {"x"}, view_);
    check(options.slots.has_value() || view_.dim == 2, op, ": x has shape ",
          Integers{view_.sizes, view_.dim}, ", expected two dimensions");
    call.length = shape.length;
    call.tokens = call.rows = shape.rows;
    call.k = 1;
    call.activated = options.activation.has_value();
    if (call.activated) call.activation = activation_of(op, *options.activation);
    check(call.activated || !options.gated, op,
          ": gated is True, expected an activation beside it");
    call.gated = options.gated;
    call.x = reader_.read({"x"}, view_);
  }

  const TensorView& x() const { return view_; }

  // Present rows have the dtype of x.
  void check_dtype(const Item& item, const Rows& got) const {
    check(!got.is_present() || got.dtype == call.x.dtype, op_, ": ", item, " is ", got.dtype,
          ", expected ", call.x.dtype);
  }

  // Runs the op and returns its result: run(call, parts, device). `weight` is what an error calls
  // that, which has so many rows for each of so many experts.
  template <class Run>
  Tensor finish(const char* weight, int64_t experts, int64_t weight_rows, const Run& run) {
    check(!call.gated || weight_rows % 2 == 0, op_, ": ", weight, " has ", weight_rows,
          " rows for each expert, expected an even number, as gated is True");
    call.experts = experts;
    call.columns = weight_rows / (call.gated ? 2 : 1);
    const WholeNumbers offsets(op_, {"offsets"}, options_.offsets, aoti_torch_dtype_int32(), view_);
    check(offsets.view.dim == 1 && offsets.view.sizes[0] == experts, op_, ": offsets has shape ",
          Integers{offsets.view.sizes, offsets.view.dim}, ", expected [", experts, "]");
    check(experts > 0, op_, ": ", weight, " is of no expert, expected one at least");
    call.offsets = offsets.numbers<int32_t>();
    std::optional<WholeNumbers> slots;
    if (options_.slots.has_value()) {
      slots.emplace(op_, Item{"slots"}, *options_.slots, aoti_torch_dtype_int64(), view_);
      read_slots(*slots);
    }
    check(call.rows <= kMostGroupedRows, op_, ": ", slots ? "slots" : "x", " has ", call.rows,
          slots ? " elements" : " rows", ", expected at most ", kMostGroupedRows);
    read_bias(experts, weight_rows);
    PartsOfExperts parts;
#ifndef USE_CUDA
    divide_rows(parts);
#endif
    const int64_t sizes[] = {call.rows, call.columns};
    Tensor out = new_tensor(sizes, 2, torch_code(call.x.dtype), view_);
    call.out = {out.data_ptr(), call.columns, call.x.dtype};
    if (call.rows > 0 && call.columns > 0) run(call, parts, view_.device_index);
    return out;
  }

 private:
  void read_slots(const WholeNumbers& slots) {
    const TensorView& got = slots.view;
    bool same = got.dim == view_.dim;
    for (int64_t i = 0; same && i < got.dim - 1; ++i) same = got.sizes[i] == view_.sizes[i];
    check(same, op_, ": slots has shape ", Integers{got.sizes, got.dim},
          ", expected the choices of each token beside x with shape ",
          Integers{view_.sizes, view_.dim});
    call.slots = slots.numbers<int64_t>();
    call.k = got.sizes[got.dim - 1];
    call.rows = got.numel;
  }

  void read_bias(int64_t experts, int64_t weight_rows) {
    if (!options_.bias.has_value()) return;
    const TensorView view(options_.bias->get());
    check_device(op_, {"bias"}, view, view_);
    check(view.dim == 2 && view.sizes[0] == experts && view.sizes[1] == weight_rows, op_,
          ": bias has shape ", Integers{view.sizes, view.dim}, ", expected [", experts, ", ",
          weight_rows, "]");
    call.bias = reader_.read({"bias"}, view);
    check_dtype({"bias"}, call.bias);
  }

  // Reads each number once, as another thread might write to them.
  void divide_rows(PartsOfExperts& found) const {
    int64_t begin = 0;
    for (int64_t expert = 0; expert < call.experts; ++expert) {
      const int64_t end = call.offsets[expert];
      check(end >= begin && end <= call.rows, op_, ": offsets[", expert, "] is ", end,
            ", expected a number from ", begin, " to ", call.rows);
      for (; begin < end; begin += kMostRows) {
        found.parts.push_back({expert, begin, std::min(end - begin, kMostRows), nullptr});
      }
      begin = end;
    }
    if (call.slots == nullptr) {
      for (int64_t row = 0; row < begin; ++row) found.of_x.push_back(row);
    } else {
      found.of_x = choices_of_rows(op_, call.slots, call.tokens * call.k, begin);
      for (int64_t& choice : found.of_x) choice /= call.k;
    }
    for (RowsOfExpert& part : found.parts) part.of_x = found.of_x.data() + part.first;
  }

  const char* const op_;
  const GroupedRowsOptions options_;
  const TensorView view_;
  RowReader reader_;
};

}  // namespace dsx

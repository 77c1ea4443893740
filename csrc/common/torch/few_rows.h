// The torch side of matrix multiplications on few rows: checks, then tensors into the struct.
#pragma once

#include "common/few_rows.h"
#include "common/torch/activation.h"
#include "common/torch/arguments.h"
#include "common/torch/new_tensor.h"
#include "common/torch/rows.h"

namespace dsx {

// What a caller gives beside x and the weight.
struct FewRowsOptions {
  const OptionalTensor& bias;
  const OptionalTensor& residual;
  std::optional<int64_t> activation;
  bool gated;
};

// Reads a call, for an op of this name, in the order in which things are known: x when it is made,
// the rest when it is told how many rows the weight has.
template <class Call>
class FewRowsReader {
  using Tensor = torch::stable::Tensor;

 public:
  Call call = {};

  FewRowsReader(const char* op, const Tensor& x, const FewRowsOptions& options)
      : op_(op), options_(options), view_(x.get()), reader_(op) {
    const RowShape shape(op, {"x"}, view_);
    check(shape.rows <= kMostRows, op, ": x has shape ", Integers{view_.sizes, view_.dim},
          ", expected at most ", kMostRows, " rows");
    call.rows = shape.rows;
    call.length = shape.length;
    call.activated = options.activation.has_value();
    if (call.activated) call.activation = activation_of(op, *options.activation);
    check(call.activated || !options.gated, op,
          ": gated is True, expected an activation beside it");
    call.gated = options.gated;
    call.x = reader_.read({"x"}, view_);
  }

  const TensorView& x() const { return view_; }

  // Runs the op and returns its result. `weight` is what an error calls it, with that many rows.
  template <class Run>
  Tensor finish(const char* weight, int64_t weight_rows, const Run& run) {
    check(!call.gated || weight_rows % 2 == 0, op_, ": ", weight, " has ", weight_rows,
          " rows, expected an even number, as gated is True");
    call.columns = weight_rows / (call.gated ? 2 : 1);
    call.bias = reader_.read_vector({"bias"}, options_.bias, weight_rows, view_);
    std::vector<int64_t> sizes(view_.sizes, view_.sizes + view_.dim);
    sizes.back() = call.columns;
    TensorView out_view = view_;  // what the result is like
    out_view.sizes = sizes.data();
    out_view.numel = call.rows * call.columns;
    call.residual = reader_.read({"residual"}, options_.residual, out_view);
    check_dtype({"bias"}, call.bias);
    check_dtype({"residual"}, call.residual);
    NewRows out(out_view, call.x.dtype);
    call.out = out.rows;
    if (out_view.numel > 0) run(call, view_.device_index);
    return std::move(out.tensor);
  }

  // Present rows have the dtype of x.
  void check_dtype(const Item& item, const Rows& got) const {
    check(got.data == nullptr || got.dtype == call.x.dtype, op_, ": ", item, " is ", got.dtype,
          ", expected ", call.x.dtype);
  }

 private:
  const char* const op_;
  const FewRowsOptions options_;
  const TensorView view_;
  RowReader reader_;
};

}  // namespace dsx

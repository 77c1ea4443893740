// The torch side of skinny GEMMs: checks, then tensors into the struct.
#pragma once

#include "linear/few_rows.h"
#include "common/torch/activation.h"
#include "common/torch/arguments.h"
#include "common/torch/new_tensor.h"
#include "common/torch/rows.h"
#include "common/torch/weight_offset.h"

namespace dsx {

// What a caller gives beside x and the weight.
struct FewRowsOptions {
  const OptionalTensor& bias;
  const OptionalTensor& residual;
  std::optional<int64_t> activation;
  bool gated;
};

// The RMS norms around a layer, of which it does a part; either may lack.
struct NormsAround {
  OptionalTensor squares;      // of the norm before
  OptionalTensor norm_weight;  // of the norm after
  double eps = 0;
  double weight_offset = 0;
};

// Reads a call, for an op of this name, in the order in which things are known: x when it is made,
// the rest when it is told how many rows the weight has; then it has the results, too.
template <class Call>
class FewRowsReader {
  using Tensor = torch::stable::Tensor;

 public:
  Call call = {};

  FewRowsReader(const char* op, const Tensor& x, const FewRowsOptions& options,
                const NormsAround& norms = {})
      : op_(op), options_(options), norms_(norms), view_(x.get()), reader_(op) {
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
    if (norms.squares) read_squares();
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
    if (norms_.norm_weight) read_norm_after(weight, out_view);
    NewRows out(out_view, call.x.dtype);
    call.out = out.rows;
    if (out_view.numel > 0) run(call, view_.device_index);
    return std::move(out.tensor);
  }

  // The result with what there is of the norm after the layer; empty tensors if there is none.
  std::tuple<Tensor, Tensor, Tensor> with_norm(Tensor out) const {
    const auto made = [&](const std::optional<NewRows>& rows, Dtype dtype) {
      const int64_t none = 0;
      return rows ? rows->tensor : new_tensor(&none, 1, torch_code(dtype), view_);
    };
    Tensor scaled = made(scaled_, call.x.dtype), squares = made(squares_, Dtype::float32);
    return {std::move(out), std::move(scaled), std::move(squares)};
  }

  // Present rows have the dtype of x.
  void check_dtype(const Item& item, const Rows& got) const {
    check(!got.is_present() || got.dtype == call.x.dtype, op_, ": ", item, " is ", got.dtype,
          ", expected ", call.x.dtype);
  }

 private:
  void check_norms_dtype() const {
    check(call.x.dtype != Dtype::float16, op_,
          ": x is float16, expected float32 or bfloat16 beside a norm, as what is not divided yet"
          " may be too large");
  }

  void read_squares() {
    check_norms_dtype();
    check(call.length > 0 && call.length % kSquared == 0, op_, ": x has shape ",
          Integers{view_.sizes, view_.dim}, ", expected a multiple of ", kSquared,
          " columns beside squares");
    check(norms_.eps >= 0, op_, ": eps is ", norms_.eps, ", expected a number that is 0 or more");
    call.eps = float(norms_.eps);
    std::vector<int64_t> sizes(view_.sizes, view_.sizes + view_.dim);
    sizes.back() /= kSquared;
    TensorView like = view_;
    like.sizes = sizes.data();
    dsx::check_dtype(op_, {"squares"}, TensorView(norms_.squares->get()), Dtype::float32);
    call.squares = reader_.read({"squares"}, norms_.squares, like);
  }

  void read_norm_after(const char* weight, const TensorView& out_view) {
    check_norms_dtype();
    check(!call.gated, op_, ": gated is True, expected False beside a norm after it");
    check(call.columns % kSquared == 0, op_, ": ", weight, " has ", call.columns,
          " rows, expected a multiple of ", kSquared, " beside a norm after it");
    call.weight_offset = finite_weight_offset(op_, norms_.weight_offset);
    call.norm_weight =
        reader_.read_vector({"norm_weight"}, norms_.norm_weight, call.columns, view_);
    check_dtype({"norm_weight"}, call.norm_weight);
    scaled_.emplace(out_view, call.x.dtype);
    std::vector<int64_t> sizes(out_view.sizes, out_view.sizes + out_view.dim);
    sizes.back() /= kSquared;
    TensorView squares_view = out_view;
    squares_view.sizes = sizes.data();
    squares_.emplace(squares_view, Dtype::float32);
    call.scaled = scaled_->rows;
    call.out_squares = squares_->rows;
  }

  const char* const op_;
  const FewRowsOptions options_;
  const NormsAround norms_;
  const TensorView view_;
  RowReader reader_;
  std::optional<NewRows> scaled_, squares_;  // of the norm after
};

}  // namespace dsx

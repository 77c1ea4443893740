// The torch side of elementwise ops: tensors into the struct of a rule, checked, and its run on the
// device that this is compiled for.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "common/math.h"
#include "common/torch/arguments.h"
#include "common/torch/device.h"
#include "common/torch/rows.h"
#include "elementwise/elementwise.h"

namespace dsx {

using torch::stable::Tensor;

#ifdef USE_CUDA
template <class Rule>
void run(const Elementwise<Rule>& call, int device) {
  elementwise_cuda(call, OnDevice(device).stream);
}

// `sums` are those over all rows, of one row each.
template <class Rule>
void run_with_sums(Elementwise<Rule> call, const Rows (&sums)[Rule::kOut], int device) {
  const OnDevice on(device);
  const int64_t groups = groups_cuda<Rule>(call.rows), floats = groups * call.length;
  if (groups == 1) return elementwise_cuda(call, on.stream);
  const Tensor workspace = cuda_workspace(Rule::kOut * floats * int64_t(sizeof(float)), device);
  float* const partials = static_cast<float*>(workspace.data_ptr());
  for (int k = 0; k < Rule::kOut; ++k) {
    if (sums[k].is_present()) {
      call.sums[k] = {partials + k * floats, call.length, Dtype::float32};
    }
  }
  elementwise_cuda(call, on.stream);
  for (int k = 0; k < Rule::kOut; ++k) {
    if (!sums[k].is_present()) continue;
    add_groups_cuda<Rule>(partials + k * floats, groups, call.length, sums[k], on.stream);
  }
}
#else
constexpr int64_t kElementsPerThread = 32768;  // some 10 us: less is not worth a thread

template <class Rule>
void run(const Elementwise<Rule>& call, int /*device*/) {
  in_parallel(call.rows * call.length, 1, kElementsPerThread,
              [&](Isa isa, int64_t begin, int64_t end) { elementwise_cpu(isa, call, begin, end); });
}

template <class Rule>
void run_with_sums(Elementwise<Rule> call, const Rows (&sums)[Rule::kOut], int /*device*/) {
  const int64_t groups = ceil_div(call.rows, kRowsOfGroup);
  std::unique_ptr<float[]> partials[Rule::kOut];
  for (int k = 0; k < Rule::kOut && groups != 1; ++k) {
    if (!sums[k].is_present()) continue;
    partials[k].reset(new float[size_t(groups * call.length)]);
    call.sums[k] = {partials[k].get(), call.length, Dtype::float32};
  }
  const int64_t tiles = groups * ceil_div(call.length, kColumnsOfTile);
  const int64_t of_tile = std::min(call.rows, kRowsOfGroup) * std::min(call.length, kColumnsOfTile);
  in_parallel(tiles, of_tile, kElementsPerThread, [&](Isa isa, int64_t begin, int64_t end) {
    elementwise_tiles_cpu(isa, call, begin, end);
  });
  for (int k = 0; k < Rule::kOut; ++k) {
    if (partials[k] == nullptr) continue;
    in_parallel(call.length, groups, kElementsPerThread, [&](Isa isa, int64_t begin, int64_t end) {
      add_groups_cpu<Rule>(isa, partials[k].get(), groups, call.length, begin, end, sums[k]);
    });
  }
}
#endif

// One call of a rule. Tensors are read in the order of the schema, as errors name the first wrong
// one.
template <class Rule>
class ElementwiseCall {
 public:
  // `like` has the shape of all rows but, where they are parts of its rows, for their length.
  ElementwiseCall(const Item& item, const Tensor& like, int64_t parts = 1)
      : like_(like.get()), reader_(Rule::kOp) {
    const RowShape shape(Rule::kOp, item, like_);
    check(shape.length % parts == 0, Rule::kOp, ": ", item, " has shape ",
          Integers{like_.sizes, like_.dim}, ", expected a last dimension of even length");
    call_.rows = shape.rows;
    call_.length = shape.length / parts;
  }

  Rule& rule() { return call_.rule; }
  const TensorView& like() const { return like_; }
  int64_t length() const { return call_.length; }
  Dtype dtype(int i) const { return call_.in[i].dtype; }
  Dtype dtype_of_bias(int i) const { return call_.bias[i].dtype; }

  void read(int i, const Item& item, const OptionalTensor& tensor) {
    call_.in[i] = reader_.read(item, tensor, like_);
  }
  void read_bias(int i, const Item& item, const OptionalTensor& tensor) {
    call_.bias[i] = reader_.read_vector(item, tensor, call_.length, like_);
  }

  // All of `like`, whose rows have inputs side by side.
  Rows read_like(const Item& item) { return reader_.read(item, like_); }
  // One whose shape is that of the rows.
  void read_part(int i, const Item& item, const Tensor& tensor) {
    const TensorView view(tensor.get());
    check_device(Rule::kOp, item, view, like_);
    const std::vector<int64_t> sizes = sizes_of_rows();
    TensorView want = like_;
    want.sizes = sizes.data();
    check_shape(Rule::kOp, item, view, want);
    call_.in[i] = reader_.read(item, view);
  }
  void take(int i, const Rows& rows) { call_.in[i] = rows; }
  void give(int k, const Rows& rows) { call_.out[k] = rows; }

  // A new tensor for out[k].
  Tensor make(int k, Dtype dtype) {
    const std::vector<int64_t> sizes = sizes_of_rows();
    Tensor made = new_tensor(sizes.data(), like_.dim, torch_code(dtype), like_);
    call_.out[k] = {made.data_ptr(), call_.length, dtype};
    return made;
  }

  // A new tensor for the sum of out[k] over all rows; empty if it is not wanted.
  Tensor make_sum(int k, bool wanted, Dtype dtype) {
    static_assert(kHasSums<Rule>, "a rule whose sums may be wanted has kSums");
    const int64_t length = wanted ? call_.length : 0;
    Tensor made = new_tensor(&length, 1, torch_code(dtype), like_);
    if (wanted) sums_[k] = {made.data_ptr(), 0, dtype};
    call_.sums[k] = sums_[k];
    return made;
  }

  void run() {
    if constexpr (kHasSums<Rule>) {
      if (call_.has_sums()) return run_with_sums(call_, sums_, like_.device_index);
    }
    if (call_.rows == 0 || call_.length == 0) return;
    join_rows();
    dsx::run(call_, like_.device_index);
  }

 private:
  std::vector<int64_t> sizes_of_rows() const {
    std::vector<int64_t> sizes(like_.sizes, like_.sizes + like_.dim);
    sizes.back() = call_.length;
    return sizes;
  }

  // Rows that all follow each other without a gap are as good as a single long one.
  void join_rows() {
    for (const Rows& each : call_.bias) {
      if (each.is_present()) return;
    }
    for (const auto& all : {std::span<const Rows>(call_.in), std::span<const Rows>(call_.out)}) {
      for (const Rows& each : all) {
        if (each.is_present() && (each.pitch != call_.length || each.group > 0)) return;
      }
    }
    call_.length *= call_.rows;
    call_.rows = 1;
  }

  TensorView like_;
  RowReader reader_;
  Elementwise<Rule> call_ = {};
  Rows sums_[Rule::kOut] = {};
};

}  // namespace dsx

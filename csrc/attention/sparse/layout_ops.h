// A layout as it is given, and on the CPU as lists: of each row of blocks those that it names, and
// of each column.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <vector>

#include "attention/sparse/block_sparse.h"
#include "common/torch/checks.h"

namespace dsx {

class Layout {
 public:
  // Reads a tensor [heads or 1, blocks, blocks] and says in the call where the lists are, as long
  // as this object lives.
  void read(const char* op, const torch::stable::Tensor& tensor, const TensorView& q,
            BlockSparse& call) {
    const Item item{"layout"};
    const TensorView view(tensor.get());
    const int64_t n = call.blocks();
    check_device(op, item, view, q);
    const bool fits = view.dim == 3 && (view.sizes[0] == 1 || view.sizes[0] == call.heads) &&
                      view.sizes[1] == n && view.sizes[2] == n;
    check(fits, op, ": ", item, " has shape ", Integers{view.sizes, view.dim}, ", expected [",
          call.heads, " or 1, ", n, ", ", n, "], as q has ", call.tokens, " tokens");
    check_memory(op, item, view);
    call.layout_of_heads = view.sizes[0] != 1;
    const bool is_byte =
        view.dtype == aoti_torch_dtype_bool() || view.dtype == aoti_torch_dtype_uint8();
    const bool is_int = view.dtype == aoti_torch_dtype_int32();
    check(is_byte || is_int || view.dtype == aoti_torch_dtype_int64(), op, ": ", item, " is ",
          DtypeCode{view.dtype}, ", expected bool, uint8, int32 or int64");
    given_ = {view.data,
              is_byte  ? 1
              : is_int ? 4
                       : 8,
              view.strides[0], view.strides[1], view.strides[2]};
#ifndef USE_CUDA
    if (is_byte) {
      make_lists<uint8_t>(view, call.causal);
    } else if (is_int) {
      make_lists<int32_t>(view, call.causal);
    } else {
      make_lists<int64_t>(view, call.causal);
    }
    call.rows = {row_begins_.data(), of_rows_.data()};
    call.columns = {column_begins_.data(), of_columns_.data()};
#endif
  }

  const LayoutView& given() const { return given_; }

  // How many products of two tokens' elements there are, about.
  double products(const BlockSparse& call) const {
    const double each = double(of_rows_.size()) * call.block * call.block;
    const double heads = call.layout_of_heads ? 1.0 : double(call.heads);
    return each * heads * double(call.batches) * double(call.width);
  }

 private:
  template <class T>
  void make_lists(const TensorView& view, bool causal) {
    const int64_t heads = view.sizes[0], n = view.sizes[1];
    row_begins_.assign(size_t(heads * n + 1), 0);
    column_begins_.assign(size_t(heads * n + 1), 0);
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t i = 0; i < n; ++i) {
        const T* row =
            reinterpret_cast<const T*>(view.data) + h * view.strides[0] + i * view.strides[1];
        for (int64_t j = 0; j < (causal ? i + 1 : n); ++j) {
          if (row[j * view.strides[2]] == 0) continue;
          of_rows_.push_back(int32_t(j));
          ++column_begins_[size_t(h * n + j + 1)];
        }
        row_begins_[size_t(h * n + i + 1)] = int64_t(of_rows_.size());
      }
    }
    for (size_t i = 1; i < column_begins_.size(); ++i) column_begins_[i] += column_begins_[i - 1];
    of_columns_.resize(of_rows_.size());
    std::vector<int64_t> next = column_begins_;
    for (int64_t row = 0; row < heads * n; ++row) {
      for (int64_t i = row_begins_[size_t(row)]; i < row_begins_[size_t(row + 1)]; ++i) {
        const int64_t column = row / n * n + of_rows_[size_t(i)];
        of_columns_[size_t(next[size_t(column)]++)] = int32_t(row % n);
      }
    }
  }

  LayoutView given_ = {};
  std::vector<int64_t> row_begins_, column_begins_;
  std::vector<int32_t> of_rows_, of_columns_;
};

}  // namespace dsx

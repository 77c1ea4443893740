// Reads the tensors of a cache of keys and values, and which tokens of its slots are new.
#pragma once

#include "common/torch/arguments.h"
#include "common/torch/rows.h"
#include "attention/cache/paged_kv.h"

namespace dsx {

// The tensors of a cache, in the order of the schemas.
struct PagedKvTensors {
  const torch::stable::Tensor &keys, &values, &table, &lengths;
  const OptionalTensor &key_scales, &value_scales, &slots, &counts;
};

class PagedKvReader {
 public:
  // `like` is on the device that all must be on.
  PagedKvReader(const char* op, const PagedKvTensors& tensors, const TensorView& like)
      : op_(op), like_(like) {
    read_elements(TensorView(tensors.keys.get()), TensorView(tensors.values.get()));
    read_scales(tensors.key_scales, tensors.value_scales);
    const TensorView table(tensors.table.get()), lengths(tensors.lengths.get());
    kv.table = integers({"table"}, table, 2);
    kv.lengths = integers({"lengths"}, lengths, 1);
    kv.slots = table.sizes[0];
    kv.pages_of_slot = table.sizes[1];
    check(lengths.sizes[0] == kv.slots, op, ": lengths has shape ",
          Integers{lengths.sizes, lengths.dim}, ", expected [", kv.slots, "], as table says");
  }

  // Which tokens are new, of a tensor whose first dimensions are the batch and its tokens.
  NewTokens read_new(const PagedKvTensors& tensors, const TensorView& view) {
    NewTokens news = {};
    news.batches = view.sizes[0];
    news.tokens = view.sizes[1];
    news.slots = of_batch({"slots"}, tensors.slots, news.batches);
    news.counts = of_batch({"counts"}, tensors.counts, news.batches);
    check(news.slots != nullptr || news.batches == kv.slots || tensors.slots.has_value(), op_,
          ": the batch has ", news.batches, " rows, expected ", kv.slots,
          ", one for each slot; pass slots");
    return news;
  }

  PagedKv kv = {};

 private:
  void read_elements(const TensorView& keys, const TensorView& values) {
    for (const auto& [item, view] : {std::pair{Item{"keys"}, keys}, {Item{"values"}, values}}) {
      check_device(op_, item, view, like_);
      check(view.dim == 4 && view.sizes[2] == kPageTokens, op_, ": ", item, " has shape ",
            Integers{view.sizes, view.dim}, ", expected [pages, heads, ", kPageTokens,
            ", head_dim]");
      check(view.sizes[3] < 2 || view.strides[3] == 1, op_, ": ", item, " has strides ",
            Integers{view.strides, view.dim}, ", expected 1 for the last dimension");
      check_memory(op_, item, view);
    }
    check_shape(op_, {"values"}, values, keys);
    check_layout(op_, {"values"}, values, keys);
    if constexpr (DSX_KV::kQuantized) {
      for (const auto& [item, view] : {std::pair{Item{"keys"}, keys}, {Item{"values"}, values}}) {
        const bool is_int8 = std::is_same_v<DSX_KV, Int8Kv>;
        const int32_t want = is_int8 ? aoti_torch_dtype_int8() : aoti_torch_dtype_float8_e4m3fn();
        check(view.dtype == want, op_, ": ", item, " is ", DtypeCode{view.dtype}, ", expected ",
              is_int8 ? "int8" : "float8_e4m3fn");
      }
    } else {
      kv.dtype = storage_dtype(op_, {"keys"}, keys);
      check_dtype(op_, {"values"}, values, kv.dtype);
    }
    kv.keys = keys.data;
    kv.values = values.data;
    kv.pages = keys.sizes[0];
    kv.heads = keys.sizes[1];
    kv.width = keys.sizes[3];
    kv.of_page = keys.strides[0];
    kv.of_head = keys.strides[1];
    kv.of_token = keys.strides[2];
  }

  void read_scales(const OptionalTensor& keys, const OptionalTensor& values) {
    if constexpr (DSX_KV::kQuantized) {
      kv.key_scales = scales_of({"key_scales"}, keys);
      kv.value_scales = scales_of({"value_scales"}, values);
    }
  }

  float* scales_of(const Item& item, const OptionalTensor& tensor) {
    check(tensor.has_value(), op_, ": ", item, " is None, expected the scales of codes");
    const TensorView view(tensor->get());
    check_device(op_, item, view, like_);
    check_dtype(op_, item, view, Dtype::float32);
    const int64_t want[] = {kv.pages, kv.heads, kPageTokens};
    const bool fits = view.dim == 3 && std::equal(want, want + 3, view.sizes);
    check(fits && view.is_contiguous(), op_, ": ", item, " has shape ",
          Integers{view.sizes, view.dim}, " and strides ", Integers{view.strides, view.dim},
          ", expected contiguous ", Integers{want, 3});
    check_memory(op_, item, view);
    return reinterpret_cast<float*>(view.data);
  }

  const int32_t* integers(const Item& item, const TensorView& view, int64_t dim) {
    check_device(op_, item, view, like_);
    check(view.dtype == aoti_torch_dtype_int32(), op_, ": ", item, " is ", DtypeCode{view.dtype},
          ", expected int32");
    check(view.dim == dim && view.is_contiguous(), op_, ": ", item, " has shape ",
          Integers{view.sizes, view.dim}, " and strides ", Integers{view.strides, view.dim},
          ", expected ", dim, dim == 1 ? " contiguous dimension" : " contiguous dimensions");
    check_memory(op_, item, view);
    return reinterpret_cast<const int32_t*>(view.data);
  }

  const int32_t* of_batch(const Item& item, const OptionalTensor& tensor, int64_t batches) {
    if (!tensor.has_value()) return nullptr;
    const TensorView view(tensor->get());
    const int32_t* data = integers(item, view, 1);
    check(view.sizes[0] == batches, op_, ": ", item, " has shape ", Integers{view.sizes, view.dim},
          ", expected [", batches, "], the size of the batch");
    return data;
  }

  const char* op_;
  TensorView like_;
};

}  // namespace dsx

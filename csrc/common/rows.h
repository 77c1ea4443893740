// A tensor as rows that each lie in one piece: what ops that work along the last dimension see.
#pragma once

#include "common/dispatch.h"
#include "common/pointer.h"

namespace dsx {

struct Rows {
  void* data = nullptr;          // null: absent
  int64_t pitch = 0;             // elements from one row to the next; 0: all rows are the same
  Dtype dtype = Dtype::float32;  // float32, bfloat16 or float16

  // T is the storage type that holds the dtype, or Any.
  template <class T>
  DSX_HOST_DEVICE Pointer<T> row(int64_t i) const {
    return Pointer<T>::to(data, dtype) + i * pitch;  // of absent rows: null, as their pitch is 0
  }

  // The same rows from this column on.
  Rows from(int64_t column) const {
    return {static_cast<char*>(data) + column * bytes_of(dtype), pitch, dtype};
  }
};

// Calls body with a value of the storage type of all these that are present, or with Any where they
// differ, so that mixtures do not multiply the code.
template <class Body, class... Others>
void with_storage_type_of(const Body& body, const Rows& first, const Others&... others) {
  const auto fits = [&](const Rows& rows) {
    return rows.data == nullptr || rows.dtype == first.dtype;
  };
  if ((fits(others) && ...)) return with_storage_type(first.dtype, body);
  body(Any{});
}

}  // namespace dsx

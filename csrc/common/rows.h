// A tensor as rows that each lie in one piece: what ops that work along the last dimension see.
#pragma once

#include "common/dispatch.h"
#include "common/pointer.h"

namespace dsx {

struct Rows {
  void* data = nullptr;          // null: absent
  int64_t pitch = 0;             // elements from one row to the next; 0: all rows are the same
  Dtype dtype = Dtype::float32;  // float32, bfloat16 or float16
  // Rows may come in groups of so many, as the heads of each token in a slice of a projection do;
  // 0: all of them are one group.
  int64_t group = 0;
  int64_t group_pitch = 0;  // elements from one group to the next

  DSX_HOST_DEVICE bool is_present() const { return data != nullptr; }

  // T is the storage type that holds the dtype, or Any.
  template <class T>
  DSX_HOST_DEVICE Pointer<T> row(int64_t i) const {
    return Pointer<T>::to(data, dtype) + place_of(i);  // of absent rows: null, as their pitch is 0
  }

  // The same of rows that are all in one group, as those of results are.
  template <class T>
  DSX_HOST_DEVICE Pointer<T> even_row(int64_t i) const {
    return Pointer<T>::to(data, dtype) + i * pitch;
  }

  // The same rows from this column on.
  Rows from(int64_t column) const {
    DSX_ASSERT(is_present() || column == 0, "arithmetic on an absent row");
    Rows rows = *this;
    rows.data = static_cast<char*>(data) + column * bytes_of(dtype);
    return rows;
  }

  DSX_HOST_DEVICE int64_t place_of(int64_t i) const {
    if (group == 0) return i * pitch;
    // The division of 32 bits costs a fraction of that of 64.
    const bool fits = uint64_t(i | group) <= UINT32_MAX;
    const int64_t before = fits ? int64_t(uint32_t(i) / uint32_t(group)) : i / group;
    return before * group_pitch + (i - before * group) * pitch;
  }
};

// Calls body with a value of the storage type of all these that are present, or with Any where they
// differ, so that mixtures do not multiply the code.
template <class Body, class... Others>
void with_storage_type_of(const Body& body, const Rows& first, const Others&... others) {
  const auto fits = [&](const Rows& rows) {
    return !rows.is_present() || rows.dtype == first.dtype;
  };
  if ((fits(others) && ...)) return with_storage_type(first.dtype, body);
  body(Any{});
}

}  // namespace dsx

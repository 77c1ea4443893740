// From a dtype known at run time to code that is compiled for it. A switch over dtypes has a case
// for each and no default, so that the compiler finds what a new one lacks.
#pragma once

#include "common/dtype.h"

namespace dsx {

// Calls body with a value of the storage type of this dtype, which is float32, bfloat16 or float16.
template <class Body>
void with_storage_type(Dtype dtype, const Body& body) {
  switch (dtype) {
    case Dtype::bfloat16: return body(BFloat16{});
    case Dtype::float16: return body(Half{});
    case Dtype::float32: return body(float{});
  }
}

}  // namespace dsx

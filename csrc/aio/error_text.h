// One sentence about a request that failed, with path, offset, length, cause and free space.
#pragma once

#include "aio/error.h"
#include "aio/request.h"

namespace dsx::aio {

Failure describe(const Request& request, int code);  // an errno
Failure describe_end_of_file(const Request& request);

}  // namespace dsx::aio

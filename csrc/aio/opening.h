// What is done for a request before its first piece: its file is opened, its cut planned, and the
// space reserved that a write will fill.
#pragma once

#include <optional>

#include "aio/error.h"
#include "aio/request.h"

namespace dsx::aio {

// Sets the request's `file` and `plan`; or returns why that cannot be. May wait for the file
// system.
std::optional<Failure> make_ready(Request& request);

}  // namespace dsx::aio

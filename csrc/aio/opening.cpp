// In this order: a plan needs the file's alignment, and what is reserved depends on the plan.
#include "aio/opening.h"

#include <algorithm>
#include <cerrno>
#include <memory>
#include <new>
#include <string>
#include <variant>

#include "aio/error_text.h"
#include "aio/page_buffer.h"

namespace dsx::aio {
namespace {

void take_file(Request& request) {
  Transfer& transfer = request.transfer;
  if (request.opens) {
    const Mode mode = transfer.direction == Direction::write ? Mode::write : Mode::read;
    request.file = File::open(std::get<std::string>(transfer.target), mode);
  } else {
    request.file = std::get<std::shared_ptr<File>>(transfer.target);
    transfer.target = request.file->path();  // a request that is done keeps no file open
  }
}

Plan plan_of(const Request& request) {
  const Transfer& transfer = request.transfer;
  const bool could_be_direct = transfer.bytes >= page_size();
  return make_plan(transfer.offset, reinterpret_cast<uintptr_t>(transfer.address), transfer.bytes,
                   could_be_direct ? request.file->alignment() : Alignment{});
}

// What lies within the file's length and has its blocks can be written side by side; what extends
// it, only one piece after the other. It also tells now whether the disk has the space.
void reserve(const Request& request) {
  const Transfer& transfer = request.transfer;
  const bool is_direct = request.plan.middle > 0;
  if (!is_direct && !transfer.truncate) return;
  const int64_t size = request.file->size();
  const int64_t end = transfer.offset + transfer.bytes;
  if (is_direct && end > size) {
    const int64_t from = std::max(size, transfer.offset);
    request.file->allocate(from, end - from);
  }
  if (transfer.truncate && size > end) request.file->truncate(end);
}

}  // namespace

std::optional<Failure> make_ready(Request& request) {
  try {
    take_file(request);
    request.plan = plan_of(request);
    if (request.transfer.direction == Direction::write) reserve(request);
    return std::nullopt;
  } catch (const IoError& error) {
    return describe(request, error.code());
  } catch (const std::bad_alloc&) {
    return describe(request, ENOMEM);
  }
}

}  // namespace dsx::aio

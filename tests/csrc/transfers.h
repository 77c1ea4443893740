// Requests to an engine in few words, and what tests expect of them.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "aio/backend_factory.h"
#include "aio/engine.h"
#include "expect.h"
#include "scratch.h"

// Where it does not matter which.
inline constexpr dsx::aio::Options usual{.block_size = 1 << 20, .queue_depth = 32, .threads = 1};

using Target = std::variant<std::string, std::shared_ptr<dsx::aio::File>>;

inline dsx::aio::BackendFactory factory(dsx::aio::BackendKind kind) {
  return [kind](int depth) { return dsx::aio::make_backend(kind, depth); };
}

inline dsx::aio::Transfer writing(Target target, const Memory& memory, int64_t offset = 0) {
  dsx::aio::Transfer transfer;
  transfer.direction = dsx::aio::Direction::write;
  transfer.target = std::move(target);
  transfer.address = memory.address();
  transfer.bytes = memory.bytes();
  transfer.offset = offset;
  return transfer;
}

inline dsx::aio::Transfer reading(Target target, const Memory& memory, int64_t offset = 0) {
  dsx::aio::Transfer transfer = writing(std::move(target), memory, offset);
  transfer.direction = dsx::aio::Direction::read;
  return transfer;
}

// Waits; the text of its failure, empty when every byte has moved.
inline std::string outcome(const dsx::aio::Request& request) {
  while (!request.wait_for(60)) {
  }
  const auto failure = request.failure();
  return failure ? failure->text : "";
}

inline void expect_success(const dsx::aio::Request& request) {
  const std::string text = outcome(request);
  expect(text.empty(), "%s", text.c_str());
}

// It failed with this errno, in a sentence that has all of these parts.
inline void expect_failure(const dsx::aio::Request& request, int code,
                           std::initializer_list<std::string> parts) {
  const std::string text = outcome(request);
  const auto failure = request.failure();
  expect(failure && failure->code == code, "errno is %d, expected %d: %s",
         failure ? failure->code : 0, code, text.c_str());
  for (const std::string& part : parts) {
    expect(text.find(part) != std::string::npos, "\"%s\" does not say \"%s\"", text.c_str(),
           part.c_str());
  }
}

// Whether calling it throws this, with a text that has this part.
template <class Error, class Call>
void expect_throws(Call&& call, const std::string& part) {
  try {
    call();
    expect(false, "nothing was thrown, expected: %s", part.c_str());
  } catch (const Error& error) {
    expect(std::string(error.what()).find(part) != std::string::npos, "\"%s\" does not say \"%s\"",
           error.what(), part.c_str());
  }
}

// What a test program needs to state expectations, and nothing more: returns finish() from main.
#pragma once

#include <cstdarg>
#include <cstdio>

inline long expectations = 0;
inline long failures = 0;

// Reports the first few that fail, in the words of the format.
[[gnu::format(printf, 2, 3)]] inline void expect(bool condition, const char* format, ...) {
  ++expectations;
  if (condition) return;
  if (++failures > 20) return;
  std::va_list arguments;
  va_start(arguments, format);
  std::printf("failed: ");
  std::vprintf(format, arguments);
  std::printf("\n");
  va_end(arguments);
}

// The exit code: 0 if something was expected and all of it was true.
inline int finish() {
  std::printf("%ld expectations, %ld failed\n", expectations, failures);
  return expectations > 0 && failures == 0 ? 0 : 1;
}

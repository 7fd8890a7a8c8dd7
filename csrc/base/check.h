// VMM_CHECK: a broken invariant of our own. It prints where, what and the
// values, and aborts: going on would hand out memory that someone else uses.
// What a caller can cause is an exception (errors.h) or a Status, never this.
#pragma once

#include <sstream>
#include <string>

namespace vmm::detail {
[[noreturn]] void check_failed(const char* file, int line, const char* condition, const std::string& values);
}  // namespace vmm::detail

// VMM_CHECK(a <= b, "mapped ", a, " limit ", b)
#define VMM_CHECK(condition, ...)                                                                           \
  do {                                                                                                      \
    if (__builtin_expect(!(condition), 0)) {                                                                \
      ::vmm::detail::check_failed(__FILE__, __LINE__, #condition, ::vmm::detail::concatenate(__VA_ARGS__)); \
    }                                                                                                       \
  } while (false)

namespace vmm::detail {
template <typename... Values>
std::string concatenate(const Values&... values) {
  std::ostringstream text;
  (text << ... << values);
  return text.str();
}
}  // namespace vmm::detail

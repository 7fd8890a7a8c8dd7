// VMM_CHECK: a broken invariant of our own. It prints where, what and the
// values, and aborts: going on would hand out memory that someone else uses.
// What a caller can cause is an exception (errors.h) or a Status, never this.
#pragma once

#include <string>
#include <type_traits>

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

// No iostream: where libstdc++ is linked statically into an extension, a
// stream of its own crashes, and a check must not.
inline void append(std::string& text, const std::string& value) { text += value; }
inline void append(std::string& text, const char* value) { text += value; }
template <typename Number, std::enable_if_t<std::is_arithmetic_v<Number>, int> = 0>
void append(std::string& text, Number value) {
  text += std::to_string(value);
}
inline void append(std::string& text, std::size_t value) { text += std::to_string(value); }  // what converts to it

template <typename... Values>
std::string concatenate(const Values&... values) {
  std::string text;
  (append(text, values), ...);
  return text;
}

}  // namespace vmm::detail

// vmm's failures in torch's words, for whoever called through torch. It knows
// no pool and no device.
//
// Texts are put together as strings, never by torch's c10::str() or its kin:
// those use iostreams, and where a compiler links its own static libstdc++ into
// the extension, beside the shared one that torch uses, writing a number to a
// stream crashes (the two disagree on the locale's facets).
#pragma once

#include <string>

namespace vmm {

// c10::Error with this text.
[[noreturn]] void throw_torch_error(const std::string& message);

// c10::Error in native's words for an address that is nobody's.
[[noreturn]] void throw_invalid_pointer(const void* block);

// What a caller who must not see an exception (a free, a destructor) does with
// one: says so on stderr, the first few times. `who` is the function.
void report_swallowed(const char* who, const char* what) noexcept;
// The same for the exception in flight.
void report_swallowed(const char* who) noexcept;

}  // namespace vmm

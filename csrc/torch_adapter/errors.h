// vmm's failures in torch's words, for whoever called through torch. It knows
// no pool and no device.
//
// Texts are put together as strings, never by torch's c10::str() or its kin:
// those use iostreams, and where a compiler links its own static libstdc++ into
// the extension, beside the shared one that torch uses, writing a number to a
// stream crashes (the two disagree on the locale's facets).
#pragma once

#include <cstddef>
#include <string>

namespace vmm {

// "CUDA" or "CPU", and whose device it is ("GPU 0", "the host").
struct DeviceWords {
  const char* backend;
  std::string device;
};

// Called in a catch block: throws the exception in flight as torch's own.
// vmm::OutOfMemoryError becomes c10::OutOfMemoryError (torch.OutOfMemoryError
// in Python) with the words that torch's native allocator begins with, since
// programs look for them; everything else of vmm's becomes a c10::Error.
[[noreturn]] void rethrow_as_torch(const DeviceWords& where, std::size_t bytes);

// c10::Error with this text.
[[noreturn]] void throw_torch_error(const std::string& message);

// torch's own refusal of requests that no device could ever meet.
inline constexpr std::size_t kExbibyte = std::size_t{1} << 60;
[[noreturn]] void throw_beyond_exbibyte(const DeviceWords& where);

// What a caller who must not see an exception (a free, a destructor) does with
// one: says so on stderr, the first few times. `who` is the function.
void report_swallowed(const char* who, const char* what) noexcept;
// The same for the exception in flight.
void report_swallowed(const char* who) noexcept;

}  // namespace vmm

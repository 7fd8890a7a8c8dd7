// Why a request found no memory, as a value and in words: who asked, which
// limit refused, who holds what under it and what would help. Plain values in,
// text out: it knows no pool and no lock.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "base/units.h"
#include "core/numbers/reclaim_report.h"

namespace vmm {

// Who held memory that counts under the limit that refused, in bytes.
struct Holder {
  std::string name;             // of the model; "VirtualMemoryManager": memory made by hand
  std::size_t allocated = 0;    // in use
  std::size_t idle = 0;         // mapped, unused, whole chunks
  std::size_t stranded = 0;     // mapped, unused, in chunks that are partly used
  std::size_t quarantined = 0;  // freed, and queued work may still use it
  std::size_t floor = 0;        // where it is why memory was not to be had; else 0
  std::size_t reserved = 0;     // what is left of it: not held, and nobody else's
  [[nodiscard]] std::size_t held() const { return allocated + idle + stranded + quarantined; }
};

struct Refusal {
  std::size_t requested = 0;       // bytes asked for
  std::size_t available = 0;       // bytes that could still have been had
  std::size_t limit = kUnlimited;  // bytes: the limit that refused, or what the device has
  std::string pool;                // name of the pool that asked
  std::vector<Holder> holders;     // who holds most first
  std::string advice;              // what would help
};

// What else is known of it, for the words.
struct RefusalCause {
  std::string limit_name;   // the limit that refused; empty: none did
  std::string driver_said;  // where the driver refused; else empty
  std::string limits;       // every limit on the way, in words
  // Bytes by which a limit would have to be higher: for what was asked, and for that in whole pages.
  struct Rise {
    std::string name;
    std::size_t for_bytes = 0;
    std::size_t for_pages = 0;
  };
  std::vector<Rise> rises;  // the one that refused, then those above that would refuse next
  bool no_addresses = false;
  bool takes_whole_pages = false;  // debug mode's guards do
  std::size_t capacity = 0;        // bytes of addresses of the pool that asked
  std::size_t device_total = 0;    // bytes; 0: not known
  std::size_t device_free = 0;
  std::size_t page = 1;     // bytes in whole multiples of which the pool that asked has memory
  std::size_t spill = 0;    // bytes that spill_limit is short of; 0: it, or spilling, would not help
  std::size_t outside = 0;  // bytes of the device that are held, and not by torch_vmm
};

// A request that nobody has been told of yet. The pool lives.
class Pool;
struct Refused {
  Pool* asker = nullptr;
  void* stream = nullptr;  // it asked for; nullptr: for none, too
  std::size_t bytes = 0;
  Refusal refusal;
  RefusalCause cause;
  std::optional<ReclaimDecision> decision{};  // of the ladder's, where it has not been noted
};

// Only what can help: no limit above what the device has, no more addresses for
// a request that is larger than the device.
std::string advice_for(const Refusal& refusal, const RefusalCause& cause);
// All of it: who asked and what refused; who holds what; what would help. A line
// each.
std::string text_of(const Refusal& refusal, const RefusalCause& cause);

}  // namespace vmm

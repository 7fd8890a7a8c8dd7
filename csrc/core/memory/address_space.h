// Pointer -> pool, by one table look-up: the whole 47-bit address space is the
// arena, cut into slots of 1 GiB; every pool reserves whole slots. It knows
// pools only as opaque owners, and no memory.
//
// 1 GiB slots make the table 2^17 entries (1 MiB, touched only where used), so
// no search and no lock stand between a free and its pool, however many
// devices and reservations there are, and a pool may be as large as it likes.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <memory>

#include "base/status.h"
#include "base/units.h"
#include "driver/driver.h"

namespace vmm {

class Pool;

class AddressSpace {
 public:
  static constexpr std::size_t kSlotBytes = kGiB;

  AddressSpace();

  // Reserves `size` bytes (a multiple of the granularity) in slots of its own
  // for `owner`. out_of_memory: the driver has no such stretch of addresses.
  Status reserve(Driver& driver, std::size_t size, Pool* owner, Address* out);
  // REQUIRES: what reserve() gave, with nothing mapped in it any more.
  Status unreserve(Driver& driver, Address base, std::size_t size);

  // The pool whose reservation holds `address`, or nullptr. O(1), no lock.
  [[nodiscard]] Pool* find(Address address) const {
    const std::size_t slot = address / kSlotBytes;
    return slot < kSlots ? (*slots_)[slot].load(std::memory_order_acquire) : nullptr;
  }

 private:
  static constexpr std::size_t kSlots = (std::size_t{1} << 47) / kSlotBytes;
  void set(Address base, std::size_t size, Pool* owner);

  std::unique_ptr<std::array<std::atomic<Pool*>, kSlots>> slots_;
};

}  // namespace vmm

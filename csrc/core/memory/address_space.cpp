#include "core/memory/address_space.h"

namespace vmm {

// Value-initialised on the heap: the kernel gives zero pages, and only the
// entries of slots in use are ever touched.
AddressSpace::AddressSpace() : slots_(new std::array<std::atomic<Pool*>, kSlots>()) {}

void AddressSpace::set(Address base, std::size_t size, Pool* owner) {
  for (std::size_t slot = base / kSlotBytes; slot * kSlotBytes < base + size; ++slot) {
    slots_->at(slot).store(owner, std::memory_order_release);
  }
}

Status AddressSpace::reserve(Driver& driver, std::size_t size, Pool* owner, Address* out) {
  // Aligned to a slot and rounded to whole slots, so no slot has two owners.
  const std::size_t rounded = align_up(size, kSlotBytes);
  Address base = 0;
  const Status status = driver.reserve(rounded, kSlotBytes, &base);
  if (!status.ok()) return status;
  if (base + rounded > kSlots * kSlotBytes) {
    driver.unreserve(base, rounded).ignore();
    return {StatusCode::out_of_memory, "reserve beyond the 47-bit address space"};
  }
  set(base, rounded, owner);
  *out = base;
  return {};
}

Status AddressSpace::unreserve(Driver& driver, Address base, std::size_t size) {
  const std::size_t rounded = align_up(size, kSlotBytes);
  set(base, rounded, nullptr);
  return driver.unreserve(base, rounded);
}

}  // namespace vmm

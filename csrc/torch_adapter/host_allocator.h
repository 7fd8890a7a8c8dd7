// torch's allocator of host memory, standing on the "cpu" device's pools. It
// holds no memory itself, and keeps the allocator that was there before for
// what it does not serve: forked children.
#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>

namespace vmm {

class HostAllocator final : public c10::Allocator {
 public:
  // Idempotent. Throws NotAvailableError.
  static void enable();
  static bool is_enabled();

  c10::DataPtr allocate(std::size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, std::size_t bytes) const override;

 private:
  HostAllocator() = default;
  static HostAllocator& instance();
};

}  // namespace vmm

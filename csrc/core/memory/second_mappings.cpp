#include "core/memory/second_mappings.h"

#include <iterator>

namespace vmm {

SecondMappings::Place::Place(SecondMappings& of) : of_(of) {
  Entries one;
  one.emplace(0, Entry{});
  node_ = one.extract(one.begin());
}

void SecondMappings::Place::enter(ByteRange addresses, SecondMapping* mapping) noexcept {
  node_.key() = addresses.offset;
  node_.mapped() = {addresses.size, mapping};
  base_ = addresses.offset;
  const MutexLock lock(of_.mutex_);
  of_.entries_.insert(std::move(node_));
}

void SecondMappings::Place::leave() noexcept {
  if (base_ == 0) return;
  const MutexLock lock(of_.mutex_);
  of_.entries_.erase(base_);
  base_ = 0;
}

SecondMapping* SecondMappings::at(Address address) const {
  const MutexLock lock(mutex_);
  const auto after = entries_.upper_bound(address);
  if (after == entries_.begin()) return nullptr;
  const auto& [base, entry] = *std::prev(after);
  return address - base < entry.size ? entry.mapping : nullptr;
}

Status SecondMappings::add_accessor(const Location& who) {
  const MutexLock lock(mutex_);
  for (const auto& [base, entry] : entries_) {
    if (const Status status = entry.mapping->add_accessor(who); !status.ok()) return status;
  }
  return {};
}

}  // namespace vmm

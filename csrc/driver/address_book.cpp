#include "driver/address_book.h"

#include <iterator>

namespace vmm {

const char* AddressBook::check_reserve(std::size_t size, std::size_t alignment) const {
  if (size == 0) return "reserve of size zero";
  if (!is_aligned(size, granularity_)) return "reserve of a size that is no multiple of the granularity";
  if (!is_power_of_two(alignment)) return "reserve with an alignment that is no power of two";
  if (alignment < granularity_) return "reserve with an alignment below the granularity";
  return nullptr;
}

const char* AddressBook::check_unreserve(Address address, std::size_t size) const {
  const auto found = reservations_.find(address);
  if (found == reservations_.end()) return "unreserve of an address that is no reservation";
  if (found->second != size) return "unreserve of a part of a reservation";
  const auto mapping = mappings_.lower_bound(address);
  if (mapping != mappings_.end() && mapping->first < address + size) return "unreserve with mappings inside";
  return nullptr;
}

const char* AddressBook::check_stretch(Address address, std::size_t size) const {
  if (size == 0) return "a stretch of size zero";
  if (!is_aligned(address, granularity_)) return "an address that is no multiple of the granularity";
  if (!is_aligned(size, granularity_)) return "a size that is no multiple of the granularity";
  if (sum_overflows(address, size)) return "a stretch beyond the address space";
  const auto after = reservations_.upper_bound(address);
  if (after == reservations_.begin()) return "a stretch outside every reservation";
  const auto& [begin, reserved] = *std::prev(after);
  if (address - begin >= reserved) return "a stretch outside every reservation";
  if (size > reserved - (address - begin)) return "a stretch beyond its reservation";
  return nullptr;
}

const char* AddressBook::check_map(Address address, std::size_t size) const {
  if (const char* const why = check_stretch(address, size)) return why;
  const auto after = mappings_.lower_bound(address);
  if (after != mappings_.end() && after->first < address + size) return "map over a mapping";
  if (after != mappings_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second.size > address) return "map over a mapping";
  }
  return nullptr;
}

const char* AddressBook::check_run(Address address, std::size_t size) const {
  if (const char* const why = check_stretch(address, size)) return why;
  const Address end = address + size;
  Address at = address;
  for (auto mapping = mappings_.find(address); at < end; ++mapping) {
    if (mapping == mappings_.end() || mapping->first != at) {
      return at == address ? "a stretch that does not begin with a mapping" : "a stretch with a gap between mappings";
    }
    if (mapping->second.size > end - at) return "a stretch that ends inside a mapping";
    at += mapping->second.size;
  }
  return nullptr;
}

AddressBook::Mappings::const_iterator AddressBook::mapping_at(Address address) const {
  const auto next = mappings_.upper_bound(address);
  if (next == mappings_.begin()) return mappings_.end();
  const auto before = std::prev(next);
  return address - before->first < before->second.size ? before : mappings_.end();
}

AddressBook::Mappings AddressBook::take_run(Address address, std::size_t size) {
  Mappings run;
  for (auto mapping = run_begin(address); mapping != mappings_.end() && mapping->first < address + size;) {
    run.insert(run.end(), mappings_.extract(mapping++));
  }
  return run;
}

std::size_t AddressBook::gaps_beside(Address address, std::size_t size) const {
  const auto& [begin, reserved] = *std::prev(reservations_.upper_bound(address));
  const auto above = mappings_.lower_bound(address + size);
  const bool ends_at_mapping = above != mappings_.end() && above->first == address + size;
  const auto within = mappings_.lower_bound(address);
  const bool begins_at_mapping =
      within != mappings_.begin() && std::prev(within)->first + std::prev(within)->second.size == address;
  return (address == begin || begins_at_mapping ? 0U : 1U) +
         (address + size == begin + reserved || ends_at_mapping ? 0U : 1U);
}

void AddressBook::set_access(Mapping* mapping, Location who, Access access) {
  const std::uint64_t bit = location_bit(who);
  mapping->readers = access == Access::none ? mapping->readers & ~bit : mapping->readers | bit;
  mapping->writers = access == Access::read_write ? mapping->writers | bit : mapping->writers & ~bit;
}

}  // namespace vmm

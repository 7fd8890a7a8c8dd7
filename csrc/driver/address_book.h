// Which reservations a driver has given out, and which whole mappings stand
// where in them. It owns the rules of driver.h about addresses, so that every
// driver refuses the same; it never knows the OS, CUDA, a chunk's content or a
// lock (its owner guards it).
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

#include "base/units.h"
#include "driver/driver.h"

namespace vmm {

struct Mapping {
  std::size_t size = 0;
  ChunkHandle chunk = 0;
  // One bit a location that may read / read and write; see location_bit().
  std::uint64_t readers = 0;
  std::uint64_t writers = 0;

  // The strongest access that any location has.
  [[nodiscard]] Access access() const {
    if (writers != 0) return Access::read_write;
    return readers != 0 ? Access::read : Access::none;
  }
};

class AddressBook {
 public:
  using Mappings = std::map<Address, Mapping>;

  explicit AddressBook(std::size_t granularity) : granularity_(granularity) {}

  // Each check answers nullptr, or a literal that says what is wrong.
  [[nodiscard]] const char* check_reserve(std::size_t size, std::size_t alignment) const;
  [[nodiscard]] const char* check_unreserve(Address address, std::size_t size) const;
  [[nodiscard]] const char* check_map(Address address, std::size_t size) const;
  // [address, address + size) is made of whole mappings without a gap.
  [[nodiscard]] const char* check_run(Address address, std::size_t size) const;

  void add_reservation(Address address, std::size_t size) { reservations_.emplace(address, size); }
  void drop_reservation(Address address) { reservations_.erase(address); }
  void add_mapping(Address address, const Mapping& mapping) { mappings_.emplace(address, mapping); }

  // REQUIRES for all four: check_run() passed. The run is [begin, end).
  [[nodiscard]] Mappings::iterator run_begin(Address address) { return mappings_.find(address); }
  [[nodiscard]] Mappings::iterator run_end(Address address, std::size_t size) {
    return mappings_.lower_bound(address + size);
  }
  void drop_run(Address address, std::size_t size) { mappings_.erase(run_begin(address), run_end(address, size)); }
  // Takes the run out, so that it can be put back as it was; allocates nothing.
  [[nodiscard]] Mappings take_run(Address address, std::size_t size);
  void put_back(Mappings&& run) { mappings_.merge(run); }

  [[nodiscard]] const Mappings& mappings() const { return mappings_; }
  // The one that `address` lies in, or the end of mappings().
  [[nodiscard]] Mappings::const_iterator mapping_at(Address address) const;
  [[nodiscard]] const std::map<Address, std::size_t>& reservations() const { return reservations_; }

  // Free stretches of a reservation that begin or end where [address, address + size)
  // ends or begins: 0, 1 or 2. REQUIRES: it lies in one reservation.
  [[nodiscard]] std::size_t gaps_beside(Address address, std::size_t size) const;

  // The bit of a location in Mapping. REQUIRES: device < kMaxDevices.
  static constexpr int kMaxDevices = 63;
  static std::uint64_t location_bit(Location who) {
    return std::uint64_t{1} << (who.kind == Location::Kind::host ? kMaxDevices : who.device);
  }
  static void set_access(Mapping* mapping, Location who, Access access);

 private:
  [[nodiscard]] const char* check_stretch(Address address, std::size_t size) const;

  const std::size_t granularity_;
  std::map<Address, std::size_t> reservations_;
  Mappings mappings_;
};

}  // namespace vmm

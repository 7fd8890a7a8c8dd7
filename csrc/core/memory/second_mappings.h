// Mappings of a device's memory beside those of the pools that own it: an alias's, a placed
// tensor's, and what reads as zero. Whoever has one is told of the streams that use it, and of
// who is let in later. They are few, so a lock and a tree do.
#pragma once

#include <cstddef>
#include <map>
#include <utility>

#include "base/status.h"
#include "base/sync.h"
#include "base/units.h"
#include "driver/driver.h"

namespace vmm {

class DeviceStreams;

class SecondMapping {
 public:
  virtual ~SecondMapping() = default;
  // As Pool::record_stream(), of all that is mapped.
  virtual void record_stream(Stream stream, DeviceStreams& device) = 0;
  // As Pool::add_accessor(). It may have been let in already.
  virtual Status add_accessor(const Location& who) = 0;
};

// Of one device.
class SecondMappings {
  struct Entry {
    std::size_t size = 0;
    SecondMapping* mapping = nullptr;
  };
  using Entries = std::map<Address, Entry>;

 public:
  // A place in it: made before there is anything to add, as memory may be short; and given up
  // before the mapping ends.
  class Place {
   public:
    explicit Place(SecondMappings& of);
    Place(Place&& other) noexcept
        : of_(other.of_), node_(std::move(other.node_)), base_(std::exchange(other.base_, 0)) {}
    Place(const Place&) = delete;
    Place& operator=(const Place&) = delete;
    Place& operator=(Place&&) = delete;
    ~Place() { leave(); }
    // From now on `mapping` is told. REQUIRES: no other one has these addresses.
    void enter(ByteRange addresses, SecondMapping* mapping) noexcept;
    void leave() noexcept;

   private:
    SecondMappings& of_;
    Entries::node_type node_;
    Address base_ = 0;  // of what is entered; 0: nothing is
  };

  // Who has `address`, or nullptr. It lives as long as the tensor that the caller has the
  // address from.
  [[nodiscard]] SecondMapping* at(Address address) const VMM_EXCLUDES(mutex_);
  // All let `who` in, as far as the first that cannot.
  Status add_accessor(const Location& who) VMM_EXCLUDES(mutex_);

 private:
  mutable Mutex mutex_;  // above those of the mappings, and of a device's registry
  Entries entries_ VMM_GUARDED_BY(mutex_);
};

}  // namespace vmm

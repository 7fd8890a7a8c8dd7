// Where what a pool holds goes while it sleeps.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace vmm {

class DeviceMemory;

struct Place {
  enum class Kind : std::uint8_t {
    discard,  // nowhere: the contents are gone for good
    host,     // pinned memory
    file,
    device,  // another device's memory
  };
  Kind kind = Kind::host;
  std::string path;                // of a file, or the folder for it
  DeviceMemory* device = nullptr;  // the other one; of the same driver
  bool is_poisoned = false;        // what is discarded comes back as kPoisonByte
  bool is_packed = false;          // in the host's memory: by a lossless code
  friend bool operator==(const Place&, const Place&) = default;
};

// The first that has room is taken.
using Places = std::vector<Place>;

}  // namespace vmm

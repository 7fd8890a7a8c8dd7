// The options of the allocator: one table of name, environment variable,
// default, unit and sentence. An unknown TORCH_VMM_* variable or a malformed
// value is an InvalidArgumentError that names the accepted form.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "base/units.h"

namespace vmm {

// What looks for memory errors: nothing, or pages without memory around each block
// that is watched, or patterns. Of so many requests of a thread one is watched.
struct DebugMode {
  enum class Kind : std::uint8_t { off, guard, canary };
  Kind kind = Kind::off;
  std::size_t one_in = 1;
  [[nodiscard]] bool is_on() const { return kind != Kind::off; }
};

inline constexpr std::size_t kMostCapacity = kMostAddresses / 2;  // of a pool, in bytes

struct Options {
  // Zero memory that changes its model before the new model sees it.
  bool scrub = true;
  // Bytes of unmapped chunks that the chunk store keeps rather than giving them
  // back to the driver, for each group. 256 MiB spare about 128 create/release
  // pairs of 31 us each for a cache that maps and unmaps pages all the time.
  std::size_t store_bytes = 256 * kMiB;
  // Virtual capacity of a pool that names none; 0: four times the device's
  // memory (address space is free; moving chunks needs room to move to), or the most.
  std::size_t default_capacity_bytes = 0;
  // Memory of the "cpu" device; 0: 80 % of what the process may use of the machine's.
  std::size_t host_bytes = 0;
  // Create chunks so that another process can import them, where the device
  // can. Costs nothing at creation on the GPUs measured; on the "cpu" device,
  // whose tensors torch shares by itself, it is off: a descriptor a chunk.
  bool exportable = true;
  // Looks for memory errors (core/debug).
  DebugMode debug;

  static Options from_environment();
};

struct OptionRow {
  const char* name;
  const char* variable;
  const char* sentence;
  std::variant<bool Options::*, std::size_t Options::*, DebugMode Options::*> member;
  const char* default_words = nullptr;  // what a member that is 0 stands for: it is set to no 0
  std::size_t most = kUnlimited;        // bytes that it is set to
  std::size_t least = 0;                // the same
  // What the member is in new Options, as one would set the variable to it, or these words.
  [[nodiscard]] std::string default_text() const;
  [[nodiscard]] const char* unit() const {
    static constexpr std::array kUnits = {"flag", "bytes", "mode"};
    return kUnits.at(member.index());
  }
};
const std::vector<OptionRow>& option_table();

// "2MiB", "1.5 GiB", "2MB", "4096": bytes. Throws InvalidArgumentError that
// shows the accepted form.
std::size_t parse_bytes(const std::string& text);

// "off", "guard", "canary", "guard,sample=1/100". Throws InvalidArgumentError that shows the
// accepted form.
DebugMode parse_debug_mode(const std::string& text);
// The same backwards; "off": none.
std::string to_string(const DebugMode& mode);

}  // namespace vmm

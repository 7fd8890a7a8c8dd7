// What programs wrote to their memory, by address, and whether it is still there. A kernel
// leaves stamps in the memory itself: whose it is, and which write. So whichever way memory moves,
// a lost write, a foreign one and a former owner's bytes show. It knows no stream and no chunk.
//
// Kernels touch memory when they are queued: that is what they would find when they run, as the
// order checker proves each two that conflict to run in the order in which they were queued.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

#include "base/units.h"

namespace vmm::testing {

class BlockContents {
 public:
  // Patterns of debug mode may stand where nobody has written.
  explicit BlockContents(bool with_patterns) : with_patterns_(with_patterns) {}

  // A kernel of `pool`'s wrote [address, address + size).
  void write(Address address, std::size_t size, std::uint64_t pool);
  // Nobody has written there any more: it has another holder, or none.
  void forget(Address address, std::size_t size);
  // All that `pool` wrote is thrown away: it is zero, or, unless `surely`, may be.
  void throw_away(std::uint64_t pool, bool surely);
  // What is wrong with what is there now, for `pool`, or "". REQUIRES: the memory can be read.
  [[nodiscard]] std::string first_wrong(Address address, std::size_t size, std::uint64_t pool) const;

 private:
  struct Written {
    Address end = 0;
    std::size_t grain = 0;    // the stamp stands at its multiples
    std::uint64_t stamp = 0;  // 0: nothing, so zeros
    bool may_be_zero = false;
  };
  using ByAddress = std::map<Address, Written>;
  ByAddress::iterator cut(Address at);
  [[nodiscard]] std::string wrong_word(Address at, std::uint64_t pool, const Written* written) const;

  const bool with_patterns_;
  std::uint64_t last_write_ = 0;
  ByAddress written_;  // by where it begins; without overlap
};

}  // namespace vmm::testing

// What a pool's latest look for idle chunks saw. Such a look walks, so none is made that would
// see nothing more.
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>

#include "base/units.h"
#include "core/memory/grant.h"
#include "core/streams/clock.h"

namespace vmm {

class IdleLook {
 public:
  // When: bytes that the pool had handed out and got back by then, and that were live: threads
  // keep what they free, which the pool learns when it asks them. While all are the same
  // nothing is idle that was not, but for what was exported then.
  struct Moment {
    std::size_t handed_out = 0;
    std::size_t freed = 0;
    std::size_t live = 0;
    friend bool operator==(const Moment&, const Moment&) = default;
  };

  IdleLook() = default;
  // One at `when`, for chunks that leave units of `unit` bytes (WantedChunks::unit).
  IdleLook(Moment when, std::size_t unit) : when_(when), unit_(unit) {}
  // It sees a chunk of so many bytes, and that chunks of so many can leave whole units.
  void see(std::size_t bytes) { least_ = std::min(least_, bytes); }
  void see_unit(std::size_t bytes) { least_unit_ = std::min(least_unit_, bytes); }

  // Whether none of `wanted` would be found at `now`, when the clock has passed `passed`. (All
  // that was in use by others than a stream is so by somebody.)
  [[nodiscard]] bool is_in_vain(const WantedChunks& wanted, Moment now, Epoch passed) const;

  // The latest one saw what `look` did; of the two at one moment the one for units knows more.
  void becomes(const IdleLook& look);
  // All of `wanted` that is idle was in use when the clock had passed `passed`.
  void note_in_use(const WantedChunks& wanted, Epoch passed);
  void forget() { when_.reset(); }

 private:
  std::optional<Moment> when_;  // none: nothing is known
  std::size_t unit_ = 0;
  std::size_t least_ = kUnlimited;  // bytes, of the smallest that was seen
  std::size_t least_unit_ = kUnlimited;
  struct InUse {
    std::size_t most = 0;  // bytes: all of at most so many
    std::size_t unit = 0;
    std::optional<Stream> but_by;  // by others than this one
    Epoch at = kLongAgo;
  };
  InUse units_in_use_;
  InUse any_in_use_;
};

}  // namespace vmm

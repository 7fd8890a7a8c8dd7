// Memory of one device for models of others that sleep on it: chunks at addresses of their
// own, mapped for the device that they come from. What a model leaves stays as it is, the
// chunk on a shelf, its mapping dormant, for the next that comes: to map 16 GiB each time and to
// give them back took 12 ms of a sleep and 19 of a wake, and to copy them over the link 44.
// Whoever needs the memory gets it as that of any shelf (ChunkStore::trim_under(), trim_all()).
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/status.h"
#include "base/sync.h"
#include "base/units.h"
#include "core/limits/budget.h"
#include "core/memory/chunk.h"
#include "core/memory/chunk_store.h"
#include "driver/driver.h"

namespace vmm {

class GuestMemory {
 public:
  // Of one place, and thus of its chunk: of this size, or of a smaller power of two for
  // what is left at the end, so that places serve again whoever comes.
  static constexpr std::size_t kMostBytes = 256 * kMiB;

  struct Place {
    std::size_t begin = 0;  // bytes of those before it that were taken with it
    Address address = 0;
    std::size_t size = 0;
    int guest = 0;           // the device that it is for
    Chunk* chunk = nullptr;  // of an idle place: it may be gone, but for its name
    bool is_mapped = false;
    bool is_open = false;  // the guest has access
  };
  using Places = std::vector<Place>;

  // `payer` is charged for the chunks; its shelf has those that nobody uses.
  GuestMemory(Driver& driver, ChunkStore& store, Budget& payer) : driver_(driver), store_(store), payer_(payer) {}
  GuestMemory(const GuestMemory&) = delete;
  GuestMemory& operator=(const GuestMemory&) = delete;
  // REQUIRES: every place has been put back.
  ~GuestMemory();

  // Places for `bytes`, in order, appended to `out`: all of them, or none and why. Throws
  // std::bad_alloc, and none are taken.
  Status take(int guest, std::size_t bytes, Places* out) VMM_EXCLUDES(mutex_);
  // The guest may read and write there from now on.
  Status open(Place& place);
  // They are idle again, and go where a limit above is exceeded. What the driver refuses to
  // unmap stays in `places`, which is false then: to be called again. It takes no memory.
  // REQUIRES: no queued work uses them.
  bool put_back(Places& places) noexcept VMM_EXCLUDES(mutex_);

  // What models that sleep here hold, and what is idle.
  [[nodiscard]] std::size_t used_bytes() const {
    const std::size_t idle = idle_bytes();
    const std::size_t all = payer_.used();  // by now perhaps less
    return all - std::min(idle, all);
  }
  [[nodiscard]] std::size_t idle_bytes() const { return store_.shelved_bytes(payer_); }
  // Gives what is idle back to the driver. Returns the bytes.
  std::size_t trim() { return store_.trim(payer_, 0); }

 private:
  bool take_idle(int guest, std::size_t size, bool with_chunk, Places* out) VMM_REQUIRES(mutex_);
  Status take_addresses(int guest, std::vector<std::size_t> sizes, Places* out) VMM_REQUIRES(mutex_);
  Status fill(Place& place) VMM_REQUIRES(mutex_);
  void put_idle(Place place) noexcept VMM_REQUIRES(mutex_);

  struct Run {
    Address address = 0;
    std::size_t size = 0;
  };
  Driver& driver_;
  ChunkStore& store_;
  Budget& payer_;
  std::atomic<std::int64_t> unmapped_{0};         // the dormant mappings' count of what went
  Mutex mutex_;                                   // above the store's
  std::vector<Run> runs_ VMM_GUARDED_BY(mutex_);  // of addresses: as many as were in use at once
  Places idle_ VMM_GUARDED_BY(mutex_);            // has room for all that are taken
  std::size_t taken_ VMM_GUARDED_BY(mutex_) = 0;
};

}  // namespace vmm

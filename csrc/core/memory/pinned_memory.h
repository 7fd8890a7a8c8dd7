// Plain host memory, pinned, in slabs of one size, for what sleeps: what one model has
// done with serves the next. It knows no model, and pins nothing ahead of need.
//
// Pinning is the slow part: 16 GiB take 0.36 s beside 0.46 for the first touch of their
// pages by all cores, and copying them 0.31. So what is unused stays, until somebody asks.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "base/host_pages.h"
#include "base/sync.h"
#include "base/units.h"
#include "driver/driver.h"

namespace vmm {

class PinnedMemory {
 public:
  // Copies in pieces of 64 MiB run at 54.8 GB/s, of 16 MiB at 54.4, of 2 MiB at 51.
  static constexpr std::size_t kSlabBytes = 32 * kMiB;

  // One slab of pages that somebody else reserved, which are the kernel's again when it ends.
  class Slab {
   public:
    Slab(Driver& driver, std::byte* begin) : driver_(driver), begin_(begin) {}
    Slab(const Slab&) = delete;
    Slab& operator=(const Slab&) = delete;
    ~Slab();  // REQUIRES: no copy of it is under way
    // Gives [at, at + size) of it pages. Others may touch the rest meanwhile.
    void touch(std::size_t at, std::size_t size);
    // REQUIRES: all of it was touched, or the driver would, by one thread.
    void pin();
    // It was pinned, or that was tried.
    [[nodiscard]] bool is_ready() const { return is_ready_; }
    [[nodiscard]] Address address() const { return reinterpret_cast<Address>(begin_); }
    [[nodiscard]] std::byte* begin() const { return begin_; }
    [[nodiscard]] bool is_pinned() const { return is_pinned_; }

   private:
    Driver& driver_;
    std::byte* const begin_;
    bool is_ready_ = false;
    bool is_pinned_ = false;  // else copies are only slower, and the device packs nothing into it
  };
  using SlabPtr = std::unique_ptr<Slab>;

  explicit PinnedMemory(Driver& driver) : driver_(driver) {}
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;
  // REQUIRES: all that was taken is back.
  ~PinnedMemory() = default;

  // Room for `count` slabs under the limit, all or none: unused ones, and behind them null
  // pointers for those that are yet to be made, by make(). False where that would be above the
  // limit.
  bool take(std::size_t count, std::vector<SlabPtr>* slabs) VMM_EXCLUDES(mutex_);
  // A slab without pages. REQUIRES: taken, as a null pointer. Throws OutOfMemoryError where the
  // process has no addresses left for it, std::bad_alloc.
  SlabPtr make() VMM_EXCLUDES(mutex_);
  // Pins a slab, all of which was touched. Takes milliseconds.
  void pin(Slab& slab) VMM_EXCLUDES(pinning_);
  // What take() gave is unused from now on; null pointers are forgone, and slabs that are not
  // ready end.
  void put_back(std::vector<SlabPtr> slabs) noexcept VMM_EXCLUDES(mutex_);

  // Bytes at most, used or not; kUnlimited: as many as there are. What is unused above it
  // goes at once, what is used when it is put back. Returns the bytes that went.
  std::size_t set_limit(std::size_t bytes) VMM_EXCLUDES(mutex_);
  [[nodiscard]] std::size_t limit() const VMM_EXCLUDES(mutex_);
  // Keeps nothing that is unused any more: what is used ends when it is put back.
  void close() VMM_EXCLUDES(mutex_);
  // Unpins what is unused. Returns its bytes.
  std::size_t release_unused() VMM_EXCLUDES(mutex_);
  [[nodiscard]] std::size_t used_bytes() const VMM_EXCLUDES(mutex_);
  [[nodiscard]] std::size_t unused_bytes() const VMM_EXCLUDES(mutex_);

 private:
  // Addresses are reserved so many at a time, or half of that, and so on, where the process may
  // have no more: each change of the process's mappings stops all who touch or pin pages.
  static constexpr std::size_t kRegionBytes = kGiB;

  std::byte* take_place() VMM_EXCLUDES(mutex_);
  void reserve_region() VMM_REQUIRES(mutex_);
  std::vector<SlabPtr> take_excess(std::size_t most) VMM_REQUIRES(mutex_);
  void end(std::vector<SlabPtr> slabs) noexcept VMM_EXCLUDES(mutex_);

  Driver& driver_;
  Mutex pinning_;        // a leaf: the driver pins one at a time, and others touch meanwhile
  mutable Mutex mutex_;  // a leaf
  std::vector<std::unique_ptr<ZeroPages>> regions_ VMM_GUARDED_BY(mutex_);
  std::size_t reserved_ VMM_GUARDED_BY(mutex_) = 0;        // slabs that fit into these
  std::vector<std::byte*> places_ VMM_GUARDED_BY(mutex_);  // of these, where no slab is
  std::size_t limit_ VMM_GUARDED_BY(mutex_) = kUnlimited;
  bool is_closed_ VMM_GUARDED_BY(mutex_) = false;
  std::size_t used_ VMM_GUARDED_BY(mutex_) = 0;  // slabs
  std::vector<SlabPtr> unused_ VMM_GUARDED_BY(mutex_);
};

}  // namespace vmm

// What sleeping pools hold, elsewhere: bytes by their offset in it. Whoever saves knows
// what stands where. Parts of a model that share one may be moved at once, by several threads.
#pragma once

#include <cstddef>
#include <string>

#include "base/units.h"
#include "core/streams/stream_point.h"

namespace vmm {

// A stretch of memory that is to be saved.
struct Content {
  Address address = 0;
  std::size_t size = 0;
};

class Backup {
 public:
  Backup() = default;
  Backup(const Backup&) = delete;
  Backup& operator=(const Backup&) = delete;
  // REQUIRES: no copy of it is under way.
  virtual ~Backup() = default;

  // Copies [from, from + size) to [at, at + size), on the stream `by`: done once its work
  // is. By rising `at`, without overlap. All three throw what says why not:
  // VmmError, DriverError, std::bad_alloc; what was saved before is still there.
  virtual void save(std::size_t at, Address from, std::size_t size, const StreamUse& by) = 0;
  // No more is saved: what was is safe. Called with no copies under way.
  virtual void finish() = 0;
  // Copies [at, at + size) to [to, to + size), on the stream `by`: done as above.
  virtual void load(std::size_t at, Address to, std::size_t size, const StreamUse& by) = 0;
  // No more is loaded for a while: what it holds for that, it gives back.
  virtual void rest() noexcept {}
  // Copies [at, at + size) to plain memory.
  virtual void read(std::size_t at, std::byte* to, std::size_t size) = 0;
  // So much of it is moved at once, in bytes: by then the bus is at its full rate.
  static constexpr std::size_t kPieceBytes = 64 * kMiB;
  [[nodiscard]] virtual std::size_t piece_bytes() const { return kPieceBytes; }
  // So many pieces are on their way there at once, at most: while the chunks of one are
  // unmapped, the bus works on the next.
  static constexpr std::size_t kMostUnderWay = 2;
  [[nodiscard]] virtual std::size_t most_under_way() const { return kMostUnderWay; }
  // Whether the driver maps memory beside copies out of it about as fast as otherwise.
  [[nodiscard]] virtual bool is_mapped_beside_copies() const { return false; }
  // Whether it may stay once all has been loaded, so that what nobody has written to need not
  // be saved again.
  [[nodiscard]] virtual bool may_be_kept() const { return false; }
  // Nothing of it is to be found once the process has ended; it can be read until then.
  virtual void forget_name() noexcept {}
  // In words for messages and reports: "host", "host, packed", "cuda:1", a path.
  [[nodiscard]] virtual std::string place() const = 0;
};

}  // namespace vmm

// Who used which physical bytes, and through which address: chunks cut into
// pieces of equal history, mappings with the uses that went through them. It
// knows no stream but by its lane's number, and judges nothing.
//
// A chunk mapped at two addresses is the same bytes at both. Of the uses of one
// lane only the newest counts, since a lane's work is done in order; so a piece
// holds one entry a lane, and pieces are split where a use begins or ends.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "driver/driver.h"
#include "support/vector_clock.h"

namespace vmm::testing {

inline constexpr std::size_t kGranule = 512;  // bytes; blocks and uses are rounded up to it

// Numbers of one lane's newest uses of some bytes.
struct LaneUses {
  Lane lane = 0;
  Seq any = 0;
  Seq write = 0;
  Seq replay = 0;   // by a graph's launch
  Seq binding = 0;  // whoever comes next comes after it, the former holder's own stream too
};

class UseSet {
 public:
  void note(Lane lane, Seq seq, bool is_write, bool is_replay);
  void join(const UseSet& other);
  // The lane's uses bind everyone; all uses do; the graphs' do.
  void bind(Lane lane);
  void bind_all();
  void bind_replays();
  // Forgets what is done and known to be.
  void forget(const VectorClock& known);
  void clear() { uses_.clear(); }
  [[nodiscard]] bool empty() const { return uses_.empty(); }
  [[nodiscard]] const std::vector<LaneUses>& lanes() const { return uses_; }

 private:
  LaneUses& of(Lane lane);
  std::vector<LaneUses> uses_;
};

// To whom memory is handed out. Native memory belongs to a stream for ever; here
// to a stream of a pool.
inline constexpr std::uint64_t kAllocator = ~std::uint64_t{0};
struct Owner {
  std::uint64_t pool = 0;  // a number of the test's; 0: nobody; kAllocator: filled, not handed out yet
  int device = 0;          // of the stream
  Stream stream = nullptr;
  friend bool operator==(const Owner& a, const Owner& b) {
    return a.pool == b.pool && a.device == b.device && a.stream == b.stream;
  }
};

// A stretch of a chunk's bytes with one history.
struct Piece {
  Owner owner;              // the holder, or the last one
  std::uint64_t block = 0;  // the block that holds it now; 0: none
  UseSet uses;              // since it was last handed out
  UseSet former;            // before that
  UseSet moved;             // of these, the allocator's own copies and fills
};

struct ChunkBytes {
  std::size_t size = 0;
  bool released = false;
  std::size_t mappings = 0;
  std::map<std::size_t, Piece> pieces;  // by offset; they tile the chunk
};

struct Mapping {
  std::size_t size = 0;
  ChunkHandle chunk = 0;
  std::map<int, Access> access;  // by device
  UseSet uses;                   // through this address
  std::uint64_t pool = 0;        // to which something of it was handed out here
};

// A stretch of addresses over one piece.
struct Stretch {
  Address address = 0;
  std::size_t size = 0;
  ChunkHandle chunk = 0;
  std::size_t offset = 0;  // in the chunk
};

// "[0x7f.., 512 bytes]", for messages; of a stretch with its chunk.
std::string bytes_text(Address address, std::size_t size);
std::string bytes_text(const Stretch& stretch);

class MemoryUses {
 public:
  using Mappings = std::map<Address, Mapping>;

  void create(ChunkHandle chunk, std::size_t size);
  void release(ChunkHandle chunk);
  void map(Address address, std::size_t size, ChunkHandle chunk);
  void unmap(Address address, std::size_t size);
  void set_access(Address address, std::size_t size, int device, Access access);

  // Every mapping that meets [address, address + size), by address.
  void each_mapping(Address address, std::size_t size, const std::function<void(Address, Mapping&)>& visit);
  // All of it is mapped, and the device may use it so.
  [[nodiscard]] bool is_accessible(Address address, std::size_t size, int device, Access access) const;
  // Every piece under [address, address + size), cut to it. Addresses without a
  // mapping are skipped.
  void each_piece(Address address, std::size_t size, const std::function<void(const Stretch&, Piece&)>& visit);
  // Every piece of every chunk.
  void each_piece(const std::function<void(Piece&)>& visit);
  // Drops what is done and known to be, and joins pieces that it set apart.
  void tidy(const VectorClock& known);

 private:
  static std::map<std::size_t, Piece>::iterator split(ChunkBytes& chunk, std::size_t offset);
  void drop_if_gone(ChunkHandle chunk);

  std::map<ChunkHandle, ChunkBytes> chunks_;
  Mappings mappings_;
};

}  // namespace vmm::testing

#include "core/blocks/block_space.h"

#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <bit>
#include <new>
#include <vector>

#include "base/check.h"
#include "base/host_pages.h"
#include "base/sync.h"
#include "base/units.h"

namespace vmm {

namespace {

constexpr std::size_t kMostBytes = BlockSpace::kUnit << 32U;  // what four bytes reach: 32 GiB
constexpr std::size_t kLeastBytes = 64 * kMiB;                // a million blocks
constexpr std::size_t kShareOfLimit = 64;
constexpr std::size_t kMostPiece = kMiB;

// Never destroyed: pools outlive everything.
struct Reserved {
  Mutex mutex;
  std::byte* end VMM_GUARDED_BY(mutex) = nullptr;
  std::byte* next VMM_GUARDED_BY(mutex) = nullptr;  // behind all that was ever taken
  // Of each power of two: how many there are, and those that were given back.
  struct Pieces {
    std::size_t count = 0;
    std::vector<void*> given_back;
  };
  std::array<Pieces, 64> pieces VMM_GUARDED_BY(mutex);
};
Reserved& reserved() {
  static auto* const kReserved = new Reserved;
  return *kReserved;
}

// Where the process may not have that many addresses (ulimit -v), a small share of those
// that it may: pools want them too.
std::size_t bytes_to_reserve() {
  rlimit addresses{};
  if (::getrlimit(RLIMIT_AS, &addresses) != 0 || addresses.rlim_cur == RLIM_INFINITY) return kMostBytes;
  return std::clamp(align_down(addresses.rlim_cur / kShareOfLimit, kMostPiece), kLeastBytes, kMostBytes);
}

}  // namespace

void* BlockSpace::take(std::size_t bytes) {
  VMM_CHECK(std::has_single_bit(bytes) && bytes <= kMostPiece, "a piece of ", bytes, " bytes");
  Reserved& all = reserved();
  const MutexLock lock(all.mutex);
  auto& [count, given_back] = all.pieces.at(static_cast<std::size_t>(std::countr_zero(bytes)));
  if (!given_back.empty()) {
    void* const piece = given_back.back();
    given_back.pop_back();
    return piece;
  }
  // give() never has to ask for memory.
  if (given_back.capacity() == count) given_back.reserve(2 * count + 1);
  if (begin_ == nullptr) {
    const std::size_t reserved_bytes = bytes_to_reserve();
    begin_ = static_cast<std::byte*>(reserve_pages(reserved_bytes, kMostPiece));
    all.next = begin_ + kMostPiece;  // no block at the start
    all.end = begin_ + reserved_bytes;
  }
  auto* const piece = reinterpret_cast<std::byte*>(align_up(reinterpret_cast<std::uintptr_t>(all.next), bytes));
  if (piece + bytes > all.end) throw std::bad_alloc();
  commit_pages(piece, bytes);
  all.next = piece + bytes;
  ++count;
  return piece;
}

void BlockSpace::give(void* piece, std::size_t bytes) {
  discard(piece, bytes);
  Reserved& all = reserved();
  const MutexLock lock(all.mutex);
  all.pieces.at(static_cast<std::size_t>(std::countr_zero(bytes))).given_back.push_back(piece);
}

}  // namespace vmm

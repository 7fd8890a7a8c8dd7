// DeviceMemory: the way of a request that the thread's cache (device_memory.h) has nothing for.
// The pool itself first; then what is only held up is waited for; then the ladder.
#include "base/errors.h"
#include "core/device/device_memory.h"

namespace vmm {

Address DeviceMemory::allocate_anew(Pool& pool, std::size_t bytes, Stream stream) {
  if (const unsigned beside = beside_.load(std::memory_order_relaxed); beside != 0) [[unlikely]] {
    if ((beside & kDebugMode) != 0) return allocate_in_debug_mode(pool, bytes, stream);
    tend();
    if (const Address kept = caches_.take(pool, bytes, stream); kept != 0) return kept;
  }
  // As meet() does, but no closure is made where the pool can by itself: 40
  // instructions of 1540.
  Shortage shortage;
  if (const Address address = pool.try_allocate(bytes, stream, nullptr, &shortage)) return address;
  return go_on(
      pool, bytes, stream,
      [&](Grant* grant, Shortage* lacks) { return pool.try_allocate(bytes, stream, grant, lacks); }, shortage);
}

Address DeviceMemory::allocate_at(Pool& pool, Address address, std::size_t bytes, Stream stream) {
  settle_watched(pool);
  return meet(pool, bytes, std::nullopt, [&](Grant* grant, Shortage* shortage) {
    return pool.try_allocate_at(address, bytes, stream, grant, shortage);
  });
}

Address DeviceMemory::allocate_pages(Pool& pool, std::size_t offset, std::size_t size, Stream stream,
                                     std::optional<Refused>* refused, Ladder::Beside beside) {
  settle_watched(pool);
  const auto attempt = [&](Grant* grant, Shortage* shortage) {
    return pool.try_allocate_pages(offset, size, stream, grant, shortage);
  };
  return meet(pool, size, std::nullopt, attempt, refused, beside);
}

Address DeviceMemory::allocate_first(Pool& pool, std::size_t size, Stream stream) {
  return meet(pool, size, std::nullopt,
              [&](Grant* grant, Shortage* shortage) { return pool.try_allocate_first(size, stream, grant, shortage); });
}

void DeviceMemory::collect_to_wake(Pool& pool, const std::vector<MovedChunk>& places, Ladder::Beside beside) {
  std::size_t bytes = 0;
  for (const MovedChunk& each : places) bytes += each.place.size;
  if (bytes == 0) return;
  tend_if_any_wait();
  const auto attempt = [&](Grant* grant, Shortage* shortage) { return pool.try_collect(places, grant, shortage); };
  Shortage shortage;
  if (attempt(nullptr, &shortage) == 0) go_on(pool, bytes, std::nullopt, attempt, shortage, beside);
}

Address DeviceMemory::meet(Pool& pool, std::size_t bytes, std::optional<Stream> stream, const Attempt& attempt,
                           std::optional<Refused>* refused, Ladder::Beside beside) {
  tend_if_any_wait();
  Shortage shortage;
  if (const Address address = attempt(nullptr, &shortage)) return address;
  return go_on(pool, bytes, stream, attempt, shortage, beside, refused);
}

// After an attempt in vain: waits for what is only held up, then climbs.
Address DeviceMemory::go_on(Pool& pool, std::size_t bytes, std::optional<Stream> stream, const Attempt& attempt,
                            Shortage shortage, Ladder::Beside beside, std::optional<Refused>* refused) {
  std::optional<ReclaimDecision> untold;
  Ladder::Climb climb{
      pool, bytes, stream, attempt, shortage, ladder_.climbs(), beside, refused == nullptr ? nullptr : &untold};
  const auto await_held_up = [&] {
    while (climb.found == 0 && !climb.shortage.is_sealed && climb.shortage.wait_for != kLongAgo) {
      wait_for(climb.shortage.wait_for);
      climb.try_again(nullptr);
    }
    return climb.found != 0;
  };
  if (await_held_up()) return climb.found;
  if (climb.shortage.is_margin && (ladder_.keep_margin(climb) != 0 || await_held_up())) return climb.found;
  if (!climb.shortage.is_sealed) {
    if (const Address address = ladder_.reach(climb)) return address;
  }
  if (climb.shortage.is_sealed) return allocate_in_another_space(pool, bytes, *stream);
  if (refused == nullptr) tell(refusal_of(climb));
  refused->emplace(refusal_of(climb)).decision = std::move(untold);
  return 0;
}

// A tag's space that takes no requests, as some of its memory is read-only.
Address DeviceMemory::allocate_in_another_space(Pool& sealed, std::size_t bytes, Stream stream) {
  const std::shared_ptr<Pool> space = tagged(sealed.shared_model(), sealed.tag());
  return allocate(*space, bytes, stream);
}

bool DeviceMemory::could_hold(const Budget& payer, std::size_t bytes) const {
  return bytes <= capabilities_.total_memory && payer.could_hold(bytes);
}

void DeviceMemory::wait_for(Epoch epoch) {
  throw_if_failed(clock_.wait(epoch), "waiting for queued work that may use the memory");
}

}  // namespace vmm

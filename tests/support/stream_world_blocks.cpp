// StreamWorld: blocks, and explicit pages.
#include <algorithm>

#include "base/errors.h"
#include "support/stream_world.h"

namespace vmm::testing {

namespace {
constexpr std::size_t kMostLive = 120;
constexpr std::size_t kMostPages = 16;
}  // namespace

void StreamWorld::adopt(Live live, const std::shared_ptr<Pool>& home, std::size_t stream) {
  note_met(stream);
  live.number = ++last_block_;
  live.home = home;
  live.home_number = number_of(home);
  live.owner = stream;
  if (live.pool == kPartOfPlain) {
    live.region = part_region_;
  } else if (home->is_part() && !(home->region() == RegionId{})) {
    live.region = region_of(home->region());
    auto& parts = live.region->parts;
    if (std::find(parts.begin(), parts.end(), live.home_number) == parts.end()) {
      parts.push_back(live.home_number);
      if (live.region->graphs != 0) driver_.pin(live.home_number);
    }
  }
  on_thread_of(stream, [&] {
    const auto hand_out = live.pages   ? &OrderChecker::hand_out_pages
                          : live.again ? &OrderChecker::hand_out_again
                                       : &OrderChecker::hand_out;
    (driver_.*hand_out)(live.address, live.size, ref(stream), live.home_number);
  });
  live.born = debts_[{slot(stream).device, slot(stream).handle}];
  if (may_work(stream)) {
    live.born.join(point(stream));
  } else if (const CaptureId capture = driver_.capture_of(ref(stream)); capture != 0) {
    // What the stream had queued before comes before the graph, and before any other user.
    for (const Graph& graph : graphs_) {
      if (graph.capture == capture) live.born.join(graph.born);
    }
  }
  live_.push_back(std::move(live));
}

void StreamWorld::allocate(std::size_t pool, std::size_t bytes, std::size_t stream) {
  if (live_.size() >= kMostLive || !is_alive(stream) || slot(stream).device != pools_[pool]->device()) return;
  Live live;
  live.size = bytes = std::max<std::size_t>(bytes, 1);
  live.pool = pool;
  std::shared_ptr<Pool> home = pools_[pool];
  on_thread_of(stream, [&] {
    DeviceMemory& memory = memory_of(home->device());
    const bool is_model = pool < kPartOfPlain || pool == kTagOfFirst;
    try {
      if (is_model && private_pools_->any_route()) {
        if (auto part = private_pools_->route(home, slot(stream).handle); part != nullptr) home = part;
      }
      live.address = memory.allocate(*home, bytes, slot(stream).handle);
      home = memory.pool_at(live.address);  // a private pool's, where that lends
    } catch (const OutOfMemoryError&) {
    } catch (const VmmError&) {
      // A failing driver call.
    }
  });
  if (live.address != 0) adopt(std::move(live), home, stream);
}

void StreamWorld::allocate_at(std::size_t pool, std::size_t bytes, std::size_t stream, std::uint64_t where) {
  if (live_.size() >= kMostLive || !is_alive(stream) || slot(stream).device != pools_[pool]->device()) return;
  Live live;
  live.size = std::max<std::size_t>(bytes, 1);
  live.pool = pool;
  const Address at = pools_[pool]->base() + where * kMiB % pools_[pool]->capacity();
  on_thread_of(stream, [&] {
    try {
      live.address = memory_of(pools_[pool]->device()).allocate_at(*pools_[pool], at, live.size, slot(stream).handle);
    } catch (const VmmError&) {
      // Taken, beyond the end, or no memory.
    }
  });
  if (live.address != 0) adopt(std::move(live), pools_[pool], stream);
}

void StreamWorld::pages(std::size_t pool, std::size_t first, std::size_t count, std::size_t stream) {
  if (pool == kPartOfPlain || pool == kTagOfFirst || !is_alive(stream) || slot(stream).device != pools_[pool]->device())
    return;
  const std::size_t page = pools_[pool]->page_size();
  Live live;
  live.size = (1 + count % kMostPages) * page;
  live.pool = pool;
  live.pages = true;
  on_thread_of(stream, [&] {
    try {
      live.address =
          memory_of(pools_[pool]->device())
              .allocate_pages(*pools_[pool], first % std::min<std::size_t>(32, pools_[pool]->capacity() / page) * page,
                              live.size, slot(stream).handle);
    } catch (const VmmError&) {
      // Taken, or no memory.
    }
  });
  if (live.address != 0) adopt(std::move(live), pools_[pool], stream);
}

void StreamWorld::first_pages(std::size_t pool, std::size_t count, std::size_t stream) {
  if (pool == kPartOfPlain || pool == kTagOfFirst || !is_alive(stream) || slot(stream).device != pools_[pool]->device())
    return;
  Live live;
  live.size = (1 + count % kMostPages) * pools_[pool]->page_size();
  live.pool = pool;
  live.pages = true;
  on_thread_of(stream, [&] {
    try {
      live.address = memory_of(pools_[pool]->device()).allocate_first(*pools_[pool], live.size, slot(stream).handle);
    } catch (const VmmError&) {
      // No memory.
    }
  });
  if (live.address != 0) adopt(std::move(live), pools_[pool], stream);
}

// A block is freed: what still uses it, unrecorded, is its owner's debt.
void StreamWorld::owe(const Live& live, bool by_other_thread) {
  VectorClock& debt = debts_[{slot(live.owner).device, slot(live.owner).handle}];
  for (const auto& [who, until] : live.users) {
    const auto kind = slot(who.first).kind;
    // A per-thread stream's name means the one of the thread that frees.
    const bool is_of_freeing_thread =
        kind != (by_other_thread ? StreamSlot::Kind::per_thread : StreamSlot::Kind::of_other_thread);
    const bool recorded = std::find(live.recorded.begin(), live.recorded.end(), who) != live.recorded.end();
    if (!recorded || !is_of_freeing_thread) debt.join(until);
  }
}

void StreamWorld::hold(std::size_t index) {
  Live& live = live_[index];
  const auto home = live.home.lock();
  if (!live.pages || live.held || home == nullptr || home->is_asleep()) return;
  home->hold_pages(live.address - home->base(), live.size);
  live.held = true;
}

// What its pool left when it was closed by force ends here.
void StreamWorld::unhold(std::size_t index) {
  if (!live_[index].held) return;
  live_[index].held = false;
  const Live live = live_[index];
  const auto home = live.home.lock();
  if (home->is_closed()) {
    owe(live, false);
    live_.erase(live_.begin() + static_cast<std::ptrdiff_t>(index));
    driver_.take_back_pages(live.address, live.size);
  }
  memory_of(home->device()).unhold_pages(*home, live.address - home->base(), live.size);
}

void StreamWorld::free_block(std::size_t index, bool by_other_thread, std::size_t page_count) {
  if (live_[index].held) {
    const std::uint64_t number = live_[index].number;
    unhold(index);
    if (index >= live_.size() || live_[index].number != number) return;
  }
  const Live live = live_[index];
  owe(live, by_other_thread);
  const auto home = live.home.lock();
  const std::size_t part = home == nullptr ? 0 : page_count * home->page_size();
  if (live.pages && part != 0 && part < live.size) {
    live_[index].address += part;
    live_[index].size -= part;
    live_[index].number = ++last_block_;  // no graph may count on it any more
  } else {
    live_.erase(live_.begin() + static_cast<std::ptrdiff_t>(index));
  }
  const auto give_back = [&] {
    if (!live.pages) {
      driver_.take_back(live.address);
      DeviceMemory::free(space_, live.address);
      return;
    }
    const std::size_t size = part != 0 && part < live.size ? part : live.size;
    driver_.take_back_pages(live.address, size);
    memory_of(home->device()).deallocate_pages(*home, live.address - home->base(), size);
  };
  if (by_other_thread) {
    other_thread_.run(give_back);
  } else {
    give_back();
  }
}

void StreamWorld::use_block(std::size_t index, std::size_t stream, std::uint64_t flags) {
  Live& live = live_[index];
  if (!is_alive(stream) || (slot(stream).device != slot(live.owner).device && !peers_)) return;
  if (driver_.is_asleep(live.home_number)) return;
  const bool writes = (flags & kUseWrites) != 0;
  const Use use = writes ? Use::write : Use::read;
  const std::size_t bytes = (flags & kUseIsSmall) != 0 ? std::min(live.size, kGranule) : live.size;
  if (!may_work(stream)) {
    const CaptureId capture = driver_.capture_of(ref(stream));
    if (capture == 0) return;
    driver_.use(ref(stream), live.address, bytes, use);
    return note_captured(capture, live);
  }
  if (!is_coverable(stream)) {
    if (live.pages) return;
    record_stream(index, stream);
  }
  VectorClock before = live.born;
  before.join(live.writes);
  if (writes) before.join(live.reads);
  if (live.region != nullptr) before.join(live.region->turns);
  wait(stream, before);
  on_thread_of(stream, [&] { driver_.use(ref(stream), live.address, bytes, use, (flags & kUseIsLong) != 0); });
  const VectorClock after = point(stream);
  (writes ? live.writes : live.reads).join(after);
  live.users.emplace_back(user(stream), after);
  if (live.region != nullptr) live.region->turns.join(after);
  if (live.region == part_region_ && part_is_pinned_ && part_work_.nodes.size() < 64) {
    part_work_.nodes.push_back({live.address, bytes, use, live.home_number});
  }
}

void StreamWorld::record_stream(std::size_t index, std::size_t stream) {
  Live& live = live_[index];
  const auto home = live.home.lock();
  if (live.pages || home == nullptr || !is_alive(stream)) return;
  on_thread_of(stream, [&] {
    home->record_stream(live.address, slot(stream).handle, &memory_of(slot(stream).device).streams());
    driver_.record_stream(live.address, ref(stream));
  });
  // Recording a block's own stream, by its name, says nothing.
  const bool is_own = slot(stream).handle == slot(live.owner).handle && slot(stream).device == slot(live.owner).device;
  if (!is_own) live.recorded.push_back(user(stream));
  note_met(stream);
}

}  // namespace vmm::testing

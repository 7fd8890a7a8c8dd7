#include "core/device/private_pools.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/errors.h"

namespace vmm {

namespace {

thread_local bool thread_is_ending = false;

struct ThreadMark {
  std::shared_ptr<const void> mark = std::make_shared<char>();
  ~ThreadMark() { thread_is_ending = true; }
};

// Lives as long as the calling thread; nullptr while that one is ending.
std::shared_ptr<const void> this_thread() {
  if (thread_is_ending) return nullptr;
  static thread_local const ThreadMark kMark;
  return kMark.mark;
}

}  // namespace

PrivatePools::PrivatePools(DeviceMemory& memory, CaptureHooks hooks) : memory_(memory), hooks_(std::move(hooks)) {
  memory_.ladder().set_lender(
      [this](const Pool& model, std::size_t bytes, Stream stream) { return lend(model, bytes, stream); });
}

PrivatePools::~PrivatePools() { memory_.ladder().set_lender(nullptr); }

std::uint64_t PrivatePools::capture_of(Stream stream) const {
  return hooks_.capture_of == nullptr ? 0 : hooks_.capture_of(stream);
}

PrivatePools::Entry& PrivatePools::made_entry(RegionId region) { return entries_[region]; }

const PrivatePools::Entry& PrivatePools::known(RegionId region) const {
  const auto at = entries_.find(region);
  if (at != entries_.end()) return at->second;
  throw InvalidArgumentError("there is no private pool with the id (" + std::to_string(region.first) + ", " +
                             std::to_string(region.second) + ")");
}

// ---------------------------------------------------------------------- users

void PrivatePools::add_user(RegionId region, std::shared_ptr<ForeignMemory> foreign) {
  const MutexLock lock(mutex_);
  note_thread();
  const bool is_graph = foreign == nullptr && entries_.count(region) != 0 && any_capture();
  Entry& entry = made_entry(region);
  if (is_graph) {
    Route* const capture = capture_of_thread();
    if (capture != nullptr) capture->retained.reserve(capture->retained.size() + 1);  // first: what counts is noted
    add_graph(entry, &Entry::retained);
    if (capture != nullptr) capture->retained.push_back(region);
    return;
  }
  ++entry.objects;
  if (foreign != nullptr) entry.foreign = std::move(foreign);
}

void PrivatePools::release(RegionId region) {
  bool failed = false;
  {
    const MutexLock lock(mutex_);
    failed = sweep_locked();
    const auto at = entries_.find(region);
    if (at != entries_.end()) {
      // torch names only the region. Whose release it is shows in what came
      // before: a route's follows its end, a MemPool's its last set_use_on_oom().
      Entry& entry = at->second;
      if (drop_abandoned(region)) {
        drop_graph(entry, &Entry::graphs);
      } else if (entry.plain_ended > 0) {
        --entry.plain_ended;
        for (Route& route : routes_) route.is_in_doubt = route.is_in_doubt && route.region != region;
      } else if (entry.leaving > 0 || (entry.graphs == 0 && entry.retained == 0)) {
        entry.leaving = std::max(entry.leaving - 1, 0);
        entry.objects = std::max(entry.objects - 1, 0);
      } else {
        drop_graph(entry, entry.retained > 0 ? &Entry::retained : &Entry::graphs);
      }
      drop_if_unused(at);
    }
  }
  settle_accounts(failed);
}

int PrivatePools::use_count(RegionId region) const {
  const MutexLock lock(mutex_);
  return known(region).use_count();
}

void PrivatePools::set_use_on_oom(RegionId region, bool use_on_oom) {
  const MutexLock lock(mutex_);
  note_thread();
  const auto at = entries_.find(region);
  if (at == entries_.end()) return;
  at->second.use_on_oom = use_on_oom;
  if (!use_on_oom && at->second.leaving < at->second.objects) ++at->second.leaving;
}

void PrivatePools::set_no_split(RegionId region) {
  const MutexLock lock(mutex_);
  const auto at = entries_.find(region);
  if (at == entries_.end()) return;
  at->second.no_split = true;
  if (at->second.foreign != nullptr) at->second.foreign->set_no_split();
}

void PrivatePools::add_graph(Entry& entry, int Entry::*kind) {
  pin(entry);
  ++(entry.*kind);
}

// What a capture takes of a pool that is not the capture's own, a graph uses for as
// long as the pool lives, unless torch says that it does: nobody tells when the graph goes.
void PrivatePools::keep_for_graphs(Entry& entry) {
  if (entry.is_kept) return;
  pin(entry);
  entry.is_kept = true;
}

// All of its parts, or none. Whoever calls says then why.
void PrivatePools::pin(const Entry& entry) {
  if (entry.is_pinned()) return;
  try {
    set_pinned(entry, true);
  } catch (...) {
    set_pinned(entry, false);
    throw;
  }
}

void PrivatePools::set_pinned(const Entry& entry, bool pinned) {
  for (const auto& [model, part] : entry.parts) pinned ? part->pin() : part->unpin();
  if (entry.foreign != nullptr) entry.foreign->set_pinned(pinned);
}

void PrivatePools::drop_graph(Entry& entry, int Entry::*kind) {
  --(entry.*kind);
  if (entry.is_pinned()) return;
  set_pinned(entry, false);
  for (const auto& [model, part] : entry.parts) {
    // A model that has been closed meanwhile could not take this part along.
    if (part->is_closed()) static_cast<void>(close(part));  // else when the region goes
  }
}

// False where there is no host memory for it: another time.
bool PrivatePools::close(const std::shared_ptr<Pool>& part) {
  has_closed_.store(true, std::memory_order_relaxed);
  try {
    memory_.close_pools({part}, /*force=*/true);
  } catch (const std::bad_alloc&) {
    return false;
  }
  return true;
}

void PrivatePools::close_due() {
  while (!closing_.empty()) {
    auto place = closing_.extract(closing_.begin());  // another failure is told once
    if (close(place.mapped())) continue;
    closing_.insert(std::move(place));
    return;
  }
}

// Takes no memory: what goes goes as nodes.
void PrivatePools::drop_if_unused(Entries::iterator at) {
  Entry& entry = at->second;
  if (entry.use_count() > 0) return;
  dropped_.merge(entry.kept);
  has_dropped_.store(!dropped_.empty(), std::memory_order_relaxed);
  if (entry.is_kept) set_pinned(entry, false);
  if (entry.foreign != nullptr) entry.foreign->close();
  closing_.merge(entry.parts);
  entries_.erase(at);
  close_due();
}

// --------------------------------------------------------------------- routes

void PrivatePools::begin(RegionId region, Filter filter, Stream current) {
  const MutexLock lock(mutex_);
  // Those that failed are not told of: torch has just prepared the next capture.
  sweep_locked();
  note_thread();
  const std::uint64_t running = capture_of(current);
  const auto same = [&](const Route& route) { return route.region == region; };
  if (const auto at = std::find_if(routes_.begin(), routes_.end(), same); at != routes_.end()) {
    if (!at->is_in_doubt || running == 0) {
      throw InvalidArgumentError("beginAllocateToPool: already recording to mempool_id");
    }
    // Its end was its own, before a part of the capture, and one that failed is still to be ended.
    suspended_.reserve(suspended_.size() + 1);
    ++failed_[region];
    if (hooks_.failed_are_released) --made_entry(region).plain_ended;
    suspend(*at, /*by_its_own_end=*/true);
    routes_.erase(at);
  }
  Route route;
  route.region = region;
  const bool passes = filter(current);
  // Also a capture that goes on, after a part of it that had a route of its own:
  // then its filter knows the capture, and no stream outside of it. (A thread's or a
  // stream's route within a capture is none of these.)
  route.is_capture = !passes || (running != 0 && current != nullptr && !filter(nullptr) && is_suspended(region));
  route.filter = std::move(filter);
  routes_.reserve(routes_.size() + 1);  // first: what has begun is noted
  if (!route.is_capture) route.resumed.reserve(1);
  Entry& entry = made_entry(region);  // last: it may be new, and has no user yet
  if (route.is_capture) {
    route.origin = current;
    route.capture = running;
    route.in_another = !passes && running != 0;
    route.thread = this_thread();
    if (!take_up_suspended(route, running)) {
      try {
        add_graph(entry, &Entry::graphs);
      } catch (...) {
        drop_if_unused(entries_.find(region));
        throw;
      }
      memory_.clock().begin_capture();
    }
  } else {
    ++entry.plain;
    // A program that paused its capture's pool (another one served a part of the
    // capture) goes on with it: the capture's route serves again.
    const auto paused = std::find_if(suspended_.begin(), suspended_.end(), [&](const Route& suspended) {
      return suspended.region == region && running != 0 && suspended.capture == running;
    });
    if (paused != suspended_.end()) {
      route.resumed.push_back(std::move(*paused));
      suspended_.erase(paused);
    }
  }
  routes_.push_back(std::move(route));
  count_routes();
}

bool PrivatePools::is_suspended(RegionId region) const {
  return std::any_of(suspended_.begin(), suspended_.end(), [&](const Route& route) { return route.region == region; });
}

// A part of a capture, or what comes behind one, is of the whole: that one's end counts, at
// whatever depth (conditional nodes nest).
bool PrivatePools::take_up_suspended(Route& route, std::uint64_t running) {
  if (running == 0) return false;  // a capture that is about to begin
  const auto at = std::find_if(suspended_.begin(), suspended_.end(),
                               [&](const Route& suspended) { return suspended.region == route.region; });
  if (at == suspended_.end()) return false;
  route.origin = at->origin;
  route.capture = at->capture;
  route.in_another = route.in_another || running != route.capture;
  route.retained = std::move(at->retained);
  suspended_.erase(at);
  return true;
}

// REQUIRES: there is room in suspended_.
void PrivatePools::suspend(Route& route, bool by_its_own_end) {
  route.thread = this_thread();
  route.has_just_ended = by_its_own_end;
  route.is_in_doubt = false;
  suspended_.push_back(std::move(route));
}

void PrivatePools::note_thread() {
  for (Route& route : suspended_) {
    if (route.has_just_ended && route.thread.lock() == this_thread()) route.has_just_ended = false;
  }
}

// A graph that goes without its capture's end (an exception, and nobody called
// capture_end()) ends its route and releases its region, one right after the other
// (torch 2.14), and CUDA's capture runs on: nobody will end that either.
bool PrivatePools::drop_abandoned(RegionId region) {
  const auto at = std::find_if(suspended_.begin(), suspended_.end(), [&](const Route& route) {
    return route.region == region && route.has_just_ended && route.thread.lock() == this_thread();
  });
  if (at == suspended_.end()) return false;
  suspended_.erase(at);
  count_routes();
  memory_.clock().end_capture();
  return true;
}

PrivatePools::Route* PrivatePools::capture_of_thread() {
  const auto is_mine = [](const Route& route) { return route.is_capture && route.thread.lock() == this_thread(); };
  for (auto at = routes_.rbegin(); at != routes_.rend(); ++at) {
    if (is_mine(*at)) return &*at;
    if (!at->resumed.empty() && is_mine(at->resumed.front())) return &at->resumed.front();
  }
  if (const auto at = std::find_if(suspended_.rbegin(), suspended_.rend(), is_mine); at != suspended_.rend()) {
    return &*at;
  }
  // A thread that works for a capture: the only one that there is.
  Route* only = nullptr;
  std::size_t count = 0;
  const auto consider = [&](Route& route) {
    if (!route.is_capture) return;
    only = &route;
    ++count;
  };
  for (Route& route : routes_) {
    consider(route);
    for (Route& resumed : route.resumed) consider(resumed);
  }
  for (Route& route : suspended_) consider(route);
  return count == 1 ? only : nullptr;
}

bool PrivatePools::is_retained(RegionId region, Stream stream, std::uint64_t running) const {
  const auto retains = [&](const Route& route, bool takes_part) {
    return takes_part && std::find(route.retained.begin(), route.retained.end(), region) != route.retained.end();
  };
  // Filters of those that are open alone: another may look into a graph that is gone.
  const auto by_open = [&](const Route& route) {
    if (!route.resumed.empty()) return retains(route.resumed.front(), route.resumed.front().capture == running);
    // 0: its own thread has not come by since it began.
    const std::uint64_t capture = route.is_capture && route.capture == 0 ? capture_of(route.origin) : route.capture;
    return route.is_capture && retains(route, route.in_another ? route.filter(stream) : capture == running);
  };
  const auto by_suspended = [&](const Route& route) { return retains(route, route.capture == running); };
  return std::any_of(routes_.begin(), routes_.end(), by_open) ||
         std::any_of(suspended_.begin(), suspended_.end(), by_suspended);
}

void PrivatePools::count_routes() { route_count_.store(routes_.size() + suspended_.size(), std::memory_order_relaxed); }

// Whether torch ends the route, at `at` (nullptr: there is none), of a capture that has been
// found to have failed: not that of one that runs.
bool PrivatePools::is_end_of_failed(RegionId region, const Route* at) const {
  if (failed_.count(region) == 0) return false;
  if (at == nullptr) return true;
  const std::uint64_t running = at->is_capture ? capture_of(at->origin) : 0;
  return running != 0 && (at->capture == 0 || at->capture == running);
}

void PrivatePools::end(RegionId region) {
  const MutexLock lock(mutex_);
  const auto at =
      std::find_if(routes_.begin(), routes_.end(), [&](const Route& route) { return route.region == region; });
  if (is_end_of_failed(region, at == routes_.end() ? nullptr : &*at)) {
    if (at != routes_.end()) at->is_in_doubt = true;                   // a begin() would say that it was this one's own
    if (hooks_.failed_are_released) ++made_entry(region).plain_ended;  // its graph has been dropped
    const auto failed = failed_.find(region);
    if (--failed->second == 0) failed_.erase(failed);
    return;
  }
  if (at == routes_.end()) throw InvalidArgumentError("endAllocatePool: not currently recording to mempool_id");
  Entry& entry = made_entry(region);
  suspended_.reserve(suspended_.size() + 1);  // first: what has ended is noted
  if (!at->is_capture) {
    --entry.plain;
    ++entry.plain_ended;
    if (!at->resumed.empty()) {
      Route& capture = at->resumed.front();
      if (capture_of(capture.origin) == capture.capture) {
        suspend(capture, /*by_its_own_end=*/false);
      } else {
        memory_.clock().end_capture();  // it has ended, and torch ends its route
      }
    }
  } else {
    const std::uint64_t running = capture_of(at->origin);
    if (at->capture == 0) at->capture = running;  // nobody has asked for memory in it yet
    if (running != 0 && running == at->capture) {
      // torch ends the capture before its route. Here the capture goes on.
      suspend(*at, /*by_its_own_end=*/true);
    } else {
      memory_.clock().end_capture();
    }
  }
  routes_.erase(at);
  count_routes();
}

// Whether a capture's route serves nothing any more, though nobody ended it.
// torch begins the capture right after the route and ends it right before, with
// no request in between; so whoever began the route and finds no capture when
// it comes by knows that it failed. Another thread cannot know, but stands in
// for one that has ended. (A relaxed capture may be ended by another thread. If
// that one is just between the capture's end and the route's, the route is gone
// and end() says so: the graph is lost, no memory is given away under it.)
bool PrivatePools::is_dead(Route& route) {
  if (!route.is_capture) return false;
  const std::shared_ptr<const void> owner = route.thread.lock();
  if (owner != nullptr && owner != this_thread()) return false;
  const std::uint64_t running = capture_of(route.origin);
  if (route.capture == 0) route.capture = running;
  return running == 0 || running != route.capture;
}

// Returns whether there were any, and no capture is left. The filter is not asked: it may
// look into a graph that is gone.
bool PrivatePools::sweep_locked() {
  close_due();
  std::vector<RegionId> dead;
  const auto look_at = [&dead](Route& route, bool has_failed) {
    route.has_failed = has_failed;
    if (has_failed) dead.push_back(route.region);
  };
  for (Route& route : routes_) look_at(route, is_dead(route));
  // A suspended one is taken up before its capture ends, so one whose capture has
  // ended never will be.
  for (Route& route : suspended_) look_at(route, capture_of(route.origin) != route.capture);
  if (dead.empty()) return false;
  if (hooks_.failed_are_ended) {
    std::map<RegionId, int> failed = failed_;
    for (const RegionId region : dead) ++failed[region];
    failed_.swap(failed);
  }
  // From here on nothing takes memory: all of them have ended, or none.
  const auto has_failed = [](const Route& route) { return route.has_failed; };
  std::erase_if(routes_, has_failed);
  std::erase_if(suspended_, has_failed);
  count_routes();
  for (const RegionId region : dead) {
    memory_.clock().end_capture();
    const auto at = entries_.find(region);
    if (at == entries_.end()) continue;  // released more often than there were users
    drop_graph(at->second, &Entry::graphs);
    drop_if_unused(at);
  }
  return !any_capture();
}

bool PrivatePools::any_capture() const {
  return !suspended_.empty() || std::any_of(routes_.begin(), routes_.end(), [](const Route& route) {
    return route.is_capture || !route.resumed.empty();
  });
}

void PrivatePools::settle_accounts(bool failed) {
  Kept dropped;
  if (has_dropped_.load(std::memory_order_relaxed)) {
    const MutexLock lock(mutex_);
    dropped.swap(dropped_);
    has_dropped_.store(false, std::memory_order_relaxed);
  }
  if (failed && hooks_.on_failed != nullptr) hooks_.on_failed();
  if (has_closed_.load(std::memory_order_relaxed) && has_closed_.exchange(false)) memory_.after_closing();
}

void PrivatePools::sweep() {
  bool failed = false;
  {
    const MutexLock lock(mutex_);
    failed = sweep_locked();
  }
  settle_accounts(failed);
}

std::shared_ptr<Pool> PrivatePools::part_of(RegionId region, Entry& entry, const std::shared_ptr<Pool>& model) {
  if (const auto at = entry.parts.find(key_of(*model)); at != entry.parts.end()) return at->second;
  // Its place first: of a part that could not be noted nobody would know.
  Parts one;
  one.emplace(PartKey(), nullptr);
  Parts::node_type place = one.extract(one.begin());
  const auto part =
      memory_.create_part(model, region, entry.no_split, entry.objects > 0 ? PoolKind::mem_pool : PoolKind::graph);
  place.key() = key_of(*part);
  place.mapped() = part;
  if (entry.is_pinned()) {
    try {
      part->pin();
    } catch (...) {
      closing_.insert(std::move(place));
      throw;
    }
  }
  entry.parts.insert(std::move(place));
  return part;
}

PrivatePools::Route* PrivatePools::serving(Stream stream, std::uint64_t running) {
  const auto serves = [&](Route& route) VMM_REQUIRES(mutex_) {
    if (!route.is_capture) return route.filter(stream);
    if (running == 0) return false;
    if (route.in_another) return running != route.capture && route.filter(stream);
    // Its thread has not come by since the capture began.
    if (route.capture == 0) route.capture = capture_of(route.origin);
    return running == route.capture;
  };
  // The latest first: they nest.
  for (auto at = routes_.rbegin(); at != routes_.rend(); ++at) {
    if (serves(*at)) return &*at;
  }
  return nullptr;
}

std::shared_ptr<Pool> PrivatePools::route(const std::shared_ptr<Pool>& model, Stream stream,
                                          std::shared_ptr<ForeignMemory>* foreign) {
  std::shared_ptr<Pool> part;
  bool failed = false;
  {
    const MutexLock lock(mutex_);
    failed = sweep_locked();
    note_thread();
    const std::uint64_t running = capture_of(stream);
    if (const Route* const at = serving(stream, running); at != nullptr) {
      Entry& entry = made_entry(at->region);
      if (running != 0 && !at->is_capture && !is_retained(at->region, stream, running)) keep_for_graphs(entry);
      if (entry.foreign == nullptr) {
        // A closed model refuses by itself.
        part = model->is_closed() ? model : part_of(at->region, entry, model);
      } else if (foreign != nullptr) {
        *foreign = entry.foreign;
      }
    }
  }
  settle_accounts(failed);
  return part;
}

void PrivatePools::keep_for_capture(Stream stream, const std::shared_ptr<const void>& kept) {
  if (!any_route()) return;
  bool failed = false;
  {
    const MutexLock lock(mutex_);
    failed = sweep_locked();
    const std::uint64_t running = capture_of(stream);
    const Route* const at = running == 0 ? nullptr : serving(stream, running);
    if (at != nullptr) made_entry(at->region).kept.insert(kept);
  }
  settle_accounts(failed);
}

Address PrivatePools::lend(const Pool& model, std::size_t bytes, Stream stream) {
  PoolList willing;
  std::vector<std::shared_ptr<ForeignMemory>> foreign;
  {
    const MutexLock lock(mutex_);
    for (const auto& [region, entry] : entries_) {
      // What a graph uses when it is replayed is nobody else's.
      if (!entry.use_on_oom || entry.is_pinned()) continue;
      if (entry.foreign != nullptr) foreign.push_back(entry.foreign);
      if (const auto at = entry.parts.find(key_of(model)); at != entry.parts.end()) willing.push_back(at->second);
    }
  }
  for (const auto& part : willing) {
    if (part->is_closed()) continue;
    if (const Address address = part->try_allocate_within(bytes, stream); address != 0) return address;
  }
  for (const auto& memory : foreign) {
    if (const Address address = memory->try_allocate_within(bytes, stream); address != 0) return address;
  }
  return 0;
}

// ------------------------------------------------------------ what is in them

void PrivatePools::empty_cache(RegionId region) {
  bool failed = false;
  PoolList parts;
  {
    const MutexLock lock(mutex_);
    failed = sweep_locked();
    const auto at = entries_.find(region);
    if (at != entries_.end() && !at->second.is_pinned()) {
      for (const auto& [model, part] : at->second.parts) parts.push_back(part);
    }
  }
  settle_accounts(failed);
  for (const auto& part : parts) {
    if (!part->is_closed()) memory_.trim(*part, 0);
  }
}

PoolList PrivatePools::parts(RegionId region) const {
  const MutexLock lock(mutex_);
  PoolList found;
  for (const auto& [model, part] : known(region).parts) found.push_back(part);
  return found;
}

std::unordered_set<Address> PrivatePools::live_addresses(RegionId region) const {
  std::unordered_set<Address> live;
  for (const auto& part : parts(region)) {
    for (const Address address : part->live_addresses()) live.insert(address);
  }
  return live;
}

RegionCheckpoint PrivatePools::checkpoint(RegionId region) const {
  RegionCheckpoint found;
  found.region = region;
  for (const auto& part : parts(region)) {
    part->wait_for_recorded();
    found.parts.emplace_back(part, part->checkpoint());
  }
  return found;
}

void PrivatePools::restore(const RegionCheckpoint& target, std::vector<Address>* freed,
                           std::vector<Address>* allocated) {
  const PoolCheckpoint empty;
  const auto target_of = [&](const std::shared_ptr<Pool>& part) -> const PoolCheckpoint& {
    const auto at = std::find_if(target.parts.begin(), target.parts.end(),
                                 [&](const auto& recorded) { return recorded.first == part; });
    return at == target.parts.end() ? empty : at->second;
  };
  const PoolList all = parts(target.region);
  for (const auto& part : all) part->wait_for_recorded();
  // All models' graphs are in one region: one of them may sleep, or have what cannot be
  // restored, and nobody is changed before that is known.
  for (const auto& part : all) part->require_restorable(target_of(part));
  for (const auto& part : all) part->restore(target_of(part), freed, allocated);
}

}  // namespace vmm

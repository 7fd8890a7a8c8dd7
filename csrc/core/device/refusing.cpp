// DeviceMemory: what is known of a request that found no memory, gathered for the error
// (refusal.h has the words).
#include <algorithm>
#include <map>
#include <utility>

#include "base/errors.h"
#include "core/device/device_memory.h"

namespace vmm {

// Who holds memory that counts under `refused` (nullptr: the device), or has it reserved,
// whoever holds most first. What is idle and still there now is what floors keep.
std::vector<Holder> DeviceMemory::holders_under(const Budget* refused, const Pool& asker, const Surveyed& all) const {
  std::map<const Pool*, std::size_t> there;  // where its numbers, and its parts', are added up
  std::vector<MemoryStats> sums = all.stats;
  for (std::size_t k = 0; k < all.pools.size(); ++k) there.emplace(all.pools[k].get(), k);
  // A part's are its model's, unless that was closed and a tensor of it lives on.
  const auto place_of_model = [&](std::size_t k) {
    const auto model = there.find(&all.pools[k]->model());
    return model == there.end() ? k : model->second;
  };
  std::vector<Holder> holders;
  std::size_t in_pools = 0;
  for (std::size_t k = 0; k < all.pools.size(); ++k) {
    in_pools += all.stats[k].physical_usage;
    if (const std::size_t place = place_of_model(k); place != k) sums[place].add(all.stats[k]);
  }
  for (std::size_t k = 0; k < all.pools.size(); ++k) {
    if (place_of_model(k) != k) continue;
    Pool& pool = *all.pools[k];
    const MemoryStats& stats = sums[k];
    const bool is_another = &pool.model() != &asker.model();
    const std::size_t reserved =
        is_another && refused != nullptr && !pool.is_part() ? pool.budget().reserved_here() : 0;
    if (stats.physical_usage == 0 && reserved == 0) continue;
    Holder holder{pool.name() + (pool.model().is_closed() ? " (closed)" : ""), stats.allocated_bytes, stats.idle_bytes,
                  stats.stranded_bytes, stats.quarantined_bytes};
    holder.reserved = reserved;
    if ((holder.idle != 0 && is_another) || reserved != 0) holder.floor = pool.floor();
    holders.push_back(std::move(holder));
  }
  if (refused == nullptr || refused == &budget_) {
    const std::size_t foreign = foreign_budget_.used();
    if (foreign != 0) holders.push_back({"MemPools of other allocators", foreign});
    const std::size_t zeros = zero_budget_.used();
    if (zeros != 0) holders.push_back({"pages that read as zero", zeros});
    const std::size_t guests = guests_.used_bytes();
    if (guests != 0) holders.push_back({guest_budget_.name(), guests});
    const std::size_t accounted = in_pools + foreign + zeros + guests + store_.all_shelved_bytes();
    const std::size_t by_hand = budget_.used() - std::min(accounted, budget_.used());
    if (by_hand != 0) holders.push_back({"VirtualMemoryManager", by_hand});
  }
  std::stable_sort(holders.begin(), holders.end(), [](const auto& a, const auto& b) { return a.held() > b.held(); });
  return holders;
}

DeviceMemory::Surveyed DeviceMemory::survey(const Budget* under) const {
  Surveyed all;
  all.pools = under == nullptr ? pools() : pools_under(*under);
  all.stats = stats_of_each(all.pools);
  return all;
}

// Bytes of what was surveyed that models have above the floors that the asker does not stand
// under, of those that `most` allows of each pool.
template <typename Most>
std::size_t DeviceMemory::to_spare(const Surveyed& all, const Pool& asker, const Most& most) {
  std::map<const Pool*, std::size_t> spare;  // of each model, with its parts
  std::size_t sum = 0;
  for (std::size_t k = 0; k < all.pools.size(); ++k) {
    const Pool& pool = *all.pools[k];
    const std::size_t wanted = std::min(most(pool, all.stats[k]), pool.budget().above_floors(asker.budget()));
    if (wanted == 0) continue;
    const Pool& model = pool.model();
    const auto [found, is_new] = spare.try_emplace(&model, model.budget().above_floors(asker.budget()));
    const std::size_t given = std::min(wanted, found->second);
    found->second -= given;
    sum += given;
  }
  return sum;
}

Refused DeviceMemory::refusal_of(const Ladder::Climb& climb) {
  Pool& asker = climb.asker;
  const std::size_t bytes = climb.bytes;
  const Shortage& shortage = climb.shortage;
  const bool driver_failed = shortage.refused == nullptr && !shortage.no_address_space;
  if (driver_failed && shortage.status.code() != StatusCode::out_of_memory) {
    throw_if_failed(shortage.status, "pool '" + asker.name() + "': " + format_bytes(bytes) + " asked");
  }
  Refused refused{&asker, climb.stream.value_or(nullptr), bytes, {}, {}};
  Refusal& refusal = refused.refusal;
  RefusalCause& cause = refused.cause;
  refusal.requested = climb.beside.there + bytes + climb.beside.to_come;
  refusal.pool = asker.model().name();  // what it has is told behind
  refusal.limit = asker.budget().limit();
  cause.no_addresses = shortage.no_address_space;
  cause.takes_whole_pages = options_.debug.kind == DebugMode::Kind::guard;
  cause.capacity = asker.capacity();
  for (const Budget* level = &asker.budget(); level != nullptr; level = level->parent()) {
    if (level == &budget_ && level->limit() == kUnlimited) continue;
    cause.limits += "; " + level->name() + ": ";
    if (level->limit() != kUnlimited) cause.limits += "limit " + format_bytes(level->limit()) + ", ";
    cause.limits += "mapped " + format_bytes(level->used());
    if (const std::size_t reserved = level->reserved(); reserved != 0) {
      cause.limits += ", reserved by floors " + format_bytes(reserved);
    }
  }
  if (asker.model().spills()) {
    const std::shared_ptr<const Budget> spilled = spill_group_of(asker.group());
    cause.limits += "; " + spilled->name() + ": ";
    if (spilled->limit() != kUnlimited) {
      cause.limits += "limit " + format_bytes(spilled->limit()) + ", ";
      if (climb.stream.has_value() && asker.is_ordinary())
        cause.spill = align_up(spilled->excess() + bytes - std::min(bytes, spilled->room()), asker.page_size());
    }
    cause.limits += "mapped " + format_bytes(spilled->used());
  }
  MemoryInfo info;
  const bool known = driver_.memory_info(device_, &info).ok();
  if (known) {
    cause.device_total = info.total;
    cause.device_free = info.free;
    const std::size_t taken = info.total - std::min(info.free, info.total);
    cause.outside = taken - std::min(budget_.used(), taken);
  }
  const Budget* const under = cause.no_addresses ? &asker.model().budget() : shortage.refused;
  const Surveyed all = survey(under);
  refusal.holders = holders_under(under, asker, all);
  const std::size_t shelved = cause.no_addresses ? 0 : store_.shelved_bytes(asker.group());
  const auto shelved_under = [&](const Budget& level) { return asker.group().stands_under(level) ? shelved : 0; };
  if (cause.no_addresses) {
    refusal.limit = cause.capacity;
  } else {
    if (shortage.refused != nullptr) {
      refusal.limit = shortage.refused->limit();
      cause.limit_name = shortage.refused->name();
    } else {
      if (!shortage.status.ok()) cause.driver_said = shortage.status.text();
      if (known && (bytes > info.total || shortage.status.code() == StatusCode::out_of_memory)) {
        refusal.limit = info.total;
      }
    }
  }
  // There is some where nobody was asked to give any, as all of it would not have done; and its
  // own, in other parts of its model.
  const auto idle = [&](const Pool& pool, const MemoryStats& stats) {
    if (cause.no_addresses) return &pool == &asker ? stats.idle_bytes : 0;
    return pool.budget().stands_under(budget_) ? stats.idle_bytes : 0;
  };
  // What would have to be had: none of what a wake has already.
  const std::size_t wanted = bytes + climb.beside.to_come;
  const std::size_t pages = align_up(wanted, asker.page_size());
  for (const Budget* level = shortage.refused; level != nullptr; level = level->parent()) {
    if (level->limit() == kUnlimited) continue;
    const bool refuses = level == under;
    if (!refuses && level->rise_for(asker.budget(), pages, shelved_under(*level)) == 0) continue;
    const Surveyed beneath = refuses ? Surveyed{} : survey(level);
    const std::size_t spare = to_spare(refuses ? all : beneath, asker, idle);
    const auto rise = [&](std::size_t size) {
      const std::size_t all_of_it = level->rise_for(asker.budget(), size, shelved_under(*level));
      return all_of_it - std::min(all_of_it, spare);
    };
    if (refuses || rise(wanted) != 0) cause.rises.push_back({level->name(), rise(wanted), rise(pages)});
  }
  const std::size_t headroom = asker.budget().headroom_without(shelved, asker.group());
  refusal.available = std::min(known ? std::min(headroom, info.free + shelved) : headroom, asker.capacity()) +
                      to_spare(all, asker, idle);
  cause.page = asker.page_size();
  refusal.available += climb.beside.there;
  return refused;
}

void DeviceMemory::tell(Refused refused) {
  refused.asker->count_oom();
  if (refused.decision.has_value()) ladder_.note(*refused.asker, *std::move(refused.decision));
  if (on_out_of_memory_) on_out_of_memory_(*refused.asker, refused.bytes, refused.stream);
  Refusal& refusal = refused.refusal;
  refusal.advice = advice_for(refusal, refused.cause);
  OutOfMemoryError error(text_of(refusal, refused.cause), refusal.requested, refusal.available, refusal.limit,
                         refusal.pool);
  error.is_told = true;
  note_refusal(std::move(refusal));
  throw error;
}

// At most what pools under `level` could come to give `in`: what is idle above their floors,
// or will be when queued work is done, and all of one that is on its way to sleep or back.
// But for `out`, which is asked about.
std::size_t DeviceMemory::could_be_spared(const Budget& level, const Pool& in, const Pool* out) const {
  return to_spare(survey(&level), in, [&](const Pool& pool, const MemoryStats& stats) {
    if (&pool.model() == out) return std::size_t{0};
    const bool is_on_its_way = pool.is_asleep() && &pool.model() != &in;
    return is_on_its_way ? stats.physical_usage : stats.idle_bytes + stats.quarantined_bytes;
  });
}

void DeviceMemory::require_room_to_swap(Pool& in, std::size_t bytes, const Pool* out, std::size_t leaving) {
  // Of a model that goes as the other one comes.
  const auto made_room_under = [&](const Budget& level) {
    const bool counts = out != nullptr && out->budget().stands_under(level);
    return counts ? std::min(leaving, out->budget().above_floors(in.budget())) : std::size_t{0};
  };
  // At most, with `free` there now. What comes free first pays for what is `over` the limit.
  const auto room_under = [&](const Budget& level, std::size_t free, std::size_t over) {
    std::size_t room = std::min(free, bytes);  // more is not asked for
    room += made_room_under(level);
    if (room < bytes + over) room += could_be_spared(level, in, out);
    return room - std::min(room, over);
  };
  const auto refuse_under = [&](const Budget& level, std::size_t room, const MemoryInfo* device) {
    Refused refused{&in, nullptr, bytes, {}, {}};
    Refusal& refusal = refused.refusal;
    RefusalCause& cause = refused.cause;
    refusal.requested = bytes;
    refusal.pool = in.name();
    refusal.available = room;
    refusal.limit = device == nullptr ? level.limit() : device->total;
    if (device == nullptr) cause.limit_name = level.name();
    if (device == nullptr) {
      const std::size_t gain = could_be_spared(level, in, out) + made_room_under(level);
      const std::size_t rise = level.rise_for(in.budget(), bytes, store_.shelved_under(level));
      cause.rises.push_back({level.name(), rise - std::min(rise, gain), rise - std::min(rise, gain)});
    }
    cause.page = in.page_size();
    if (device != nullptr) cause.device_total = device->total;
    if (device != nullptr) cause.device_free = device->free;
    cause.limits = " to wake in, and ";
    if (out != nullptr) cause.limits += "with all of '" + out->name() + "' asleep ";
    cause.limits += "there would be " + format_bytes(room);
    const Budget* const under = device == nullptr ? &level : nullptr;
    refusal.holders = holders_under(under, in, survey(under));
    tell(std::move(refused));
  };
  for (int round = 0;; ++round) {
    const Budget* full = nullptr;
    std::size_t room = kUnlimited;
    for (const Budget* level = &in.budget(); level != nullptr && room >= bytes; level = level->parent()) {
      full = level;
      const std::size_t excess = level->excess() - std::min(level->excess(), store_.shelved_under(*level));
      room = room_under(*level, level->claimable_for(in.budget()), std::max(excess, level->excess_claims()));
    }
    MemoryInfo info;
    const bool is_device = room >= bytes && driver_.memory_info(device_, &info).ok();
    if (is_device) room = room_under(budget_, info.free + store_.all_shelved_bytes(), 0);
    if (room >= bytes) return;
    const bool has_freed =
        (round == 0 && ladder_.call_back()) || (round < Ladder::kMostReliefs && ladder_.relieve(in, bytes));
    if (!has_freed) refuse_under(is_device ? budget_ : *full, room, is_device ? &info : nullptr);
  }
}

void DeviceMemory::note_refusal(Refusal refusal) {
  const MutexLock lock(refusal_mutex_);
  last_refusal_ = std::move(refusal);
}

void DeviceMemory::refuse(OutOfMemoryError error) {
  note_refusal({error.requested, error.available, error.limit, error.pool, {}, {}});
  throw std::move(error);
}

std::optional<Refusal> DeviceMemory::last_refusal() const {
  const MutexLock lock(refusal_mutex_);
  return last_refusal_;
}

}  // namespace vmm

// The numbers of a group's pools together, at one moment. It keeps those of each
// pool from one answer to the next, and asks only pools that somebody has locked
// since: of a thousand models most are idle, and asking them all took 0.5 ms. It
// never knows a limit, nor a shelf.
//
// The answer is as exact as if all pools were locked at once. Those that have
// changed are locked together; that none of the others was touched meanwhile is
// seen afterwards, or they are locked as well.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "base/sync.h"
#include "core/device/pool_registry.h"
#include "core/memory/chunk.h"
#include "core/numbers/stats.h"

namespace vmm {

class GroupFigures {
 public:
  GroupFigures() = default;
  GroupFigures(const GroupFigures&) = delete;
  GroupFigures& operator=(const GroupFigures&) = delete;

  // What `pools`, in order of registration, have mapped and what of it is what.
  // `beside` is called at the very moment for which that holds, perhaps more than
  // once: the last time counts. It takes no pool's lock.
  MemoryStats sum(const std::shared_ptr<const PoolList>& pools, const std::function<void()>& beside)
      VMM_EXCLUDES(mutex_) VMM_NO_THREAD_SAFETY_ANALYSIS;

 private:
  static constexpr std::uint64_t kNever = 0;  // every pool was locked when it was made
  struct Seen {
    OwnerId id = kNobody;
    const Pool* pool = nullptr;    // only while it is in the list that was given
    std::uint64_t as_of = kNever;  // its times_locked() then; kNever: it changes by itself
  };
  using Places = std::vector<std::size_t>;

  void follow(const std::shared_ptr<const PoolList>& pools) VMM_REQUIRES(mutex_);
  [[nodiscard]] Places changed_beside(const Places& locked) const VMM_REQUIRES(mutex_);
  void look_at(std::size_t place, Pool& pool) VMM_REQUIRES(mutex_) VMM_NO_THREAD_SAFETY_ANALYSIS;

  Mutex mutex_;  // above the pools'
  std::weak_ptr<const PoolList> of_ VMM_GUARDED_BY(mutex_);
  std::vector<Seen> seen_ VMM_GUARDED_BY(mutex_);            // one for each of them
  std::vector<MemoryStats> figures_ VMM_GUARDED_BY(mutex_);  // theirs
  MemoryStats sum_ VMM_GUARDED_BY(mutex_);
};

}  // namespace vmm

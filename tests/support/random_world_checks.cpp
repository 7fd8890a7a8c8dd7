// RandomWorld: what must be true.
#include <algorithm>

#include "base/errors.h"
#include "support/random_world.h"

namespace vmm::testing {

void RandomWorld::check() {
  const GlobalMemoryStats kept = memory_->group_stats(*group_);  // before anybody else asks its pools
  memory_->check();
  require(wrong_in_relief_.empty(), wrong_in_relief_);
  const std::size_t spilled = memory_->spill_group_of(memory_->budget())->used();
  require(driver_.live_chunk_bytes() == memory_->committed_bytes() + spilled,
          "driver holds " + std::to_string(driver_.live_chunk_bytes()) + ", charged " +
              std::to_string(memory_->committed_bytes()) + " and spilled " + std::to_string(spilled));
  // Limits: never above, unless they were lowered below what was in use.
  within(*group_, group_high_);
  check_floors();
  for (std::size_t k = 0; k < kPools; ++k) {
    within(pools_[k]->budget(), pool_high_[k]);
    const MemoryStats stats = pools_[k]->memory_stats();
    require(stats.physical_usage ==
                stats.allocated_bytes + stats.idle_bytes + stats.stranded_bytes + stats.quarantined_bytes,
            "pool " + std::to_string(k) + " does not add up");
    require(stats.stranded_bytes <= stats.physical_usage &&
                (stats.physical_usage + stats.asleep_bytes != 0 || pools_[k]->live_bytes() == 0),
            "stranded bytes wrapped");
  }
  check_bytes_of_pools();
  MemoryStats asked;  // each pool by itself
  for (const auto& pool : memory_->pools_under(*group_)) asked.add(pool->memory_stats());
  require(kept.allocated_bytes == asked.allocated_bytes, "the group's figures are old");
  // What queued work held up may have come free meanwhile.
  require(kept.quarantined_bytes != 0 ||
              (kept.idle_bytes == asked.idle_bytes && kept.stranded_bytes == asked.stranded_bytes),
          "the group's idle memory is old");
  const GlobalMemoryStats group = memory_->group_stats(*group_);
  require(group.physical_usage == group.allocated_bytes + group.idle_bytes + group.stranded_bytes +
                                      group.quarantined_bytes + group.store_bytes,
          "the group does not add up");
  require(memory_->debug_log() == nullptr || memory_->debug_log()->damages().empty(), "a pattern was overwritten");
  // One random block's whole content, every step.
  if (!live_.empty()) check_if_awake(live_[random_() % live_.size()]);
}

void RandomWorld::check_bytes_of_pools() const {
  for (const auto& pool : memory_->pools()) {
    std::size_t allocated = 0;
    for (const Live& live : live_) allocated += live.home == pool ? pool->block_size(live.address) : 0;
    for (const Pages& range : page_ranges_) allocated += pools_[range.pool] == pool ? range.size : 0;
    require(pool->live_bytes() == allocated, "pool '" + pool->name() + "' counts " +
                                                 std::to_string(pool->live_bytes()) + " live bytes, model " +
                                                 std::to_string(allocated));
  }
}

std::size_t RandomWorld::extent(std::size_t size) const {
  return memory_->debug_log() == nullptr ? align_up(size, 512) : align_down(size, 8);
}

void RandomWorld::check_floors() {
  std::size_t reserved = 0;
  for (std::size_t k = 0; k < kModelOfPart; ++k) {
    const Budget& budget = pools_[k]->budget();
    const std::size_t own = std::min(budget.floor(), budget.limit());
    reserved += own - std::min(own, budget.used());
  }
  require(group_->reserved() == reserved, "of the floors " + std::to_string(reserved) + " are left, reserved are " +
                                              std::to_string(group_->reserved()));
  const std::size_t claims = group_->excess_claims();
  require(claims <= most_claims_, "a model has grown into another's floor: " + std::to_string(claims) +
                                      " bytes above the limit, " + std::to_string(most_claims_) + " before");
  most_claims_ = claims;
}

void RandomWorld::within(const Budget& budget, std::size_t& high) {
  const std::size_t used = budget.used();
  require(used <= budget.limit() || used <= high,
          budget.name() + " holds " + std::to_string(used) + " above its limit " + std::to_string(budget.limit()));
  high = used;
}

void RandomWorld::write(const Live& live) {
  auto* words = reinterpret_cast<std::uint64_t*>(live.address);
  std::fill(words, words + extent(live.size) / 8, word(live.home->id(), live.id));
}

void RandomWorld::check_content(const Live& live) const {
  const auto* words = reinterpret_cast<const std::uint64_t*>(live.address);
  const std::uint64_t expected = live.is_zero ? 0 : word(live.home->id(), live.id);
  for (std::size_t k = 0; k < extent(live.size) / 8; ++k) {
    if (words[k] == expected) continue;
    require(false, "block " + std::to_string(live.id) + " overwritten at byte " + std::to_string(8 * k));
  }
}

void RandomWorld::check_if_awake(const Live& live) const {
  if (!live.home->is_asleep()) check_content(live);
}

void RandomWorld::check_no_former_owner(const Pool& home, Address address, std::size_t size) const {
  const auto* words = reinterpret_cast<const std::uint64_t*>(address);
  for (std::size_t k = 0; k < size / 8; ++k) {
    if (words[k] == 0 || words[k] >> 48U == home.id()) continue;
    if (memory_->debug_log() != nullptr && words[k] >> 56U == kPatternByte) continue;
    require(false, "pool '" + home.name() + "' sees another model's data at byte " + std::to_string(8 * k));
  }
}

void RandomWorld::judge_refusal(std::size_t pool, std::size_t need, const OutOfMemoryError& error,
                                std::uint64_t failures) {
  if (driver_.failures() != failures || error.limit == pools_[pool]->capacity()) return;
  std::size_t room = pools_[pool]->budget().headroom();
  MemoryInfo info;
  require(driver_.memory_info(0, &info).ok(), "memory_info");
  room = std::min(room, info.free);
  require(room < need,
          std::to_string(need) + " refused though " + std::to_string(room) + " could be had: " + error.what());
}
}  // namespace vmm::testing

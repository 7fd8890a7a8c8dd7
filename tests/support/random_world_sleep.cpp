// RandomWorld: models that sleep.
#include <algorithm>

#include "base/errors.h"
#include "support/random_world.h"

namespace vmm::testing {

PoolList RandomWorld::parts_of(std::size_t k, std::uint64_t which) const {
  PoolList parts = memory_->family(*pools_[k]);
  std::erase_if(parts, [which](const auto& part) { return which != 0 && part->tag().empty() != (which == 2); });
  return parts;
}

bool RandomWorld::is_any_asleep(const PoolList& pools) {
  return std::any_of(pools.begin(), pools.end(), [](const auto& pool) { return pool->is_asleep(); });
}

void RandomWorld::transfer(std::optional<std::size_t> out, std::optional<std::size_t> in, bool is_discarded,
                           std::uint64_t which, std::uint64_t failures, bool is_checked) {
  const bool was_awake = out.has_value() && !is_any_asleep(*out);
  if (is_discarded && !was_awake) return;  // of part of it nobody could say what is left
  const PoolList going = out.has_value() ? parts_of(*out, which) : PoolList();
  const PoolList coming = in.has_value() ? parts_of(*in, which) : PoolList();
  if (going.empty() && coming.empty()) return;
  std::unique_ptr<Departure> departure;
  if (out.has_value()) {
    std::vector<PartToSleep> parts;
    for (const auto& pool : going) {
      parts.push_back({pool, {{is_discarded ? Place::Kind::discard : Place::Kind::host, "", nullptr}}});
    }
    departure = std::make_unique<Departure>(sleeper_, std::move(parts), /*release=*/last_id_ % 2 == 0);
  }
  std::unique_ptr<Arrival> arrival;
  if (in.has_value()) {
    const auto memory = out.has_value() ? Arrival::Memory::by_piece : Arrival::Memory::collected;
    arrival = std::make_unique<Arrival>(sleeper_, coming, memory);
  }
  Transfer transfer(std::move(departure), std::move(arrival));
  const std::vector<std::size_t> before = on_their_way_;
  for (const auto& each : {out, in}) {
    if (each.has_value()) on_their_way_.push_back(*each);
  }
  bool is_done = false;
  try {
    transfer.begin([] {});
    transfer.run([] {});
    is_done = true;
  } catch (const NotAvailableError&) {
    require(memory_->debug_log() != nullptr, "only debug mode keeps models awake");
  } catch (const OutOfMemoryError&) {
    // Nobody says more than that there is no room.
  } catch (const VmmError&) {
    require(driver_.failures() != failures, "a transfer failed without a failing call");
  }
  on_their_way_ = before;
  if (is_done && out.has_value() && which != 0 && *out == kModelOfTagged) ++counts_.in_part;
  if (is_done) require(!is_any_asleep(coming), "it did not wake");
  if (is_done && out.has_value()) require(is_any_asleep(going), "it does not sleep");
  if (is_discarded) forget_contents(*out);
  for (const auto& each : {out, in}) {
    if (!each.has_value() || !is_checked) continue;
    for (const Live& live : live_) {
      if (model_of(live.pool) == *each) check_if_awake(live);
    }
  }
}

void RandomWorld::forget_contents(std::size_t k) {
  for (int attempt = 0; is_any_asleep(k); ++attempt) {
    if (attempt == 8) {  // no room: its tensors go, and its pages wait
      for (std::size_t index = live_.size(); index-- > 0;) {
        if (model_of(live_[index].pool) == k) free_live(index);
      }
      for (Pages& range : page_ranges_) {
        const bool is_thrown_away = model_of(range.pool) == k && pools_[range.pool]->is_asleep();
        range.is_zero = range.is_zero || is_thrown_away;
      }
      return;
    }
    memory_->empty_cache();
    transfer(std::nullopt, k, false, 0, 0, /*is_checked=*/false);
  }
  for (Live& live : live_) {
    if (model_of(live.pool) != k) continue;
    const auto* words = reinterpret_cast<const std::uint64_t*>(live.address);
    const std::size_t count = extent(live.size) / 8;
    const std::uint64_t was = live.is_zero ? 0 : word(live.home->id(), live.id);
    for (std::size_t at = 0; at < count; ++at) {
      require(words[at] == 0 || words[at] == was, "what was thrown away is not zero");
    }
    if (!live.is_sealed) {
      write(live);
      live.is_zero = false;
    } else if (count != 0 && words[0] == 0) {
      live.is_zero = true;
    }
  }
  for (Pages& range : page_ranges_) {
    if (model_of(range.pool) != k) continue;
    range.is_zero = false;
    write(as_block(range));
  }
}

}  // namespace vmm::testing

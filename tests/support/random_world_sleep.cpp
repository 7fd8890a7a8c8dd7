// RandomWorld: models that sleep.
#include "base/errors.h"
#include "support/random_world.h"

namespace vmm::testing {

void RandomWorld::transfer(std::optional<std::size_t> out, std::optional<std::size_t> in, bool is_discarded,
                           std::uint64_t failures, bool is_checked) {
  const auto family = [this](std::size_t k) { return memory_->family(*pools_[k]); };
  const bool was_awake = out.has_value() && !is_any_asleep(*out);
  if (is_discarded && !was_awake) return;  // of part of it nobody could say what is left
  std::unique_ptr<Departure> departure;
  if (out.has_value()) {
    std::vector<PartToSleep> parts;
    for (const auto& pool : family(*out)) {
      parts.push_back({pool, {{is_discarded ? Place::Kind::discard : Place::Kind::host, "", nullptr}}});
    }
    departure = std::make_unique<Departure>(sleeper_, std::move(parts), /*release=*/last_id_ % 2 == 0);
  }
  std::unique_ptr<Arrival> arrival;
  if (in.has_value()) {
    const auto memory = out.has_value() ? Arrival::Memory::by_piece : Arrival::Memory::collected;
    arrival = std::make_unique<Arrival>(sleeper_, family(*in), memory);
  }
  Transfer transfer(std::move(departure), std::move(arrival));
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
  if (is_done && in.has_value()) require(!is_any_asleep(*in), "it did not wake");
  if (is_done && out.has_value()) require(is_any_asleep(*out), "it does not sleep");
  if (is_discarded) forget_contents(*out);
  for (const auto& each : {out, in}) {
    if (!each.has_value() || !is_checked) continue;
    for (const Live& live : live_) {
      if (model_of(live.pool) == *each) check_if_awake(live);
    }
  }
}

bool RandomWorld::is_any_asleep(std::size_t k) const {
  return pools_[k]->is_asleep() || (k == kModelOfPart && pools_[kPart]->is_asleep());
}

void RandomWorld::forget_contents(std::size_t k) {
  for (int attempt = 0; is_any_asleep(k); ++attempt) {
    if (attempt == 8) {  // no room: its tensors go
      for (std::size_t index = live_.size(); index-- > 0;) {
        if (model_of(live_[index].pool) == k) free_live(index);
      }
      return;
    }
    memory_->empty_cache();
    transfer(std::nullopt, k, false, 0, /*is_checked=*/false);
  }
  for (const Live& live : live_) {
    if (model_of(live.pool) != k) continue;
    const auto* words = reinterpret_cast<const std::uint64_t*>(live.address);
    for (std::size_t at = 0; at < extent(live.size) / 8; ++at) {
      require(words[at] == 0 || words[at] == word(owners_[live.pool], live.id), "what was thrown away is not zero");
    }
    write(live);
  }
  for (const Pages& range : page_ranges_) {
    if (model_of(range.pool) == k) write({range.pool, pools_[range.pool]->base() + range.offset, range.size, range.id});
  }
}
}  // namespace vmm::testing

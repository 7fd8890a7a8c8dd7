// StreamWorld: models that sleep, wake and are swapped, step by step, while the rest of the
// program goes on.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>

#include "base/errors.h"
#include "support/stream_world.h"

namespace vmm::testing {

namespace {

constexpr std::size_t kMostTransfers = 2;

bool is_chosen(const Pool& member, std::uint64_t parts) {
  switch (parts % 3) {
    case 1:
      return member.tag() == kTag;
    case 2:
      return member.tag() != kTag;
    default:
      return true;
  }
}

}  // namespace

PoolList StreamWorld::family(std::size_t pool, std::uint64_t parts) {
  PoolList members = memory_of(pools_[pool]->device()).family(*pools_[pool]);
  std::erase_if(members, [parts](const auto& member) { return !is_chosen(*member, parts); });
  return members;
}

Place StreamWorld::place(std::uint64_t kind, int device) {
  switch (kind % 8) {
    case 0:
      return {Place::Kind::discard, "", nullptr};
    case 1: {
      std::filesystem::create_directories(folder_);
      return {Place::Kind::file, (folder_ / ("model" + std::to_string(++last_file_))).string(), nullptr};
    }
    case 2:
      return {Place::Kind::device, "", &memory_of(1 - device)};
    default:
      return {};
  }
}

void StreamWorld::transfer(std::optional<std::size_t> out, std::optional<std::size_t> in, std::uint64_t how,
                           std::uint64_t looks) {
  if (transfers_.size() >= kMostTransfers) return;
  const int device = pools_[out.value_or(in.value_or(0))]->device();
  if (out.has_value() && in.has_value()) {
    if (pools_[*in]->device() != device || &pools_[*in]->model() == &pools_[*out]->model()) return;
  }
  Sleeper& sleeper = device == 0 ? *sleeper_ : *peer_sleeper_;
  UnderWay way;
  std::unique_ptr<Departure> departure;
  if (out.has_value()) {
    const Place to = place(how % 8, device);
    std::vector<PartToSleep> parts;
    for (const auto& member : family(*out, how / 8)) {
      const std::uint64_t number = number_of(member);
      if (to.kind == Place::Kind::discard) way.thrown_away.emplace_back(number, !member->is_asleep());
      driver_.asleep(number);
      asleep_[number] = member;
      way.pools.push_back(number);
      parts.push_back({member, {to}});
    }
    departure = std::make_unique<Departure>(sleeper, std::move(parts), /*release=*/how / 24 % 2 == 1);
  }
  std::unique_ptr<Arrival> arrival;
  if (in.has_value()) {
    const auto memory = out.has_value() ? Arrival::Memory::by_piece : Arrival::Memory::collected;
    const PoolList members = family(*in, out.has_value() ? 0 : how);
    for (const auto& member : members) way.pools.push_back(number_of(member));
    arrival = std::make_unique<Arrival>(sleeper, members, memory);
  }
  way.transfer = std::make_unique<SteppedTransfer>(std::move(departure), std::move(arrival));
  transfers_.push_back(std::move(way));
  go_on(transfers_.size() - 1, looks == 0 ? SteppedTransfer::kToTheEnd : looks, /*stops=*/false);
}

void StreamWorld::go_on(std::size_t number, std::size_t looks, bool stops) {
  if (transfers_.empty()) return;
  const auto at = transfers_.begin() + static_cast<std::ptrdiff_t>(number % transfers_.size());
  if (!at->transfer->go_on(looks, stops)) return;
  const bool is_done = at->transfer->error() == nullptr;
  for (const auto& [pool, was_awake] : at->thrown_away) driver_.throw_away(pool, /*surely=*/is_done && was_awake);
  transfers_.erase(at);
  note_awake();
}

// The program uses a pool again once nobody is on the way with it and it is awake.
void StreamWorld::note_awake() {
  const auto is_on_the_way = [this](std::uint64_t number) {
    return std::any_of(transfers_.begin(), transfers_.end(), [number](const UnderWay& way) {
      return std::find(way.pools.begin(), way.pools.end(), number) != way.pools.end();
    });
  };
  for (auto at = asleep_.begin(); at != asleep_.end();) {
    const auto pool = at->second.lock();
    if (is_on_the_way(at->first) || (pool != nullptr && pool->is_asleep())) {
      ++at;
      continue;
    }
    driver_.awake(at->first);
    at = asleep_.erase(at);
  }
}

void StreamWorld::end_transfers() {
  while (!transfers_.empty()) go_on(0, SteppedTransfer::kToTheEnd, /*stops=*/false);
}

}  // namespace vmm::testing

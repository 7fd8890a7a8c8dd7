#include "core/debug/watch_log.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <iterator>
#include <utility>

namespace vmm {

namespace {

std::atomic<WatchLog::StackSource> stack_source{nullptr};
constexpr std::size_t kMostWaiting = 16 * WatchLog::kMostFreed;

// What a thread has still to let pass, and where it is in the sequence of gaps.
struct Sampling {
  // Each thread's its own, in order of their first requests: threads that end after a few
  // would all let the same ones pass.
  static std::uint64_t next_seed() {
    static std::atomic<std::uint64_t> threads{0};
    std::uint64_t seed = (threads.fetch_add(1, std::memory_order_relaxed) + 1) * 0x9E3779B97F4A7C15ULL;
    seed ^= seed >> 31U;
    return seed * 0xBF58476D1CE4E5B9ULL | 1U;
  }
  std::uint64_t state = next_seed();
  std::size_t to_pass = 0;
  std::size_t one_in = 0;  // for which; 0: not begun
};

std::size_t next_gap(Sampling& sampling, std::size_t one_in) {
  // xorshift64*: any sequence would do that has no short period.
  std::uint64_t& x = sampling.state;
  x ^= x >> 12U;
  x ^= x << 25U;
  x ^= x >> 27U;
  return static_cast<std::size_t>((x * 0x2545F4914F6CDD1DULL) >> 32U) % (2 * one_in - 1);
}

std::string bytes_text(std::size_t bytes) {
  std::string text = std::to_string(bytes) + (bytes == 1 ? " byte" : " bytes");
  if (bytes >= 10 * kKiB) text += " (" + format_bytes(bytes) + ")";
  return text;
}

}  // namespace

std::string to_string(const WatchedBlock& block) {
  std::string text = block.freed == 0 ? "a live block of " : "a freed block of ";
  text += bytes_text(block.requested) + " at " + format_hex(block.address) + " (pool '" +
          (block.pool == nullptr ? "" : *block.pool) + "', stream " +
          format_hex(reinterpret_cast<std::uintptr_t>(block.stream)) + ", allocation " + std::to_string(block.number);
  if (block.freed != 0) text += ", free " + std::to_string(block.freed);
  return text + ")";
}

std::string to_string(const Finding& finding, Address address) {
  std::string text = format_hex(address) + " is ";
  switch (finding.where) {
    case Finding::Where::inside:
      text += "byte " + std::to_string(finding.distance) + " of ";
      break;
    case Finding::Where::beyond:
      text += bytes_text(finding.distance) + " beyond the end of ";
      break;
    case Finding::Where::before:
      text += bytes_text(finding.distance) + " before ";
      break;
  }
  return text + to_string(finding.block);
}

std::string to_string(const Damage& damage) {
  const WatchedBlock& block = damage.block;
  const auto requested = static_cast<std::ptrdiff_t>(block.requested);
  std::string text = bytes_text(damage.bytes) + " outside " + to_string(block) +
                     (damage.bytes == 1 ? " was" : " were") + " overwritten, the first at offset " +
                     std::to_string(damage.first) + ", ";
  if (damage.first < 0) return text + bytes_text(static_cast<std::size_t>(-damage.first)) + " before it";
  return text + bytes_text(static_cast<std::size_t>(damage.first - requested)) + " beyond its end";
}

std::string with_stack(const WatchedBlock& block) {
  if (block.stack == nullptr) return "";
  std::string text = "; allocated at:";
  for (std::size_t at = 0; at < block.stack->size();) {
    const std::size_t end = std::min(block.stack->find('\n', at), block.stack->size());
    text += "\n    " + block.stack->substr(at, end - at);
    at = end + 1;
  }
  return text;
}

bool WatchLog::picks() const noexcept {
  if (mode_.one_in == 1) return true;
  thread_local Sampling sampling;
  if (sampling.one_in != mode_.one_in) {
    sampling.one_in = mode_.one_in;
    sampling.to_pass = next_gap(sampling, mode_.one_in);
  }
  if (sampling.to_pass != 0) {
    --sampling.to_pass;
    return false;
  }
  sampling.to_pass = next_gap(sampling, mode_.one_in);
  return true;
}

void WatchLog::set_stack_source(StackSource source) { stack_source.store(source, std::memory_order_release); }

std::shared_ptr<const std::string> WatchLog::stack_here() {
  const StackSource source = stack_source.load(std::memory_order_acquire);
  if (source == nullptr) return nullptr;
  std::string text = source();
  return text.empty() ? nullptr : std::make_shared<const std::string>(std::move(text));
}

// ------------------------------------------------------------ what happens

void WatchLog::began(WatchedBlock block) {
  const MutexLock lock(mutex_);
  block.number = ++counts_.watched;
  live_.insert_or_assign(block.address, std::move(block));
}

std::uint64_t WatchLog::freed(Address address) noexcept {
  const MutexLock lock(mutex_);
  auto node = live_.extract(address);
  if (node.empty()) return 0;
  node.mapped().freed = ++frees_;
  try {
    freed_.push_back(std::move(node.mapped()));
  } catch (const std::bad_alloc&) {
    return 0;  // it is not known any more
  }
  // Of one that is still to be looked at it has to be known whose it was.
  while (freed_.size() > kMostFreed && (freed_.front().is_done || freed_.size() > kMostWaiting)) {
    freed_.pop_front();
  }
  return frees_;
}

// By number: a look through all that wait, for each of 64,000, took 5 s under its pool's lock.
void WatchLog::done(std::uint64_t number, bool is_unmapped) noexcept {
  const MutexLock lock(mutex_);
  const auto found = std::lower_bound(freed_.begin(), freed_.end(), number,
                                      [](const WatchedBlock& block, std::uint64_t n) { return block.freed < n; });
  if (found == freed_.end() || found->freed != number) return;
  found->is_done = true;
  found->is_unmapped = is_unmapped;
}

void WatchLog::missed() {
  const MutexLock lock(mutex_);
  ++counts_.missed;
}

bool WatchLog::damaged(Address address, std::ptrdiff_t first, std::size_t bytes) {
  std::string text;
  {
    const MutexLock lock(mutex_);
    WatchedBlock* block = nullptr;
    if (const auto live = live_.find(address); live != live_.end()) {
      block = &live->second;
    } else {
      const auto freed = std::find_if(freed_.rbegin(), freed_.rend(),
                                      [address](const WatchedBlock& each) { return each.address == address; });
      if (freed == freed_.rend()) return false;
      block = &*freed;
    }
    const Damage damage{*block, first, bytes};
    const auto known = std::find_if(damages_.begin(), damages_.end(),
                                    [&](const Damage& each) { return each.block.number == block->number; });
    if (known != damages_.end()) {
      const bool is_same = known->first == first && known->bytes == bytes;
      *known = damage;
      if (is_same) return false;
    } else {
      if (block->is_damaged) return false;  // others' came since: it is not among the last any more
      block->is_damaged = true;
      ++counts_.damaged;
      damages_.push_back(damage);
      if (damages_.size() > kMostDamages) damages_.pop_front();
    }
    text = "torch_vmm: debug: " + to_string(damage) + with_stack(damage.block);
  }
  (void)std::fprintf(stderr, "%s\n", text.c_str());
  return true;
}

// ------------------------------------------------------------- what is known

WatchLog::Counts WatchLog::counts() const {
  const MutexLock lock(mutex_);
  Counts counts = counts_;
  counts.live = live_.size();
  return counts;
}

std::vector<WatchedBlock> WatchLog::live(std::size_t most) const {
  const MutexLock lock(mutex_);
  std::vector<WatchedBlock> blocks;
  blocks.reserve(live_.size());
  for (const auto& [address, block] : live_) blocks.push_back(block);
  const auto end = blocks.begin() + static_cast<std::ptrdiff_t>(std::min(most, blocks.size()));
  std::partial_sort(blocks.begin(), end, blocks.end(),
                    [](const auto& a, const auto& b) { return a.number > b.number; });
  blocks.erase(end, blocks.end());
  return blocks;
}

std::vector<WatchedBlock> WatchLog::freed_lately(std::size_t most) const {
  const MutexLock lock(mutex_);
  const auto count = static_cast<std::ptrdiff_t>(std::min(most, freed_.size()));
  return {freed_.rbegin(), freed_.rbegin() + count};
}

std::vector<Damage> WatchLog::damages() const {
  const MutexLock lock(mutex_);
  return {damages_.begin(), damages_.end()};
}

Finding WatchLog::finding(const WatchedBlock& block, Address address) {
  Finding found;
  found.block = block;
  found.is_in_zone = block.zone_begin <= address && address < block.zone_end;
  if (address < block.address) {
    found.where = Finding::Where::before;
    found.distance = block.address - address;
  } else if (address < block.end()) {
    found.where = Finding::Where::inside;
    found.distance = address - block.address;
  } else {
    found.where = Finding::Where::beyond;
    found.distance = address - block.end();
  }
  return found;
}

// Zones of live blocks lie apart, and each holds its block: at most two can hold it.
template <typename Each>
bool WatchLog::for_zones(Address address, const Each& each) const {
  const auto holds = [address](const WatchedBlock& block) {
    return block.zone_begin <= address && address < block.zone_end;
  };
  const auto above = live_.upper_bound(address);
  if (above != live_.begin() && holds(std::prev(above)->second) && !each(std::prev(above)->second)) return false;
  if (above != live_.end() && holds(above->second) && !each(above->second)) return false;
  for (auto block = freed_.rbegin(); block != freed_.rend(); ++block) {
    if (holds(*block) && !each(*block)) return false;
  }
  return true;
}

std::vector<Finding> WatchLog::explain(Address address) const {
  const MutexLock lock(mutex_);
  std::vector<Finding> found;
  for_zones(address, [&](const WatchedBlock& block) {
    found.push_back(finding(block, address));
    return true;
  });
  const auto above = live_.upper_bound(address);
  const auto add = [&](const WatchedBlock& block) {
    Finding near = finding(block, address);
    if (!near.is_in_zone) found.push_back(std::move(near));
  };
  if (above != live_.begin()) add(std::prev(above)->second);
  if (above != live_.end()) add(above->second);
  return found;
}

bool WatchLog::explain_now(Address address, Finding* out) const noexcept {
  if (!mutex_.try_lock_to_look()) return false;
  const bool is_found = !for_zones(address, [&](const WatchedBlock& block) VMM_NO_THREAD_SAFETY_ANALYSIS {
    *out = finding(block, address);
    return false;
  });
  mutex_.unlock();
  return is_found;
}

}  // namespace vmm

#include "support/block_contents.h"

#include <algorithm>
#include <iterator>

#include "core/debug/watch_log.h"
#include "support/memory_uses.h"

namespace vmm::testing {

namespace {

constexpr unsigned kPoolShift = 48;

std::uint64_t* word_at(Address address) { return reinterpret_cast<std::uint64_t*>(address); }

// Of what is large, an address in 16 KiB: looking at a page makes it.
constexpr std::size_t kSmall = 64 * kKiB;
constexpr std::size_t kSparse = 16 * kKiB;
std::size_t grain_of(std::size_t size) { return size <= kSmall ? kGranule : kSparse; }

// The granules whose first word lies within: a block that is watched ends anywhere.
template <typename Each>
void for_each_word(Address address, std::size_t size, const Each& each) {
  const std::size_t grain = grain_of(size);
  for (Address at = align_up(address, grain); at + sizeof(std::uint64_t) <= address + size; at += grain) each(at);
}

std::string text_of(std::uint64_t word) {
  if (word == 0) return "zero";
  return "write " + std::to_string(word & ((std::uint64_t{1} << kPoolShift) - 1)) + " of pool " +
         std::to_string(word >> kPoolShift);
}

}  // namespace

// The stretch that begins at `at`, or the first behind it: none lies across.
BlockContents::ByAddress::iterator BlockContents::cut(Address at) {
  const auto after = written_.lower_bound(at);
  if (after == written_.begin()) return after;
  const auto before = std::prev(after);
  if (before->second.end <= at) return after;
  Written rest = before->second;
  before->second.end = at;
  return written_.emplace_hint(after, at, rest);
}

void BlockContents::forget(Address address, std::size_t size) {
  cut(address);
  const auto last = cut(address + size);
  written_.erase(written_.lower_bound(address), last);
}

void BlockContents::write(Address address, std::size_t size, std::uint64_t pool) {
  forget(address, size);
  const std::uint64_t stamp = pool << kPoolShift | ++last_write_;
  Address end = address;
  for_each_word(address, size, [&](Address at) {
    *word_at(at) = stamp;
    end = at + sizeof(stamp);
  });
  if (end != address) written_[address] = {end, grain_of(size), stamp, false};
}

void BlockContents::throw_away(std::uint64_t pool, bool surely) {
  for (auto& [address, written] : written_) {
    if (written.stamp >> kPoolShift != pool) continue;
    if (surely) written.stamp = 0;
    written.may_be_zero = true;
  }
}

std::string BlockContents::wrong_word(Address at, std::uint64_t pool, const Written* written) const {
  const std::uint64_t word = *word_at(at);
  const auto said = [&](const std::string& expected) {
    return "at " + format_hex(at) + " stands " + text_of(word) + ", and not " + expected;
  };
  if (written != nullptr) {
    if (at % written->grain != 0) return "";
    if (word == written->stamp || (word == 0 && written->may_be_zero)) return "";
    return said(text_of(written->stamp));
  }
  if (word == 0 || word >> kPoolShift == pool) return "";
  if (with_patterns_ && word >> 56U == kPatternByte) return "";
  return said("zero or what pool " + std::to_string(pool) + " wrote");
}

std::string BlockContents::first_wrong(Address address, std::size_t size, std::uint64_t pool) const {
  auto next = written_.upper_bound(address);
  if (next != written_.begin() && std::prev(next)->second.end > address) --next;
  std::string wrong;
  for_each_word(address, size, [&](Address at) {
    if (!wrong.empty()) return;
    while (next != written_.end() && next->second.end <= at) ++next;
    const bool is_written = next != written_.end() && next->first <= at;
    wrong = wrong_word(at, pool, is_written ? &next->second : nullptr);
  });
  return wrong;
}

}  // namespace vmm::testing

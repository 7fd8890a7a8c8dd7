// Which stretches of a range were freed before which. Pure pages; it never knows
// what was freed, nor whether it is in use again. No lock.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>

#include "base/units.h"

namespace vmm {

// One entry a run of pages that were freed together: never more than there are pages.
class FreedOrder {
 public:
  explicit FreedOrder(std::size_t page_bytes) : page_(page_bytes) {}

  // All pages that the stretch touches count as freed now. REQUIRES: not empty.
  void note(ByteRange freed) {
    const std::size_t first = freed.offset / page_;
    const std::size_t end = (freed.end() - 1) / page_ + 1;
    // What is taken and freed over and over is a run already.
    if (const auto same = runs_.find(first); same != runs_.end() && same->second.end == end) {
      same->second.when = ++latest_;
      return;
    }
    cut(first);
    cut(end);
    runs_.erase(runs_.lower_bound(first), runs_.lower_bound(end));
    runs_[first] = {end, ++latest_};
  }
  // The latest of these moments; 0: nothing there was freed yet.
  [[nodiscard]] std::uint64_t newest(ByteRange range) const {
    std::uint64_t newest = 0;
    const std::size_t first = range.offset / page_;
    auto run = runs_.upper_bound(first);
    if (run != runs_.begin() && std::prev(run)->second.end > first) --run;
    for (; run != runs_.end() && run->first * page_ < range.end(); ++run) newest = std::max(newest, run->second.when);
    return newest;
  }
  // The same: it is a Pool::FreedAt.
  std::uint64_t operator()(ByteRange range) const { return newest(range); }
  [[nodiscard]] std::size_t runs() const { return runs_.size(); }

 private:
  struct Run {
    std::size_t end = 0;  // page behind its last
    std::uint64_t when = 0;
  };
  // Makes a run end, and the next one begin, at `page`.
  void cut(std::size_t page) {
    auto run = runs_.lower_bound(page);
    if (run == runs_.begin()) return;
    --run;
    if (run->second.end <= page) return;
    runs_[page] = run->second;
    run->second.end = page;
  }

  std::size_t page_;
  std::uint64_t latest_ = 0;
  std::map<std::size_t, Run> runs_;  // by first page
};

}  // namespace vmm

#include "core/streams/recorded_uses.h"

#include <algorithm>
#include <utility>

namespace vmm {

void RecordedUses::add(std::uint32_t* list, const StreamUse& use) {
  if (*list == 0) {
    if (unused_.empty()) {
      // end() never has to ask for memory.
      if (unused_.capacity() == lists_.size()) unused_.reserve(2 * lists_.size() + 1);
      lists_.emplace_back();
      unused_.push_back(static_cast<std::uint32_t>(lists_.size()));
    }
    lists_[unused_.back() - 1].push_back(use);
    *list = unused_.back();
    unused_.pop_back();
    return;
  }
  auto& uses = lists_[*list - 1];
  if (std::find(uses.begin(), uses.end(), use) == uses.end()) uses.push_back(use);
}

void RecordedUses::end(std::uint32_t* list) {
  lists_[*list - 1].clear();
  unused_.push_back(std::exchange(*list, 0));
  if (size() != 0 || lists_.size() <= kMostKept) return;
  lists_ = {};
  unused_ = {};
}

}  // namespace vmm

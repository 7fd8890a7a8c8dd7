// Lists of streams by number, against a map.
#include "core/streams/recorded_uses.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <vector>

#include "cpp/lab.h"

namespace vmm::testing {
namespace {

TEST(RecordedUses, EachListIsItsBlocksOwnUntilItEnds) {
  RecordedUses uses;
  std::map<std::uint32_t, std::vector<StreamUse>> model;
  std::mt19937 random(3);
  for (int step = 0; step < 5000; ++step) {
    const StreamUse use{nullptr, stream(1 + random() % 5), StreamKind::permanent};
    if (model.empty() || random() % 3 == 0) {
      std::uint32_t list = 0;
      uses.add(&list, use);
      ASSERT_NE(list, 0U);
      ASSERT_TRUE(model.emplace(list, std::vector{use}).second) << "list " << list << " is another's";
      continue;
    }
    const auto at = std::next(model.begin(), random() % static_cast<unsigned>(model.size()));
    std::uint32_t list = at->first;
    if (random() % 3 == 0) {
      uses.end(&list);
      ASSERT_EQ(list, 0U);
      model.erase(at);
      continue;
    }
    uses.add(&list, use);
    ASSERT_EQ(list, at->first);
    if (std::find(at->second.begin(), at->second.end(), use) == at->second.end()) at->second.push_back(use);
    ASSERT_EQ(uses.of(list), at->second) << "each stream once";
  }
}

}  // namespace
}  // namespace vmm::testing

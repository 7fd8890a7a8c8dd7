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

TEST(RecordedUses, ABurstOfThemLeavesLittle) {
  RecordedUses uses;
  std::vector<std::uint32_t> lists(5000, 0);
  for (std::uint32_t& list : lists) uses.add(&list, {nullptr, stream(1), StreamKind::permanent});
  EXPECT_EQ(uses.size(), lists.size());
  for (std::uint32_t& list : lists) uses.end(&list);
  EXPECT_EQ(uses.size(), 0U);
  std::uint32_t list = 0;
  uses.add(&list, {nullptr, stream(1), StreamKind::permanent});
  EXPECT_EQ(list, 1U) << "from the first again";
}

// A graph's checkpoint is put back while blocks have streams recorded.
TEST(RecordedUses, WhatARestoreFreesHasNoneAnyMore) {
  Lab lab;
  const auto part = lab.memory().create_part(lab.pool("a"), RegionId{7, 0}, false);
  part->pin();
  const PoolCheckpoint none = part->checkpoint();
  std::vector<Address> freed;
  std::vector<Address> allocated;
  for (int round = 0; round < 3; ++round) {
    part->record_stream(lab.memory().allocate(*part, 5 * kMiB, stream(0x1000)), stream(0x2000));
    part->restore(none, &freed, &allocated);
    lab.memory().check();  // counts the lists
  }
}

}  // namespace
}  // namespace vmm::testing

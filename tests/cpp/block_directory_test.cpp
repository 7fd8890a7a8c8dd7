// The directory against a std::map, and read while it is written.
#include "core/blocks/block_directory.h"

#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "core/blocks/block_arena.h"

namespace vmm::testing {
namespace {

struct Made {
  Block* at(std::size_t offset, bool small) {
    Block* block = arena.make();
    block->offset = offset;
    block->set_size(small ? 512 : 2 * kMiB);
    block->small = small;
    return block;
  }
  BlockArena arena;
};

TEST(BlockDirectory, FindsWhatBeginsAtAnOffsetAndNothingElse) {
  for (unsigned seed = 0; seed < 10; ++seed) {
    std::mt19937_64 random(seed);
    constexpr std::size_t kCapacity = 64 * kMiB;
    BlockDirectory directory(kCapacity);
    Made made;
    std::map<std::size_t, Block*> model;
    for (int step = 0; step < 20000; ++step) {
      // Crowded pages and lone blocks, small ones and large ones side by side.
      const std::size_t page = random() % 32;
      const std::size_t unit = page % 4 == 0 ? random() % 4096 : random() % 3 * 1300;
      const std::size_t offset = page * 2 * kMiB + unit * 512;
      const auto known = model.find(offset);
      if (known == model.end() && random() % 2 == 0) {
        Block* block = made.at(offset, /*small=*/page % 4 == 0);
        directory.insert(block);
        model.emplace(offset, block);
      } else if (random() % 2 == 0) {
        Block* const found = directory.find(offset);
        const bool begins_there = found != nullptr && found->offset == offset;
        ASSERT_EQ(begins_there ? found : nullptr, known == model.end() ? nullptr : known->second);
        if (begins_there) directory.remove(found);
        if (known != model.end()) model.erase(known);
      }
      Block* const found = directory.find(offset);
      const auto now = model.find(offset);
      if (now != model.end()) {
        ASSERT_EQ(found, now->second) << offset;
      } else {
        // Perhaps the lone block of that page, which begins elsewhere.
        ASSERT_TRUE(found == nullptr || found->offset != offset) << offset;
      }
      ASSERT_EQ(directory.size(), model.size());
    }
    std::vector<const Block*> in_order;
    directory.for_each([&](const Block* block) { in_order.push_back(block); });
    ASSERT_EQ(in_order.size(), model.size());
    auto expected = model.begin();
    for (const Block* block : in_order) EXPECT_EQ(block, (expected++)->second);
  }
}

TEST(BlockDirectory, AnswersWhoeverOwnsABlockWhileOthersComeAndGo) {
  BlockDirectory directory(8 * kMiB);
  Made made;
  // One in each kind of page: alone, among a few, in a table.
  std::vector<Block*> mine = {made.at(0, false), made.at(2 * kMiB + 512, false), made.at(4 * kMiB + 1024, true)};
  for (Block* block : mine) directory.insert(block);
  std::atomic<bool> stop{false};
  std::thread reader([&] {
    while (!stop.load(std::memory_order_relaxed)) {
      for (Block* block : mine) ASSERT_EQ(directory.find(block->offset), block);
    }
  });
  std::vector<Block*> others = {made.at(kMiB + 512, false), made.at(2 * kMiB + kMiB, false), made.at(4 * kMiB, true),
                                made.at(5 * kMiB, true)};
  for (int round = 0; round < 2000; ++round) {
    for (Block* block : others) directory.insert(block);
    for (Block* block : others) {
      ASSERT_EQ(directory.find(block->offset), block);
      directory.remove(block);
    }
  }
  stop = true;
  reader.join();
}

}  // namespace
}  // namespace vmm::testing

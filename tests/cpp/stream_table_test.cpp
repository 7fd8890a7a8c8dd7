// A pool's tags for streams, and where they end.
#include "core/backing/stream_table.h"

#include <gtest/gtest.h>

#include <set>

#include "cpp/lab.h"

namespace vmm::testing {
namespace {

StreamTag tag_of(StreamTable& table, std::uintptr_t name) { return table.tag_of(stream(name), /*is_alive=*/false); }

TEST(StreamTable, MoreStreamsThanItHasTagsAreRefusedUntilOneHasNoBlocks) {
  Lab lab;
  StreamTable table(lab.memory().streams(), lab.memory().clock(), 100);
  std::set<StreamTag> tags;
  for (std::uintptr_t name = 1; name <= 100; ++name) {
    const StreamTag tag = tag_of(table, name);
    EXPECT_TRUE(tags.insert(tag).second && tag != kNeutral);
    ++table[tag].blocks;
  }
  EXPECT_THROW(tag_of(table, 101), VmmError);
  EXPECT_EQ(tag_of(table, 50), tag_of(table, 50)) << "those that it knows go on";
  const StreamTag free = tag_of(table, 70);
  table.block_freed(free, kLongAgo);
  EXPECT_EQ(tag_of(table, 101), free);
  EXPECT_EQ(table[free].stream, stream(101));
}

// Its free space may be what the GPU has made it wait for.
TEST(StreamTable, AStreamKeepsItsTagUntilWhatItWaitsForIsDone) {
  Lab lab;
  lab.meet(stream(0x1000));
  Clock& clock = lab.memory().clock();
  StreamTable table(lab.memory().streams(), clock, 100);
  for (std::uintptr_t name = 1; name <= 70; ++name) ++table[table.tag_of(stream(name))].blocks;
  const StreamTag waits = tag_of(table, 70);
  table.block_freed(waits, kLongAgo);
  lab.driver.hold_fences(stream(0x1000));
  ASSERT_TRUE(table.order_behind(waits, clock.now()).ok());
  const StreamTag next = tag_of(table, 71);
  EXPECT_NE(next, waits);
  ++table[next].blocks;
  lab.driver.release_fences();
  EXPECT_EQ(tag_of(table, 72), waits);
}

}  // namespace
}  // namespace vmm::testing

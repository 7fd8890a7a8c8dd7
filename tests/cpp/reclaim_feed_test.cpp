// What the ladder decides reaches whoever follows it, and waits for nobody.
#include <gtest/gtest.h>

#include <atomic>
#include <optional>
#include <thread>

#include "core/device/reclaim_feed.h"
#include "cpp/reclaim_lab.h"

namespace vmm::testing {
namespace {

class ReclaimFeedOf : public Reclaim {
 protected:
  ~ReclaimFeedOf() override { feed_.end(); }
  static ReclaimDecision of_bytes(std::size_t bytes) {
    ReclaimDecision decision;
    decision.requested = bytes;
    return decision;
  }
  ReclaimFeed& feed_ = ReclaimFeed::instance();
};

TEST_F(ReclaimFeedOf, TellsWhatWasMetAndWhatWasRefused) {
  const auto a = model("a");
  const auto b = model("b");
  lab_.leave_idle(*b, 32 * kMiB);
  feed_.follow();
  lab_.allocate(*a, 20 * kMiB);
  EXPECT_THROW(lab_.allocate(*a, 20 * kMiB), OutOfMemoryError);
  const std::optional<ReclaimFeed::Told> met = feed_.take();
  const std::optional<ReclaimFeed::Told> refused = feed_.take();
  EXPECT_TRUE(met->decision.is_met());
  EXPECT_EQ(met->decision.asker, "a");
  EXPECT_EQ(met->kind, lab_.driver.name());
  EXPECT_EQ(met->lost, 0U);
  EXPECT_FALSE(refused->decision.is_met());
}

TEST_F(ReclaimFeedOf, KeepsNothingThatNobodyFollows) {
  feed_.put(of_bytes(1), lab_.driver, 0);
  feed_.follow();
  feed_.put(of_bytes(2), lab_.driver, 0);
  EXPECT_EQ(feed_.take()->decision.requested, 2U);
  feed_.put(of_bytes(3), lab_.driver, 0);
  feed_.end();
  feed_.follow();
  feed_.put(of_bytes(4), lab_.driver, 0);
  EXPECT_EQ(feed_.take()->decision.requested, 4U);
}

TEST_F(ReclaimFeedOf, LosesTheOldestAndSaysHowMany) {
  feed_.follow();
  for (std::size_t k = 0; k < ReclaimFeed::kMost + 3; ++k) feed_.put(of_bytes(k), lab_.driver, 0);
  const std::optional<ReclaimFeed::Told> first = feed_.take();
  EXPECT_EQ(first->decision.requested, 3U);
  EXPECT_EQ(first->lost, 3U);
  EXPECT_EQ(feed_.take()->lost, 0U);
}

TEST_F(ReclaimFeedOf, EndsForWhoeverWaits) {
  feed_.follow();
  std::atomic<bool> has_taken{false};
  std::thread follower([&] {
    EXPECT_EQ(feed_.take()->decision.requested, 7U);
    has_taken = true;
    EXPECT_FALSE(feed_.take().has_value());
  });
  feed_.put(of_bytes(7), lab_.driver, 0);
  while (!has_taken) std::this_thread::yield();
  feed_.end();
  follower.join();
}

}  // namespace
}  // namespace vmm::testing

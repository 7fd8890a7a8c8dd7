// Whom a request asks before it takes of the margin, and what its neighbours notice of it: who
// cannot give is not looked through, and nobody waits for anybody else's queued work.
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lab.h"

namespace vmm::testing {
namespace {

class MarginNeighbours : public ::testing::Test {
 protected:
  static constexpr std::size_t kLimit = 200 * 8 * kMiB;  // a unit is 8 MiB
  static constexpr std::size_t kMargin = kLimit / 32;
  static constexpr std::size_t kLarge = 16 * kGiB;  // and here 16
  static inline const Stream kOfA = stream(0x10);
  static inline const Stream kOfB = stream(0x20);

  std::shared_ptr<Pool> model(const std::string& name, int priority = 0, std::size_t floor = 0, std::size_t page = 0) {
    PoolSpec spec = Lab::spec(name);
    spec.capacity = 16 * kGiB;
    spec.priority = priority;
    spec.floor = floor;
    spec.page_size = page;
    return lab_.pool(spec, group_.get());
  }
  Address get(Pool& pool, std::size_t bytes, Stream on = nullptr) {
    const Address address = lab_.memory().allocate(pool, bytes, on);
    lab_.adopt(address);
    return address;
  }
  void drop(Address address) {
    lab_.forget(address);
    EXPECT_TRUE(DeviceMemory::free(lab_.space, address));
  }
  // All of the limit but its margin and what floors reserved.
  void fill(Pool& pool, const Budget& limit) {
    const std::size_t free = limit.limit() - limit.used() - limit.reserved();
    get(pool, align_down(free - limit.limit() / 32, 16 * kMiB));
  }
  static std::size_t walks(const std::vector<std::shared_ptr<Pool>>& pools) {
    std::size_t all = 0;
    for (const auto& each : pools) all += each->times_walked();
    return all;
  }
  std::uint64_t waits() { return lab_.driver.count(Call::wait) + lab_.driver.count(Call::synchronize); }

  // a frees what it had while `obstacle` stands, b asks for a little at the margin, and a for
  // what it had.
  void take_and_ask_again(const std::function<void()>& obstacle) {
    const auto a = model("a");
    const auto b = model("b");
    std::vector<Address> blocks;
    for (int k = 0; k < 20; ++k) blocks.push_back(get(*a, 24 * kMiB, kOfA));
    get(*b, 8 * kMiB, kOfB);
    get(*b, align_down(kLimit - kMargin - group_->used(), 8 * kMiB), kOfB);
    obstacle();
    for (const Address each : blocks) drop(each);
    for (int k = 0; k < 6; ++k) get(*b, 8 * kMiB, kOfB);
    int called = 0;
    lab_.memory().set_on_pressure(*group_, [&](std::size_t, const std::shared_ptr<Pool>&) {
      ++called;
      return false;
    });
    lab_.driver.clear_calls();
    for (int k = 0; k < 20; ++k) get(*a, 24 * kMiB, kOfA);
    lab_.memory().set_on_pressure(*group_, nullptr);
    EXPECT_EQ(called, 0) << "what a had is there";
    EXPECT_EQ(a->statistics().num_alloc_retries, 0);
    EXPECT_EQ(waits(), 0U);
    EXPECT_EQ(lab_.driver.count(Call::create), 0U);
  }

  Lab lab_{LabSpec{64 * kGiB}};
  const std::shared_ptr<Budget> group_ = lab_.memory().create_group("shared", kLimit);
};

TEST_F(MarginNeighbours, BesideEachOtherNobodyWaitsForTheOther) {
  const auto a = model("a");
  const auto b = model("b");
  get(*a, 64 * kMiB, kOfA);
  get(*b, 64 * kMiB, kOfB);
  // What is left below the margin does for one of the two steps.
  get(*a, align_down(kLimit - kMargin - group_->used() - 40 * kMiB, 8 * kMiB), kOfA);
  for (int step = 0; step < 6; ++step) {
    if (step == 3) lab_.driver.clear_calls();
    drop(get(*a, 32 * kMiB, kOfA));
    lab_.driver.hold_fences(kOfA);
    drop(get(*b, 32 * kMiB, kOfB));
    lab_.driver.release_fences(kOfA);
  }
  EXPECT_EQ(lab_.driver.count(Call::stream_wait), 0U);
  EXPECT_EQ(lab_.driver.count(Call::fill_async), 0U);
  EXPECT_EQ(lab_.driver.count(Call::map), 0U);
}

TEST_F(MarginNeighbours, InTurnOnOneStreamTheyHandOnWhatItsWorkStillUses) {
  const auto a = model("a");
  const auto b = model("b");
  get(*a, 64 * kMiB, kOfA);
  const Address of_a = get(*a, 256 * kMiB, kOfA);
  get(*b, align_down(kLimit - kMargin - group_->used(), 8 * kMiB), kOfA);
  lab_.driver.hold_fences(kOfA);
  drop(of_a);
  for (int k = 0; k < 8; ++k) get(*b, 32 * kMiB, kOfA);
  EXPECT_LE(group_->used(), kLimit - kMargin);
  lab_.driver.release_fences(kOfA);
}

TEST_F(MarginNeighbours, BesideACaptureNobodyLacksWhatItHad) {
  const Stream third = stream(0x30);
  lab_.meet(third);
  take_and_ask_again([&] { lab_.driver.begin_capture(third); });
  lab_.driver.end_capture(third);
}

TEST_F(MarginNeighbours, BesideAStreamWithoutFencesNobodyLacksWhatItHad) {
  lab_.memory().streams().set_census({[](std::vector<Stream>* out) {
                                        out->push_back(kOfA);
                                        out->push_back(kOfB);
                                      },
                                      [](Stream) { return false; }});
  take_and_ask_again([&] { lab_.meet(stream(0x30)); });
}

TEST_F(MarginNeighbours, WhoMayNotGiveTakesNobodysSeat) {
  lab_.memory().set_limit(*group_, kLarge);
  std::vector<std::shared_ptr<Pool>> floored;
  for (int k = 0; k < 7; ++k) floored.push_back(model("floored " + std::to_string(k), 0, 64 * kMiB));
  const auto idle = model("idle", 1);
  const auto b = model("b", 1);
  for (const auto& each : floored) lab_.leave_idle(*each, 64 * kMiB);
  lab_.leave_idle(*idle, 800 * kMiB);
  const std::size_t had = idle->physical_bytes();
  fill(*b, *group_);
  const std::size_t before = walks(floored);
  for (int k = 0; k < 10; ++k) get(*b, 16 * kMiB);
  EXPECT_GE(had - idle->physical_bytes(), 9 * 16 * kMiB);
  EXPECT_EQ(walks(floored), before);
}

TEST_F(MarginNeighbours, AFloorOfTheirSharedPoolCountsAsTheirs) {
  Budget& device = lab_.memory().budget();
  lab_.memory().set_limit(device, kLarge);
  lab_.memory().set_limit(*group_, kUnlimited);
  const auto other = lab_.memory().create_group("other", kUnlimited);
  lab_.memory().set_floor(*other, 9 * 256 * kMiB);
  std::vector<std::shared_ptr<Pool>> floored;
  for (int k = 0; k < 8; ++k) {
    PoolSpec spec = Lab::spec("floored " + std::to_string(k));
    spec.capacity = 8 * kGiB;
    floored.push_back(lab_.pool(spec, other.get()));
    lab_.leave_idle(*floored.back(), 288 * kMiB);
  }
  const auto idle = model("idle");
  const auto b = model("b");
  lab_.leave_idle(*idle, 256 * kMiB);
  const std::size_t had = idle->physical_bytes();
  fill(*b, device);
  for (int k = 0; k < 10; ++k) get(*b, 16 * kMiB);
  EXPECT_GE(had - idle->physical_bytes(), 9 * 16 * kMiB);
  EXPECT_EQ(other->used(), 8 * 288 * kMiB);
}

TEST_F(MarginNeighbours, WhatAFloorKeepsIsLookedThroughOnce) {
  lab_.memory().set_limit(*group_, kLarge);
  const auto a = model("a", 0, 2 * kGiB - 32 * kMiB, 64 * kMiB);  // 32 above it, of which no chunk is
  const auto b = model("b");
  lab_.leave_idle(*a, 2 * kGiB);
  fill(*b, *group_);
  get(*b, 64 * kMiB);
  const std::size_t before = a->times_walked();
  for (int k = 0; k < 5; ++k) get(*b, 64 * kMiB);
  EXPECT_EQ(a->times_walked(), before);
  EXPECT_EQ(a->physical_bytes(), 2 * kGiB);
}

TEST_F(MarginNeighbours, AnEmptiedPoolIsLookedThroughAnew) {
  const auto a = model("a");
  const auto b = model("b");
  get(*b, 32 * kMiB);
  std::vector<Address> live;
  std::vector<Address> freed;
  live.push_back(get(*a, 64 * kMiB));
  std::size_t of_live = 64 * kMiB;
  for (int k = 0; k < 16; ++k) {
    live.push_back(get(*a, 9 * kMiB));
    freed.push_back(get(*a, 7 * kMiB));
    of_live += 9 * kMiB;
  }
  const std::size_t of_freed = 16 * 7 * kMiB;
  for (const Address each : freed) drop(each);
  while (const std::size_t left = a->idle_bytes()) {
    live.push_back(get(*a, left));
    of_live += left;
  }
  get(*b, align_down(kLimit - kMargin - group_->used(), 8 * kMiB));
  const Address probe = get(*b, 8 * kMiB);
  for (const Address each : live) drop(each);
  lab_.memory().trim(*a, 0);
  ASSERT_EQ(a->physical_bytes(), 0U);
  drop(probe);
  // As much was freed and is live as at the latest look, and much is idle now.
  get(*a, of_live);
  lab_.leave_idle(*a, of_freed);
  for (int k = 0; k < 4; ++k) get(*b, 24 * kMiB);
  EXPECT_LE(group_->used(), kLimit - kMargin);
}

TEST_F(MarginNeighbours, WhatAThreadKeepsSinceALookIsAskedFor) {
  const auto a = model("a");
  const auto b = model("b");
  get(*b, 32 * kMiB);
  std::vector<Address> freed;
  get(*a, 64 * kMiB);
  for (int k = 0; k < 16; ++k) {  // holes that hold no chunk
    get(*a, 9 * kMiB);
    freed.push_back(get(*a, 7 * kMiB));
  }
  for (const Address each : freed) drop(each);
  get(*a, 8 * kMiB);
  while (a->idle_bytes() >= 8 * kMiB) get(*a, a->idle_bytes());
  get(*b, align_down(kLimit - kMargin - group_->used(), 8 * kMiB));
  const std::size_t before = a->times_walked();
  get(*b, 8 * kMiB);
  ASSERT_GT(a->times_walked(), before) << "no look";
  lab_.memory().set_limit(*group_, kLimit + 40 * 8 * kMiB);
  drop(get(*a, 64 * kMiB));  // as much is live as before, and as much came back
  const std::size_t open = group_->limit() - group_->limit() / 32;
  get(*b, align_down(open - group_->used(), 8 * kMiB));
  for (int k = 0; k < 4; ++k) get(*b, 8 * kMiB);
  EXPECT_LE(group_->used(), open);
}

TEST_F(MarginNeighbours, WhatARecordedStreamHasDoneWithIsAskedFor) {
  lab_.meet(kOfB);
  const auto a = model("a");
  const auto b = model("b");
  get(*b, 32 * kMiB, kOfA);
  get(*a, 64 * kMiB, kOfA);
  const Address block = get(*a, 64 * kMiB, kOfA);
  get(*b, align_down(kLimit - kMargin - group_->used(), 8 * kMiB), kOfA);
  lab_.driver.hold_fences(kOfB);
  a->record_stream(block, kOfB, nullptr);
  drop(block);
  get(*b, 8 * kMiB, kOfA);  // nothing is idle yet
  lab_.driver.release_fences(kOfB);
  const std::size_t had = a->physical_bytes();
  for (int k = 0; k < 4; ++k) get(*b, 8 * kMiB, kOfA);
  EXPECT_LE(a->physical_bytes() + 32 * kMiB, had);
}

}  // namespace
}  // namespace vmm::testing

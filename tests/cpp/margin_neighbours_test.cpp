// What a request at the margin of a limit is to its neighbours: nobody waits for anybody else's
// queued work, and nobody lacks what it had.
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "margin_lab.h"

namespace vmm::testing {
namespace {

class MarginNeighbours : public MarginLab {
 protected:
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

}  // namespace
}  // namespace vmm::testing

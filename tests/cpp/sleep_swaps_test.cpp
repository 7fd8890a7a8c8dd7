// Models that change places: within one limit, whatever stops them, and not begun where there is
// no room.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cpp/sleep_lab.h"

namespace vmm::testing {
namespace {

// Two models in the room of one: `a` sleeps, `b` is awake.
class SleepSwaps : public Sleep {
 protected:
  SleepSwaps() {
    of_a_ = fill(*a_);
    sleep(a_, host());
    of_b_ = fill(*b_);
  }

  const std::shared_ptr<Budget> group_ = lab_.memory().create_group("shared", 128 * kMiB);
  const std::shared_ptr<Pool> a_ = lab_.pool(Lab::spec("a"), group_.get());
  const std::shared_ptr<Pool> b_ = lab_.pool(Lab::spec("b"), group_.get());
  std::vector<Live> of_a_;
  std::vector<Live> of_b_;
};

TEST_F(SleepSwaps, ASwapNeedsNoMoreThanTheLimit) {
  for (int turn = 0; turn < 3; ++turn) {
    const auto& [out, in] = turn % 2 == 0 ? std::pair(b_, a_) : std::pair(a_, b_);
    go(*swapping(out, in, host()));
    lab_.memory().check();
    EXPECT_TRUE(out->is_asleep());
    EXPECT_FALSE(in->is_asleep());
    EXPECT_LE(group_->used(), 128 * kMiB);
    expect_whole(turn % 2 == 0 ? of_a_ : of_b_);
  }
  wake(a_->is_asleep() ? b_ : a_);
}

TEST_F(SleepSwaps, ASwapThatIsStoppedLeavesBothAsTheyWere) {
  for (int at = 1; at < 30; ++at) {
    const auto swap = swapping(b_, a_, host());
    try {
      go(*swap, stops_at(at));
      break;
    } catch (const VmmError&) {
    }
    lab_.memory().check();
    ASSERT_TRUE(a_->is_asleep()) << at;
    ASSERT_FALSE(b_->is_asleep()) << at;
    expect_whole(of_b_);
  }
  EXPECT_FALSE(a_->is_asleep());
  expect_whole(of_a_);
}

// What could not come though the other had gone whole is refused before anything moves.
class SwapWithoutRoom : public Sleep {
 protected:
  // `in` sleeps and wants 40 MiB of the 64; `out` could give 20.
  void one_sleeps(bool release = false) {
    of_in_ = one_of(*in_, 40 * kMiB);
    sleep(in_, host(), release);
    one_of(*out_, 20 * kMiB);
  }
  std::shared_ptr<Pool> model(const std::string& name) { return lab_.pool(Lab::spec(name), group_.get()); }
  std::vector<Live> one_of(Pool& pool, std::size_t bytes) {
    const Live live{lab_.allocate(pool, bytes), bytes, 7};
    Lab::fill(live.address, bytes, live.seed);
    return {live};
  }
  void expect_refused(std::size_t available) {
    const std::uint64_t copies = lab_.driver.count(Call::copy_async);
    try {
      swapping(out_, in_, host())->begin(&look_away);
      ADD_FAILURE() << "begun";
    } catch (const OutOfMemoryError& error) {
      EXPECT_EQ(error.requested, 40 * kMiB);
      EXPECT_EQ(error.available, available) << error.what();
      EXPECT_EQ(error.pool, in_->name());
    }
    EXPECT_EQ(lab_.driver.count(Call::copy_async), copies);
    EXPECT_FALSE(out_->is_asleep());
    EXPECT_TRUE(in_->is_asleep());
  }
  void expect_swapped() {
    go(*swapping(out_, in_, host()));
    expect_whole(of_in_);
  }

  const std::shared_ptr<Budget> group_ = lab_.memory().create_group("shared", 64 * kMiB);
  const std::shared_ptr<Pool> in_ = model("in");
  const std::shared_ptr<Pool> out_ = model("out");
  std::vector<Live> of_in_;
};

TEST_F(SwapWithoutRoom, OthersHoldIt) {
  one_sleeps();
  const auto third = model("third");
  const Address held = lab_.allocate(*third, 30 * kMiB);
  expect_refused(34 * kMiB);
  lab_.free(held);
  expect_swapped();
  wake(out_);
}

TEST_F(SwapWithoutRoom, FloorsReserveIt) {
  one_sleeps();
  lab_.memory().set_floor(*out_, 26 * kMiB);
  expect_refused(38 * kMiB);
  const auto third = model("third");
  lab_.memory().set_floor(*out_, 0);
  lab_.memory().set_floor(*third, 26 * kMiB);
  expect_refused(38 * kMiB);
  lab_.memory().set_floor(*third, 24 * kMiB);
  expect_swapped();
}

TEST_F(SwapWithoutRoom, ItsOwnLimitIsTooLow) {
  one_sleeps();
  lab_.memory().set_limit(in_->budget(), 30 * kMiB);
  expect_refused(30 * kMiB);
  lab_.memory().set_limit(in_->budget(), kUnlimited);
  expect_swapped();
}

TEST_F(SwapWithoutRoom, TheDeviceHasNoMore) {
  one_sleeps(/*release=*/true);
  const auto beside = lab_.pool("beside");
  const Address held = lab_.allocate(*beside, 970 * kMiB);
  const std::size_t available = kGiB - 970 * kMiB;
  ASSERT_GE(available, 40 * kMiB);
  const Address more = lab_.allocate(*beside, available - 36 * kMiB);
  expect_refused(36 * kMiB);
  lab_.free(more);
  expect_swapped();
  lab_.free(held);
}

// What others could still give counts, and so does what a function of the user's gives up.
TEST_F(SwapWithoutRoom, WhoeverCanGiveIsAskedFirst) {
  one_sleeps();
  const auto third = model("third");
  Address held = lab_.allocate(*third, 30 * kMiB);
  lab_.memory().set_on_pressure(*group_, [&](std::size_t bytes, const std::shared_ptr<Pool>& asker) {
    EXPECT_EQ(bytes, 40 * kMiB);
    EXPECT_EQ(asker, in_);
    if (held != 0) lab_.free(std::exchange(held, 0));
    return held == 0;
  });
  expect_swapped();
  lab_.memory().set_on_pressure(*group_, nullptr);
}

}  // namespace
}  // namespace vmm::testing

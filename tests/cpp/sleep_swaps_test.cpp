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

TEST_F(Sleep, ASwapNeedsNoMoreThanTheLimit) {
  const auto group = lab_.memory().create_group("shared", 128 * kMiB);
  const auto a = lab_.pool(Lab::spec("a"), group.get());
  const auto b = lab_.pool(Lab::spec("b"), group.get());
  const std::vector<Live> of_a = fill(*a);
  sleep(a, host());
  const std::vector<Live> of_b = fill(*b);
  for (int turn = 0; turn < 3; ++turn) {
    const auto& [out, in] = turn % 2 == 0 ? std::pair(b, a) : std::pair(a, b);
    Transfer swap(std::make_unique<Departure>(sleeper_, std::vector<PartToSleep>{{out, host()}}, false),
                  std::make_unique<Arrival>(sleeper_, PoolList{in}, Arrival::Memory::by_piece));
    go(swap);
    lab_.memory().check();
    EXPECT_TRUE(out->is_asleep());
    EXPECT_FALSE(in->is_asleep());
    EXPECT_LE(group->used(), 128 * kMiB);
    expect_whole(turn % 2 == 0 ? of_a : of_b);
  }
  wake(a->is_asleep() ? b : a);
}

TEST_F(Sleep, ASwapThatIsStoppedLeavesBothAsTheyWere) {
  const auto group = lab_.memory().create_group("shared", 128 * kMiB);
  const auto a = lab_.pool(Lab::spec("a"), group.get());
  const auto b = lab_.pool(Lab::spec("b"), group.get());
  const std::vector<Live> of_a = fill(*a);
  sleep(a, host());
  const std::vector<Live> of_b = fill(*b);
  for (int at = 1; at < 30; ++at) {
    Transfer swap(std::make_unique<Departure>(sleeper_, std::vector<PartToSleep>{{b, host()}}, false),
                  std::make_unique<Arrival>(sleeper_, PoolList{a}, Arrival::Memory::by_piece));
    int calls = 0;
    try {
      go(swap, [&] {
        if (++calls == at) throw VmmError("stopped");
      });
      break;
    } catch (const VmmError&) {
    }
    lab_.memory().check();
    ASSERT_TRUE(a->is_asleep()) << at;
    ASSERT_FALSE(b->is_asleep()) << at;
    expect_whole(of_b);
  }
  EXPECT_FALSE(a->is_asleep());
  expect_whole(of_a);
}

// What could not come though the other had gone whole is refused before anything moves.
class SwapWithoutRoom : public Sleep {
 protected:
  std::unique_ptr<Transfer> swap(const std::shared_ptr<Pool>& out, const std::shared_ptr<Pool>& in) {
    return std::make_unique<Transfer>(
        std::make_unique<Departure>(sleeper_, std::vector<PartToSleep>{{out, host()}}, false),
        std::make_unique<Arrival>(sleeper_, PoolList{in}, Arrival::Memory::by_piece));
  }
  std::shared_ptr<Pool> model(const std::string& name, std::size_t floor = 0) {
    PoolSpec spec = Lab::spec(name);
    spec.floor = floor;
    return lab_.pool(spec, group_.get());
  }
  std::vector<Live> one_of(Pool& pool, std::size_t bytes) {
    const Live live{lab_.allocate(pool, bytes), bytes, 7};
    Lab::fill(live.address, bytes, live.seed);
    return {live};
  }
  void expect_refused(const std::shared_ptr<Pool>& out, const std::shared_ptr<Pool>& in, std::size_t available) {
    const std::uint64_t copies = lab_.driver.count(Call::copy_async);
    try {
      swap(out, in)->begin(&look_away);
      ADD_FAILURE() << "begun";
    } catch (const OutOfMemoryError& error) {
      EXPECT_EQ(error.requested, 40 * kMiB);
      EXPECT_EQ(error.available, available) << error.what();
      EXPECT_EQ(error.pool, in->name());
    }
    EXPECT_EQ(lab_.driver.count(Call::copy_async), copies);
    EXPECT_FALSE(out->is_asleep());
    EXPECT_TRUE(in->is_asleep());
  }

  const std::shared_ptr<Budget> group_ = lab_.memory().create_group("shared", 64 * kMiB);
};

TEST_F(SwapWithoutRoom, OthersHoldIt) {
  const auto in = model("in");
  const std::vector<Live> of_in = one_of(*in, 40 * kMiB);
  sleep(in, host());
  const auto out = model("out");
  const auto third = model("third");
  one_of(*out, 20 * kMiB);
  const Address held = lab_.allocate(*third, 30 * kMiB);
  expect_refused(out, in, 34 * kMiB);
  lab_.free(held);
  go(*swap(out, in));
  expect_whole(of_in);
  wake(out);
}

TEST_F(SwapWithoutRoom, FloorsReserveIt) {
  const auto in = model("in");
  const std::vector<Live> of_in = one_of(*in, 40 * kMiB);
  sleep(in, host());
  const auto out = model("out");
  one_of(*out, 20 * kMiB);
  lab_.memory().set_floor(*out, 26 * kMiB);
  expect_refused(out, in, 38 * kMiB);
  const auto third = model("third");
  lab_.memory().set_floor(*out, 0);
  lab_.memory().set_floor(*third, 26 * kMiB);
  expect_refused(out, in, 38 * kMiB);
  lab_.memory().set_floor(*third, 24 * kMiB);
  go(*swap(out, in));
  expect_whole(of_in);
}

TEST_F(SwapWithoutRoom, ItsOwnLimitIsTooLow) {
  const auto in = model("in");
  const std::vector<Live> of_in = one_of(*in, 40 * kMiB);
  sleep(in, host());
  const auto out = model("out");
  one_of(*out, 20 * kMiB);
  lab_.memory().set_limit(in->budget(), 30 * kMiB);
  expect_refused(out, in, 30 * kMiB);
  lab_.memory().set_limit(in->budget(), kUnlimited);
  go(*swap(out, in));
  expect_whole(of_in);
}

TEST_F(SwapWithoutRoom, TheDeviceHasNoMore) {
  const auto in = model("in");
  const std::vector<Live> of_in = one_of(*in, 40 * kMiB);
  sleep(in, host(), /*release=*/true);
  const auto out = model("out");
  one_of(*out, 20 * kMiB);
  const auto beside = lab_.pool("beside");
  const Address held = lab_.allocate(*beside, 970 * kMiB);
  const std::size_t available = kGiB - 970 * kMiB;
  ASSERT_GE(available, 40 * kMiB);
  const Address more = lab_.allocate(*beside, available - 36 * kMiB);
  expect_refused(out, in, 36 * kMiB);
  lab_.free(more);
  go(*swap(out, in));
  expect_whole(of_in);
  lab_.free(held);
}

// What others could still give counts, and so does what a function of the user's gives up.
TEST_F(SwapWithoutRoom, WhoeverCanGiveIsAskedFirst) {
  const auto in = model("in");
  const std::vector<Live> of_in = one_of(*in, 40 * kMiB);
  sleep(in, host());
  const auto out = model("out");
  const auto third = model("third");
  one_of(*out, 20 * kMiB);
  Address held = lab_.allocate(*third, 30 * kMiB);
  lab_.memory().set_on_pressure(*group_, [&](std::size_t bytes, const std::shared_ptr<Pool>& asker) {
    EXPECT_EQ(bytes, 40 * kMiB);
    EXPECT_EQ(asker, in);
    if (held != 0) lab_.free(std::exchange(held, 0));
    return held == 0;
  });
  go(*swap(out, in));
  lab_.memory().set_on_pressure(*group_, nullptr);
  expect_whole(of_in);
}

}  // namespace
}  // namespace vmm::testing

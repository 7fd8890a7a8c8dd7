// Models that sleep under the order checker: programs that random runs found, shrunk, and who
// waits for the copies.
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "core/device/device_memory.h"
#include "core/memory/address_space.h"
#include "driver/host_driver.h"
#include "support/scripted_driver.h"
#include "support/stepped_transfer.h"
#include "support/stream_program.h"
#include "support/stream_world.h"

namespace vmm::testing {
namespace {

using Kind = StreamOp::Kind;

void expect_kept(const std::vector<StreamOp>& program) { EXPECT_NO_THROW(run_stream_program(program)); }

// -- Found by random programs

// Two chunks that need not come back: their addresses are bare, and one.
TEST(StreamSleep, AddressesThatStayBareAreOne) {
  expect_kept({{Kind::open_mempool, 3, 1},
               {Kind::enter_mempool, 3},
               {Kind::allocate, 6, 0, 6},
               {Kind::sleep, 6, 0, 4},
               {Kind::go_on, 1},
               {Kind::free},
               {Kind::wake, 6, 0, 2}});
}

// -- Each way that memory goes

// Three models in the room of one, step by step, and others that allocate between the steps.
TEST(StreamSleep, ModelsThatTakeTurnsKeepWhatTheyHold) {
  for (std::uint64_t looks = 1; looks < 8; ++looks) {
    SCOPED_TRACE(looks);
    expect_kept({{Kind::group_limit, 0, 24 * kMiB},
                 {Kind::allocate, 0, 12 * kMiB, 1},
                 {Kind::use, kNewest, 1, kUseWrites},
                 {Kind::use, kNewest, 2, kUseIsLong},
                 {Kind::sleep, 0, 3 + 24, looks},
                 {Kind::allocate, 1, 8 * kMiB, 2},
                 {Kind::go_on, 0, looks},
                 {Kind::use, kNewest, 2, kUseWrites},
                 {Kind::go_on},
                 {Kind::allocate, 1, 8 * kMiB, 2},
                 {Kind::use, kNewest, 2, kUseWrites},
                 {Kind::swap, 1, 0, 3, looks},
                 {Kind::allocate, 2, 4 * kMiB, 3},
                 {Kind::go_on, 0, looks},
                 {Kind::use, kNewest, 3, kUseWrites},
                 {Kind::free, kNewest},
                 {Kind::go_on},
                 {Kind::use, 0, 3},
                 {Kind::swap, 0, 1, 0, looks},
                 {Kind::go_on, 0, looks, 1},
                 {Kind::wake, 0},
                 {Kind::use, 0, 1},
                 {Kind::use, 1, 1}});
  }
}

// Weights go and the rest stays; then the rest goes too, and all come back.
TEST(StreamSleep, ATagSleepsByItself) {
  expect_kept({{Kind::allocate, kTagOfFirst, 4 * kMiB, 1},
               {Kind::use, kNewest, 1, kUseWrites},
               {Kind::allocate, 0, 4 * kMiB, 1},
               {Kind::use, kNewest, 1, kUseWrites},
               {Kind::sleep, 0, 3 + 8},
               {Kind::use, kNewest, 2},
               {Kind::sleep, 0, 0 + 16},
               {Kind::wake, 0, 1},
               {Kind::use, 0, 2},
               {Kind::wake, 0},
               {Kind::use, kNewest, 2}});
}

// A graph may use what was freed of its pool whenever it is launched.
TEST(StreamSleep, AGraphsFreedMemoryComesBackWithIt) {
  expect_kept({{Kind::pin},
               {Kind::allocate, 4, 4 * kMiB, 1},
               {Kind::use, kNewest, 1, kUseWrites},
               {Kind::use, kNewest, 1},
               {Kind::free, kNewest},
               {Kind::launch_part, 1},
               {Kind::sleep, 3, 3},
               {Kind::launch_part, 2},
               {Kind::wake, 3},
               {Kind::launch_part, 2}});
}

// -- Nobody waits who need not

class SleepOrder : public ::testing::Test {
 protected:
  static constexpr std::size_t kLimit = 512 * kMiB;

  SleepOrder() : host_({2 * kMiB, kGiB, 1}), scripted_(host_), driver_(scripted_) {
    Options options;
    options.exportable = false;
    memory_ = std::make_unique<DeviceMemory>(driver_, space_, 0, options);
    for (const std::uintptr_t name : {0x10U, 0x20U, 0x30U}) {
      driver_.add_stream({stream(name), 0, false, "stream " + std::to_string(name)});
      memory_->streams().meet(stream(name));
    }
    sleeper_ = std::make_unique<Sleeper>(*memory_);
    group_ = memory_->create_group("group", kLimit);
    sleeps_ = pool("sleeps");
    other_ = pool("other");
    for (int k = 0; k < 5; ++k) {
      blocks_.push_back(memory_->allocate(*sleeps_, 60 * kMiB, stream(0x10)));
      driver_.hand_out(blocks_.back(), 60 * kMiB, {stream(0x10), 0}, 1);
      driver_.use({stream(0x10), 0}, blocks_.back(), 60 * kMiB, Use::write);
    }
  }
  ~SleepOrder() override {
    transfer_.reset();
    EXPECT_NO_THROW(driver_.check());
    for (const Address block : blocks_) {
      driver_.take_back(block);
      DeviceMemory::free(space_, block);
    }
    sleeps_.reset();
    other_.reset();
    group_.reset();
    memory_.reset();
    sleeper_.reset();
    EXPECT_EQ(scripted_.leaks(), "");
  }
  static Stream stream(std::uintptr_t name) { return reinterpret_cast<Stream>(name); }
  std::shared_ptr<Pool> pool(const std::string& name) {
    PoolSpec spec;
    spec.name = name;
    spec.capacity = kGiB;
    spec.page_size = 4 * kMiB;  // chunks of one size, so that each fits each place
    return memory_->create_pool(spec, group_.get());
  }
  // Until copies out are under way: nothing is done here unless somebody waits for it.
  void go_to_sleep() {
    driver_.asleep(1);
    std::vector<PartToSleep> parts = {{sleeps_, {Place{}}}};
    transfer_ = std::make_unique<SteppedTransfer>(
        std::make_unique<Departure>(*sleeper_, std::move(parts), /*release=*/false), nullptr);
    for (int look = 0; look < 12 && sleeps_->physical_bytes() == 300 * kMiB; ++look) {
      ASSERT_FALSE(transfer_->go_on(1));
    }
    before_ = driver_.counts();
  }
  [[nodiscard]] std::uint64_t host_waits() const {
    return driver_.counts().host_waits_for_copies - before_.host_waits_for_copies;
  }
  [[nodiscard]] std::uint64_t stream_waits() const {
    return driver_.counts().stream_waits_for_copies - before_.stream_waits_for_copies;
  }

  HostDriver host_;
  ScriptedDriver scripted_;
  OrderChecker driver_;
  AddressSpace space_;
  std::unique_ptr<DeviceMemory> memory_;
  std::unique_ptr<Sleeper> sleeper_;
  std::shared_ptr<Budget> group_;
  std::shared_ptr<Pool> sleeps_;
  std::shared_ptr<Pool> other_;
  std::vector<Address> blocks_;
  std::unique_ptr<SteppedTransfer> transfer_;
  OrderChecker::Counts before_;
};

// What another model has idle, whose readers are not done, takes what comes back.
TEST_F(SleepOrder, CopiesBackComeAfterTheReadersOfWhatTheyTake) {
  go_to_sleep();
  EXPECT_TRUE(transfer_->go_on(SteppedTransfer::kToTheEnd));
  std::vector<Address> taken;
  for (int k = 0; k < 8; ++k) {
    taken.push_back(memory_->allocate(*other_, 60 * kMiB, stream(0x20)));
    driver_.hand_out(taken.back(), 60 * kMiB, {stream(0x20), 0}, 2);
    driver_.use({stream(0x20), 0}, taken.back(), 60 * kMiB, Use::write, /*is_long=*/true);
    driver_.wait({stream(0x30), 0}, driver_.point({stream(0x20), 0}));
    driver_.use({stream(0x30), 0}, taken.back(), 60 * kMiB, Use::read, /*is_long=*/true);
  }
  for (const Address each : taken) {
    driver_.take_back(each);
    DeviceMemory::free(space_, each);
  }
  const std::uint64_t before = driver_.counts().copied;
  transfer_ = std::make_unique<SteppedTransfer>(
      nullptr, std::make_unique<Arrival>(*sleeper_, PoolList{sleeps_}, Arrival::Memory::collected));
  EXPECT_TRUE(transfer_->go_on(SteppedTransfer::kToTheEnd));
  EXPECT_FALSE(sleeps_->is_asleep());
  driver_.awake(1);
  EXPECT_NO_THROW(driver_.check());
  EXPECT_GT(driver_.counts().copied, before) << "the GPU waited, and not the thread that asked";
}

// New memory, memory that was freed on the stream, and what the sleeper has let go of already.
TEST_F(SleepOrder, OthersAllocateWhileCopiesAreUnderWay) {
  go_to_sleep();
  std::vector<Address> mine;
  for (std::size_t k = 0; k < 8; ++k) {
    mine.push_back(memory_->allocate(*other_, (1 + k % 3) * 20 * kMiB, stream(0x20)));
    if (k % 2 == 0) continue;
    DeviceMemory::free(space_, mine.back());
    mine.pop_back();
  }
  EXPECT_GT(other_->physical_bytes(), kLimit - 300 * kMiB - 60 * kMiB) << "some of the sleeper's";
  EXPECT_EQ(host_waits(), 0U);
  EXPECT_EQ(stream_waits(), 0U);
  for (const Address each : mine) DeviceMemory::free(space_, each);
}

TEST_F(SleepOrder, ItsOwnCopiesAreWaitedForByTheSleeper) {
  go_to_sleep();
  EXPECT_TRUE(transfer_->go_on(SteppedTransfer::kToTheEnd));
  EXPECT_GT(host_waits(), 0U) << "or nothing above was under way";
}

}  // namespace
}  // namespace vmm::testing

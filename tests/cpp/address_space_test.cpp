#include "core/memory/address_space.h"

#include <gtest/gtest.h>

#include "driver/host_driver.h"
#include "support/scripted_driver.h"

namespace vmm::testing {
namespace {

class Space : public ::testing::Test {
 protected:
  // The space never looks into its owners.
  Pool* const a_ = reinterpret_cast<Pool*>(0x1000);
  Pool* const b_ = reinterpret_cast<Pool*>(0x2000);
  HostDriver host_{HostDriverOptions{2 * kMiB, kGiB, 1}};
  ScriptedDriver driver_{host_};
  AddressSpace space_;
};

TEST_F(Space, FindsTheOwnerOfEveryAddressOfAReservation) {
  Address a = 0;
  Address b = 0;
  ASSERT_TRUE(space_.reserve(driver_, 4 * kMiB, a_, &a).ok());
  ASSERT_TRUE(space_.reserve(driver_, 3 * kGiB + 2 * kMiB, b_, &b).ok());
  EXPECT_EQ(a % AddressSpace::kSlotBytes, 0U);
  EXPECT_EQ(space_.find(a), a_);
  EXPECT_EQ(space_.find(a + 4 * kMiB - 1), a_);
  for (std::size_t at = 0; at < 3 * kGiB + 2 * kMiB; at += 512 * kMiB) EXPECT_EQ(space_.find(b + at), b_) << at;
  EXPECT_EQ(space_.find(b + 3 * kGiB + 1), b_);
  EXPECT_TRUE(space_.unreserve(driver_, a, 4 * kMiB).ok());
  EXPECT_EQ(space_.find(a), nullptr);
  EXPECT_EQ(space_.find(b), b_);
  EXPECT_TRUE(space_.unreserve(driver_, b, 3 * kGiB + 2 * kMiB).ok());
  EXPECT_EQ(driver_.leaks(), "");
}

TEST_F(Space, KnowsNothingOfOtherAddresses) {
  EXPECT_EQ(space_.find(0), nullptr);
  EXPECT_EQ(space_.find(reinterpret_cast<Address>(&space_)), nullptr);
  EXPECT_EQ(space_.find(~Address{0}), nullptr);
}

TEST_F(Space, AFailedReservationLeavesNoTrace) {
  driver_.fail_nth(Call::reserve, 1, Status(StatusCode::out_of_memory, "reserve"));
  Address out = 0;
  EXPECT_EQ(space_.reserve(driver_, kGiB, a_, &out).code(), StatusCode::out_of_memory);
  EXPECT_EQ(driver_.leaks(), "");
}

constexpr Address kEnd = Address{1} << 47;  // of what the table covers

TEST_F(Space, TheLastSlotIsUsed) {
  driver_.place_next_reservation(kEnd - kGiB);
  Address out = 0;
  ASSERT_TRUE(space_.reserve(driver_, kGiB, a_, &out).ok());
  EXPECT_EQ(out, kEnd - kGiB);
  EXPECT_EQ(space_.find(kEnd - 1), a_);
  EXPECT_TRUE(space_.unreserve(driver_, out, kGiB).ok());
  EXPECT_EQ(space_.find(kEnd - 1), nullptr);
  EXPECT_EQ(driver_.leaks(), "");
}

TEST_F(Space, AReservationBeyondTheTableIsRefusedAndGivenBack) {
  // Five levels of page tables reach 57 bits; the table has slots for 47.
  for (const Address at : {kEnd - kGiB, kEnd, kEnd * 4}) {
    driver_.place_next_reservation(at);
    Address out = 0;
    const Status answer = space_.reserve(driver_, 2 * kGiB, a_, &out);
    EXPECT_EQ(answer.code(), StatusCode::out_of_memory) << at;
    EXPECT_EQ(out, 0U);
    EXPECT_EQ(space_.find(kEnd - 1), nullptr) << "not even what lies below the end";
    EXPECT_EQ(driver_.leaks(), "");
  }
}

}  // namespace
}  // namespace vmm::testing

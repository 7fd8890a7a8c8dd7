// What a pool remembers of its latest look for idle chunks, and when that spares the next one.
#include <gtest/gtest.h>

#include "base/units.h"
#include "core/pool/idle_look.h"

namespace vmm {
namespace {

constexpr IdleLook::Moment kThen{4 * kMiB, 8 * kMiB};
constexpr Epoch kPassed = 7;

WantedChunks of_at_most(std::size_t most, std::size_t unit = 0, bool is_unused = false) {
  return {.bytes = most, .unit = unit, .most = most, .is_unused = is_unused};
}

TEST(IdleLook, NothingIsInVainBeforeTheFirst) { EXPECT_FALSE(IdleLook().is_in_vain(of_at_most(kMiB), {}, kLongAgo)); }

TEST(IdleLook, WhatIsSmallerThanAllThatWasSeenIsInVain) {
  IdleLook look(kThen, 0);
  look.see(6 * kMiB);
  look.see(4 * kMiB);
  EXPECT_TRUE(look.is_in_vain(of_at_most(2 * kMiB), kThen, kPassed));
  EXPECT_FALSE(look.is_in_vain(of_at_most(4 * kMiB), kThen, kPassed));
}

TEST(IdleLook, ItHoldsUntilSomethingIsAllocatedOrFreed) {
  const IdleLook saw_none(kThen, 0);
  EXPECT_TRUE(saw_none.is_in_vain(of_at_most(kMiB), kThen, kPassed));
  EXPECT_FALSE(saw_none.is_in_vain(of_at_most(kMiB), {kThen.freed + 512, kThen.live - 512}, kPassed));
  EXPECT_FALSE(saw_none.is_in_vain(of_at_most(kMiB), {kThen.freed, kThen.live + 512}, kPassed));
}

TEST(IdleLook, OfUnitsItKnowsOnlyThoseThatItLookedFor) {
  IdleLook look(kThen, 16 * kMiB);
  look.see(2 * kMiB);  // that leave no unit
  EXPECT_TRUE(look.is_in_vain(of_at_most(64 * kMiB, 16 * kMiB), kThen, kPassed));
  EXPECT_FALSE(look.is_in_vain(of_at_most(64 * kMiB, 8 * kMiB), kThen, kPassed));
  EXPECT_FALSE(look.is_in_vain(of_at_most(64 * kMiB), kThen, kPassed));
  look.see_unit(32 * kMiB);
  EXPECT_FALSE(look.is_in_vain(of_at_most(64 * kMiB, 16 * kMiB), kThen, kPassed));
}

TEST(IdleLook, ALookForUnitsIsNotForgottenForOneOfTheSameMoment) {
  IdleLook look(kThen, 16 * kMiB);
  IdleLook again(kThen, 0);
  again.see(2 * kMiB);
  look.becomes(again);
  EXPECT_TRUE(look.is_in_vain(of_at_most(64 * kMiB, 16 * kMiB), kThen, kPassed));
  const IdleLook::Moment later{kThen.freed + kMiB, kThen.live};
  look.becomes(IdleLook(later, 0));
  EXPECT_FALSE(look.is_in_vain(of_at_most(kMiB), kThen, kPassed));
  EXPECT_TRUE(look.is_in_vain(of_at_most(kMiB), later, kPassed));
}

TEST(IdleLook, WhatWasInUseIsAskedForAgainOnceTheClockHasMoved) {
  IdleLook look(kThen, 0);
  look.see(2 * kMiB);
  look.note_in_use(4 * kMiB, kPassed);
  EXPECT_TRUE(look.is_in_vain(of_at_most(4 * kMiB, 0, /*is_unused=*/true), kThen, kPassed));
  EXPECT_FALSE(look.is_in_vain(of_at_most(8 * kMiB, 0, /*is_unused=*/true), kThen, kPassed));
  EXPECT_FALSE(look.is_in_vain(of_at_most(4 * kMiB), kThen, kPassed));
  EXPECT_FALSE(look.is_in_vain(of_at_most(4 * kMiB, 0, /*is_unused=*/true), kThen, kPassed + 1));
}

TEST(IdleLook, AHandOverMakesItForgotten) {
  IdleLook look(kThen, 0);
  look.forget();
  EXPECT_FALSE(look.is_in_vain(of_at_most(kMiB), kThen, kPassed));
}

}  // namespace
}  // namespace vmm

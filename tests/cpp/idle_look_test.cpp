// What a pool remembers of its latest look for idle chunks, and when that spares the next one.
#include <gtest/gtest.h>

#include "base/units.h"
#include "core/pool/idle_look.h"

namespace vmm {
namespace {

constexpr IdleLook::Moment kThen{12 * kMiB, 4 * kMiB, 8 * kMiB};
constexpr Epoch kPassed = 7;

WantedChunks of_at_most(std::size_t most, std::size_t unit = 0) { return {.bytes = most, .unit = unit, .most = most}; }

WantedChunks unused(std::size_t most, std::size_t unit = 0, std::optional<Stream> but_by = std::nullopt) {
  return {.bytes = most, .unit = unit, .most = most, .is_unused = true, .but_by = but_by};
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
  IdleLook::Moment freed = kThen;
  freed.freed += 512;
  freed.live -= 512;
  EXPECT_FALSE(saw_none.is_in_vain(of_at_most(kMiB), freed, kPassed));
  IdleLook::Moment kept_by_thread = kThen;
  kept_by_thread.handed_out += 512;
  EXPECT_FALSE(saw_none.is_in_vain(of_at_most(kMiB), kept_by_thread, kPassed)) << "live was and is not";
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
  const IdleLook::Moment later{kThen.handed_out + kMiB, kThen.freed + kMiB, kThen.live};
  look.becomes(IdleLook(later, 0));
  EXPECT_FALSE(look.is_in_vain(of_at_most(kMiB), kThen, kPassed));
  EXPECT_TRUE(look.is_in_vain(of_at_most(kMiB), later, kPassed));
}

TEST(IdleLook, WhatWasInUseIsAskedForAgainOnceTheClockHasMoved) {
  IdleLook look(kThen, 0);
  look.see(2 * kMiB);
  look.note_in_use(unused(4 * kMiB), kPassed);
  EXPECT_TRUE(look.is_in_vain(unused(4 * kMiB), kThen, kPassed));
  EXPECT_FALSE(look.is_in_vain(unused(8 * kMiB), kThen, kPassed));
  EXPECT_FALSE(look.is_in_vain(of_at_most(4 * kMiB), kThen, kPassed));
  EXPECT_FALSE(look.is_in_vain(unused(4 * kMiB), kThen, kPassed + 1));
}

TEST(IdleLook, WhatOneStreamStillUsesIsItsOwnAlone) {
  int one = 0;
  int other = 0;
  const auto for_stream = [](Stream stream) { return unused(4 * kMiB, 0, stream); };
  IdleLook look(kThen, 0);
  look.see(2 * kMiB);
  look.note_in_use(unused(4 * kMiB), kPassed);
  EXPECT_FALSE(look.is_in_vain(for_stream(&one), kThen, kPassed)) << "it may be its own work";
  look.note_in_use(for_stream(&one), kPassed);
  EXPECT_TRUE(look.is_in_vain(for_stream(&one), kThen, kPassed));
  EXPECT_FALSE(look.is_in_vain(for_stream(&other), kThen, kPassed));
  EXPECT_TRUE(look.is_in_vain(unused(4 * kMiB), kThen, kPassed)) << "somebody uses it";
}

TEST(IdleLook, UnitsInUseAndOtherChunksInUseAreRememberedBesideEachOther) {
  constexpr std::size_t kUnit = 16 * kMiB;
  IdleLook look(kThen, kUnit);
  look.see(2 * kMiB);
  look.see_unit(kUnit);
  look.note_in_use(unused(kUnit, kUnit), kPassed);
  look.note_in_use(unused(kUnit), kPassed);
  EXPECT_TRUE(look.is_in_vain(unused(kUnit, kUnit), kThen, kPassed));
  EXPECT_TRUE(look.is_in_vain(unused(kUnit), kThen, kPassed));
  EXPECT_FALSE(look.is_in_vain(unused(kUnit, kUnit / 2), kThen, kPassed));
}

TEST(IdleLook, AHandOverMakesItForgotten) {
  IdleLook look(kThen, 0);
  look.forget();
  EXPECT_FALSE(look.is_in_vain(of_at_most(kMiB), kThen, kPassed));
}

}  // namespace
}  // namespace vmm

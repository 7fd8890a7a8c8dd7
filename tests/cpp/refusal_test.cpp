// The words of an out-of-memory error: nothing in them that cannot help.
#include "core/device/refusal.h"

#include <gtest/gtest.h>

namespace vmm::testing {
namespace {

Refusal refusal(std::size_t requested, std::size_t available, std::size_t limit) {
  Refusal made;
  made.requested = requested;
  made.available = available;
  made.limit = limit;
  made.pool = "llama";
  return made;
}

RefusalCause by_limit(std::size_t device_total = 80 * kGiB) {
  RefusalCause cause;
  cause.limit_name = "SharedMemoryPool 1";
  cause.capacity = kTiB;
  cause.device_total = device_total;
  return cause;
}

TEST(Refusal, AdvisesToFreeWhatIsMissingOrToRaiseTheLimitByIt) {
  Refusal full = refusal(12 * kMiB, 4 * kMiB, 32 * kMiB);
  full.holders = {{"qwen", 28 * kMiB}};
  EXPECT_EQ(advice_for(full, by_limit()), "free tensors of 8 MiB or raise the limit of SharedMemoryPool 1 by 8 MiB");
}

TEST(Refusal, AdvisesToSpillMore) {
  Refusal full = refusal(12 * kMiB, 4 * kMiB, 32 * kMiB);
  full.holders = {{"qwen", 28 * kMiB}};
  RefusalCause cause = by_limit();
  cause.spill = 2 * kMiB;
  EXPECT_EQ(advice_for(full, cause),
            "free tensors of 8 MiB, raise the limit of SharedMemoryPool 1 by 8 MiB, or raise spill_limit by 2 MiB");
}

TEST(Refusal, WhatIsAdvisedIsEnough) {
  Refusal full = refusal(8 * kMiB + 1, 0, 32 * kMiB);
  full.holders = {{"qwen", 32 * kMiB}};
  EXPECT_EQ(advice_for(full, by_limit()),
            "free tensors of 8.1 MiB or raise the limit of SharedMemoryPool 1 by 8.1 MiB");
}

TEST(Refusal, ALimitIsNotRaisedAboveTheDevice) {
  Refusal full = refusal(2 * kGiB, 0, 79 * kGiB);
  full.holders = {{"qwen", 79 * kGiB}};
  EXPECT_EQ(advice_for(full, by_limit()), "free tensors of 2 GiB");
}

TEST(Refusal, NothingHelpsARequestThatIsLargerThanTheDevice) {
  Refusal huge = refusal(81 * kGiB, kGiB, kTiB);
  huge.holders = {{"qwen", 70 * kGiB}};
  RefusalCause cause = by_limit();
  EXPECT_EQ(advice_for(huge, cause), "ask for less: the device has 80 GiB in all");
  cause.limit_name.clear();
  cause.no_addresses = true;
  EXPECT_EQ(advice_for(huge, cause), "ask for less: the device has 80 GiB in all") << "least of all more addresses";
}

TEST(Refusal, AddressesThatAreUsedUp) {
  RefusalCause cause;
  cause.no_addresses = true;
  cause.capacity = 2 * kGiB;
  cause.device_total = 80 * kGiB;
  EXPECT_EQ(advice_for(refusal(kGiB, kGiB, 2 * kGiB), cause),
            "free tensors until a stretch that long is free or give the pool a larger virtual capacity "
            "(it has 2 GiB)");
  EXPECT_EQ(advice_for(refusal(3 * kGiB, kGiB, 2 * kGiB), cause),
            "give the pool a larger virtual capacity (it has 2 GiB)");
}

TEST(Refusal, AFloorThatIsWhyIsNamed) {
  Refusal kept = refusal(12 * kMiB, 4 * kMiB, 32 * kMiB);
  kept.holders = {{"qwen", 0, 20 * kMiB, 0, 0, 20 * kMiB}, {"phi", 0, 0, 2 * kMiB}};
  EXPECT_EQ(advice_for(kept, by_limit()),
            "raise the limit of SharedMemoryPool 1 by 8 MiB or give 'qwen' a lower floor: it keeps 20 MiB idle")
      << "nothing is in use that could be freed";
  const std::string text = text_of(kept, by_limit());
  EXPECT_NE(text.find("'qwen' 0 B in use + 20 MiB idle (its floor of 20 MiB keeps what is idle)"), std::string::npos)
      << text;
  EXPECT_NE(text.find("'phi' 0 B in use + 2 MiB stranded"), std::string::npos) << text;
}

TEST(Refusal, MemoryThatOthersHoldIsNamedWhereTheDriverRefused) {
  RefusalCause cause;
  cause.driver_said = "cuMemCreate: out of memory";
  cause.capacity = kTiB;
  cause.device_total = 80 * kGiB;
  cause.device_free = kGiB;
  cause.outside = 40 * kGiB;
  Refusal full = refusal(4 * kGiB, kGiB, 80 * kGiB);
  full.holders = {{"llama", 39 * kGiB}};
  EXPECT_EQ(advice_for(full, cause),
            "free tensors of 3 GiB or free memory outside torch_vmm: others hold 40 GiB of the device");
  full.holders.clear();
  cause.outside = 0;
  EXPECT_EQ(advice_for(full, cause), "ask for less");
}

TEST(Refusal, TheSentenceNamesAskerLimitHoldersAndAdvice) {
  Refusal full = refusal(12 * kMiB, 4 * kMiB, 32 * kMiB);
  full.holders = {{"qwen", 20 * kMiB}, {"llama", 4 * kMiB, 0, 0, 4 * kMiB}};
  full.advice = "do this";
  RefusalCause cause = by_limit();
  cause.limits = "; SharedMemoryPool 1: limit 32 MiB, mapped 28 MiB";
  cause.device_free = 70 * kGiB;
  EXPECT_EQ(
      text_of(full, cause),
      "pool 'llama': 12 MiB asked; SharedMemoryPool 1: limit 32 MiB, mapped 28 MiB; device: 80 GiB, free 70 GiB; "
      "refused by the limit of SharedMemoryPool 1\n  held: 'qwen' 20 MiB in use, 'llama' 4 MiB in use + 4 MiB waiting "
      "for queued work\n  what would help: do this");
}

TEST(Refusal, OfManyHoldersTheSentenceNamesThoseThatHoldMost) {
  Refusal full = refusal(12 * kMiB, 4 * kMiB, 32 * kMiB);
  for (std::size_t k = 0; k < 1000; ++k) full.holders.push_back({"m" + std::to_string(k), (2000 - k) * kMiB});
  std::string text = text_of(full, by_limit());
  EXPECT_NE(text.find("'m15' 1.9 GiB in use, and 984 others "), std::string::npos) << text;
  EXPECT_EQ(text.find("'m16'"), std::string::npos);
  full.holders.resize(17);
  text = text_of(full, by_limit());
  EXPECT_NE(text.find("'m16' 1.9 GiB in use\n"), std::string::npos) << text;
  for (Holder& holder : full.holders) holder.floor = holder.idle = kMiB;
  EXPECT_EQ(advice_for(full, by_limit()).find("'m16'"), std::string::npos);
}

}  // namespace
}  // namespace vmm::testing

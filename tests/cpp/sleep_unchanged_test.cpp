// Models that sleep again without having been able to write: what is in a backup still is not
// copied a second time, and whatever may have changed is.
#include <gtest/gtest.h>

#include <random>

#include "core/faces/seals.h"
#include "core/memory/shared_chunks.h"
#include "cpp/lacking_memory.h"
#include "cpp/sleep_lab.h"

namespace vmm::testing {
namespace {

class SleepUnchanged : public Sleep {
 protected:
  void seal() { seal_pages(lab_.memory(), *model_, pieces(live_)); }
  void unseal() { unseal_pages(lab_.memory(), *model_, pieces(live_)); }
  std::size_t copies_of_a_sleep(const Places& places) {
    lab_.driver.clear_calls();
    sleep(model_, places);
    return lab_.driver.count(Call::copy_async);
  }
  std::size_t host_bytes() { return sleeper_.host_memory(lab_.memory().budget())->used_bytes(); }

  const std::shared_ptr<Pool> model_ = lab_.pool("model");
  const std::shared_ptr<Pool> weights_ = lab_.memory().tagged(model_, "weights");
  const std::vector<Live> live_ = fill(*weights_);
};

TEST_F(SleepUnchanged, SealedMemoryIsCopiedOnce) {
  seal();
  EXPECT_GT(copies_of_a_sleep(host()), 0U) << "the first time";
  wake(model_);
  for (int time = 0; time < 3; ++time) {
    EXPECT_EQ(copies_of_a_sleep(host()), 0U);
    EXPECT_EQ(weights_->physical_bytes(), 0U);
    wake(model_);
    expect_whole(live_);
    EXPECT_TRUE(weights_->is_sealed());
  }
  unseal();
}

// What is unchanged is noted last, when some parts of the model are awake already.
TEST_F(SleepUnchanged, WhereTheHostsMemoryLacksAllOfTheModelIsAwakeOrNone) {
  seal();
  lab_.allocate(*model_, 5 * kMiB);
  int asleep = 0;
  bool failed = true;
  for (long nth = 0; failed; ++nth) {
    sleep(model_, host());
    const std::unique_ptr<Transfer> back = coming(model_);
    runs_out_at(nth, [&] { go(*back); });
    failed = failures_made != 0;
    ASSERT_EQ(model_->is_asleep(), weights_->is_asleep()) << "allocation " << nth;
    asleep += model_->is_asleep() ? 1 : 0;
    if (model_->is_asleep()) wake(model_);
    lab_.memory().check();
    expect_whole(live_);
    ASSERT_TRUE(weights_->is_sealed());
  }
  EXPECT_GT(asleep, 0) << "the test is about nothing";
  unseal();
}

TEST_F(SleepUnchanged, WhatIsNotSealedIsCopiedEachTime) {
  sleep(model_, host());
  wake(model_);
  EXPECT_GT(copies_of_a_sleep(host()), 0U);
  wake(model_);
  EXPECT_EQ(host_bytes(), 0U) << "and keeps nothing in the host's memory";
}

TEST_F(SleepUnchanged, OnlyWhatIsSealedStaysInTheHostsMemory) {
  seal();
  const Address cache = lab_.allocate(*model_, 40 * kMiB);
  sleep(model_, host());
  wake(model_);
  EXPECT_GT(host_bytes(), 0U);
  std::size_t sealed = 0;
  for (const Live& each : live_) sealed += each.bytes;
  EXPECT_LT(host_bytes(), sealed + 40 * kMiB);
  lab_.free(cache);
  unseal();
}

TEST_F(SleepUnchanged, WhatWasUnsealedIsCopiedThoughItIsSealedAgain) {
  seal();
  sleep(model_, host());
  wake(model_);
  unseal();
  EXPECT_EQ(host_bytes(), 0U) << "it may change from now on";
  std::vector<Live> written = live_;
  for (Live& each : written) Lab::fill(each.address, each.bytes, each.seed += 100);
  seal();
  EXPECT_GT(copies_of_a_sleep(host()), 0U);
  wake(model_);
  expect_whole(written);
  unseal();
}

TEST_F(SleepUnchanged, SealedOnlyAfterItWokeIsCopied) {
  sleep(model_, host());
  wake(model_);
  seal();
  EXPECT_GT(copies_of_a_sleep(host()), 0U);
  wake(model_);
  EXPECT_EQ(copies_of_a_sleep(host()), 0U) << "and the next time not";
  wake(model_);
  expect_whole(live_);
  unseal();
}

TEST_F(SleepUnchanged, WhatOthersHadAtAnotherAddressIsCopied) {
  seal();
  sleep(model_, host());
  wake(model_);
  const Live& large = live_.back();
  {
    const auto at = weights_->chunks_under(large.address, large.bytes);
    SharedChunks shared(1);
    weights_->share_chunks(at.front().address, at.front().size, &shared);
  }
  EXPECT_GT(copies_of_a_sleep(host()), 0U);
  wake(model_);
  expect_whole(live_);
  unseal();
}

TEST_F(SleepUnchanged, InAnotherPlaceItIsSavedAgain) {
  seal();
  sleep(model_, host());
  wake(model_);
  EXPECT_GT(copies_of_a_sleep(file()), 0U);
  wake(model_);
  expect_whole(live_);
  EXPECT_GT(copies_of_a_sleep(host()), 0U) << "a file is not kept";
  wake(model_);
  unseal();
}

TEST_F(SleepUnchanged, DiscardedItIsGone) {
  seal();
  sleep(model_, host());
  wake(model_);
  sleep(model_, discard());
  wake(model_);
  for (const Live& each : live_) EXPECT_TRUE(is_zero(each.address, each.bytes));
  EXPECT_EQ(host_bytes(), 0U);
  unseal();
}

TEST_F(SleepUnchanged, WhatWasFreedMeanwhileIsNotThere) {
  seal();
  sleep(model_, host());
  wake(model_);
  lab_.free(live_.back().address);
  EXPECT_EQ(copies_of_a_sleep(host()), 0U);
  wake(model_);
  std::vector<Live> left(live_.begin(), live_.end() - 1);
  expect_whole(left);
}

TEST_F(SleepUnchanged, ItGivesWayToAModelThatNeedsTheHostsMemory) {
  seal();
  sleep(model_, host());
  wake(model_);
  const auto memory = sleeper_.host_memory(lab_.memory().budget());
  memory->set_limit(host_bytes());
  const auto other = lab_.pool("other");
  const std::vector<Live> theirs = fill(*other);
  sleep(other, host());
  wake(other);
  expect_whole(theirs);
  memory->set_limit(kUnlimited);
  EXPECT_GT(copies_of_a_sleep(host()), 0U) << "it was forgotten";
  wake(model_);
  expect_whole(live_);
  unseal();
}

TEST_F(SleepUnchanged, ReleasedItGoes) {
  seal();
  sleep(model_, host());
  wake(model_);
  EXPECT_GT(sleeper_.release_host_memory(lab_.memory().budget()), 0U);
  EXPECT_EQ(host_bytes(), 0U);
  EXPECT_GT(copies_of_a_sleep(host()), 0U);
  wake(model_);
  expect_whole(live_);
  unseal();
}

TEST_F(SleepUnchanged, WhereTheHostLacksMemoryItGoesAfterWhatNobodyUses) {
  const auto other = lab_.pool("other");
  fill(*other);
  sleep(other, host());
  wake(other);
  const auto memory = sleeper_.host_memory(lab_.memory().budget());
  ASSERT_GT(memory->unused_bytes(), 0U);
  seal();
  sleep(model_, host());
  wake(model_);
  sleep(other, host());
  wake(other);
  EXPECT_EQ(sleeper_.release_all_host_memory(std::size_t{1} << 60U), 0U) << "all of it would not do";
  EXPECT_GT(sleeper_.release_all_host_memory(kMiB), 0U);
  EXPECT_EQ(memory->unused_bytes(), 0U);
  EXPECT_EQ(copies_of_a_sleep(host()), 0U) << "it is there still";
  EXPECT_EQ(sleeper_.release_all_host_memory(kMiB), 0U) << "it sleeps there";
  wake(model_);
  EXPECT_GT(sleeper_.release_all_host_memory(kMiB), 0U);
  EXPECT_EQ(memory->used_bytes() + memory->unused_bytes(), 0U);
  EXPECT_GT(copies_of_a_sleep(host()), 0U);
  wake(model_);
  expect_whole(live_);
  unseal();
}

TEST_F(SleepUnchanged, ItEndsWithItsModel) {
  seal();
  sleep(model_, host());
  wake(model_);
  lab_.memory().close_pool(*model_, /*force=*/true);
  EXPECT_EQ(host_bytes(), 0U);
}

TEST_F(SleepUnchanged, ASleepThatIsStoppedAnywhereLeavesItProvedOrCopied) {
  seal();
  sleep(model_, host());
  wake(model_);
  for (int stop = 1; stop < 12; ++stop) {
    const auto transfer = going({model_}, host());
    try {
      go(*transfer, stops_at(stop));
    } catch (const VmmError&) {
      expect_whole(live_);
      continue;
    }
    wake(model_);
    expect_whole(live_);
  }
  lab_.memory().check();
  unseal();
}

// Sealed, written, slept and woken at random: contents are always as they were written.
TEST_F(SleepUnchanged, ARandomProgramLosesNoWrite) {
  std::mt19937 random(5);
  std::vector<Live> live = live_;
  bool is_sealed = false;
  bool is_asleep = false;
  std::size_t spared = 0;
  for (int step = 0; step < 60; ++step) {
    switch (std::uniform_int_distribution<int>(0, 4)(random)) {
      case 0:
        if (is_asleep) break;
        is_sealed ? unseal() : seal();
        is_sealed = !is_sealed;
        break;
      case 1:
        if (is_asleep || is_sealed) break;
        for (Live& each : live) Lab::fill(each.address, each.bytes, ++each.seed);
        break;
      default:
        if (is_asleep) {
          wake(model_);
          expect_whole(live);
        } else {
          const Places places = step % 7 == 0 ? file() : step % 3 == 0 ? packed() : host();
          spared += copies_of_a_sleep(places) == 0 ? 1 : 0;
        }
        is_asleep = !is_asleep;
    }
    ASSERT_FALSE(HasFailure()) << "at step " << step;
  }
  EXPECT_GT(spared, 2U);
  if (is_asleep) wake(model_);
  expect_whole(live);
  if (is_sealed) unseal();
}

}  // namespace
}  // namespace vmm::testing

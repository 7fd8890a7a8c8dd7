#include "core/memory/chunk_store.h"

#include <gtest/gtest.h>

#include <optional>
#include <thread>
#include <vector>

#include "core/memory/grant.h"
#include "cpp/lab.h"

namespace vmm::testing {
namespace {

class Store : public ::testing::Test {
 protected:
  ~Store() override {
    store_.reset();
    EXPECT_EQ(driver_.leaks(), "");
    EXPECT_EQ(device_.used(), 0U);
  }
  Chunk* create(Budget& payer, std::size_t pages = 1) {
    Chunk* chunk = nullptr;
    EXPECT_TRUE(store_->create(store_->spec(pages * kPage), payer, &chunk, nullptr).ok());
    return chunk;
  }
  Chunk* take(Budget& payer, std::size_t pages, bool exact = false) {
    Budget* refused = nullptr;
    return store_->take_at_most(group_, payer, pages * kPage, exact, &refused);
  }

  HostDriver host_{HostDriverOptions{kPage, kGiB, 1}};
  ScriptedDriver driver_{host_};
  Budget device_{"device", kUnlimited, nullptr};
  Budget group_{"group", 16 * kPage, &device_};
  Budget a_{"a", 12 * kPage, &group_};
  Budget b_{"b", 8 * kPage, &group_};
  std::optional<ChunkStore> store_{std::in_place, driver_, Location::on_device(0), kPage, false};
};

TEST_F(Store, ChargesTheLimitBeforeTheDriverIsAsked) {
  Chunk* chunk = nullptr;
  Budget* refused = nullptr;
  EXPECT_EQ(store_->create(store_->spec(13 * kPage), a_, &chunk, &refused).code(), StatusCode::out_of_memory);
  EXPECT_EQ(refused, &a_);
  EXPECT_EQ(driver_.count(Call::create), 0U);
  EXPECT_EQ(a_.used(), 0U);
}

TEST_F(Store, AShelfKnowsWhatTheLargestThatFitLeave) {
  Grant grant(*store_, group_, a_);
  for (const std::size_t pages : {3U, 4U, 3U}) grant.chunks.put(create(a_, pages));
  const auto left_of = [&](std::size_t pages) { return grant.chunks.left_of(pages * kPage) / kPage; };
  EXPECT_EQ(left_of(2), 2U);
  EXPECT_EQ(left_of(3), 0U);
  EXPECT_EQ(left_of(6), 2U) << "4, and 3 do not fit beside it";
  EXPECT_EQ(left_of(9), 2U) << "4 and one of 3";
  EXPECT_EQ(left_of(10), 0U);
  EXPECT_EQ(left_of(20), 10U) << "there are no more";
}

TEST_F(Store, WhatIsNoUnitGoesToAnotherShelf) {
  Grant grant(*store_, group_, a_);
  Grant odd(*store_, group_, a_);
  for (const std::size_t pages : {3U, 4U, 2U}) grant.chunks.put(create(a_, pages));
  grant.chunks.move_no_units(2 * kPage, odd.chunks);
  EXPECT_EQ(grant.bytes(), 6 * kPage);
  EXPECT_EQ(odd.bytes(), 3 * kPage);
}

TEST_F(Store, GivesTheChargeBackWhenTheDriverFails) {
  driver_.fail_nth(Call::create, 1, no_memory());
  Chunk* chunk = nullptr;
  Budget* refused = &a_;
  EXPECT_EQ(store_->create(store_->spec(kPage), a_, &chunk, &refused).code(), StatusCode::out_of_memory);
  EXPECT_EQ(refused, nullptr) << "it was the driver";
  EXPECT_EQ(a_.used(), 0U);
  EXPECT_EQ(store_->live_chunks(), 0U);
}

std::vector<std::uint64_t>& ended_exports() {
  static std::vector<std::uint64_t> numbers;
  return numbers;
}

TEST_F(Store, TellsOfAnExportedChunkBeforeTheDriverHasIt) {
  ended_exports().clear();
  store_->set_on_export_end([](std::uint64_t number) { ended_exports().push_back(number); });
  Chunk* const kept_to_itself = create(a_);
  Chunk* const shared = create(a_);
  Chunk* const refused = create(a_);
  const std::uint64_t number = shared->number;
  EXPECT_NE(number, kept_to_itself->number);
  shared->exported = refused->exported = true;
  EXPECT_TRUE(store_->release(kept_to_itself).ok());
  EXPECT_TRUE(ended_exports().empty());
  store_->put(group_, shared);
  EXPECT_EQ(ended_exports(), (std::vector<std::uint64_t>{number}));
  driver_.fail_nth(Call::release, 1, broken());
  EXPECT_FALSE(store_->release(refused).ok());
  EXPECT_EQ(ended_exports().size(), 2U) << "what opens it has gone all the same";
  EXPECT_TRUE(store_->release(refused).ok());
}

TEST_F(Store, WhatIsTrimmedIsHardlyMoreThanIsWanted) {
  const auto trim_of = [this](std::vector<std::size_t> shelved, std::size_t want) {
    for (const std::size_t pages : shelved) store_->put(group_, create(a_, pages));
    const std::size_t given_back = store_->trim_under(group_, want * kPage) / kPage;
    EXPECT_EQ(store_->shelved_bytes(group_), group_.used());
    store_->trim_all();
    return given_back;
  };
  EXPECT_EQ(trim_of({8, 2}, 2), 2U);
  EXPECT_EQ(trim_of({1, 3, 6}, 2), 4U) << "1, and the smallest that holds the rest";
  EXPECT_EQ(trim_of({1, 1, 4, 6}, 8), 8U) << "6, and 1 and 1";
  EXPECT_EQ(trim_of({5, 3}, 4), 8U);
  EXPECT_EQ(trim_of({3, 3, 3}, 4), 6U);
  EXPECT_EQ(trim_of({2, 1}, 9), 3U) << "there is no more";
}

TEST_F(Store, WhatIsMappedOrRefusedIsPassedOver) {
  Chunk* const mapped = create(a_, 2);
  mapped->note_mapped();
  for (Chunk* each : {create(a_, 1), mapped, create(a_, 3), create(a_, 4)}) store_->put(group_, each);
  driver_.fail_nth(Call::release, 1, broken());
  EXPECT_EQ(store_->trim_under(group_, 2 * kPage), 3 * kPage) << "3, where the driver would not have 1";
  mapped->note_unmapped();
  EXPECT_EQ(store_->trim_under(group_, 2 * kPage), 2 * kPage);
}

TEST_F(Store, AReleasedChunkCountsNoMore) {
  Chunk* chunk = create(a_, 2);
  EXPECT_EQ(device_.used(), 2 * kPage);
  EXPECT_TRUE(store_->release(chunk).ok());
  EXPECT_EQ(device_.used(), 0U);
  EXPECT_EQ(driver_.live_chunks(), 0U);
}

TEST_F(Store, AChunkThatTheDriverKeepsStillCounts) {
  Chunk* chunk = create(a_);
  driver_.fail_nth(Call::release, 1, broken());
  EXPECT_FALSE(store_->release(chunk).ok());
  EXPECT_EQ(a_.used(), kPage);
  EXPECT_EQ(store_->live_chunks(), 1U);
  store_->put(group_, chunk);
  driver_.fail_nth(Call::release, 1, broken());
  EXPECT_EQ(store_->trim(group_, 0), 0U);
  EXPECT_EQ(store_->shelved_bytes(group_), kPage);
  EXPECT_EQ(store_->trim(group_, 0), kPage) << "and is tried again";
}

TEST_F(Store, TheShelfCountsForItsGroup) {
  store_->put(group_, create(a_, 4));
  EXPECT_EQ(a_.used(), 0U);
  EXPECT_EQ(group_.used(), 4 * kPage);
  EXPECT_EQ(store_->shelved_bytes(group_), 4 * kPage);
  EXPECT_EQ(store_->all_shelved_bytes(), 4 * kPage);
  Chunk* chunk = take(b_, 4);
  ASSERT_NE(chunk, nullptr);
  EXPECT_EQ(chunk->charged, &b_);
  EXPECT_EQ(b_.used(), 4 * kPage);
  EXPECT_EQ(group_.used(), 4 * kPage);
  EXPECT_TRUE(store_->release(chunk).ok());
}

TEST_F(Store, TakesTheLargestThatFitsOrTheExactSize) {
  for (const std::size_t pages : {1U, 2U, 4U}) store_->put(group_, create(a_, pages));
  EXPECT_EQ(take(b_, 3, /*exact=*/true), nullptr);
  Chunk* chunk = take(b_, 3);
  ASSERT_NE(chunk, nullptr);
  EXPECT_EQ(chunk->size, 2 * kPage);
  store_->put(group_, chunk);
  chunk = take(b_, 1, /*exact=*/true);
  ASSERT_NE(chunk, nullptr);
  EXPECT_EQ(chunk->size, kPage);
  store_->put(group_, chunk);
}

TEST_F(Store, AnotherGroupsShelfIsNotTouched) {
  Budget stranger("stranger", kUnlimited, &device_);
  store_->put(group_, create(a_));
  Budget* refused = nullptr;
  EXPECT_EQ(store_->take_at_most(stranger, stranger, kPage, false, &refused), nullptr);
  EXPECT_EQ(refused, nullptr);
  EXPECT_EQ(store_->trim(stranger, 0), 0U);
  EXPECT_EQ(store_->trim_under(stranger, kPage), 0U);
  EXPECT_EQ(store_->trim_under(device_, kPage), kPage) << "the device stands above";
}

TEST_F(Store, OfSeveralShelvesNoMoreGoesThanIsWanted) {
  Budget other("other", kUnlimited, &device_);
  for (Budget* group : {&group_, &other}) store_->put(*group, create(*group, 4));
  EXPECT_EQ(store_->trim_under(device_, 2 * kPage), 4 * kPage) << "a chunk is given back whole";
  EXPECT_EQ(store_->all_shelved_bytes(), 4 * kPage);
  EXPECT_EQ(store_->trim_under(device_, 8 * kPage), 4 * kPage);
}

TEST_F(Store, WhoHasNoRoomLeavesTheChunkOnTheShelf) {
  Chunk* used = create(b_, 8);
  store_->put(group_, create(a_));
  Budget* refused = nullptr;
  EXPECT_EQ(store_->take_at_most(group_, b_, kPage, false, &refused), nullptr);
  EXPECT_EQ(refused, &b_);
  EXPECT_EQ(store_->shelved_bytes(group_), kPage);
  EXPECT_TRUE(store_->release(used).ok());
}

TEST_F(Store, TrimKeepsWhatIsAskedForAndWhatIsStillMapped) {
  Chunk* waiting = create(a_, 2);
  waiting->note_mapped();  // a former address waits for its fence
  waiting->last_use = 3;
  store_->put(group_, waiting);
  for (int k = 0; k < 4; ++k) store_->put(group_, create(a_));
  EXPECT_EQ(store_->waiting(group_, 2).bytes, 2 * kPage);
  EXPECT_EQ(store_->waiting(group_, 2).newest, 3U);
  EXPECT_EQ(store_->waiting(group_, 3).bytes, 0U) << "nothing uses it, and it is only mapped";
  EXPECT_EQ(store_->trim(group_, 4 * kPage), 2 * kPage);
  EXPECT_EQ(store_->trim(group_, 0), 2 * kPage);
  EXPECT_EQ(store_->shelved_bytes(group_), 2 * kPage) << "cannot go yet";
  waiting->note_unmapped();
  EXPECT_EQ(store_->trim_all(), 2 * kPage);
  store_->forget(group_);
}

TEST_F(Store, WhatAGrantDoesNotUseGoesBack) {
  {
    Grant grant(*store_, group_, a_);
    grant.chunks.put(create(a_, 2));
    ASSERT_EQ(a_.charge(3 * kPage), nullptr);
    grant.prepaid_bytes = 3 * kPage;
    EXPECT_EQ(grant.bytes(), 5 * kPage);
  }
  EXPECT_EQ(a_.used(), 0U);
  EXPECT_EQ(store_->shelved_bytes(group_), 2 * kPage);
}

TEST_F(Store, NoNumberOfThreadsOvershootsTheLimit) {
  std::atomic<std::size_t> most{0};
  std::vector<std::thread> threads;
  for (int k = 0; k < 8; ++k) {
    threads.emplace_back([&, k] {
      Budget& mine = k % 2 == 0 ? a_ : b_;
      for (int step = 0; step < 200; ++step) {
        Budget* refused = nullptr;
        Chunk* chunk = store_->take_at_most(group_, mine, 3 * kPage, false, &refused);
        if (chunk == nullptr && !store_->create(store_->spec(3 * kPage), mine, &chunk, &refused).ok()) continue;
        const std::size_t alive = driver_.live_chunk_bytes();
        std::size_t highest = most.load();
        while (alive > highest && !most.compare_exchange_weak(highest, alive)) {
        }
        if (step % 3 == 0) {
          EXPECT_TRUE(store_->release(chunk).ok());
        } else {
          store_->put(group_, chunk);
        }
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_LE(most, 16 * kPage);
  EXPECT_GT(most, 0U);
  EXPECT_EQ(group_.used(), store_->shelved_bytes(group_));
}

TEST(StoreWithoutItsDriver, ChunksEndWithTheirCharges) {
  HostDriver host{HostDriverOptions{kPage, kGiB, 1}};
  ScriptedDriver driver{host};
  Budget group{"group", kUnlimited, nullptr};
  ChunkStore store{driver, Location::on_device(0), kPage, false};
  Chunk* chunk = nullptr;
  Budget* refused = nullptr;
  ASSERT_TRUE(store.create(store.spec(kPage), group, &chunk, &refused).ok());
  store.put(group, chunk);
  driver.fail_nth(Call::release, 1, {StatusCode::driver_gone, "scripted"});
  EXPECT_EQ(store.trim(group, 0), kPage);
  EXPECT_EQ(group.used(), 0U);
  EXPECT_EQ(store.live_chunks(), 0U);
}

}  // namespace
}  // namespace vmm::testing

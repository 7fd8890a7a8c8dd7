// Models by id under one physical limit.
#include "core/faces/shared_memory_pool.h"

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <optional>

#include "cpp/lab.h"

namespace vmm::testing {
namespace {

class Shared : public ::testing::Test {
 protected:
  static ModelSpec spec() {
    ModelSpec spec;
    spec.virtual_capacity = kGiB;
    return spec;
  }
  std::shared_ptr<Pool> add(const std::string& id) { return shared_->register_model(id, spec()); }

  Lab lab_;
  std::optional<SharedMemoryPool> shared_{std::in_place, lab_.memory(), 32 * kMiB};
};

TEST_F(Shared, KnowsItsModelsInOrder) {
  const auto b = add("b");
  const auto a = add("a");
  EXPECT_EQ(shared_->model_ids(), (std::vector<std::string>{"b", "a"}));
  EXPECT_EQ(shared_->model("a"), a);
  EXPECT_TRUE(shared_->has_model("b"));
  EXPECT_EQ(b->name(), "b");
  EXPECT_EQ(shared_->global_stats().num_models, 2U);
}

TEST_F(Shared, RefusesAnIdTwiceAndAnUnknownOne) {
  add("llama");
  try {
    add("llama");
    FAIL();
  } catch (const ModelExistsError& error) {
    EXPECT_EQ(error.model_id, "llama");
  }
  try {
    shared_->allocate_for_model("lama", kPage, nullptr);
    FAIL();
  } catch (const ModelNotFoundError& error) {
    EXPECT_EQ(error.model_id, "lama");
    EXPECT_NE(std::string(error.what()).find("'llama'"), std::string::npos) << "it names what there is";
  }
  EXPECT_THROW(shared_->unregister_model("x", false), ModelNotFoundError);
  EXPECT_THROW(shared_->deallocate_for_model("x", 0, kPage), ModelNotFoundError);
  EXPECT_THROW(static_cast<void>(shared_->model("x")), ModelNotFoundError);
  EXPECT_THROW(add(""), InvalidArgumentError);
}

TEST_F(Shared, WaitsForTheGpuWithNoLockHeld) {
  const auto a = add("a");
  lab_.driver.set_wait_on_held(ScriptedDriver::WaitOnHeld::pass);
  std::size_t waits = 0;
  lab_.driver.before(Call::wait, [&] {
    ++waits;
    EXPECT_EQ(shared_->model_ids().size(), 2U) << "who is asked meanwhile is answered";
  });
  lab_.driver.hold_fences();
  lab_.leave_idle(*a, 32 * kMiB, stream(0x10));  // but that queued work may use it
  ModelSpec with_floor = spec();
  with_floor.floor = 16 * kMiB;
  shared_->register_model("b", with_floor);
  EXPECT_GT(waits, 0U);
  lab_.driver.before(Call::wait, nullptr);
  lab_.driver.release_fences();
}

// Where addresses are short, and a closed model's wait for queued work.
TEST_F(Shared, WaitsForAddressesWithNoLockHeld) {
  for (const bool closes_meanwhile : {false, true}) {
    SCOPED_TRACE(closes_meanwhile);
    lab_.driver.hold_fences();
    lab_.leave_idle(*add("former"), 4 * kMiB, stream(0x10));
    shared_->unregister_model("former", /*force=*/false);
    lab_.driver.fail_nth(Call::reserve, 1, no_memory());
    std::size_t waits = 0;
    lab_.driver.before(Call::wait, [&] {
      if (++waits != 1) return;
      EXPECT_TRUE(shared_->model_ids().empty()) << "who is asked meanwhile is answered";
      lab_.driver.clear_failures();
      if (closes_meanwhile) {
        shared_->close(/*force=*/false);
      } else {
        add("a");
      }
    });
    if (closes_meanwhile) {
      EXPECT_THROW(add("a"), InvalidArgumentError);
    } else {
      EXPECT_THROW(add("a"), ModelExistsError);
      EXPECT_EQ(shared_->model_ids(), std::vector<std::string>{"a"});
    }
    EXPECT_GT(waits, 0U);
    lab_.driver.before(Call::wait, nullptr);
    lab_.driver.release_fences();
    lab_.memory().settle(/*wait=*/true);
    EXPECT_EQ(lab_.memory().pools().size(), closes_meanwhile ? 0U : 1U);
    shared_.emplace(lab_.memory(), 32 * kMiB);
  }
}

TEST_F(Shared, RefusesLimitsAndFloorsThatCannotBe) {
  EXPECT_THROW(SharedMemoryPool(lab_.memory(), 0), InvalidArgumentError);
  EXPECT_THROW(shared_->set_physical_limit(0), InvalidArgumentError);
  ModelSpec high = spec();
  high.floor = 40 * kMiB;
  EXPECT_THROW(shared_->register_model("a", high), InvalidArgumentError);
  EXPECT_FALSE(shared_->has_model("a"));
}

TEST_F(Shared, SecondAllocationsLandBehindTheFirst) {
  const auto a = add("a");
  const Address first = shared_->allocate_for_model("a", 3 * kMiB, nullptr);
  const Address second = shared_->allocate_for_model("a", kPage, nullptr);
  EXPECT_EQ(first, a->base());
  EXPECT_EQ(second, a->base() + 4 * kMiB);
  shared_->deallocate_for_model("a", 0, 3 * kMiB);
  EXPECT_EQ(shared_->allocate_for_model("a", kPage, nullptr), a->base()) << "the first free span";
}

TEST_F(Shared, TheLimitCountsWhatIsReallyMapped) {
  add("a");
  add("b");
  // 7 MiB and a byte cover 8 MiB of pages.
  for (int k = 0; k < 3; ++k) shared_->allocate_for_model("a", 7 * kMiB + 1, nullptr);
  EXPECT_EQ(shared_->global_stats().physical_usage, 24 * kMiB);
  shared_->allocate_for_model("b", 8 * kMiB, nullptr);
  try {
    shared_->allocate_for_model("b", 1, nullptr);
    FAIL() << "above the limit";
  } catch (const OutOfMemoryError& error) {
    EXPECT_EQ(error.limit, 32 * kMiB);
    EXPECT_EQ(error.available, 0U);
    EXPECT_EQ(error.pool, "b");
  }
  EXPECT_EQ(lab_.driver.live_chunk_bytes(), 32 * kMiB);
}

TEST_F(Shared, IdleMemoryOfOneModelServesAnother) {
  const auto a = add("a");
  const auto b = add("b");
  lab_.leave_idle(*a, 32 * kMiB);
  lab_.allocate(*b, 32 * kMiB);
  EXPECT_EQ(a->physical_bytes(), 0U);
}

TEST_F(Shared, GlobalStatsAddUp) {
  const auto a = add("a");
  const auto b = add("b");
  lab_.allocate(*a, 5 * kMiB);
  lab_.leave_idle(*b, 6 * kMiB);
  shared_->allocate_for_model("b", 4 * kMiB, nullptr);
  shared_->deallocate_for_model("b", shared_->allocate_for_model("b", 4 * kMiB, nullptr) - b->base(), 4 * kMiB);
  const GlobalMemoryStats stats = shared_->global_stats();
  EXPECT_EQ(stats.physical_limit, 32 * kMiB);
  EXPECT_EQ(stats.allocated_bytes, 9 * kMiB);
  EXPECT_EQ(stats.stranded_bytes, kMiB);
  EXPECT_EQ(stats.store_bytes, 4 * kMiB);
  EXPECT_EQ(stats.physical_usage, stats.allocated_bytes + stats.idle_bytes + stats.stranded_bytes +
                                      stats.quarantined_bytes + stats.store_bytes);
  EXPECT_EQ(stats.physical_usage, lab_.driver.live_chunk_bytes());
}

TEST_F(Shared, UnregisteringOneInUseIsRefusedUnlessForced) {
  const auto a = add("a");
  const Address block = lab_.allocate(*a, kPage);
  shared_->allocate_for_model("a", kPage, nullptr);
  try {
    shared_->unregister_model("a", /*force=*/false);
    FAIL();
  } catch (const StillInUseError& error) {
    EXPECT_EQ(error.live_blocks, 2U);
    EXPECT_EQ(error.live_bytes, 2 * kPage);
  }
  EXPECT_TRUE(shared_->has_model("a"));
  shared_->unregister_model("a", /*force=*/true);
  EXPECT_FALSE(shared_->has_model("a"));
  const auto again = add("a");  // the id is free, the old tensor lives on
  EXPECT_NE(again, a);
  Lab::fill(block, kPage, 1);
  lab_.free(block);
}

TEST_F(Shared, ClosingIsAllOrNothing) {
  add("idle");
  const auto busy = add("busy");
  const Address block = lab_.allocate(*busy, kPage);
  EXPECT_THROW(shared_->close(/*force=*/false), StillInUseError);
  EXPECT_EQ(shared_->model_ids().size(), 2U) << "no model went";
  lab_.free(block);
  shared_->close(/*force=*/false);
  EXPECT_TRUE(shared_->is_closed());
  EXPECT_EQ(lab_.driver.live_chunks(), 0U);
  EXPECT_EQ(lab_.driver.live_reservations(), 0U);
  EXPECT_NO_THROW(shared_->close(false));
  EXPECT_THROW(add("c"), InvalidArgumentError);
}

TEST_F(Shared, TensorsOutliveTheirClosedPool) {
  const auto a = add("a");
  const Address block = lab_.allocate(*a, kPage);
  shared_.reset();
  Lab::fill(block, kPage, 2);
  EXPECT_TRUE(Lab::holds(block, kPage, 2));
  lab_.free(block);
}

TEST_F(Shared, ALowerLimitGivesBackAndAHigherOneAdmits) {
  const auto a = add("a");
  lab_.leave_idle(*a, 32 * kMiB);
  EXPECT_EQ(shared_->set_physical_limit(8 * kMiB), 24 * kMiB);
  EXPECT_EQ(shared_->physical_limit(), 8 * kMiB);
  EXPECT_THROW(lab_.allocate(*a, 10 * kMiB), OutOfMemoryError);
  shared_->set_physical_limit(64 * kMiB);
  lab_.allocate(*a, 40 * kMiB);
}

TEST_F(Shared, TwoSharedPoolsDoNotTouchEachOther) {
  SharedMemoryPool other(lab_.memory(), 32 * kMiB);
  const auto a = add("a");
  const auto b = other.register_model("a", spec());  // the same id, another house
  lab_.leave_idle(*b, 32 * kMiB);
  lab_.allocate(*a, 32 * kMiB);
  EXPECT_EQ(b->physical_bytes(), 32 * kMiB);
}

// What is called once memory has passed may ask whatever it likes, on whichever thread.
TEST_F(Shared, WhatWaitedForTheGpuIsCalledWithNoLockHeld) {
  add("a");
  lab_.meet(stream(1));
  lab_.driver.hold_fences();
  std::future<bool> answer;  // where a lock is held it comes once that is given up
  bool was_free = false;
  lab_.memory().once_passed([&] {
    answer = std::async(std::launch::async, [&] { return shared_->has_model("a"); });
    was_free = answer.wait_for(std::chrono::seconds(1)) == std::future_status::ready;
    return true;
  });
  ASSERT_FALSE(answer.valid()) << "it waits";
  lab_.driver.release_fences();
  shared_->unregister_model("a", false);
  EXPECT_TRUE(answer.valid());
  EXPECT_TRUE(was_free);
}

}  // namespace
}  // namespace vmm::testing

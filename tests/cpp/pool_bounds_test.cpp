// What must not grow without end, spin, or be used after its end, as fresh
// readers found it to.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <map>
#include <thread>

#include "core/faces/shared_memory_pool.h"
#include "core/faces/virtual_memory_manager.h"
#include "cpp/lab.h"

namespace vmm::testing {
namespace {

TEST(Bounds, TicksDoNotGatherWhereOnlyTheGpuWaits) {
  Lab lab;
  PoolSpec spec = Lab::spec("a");
  spec.capacity = 4 * kMiB;
  const auto pool = lab.pool(spec);
  for (int turn = 0; turn < 1000; ++turn) {
    const Address block = lab.memory().allocate(*pool, 4 * kMiB, stream(turn % 2 == 0 ? 0x10 : 0x20));
    DeviceMemory::free(lab.space, block);
  }
  EXPECT_LT(lab.memory().clock().ticks_under_way(), 4U);
  EXPECT_LT(lab.driver.live_fences(), 20U);
}

TEST(Bounds, APageWhoseMappingTheDriverWillNotDropIsAnErrorNotALoop) {
  Lab lab;
  const auto pool = lab.pool("a");
  lab.memory().allocate_pages(*pool, 0, kPage, nullptr);
  lab.driver.fail_nth(Call::unmap, 1, broken(), Repeat::from_then_on);
  lab.memory().deallocate_pages(*pool, 0, kPage);
  EXPECT_THROW(lab.memory().allocate_pages(*pool, 0, kPage, nullptr), DriverError);
  lab.driver.clear_failures();
  lab.memory().allocate_pages(*pool, 0, kPage, nullptr);
  lab.memory().deallocate_pages(*pool, 0, kPage);
}

TEST(Bounds, AnAddressWhoseFormerMappingIsStillUsedIsWaitedFor) {
  Lab lab;
  const auto pool = lab.pool("a");
  lab.meet(stream(0x90));
  const Address block = lab.allocate(*pool, 32 * kMiB, nullptr);
  lab.driver.hold_fences(stream(0x90));
  lab.free(block);
  EXPECT_GT(pool->shed(0), 0U);
  lab.adopt(lab.memory().allocate_at(*pool, block, 32 * kMiB, nullptr));
  lab.memory().check();
}

struct Ended {
  Lab lab;
  std::unique_ptr<SharedMemoryPool> shared = std::make_unique<SharedMemoryPool>(lab.memory(), 64 * kMiB);
  std::shared_ptr<Pool> model;
  Ended() {
    ModelSpec spec;
    spec.virtual_capacity = kGiB;
    model = shared->register_model("a", spec);
    shared.reset();
  }
};

TEST(Bounds, AModelKeepsTheLimitOfItsEndedGroup) {
  const Ended ended;
  EXPECT_LE(ended.model->budget().headroom(), 64 * kMiB);
}

TEST(Bounds, AClosedModelSaysSoWhateverIsAsked) {
  Ended ended;
  for (const std::size_t bytes : {kMiB, 2 * kGiB}) {
    try {
      (void)ended.lab.memory().allocate(*ended.model, bytes, nullptr);
      ADD_FAILURE() << "it gave " << bytes;
    } catch (const OutOfMemoryError& error) {
      ADD_FAILURE() << error.what();
    } catch (const VmmError& error) {
      EXPECT_NE(std::string(error.what()).find("closed"), std::string::npos) << error.what();
    }
  }
}

TEST(Bounds, TheShelfKeepsItsBoundWhenQueuedWorkEnds) {
  LabSpec spec;
  spec.options.store_bytes = 16 * kMiB;
  spec.device_bytes = 2 * kGiB;
  Lab lab(spec);
  const auto pool = lab.pool("a");
  lab.meet(stream(0x90));
  lab.memory().allocate_pages(*pool, 0, 512 * kMiB, nullptr);
  lab.driver.hold_fences(stream(0x90));
  lab.memory().deallocate_pages(*pool, 0, 512 * kMiB);
  lab.driver.release_fences();
  lab.memory().settle(/*wait=*/true);
  EXPECT_LE(lab.memory().store().all_shelved_bytes(), 16 * kMiB);
}

TEST(Bounds, AnUndoThatTheDriverRefusesIsMadeLater) {
  Lab lab;
  const auto pool = lab.pool("a");
  lab.driver.fail_nth(Call::set_access, 1, broken());
  lab.driver.fail_nth(Call::unmap, 1, broken());
  try {
    lab.free(lab.allocate(*pool, 4 * kMiB, nullptr));
  } catch (const DriverError&) {
  }
  lab.driver.clear_failures();
  for (int turn = 0; turn < 3; ++turn) lab.free(lab.allocate(*pool, 4 * kMiB, nullptr));
  lab.memory().check();
}

class Segments final : public PoolObserver {
 public:
  void on_event(const Pool& /*pool*/, PoolEvent event, Address at, std::size_t /*bytes*/,
                Stream /*stream*/) noexcept override {
    if (event == PoolEvent::segment_alloc) ++mapped_[at];
    if (event == PoolEvent::segment_free && mapped_[at]-- == 0) ++strangers_;
  }
  [[nodiscard]] int strangers() const { return strangers_; }

 private:
  std::map<Address, int> mapped_;
  int strangers_ = 0;
};

TEST(Bounds, NobodyIsToldThatGoesWhatNeverCame) {
  Segments segments;
  Lab lab;
  const auto a = lab.pool("a");
  const auto b = lab.pool("b");
  lab.memory().allocate_pages(*a, 0, kPage, nullptr);
  lab.memory().deallocate_pages(*a, 0, kPage);
  a->settle();
  lab.memory().set_observer(&segments);
  lab.driver.fail_nth(Call::fill_async, 1, broken());
  lab.allocate(*b, kPage, nullptr);
  b->settle();
  lab.memory().set_observer(nullptr);
  EXPECT_EQ(segments.strangers(), 0);
}

TEST(Bounds, WhatARefusedRequestHadMadeGoesBack) {
  LabSpec spec;
  spec.device_bytes = 64 * kMiB;
  Lab lab(spec);
  const auto pool = lab.pool("a");
  EXPECT_THROW(lab.memory().allocate(*pool, 80 * kMiB, nullptr), OutOfMemoryError);
  EXPECT_EQ(lab.memory().committed_bytes(), 0U);
}

TEST(Bounds, WhoCreatesByHandWaitsWithNoLockHeld) {
  LabSpec spec;
  spec.device_bytes = 64 * kMiB;
  Lab lab(spec);
  const auto pool = lab.pool("a");
  lab.leave_idle(*pool, 64 * kMiB, stream(0x10));
  VirtualMemoryManager manager(lab.memory());
  const auto range = manager.reserve(kPage, VirtualMemoryManager::kDefaultAlignment);
  lab.driver.set_wait_on_held(ScriptedDriver::WaitOnHeld::block);
  lab.driver.hold_fences(stream(0x10));
  std::thread creator([&] { manager.free_physical(manager.alloc_physical(32 * kMiB, Location::on_device(0), false)); });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  std::atomic<bool> looked{false};
  std::thread onlooker([&] {
    (void)manager.mappings(range);
    looked = true;
  });
  for (int k = 0; k < 200 && !looked; ++k) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_TRUE(looked);
  lab.driver.release_fences();
  creator.join();
  onlooker.join();
  manager.close();
}

// Where ticks do not pass, former addresses gather: each costs a place in lists that are
// walked, so a request waits for the work before there are more than 1024 of them.
TEST(Bounds, OfFormerMappings) {
  Lab lab;
  const Stream behind = stream(0x20);
  lab.meet(behind);
  PoolSpec spec = Lab::spec("a");
  spec.capacity = 4 * kGiB;
  const auto pool = lab.pool(spec);
  lab.driver.hold_fences(behind);
  const auto waits = [&] { return lab.driver.count(Call::wait) + lab.driver.count(Call::synchronize); };
  lab.driver.clear_calls();
  for (std::size_t k = 0; k < 1023; ++k) {
    lab.memory().allocate_pages(*pool, k * kPage, kPage, nullptr);
    lab.memory().deallocate_pages(*pool, k * kPage, kPage);
  }
  lab.leave_idle(*pool, 4 * kMiB);
  EXPECT_EQ(waits(), 0U);
  lab.memory().allocate_pages(*pool, 1023 * kPage, kPage, nullptr);
  lab.memory().deallocate_pages(*pool, 1023 * kPage, kPage);
  lab.leave_idle(*pool, 4 * kMiB);
  EXPECT_GT(waits(), 0U);
}

}  // namespace
}  // namespace vmm::testing

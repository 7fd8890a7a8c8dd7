// What is out of memory and what is not, and what the error says.
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/faces/virtual_memory_manager.h"
#include "core/memory/address_space.h"
#include "cpp/reclaim_lab.h"

namespace vmm::testing {
namespace {

// -------------------------------------------------------------- the error

TEST_F(Reclaim, TheErrorSaysWhoAskedForWhatAndWhoHoldsWhat) {
  const auto a = model("llama", kPage, 0, 4 * kMiB);
  const auto b = model("qwen");
  lab_.allocate(*a, 24 * kMiB);
  lab_.allocate(*b, 4 * kMiB);
  try {
    lab_.allocate(*b, 12 * kMiB);
    FAIL() << "28 of 32 MiB are in use";
  } catch (const OutOfMemoryError& error) {
    const std::string text = error.what();
    for (const char* part : {"pool 'qwen': 12 MiB asked", "the shared pool: limit 32 MiB, mapped 28 MiB",
                             "'llama' 24 MiB in use", "'qwen' 4 MiB in use", "refused by the limit of the shared pool",
                             "free tensors of 8 MiB or raise the limit of the shared pool by 8 MiB"}) {
      EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is missing in: " << text;
    }
    EXPECT_EQ(text.find("floor"), std::string::npos) << "no floor is why: " << text;
    EXPECT_EQ(error.requested, 12 * kMiB);
    EXPECT_EQ(error.available, 4 * kMiB);
    EXPECT_EQ(error.limit, 32 * kMiB);
    EXPECT_EQ(error.pool, "qwen");
  }
  EXPECT_EQ(b->statistics().num_ooms, 1);
  EXPECT_EQ(a->statistics().num_ooms, 0);
  lab_.allocate(*b, 4 * kMiB);  // what fits still works
}

TEST_F(Reclaim, ARequestBeyondTheCapacityNamesTheCapacity) {
  const auto a = model("a");
  try {
    lab_.allocate(*a, 2 * kGiB);
    FAIL();
  } catch (const OutOfMemoryError& error) {
    EXPECT_EQ(error.limit, kGiB);
    EXPECT_NE(std::string(error.what()).find("virtual capacity"), std::string::npos) << error.what();
  }
}

TEST_F(Reclaim, TheLastRefusalIsKeptAsAValue) {
  const auto asker = model("asker");
  const auto b = model("b", kPage, 0, /*floor=*/20 * kMiB);
  const auto outside = lab_.pool("outside");
  lab_.allocate(*outside, 64 * kMiB);
  EXPECT_FALSE(lab_.memory().last_refusal().has_value());
  lab_.allocate(*asker, 4 * kMiB);
  lab_.leave_idle(*b, 28 * kMiB);
  EXPECT_THROW(lab_.allocate(*asker, 14 * kMiB), OutOfMemoryError);
  const auto refusal = lab_.memory().last_refusal();
  ASSERT_TRUE(refusal.has_value());
  EXPECT_EQ(refusal->requested, 14 * kMiB);
  EXPECT_EQ(refusal->available, 8 * kMiB) << "of b, had it done";
  EXPECT_EQ(refusal->limit, 32 * kMiB);
  EXPECT_EQ(refusal->pool, "asker");
  ASSERT_EQ(refusal->holders.size(), 2U) << "the pool outside stands under another limit";
  EXPECT_EQ(refusal->holders[0].name, "b");
  EXPECT_EQ(refusal->holders[0].idle, 28 * kMiB);
  EXPECT_EQ(refusal->holders[0].floor, 20 * kMiB);
  EXPECT_EQ(refusal->holders[1].name, "asker");
  EXPECT_EQ(refusal->holders[1].allocated, 4 * kMiB);
  EXPECT_EQ(refusal->holders[1].floor, 0U);
  EXPECT_NE(refusal->advice.find("give 'b' a lower floor: it keeps 20 MiB idle"), std::string::npos) << refusal->advice;
  EXPECT_THROW(lab_.allocate(*asker, 30 * kMiB), OutOfMemoryError);
  EXPECT_EQ(lab_.memory().last_refusal()->requested, 30 * kMiB) << "the last one";
}

TEST(ReclaimDriver, MemoryMadeByHandIsAHolderOfTheDevices) {
  Lab lab(LabSpec{32 * kMiB});
  const auto a = lab.pool("a");
  VirtualMemoryManager manager(lab.memory());
  manager.alloc_physical(20 * kMiB, Location::on_device(0), false);
  EXPECT_THROW(lab.allocate(*a, 16 * kMiB), OutOfMemoryError);
  const auto refusal = lab.memory().last_refusal();
  ASSERT_TRUE(refusal.has_value());
  ASSERT_EQ(refusal->holders.size(), 1U);
  EXPECT_EQ(refusal->holders[0].name, "VirtualMemoryManager");
  EXPECT_EQ(refusal->holders[0].allocated, 20 * kMiB);
}

TEST_F(Reclaim, WhoWantsToKnowIsToldOnceOfEachRequestThatFoundNoMemory) {
  const auto pool = lab_.pool("a", 8 * kMiB);
  std::vector<std::pair<const Pool*, std::size_t>> told;
  lab_.memory().set_on_out_of_memory([&](const Pool& asker, std::size_t bytes, Stream /*stream*/) {
    EXPECT_EQ(asker.physical_bytes(), 4 * kMiB);  // no lock is held: it may look
    told.emplace_back(&asker, bytes);
  });
  lab_.allocate(*pool, 4 * kMiB);
  EXPECT_TRUE(told.empty());
  for (const bool as_pages : {false, true}) {
    try {
      if (as_pages) {
        lab_.memory().allocate_pages(*pool, 16 * kMiB, 12 * kMiB, nullptr);
      } else {
        lab_.allocate(*pool, 12 * kMiB);
      }
      FAIL() << "the limit is 8 MiB";
    } catch (const OutOfMemoryError& error) {
      EXPECT_TRUE(error.is_told);
    }
    ASSERT_EQ(told.size(), as_pages ? 2U : 1U);
    EXPECT_EQ(told.back(), std::make_pair(static_cast<const Pool*>(pool.get()), 12 * kMiB));
    EXPECT_EQ(pool->statistics().num_ooms, static_cast<std::int64_t>(told.size()));
  }
  lab_.memory().set_on_out_of_memory(nullptr);
}

// ------------------------------------------- what must not be out of memory

TEST(NotOutOfMemory, AnotherStreamsIdleMemoryMayFillTheAddresses) {
  for (const std::size_t bytes : {std::size_t{512}, 4 * kMiB}) {
    for (const bool late : {false, true}) {
      Lab lab;
      PoolSpec spec = Lab::spec("a");
      spec.capacity = 64 * kMiB;
      const auto pool = lab.pool(spec);
      const Address block = lab.allocate(*pool, 64 * kMiB, kOne);
      if (late) lab.driver.hold_fences(kOne);
      lab.free(block);
      lab.driver.clear_calls();
      lab.allocate(*pool, bytes, kTwo);
      EXPECT_TRUE(!late || lab.driver.count(Call::stream_wait) > 0);
      EXPECT_EQ(lab.driver.count(Call::wait) + lab.driver.count(Call::synchronize), 0U);
      lab.allocate(*pool, bytes, kTwo);
      lab.driver.release_fences();
    }
  }
}

TEST(NotOutOfMemory, WhereTheGpuCannotWaitTheCallerDoes) {
  Lab lab;
  PoolSpec spec = Lab::spec("a");
  spec.capacity = 64 * kMiB;
  const auto pool = lab.pool(spec);
  lab.leave_idle(*pool, 64 * kMiB, kOne);
  lab.meet(kTwo);
  lab.driver.begin_capture(kTwo);
  lab.allocate(*pool, 4 * kMiB, kTwo);
  lab.driver.end_capture(kTwo);
}

TEST(NotOutOfMemory, NobodyTakesTheDriversMemoryFromTheLastRung) {
  HostDriver host({kPage, 16 * kMiB, 1});
  ScriptedDriver driver(host);
  AddressSpace space;
  Options options = LabSpec::plain_options();
  options.scrub = false;
  DeviceMemory memory(driver, space, 0, options);
  PoolSpec spec = Lab::spec("a");
  spec.page_size = 8 * kMiB;
  const auto a = memory.create_pool(spec, nullptr);
  const auto c = memory.create_pool(spec, nullptr);
  spec.page_size = kPage;
  const auto b = memory.create_pool(spec, nullptr);
  DeviceMemory::free(space, memory.allocate(*b, 16 * kMiB, nullptr));
  std::vector<std::thread> threads;
  bool busy = false;
  driver.before(Call::create, [&] {
    MemoryInfo info;
    ASSERT_TRUE(host.memory_info(0, &info).ok());
    if (busy || info.free != 16 * kMiB) return;  // right after idle memory has gone back
    busy = true;
    threads.emplace_back([&] {  // never more than 8 MiB at a time
      DeviceMemory::free(space, memory.allocate(*b, 8 * kMiB, nullptr));
      DeviceMemory::free(space, memory.allocate(*c, 8 * kMiB, nullptr));
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  });
  Address got = 0;
  EXPECT_NO_THROW(got = memory.allocate(*a, 8 * kMiB, nullptr));
  for (auto& thread : threads) thread.join();
  EXPECT_TRUE(busy);
  driver.before(Call::create, nullptr);
  if (got != 0) DeviceMemory::free(space, got);
}

}  // namespace
}  // namespace vmm::testing

// Threads' caches, the threads that have them and the devices that they are of: whichever
// ends first.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "cpp/lab.h"
#include "cpp/turns.h"

namespace vmm::testing {
namespace {

TEST(CacheLifetimes, NothingAtAllIsNoBlock) {
  Lab lab;
  const auto pool = lab.pool("a");
  warm(lab, *pool, 512);
  EXPECT_FALSE(DeviceMemory::free(lab.space, 0));
}

TEST(CacheLifetimes, AThreadEndsWhileItsDevicesEnd) {
  for (int round = 0; round < 5; ++round) {
    HostDriver host({kPage, kGiB, 1});
    AddressSpace space;
    std::vector<std::unique_ptr<DeviceMemory>> devices;
    for (int k = 0; k < 20; ++k)
      devices.push_back(std::make_unique<DeviceMemory>(host, space, 0, LabSpec::plain_options()));
    std::vector<std::shared_ptr<Pool>> pools;
    for (const auto& device : devices) {
      PoolSpec spec;
      spec.name = "a";
      spec.capacity = kGiB;
      pools.push_back(device->create_pool(spec, nullptr));
    }
    std::atomic<bool> is_done{false};
    std::thread thread([&] {
      for (std::size_t k = 0; k < devices.size(); ++k) {
        EXPECT_TRUE(DeviceMemory::free(space, devices[k]->allocate(*pools[k], 512, nullptr)));
      }
      is_done.store(true);
    });
    while (!is_done.load()) std::this_thread::yield();
    pools.clear();
    while (!devices.empty()) devices.pop_back();
    thread.join();
  }
}

// Whose block it frees a thread knows only after it has looked into its own cache.
TEST(CacheLifetimes, AThreadFreesWhatIsNobodysWhileItsDeviceEnds) {
  HostDriver host({kPage, kGiB, 1});
  AddressSpace space;
  for (int round = 0; round < 50; ++round) {
    auto device = std::make_unique<DeviceMemory>(host, space, 0, LabSpec::plain_options());
    PoolSpec spec;
    spec.name = "a";
    spec.capacity = kGiB;
    auto pool = device->create_pool(spec, nullptr);
    std::atomic<bool> is_ready{false};
    std::atomic<bool> stop{false};
    std::thread thread([&] {
      EXPECT_TRUE(DeviceMemory::free(space, device->allocate(*pool, 512, nullptr)));
      is_ready.store(true);
      while (!stop.load(std::memory_order_relaxed)) EXPECT_FALSE(DeviceMemory::free(space, 0x1000));
    });
    while (!is_ready.load()) std::this_thread::yield();
    pool.reset();
    device.reset();
    stop.store(true);
    thread.join();
  }
}

// A thread's last look at a device that has ended finds nothing, and harms nobody.
TEST(CacheLifetimes, AThreadFreesOnOneDeviceAfterAnotherHasEnded) {
  Lab lab;
  const auto pool = lab.pool("a");
  const Address block = lab.memory().allocate(*pool, 512, nullptr);
  {
    Lab other;
    const auto pool_there = other.pool("b");
    for (int round = 0; round < 3; ++round) other.free(other.allocate(*pool_there, 512));
  }
  EXPECT_TRUE(DeviceMemory::free(lab.space, block));
  EXPECT_EQ(pool->live_blocks(), 0U);
}

}  // namespace
}  // namespace vmm::testing

// Threads at once: some sleep and wake models, others allocate, spill, close and set limits.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <thread>

#include "core/faces/seals.h"
#include "core/memory/shared_chunks.h"
#include "cpp/reclaim_lab.h"
#include "cpp/sleep_lab.h"

namespace vmm::testing {
namespace {

class SleepThreads : public Sleep {
 protected:
  static std::chrono::seconds time() {
    const char* const seconds = std::getenv("VMM_SECONDS");
    return std::chrono::seconds(seconds == nullptr ? 2 : std::atoi(seconds));
  }
  void note(const std::string& what) {
    const MutexLock lock(mutex_);
    ++said_[what.substr(0, 70)];
  }
  Mutex mutex_;
  std::map<std::string, int> said_;
};

TEST_F(SleepThreads, AllAtOnce) {
  const auto group = lab_.memory().create_group("g", 160 * kMiB);
  const auto one = lab_.pool(Lab::spec("one"), group.get());
  const auto two = lab_.pool(Lab::spec("two"), group.get());
  const auto weights = lab_.memory().tagged(one, "w");
  lab_.memory().set_spills(*two, true);
  std::vector<Live> live = fill(*weights, {512, 3 * kMiB});
  seal_pages(lab_.memory(), *one, pieces(live));
  std::atomic<bool> stop{false};
  std::atomic<int> slept{0};
  std::vector<std::thread> threads;
  const auto loop = [&](const auto& step) {
    threads.emplace_back([&, step, first = static_cast<unsigned>(threads.size())] {
      std::mt19937 random(first);
      while (!stop) {
        try {
          step(random);
        } catch (const VmmError& error) {
          note(error.what());
        } catch (const std::exception& error) {
          note(std::string("!! ") + error.what());
          ADD_FAILURE() << error.what();
        }
      }
    });
  };
  const auto parts = [&](const std::shared_ptr<Pool>& pool, bool by_file) {
    std::vector<PartToSleep> found;
    for (const auto& member : lab_.memory().family(*pool)) found.push_back({member, by_file ? discard() : host()});
    return found;
  };
  loop([&](std::mt19937&) {  // one sleeps and wakes, its own memory unchanged
    for (const auto& each : live) {
      if (Lab::first_wrong(each.address, each.bytes, each.seed) != each.bytes) ADD_FAILURE() << "lost";
    }
    Transfer out(std::make_unique<Departure>(sleeper_, parts(one, false), false), nullptr);
    go(out);
    ++slept;
    // Until it is awake: another thread may lower at once what is raised here.
    for (int k = 1;; ++k) {
      try {
        Transfer in(nullptr,
                    std::make_unique<Arrival>(sleeper_, lab_.memory().family(*one), Arrival::Memory::collected));
        go(in);
        return;
      } catch (const OutOfMemoryError& error) {
        note(error.what());
      }
      if (k % 50 == 0) lab_.memory().set_limit(*group, 400 * kMiB);
    }
  });
  for (int k = 0; k < 2; ++k) {
    loop([&](std::mt19937& random) {
      std::vector<Live> mine;
      const auto below = [&](std::size_t n) { return std::uniform_int_distribution<std::size_t>(0, n - 1)(random); };
      for (int step = 0; step < 30; ++step) {
        Pool& pool = below(3) == 0 ? *one : *two;
        const std::size_t bytes = below(2) == 0 ? 512 * (1 + below(100)) : kMiB * (1 + below(20)) + 512;
        try {
          const Address address = lab_.memory().allocate(pool, bytes, below(2) == 0 ? kOne : kTwo);
          mine.push_back({address, bytes, below(1000)});
          if (&pool == two.get()) Lab::fill(address, bytes, mine.back().seed);
          if (&pool != two.get()) mine.back().seed = 5000;
        } catch (const VmmError& error) {
          note(error.what());
        }
        if (below(2) == 0 && !mine.empty()) {
          const Live last = mine[below(mine.size())];
          if (last.seed < 5000 && Lab::first_wrong(last.address, last.bytes, last.seed) != last.bytes) {
            ADD_FAILURE() << "overwritten";
          }
          std::erase_if(mine, [&](const Live& each) { return each.address == last.address; });
          DeviceMemory::free(lab_.space, last.address);
        }
      }
      for (const Live& each : mine) DeviceMemory::free(lab_.space, each.address);
    });
  }
  loop([&](std::mt19937& random) {  // limits, floors, priorities
    const auto below = [&](std::size_t n) { return std::uniform_int_distribution<std::size_t>(0, n - 1)(random); };
    switch (below(7)) {
      case 0:
        lab_.memory().set_limit(*group, (60 + below(100)) * kMiB);
        break;
      case 1:
        lab_.memory().set_floor(*one, below(40) * kMiB);
        break;
      case 2:
        lab_.memory().set_floor(*two, below(40) * kMiB);
        break;
      case 3:
        two->budget().set_priority(static_cast<int>(below(3)));
        break;
      case 4:
        lab_.memory().set_limit(*lab_.memory().spill_group_of(*group), below(64) * kMiB);
        break;
      case 5:
        lab_.memory().trim(*two, below(2) * 8 * kMiB);
        break;
      default:
        static_cast<void>(lab_.memory().group_stats(*group));
        static_cast<void>(lab_.memory().memory_stats_of(*two));
        if (below(10) == 0) sleeper_.release_host_memory(*group);
        if (below(10) == 0) lab_.memory().empty_cache();
    }
  });
  loop([&](std::mt19937& random) {  // a model that comes, spills, sleeps and is closed
    const auto below = [&](std::size_t n) { return std::uniform_int_distribution<std::size_t>(0, n - 1)(random); };
    const auto three = lab_.pool(Lab::spec("three"), group.get());
    lab_.memory().set_spills(*three, true);
    std::vector<Address> mine;
    try {
      for (int k = 0; k < 6; ++k) mine.push_back(lab_.memory().allocate(*three, (1 + below(12)) * kMiB + 512, kOne));
      Transfer out(std::make_unique<Departure>(sleeper_, parts(three, below(2) == 0), false), nullptr);
      go(out);
      Transfer in(nullptr,
                  std::make_unique<Arrival>(sleeper_, lab_.memory().family(*three), Arrival::Memory::collected));
      if (below(2) == 0) go(in);
    } catch (const VmmError& error) {
      note(error.what());
    }
    lab_.memory().close_pool(*three, true);
    for (const Address each : mine) DeviceMemory::free(lab_.space, each);
  });
  std::this_thread::sleep_for(time());
  stop = true;
  for (std::thread& each : threads) each.join();
  lab_.memory().set_limit(*group, kUnlimited);
  for (int k = 0; k < 2; ++k) {
    if (one->is_asleep() || weights->is_asleep()) go(*coming(one));
  }
  lab_.memory().settle(true);
  lab_.memory().check();
  expect_whole(live);
  EXPECT_TRUE(weights->is_sealed());
  std::printf("slept %d times\n", slept.load());
  for (const auto& [what, times] : said_) std::printf("%6d %s\n", times, what.c_str());
  unseal_pages(lab_.memory(), *one, pieces(live));
  EXPECT_EQ(sleeper_.host_memory(*group)->used_bytes(), 0U);
  EXPECT_LE(lab_.memory().pools().size(), 4U);
}

}  // namespace
}  // namespace vmm::testing

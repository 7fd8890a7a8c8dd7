// Models of one device that sleep on another: what of it they hold, and what stays for the next.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cpp/sleep_lab.h"

namespace vmm::testing {
namespace {

// Their home is device 0, and they sleep on `other`.
struct TwoDevices {
  explicit TwoDevices(std::size_t device_bytes = kGiB) : lab(spec(device_bytes)) {}
  static LabSpec spec(std::size_t device_bytes) {
    LabSpec spec;
    spec.device_count = 2;
    spec.device_bytes = device_bytes;
    return spec;
  }
  void go(const std::shared_ptr<Pool>& pool) { go(pool, {Place::Kind::device, "", &other}); }
  void go(const std::shared_ptr<Pool>& pool, const Place& place) {
    Transfer out(std::make_unique<Departure>(sleeper, std::vector<PartToSleep>{{pool, {place}}}, false), nullptr);
    out.begin(&look_away);
    out.run(&look_away);
  }
  // `before_it_runs` is called when it has begun.
  void come(const std::shared_ptr<Pool>& pool, const Look& before_it_runs = &look_away) {
    Transfer in(nullptr, std::make_unique<Arrival>(sleeper, PoolList{pool}, Arrival::Memory::collected));
    in.begin(&look_away);
    before_it_runs();
    in.run(&look_away);
  }
  void go() { go(model); }
  void come(const Look& before_it_runs = &look_away) { come(model, before_it_runs); }
  [[nodiscard]] std::size_t calls(Call call) const { return lab.driver.calls(call).size(); }
  Address fill(Pool& pool, std::size_t bytes, std::uint64_t seed) {
    const Address address = lab.allocate(pool, bytes);
    Lab::fill(address, bytes, seed);
    return address;
  }

  Lab lab;
  DeviceMemory other{lab.driver, lab.space, 1, LabSpec::plain_options()};
  Sleeper sleeper{lab.memory()};
  std::shared_ptr<Pool> model = lab.pool("model");
};

// A driver that refuses once when the backup ends, or when its memory goes.
TEST(SleepOnDevices, ARefusalCostsNoMemoryForEver) {
  for (const Call call : {Call::release, Call::unmap}) {
    TwoDevices two;
    two.lab.allocate(*two.model, 8 * kMiB);
    two.go();
    EXPECT_EQ(two.other.budget().used(), 8 * kMiB);
    two.come([&] { two.lab.driver.fail_nth(call, 1, broken()); });
    two.lab.driver.clear_failures();
    two.lab.driver.fail_nth(call, 1, broken());
    two.other.empty_cache();
    EXPECT_EQ(two.other.budget().used(), 8 * kMiB) << "refused, and counts: " << to_string(call);
    two.other.empty_cache();
    EXPECT_EQ(two.other.budget().used(), 0U) << to_string(call);
  }
}

// A device on which others have memory idle has room for a model that sleeps.
TEST(SleepOnDevices, WhatIsIdleThereMakesRoom) {
  TwoDevices two(64 * kMiB);
  two.lab.allocate(*two.model, 16 * kMiB);
  const auto theirs = two.other.create_pool(Lab::spec("theirs"), nullptr);
  DeviceMemory::free(two.lab.space, two.other.allocate(*theirs, 60 * kMiB, nullptr));
  try {
    two.go();
    two.come();
  } catch (const OutOfMemoryError& error) {
    ADD_FAILURE() << error.what();
  }
  two.other.close_pool(*theirs, true);
}

// Whoever goes there again finds it as it was left: created, mapped and open.
TEST(SleepOnDevices, TheNextSleepAsksTheDriverForNothingThere) {
  TwoDevices two;
  const std::size_t bytes = 44 * kMiB;
  const Address address = two.fill(*two.model, bytes, 7);
  two.go();
  two.come();
  two.lab.driver.clear_calls();
  for (int round = 0; round < 3; ++round) {
    two.go();
    EXPECT_EQ(two.calls(Call::create) + two.calls(Call::map) + two.calls(Call::set_access), 0U);
    EXPECT_EQ(two.calls(Call::copy_async), 1U) << "over the borders of chunks";
    EXPECT_EQ(two.other.guests().idle_bytes(), 0U);
    two.come();
    EXPECT_EQ(two.calls(Call::copy_async), 2U);
    EXPECT_EQ(two.calls(Call::create) + two.calls(Call::release) + two.calls(Call::reserve), 0U);
    EXPECT_EQ(two.other.guests().used_bytes(), 0U);
    two.lab.driver.clear_calls();
    EXPECT_EQ(Lab::first_wrong(address, bytes, 7), bytes);
  }
  EXPECT_EQ(two.other.budget().used(), bytes) << "idle there";
  EXPECT_EQ(two.other.empty_cache(), bytes);
  EXPECT_EQ(two.other.budget().used(), 0U);
}

// What is idle there is in nobody's way: whether the device is full or a limit on it is.
TEST(SleepOnDevices, WhatTheyLeftGoesToTheModelsThere) {
  for (const bool is_limited : {false, true}) {
    TwoDevices two(64 * kMiB);
    const Address address = two.fill(*two.model, 48 * kMiB, 3);
    two.go();
    two.come();
    EXPECT_EQ(two.other.guests().idle_bytes(), 48 * kMiB);
    if (is_limited) two.other.budget().set_limit(56 * kMiB);
    const auto theirs = two.other.create_pool(Lab::spec("theirs"), nullptr);
    const std::size_t waits = two.calls(Call::synchronize);
    const Address block = two.other.allocate(*theirs, 40 * kMiB, nullptr);
    EXPECT_EQ(two.calls(Call::synchronize), waits) << "nothing is waited for";
    if (is_limited) {
      EXPECT_EQ(two.other.guests().idle_bytes(), 16 * kMiB) << "what the limit does not lack stays";
    }
    two.other.check();
    DeviceMemory::free(two.lab.space, block);
    two.other.close_pool(*theirs, true);
    two.go();
    two.come();
    EXPECT_EQ(Lab::first_wrong(address, 48 * kMiB, 3), 48 * kMiB);
  }
}

TEST(SleepOnDevices, ALoweredLimitTakesWhatIsIdle) {
  TwoDevices two;
  two.lab.allocate(*two.model, 48 * kMiB);
  two.go();
  two.come();
  EXPECT_EQ(two.other.set_limit(two.other.budget(), 8 * kMiB), 48 * kMiB);
  EXPECT_THROW(two.go(), OutOfMemoryError);
  EXPECT_FALSE(two.model->is_asleep());
  EXPECT_EQ(two.other.budget().used(), 0U);
  two.other.set_limit(two.other.budget(), kUnlimited);
  two.go();
  two.come();
}

TEST(SleepOnDevices, ALimitThatWasLoweredMeanwhileHoldsWhenItWakes) {
  TwoDevices two;
  two.lab.allocate(*two.model, 48 * kMiB);
  two.go();
  two.other.set_limit(two.other.budget(), 8 * kMiB);
  EXPECT_EQ(two.other.budget().used(), 48 * kMiB) << "in use";
  two.come();
  EXPECT_EQ(two.other.budget().used(), 0U);
}

// What guests left in other sizes goes before anything that is idle in the pools there.
TEST(SleepOnDevices, GuestsMakeRoomForEachOtherFirst) {
  TwoDevices two(64 * kMiB);
  two.lab.allocate(*two.model, 48 * kMiB);
  const auto theirs = two.other.create_pool(Lab::spec("theirs"), nullptr);
  DeviceMemory::free(two.lab.space, two.other.allocate(*theirs, 8 * kMiB, nullptr));
  two.go();
  two.come();
  const auto small = two.lab.pool("small");
  two.lab.allocate(*small, 14 * kMiB);
  const std::size_t waits = two.calls(Call::synchronize);
  two.go(small);
  EXPECT_EQ(theirs->idle_bytes(), 8 * kMiB);
  EXPECT_EQ(two.other.guests().idle_bytes(), 0U);
  EXPECT_LE(two.calls(Call::synchronize), waits + 1) << "the one of going to sleep";
  two.come(small);
  two.other.close_pool(*theirs, true);
}

TEST(SleepOnDevices, WhatTheDriverSaysIsToldAsItIs) {
  for (const Call call : {Call::reserve, Call::create}) {
    TwoDevices two;
    two.lab.allocate(*two.model, 8 * kMiB);
    two.lab.driver.fail_nth(call, 1, broken());
    EXPECT_THROW(two.go(), DriverError) << to_string(call);
    two.lab.driver.clear_failures();
    EXPECT_FALSE(two.model->is_asleep());
    EXPECT_EQ(two.other.budget().used(), 0U);
    two.go();
    two.come();
  }
}

// Whoever is refused memory there learns who has it.
TEST(SleepOnDevices, ARefusalNamesThem) {
  TwoDevices two(64 * kMiB);
  two.lab.allocate(*two.model, 48 * kMiB);
  two.go();
  const auto theirs = two.other.create_pool(Lab::spec("theirs"), nullptr);
  try {
    two.other.allocate(*theirs, 40 * kMiB, nullptr);
    ADD_FAILURE() << "there is no room";
  } catch (const OutOfMemoryError& error) {
    const std::string said = error.what();
    EXPECT_NE(said.find("models of other devices, asleep here"), std::string::npos) << said;
    EXPECT_EQ(said.find("MemPools"), std::string::npos) << said;
    EXPECT_EQ(said.find("VirtualMemoryManager"), std::string::npos) << said;
  }
  two.come();
  DeviceMemory::free(two.lab.space, two.other.allocate(*theirs, 40 * kMiB, nullptr));
  two.other.close_pool(*theirs, true);
}

// Both find what is kept, and neither waits for the other; nor does the model, which wakes.
TEST(SleepOnDevices, ABackupHasSeveralReaders) {
  TwoDevices two;
  const Address block = two.lab.allocate(*two.model, 4 * kMiB);
  Lab::fill(block, 4 * kMiB, 1);
  two.go();
  std::vector<std::byte> first(4 * kMiB);
  std::vector<std::byte> second(4 * kMiB);
  two.lab.driver.delay(Call::read, std::chrono::milliseconds(200));
  const std::size_t reads = two.lab.driver.count(Call::read);
  bool is_found = false;
  std::thread reader([&] { is_found = two.model->read_kept(block, first.size(), first.data()); });
  while (two.lab.driver.count(Call::read) == reads) std::this_thread::yield();
  EXPECT_TRUE(two.model->read_kept(block, second.size(), second.data()));
  two.come();
  reader.join();
  EXPECT_TRUE(is_found);
  EXPECT_EQ(first, second);
  EXPECT_TRUE(Lab::holds(block, 4 * kMiB, 1));
  EXPECT_EQ(std::memcmp(first.data(), reinterpret_cast<const void*>(block), first.size()), 0);
  EXPECT_FALSE(two.model->read_kept(block, first.size(), first.data())) << "it is awake";
  two.other.empty_cache();
}

// Slabs stand at the top, the first of them highest. From host memory they come first; from
// another device some do, and the others among the rest; what was thrown away has them last. (In a
// larger pool several are one chunk.)
TEST(SleepOnDevices, SlabsComeFirstOrInTurnsOrLast) {
  constexpr std::size_t kSlabs = 20;
  for (const Place::Kind kind : {Place::Kind::host, Place::Kind::device, Place::Kind::discard}) {
    TwoDevices two;
    const bool is_kept = kind != Place::Kind::discard;
    std::vector<std::size_t> bytes(kSlabs * 2, kMiB);  // two fill a slab
    bytes.insert(bytes.end(), 2, 20 * kMiB);
    std::vector<Address> blocks;
    for (const std::size_t each : bytes) blocks.push_back(two.fill(*two.model, each, blocks.size()));
    two.go(two.model, {kind, "", kind == Place::Kind::device ? &two.other : nullptr});
    two.lab.driver.clear_calls();
    two.come();
    const Address lowest_slab = *std::min_element(blocks.begin(), blocks.begin() + kSlabs * 2);
    std::vector<std::size_t> slabs;  // by the order in which all came
    std::size_t count = 0;
    Address before = ~Address{0};
    for (const CallRecord& call : two.lab.driver.calls(Call::map)) {
      if (call.a >= lowest_slab) {
        EXPECT_LT(call.a, before) << "as they were made";
        before = call.a;
        slabs.push_back(count);
      }
      ++count;
    }
    ASSERT_EQ(slabs.size(), kSlabs);
    if (is_kept) {
      EXPECT_EQ(slabs[15], 15U) << "some at once";
      EXPECT_LT(slabs.back(), count - 1) << "the last of the rest comes last";
    }
    if (kind == Place::Kind::host) {
      EXPECT_EQ(slabs.back(), kSlabs - 1);
    }
    if (kind == Place::Kind::device) {
      EXPECT_GE(slabs.back(), kSlabs);
    }
    if (kind == Place::Kind::discard) {
      EXPECT_EQ(slabs.front(), count - kSlabs);
    }
    for (std::size_t k = 0; k < blocks.size(); ++k) {
      EXPECT_TRUE(is_kept ? Lab::holds(blocks[k], bytes[k], k) : Lab::is_zero(blocks[k], bytes[k])) << k;
    }
  }
}

// Every call of the driver fails in turn: nothing is lost, here or there.
TEST(SleepOnDevices, EveryCallFails) {
  bool has_failed = true;
  for (std::uint64_t n = 1; has_failed; ++n) {
    TwoDevices two;
    const std::size_t bytes = 12 * kMiB + kPage;
    const Address address = two.fill(*two.model, bytes, n);
    if (n % 2 == 0) {  // what it left there is taken again
      two.go();
      two.come();
    }
    two.lab.driver.fail_nth_call(n, broken());
    try {
      two.go();
      two.come();
    } catch (const VmmError&) {
    }
    has_failed = two.lab.driver.failures() != 0;
    two.lab.driver.clear_failures();
    two.lab.memory().check();
    two.other.check();
    if (two.model->is_asleep()) two.come();
    EXPECT_EQ(Lab::first_wrong(address, bytes, n), bytes) << "call " << n;
    two.other.settle(/*wait=*/true);
    EXPECT_EQ(two.other.guests().used_bytes(), 0U) << "call " << n;
    two.other.empty_cache();
    EXPECT_EQ(two.other.budget().used(), 0U) << "call " << n;
  }
}

// Models of many sizes go and come in any order, while others there take and free memory.
TEST(SleepOnDevices, AnyOrderOfSizes) {
  std::mt19937 random(11);
  const auto draw = [&](std::size_t below) { return random() % below; };
  TwoDevices two(256 * kMiB);
  struct OfModel {
    std::shared_ptr<Pool> pool;
    Address address = 0;
    std::size_t bytes = 0;
  };
  std::vector<OfModel> models;
  for (std::size_t k = 0; k < 5; ++k) {
    const auto pool = two.lab.pool("model " + std::to_string(k));
    const std::size_t bytes = kPage * (1 + draw(40)) + 512 * draw(100);
    models.push_back({pool, two.fill(*pool, bytes, k), bytes});
  }
  const auto theirs = two.other.create_pool(Lab::spec("theirs"), nullptr);
  std::vector<Address> taken;
  std::size_t reserved = 0;
  for (int step = 0; step < 200; ++step) {
    OfModel& one = models[draw(models.size())];
    try {
      if (one.pool->is_asleep()) {
        two.come(one.pool);
      } else {
        two.go(one.pool);
      }
    } catch (const OutOfMemoryError&) {
      EXPECT_FALSE(one.pool->is_asleep()) << "refused, and awake";
    }
    if (draw(3) == 0) {
      try {
        taken.push_back(two.other.allocate(*theirs, kPage * (1 + draw(60)), nullptr));
      } catch (const OutOfMemoryError&) {
      }
    } else if (!taken.empty() && draw(2) == 0) {
      DeviceMemory::free(two.lab.space, taken.back());
      taken.pop_back();
    }
    if (draw(40) == 0) two.other.empty_cache();
    two.other.check();
    std::size_t asleep = 0;
    for (const OfModel& each : models) {
      if (each.pool->is_asleep()) {
        asleep += align_up(each.bytes, kPage);
      } else if (&each == &one) {
        ASSERT_EQ(Lab::first_wrong(each.address, each.bytes, static_cast<std::size_t>(&each - models.data())),
                  each.bytes)
            << "step " << step;
      }
    }
    ASSERT_EQ(two.other.guests().used_bytes(), asleep) << "step " << step;
    if (step == 100) reserved = two.calls(Call::reserve);
  }
  EXPECT_LE(two.calls(Call::reserve), reserved + 1) << "addresses serve again";
  for (const OfModel& each : models) {
    if (each.pool->is_asleep()) two.come(each.pool);
  }
  for (const Address each : taken) DeviceMemory::free(two.lab.space, each);
  two.other.empty_cache();
  EXPECT_EQ(two.other.guests().used_bytes() + two.other.guests().idle_bytes(), 0U);
  two.other.close_pool(*theirs, true);
}

// While the device that is named first is asked, another part of the model goes to the file.
TEST(SleepOnDevices, AFileThatIsNamedSecondIsNobodyElsesMeanwhile) {
  TwoDevices two;
  const fs::path folder = fs::temp_directory_path() / ("vmm_second_place_" + std::to_string(::getpid()));
  fs::create_directories(folder);
  const std::string path = (folder / "model").string();
  const auto first = two.lab.memory().tagged(two.model, "first");
  const auto second = two.lab.memory().tagged(two.model, "second");
  two.fill(*first, 4 * kMiB, 1);
  two.fill(*second, 4 * kMiB, 2);
  bool is_asked = false;
  two.lab.driver.before(Call::reserve, [&] {
    if (!std::exchange(is_asked, true)) two.go(second, {Place::Kind::file, path, nullptr});
  });
  two.lab.driver.fail_if([](const CallRecord& call) { return call.call == Call::reserve; }, no_memory());
  const Places places = {{Place::Kind::device, "", &two.other}, {Place::Kind::file, path, nullptr}};
  Transfer out(std::make_unique<Departure>(two.sleeper, std::vector<PartToSleep>{{first, places}}, false), nullptr);
  out.begin(&look_away);
  out.run(&look_away);
  two.lab.driver.before(Call::reserve, nullptr);
  two.lab.driver.clear_failures();
  EXPECT_TRUE(is_asked) << "the test is about nothing";
  EXPECT_EQ(where(*first), path);
  EXPECT_EQ(where(*second), path + ".2");
  two.come(first);
  two.come(second);
  fs::remove_all(folder);
}

}  // namespace
}  // namespace vmm::testing

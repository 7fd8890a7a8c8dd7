// Random programs of memory that is sealed, slept, aliased, shrunk and grown: whatever was
// written is there. And what keeping unchanged contents must not cost.
#include <gtest/gtest.h>

#include <cstdio>
#include <optional>
#include <random>

#include "core/faces/seals.h"
#include "core/faces/tensor_alias.h"
#include "core/faces/tensor_range.h"
#include "cpp/sleep_lab.h"

namespace vmm::testing {
namespace {

class SleepChanges : public Sleep {
 protected:
  struct Tensor {
    Address address = 0;
    std::size_t bytes = 0;
    std::uint64_t seed = 0;
    bool sealed = false;
  };
  std::size_t host_bytes() { return sleeper_.host_memory(lab_.memory().budget())->used_bytes(); }
};

TEST_F(SleepChanges, ARandomProgramOfAllThatMayChangeMemory) {
  for (unsigned seed = 1; seed <= 3; ++seed) {
    std::mt19937 random(seed);
    const auto below = [&](std::size_t n) { return std::uniform_int_distribution<std::size_t>(0, n - 1)(random); };
    const auto model = lab_.pool("model" + std::to_string(seed));
    const auto eater = lab_.pool("eater" + std::to_string(seed));
    auto range = std::make_unique<TensorRange>(lab_.memory(), model, TensorRangeSpec{"r", 64 * kMiB, 0, false});
    std::size_t committed = 0;
    std::vector<std::uint64_t> of_pages(32, 0);  // of the range's pages of 2 MiB
    bool range_sealed = false;
    std::vector<Tensor> tensors;
    std::vector<Address> eaten;
    std::uint64_t pattern = 1;
    bool asleep = false;
    std::size_t spared = 0;
    std::size_t stopped = 0;
    const auto check = [&](const char* when, int step) {
      for (const Tensor& each : tensors) {
        ASSERT_EQ(Lab::first_wrong(each.address, each.bytes, each.seed), each.bytes)
            << when << ", step " << step << ", seed " << seed << ", sealed " << each.sealed;
      }
      for (std::size_t page = 0; page < committed; ++page) {
        const Address at = range->base() + page * kPage;
        if (of_pages[page] == 0) continue;
        ASSERT_EQ(Lab::first_wrong(at, kPage, of_pages[page]), kPage)
            << "page " << page << " " << when << ", step " << step << ", seed " << seed;
      }
    };
    for (int step = 0; step < 100; ++step) {
      const auto tag = asleep ? nullptr : lab_.memory().tagged(model, "w");
      switch (below(asleep ? 3 : 12)) {
        case 0:
        case 1: {  // sleep or wake, perhaps stopped, perhaps with a failing driver
          const std::size_t stop = below(3) == 0 ? 1 + below(10) : 0;
          const bool fails = below(4) == 0;
          std::size_t looks = 0;
          const Look look = [&] {
            if (++looks == stop) throw VmmError("stopped");
          };
          if (fails) lab_.driver.fail_nth_call(1 + below(40), broken());
          lab_.driver.clear_calls();
          try {
            if (asleep) {
              go(*coming(model), look);
              asleep = false;
            } else {
              go(*going({model}, below(8) == 0 ? file() : below(3) == 0 ? packed() : host()), look);
              asleep = true;
              if (lab_.driver.count(Call::copy_async) == 0) ++spared;
            }
          } catch (const VmmError&) {
            ++stopped;
          }
          lab_.driver.clear_failures();
          bool any = false;
          for (const auto& member : lab_.memory().family(*model)) any = any || member->is_asleep();
          if (!asleep && any) go(*coming(model));
          lab_.memory().check();
          if (!asleep) check("awake", step);
          break;
        }
        case 2:  // others eat, so that chunks of other sizes come
          if (below(2) == 0 || eaten.empty()) {
            try {
              eaten.push_back(lab_.memory().allocate(*eater, (1 + below(40)) * kMiB, nullptr));
              Lab::fill(eaten.back(), kMiB, 99);
            } catch (const OutOfMemoryError&) {
            }
          } else {
            DeviceMemory::free(lab_.space, eaten.back());
            eaten.pop_back();
            if (below(2) == 0) lab_.memory().trim_passed(*eater, [&] { eater->shed(0); });
          }
          break;
        case 3:
        case 4:  // a tensor comes
          if (tensors.size() < 10) {
            const std::size_t bytes = below(2) == 0 ? 512 * (1 + below(300)) : (1 + below(20)) * kMiB;
            tensors.push_back({lab_.memory().allocate(*tag, bytes, nullptr), bytes, ++pattern, false});
            Lab::fill(tensors.back().address, bytes, pattern);
          }
          break;
        case 5:  // or goes
          if (!tensors.empty()) {
            const std::size_t which = below(tensors.size());
            DeviceMemory::free(lab_.space, tensors[which].address);
            tensors.erase(tensors.begin() + static_cast<std::ptrdiff_t>(which));
          }
          break;
        case 6:
        case 7: {  // seal, all or some
          std::vector<Live> some;
          for (const Tensor& each : tensors) {
            if (below(4) != 0) some.push_back({each.address, each.bytes, 0});
          }
          if (some.empty()) break;
          try {
            seal_pages(lab_.memory(), *model, pieces(some));
          } catch (const InvalidArgumentError&) {
            break;
          }
          for (Tensor& each : tensors) {
            each.sealed = lab_.memory().pool_at(each.address)->has_read_only(each.address, each.bytes);
          }
          break;
        }
        case 8: {  // unseal, all or some, and write
          std::vector<Live> some;
          for (const Tensor& each : tensors) {
            if (below(3) != 0) some.push_back({each.address, each.bytes, 0});
          }
          if (some.empty()) break;
          try {
            unseal_pages(lab_.memory(), *model, pieces(some));
          } catch (const InvalidArgumentError&) {
          }
          for (Tensor& each : tensors) {
            each.sealed = lab_.memory().pool_at(each.address)->has_read_only(each.address, each.bytes);
            if (!each.sealed && below(2) == 0) Lab::fill(each.address, each.bytes, each.seed = ++pattern);
          }
          break;
        }
        case 9: {  // written through an alias
          if (tensors.empty()) break;
          Tensor& tensor = tensors[below(tensors.size())];
          const auto at = lab_.memory().pool_at(tensor.address)->chunks_under(tensor.address, tensor.bytes);
          if (at.size() != 1 || at.front().address != tensor.address || at.front().size != tensor.bytes) break;
          const TensorAlias alias(lab_.memory(), model, {{tensor.address, tensor.bytes}}, 1, /*read_only=*/false);
          Lab::fill(alias.base(), tensor.bytes, tensor.seed = ++pattern);
          break;
        }
        case 10: {  // the range grows, shrinks, is written
          if (range_sealed) break;
          const std::size_t wanted = below(of_pages.size());
          try {
            if (wanted > committed) {
              range->commit({{0, wanted * kPage}}, nullptr);
              for (std::size_t page = committed; page < wanted; ++page) {
                ASSERT_TRUE(Lab::is_zero(range->base() + page * kPage, kPage)) << page << " step " << step;
                of_pages[page] = ++pattern;
                Lab::fill(range->base() + page * kPage, kPage, pattern);
              }
            } else if (wanted < committed) {
              range->decommit({{wanted * kPage, (committed - wanted) * kPage}});
            }
            committed = wanted;
          } catch (const OutOfMemoryError&) {
          }
          break;
        }
        default: {  // it is sealed or unsealed
          if (committed == 0) break;
          const std::vector<SealedPiece> all{{range->base(), committed * kPage, true}};
          try {
            range_sealed ? unseal_pages(lab_.memory(), *model, all) : seal_pages(lab_.memory(), *model, all);
            range_sealed = !range_sealed;
          } catch (const InvalidArgumentError&) {
          }
          if (!range_sealed) {
            for (std::size_t page = 0; page < committed; ++page) {
              if (!range->part()->is_read_only(range->base() + page * kPage, kPage)) {
                Lab::fill(range->base() + page * kPage, kPage, of_pages[page] = ++pattern);
              }
            }
          }
        }
      }
      if (HasFatalFailure()) return;
    }
    if (asleep) go(*coming(model));
    check("at the end", 0);
    std::printf("seed %u: %zu sleeps without a copy, %zu stopped\n", seed, spared, stopped);
    range.reset();
    for (const Tensor& each : tensors) DeviceMemory::free(lab_.space, each.address);
    for (const Address each : eaten) DeviceMemory::free(lab_.space, each);
    lab_.memory().close_pools({model, eater}, true);
    lab_.memory().settle(true);
    EXPECT_EQ(host_bytes(), 0U) << seed;
    EXPECT_EQ(lab_.memory().pools().size(), 0U) << seed;
  }
}

// What is kept for a next sleep makes a sleep fail that would have had room without.
TEST_F(SleepChanges, WhatIsKeptStopsNoSleep) {
  const auto model = lab_.pool("model");
  const auto weights = lab_.memory().tagged(model, "w");
  std::vector<Live> live;
  for (int k = 0; k < 8; ++k) {
    live.push_back({lab_.allocate(*weights, 32 * kMiB), 32 * kMiB, static_cast<std::uint64_t>(k + 1)});
    Lab::fill(live.back().address, live.back().bytes, live.back().seed);
  }
  const auto memory = sleeper_.host_memory(lab_.memory().budget());
  memory->set_limit(9 * PinnedMemory::kSlabBytes);
  seal_pages(lab_.memory(), *model, pieces(live));
  sleep(model, host());
  wake(model);
  const std::vector<Live> trained(live.begin() + 1, live.end());
  unseal_pages(lab_.memory(), *model, pieces(trained));
  seal_pages(lab_.memory(), *model, pieces(trained));
  for (int attempt = 1; attempt <= 2; ++attempt) {
    try {
      sleep(model, host());
      wake(model);
      std::printf("attempt %d: slept\n", attempt);
    } catch (const OutOfMemoryError& error) {
      ADD_FAILURE() << "attempt " << attempt << ": " << error.what();
    }
  }
  unseal_pages(lab_.memory(), *model, pieces(live));
}

// A device that was not let in keeps a right to write to what is sealed.
TEST(SealEdges, NobodyMayWriteToWhatIsSealed) {
  LabSpec spec;
  spec.device_count = 2;
  Lab lab(spec);
  {
    const auto model = lab.pool("model");
    const auto weights = lab.memory().tagged(model, "w");
    const Address one = lab.allocate(*weights, 8 * kMiB);
    const Address two = lab.allocate(*weights, 8 * kMiB);
    const Address three = lab.allocate(*weights, 8 * kMiB);
    lab.free(two);
    lab.memory().trim(*weights, 0);  // two runs of chunks
    ASSERT_EQ(weights->physical_bytes(), 16 * kMiB);
    lab.driver.fail_if([&](const CallRecord& call) { return call.call == Call::set_access && call.a == three; },
                       broken());
    EXPECT_FALSE(lab.memory().add_accessor(Location::on_device(1)).ok());
    lab.driver.clear_failures();
    seal_pages(lab.memory(), *model, {{one, 8 * kMiB, true}});
    EXPECT_TRUE(weights->is_sealed());
    EXPECT_TRUE(weights->is_read_only(one, 8 * kMiB)) << "for everybody";
    EXPECT_TRUE(lab.memory().add_accessor(Location::on_device(1)).ok());
    EXPECT_TRUE(weights->is_read_only(one, 8 * kMiB)) << "for everybody, once it was let in";
    unseal_pages(lab.memory(), *model, {{one, 8 * kMiB, true}});
  }
}

// Where a pool's addresses are short, host memory is no help.
TEST(SpillAddresses, ShortOfAddressesItIsRefused) {
  Lab lab;
  const auto group = lab.memory().create_group("g", 512 * kMiB);
  PoolSpec spec = Lab::spec("a");
  spec.capacity = 32 * kMiB;
  const auto a = lab.pool(spec, group.get());
  lab.memory().set_spills(*a, true);
  const Address one = lab.allocate(*a, 20 * kMiB);
  Address two = 0;
  try {
    two = lab.memory().allocate(*a, 20 * kMiB, nullptr);
    lab.adopt(two);
  } catch (const OutOfMemoryError& error) {
    std::printf("%s\n", error.what());
  }
  EXPECT_TRUE(two == 0 || !lab.memory().pool_at(two)->is_spill()) << "480 MiB of the limit are free on the device";
  static_cast<void>(one);
}

// The group ends though what one of its models spilled lives longest.
TEST(SpillAddresses, TheGroupEndsWithTheLastSpilledTensor) {
  Lab lab;
  auto group = lab.memory().create_group("g", 16 * kMiB);
  const Budget* const key = group.get();
  Address spilled = 0;
  {
    auto a = lab.pool(Lab::spec("a"), group.get());
    lab.memory().set_spills(*a, true);
    const Address kept = lab.allocate(*a, 16 * kMiB);
    spilled = lab.allocate(*a, 4 * kMiB);
    lab.memory().close_pool(*a, true);
    lab.free(kept);
  }
  lab.memory().end_group(*key);
  group.reset();
  EXPECT_EQ(lab.memory().groups(), 1U);
  lab.free(spilled);
  lab.memory().settle(true);
  EXPECT_EQ(lab.memory().groups(), 0U);
  EXPECT_EQ(lab.memory().pools().size(), 0U);
}

// Sizes that differ between the models, bursts in turn; and swaps: calls of the driver each.
TEST(Thrash, BurstsAndSwaps) {
  Lab lab;
  Sleeper sleeper(lab.memory());
  {
    const auto group = lab.memory().create_group("g", 64 * kMiB);
    const auto a = lab.pool(Lab::spec("a"), group.get());
    const auto b = lab.pool(Lab::spec("b"), group.get());
    const auto calls = [&] {
      return lab.driver.count(Call::create) + lab.driver.count(Call::map) + lab.driver.count(Call::unmap) +
             lab.driver.count(Call::release) + lab.driver.count(Call::set_access);
    };
    for (const bool floors : {false, true}) {
      if (floors) {
        lab.memory().set_floor(*a, 24 * kMiB);
        lab.memory().set_floor(*b, 24 * kMiB);
        b->budget().set_priority(2);
      }
      std::printf("floors %d:", floors ? 1 : 0);
      std::uint64_t last = 0;
      for (int round = 0; round < 40; ++round) {
        Pool& pool = round % 2 == 0 ? *a : *b;
        lab.driver.clear_calls();
        std::vector<Address> blocks;
        for (std::size_t k = 0; k < 8; ++k) {
          const std::size_t bytes = round % 2 == 0 ? (3 + k % 3) * kMiB : (2 + k % 5) * kMiB + 700 * kKiB;
          blocks.push_back(lab.memory().allocate(pool, bytes, round % 2 == 0 ? stream(0x10) : stream(0x20)));
        }
        for (const Address each : blocks) DeviceMemory::free(lab.space, each);
        last = calls();
        std::printf(" %zu", static_cast<std::size_t>(last));
      }
      std::printf("\n");
      EXPECT_LE(last, 60U);
    }
    lab.memory().set_floor(*a, 0);
    lab.memory().set_floor(*b, 0);
    lab.memory().empty_cache();
    for (int k = 0; k < 3; ++k) lab.allocate(*a, 16 * kMiB);
    Transfer out(std::make_unique<Departure>(sleeper, std::vector<PartToSleep>{{a, Places{Place{}}}}, false), nullptr);
    out.begin(&look_away);
    out.run(&look_away);
    for (int k = 0; k < 12; ++k) lab.allocate(*b, 4 * kMiB);
    std::printf("swaps:");
    for (int turn = 0; turn < 10; ++turn) {
      lab.driver.clear_calls();
      const auto& [from, to] = turn % 2 == 0 ? std::pair(b, a) : std::pair(a, b);
      Transfer swap(std::make_unique<Departure>(sleeper, std::vector<PartToSleep>{{from, Places{Place{}}}}, false),
                    std::make_unique<Arrival>(sleeper, PoolList{to}, Arrival::Memory::by_piece));
      swap.begin(&look_away);
      swap.run(&look_away);
      std::printf(" %zu+%zu pins", static_cast<std::size_t>(calls()),
                  static_cast<std::size_t>(lab.driver.count(Call::pin)));
    }
    std::printf("\n");
    Transfer in(nullptr,
                std::make_unique<Arrival>(sleeper, PoolList{a->is_asleep() ? a : b}, Arrival::Memory::collected));
    try {
      in.begin(&look_away);
      in.run(&look_away);
    } catch (const OutOfMemoryError&) {
      lab.memory().set_limit(*group, kUnlimited);
      Transfer again(nullptr,
                     std::make_unique<Arrival>(sleeper, PoolList{a->is_asleep() ? a : b}, Arrival::Memory::collected));
      again.begin(&look_away);
      again.run(&look_away);
    }
  }
  lab.close();
}

}  // namespace
}  // namespace vmm::testing

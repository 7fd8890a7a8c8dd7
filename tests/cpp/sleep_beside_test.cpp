// What others do, and what runs out, beside a model that sleeps or is on its way.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <chrono>
#include <csignal>
#include <fstream>
#include <future>
#include <map>
#include <utility>

#include "core/faces/seals.h"
#include "cpp/sleep_lab.h"

namespace vmm::testing {
namespace {

// Who registers segments with a library.
class Registrar final : public PoolObserver {
 public:
  void on_event(const Pool& /*pool*/, PoolEvent event, Address at, std::size_t bytes,
                Stream /*stream*/) noexcept override {
    if (event == PoolEvent::segment_alloc) segments_.emplace(at, bytes);
    if (event == PoolEvent::segment_free) segments_.erase(at);
  }
  void look_at(const Pool& pool) {
    for (const SegmentSnapshot& segment : pool.snapshot(SnapshotGrain::chunk)) {
      segments_.emplace(segment.address, segment.total_size);
    }
  }
  // None that the block lies in, or one that it lies in whole.
  [[nodiscard]] bool knows_all_or_nothing_of(Address at, std::size_t bytes) const {
    bool touches = false;
    for (const auto& [begin, size] : segments_) {
      if (begin <= at && at + bytes <= begin + size) return true;
      touches = touches || (begin < at + bytes && at < begin + size);
    }
    return !touches;
  }

 private:
  std::map<Address, std::size_t> segments_;
};

class SleepBeside : public Sleep {
 protected:
  static constexpr std::size_t kBroken = 10 * kMiB;
  // Six chunks of 4 MiB, and a block over three of them.
  Address broken_block(Pool& pool) {
    for (std::size_t k = 0; k < 6; ++k) lab_.memory().allocate_pages(pool, k * 4 * kMiB, 4 * kMiB, nullptr);
    lab_.memory().deallocate_pages(pool, 0, 24 * kMiB);
    lab_.memory().settle(/*wait=*/true);
    const Address broken = lab_.allocate(pool, kBroken);
    EXPECT_GT(pool.chunks_under(broken, kBroken).size(), 1U);
    return broken;
  }
  // A model with a block of 20 MiB under each of two tags.
  struct TwoTags {
    std::shared_ptr<Pool> model;
    std::shared_ptr<Pool> one;
    std::shared_ptr<Pool> two;
    std::vector<Live> live;
  };
  TwoTags two_tags() {
    TwoTags made;
    made.model = lab_.pool("a");
    made.one = lab_.memory().tagged(made.model, "one");
    made.two = lab_.memory().tagged(made.model, "two");
    made.live = {{lab_.allocate(*made.one, 20 * kMiB), 20 * kMiB, 3},
                 {lab_.allocate(*made.two, 20 * kMiB), 20 * kMiB, 4}};
    for (const Live& each : made.live) Lab::fill(each.address, each.bytes, each.seed);
    return made;
  }
  // Somebody begins to register segments when it is looked at for the `at`-th time.
  [[nodiscard]] Look registers_at(int at, const Pool& pool) {
    return [this, at, &pool, looks = 0]() mutable {
      if (++looks == at) register_now(pool);
    };
  }
  void register_now(const Pool& pool) {
    lab_.memory().keep_blocks_within_chunks();
    lab_.memory().set_observer(&registrar_);
    registrar_.look_at(pool);
    has_registered_ = true;
  }
  ~SleepBeside() override { lab_.memory().set_observer(nullptr); }

  Registrar registrar_;
  bool has_registered_ = false;
};

// NCCL compares nothing: a block that is registered in one chunk of several gave wrong numbers.
TEST_F(SleepBeside, WhoeverRegistersSegmentsMayComeWhileItGoes) {
  const auto pool = lab_.pool("a");
  const Address broken = broken_block(*pool);
  go(*going({pool}, host()), registers_at(1, *pool));
  go(*coming(pool));
  EXPECT_TRUE(has_registered_);
  EXPECT_TRUE(registrar_.knows_all_or_nothing_of(broken, kBroken));
}

class SleepBesideAtLook : public SleepBeside, public ::testing::WithParamInterface<int> {};

TEST_P(SleepBesideAtLook, WhoeverRegistersSegmentsMayComeWhileItWakes) {
  const auto pool = lab_.pool("a");
  const Address broken = broken_block(*pool);
  go(*going({pool}, host()));
  go(*coming(pool), registers_at(GetParam(), *pool));
  EXPECT_TRUE(has_registered_);
  EXPECT_TRUE(registrar_.knows_all_or_nothing_of(broken, kBroken));
}

INSTANTIATE_TEST_SUITE_P(, SleepBesideAtLook, ::testing::Range(1, 4));

TEST_F(SleepBeside, ASealThatFailsLeavesNothingSealed) {
  const auto [model, one, two, live] = two_tags();
  lab_.meet(stream(0x10));
  lab_.driver.hold_fences(stream(0x10));
  bool has_slept = false;
  lab_.driver.before(Call::wait, [&, &part = one, &block = live[0], &its = model] {
    if (has_slept || !part->is_read_only(block.address, block.bytes)) return;
    has_slept = true;  // between the one and the other
    go(*going({its}, host()));
  });
  EXPECT_THROW(seal_pages(lab_.memory(), *model, pieces(live)), AsleepError);
  lab_.driver.before(Call::wait, nullptr);
  lab_.driver.release_fences();
  ASSERT_TRUE(has_slept);
  wake(model);
  for (const auto& [part, block] : {std::pair(one, live[0]), std::pair(two, live[1])}) {
    EXPECT_FALSE(part->is_read_only(block.address, block.bytes)) << "a write would fault";
    Lab::fill(block.address, block.bytes, block.seed);
  }
  expect_whole(live);
}

// A file as large as a model is unlinked then, or threads are joined.
TEST_F(SleepBeside, ABackupEndsWithNoLockHeld) {
  const auto pool = lab_.pool("a");
  const Address block = lab_.allocate(*pool, 20 * kMiB);
  for (const Places& places : {host(), file()}) {
    sleep(pool, places);
    sleeper_.host_memory(lab_.memory().budget())->set_limit(0);  // what ends is unpinned
    if (pool->live_blocks() != 0) lab_.free(block);
    bool is_locked = false;
    lab_.driver.before(Call::unpin, [&] {
      auto asked = std::async(std::launch::async, [&] { return pool->is_asleep(); });
      is_locked = asked.wait_for(std::chrono::seconds(2)) != std::future_status::ready;
    });
    go(*coming(pool));
    lab_.driver.before(Call::unpin, nullptr);
    EXPECT_FALSE(is_locked);
    sleeper_.host_memory(lab_.memory().budget())->set_limit(kUnlimited);
  }
}

// What was written and what is staged is all there, and so is the room.
TEST_F(SleepBeside, ADiskThatTakesNoMoreWritesGivesBackWhatItHas) {
  const auto former = std::signal(SIGXFSZ, SIG_IGN);
  const auto pool = lab_.pool("a");
  std::vector<Live> live;
  for (std::uint64_t k = 1; k <= 6; ++k) {
    live.push_back({lab_.allocate(*pool, 40 * kMiB), 40 * kMiB, k});
    Lab::fill(live.back().address, live.back().bytes, k);
  }
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit less{70 * kMiB, before.rlim_max};
  const auto takes_no_more = [&less, looks = 0]() mutable {
    if (++looks == 3) ::setrlimit(RLIMIT_FSIZE, &less);
  };
  EXPECT_THROW(go(*going({pool}, file()), takes_no_more), VmmError);
  EXPECT_FALSE(pool->is_asleep()) << "it is awake again";
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, former);
  if (pool->is_asleep()) wake(pool);
  expect_whole(live);
}

std::size_t count_mappings() {
  std::ifstream maps("/proc/self/maps");
  std::size_t lines = 0;
  for (std::string line; std::getline(maps, line);) ++lines;
  return lines;
}

// A thread that has ended has its stack until it is joined.
TEST_F(SleepBeside, WhatSleepsKeepsNoThreads) {
  std::vector<std::shared_ptr<Pool>> pools;
  for (int k = 0; k < 20; ++k) {
    pools.push_back(lab_.pool("model " + std::to_string(k)));
    lab_.allocate(*pools.back(), 2 * kMiB);
  }
  sleep(pools[0], host());
  const std::size_t before = count_mappings();
  for (std::size_t k = 1; k < pools.size(); ++k) go(*going({pools[k]}, host()));
  EXPECT_LT(count_mappings(), before + pools.size());
}

TEST_F(SleepBeside, PinnedMemoryEndsWithItsGroup) {
  const auto pinned = [this] { return lab_.driver.count(Call::pin) - lab_.driver.count(Call::unpin); };
  auto group = lab_.memory().create_group("group", kUnlimited);
  auto pool = lab_.memory().create_pool(Lab::spec("a"), group.get());
  const std::vector<Live> live = fill(*pool);
  sleep(pool, host());
  wake(pool);
  ASSERT_GT(pinned(), 0U) << "kept for the next sleep";
  for (const Live& each : live) lab_.free(each.address);
  lab_.memory().close_pool(*pool, /*force=*/true);
  lab_.memory().end_group(*group);
  pool.reset();
  group.reset();
  const auto next = lab_.memory().create_group("next", kUnlimited);  // perhaps where the other one stood
  EXPECT_EQ(sleeper_.host_memory(*next)->unused_bytes(), 0U);
  EXPECT_EQ(sleeper_.host_memory(*next)->limit(), kUnlimited);
  EXPECT_EQ(pinned(), 0U);
}

TEST_F(SleepBeside, AClosedGroupKeepsNoPinnedMemory) {
  const auto pinned = [this] { return lab_.driver.count(Call::pin) - lab_.driver.count(Call::unpin); };
  const auto group = lab_.memory().create_group("group", kUnlimited);
  const auto awake = lab_.memory().create_pool(Lab::spec("awake"), group.get());
  const auto asleep = lab_.memory().create_pool(Lab::spec("asleep"), group.get());
  const std::vector<Live> live = fill(*awake);
  const std::vector<Live> kept = fill(*asleep);
  for (const auto& pool : {awake, asleep}) sleep(pool, host());
  wake(awake);
  expect_whole(live);
  const std::size_t before = pinned();
  sleeper_.end_host_memory(*group);
  EXPECT_LT(pinned(), before);
  EXPECT_GT(pinned(), 0U) << "what sleeps stays";
  wake(asleep);
  expect_whole(kept);
  EXPECT_EQ(pinned(), 0U);
}

// The host is short where a file is chosen.
TEST_F(SleepBeside, AModelInAFileHoldsNoPinnedMemory) {
  const auto pool = lab_.pool("a");
  const std::vector<Live> live = fill(*pool);
  const auto pinned = [this] { return lab_.driver.count(Call::pin) - lab_.driver.count(Call::unpin); };
  const std::size_t before = pinned();
  sleep(pool, file());
  EXPECT_EQ(pinned(), before);
  std::vector<std::byte> read(live.back().bytes);
  EXPECT_TRUE(pool->read_kept(live.back().address, read.size(), read.data()));
  EXPECT_EQ(pinned(), before) << "after a look at what it keeps";
  wake(pool);
  EXPECT_EQ(pinned(), before);
  expect_whole(live);
}

TEST_F(SleepBeside, WhatOfAModelStaysInAFileHoldsNoPinnedMemory) {
  const auto [model, one, two, live] = two_tags();
  const auto pinned = [this] { return lab_.driver.count(Call::pin) - lab_.driver.count(Call::unpin); };
  sleep(model, file());
  EXPECT_THROW(go(*coming(model), stops_at(4)), VmmError);
  EXPECT_EQ(pinned(), 0U) << "after a wake that was stopped";
  Transfer of_one(nullptr, std::make_unique<Arrival>(sleeper_, PoolList{one}, Arrival::Memory::collected));
  go(of_one);
  EXPECT_EQ(pinned(), 0U) << "one tag is awake, and the other sleeps on";
  flip_a_bit((folder_ / "model").string());
  std::vector<std::byte> bytes(live[1].bytes);
  EXPECT_THROW(two->read_kept(live[1].address, bytes.size(), bytes.data()), VmmError);
  EXPECT_EQ(pinned(), 0U) << "after a look in vain";
  flip_a_bit((folder_ / "model").string());
  wake(model);
  expect_whole(live);
}

// Two blocks of a tag's space, each over chunks of its own.
class SleepOfTwo : public SleepBeside {
 protected:
  SleepOfTwo() {
    for (const Live& each : live_) Lab::fill(each.address, each.bytes, each.seed);
  }

  const std::shared_ptr<Pool> a_ = lab_.pool("a");
  const std::shared_ptr<Pool> tag_ = lab_.memory().tagged(a_, "one");
  std::vector<Live> live_{{lab_.allocate(*tag_, 64 * kMiB), 64 * kMiB, 3},
                          {lab_.allocate(*tag_, 96 * kMiB), 96 * kMiB, 4}};
};

TEST_F(SleepOfTwo, WhatWasSealedByItselfIsUnsealedByItself) {
  seal_pages(lab_.memory(), *a_, pieces({live_[0]}));
  seal_pages(lab_.memory(), *a_, pieces({live_[1]}));
  go(*going({a_}, host(), /*release=*/true));
  go(*coming(a_));
  EXPECT_TRUE(tag_->is_read_only(live_[0].address, live_[0].bytes));
  EXPECT_NO_THROW(unseal_pages(lab_.memory(), *a_, pieces({live_[0]})));
  unseal_pages(lab_.memory(), *a_, pieces(live_));
  expect_whole(live_);
}

TEST_F(SleepOfTwo, ASealThatFailsLeavesOnlySealedWhatWasBefore) {
  const auto other = lab_.memory().tagged(a_, "two");
  live_.push_back({lab_.allocate(*other, 20 * kMiB), 20 * kMiB, 5});
  Lab::fill(live_[2].address, live_[2].bytes, live_[2].seed);
  seal_pages(lab_.memory(), *a_, pieces({live_[0]}));
  lab_.meet(stream(0x10));
  lab_.driver.hold_fences(stream(0x10));
  bool has_slept = false;
  lab_.driver.before(Call::wait, [&] {
    if (has_slept || !tag_->is_read_only(live_[1].address, live_[1].bytes)) return;
    has_slept = true;
    go(*going({a_}, host(), /*release=*/true));
    const auto stopped = coming(a_);
    EXPECT_THROW(go(*stopped, stops_at(2)), VmmError);
  });
  EXPECT_THROW(seal_pages(lab_.memory(), *a_, pieces({live_[1], live_[2]})), AsleepError);
  lab_.driver.before(Call::wait, nullptr);
  lab_.driver.release_fences();
  ASSERT_TRUE(has_slept);
  wake(a_);
  EXPECT_TRUE(tag_->is_read_only(live_[0].address, live_[0].bytes));
  EXPECT_FALSE(tag_->has_read_only(live_[1].address, live_[1].bytes)) << "a write would fault";
  expect_whole(live_);
}

class SleepInTurns : public Sleep {
 protected:
  // Either may be nullptr: the other one goes, and its memory to the driver, or comes.
  void swap(const std::shared_ptr<Pool>& out, const std::shared_ptr<Pool>& in) {
    if (in == nullptr) {
      go(*going({out}, host(), /*release=*/true));
    } else if (out == nullptr) {
      go(*coming(in, Arrival::Memory::by_piece));
    } else {
      go(*swapping(out, in, host()));
    }
    lab_.memory().check();
  }
};

// Slabs come first and leave last: room for the first piece is made of what fits later ones,
// which are made in turn.
TEST_F(SleepInTurns, ASwapOfLikesHardlyAsksTheDriverForMemory) {
  constexpr std::size_t kChunk = 4 * kMiB;
  constexpr std::size_t kCount = 60;
  const auto limit = lab_.memory().create_group("g", kCount * kChunk + kPage);
  const auto a = lab_.pool(Lab::spec("a"), limit.get());
  const auto b = lab_.pool(Lab::spec("b"), limit.get());
  const auto fill = [this](Pool& pool) {
    for (std::size_t k = 0; k < kCount; ++k) lab_.memory().allocate_pages(pool, k * kChunk, kChunk, nullptr);
    return lab_.allocate(pool, 512);  // a slab
  };
  const Address of_a = fill(*a);
  sleep(a, host());
  const Address of_b = fill(*b);
  swap(b, a);
  swap(a, b);
  const std::uint64_t created = lab_.driver.count(Call::create);
  swap(b, a);
  swap(a, b);
  EXPECT_LE(lab_.driver.count(Call::create) - created, kCount / 5) << "of two swaps";
  swap(b, a);
  lab_.free(of_a);
  lab_.free(of_b);
}

// Under one limit, the other one in pages of 2 MiB: each has the chunks that it wants.
TEST_F(SleepInTurns, ChunksDoNotGetSmaller) {
  constexpr std::size_t kBytes = 160 * kMiB;
  const auto limit = lab_.memory().create_group("g", 200 * kMiB);
  const auto a = lab_.pool(Lab::spec("a"), limit.get());
  PoolSpec spec = Lab::spec("b");
  spec.page_size = kPage;
  const auto b = lab_.pool(spec, limit.get());
  const Address of_a = lab_.allocate(*a, kBytes);
  Lab::fill(of_a, kBytes, 1);
  const auto chunks = [&] { return a->chunks_under(of_a, kBytes).size(); };
  const std::size_t before = chunks();
  swap(a, nullptr);
  const Address of_b = lab_.allocate(*b, kBytes);
  Lab::fill(of_b, kBytes, 2);
  for (int k = 0; k < 4; ++k) {
    swap(b, a);
    EXPECT_LE(chunks(), before);
    EXPECT_TRUE(Lab::holds(of_a, kBytes, 1));
    swap(a, b);
    EXPECT_TRUE(Lab::holds(of_b, kBytes, 2));
  }
  lab_.free(of_b);
  lab_.memory().close_pool(*b, true);
  lab_.memory().empty_cache();
  swap(nullptr, a);
  EXPECT_LE(chunks(), before);
  EXPECT_TRUE(Lab::holds(of_a, kBytes, 1));
  lab_.free(of_a);
}

// While the rest is on its way still, in sizes that are no use.
TEST_F(SleepInTurns, WhatTheDriverLacksIsMadeInExchangeForWhatHasLeft) {
  constexpr std::size_t kBytes = 160 * kMiB;
  const auto a = lab_.pool("a");
  PoolSpec spec = Lab::spec("b");
  spec.page_size = kPage;
  const auto b = lab_.pool(spec);
  const Address of_a = lab_.allocate(*a, kBytes);
  Lab::fill(of_a, kBytes, 1);
  swap(a, nullptr);
  lab_.allocate(*b, kBytes);
  std::uint64_t unmapped = 0;
  bool is_full = true;         // until something is given back
  std::uint64_t at_first = 0;  // had been unmapped
  lab_.driver.before(Call::unmap, [&] { ++unmapped; });
  lab_.driver.before(Call::release, [&] {
    if (std::exchange(is_full, false)) at_first = unmapped;
  });
  lab_.driver.fail_if([&](const CallRecord& call) { return call.call == Call::create && is_full; }, no_memory());
  swap(b, a);
  lab_.driver.before(Call::unmap, nullptr);
  lab_.driver.before(Call::release, nullptr);
  lab_.driver.clear_failures();
  ASSERT_NE(at_first, 0U);
  EXPECT_LT(at_first, kBytes / kPage) << "it was made once all had gone";
  EXPECT_TRUE(Lab::holds(of_a, kBytes, 1));
  lab_.free(of_a);
  wake(b);
}

}  // namespace
}  // namespace vmm::testing

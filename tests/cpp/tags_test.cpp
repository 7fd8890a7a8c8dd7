// What is made under a tag lies together: chunks of its own, numbers, and a random
// program that seals too and looks at every chunk after every step. Seals by themselves are
// sealed_tags_test's.
#include <gtest/gtest.h>

#include <array>
#include <map>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "core/device/private_pools.h"
#include "core/faces/seals.h"
#include "core/faces/tensor_range.h"
#include "lab.h"

namespace vmm::testing {
namespace {

const Stream kOne = stream(0x10);
const Stream kTwo = stream(0x20);

using Tags = std::map<std::string, std::size_t>;

// The handles of the chunks under a block.
std::set<ChunkHandle> chunks_of(Lab& lab, Address address) {
  const std::shared_ptr<Pool> pool = lab.memory().pool_at(address);
  std::set<ChunkHandle> handles;
  for (const ChunkView& chunk : pool->chunks_under(address, pool->block_size(address))) handles.insert(chunk.handle);
  return handles;
}

TEST(Tags, BlocksLieOnChunksOfTheirOwn) {
  Lab lab;
  const auto model = lab.pool("a");
  const auto weights = lab.memory().tagged(model, "weights");
  const auto cache = lab.memory().tagged(model, "cache");
  EXPECT_EQ(lab.memory().tagged(model, "weights"), weights);
  EXPECT_NE(weights, cache);
  std::map<ChunkHandle, const Pool*> owners;
  for (const std::size_t bytes : {std::size_t{100}, 5 * kKiB, 700 * kKiB, 3 * kMiB}) {
    for (const auto& pool : {model, weights, cache}) {
      const Address block = lab.allocate(*pool, bytes);
      for (const ChunkHandle chunk : chunks_of(lab, block)) {
        EXPECT_EQ(owners.emplace(chunk, pool.get()).first->second, pool.get());
      }
    }
  }
  EXPECT_GT(owners.size(), 3U);
}

// A block that a thread keeps serves the tag that it was of, and no other.
TEST(Tags, WhatThreadsKeepStaysWithItsTag) {
  Lab lab;
  const auto model = lab.pool("a");
  const auto weights = lab.memory().tagged(model, "weights");
  for (const std::size_t bytes : {4 * kKiB, 3 * kMiB}) {
    lab.leave_idle(*weights, bytes);
    const Address kept = lab.leave_idle(*weights, bytes);
    EXPECT_GE(lab.memory().kept_blocks(*weights), 1U);
    const Address other = lab.allocate(*model, bytes);
    EXPECT_TRUE(model->contains(other));
    EXPECT_EQ(lab.allocate(*weights, bytes), kept);
  }
}

TEST(Tags, TheModelPaysAndTellsOfThem) {
  Lab lab;
  const auto model = lab.pool("a", 16 * kMiB);
  EXPECT_EQ(lab.memory().tags_of(*model), Tags());
  const auto weights = lab.memory().tagged(model, "weights");
  EXPECT_EQ(lab.memory().tags_of(*model), (Tags{{"weights", 0}}));
  const Address block = lab.allocate(*weights, 3 * kMiB);
  const Address small = lab.allocate(*weights, 1);
  EXPECT_EQ(lab.memory().tags_of(*model), (Tags{{"weights", 3 * kMiB + 512}}));
  EXPECT_EQ(lab.memory().statistics_of(*model)[StatKind::allocated_bytes][0].current, 3 * kMiB + 512);
  EXPECT_GE(model->budget().used(), 4 * kMiB);
  lab.free(small);
  lab.free(block);
  EXPECT_EQ(lab.memory().tags_of(*model), (Tags{{"weights", 0}}));
  // The model's limit is the tags' too, and what one has idle serves the others.
  for (const auto& pool : {model, weights, lab.memory().tagged(model, "cache"), model}) {
    lab.leave_idle(*pool, 16 * kMiB);
  }
  lab.allocate(*weights, 14 * kMiB);
  try {
    lab.memory().allocate(*lab.memory().tagged(model, "cache"), 4 * kMiB, nullptr);
    FAIL() << "above the limit";
  } catch (const OutOfMemoryError& error) {
    EXPECT_EQ(error.pool, "a");
    EXPECT_EQ(error.limit, 16 * kMiB);
  }
}

TEST(Tags, PagesAreOfTheModelsSize) {
  Lab lab;
  PoolSpec spec = Lab::spec("a");
  spec.page_size = 4 * kMiB;
  const auto model = lab.pool(spec);
  const auto weights = lab.memory().tagged(model, "weights");
  EXPECT_EQ(weights->page_size(), 4 * kMiB);
  const Address block = lab.allocate(*weights, 5 * kMiB);
  for (const ChunkView& chunk : weights->chunks_under(block, 5 * kMiB)) EXPECT_EQ(chunk.size, 4 * kMiB);
}

// A tag's tensors with addresses of their own, and its private pools, are of the tag too.
TEST(Tags, GoWithRangesAndPrivatePools) {
  Lab lab;
  PrivatePools pools(lab.memory());
  const auto model = lab.pool("a");
  const auto weights = lab.memory().tagged(model, "weights");
  TensorRangeSpec spec;
  spec.what = "elastic tensor";
  spec.capacity = 64 * kMiB;
  TensorRange range(lab.memory(), weights, spec);
  range.commit({{0, 2 * kPage}}, nullptr);
  EXPECT_EQ(range.part()->shared_model(), model);
  const RegionId region{0, 1};
  pools.add_user(region);
  pools.begin(
      region, [](Stream) { return true; }, nullptr);
  const auto part = pools.route(model, nullptr);
  const auto tagged_part = pools.route(weights, nullptr);
  EXPECT_NE(part, tagged_part);
  EXPECT_EQ(pools.route(lab.memory().tagged(model, "weights"), nullptr), tagged_part);
  EXPECT_EQ(tagged_part->shared_model(), model);
  EXPECT_EQ(tagged_part->region(), region);
  lab.allocate(*part, kPage);
  const Address block = lab.allocate(*tagged_part, kPage);
  EXPECT_EQ(lab.memory().tags_of(*model), (Tags{{"weights", 3 * kPage}}));
  lab.free(block);
  pools.end(region);
  pools.set_use_on_oom(region, true);
  // What the tag's part has free may be had for the tag's requests, and for no other's.
  EXPECT_EQ(pools.lend(*lab.memory().tagged(model, "other"), kPage, nullptr), 0U);
  const Address lent = pools.lend(*weights, kPage, nullptr);
  EXPECT_TRUE(tagged_part->contains(lent));
  lab.adopt(lent);
  pools.release(region);
  pools.release(region);
}

TEST(Tags, EndWithTheirModel) {
  Lab lab;
  auto model = lab.pool("a");
  auto weights = lab.memory().tagged(model, "weights");
  const Address block = lab.allocate(*weights, kPage);
  EXPECT_THROW(lab.memory().close_pool(*model, /*force=*/false), StillInUseError);
  EXPECT_FALSE(weights->is_closed());
  lab.memory().close_pool(*model, /*force=*/true);
  EXPECT_THROW(lab.memory().allocate(*weights, kPage, nullptr), InvalidArgumentError);
  EXPECT_THROW(static_cast<void>(lab.memory().tagged(model, "weights")), InvalidArgumentError);
  EXPECT_THROW(static_cast<void>(lab.memory().tagged(model, "other")), InvalidArgumentError);
  const std::weak_ptr<Pool> seen = weights;
  weights.reset();
  EXPECT_FALSE(seen.expired()) << "a tensor of it lives";
  lab.free(block);
  EXPECT_TRUE(seen.expired());
  lab.memory().empty_cache();
  EXPECT_EQ(lab.driver.live_chunks(), 0U);
  EXPECT_THROW(static_cast<void>(lab.memory().tagged(lab.pool("b"), "")), InvalidArgumentError);
}

TEST(Tags, TheirSpaceIsMadeWhollyOrNotAtAll) {
  for (std::uint64_t nth = 1;; ++nth) {
    SCOPED_TRACE("call " + std::to_string(nth));
    Lab lab;
    const auto model = lab.pool("a");
    const std::size_t reservations = lab.driver.live_reservations();
    lab.driver.fail_nth_call(nth, broken());
    bool failed = false;
    try {
      lab.allocate(*lab.memory().tagged(model, "weights"), kPage);
    } catch (const VmmError&) {
      failed = true;
    }
    const bool any = lab.driver.failures() != 0;
    lab.driver.clear_failures();
    if (failed && lab.memory().tags_of(*model).empty()) {
      EXPECT_EQ(lab.driver.live_reservations(), reservations);
    }
    lab.allocate(*lab.memory().tagged(model, "weights"), kPage);
    if (!any) break;
  }
}

TEST(Tags, ThreadsMakeTheSameSpaceOnce) {
  Lab lab;
  const auto model = lab.pool("a");
  std::array<std::shared_ptr<Pool>, 4> found;
  std::vector<std::thread> threads;
  for (auto& mine : found) threads.emplace_back([&] { mine = lab.memory().tagged(model, "weights"); });
  for (std::thread& thread : threads) thread.join();
  for (const auto& each : found) EXPECT_EQ(each, found[0]);
}

// -------------------------------------------------------------- random programs

struct Block {
  std::string tag;
  Address address = 0;
  std::size_t bytes = 0;
  std::uint64_t seed = 0;
  bool is_sealed = false;
};

class TagWorld {
 public:
  explicit TagWorld(std::uint64_t seed) : random_(seed), model_(lab_.pool("a", 128 * kMiB)) {}

  void step() {
    const std::uint64_t what = any(100);
    if (what < 45) {
      allocate();
    } else if (what < 75) {
      if (!blocks_.empty()) free(any(blocks_.size()));
    } else if (what < 81) {
      seal(kTags.at(1 + any(kTags.size() - 1)));
    } else if (what < 87) {
      unseal(kTags.at(1 + any(kTags.size() - 1)));
    } else if (what < 90) {
      lab_.memory().trim(*model_, any(3) * 4 * kMiB);
    } else if (what < 94) {
      any(2) == 0 ? lab_.driver.hold_fences(any(2) == 0 ? kOne : kTwo) : lab_.driver.release_fences();
    } else if (what < 97) {
      if (!blocks_.empty()) {
        const Block& block = blocks_.at(any(blocks_.size()));
        lab_.memory().pool_at(block.address)->record_stream(block.address, kTwo);
      }
    } else {
      lab_.memory().empty_cache();
    }
    check();
  }

 private:
  static constexpr std::array<const char*, 4> kTags = {"", "weights", "cache", "adapters"};

  std::uint64_t any(std::uint64_t below) { return random_() % below; }

  void allocate() {
    Block block;
    block.tag = kTags.at(any(kTags.size()));
    const std::uint64_t kind = any(10);
    block.bytes = 512 * (1 + (kind < 5 ? any(16) : kind < 8 ? any(1000) : any(10000)));
    block.seed = ++last_seed_;
    auto& space = spaces_[block.tag];  // as a thread that stays in its context has it
    if (space == nullptr || any(3) == 0) space = block.tag.empty() ? model_ : lab_.memory().tagged(model_, block.tag);
    try {
      block.address = lab_.allocate(*space, block.bytes, any(4) == 0 ? kOne : nullptr);
    } catch (const OutOfMemoryError&) {
      return;
    }
    Lab::fill(block.address, block.bytes, block.seed);
    blocks_.push_back(block);
  }

  void free(std::size_t at) {
    const Block block = blocks_.at(at);
    ASSERT_TRUE(Lab::holds(block.address, block.bytes, block.seed));
    blocks_.erase(blocks_.begin() + static_cast<std::ptrdiff_t>(at));
    lab_.free(block.address);
  }

  std::vector<SealedPiece> pieces(const std::string& tag) const {
    std::vector<SealedPiece> found;
    for (const Block& block : blocks_) {
      if (block.tag == tag) found.push_back({block.address, block.bytes});
    }
    return found;
  }

  void seal(const std::string& tag) {
    try {
      seal_pages(lab_.memory(), *model_, pieces(tag));
    } catch (const InvalidArgumentError&) {
      return;  // a freed one still waits for a recorded stream
    }
    for (Block& block : blocks_) block.is_sealed = block.is_sealed || block.tag == tag;
  }

  void unseal(const std::string& tag) {
    try {
      unseal_pages(lab_.memory(), *model_, pieces(tag));
    } catch (const InvalidArgumentError&) {
      return;
    }
    for (Block& block : blocks_) block.is_sealed = block.is_sealed && block.tag != tag;
    for (const Block& block : blocks_) {
      if (block.tag == tag) Lab::fill(block.address, block.bytes, block.seed);
    }
  }

  void check() {
    std::map<ChunkHandle, std::string> tags;
    Tags expected;
    for (const auto& [tag, space] : spaces_) {
      if (!tag.empty()) expected[tag] = 0;
    }
    for (const Block& block : blocks_) {
      const std::shared_ptr<Pool> pool = lab_.memory().pool_at(block.address);
      ASSERT_NE(pool, nullptr);
      ASSERT_EQ(pool->tag(), block.tag);
      ASSERT_EQ(pool->is_read_only(block.address, block.bytes), block.is_sealed);
      for (const ChunkHandle chunk : chunks_of(lab_, block.address)) {
        ASSERT_EQ(tags.emplace(chunk, block.tag).first->second, block.tag) << "two tags in one chunk";
      }
      if (!block.tag.empty()) expected[block.tag] += pool->block_size(block.address);
    }
    ASSERT_EQ(lab_.memory().tags_of(*model_), expected);
    lab_.memory().check();
  }

  std::mt19937_64 random_;
  Lab lab_;
  const std::shared_ptr<Pool> model_;
  std::map<std::string, std::shared_ptr<Pool>> spaces_;
  std::vector<Block> blocks_;
  std::uint64_t last_seed_ = 0;
};

TEST(Tags, RandomPrograms) {
  for (std::uint64_t seed = 1; seed <= 12; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    TagWorld world(seed);
    for (int k = 0; k < 250 && !HasFatalFailure(); ++k) world.step();
    if (HasFatalFailure()) return;
  }
}

// Each thread under tags of its own and shared ones, while another seals.
TEST(Tags, ThreadsUnderTagsNeverShareAChunk) {
  Lab lab;
  const auto model = lab.pool("a");
  constexpr std::size_t kThreads = 3;
  std::array<std::vector<Block>, kThreads> left;
  std::vector<std::thread> threads;
  for (std::size_t number = 0; number < kThreads; ++number) {
    threads.emplace_back([&, number] {
      std::mt19937_64 random(number + 1);
      std::vector<Block>& mine = left.at(number);
      for (int k = 0; k < 400; ++k) {
        if (random() % 5 < 3) {
          Block block;
          block.tag = random() % 2 == 0 ? "shared" : "of " + std::to_string(number);
          block.bytes = 512 * (1 + random() % (random() % 8 == 0 ? 5000 : 20));
          block.seed = number << 32U | random() % kGiB;
          const auto space = lab.memory().tagged(model, block.tag);
          block.address = lab.memory().allocate(*space, block.bytes, stream(16 * (number + 1)));
          Lab::fill(block.address, block.bytes, block.seed);
          mine.push_back(block);
        } else if (!mine.empty()) {
          EXPECT_TRUE(Lab::holds(mine.back().address, mine.back().bytes, mine.back().seed));
          EXPECT_TRUE(DeviceMemory::free(lab.space, mine.back().address));
          mine.pop_back();
        }
        if (k % 100 == 99) {
          std::vector<SealedPiece> own;
          for (const Block& block : mine) {
            if (block.tag != "shared") own.push_back({block.address, block.bytes});
          }
          seal_pages(lab.memory(), *model, own);
          unseal_pages(lab.memory(), *model, own);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::map<ChunkHandle, std::string> tags;
  for (const auto& blocks : left) {
    for (const Block& block : blocks) {
      EXPECT_TRUE(Lab::holds(block.address, block.bytes, block.seed));
      for (const ChunkHandle chunk : chunks_of(lab, block.address)) {
        EXPECT_EQ(tags.emplace(chunk, block.tag).first->second, block.tag);
      }
      lab.adopt(block.address);
    }
  }
}

}  // namespace
}  // namespace vmm::testing

// A block lies within one chunk where chunks are registered with somebody: in the
// pools of torch.cuda.MemPool always, in all from the day that a tracker asks. NCCL
// compares nothing: a send from one registration into a buffer over two went wrong.
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cpp/lab.h"

namespace vmm::testing {
namespace {

const Stream kOne = stream(0x10);
const Stream kTwo = stream(0x20);
constexpr RegionId kMemPool{0, 7};
constexpr RegionId kGraph{0, 8};  // of graph_pool_handle(): a MemPool's look

std::size_t chunks_of(const Pool& pool, Address block) {
  return pool.chunks_under(block, pool.block_size(block)).size();
}

// Leaves six idle chunks of 4 MiB side by side, so that best fit would put a larger
// block over several.
void leave_small_chunks(Lab& lab, Pool& pool) {
  std::vector<Address> blocks;
  for (int k = 0; k < 6; ++k) {
    blocks.push_back(lab.memory().allocate_pages(pool, static_cast<std::size_t>(k) * 4 * kMiB, 4 * kMiB, kOne));
  }
  lab.memory().deallocate_pages(pool, 0, 24 * kMiB);
  lab.memory().settle(/*wait=*/true);
}

TEST(WithinChunks, AModelsBlocksMayLieOverSeveralAndAMemPoolsDoNot) {
  Lab lab;
  const auto model = lab.pool("a");
  leave_small_chunks(lab, *model);
  EXPECT_GT(chunks_of(*model, lab.allocate(*model, 10 * kMiB, kOne)), 1U) << "or this test shows nothing";
  const auto part = lab.memory().create_part(model, kMemPool, false, PoolKind::mem_pool);
  leave_small_chunks(lab, *part);
  const Address block = lab.allocate(*part, 10 * kMiB, kOne);
  EXPECT_EQ(chunks_of(*part, block), 1U);
  EXPECT_EQ(chunks_of(*part, lab.allocate(*part, 3 * kMiB, kOne)), 1U);
}

TEST(WithinChunks, AGraphsPoolIsAsBefore) {
  Lab lab;
  const auto part = lab.memory().create_part(lab.pool("a"), kGraph, false);
  leave_small_chunks(lab, *part);
  EXPECT_GT(chunks_of(*part, lab.allocate(*part, 10 * kMiB, kOne)), 1U);
}

TEST(WithinChunks, WhatModelsBorrowOfAMemPoolLiesInOneToo) {
  Lab lab;
  const auto part = lab.memory().create_part(lab.pool("a"), kMemPool, false, PoolKind::mem_pool);
  std::vector<Address> blocks;
  for (int k = 0; k < 6; ++k) blocks.push_back(lab.allocate(*part, 4 * kMiB, kOne));
  for (const Address block : blocks) lab.free(block);
  EXPECT_EQ(part->try_allocate_within(10 * kMiB, kOne), 0U) << "no one chunk has room for it";
  const Address block = part->try_allocate_within(3 * kMiB, kOne);
  ASSERT_NE(block, 0U);
  lab.adopt(block);
  EXPECT_EQ(chunks_of(*part, block), 1U);
}

// Follows segments as NCCL does.
class Registrar final : public PoolObserver {
 public:
  void on_event(const Pool& /*pool*/, PoolEvent event, Address at, std::size_t bytes,
                Stream /*stream*/) noexcept override {
    if (event == PoolEvent::segment_alloc) segments.emplace(at, bytes);
    if (event == PoolEvent::segment_free && segments.erase(at) == 0) ++strangers;
  }
  // What it finds when it comes.
  void look_at(const Pool& pool) {
    for (const SegmentSnapshot& segment : pool.snapshot(SnapshotGrain::chunk)) {
      segments.emplace(segment.address, segment.total_size);
    }
  }
  // Whether [at, at + bytes) touches a segment, and lies in one.
  [[nodiscard]] std::pair<bool, bool> finds(Address at, std::size_t bytes) const {
    bool touches = false;
    for (const auto& [begin, size] : segments) {
      if (begin <= at && at + bytes <= begin + size) return {true, true};
      touches = touches || (begin < at + bytes && at < begin + size);
    }
    return {touches, false};
  }
  std::map<Address, std::size_t> segments;
  int strangers = 0;
};

TEST(WithinChunks, ABlockThatLayOverSeveralIsRegisteredNowhere) {
  Registrar registrar;
  Lab lab;
  const auto pool = lab.pool("a");
  leave_small_chunks(lab, *pool);
  const Address broken = lab.allocate(*pool, 10 * kMiB, kOne);
  const Address whole = lab.allocate(*pool, 3 * kMiB, kOne);
  ASSERT_GT(chunks_of(*pool, broken), 1U);
  lab.memory().keep_blocks_within_chunks();
  lab.memory().set_observer(&registrar);
  registrar.look_at(*pool);
  EXPECT_FALSE(registrar.finds(broken, 10 * kMiB).first);
  lab.free(broken);
  const Address next = lab.allocate(*pool, 3 * kMiB, kOne);
  const auto [touches, is_whole] = registrar.finds(next, 3 * kMiB);
  EXPECT_EQ(touches, is_whole) << "in what it left, or elsewhere";
  lab.free(whole);
  lab.free(next);
  lab.memory().empty_cache();
  EXPECT_TRUE(registrar.segments.empty());
  EXPECT_EQ(registrar.strangers, 0);
  lab.memory().set_observer(nullptr);
}

TEST(WithinChunks, NobodyIsToldOfAUniformPoolOrOfExplicitPages) {
  Registrar registrar;
  Lab lab;
  lab.memory().keep_blocks_within_chunks();
  lab.memory().set_observer(&registrar);
  PoolSpec spec = Lab::spec("uniform");
  spec.page_size = kPage;
  const auto uniform = lab.pool(spec);
  lab.allocate(*uniform, 5 * kMiB, kOne);
  const auto pool = lab.pool("a");
  lab.memory().allocate_pages(*pool, 0, 4 * kMiB, kOne);
  registrar.look_at(*uniform);
  registrar.look_at(*pool);
  EXPECT_TRUE(registrar.segments.empty());
  lab.free(lab.allocate(*pool, 5 * kMiB, kOne));
  EXPECT_EQ(registrar.segments.size(), 1U);
  lab.memory().deallocate_pages(*pool, 0, 4 * kMiB);
  lab.memory().empty_cache();
  EXPECT_EQ(registrar.strangers, 0);
  lab.memory().set_observer(nullptr);
}

// What is idle in chunks of other sizes makes room, whoever says that there is none.
struct Scene {
  const char* name;
  std::size_t device_bytes;
  std::size_t limit;
  std::size_t floor;
  std::size_t capacity;
};
class WithinChunksAtAnEnd : public ::testing::TestWithParam<Scene> {};

TEST_P(WithinChunksAtAnEnd, IdleChunksOfOtherSizesMakeRoom) {
  const Scene& scene = GetParam();
  LabSpec lab_spec;
  lab_spec.device_bytes = scene.device_bytes;
  Lab lab(lab_spec);
  PoolSpec spec = Lab::spec("a", scene.limit);
  spec.floor = scene.floor;
  spec.capacity = scene.capacity;
  const auto pool = lab.pool(spec);
  const auto other = lab.pool("b");
  lab.memory().keep_blocks_within_chunks();
  std::vector<Address> blocks;
  for (int k = 0; k < 6; ++k) blocks.push_back(lab.allocate(*pool, 4 * kMiB, kOne));
  for (const Address block : blocks) lab.free(block);
  lab.leave_idle(*other, 6 * kMiB, kTwo);
  const Address large = lab.allocate(*pool, 22 * kMiB, kTwo);
  EXPECT_EQ(chunks_of(*pool, large), 1U);
}

INSTANTIATE_TEST_SUITE_P(Ends, WithinChunksAtAnEnd,
                         ::testing::Values(Scene{"limit", kGiB, 24 * kMiB, 0, kGiB},
                                           Scene{"floor", kGiB, 24 * kMiB, 24 * kMiB, kGiB},
                                           Scene{"device", 32 * kMiB, kUnlimited, 0, kGiB},
                                           Scene{"addresses", kGiB, kUnlimited, 0, 24 * kMiB},
                                           Scene{"limit_then_device", 32 * kMiB, 24 * kMiB, 0, kGiB}),
                         [](const auto& scene) { return std::string(scene.param.name); });

TEST(WithinChunks, TheSmallestPieceServes) {
  Lab lab;
  const auto pool = lab.pool("a", 68 * kMiB);
  lab.memory().keep_blocks_within_chunks();
  const Address large = lab.allocate(*pool, 64 * kMiB, kOne);
  const Address small = lab.allocate(*pool, 4 * kMiB, kOne);
  lab.free(large);
  lab.free(small);
  EXPECT_EQ(lab.allocate(*pool, 4 * kMiB, kOne), small) << "not a piece of the large chunk";
  EXPECT_EQ(lab.allocate(*pool, 64 * kMiB, kOne), large);
}

TEST(WithinChunks, WhatIsLeftOfWithheldChunksStillServes) {
  Lab lab;
  const auto pool = lab.pool("a", 128 * kMiB);
  lab.allocate(*pool, 2 * kMiB, kOne);
  lab.free(lab.allocate(*pool, 8 * kMiB, kOne));  // a pool whose blocks come and go has smaller chunks
  const Address broken = lab.allocate(*pool, 124 * kMiB + 400 * kKiB, kOne);
  lab.allocate(*pool, 1100 * kKiB, kOne);
  ASSERT_GT(chunks_of(*pool, broken), 1U);
  lab.memory().keep_blocks_within_chunks();
  lab.free(broken);
  for (int k = 0; k < 62; ++k) lab.allocate(*pool, 2 * kMiB, kOne);
}

TEST(WithinChunks, ExplicitPagesGiveBackWhatIsFree) {
  Lab lab;
  const auto pool = lab.pool("a", 128 * kMiB);
  lab.memory().keep_blocks_within_chunks();
  lab.memory().allocate_pages(*pool, 0, 128 * kMiB, kOne);
  lab.memory().deallocate_pages(*pool, 2 * kMiB, 126 * kMiB);
  lab.allocate(*pool, 64 * kMiB, kOne);
}

TEST(WithinChunks, ABlockAtAGivenAddressToo) {
  Lab lab;
  const auto part = lab.memory().create_part(lab.pool("a"), kMemPool, false, PoolKind::mem_pool);
  const Address first = lab.leave_idle(*part, 4 * kMiB, kOne);
  EXPECT_THROW(lab.memory().allocate_at(*part, first + 2 * kMiB, 4 * kMiB, kOne), InvalidRangeError);
  const Address within = lab.memory().allocate_at(*part, first + 2 * kMiB, 2 * kMiB, kOne);
  lab.adopt(within);
  const Address beyond = lab.memory().allocate_at(*part, first + 8 * kMiB, 4 * kMiB, kOne);
  lab.adopt(beyond);
  EXPECT_EQ(chunks_of(*part, beyond), 1U);
}

TEST(WithinChunks, ABlockAtAGivenAddressMayLieOverChunksThatAreRegisteredNowhere) {
  Registrar registrar;
  Lab lab;
  const auto pool = lab.pool("a");
  leave_small_chunks(lab, *pool);
  const Address broken = lab.allocate(*pool, 10 * kMiB, kOne);
  ASSERT_GT(chunks_of(*pool, broken), 1U);
  lab.memory().keep_blocks_within_chunks();
  registrar.look_at(*pool);
  lab.free(broken);
  ASSERT_EQ(lab.memory().allocate_at(*pool, broken, 10 * kMiB, kOne), broken);
  lab.adopt(broken);
  EXPECT_FALSE(registrar.finds(broken, 10 * kMiB).first);
}

TEST(WithinChunks, ACheckpointOfBeforeBringsNoRegisteredChunkBack) {
  Registrar registrar;
  Lab lab;
  const auto part = lab.memory().create_part(lab.pool("a"), kGraph, false);
  leave_small_chunks(lab, *part);
  const Address broken = lab.allocate(*part, 10 * kMiB, kOne);
  ASSERT_GT(chunks_of(*part, broken), 1U);
  part->pin();
  const PoolCheckpoint before = part->checkpoint();
  lab.free(broken);
  lab.memory().keep_blocks_within_chunks();
  registrar.look_at(*part);
  std::vector<Address> freed;
  std::vector<Address> allocated;
  part->restore(before, &freed, &allocated);
  lab.adopt(broken);
  EXPECT_FALSE(registrar.finds(broken, 10 * kMiB).first);
  part->unpin();
}

TEST(WithinChunks, ExplicitPagesOfBeforeAreRegisteredNowhere) {
  Registrar registrar;
  Lab lab;
  const auto pool = lab.pool("a");
  lab.memory().allocate_pages(*pool, 0, kPage, kOne);
  lab.memory().allocate_pages(*pool, kPage, kPage, kOne);
  lab.memory().keep_blocks_within_chunks();
  registrar.look_at(*pool);
  EXPECT_FALSE(registrar.finds(pool->base(), 2 * kPage).first);
}

TEST(WithinChunks, WhoeverWasToldOfAChunkIsToldThatItGoes) {
  Registrar registrar;
  Lab lab;
  const auto pool = lab.pool("a");
  lab.memory().set_observer(&registrar);
  leave_small_chunks(lab, *pool);
  const Address broken = lab.allocate(*pool, 10 * kMiB, kOne);
  lab.memory().keep_blocks_within_chunks();
  lab.free(broken);
  lab.memory().empty_cache();
  EXPECT_TRUE(registrar.segments.empty());
  EXPECT_EQ(registrar.strangers, 0);
  lab.memory().set_observer(nullptr);
}

// Two models, one of them with a MemPool, and a registrar who comes halfway: whatever
// is live then and later lies in one segment whole, or touches none.
TEST(WithinChunks, AnyProgramKeepsEveryBlockWholeOrUnregistered) {
  for (const unsigned seed : {1U, 2U, 3U, 4U}) {
    Registrar registrar;
    LabSpec spec;
    spec.device_bytes = 192 * kMiB;
    spec.granularity = seed % 2 == 0 ? kPage : 64 * kKiB;
    Lab lab(spec);
    std::mt19937 random(seed);
    const auto below = [&random](std::size_t limit) {
      return std::uniform_int_distribution<std::size_t>(0, limit - 1)(random);
    };
    const auto model = lab.pool("a");
    const std::vector<std::shared_ptr<Pool>> pools = {
        model, lab.pool("b", 96 * kMiB), lab.memory().create_part(model, kMemPool, false, PoolKind::mem_pool)};
    struct Live {
      Address at;
      std::size_t bytes;
      std::size_t pool;
    };
    std::vector<Live> live;
    const auto free_one = [&] {
      const std::size_t which = below(live.size());
      lab.free(live[which].at);
      live[which] = live.back();
      live.pop_back();
    };
    std::size_t broken = 0;
    for (int step = 0; step < 600; ++step) {
      if (step == 200) {
        lab.memory().keep_blocks_within_chunks();
        lab.memory().set_observer(&registrar);
        for (const auto& pool : pools) registrar.look_at(*pool);
      }
      const std::size_t what = below(20);
      if (what == 0) {
        lab.memory().empty_cache();
      } else if (what < 9 && !live.empty()) {
        free_one();
      } else {
        const std::size_t which = below(pools.size());
        const std::size_t bytes = below(3) == 0 ? 1 + below(kMiB) : 1 + below(30 * kMiB);
        try {
          const Address at = lab.allocate(*pools[which], bytes, below(2) == 0 ? kOne : kTwo);
          live.push_back({at, bytes, which});
        } catch (const OutOfMemoryError&) {
          while (live.size() > 3) free_one();
        }
      }
      for (const Live& block : live) {
        const std::size_t chunks = chunks_of(*pools[block.pool], block.at);
        if (step < 200) {
          if (block.pool == 2) {
            ASSERT_EQ(chunks, 1U) << "seed " << seed << " step " << step;
          }
          if (chunks > 1) ++broken;
          continue;
        }
        const auto [touches, whole] = registrar.finds(block.at, block.bytes);
        ASSERT_EQ(touches, whole) << "seed " << seed << " step " << step << ": " << block.bytes << " bytes over "
                                  << chunks << " chunks";
      }
    }
    EXPECT_GT(broken, 0U) << "seed " << seed << " had nothing to keep from the registrar";
    for (const Live& block : live) lab.free(block.at);
    lab.memory().empty_cache();
    EXPECT_EQ(registrar.strangers, 0);
    EXPECT_TRUE(registrar.segments.empty());
    lab.memory().set_observer(nullptr);
  }
}

TEST(WithinChunks, OwnIdleChunksThatDoNotFitGoBeforeAnybodyElseIsAsked) {
  Lab lab;
  const auto pool = lab.pool("a", 24 * kMiB);
  lab.memory().keep_blocks_within_chunks();
  std::vector<Address> blocks;
  for (int k = 0; k < 6; ++k) blocks.push_back(lab.allocate(*pool, 4 * kMiB, kOne));
  for (const Address block : blocks) lab.free(block);
  int asked = 0;
  lab.memory().ladder().set_memory_callback([&asked] { return ++asked != 0; });
  EXPECT_EQ(chunks_of(*pool, lab.allocate(*pool, 22 * kMiB, kOne)), 1U);
  EXPECT_EQ(asked, 0);
}

}  // namespace
}  // namespace vmm::testing

// Random programs of models that hand chunks back and forth under a tight limit, with seals,
// held fences and failing driver calls. After every step all that is mapped is accounted for:
// what is live, what waits for a fence, and what is dormant, which is nowhere in the way.
// VMM_SEED and VMM_STEPS as for random_program_test.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "core/faces/seals.h"
#include "cpp/lab.h"
#include "support/environment.h"

namespace vmm::testing {
namespace {

constexpr std::size_t kModels = 3;
constexpr std::size_t kLimit = 40 * kMiB;

class ReturningProgram {
 public:
  ReturningProgram(std::uint64_t seed, bool with_failures) : random_(seed), with_failures_(with_failures) {
    for (std::size_t k = 0; k < kModels; ++k) open(k);
  }
  ~ReturningProgram() {
    lab_.driver.clear_failures();
    lab_.driver.release_fences();
    while (!live_.empty()) free(live_.size() - 1);
    for (auto& model : models_) model.reset();
    lab_.memory().settle(/*wait=*/true);
  }
  ReturningProgram(const ReturningProgram&) = delete;
  ReturningProgram& operator=(const ReturningProgram&) = delete;

  void step() {
    if (with_failures_ && any(25) == 0) {
      lab_.driver.clear_failures();
      lab_.driver.fail_nth_call(1 + any(12), any(2) == 0 ? no_memory() : broken());
    }
    const std::uint64_t what = any(100);
    try {
      if (what < 45) {
        allocate();
      } else if (what < 72) {
        if (!live_.empty()) free(any(live_.size()));
      } else if (what < 76) {
        for (int k = 0; k < 4 && !live_.empty(); ++k) free(any(live_.size()));
      } else if (what < 81) {
        seal();
      } else if (what < 83) {
        unseal();
      } else if (what < 86) {
        lab_.driver.hold_fences(stream(0x10 * (1 + any(3))));
      } else if (what < 90) {
        lab_.driver.release_fences();
      } else if (what < 95) {
        lab_.memory().settle(/*wait=*/any(2) == 0);
      } else if (what < 96) {
        lab_.memory().empty_cache();
      } else if (what < 97) {
        lab_.memory().trim(*models_[any(kModels)], any(3) * 4 * kMiB);
      } else if (what < 98) {
        lab_.memory().set_limit(*group_, kLimit - any(3) * 8 * kMiB);
      } else {
        const std::size_t k = any(kModels);
        lab_.memory().close_pool(*models_[k], /*force=*/true);
        open(k);
      }
    } catch (const OutOfMemoryError&) {  // NOLINT(bugprone-empty-catch): the limit is tight
    } catch (const DriverError&) {
      EXPECT_TRUE(with_failures_);
    }
    check();
  }

 private:
  struct Live {
    Address address = 0;
    std::size_t size = 0;
    std::uint64_t seed = 0;
    bool is_tagged = false;
    bool is_sealed = false;
    std::size_t model = 0;
    std::uint64_t owner = 0;
  };

  std::uint64_t any(std::uint64_t below) { return random_() % below; }

  void open(std::size_t k) {
    PoolSpec spec = Lab::spec("model " + std::to_string(k));
    spec.priority = k == 2 ? 1 : 0;
    spec.floor = k == 1 ? 4 * kMiB : 0;
    models_[k] = nullptr;
    while (models_[k] == nullptr) {
      try {
        models_[k] = lab_.pool(spec, group_.get());
      } catch (const VmmError&) {  // NOLINT(bugprone-empty-catch): the failing call was one of these
      }
    }
    owners_[k] = ++last_owner_;
  }

  void allocate() {
    if (live_.size() > 60) return;
    Live live;
    live.model = any(kModels);
    live.owner = owners_[live.model];
    live.size = any(3) == 0 ? 512 + any(8) * 4096 : (1 + any(7)) * kPage;
    live.is_tagged = any(4) == 0;
    live.seed = ++last_seed_;
    Pool& model = *models_[live.model];
    const std::shared_ptr<Pool> space = live.is_tagged ? lab_.memory().tagged(models_[live.model], "weights") : nullptr;
    live.address = lab_.memory().allocate(space != nullptr ? *space : model, live.size, stream(0x10 * (1 + any(3))));
    lab_.adopt(live.address);
    Lab::fill(live.address, live.size, live.seed);
    live_.push_back(live);
  }

  void free(std::size_t index) {
    const Live live = live_[index];
    EXPECT_TRUE(Lab::holds(live.address, live.size, live.seed)) << "block " << live.seed;
    live_[index] = live_.back();
    live_.pop_back();
    lab_.forget(live.address);
    EXPECT_TRUE(DeviceMemory::free(lab_.space, live.address));
  }

  // All of a model's tagged blocks, or some, which may share chunks with others.
  void seal() {
    const std::size_t k = any(kModels);
    const bool all = any(3) != 0;
    std::vector<Live*> chosen;
    std::vector<SealedPiece> pieces;
    for (Live& live : live_) {
      if (!live.is_tagged || live.owner != owners_[k] || (!all && any(2) == 0)) continue;
      chosen.push_back(&live);
      pieces.push_back({live.address, live.size});
    }
    if (pieces.empty()) return;
    try {
      seal_pages(lab_.memory(), *models_[k], pieces);
    } catch (const InvalidArgumentError&) {
      return;
    }
    for (Live* live : chosen) live->is_sealed = true;
  }
  void unseal() {
    for (Live& live : live_) {
      if (!live.is_sealed || live.owner != owners_[live.model]) continue;
      try {
        unseal_pages(lab_.memory(), *models_[live.model], {{live.address, live.size}});
      } catch (const InvalidArgumentError&) {
        return;  // another block in its chunk
      }
      live.is_sealed = false;
      Lab::fill(live.address, live.size, live.seed);
      return;
    }
  }

  void check() {
    lab_.memory().check();
    // All of one; of the others the beginning, and all when they are freed.
    const std::size_t whole = live_.empty() ? 0 : any(live_.size());
    for (std::size_t k = 0; k < live_.size(); ++k) {
      const std::size_t size = k == whole ? live_[k].size : std::min<std::size_t>(live_[k].size, 4096);
      ASSERT_TRUE(Lab::holds(live_[k].address, size, live_[k].seed)) << "block " << live_[k].seed;
    }
    // Where each chunk is live, and what each pool has.
    std::map<ChunkHandle, Address> places;
    for (const auto& pool : lab_.memory().pools()) {
      for (const ChunkView& chunk : pool->chunks_under(pool->base(), pool->capacity())) {
        ASSERT_TRUE(places.emplace(chunk.handle, chunk.address).second) << "in two pools";
      }
    }
    std::size_t dormant = 0;
    Address end = 0;
    for (const auto& each : lab_.memory().store().dormant().within(0, kUnlimited)) {
      ++dormant;
      ASSERT_GE(each.address, end) << "two in one place";
      end = each.address + each.size;
      const std::shared_ptr<Pool> pool = lab_.memory().pool_at(each.address);
      ASSERT_NE(pool, nullptr) << "of a pool that has ended";
      ASSERT_TRUE(pool->chunks_under(each.address, each.size).empty()) << "under what is live";
      ASSERT_EQ(each.chunk->size, each.size);
      const auto place = places.find(each.chunk->handle);
      if (place == places.end()) continue;  // on the shelf
      ASSERT_EQ(std::memcmp(reinterpret_cast<const void*>(place->second), reinterpret_cast<const void*>(each.address),
                            64 * kKiB),
                0)
          << "it is not the chunk that it is said to be";
      const std::shared_ptr<Pool> holder = lab_.memory().pool_at(place->second);
      ASSERT_FALSE(holder->has_read_only(place->second, each.size)) << "writable elsewhere";
      ASSERT_EQ(each.holder, holder->id());
    }
    ASSERT_LE(dormant + places.size(), lab_.driver.live_mappings());
    ASSERT_EQ(lab_.driver.live_chunk_bytes(), lab_.memory().committed_bytes());
    const Statistics all = lab_.memory().statistics();
    ASSERT_EQ(static_cast<std::size_t>(all.num_device_alloc - all.num_device_free), lab_.driver.live_mappings());
  }

  Lab lab_;
  const std::shared_ptr<Budget> group_ = lab_.memory().create_group("group", kLimit);
  std::mt19937_64 random_;
  const bool with_failures_;
  std::array<std::shared_ptr<Pool>, kModels> models_;
  std::array<std::uint64_t, kModels> owners_{};
  std::vector<Live> live_;
  std::uint64_t last_seed_ = 0;
  std::uint64_t last_owner_ = 0;
};

void run(std::uint64_t seed, std::uint64_t steps, bool with_failures) {
  ReturningProgram program(seed, with_failures);
  for (std::uint64_t step = 0; step < steps; ++step) {
    SCOPED_TRACE("VMM_SEED=" + std::to_string(seed) + ", step " + std::to_string(step));
    program.step();
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(ReturningPrograms, OnFixedSeeds) {
  for (std::uint64_t seed = 1; seed <= 6; ++seed) run(seed, 300, seed % 2 == 0);
}

TEST(ReturningPrograms, OnAFreshSeed) {
  const std::uint64_t seed = from_environment("VMM_SEED", std::random_device()());
  run(seed, from_environment("VMM_STEPS", 500), false);
  run(seed, from_environment("VMM_STEPS", 500), true);
}

}  // namespace
}  // namespace vmm::testing

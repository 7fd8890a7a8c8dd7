// Models that take turns at the margin of a limit, by random programs: who may have memory when is
// the order checker's rule, which knows nothing of units, margins or ladders.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "lab.h"
#include "support/order_checker.h"

namespace vmm::testing {
namespace {

constexpr std::size_t kSmallPage = 64 * kKiB;
constexpr std::size_t kLimit = 400 * kMiB;
constexpr std::size_t kModels = 3;

// What came of all programs together: a rule that nothing has met proves nothing.
struct Seen {
  std::uint64_t moved = 0;
  std::uint64_t filled = 0;
  std::uint64_t at_margin = 0;
};

class MarginProgram {
 public:
  explicit MarginProgram(std::uint64_t seed) : random_(seed) {
    driver_.add_stream({streams_[1].handle, 0, false, "A"});
    driver_.add_stream({streams_[2].handle, 0, false, "B"});
    // What each has of before they shared a limit is in chunks of any size.
    memory_.set_limit(*group_, kUnlimited);
    for (std::size_t k = 0; k < kModels; ++k) {
      PoolSpec spec = Lab::spec("model " + std::to_string(k));
      spec.capacity = 4 * kGiB;
      spec.priority = any(4) == 0 ? 1 : 0;
      if (any(3) == 0) spec.floor = any(4) * 16 * kMiB;
      pools_.push_back(memory_.create_pool(spec, group_.get()));
      for (int times = 0; times < 22; ++times) allocate(k, (17 + any(60)) * kSmallPage, any(8) == 0 ? any(3) : 1);
    }
    memory_.set_limit(*group_, kLimit);
    driver_.drift(any(3) != 0 ? 0 : seed + 1);
  }

  void run(int steps) {
    std::size_t turn = 0;
    for (int step = 0; step < steps; ++step) {
      if (any(80) == 0 || live_of(turn) > kLimit / 10 * 8) {
        end_turn_of(turn);
        turn = any(kModels);
      }
      if (any(3) != 0) {
        allocate(any(15) == 0 ? any(kModels) : turn, any_size(), any(12) == 0 ? any(3) : 1);
      } else if (!live_.empty()) {
        drop(any(live_.size()));
      }
      if (any(100) == 0) driver_.run(streams_[any(3)], any(200));
      if (any(300) == 0) memory_.trim(*pools_[any(kModels)], any(32) * kMiB);
      if (step % 50 == 0) check();
    }
  }
  // All is given back.
  void end(Seen* seen) {
    while (!live_.empty()) drop(live_.size() - 1);
    driver_.run_all();
    check();
    seen->moved += driver_.counts().moved;
    seen->filled += driver_.counts().filled;
    seen->at_margin += at_margin_;
    driver_.drift(0);
    pools_.clear();
  }

 private:
  struct Held {
    Address address = 0;
    std::size_t bytes = 0;
    std::size_t model = 0;
    StreamRef on;
  };

  std::uint64_t any(std::uint64_t below) { return random_() % below; }
  std::size_t any_size() {
    if (any(6) == 0) return 512 * (1 + any(4000));
    return (17 + any(any(30) == 0 ? 900 : any(3) == 0 ? 100 : 40)) * kSmallPage;
  }
  std::size_t live_of(std::size_t model) const {
    std::size_t sum = 0;
    for (const Held& each : live_) sum += each.model == model ? each.bytes : 0;
    return sum;
  }
  void allocate(std::size_t model, std::size_t bytes, std::size_t stream) {
    const StreamRef on = streams_[stream];
    try {
      const Address address = memory_.allocate(*pools_[model], bytes, on.handle);
      driver_.hand_out(address, bytes, on, model + 1);
      driver_.use(on, address, bytes, Use::write);
      live_.push_back({address, bytes, model, on});
    } catch (const OutOfMemoryError&) {
      return;
    }
    at_margin_ += group_->used() > kLimit - kLimit / 32 ? 1 : 0;
  }
  void drop(std::size_t index) {
    const Held held = live_[index];
    live_.erase(live_.begin() + static_cast<std::ptrdiff_t>(index));
    driver_.use(held.on, held.address, held.bytes, Use::read);
    driver_.take_back(held.address);
    EXPECT_TRUE(DeviceMemory::free(space_, held.address));
  }
  // It frees nearly all that it has.
  void end_turn_of(std::size_t model) {
    for (std::size_t k = live_.size(); k-- > 0;) {
      if (live_[k].model == model && any(12) != 0) drop(k);
    }
  }
  void check() {
    driver_.check();
    memory_.check();
    EXPECT_LE(group_->used(), group_->limit());
  }

  static Options options() {
    Options options = LabSpec::plain_options();
    options.store_bytes = 64 * kMiB;
    return options;
  }

  std::mt19937_64 random_;
  const std::vector<StreamRef> streams_ = {{nullptr, 0}, {stream(0x10), 0}, {stream(0x20), 0}};
  HostDriver host_{{kSmallPage, kGiB, 1}};
  ScriptedDriver scripted_{host_};
  OrderChecker driver_{scripted_};
  AddressSpace space_;
  DeviceMemory memory_{driver_, space_, 0, options()};
  const std::shared_ptr<Budget> group_ = memory_.create_group("shared", kLimit);
  std::vector<std::shared_ptr<Pool>> pools_;
  std::vector<Held> live_;
  std::uint64_t at_margin_ = 0;
};

TEST(MarginOrder, NobodyHasWhatAnotherMayStillUse) {
  Seen seen;
  for (std::uint64_t seed = 1; seed <= 4 && !::testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    MarginProgram program(seed);
    EXPECT_NO_THROW(program.run(2000));
    program.end(&seen);
  }
  EXPECT_GT(seen.moved, 500U);
  EXPECT_GT(seen.filled, 50U);
  EXPECT_GT(seen.at_margin, 50U);
}

}  // namespace
}  // namespace vmm::testing

// The bench of tests of sleeping models.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/faces/seals.h"
#include "core/sleep/transfer.h"
#include "cpp/lab.h"

namespace vmm::testing {

namespace fs = std::filesystem;

inline void look_away() {}

// Where a pool sleeps, in words; "" where it is awake.
inline std::string where(const Pool& pool) {
  const AsleepWhere found = pool.asleep_where();
  return found.contents.empty() ? found.memory : in_words(found.contents);
}

class Sleep : public ::testing::Test {
 protected:
  ~Sleep() override {
    fs::remove_all(folder_);
    lab_.close();  // before the sleeper: pools that sleep still have backups
  }

  static Places host() { return {Place{}}; }
  static Places packed() {
    Places places = host();
    places.front().is_packed = true;
    return places;
  }
  static Places discard() { return {{Place::Kind::discard, "", nullptr}}; }
  Places file(const std::string& name = "model") {
    fs::create_directories(folder_);
    return {{Place::Kind::file, (folder_ / name).string(), nullptr}};
  }

  std::unique_ptr<Transfer> going(const PoolList& pools, const Places& places, bool release = false) {
    std::vector<PartToSleep> parts;
    for (const auto& pool : pools) {
      for (const auto& member : lab_.memory().family(*pool)) parts.push_back({member, places});
    }
    return std::make_unique<Transfer>(std::make_unique<Departure>(sleeper_, std::move(parts), release), nullptr);
  }
  std::unique_ptr<Transfer> coming(const std::shared_ptr<Pool>& pool,
                                   Arrival::Memory memory = Arrival::Memory::collected) {
    return std::make_unique<Transfer>(nullptr,
                                      std::make_unique<Arrival>(sleeper_, lab_.memory().family(*pool), memory));
  }
  // One goes as the other one comes.
  std::unique_ptr<Transfer> swapping(const std::shared_ptr<Pool>& out, const std::shared_ptr<Pool>& in,
                                     const Places& places) {
    return std::make_unique<Transfer>(
        std::make_unique<Departure>(sleeper_, std::vector<PartToSleep>{{out, places}}, false),
        std::make_unique<Arrival>(sleeper_, PoolList{in}, Arrival::Memory::by_piece));
  }
  static void go(Transfer& transfer, const Look& look = &look_away) {
    transfer.begin(look);
    transfer.run(look);
  }
  // Whoever looks for the `at`-th time stops it.
  static Look stops_at(int at) {
    return [at, looks = 0]() mutable {
      if (++looks == at) throw VmmError("stopped");
    };
  }
  // Does the `n`-th call of the driver fail meanwhile? Whatever that ends, all adds up.
  template <typename Act>
  bool fails_at(std::uint64_t n, const Act& act) {
    lab_.driver.fail_nth_call(n, broken());
    try {
      act();
    } catch (const VmmError&) {
    }
    lab_.memory().check();
    const bool has_failed = lab_.driver.failures() != 0;
    lab_.driver.clear_failures();
    return has_failed;
  }
  void sleep(const std::shared_ptr<Pool>& pool, const Places& places, bool release = false) {
    go(*going({pool}, places, release));
    lab_.memory().check();
  }
  void wake(const std::shared_ptr<Pool>& pool) {
    go(*coming(pool));
    lab_.memory().check();
  }
  // `places` have no room: refused before anything has moved, when `expect_as_before` is called;
  // and a file named behind them is taken.
  template <typename Expect>
  void expect_next_place_taken(const std::shared_ptr<Pool>& pool, Places places, const Expect& expect_as_before) {
    EXPECT_THROW(sleep(pool, places), OutOfMemoryError);
    EXPECT_FALSE(pool->is_asleep()) << "refused before anything moved";
    expect_as_before();
    places.push_back(file().front());
    sleep(pool, places);
    EXPECT_EQ(where(*pool), (folder_ / "model").string()) << "the next place named";
    wake(pool);
  }

  // Blocks of all sizes, each filled with its own pattern.
  struct Live {
    Address address = 0;
    std::size_t bytes = 0;
    std::uint64_t seed = 0;
  };
  std::vector<Live> fill(Pool& pool, const std::vector<std::size_t>& sizes = {512, 3 * kKiB, 70 * kKiB, kMiB, 3 * kMiB,
                                                                              5 * kMiB, 20 * kMiB}) {
    std::vector<Live> live;
    std::uint64_t seed = 1;
    for (const std::size_t bytes : sizes) {
      for (int k = 0; k < 3; ++k) {
        live.push_back({lab_.allocate(pool, bytes), bytes, ++seed});
        Lab::fill(live.back().address, bytes, seed);
      }
    }
    return live;
  }
  // For seal_pages(), and back.
  static std::vector<SealedPiece> pieces(const std::vector<Live>& live) {
    std::vector<SealedPiece> pieces;
    for (const Live& each : live) pieces.push_back({each.address, each.bytes, true});
    return pieces;
  }
  static void expect_whole(const std::vector<Live>& live) {
    for (const Live& each : live) {
      EXPECT_EQ(Lab::first_wrong(each.address, each.bytes, each.seed), each.bytes) << "of " << each.bytes;
    }
  }
  static void flip_a_bit(const std::string& path) {
    std::fstream bytes(path, std::ios::in | std::ios::out | std::ios::binary);
    bytes.seekg(5 * kMiB);
    const int byte = bytes.get();
    bytes.seekp(5 * kMiB);
    bytes.put(static_cast<char>(byte ^ 1));
  }
  static bool is_zero(Address address, std::size_t bytes) { return is_all_zero(address, bytes); }

  Lab lab_;
  Sleeper sleeper_{lab_.memory()};
  const fs::path folder_ = fs::temp_directory_path() / ("vmm_sleep_" + std::to_string(::getpid()));
};

}  // namespace vmm::testing

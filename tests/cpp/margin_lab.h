// Models under one limit, for what happens at its margin.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lab.h"

namespace vmm::testing {

class MarginLab : public ::testing::Test {
 protected:
  // Units of 8 MiB, and of them 6.25 are the margin.
  static constexpr std::size_t kLimit = 200 * 8 * kMiB;
  static constexpr std::size_t kMargin = kLimit / 32;
  static constexpr std::size_t kLargeLimit = 16 * kGiB;  // and here 16 MiB
  static inline const Stream kOfA = stream(0x10);
  static inline const Stream kOfB = stream(0x20);

  std::shared_ptr<Pool> model(const std::string& name, int priority = 0, std::size_t floor = 0, std::size_t page = 0) {
    PoolSpec spec = Lab::spec(name);
    spec.capacity = 16 * kGiB;
    spec.priority = priority;
    spec.floor = floor;
    spec.page_size = page;
    return lab_.pool(spec, group_.get());
  }
  // Eight, under the large limit.
  std::vector<std::shared_ptr<Pool>> more_than_are_asked() {
    lab_.memory().set_limit(*group_, kLargeLimit);
    std::vector<std::shared_ptr<Pool>> models;
    for (int k = 0; k < 8; ++k) models.push_back(model("holed " + std::to_string(k)));
    return models;
  }
  // Without a check, which walks; as drop().
  Address get(Pool& pool, std::size_t bytes, Stream on = nullptr) {
    const Address address = lab_.memory().allocate(pool, bytes, on);
    lab_.adopt(address);
    return address;
  }
  void drop(Address address) {
    lab_.forget(address);
    EXPECT_TRUE(DeviceMemory::free(lab_.space, address));
  }
  // Takes `bytes` in blocks of 24 MiB.
  std::vector<Address> take(Pool& pool, std::size_t bytes) {
    std::vector<Address> blocks;
    for (std::size_t left = bytes; left >= 24 * kMiB; left -= 24 * kMiB) {
      blocks.push_back(lab_.allocate(pool, 24 * kMiB));
      most_used_ = std::max(most_used_, group_->used());
    }
    return blocks;
  }
  void take_up_to_margin(Pool& pool) { take(pool, kLimit - kMargin - group_->used()); }
  // In whole units.
  void fill_up_to_margin(Pool& pool) {
    take_up_to_margin(pool);
    lab_.allocate(pool, align_down(kLimit - kMargin - group_->used(), 8 * kMiB));
  }
  // A model by itself, in blocks of 34 MiB, takes all but `left_open` below the margin and what is
  // returned: that ends within a unit.
  std::size_t fill_alone(Pool& pool, std::size_t left_open) {
    std::size_t left = kLimit - kMargin - left_open;
    for (; left >= 68 * kMiB; left -= 34 * kMiB) lab_.allocate(pool, 34 * kMiB);
    return left;
  }
  // That nobody uses what is idle is known from here on.
  void know_all_done() {
    Clock& clock = lab_.memory().clock();
    clock.cover(clock.now());
    clock.poll();
  }
  // All of `limit` but its margin and what floors reserved, at once.
  void fill(Pool& pool, const Budget& limit) {
    const std::size_t free = limit.limit() - limit.used() - limit.reserved();
    get(pool, align_down(free - limit.limit() / 32, 16 * kMiB));
  }
  // So many times blocks of these sizes: without another model each has chunks of its own.
  std::vector<Address> take_each(Pool& pool, int times, const std::vector<std::size_t>& sizes, Stream on = nullptr) {
    std::vector<Address> blocks;
    for (int k = 0; k < times; ++k) {
      for (const std::size_t bytes : sizes) blocks.push_back(lab_.allocate(pool, bytes, on));
    }
    return blocks;
  }
  void free(const std::vector<Address>& blocks) {
    for (const Address block : blocks) lab_.free(block);
  }
  // How often `other` is looked through for so much of `pool`'s.
  std::size_t walks(Pool& other, Pool& pool, std::size_t bytes) {
    const std::size_t before = other.times_walked();
    get(pool, bytes);
    return other.times_walked() - before;
  }
  // How often they have been looked through.
  static std::size_t walks(const std::vector<std::shared_ptr<Pool>>& pools) {
    std::size_t all = 0;
    for (const auto& each : pools) all += each->times_walked();
    return all;
  }
  std::uint64_t waits() { return lab_.driver.count(Call::wait) + lab_.driver.count(Call::synchronize); }
  // Nobody but other models has been asked for memory.
  void expect_no_climb(Pool& pool) {
    EXPECT_EQ(pool.statistics().num_alloc_retries, 0);
    EXPECT_EQ(waits(), 0U);
  }

  Lab lab_{LabSpec{64 * kGiB}};
  const std::shared_ptr<Budget> group_ = lab_.memory().create_group("shared", kLimit);
  std::size_t most_used_ = 0;
};

}  // namespace vmm::testing

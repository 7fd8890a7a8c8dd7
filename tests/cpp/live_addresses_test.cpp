// LiveAddresses beside a map that is right.
#include "core/faces/live_addresses.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <random>
#include <unordered_map>

namespace vmm {
namespace {

void expect_same(const LiveAddresses& table, const std::unordered_map<Address, std::size_t>& model) {
  ASSERT_EQ(table.size(), model.size());
  for (const auto& [address, bytes] : table.all()) {
    const auto found = model.find(address);
    ASSERT_NE(found, model.end()) << address;
    EXPECT_EQ(found->second, bytes);
  }
  EXPECT_EQ(table.all().size(), model.size());
}

TEST(LiveAddresses, AnEmptyOneHasNothing) {
  LiveAddresses table;
  std::size_t bytes = 0;
  EXPECT_FALSE(table.take(512, &bytes));
  EXPECT_FALSE(table.take(0, &bytes));
  EXPECT_TRUE(table.all().empty());
}

TEST(LiveAddresses, AnAddressIsTakenOnce) {
  LiveAddresses table;
  table.add(0x7000, 12);
  std::size_t bytes = 0;
  EXPECT_FALSE(table.take(0x7200, &bytes));
  EXPECT_TRUE(table.take(0x7000, &bytes));
  EXPECT_EQ(bytes, 12U);
  EXPECT_FALSE(table.take(0x7000, &bytes));
  EXPECT_EQ(table.size(), 0U);
}

// Few addresses over and over, so that runs of slots fill, wrap around the end and
// close behind what is taken out.
TEST(LiveAddresses, ARandomProgramEqualsAMap) {
  for (unsigned seed = 1; seed <= 20; ++seed) {
    std::mt19937_64 random(seed);
    LiveAddresses table;
    std::unordered_map<Address, std::size_t> model;
    const std::size_t places = 20 + seed * 40;
    for (unsigned step = 0; step < 4000; ++step) {
      const Address address = 0x7f0000000000 + 512 * (1 + random() % places);
      const auto found = model.find(address);
      std::size_t bytes = 0;
      ASSERT_EQ(found != model.end(), table.take(address, &bytes)) << "seed " << seed << ", step " << step;
      if (found != model.end()) {
        ASSERT_EQ(bytes, found->second) << "seed " << seed << ", step " << step;
        model.erase(found);
      } else {
        table.add(address, step + 1U);
        model.emplace(address, step + 1U);
      }
      if (step % 500 == 0) expect_same(table, model);
    }
    expect_same(table, model);
  }
}

}  // namespace
}  // namespace vmm

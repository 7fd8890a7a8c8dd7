#include "core/offset_map.h"

#include <gtest/gtest.h>

#include <random>
#include <unordered_map>

namespace vmm::testing {
namespace {

TEST(OffsetMap, FindsWhatWasPutAndNothingElse) {
  OffsetMap<int> map;
  int value = 1;
  EXPECT_EQ(map.find(0), nullptr);
  map.insert(0, &value);
  EXPECT_EQ(map.find(0), &value);
  EXPECT_EQ(map.find(512), nullptr);
  EXPECT_EQ(map.find(100), nullptr) << "within the block is not its offset";
  EXPECT_EQ(map.take(512), nullptr);
  EXPECT_EQ(map.take(0), &value);
  EXPECT_EQ(map.take(0), nullptr);
  EXPECT_EQ(map.size(), 0U);
}

// Against a plain map: dense and sparse offsets, and as many removals, so that
// chains wrap around the table's end and are shifted back.
TEST(OffsetMap, AgreesWithAPlainMapOverARandomProgram) {
  for (const std::size_t spread : {std::size_t{300}, std::size_t{5000}, std::size_t{1} << 30}) {
    SCOPED_TRACE(spread);
    OffsetMap<std::size_t> map;
    std::unordered_map<std::size_t, std::size_t*> naive;
    std::vector<std::size_t> values(20000);
    std::mt19937_64 random(spread);
    for (std::size_t step = 0; step < values.size(); ++step) {
      const std::size_t offset = random() % spread * 512;
      const auto known = naive.find(offset);
      ASSERT_EQ(map.find(offset), known == naive.end() ? nullptr : known->second) << "step " << step;
      if (known == naive.end() && random() % 100 < 55) {
        map.insert(offset, &values[step]);
        naive.emplace(offset, &values[step]);
      } else if (!naive.empty()) {
        const auto victim = known != naive.end() ? known : naive.begin();
        ASSERT_EQ(map.take(victim->first), victim->second) << "step " << step;
        naive.erase(victim);
      }
      ASSERT_EQ(map.size(), naive.size());
    }
    std::size_t seen = 0;
    map.for_each([&](std::size_t offset, std::size_t* value) {
      ++seen;
      EXPECT_EQ(naive.at(offset), value);
    });
    EXPECT_EQ(seen, naive.size());
    for (const auto& [offset, value] : naive) EXPECT_EQ(map.find(offset), value);
  }
}

}  // namespace
}  // namespace vmm::testing

// A device's pools: how large they are made where nobody says, and numbers of
// those that have ended.
#include "core/device/device_memory.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "core/faces/shared_memory_pool.h"
#include "cpp/lab.h"

namespace vmm::testing {
namespace {

// A process with so many bytes of addresses.
class ShortOfAddresses {
 public:
  ShortOfAddresses(ScriptedDriver& driver, std::size_t bytes) : left_(std::make_shared<std::size_t>(bytes)) {
    driver.fail_if(
        [left = left_](const CallRecord& record) {
          if (record.call == Call::unreserve) *left += record.b;
          if (record.call != Call::reserve) return false;
          if (record.a > *left) return true;
          *left -= record.a;
          return false;
        },
        {StatusCode::out_of_memory, "mmap", 12, "ENOMEM"});
  }
  [[nodiscard]] std::size_t left() const { return *left_; }

 private:
  std::shared_ptr<std::size_t> left_;
};

LabSpec device_of(std::size_t bytes) {
  LabSpec spec;
  spec.device_bytes = bytes;
  return spec;
}

PoolSpec unnamed_capacity(const std::string& name) {
  PoolSpec spec;
  spec.name = name;
  return spec;
}

TEST(Capacity, IsFourTimesTheDeviceWhereNobodyNamesOne) {
  Lab lab;
  EXPECT_EQ(lab.memory().default_capacity(), 4 * kGiB);
  EXPECT_EQ(lab.pool(unnamed_capacity("a"))->capacity(), 4 * kGiB);
}

TEST(Capacity, FollowsTheOption) {
  LabSpec spec;
  spec.options.default_capacity_bytes = 6 * kGiB;
  Lab lab(spec);
  EXPECT_EQ(lab.memory().default_capacity(), 6 * kGiB);
  EXPECT_EQ(lab.pool(unnamed_capacity("a"))->capacity(), 6 * kGiB);
}

TEST(Capacity, HalvesWhereAddressesAreShort) {
  Lab lab(device_of(8 * kGiB));
  const ShortOfAddresses process(lab.driver, 5 * kGiB);
  const auto pool = lab.pool(unnamed_capacity("default"));
  EXPECT_EQ(pool->capacity(), 4 * kGiB) << "of 32 GiB";
  const Address block = lab.allocate(*pool, 3 * kMiB);
  Lab::fill(block, 3 * kMiB, 1);
  EXPECT_TRUE(Lab::holds(block, 3 * kMiB, 1));
  EXPECT_THROW(lab.allocate(*pool, 4 * kGiB), OutOfMemoryError);
}

TEST(Capacity, OfModelsHalvesToo) {
  Lab lab;
  const ShortOfAddresses process(lab.driver, 10 * kGiB);
  SharedMemoryPool shared(lab.memory(), 64 * kMiB);
  std::vector<std::size_t> capacities;
  for (const char* id : {"a", "b", "c"}) capacities.push_back(shared.register_model(id, {})->capacity());
  EXPECT_EQ(capacities, (std::vector<std::size_t>{4 * kGiB, 4 * kGiB, 2 * kGiB}));
  EXPECT_EQ(process.left(), 0U);
  EXPECT_THROW(shared.register_model("d", {}), OutOfMemoryError);
  EXPECT_EQ(shared.model_ids().size(), 3U);
  shared.unregister_model("a", false);
  EXPECT_EQ(shared.register_model("d", {})->capacity(), 4 * kGiB) << "a refusal keeps nothing";
}

TEST(Capacity, OfPartsHalvesToo) {
  Lab lab(device_of(8 * kGiB));
  const ShortOfAddresses process(lab.driver, 9 * kGiB);
  const auto model = lab.pool("a");  // 1 GiB
  EXPECT_EQ(lab.memory().create_part(model, {1, 0}, false)->capacity(), kGiB) << "never above its model's";
  const auto large = lab.pool(unnamed_capacity("b"));
  EXPECT_EQ(large->capacity(), 4 * kGiB);
  EXPECT_EQ(lab.memory().create_part(large, {2, 0}, false)->capacity(), 2 * kGiB);
  EXPECT_EQ(process.left(), kGiB);
  EXPECT_THROW(lab.memory().create_part(large, {3, 0}, false), OutOfMemoryError);
}

TEST(Capacity, ThatIsNamedIsNeverChanged) {
  Lab lab;
  const ShortOfAddresses process(lab.driver, 3 * kGiB);
  PoolSpec spec = Lab::spec("a");
  spec.capacity = 4 * kGiB;
  EXPECT_THROW(lab.pool(spec), OutOfMemoryError);
  SharedMemoryPool shared(lab.memory(), 64 * kMiB);
  ModelSpec model;
  model.virtual_capacity = 4 * kGiB;
  EXPECT_THROW(shared.register_model("a", model), OutOfMemoryError);
  EXPECT_EQ(lab.driver.count(Call::reserve), 2U) << "asked for once each";
  EXPECT_EQ(process.left(), 3 * kGiB);
}

TEST(Capacity, BelowTwoGibibytesIsARefusalThatSaysWhatStandsInTheWay) {
  Lab lab;
  const ShortOfAddresses process(lab.driver, 2 * kGiB - 1);
  try {
    lab.pool(unnamed_capacity("default"));
    FAIL();
  } catch (const OutOfMemoryError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("pool 'default'"), std::string::npos) << text;
    EXPECT_NE(text.find("no 2 GiB of virtual addresses"), std::string::npos) << text;
    EXPECT_NE(text.find("4 GiB were wanted first"), std::string::npos) << text;
    EXPECT_NE(text.find("mmap: ENOMEM (12)"), std::string::npos) << text;
    EXPECT_NE(text.find("RLIMIT_AS"), std::string::npos) << text;
    EXPECT_EQ(error.requested, 2 * kGiB);
  }
  EXPECT_TRUE(lab.memory().pools().empty());
}

TEST(Capacity, AnotherFailureOfTheDriverIsNotTriedAgain) {
  Lab lab;
  lab.driver.fail_nth(Call::reserve, 1, broken(), Repeat::from_then_on);
  EXPECT_THROW(lab.pool(unnamed_capacity("a")), DriverError);
  EXPECT_EQ(lab.driver.count(Call::reserve), 1U);
}

// torch says what is oversize at its first allocation, when pools may hold memory already.
TEST(Oversize, IsWhatABlockWasCountedAs) {
  Lab lab;
  const auto pool = lab.pool("a");
  const Address before = lab.allocate(*pool, 16 * kMiB);
  lab.memory().set_oversize(8 * kMiB);
  const Address after = lab.allocate(*pool, 16 * kMiB);
  EXPECT_EQ(lab.memory().statistics().oversize_allocations.current, 1);
  lab.free(before);
  EXPECT_EQ(lab.memory().statistics().oversize_allocations.current, 1);
  lab.memory().set_oversize(kUnlimited);
  lab.free(after);
  EXPECT_EQ(lab.memory().statistics().oversize_allocations.current, 0);
  const auto in_chunks = [&] { return lab.memory().statistics().oversize_segments.current; };
  EXPECT_GT(in_chunks(), 0);
  lab.memory().empty_cache();
  EXPECT_EQ(in_chunks(), 0);
}

// Nobody follows the oversize peaks of several pools together: those of pools
// that have ended are added, until they are reset.
TEST(Peaks, OfEndedPoolsAreReset) {
  Lab lab;
  lab.memory().set_oversize(kMiB);
  for (int k = 0; k < 10; ++k) {
    const auto pool = lab.pool("a");
    lab.leave_idle(*pool, 4 * kMiB);
    lab.memory().close_pool(*pool, false);
  }
  EXPECT_EQ(lab.memory().statistics().oversize_allocations.peak, 10);
  lab.memory().reset_peaks();
  const Statistics after = lab.memory().statistics();
  EXPECT_EQ(after.oversize_allocations.current, 0);
  EXPECT_EQ(after.oversize_allocations.peak, 0);
  EXPECT_EQ(after.oversize_segments.peak, 0);
  EXPECT_EQ(after.oversize_allocations.allocated, 10) << "what ever came is no peak";
}

TEST(Peaks, OfEndedPartsAreResetWithTheirModels) {
  Lab lab;
  lab.memory().set_oversize(2 * kMiB);
  const auto model = lab.pool("a");
  for (std::uint64_t k = 1; k <= 3; ++k) {
    const auto part = lab.memory().create_part(model, {k, 0}, false);
    lab.leave_idle(*part, 4 * kMiB);
    lab.memory().close_pool(*part, false);
  }
  EXPECT_EQ(lab.memory().statistics_of(*model).oversize_allocations.peak, 3);
  EXPECT_GT(lab.memory().statistics_of(*model).oversize_segments.peak, 0);
  lab.memory().reset_peaks_of(*model);
  EXPECT_EQ(lab.memory().statistics_of(*model).oversize_allocations.peak, 0);
  EXPECT_EQ(lab.memory().statistics_of(*model).oversize_segments.peak, 0);
}

// What is stranded is worked out when somebody asks, so a pool may end with what was told last.
TEST(EndedPools, StrandNothing) {
  Lab lab;
  const auto pool = lab.pool("a");
  const Address first = lab.allocate(*pool, 3 * kMiB);
  const Address second = lab.allocate(*pool, 3 * kMiB);
  lab.free(first);
  lab.memory().refresh_numbers();
  const auto stranded = [&] { return lab.memory().statistics()[StatKind::inactive_split_bytes][0].current; };
  EXPECT_GT(stranded(), 0);
  lab.free(second);
  lab.memory().close_pool(*pool, false);
  EXPECT_EQ(stranded(), 0);
}

}  // namespace
}  // namespace vmm::testing

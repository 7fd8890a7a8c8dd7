#include "ipc/imported_range.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <memory>
#include <utility>
#include <vector>

#include "cpp/lab.h"

namespace vmm::testing {
namespace {

const Location kDevice = Location::on_device(0);

// Chunks of another driver, which stands for another process, as descriptors.
class Imported : public ::testing::Test {
 protected:
  ~Imported() override {
    driver_.clear_failures();
    EXPECT_EQ(driver_.leaks(), "");
    for (const ImportedPart& part : parts_) ::close(part.fd);
    for (std::size_t k = 0; k < parts_.size(); ++k) {
      EXPECT_TRUE(sender_.unmap(at_[k], parts_[k].size).ok());
      EXPECT_TRUE(sender_.unreserve(at_[k], parts_[k].size).ok());
      EXPECT_TRUE(sender_.release(chunks_[k]).ok());
    }
  }
  // A chunk of the sender's, filled by it.
  void share(std::size_t size, std::uint64_t seed) {
    ChunkHandle chunk = 0;
    Address at = 0;
    int fd = -1;
    ASSERT_TRUE(sender_.create({size, kDevice, true}, &chunk).ok());
    ASSERT_TRUE(sender_.reserve(size, kPage, &at).ok());
    ASSERT_TRUE(sender_.map(at, size, chunk).ok());
    ASSERT_TRUE(sender_.set_access(at, size, kDevice, Access::read_write).ok());
    ASSERT_TRUE(sender_.export_chunk(chunk, &fd).ok());
    Lab::fill(at, size, seed);
    parts_.push_back({fd, size});
    at_.push_back(at);
    chunks_.push_back(chunk);
  }
  Status make(const std::vector<Location>& accessors = {kDevice}) {
    return ImportedRange::make(driver_, parts_, accessors, &range_);
  }

  HostDriver sender_{HostDriverOptions{kPage, kGiB, 1}};
  HostDriver host_{HostDriverOptions{kPage, kGiB, 2}};
  ScriptedDriver driver_{host_};
  std::vector<ImportedPart> parts_;
  std::vector<Address> at_;
  std::vector<ChunkHandle> chunks_;
  std::unique_ptr<ImportedRange> range_;
};

TEST_F(Imported, ChunksStandSideBySideAndAreTheSendersOwn) {
  share(kPage, 1);
  share(4 * kPage, 2);
  share(2 * kPage, 3);
  ASSERT_TRUE(make().ok());
  EXPECT_EQ(range_->size(), 7 * kPage);
  EXPECT_TRUE(Lab::holds(range_->base(), kPage, 1));
  EXPECT_TRUE(Lab::holds(range_->base() + kPage, 4 * kPage, 2));
  EXPECT_TRUE(Lab::holds(range_->base() + 5 * kPage, 2 * kPage, 3));
  Lab::fill(range_->base() + kPage, 4 * kPage, 9);
  EXPECT_TRUE(Lab::holds(at_[1], 4 * kPage, 9)) << "one memory, seen twice";
  EXPECT_EQ(driver_.live_chunks(), 0U) << "the mapping alone keeps it";
  EXPECT_EQ(driver_.count(Call::set_access), 1U) << "one call for the whole range";
  range_.reset();
  EXPECT_EQ(driver_.leaks(), "");
}

TEST_F(Imported, MemoryOutlivesItsSender) {
  {
    HostDriver ending(HostDriverOptions{kPage, kGiB, 1});
    ChunkHandle chunk = 0;
    Address at = 0;
    int fd = -1;
    ASSERT_TRUE(ending.create({kPage, kDevice, true}, &chunk).ok());
    ASSERT_TRUE(ending.reserve(kPage, kPage, &at).ok());
    ASSERT_TRUE(ending.map(at, kPage, chunk).ok());
    ASSERT_TRUE(ending.set_access(at, kPage, kDevice, Access::read_write).ok());
    ASSERT_TRUE(ending.export_chunk(chunk, &fd).ok());
    Lab::fill(at, kPage, 5);
    const std::vector<ImportedPart> parts = {{fd, kPage}};
    ASSERT_TRUE(ImportedRange::make(driver_, parts, std::vector<Location>{kDevice}, &range_).ok());
    ::close(fd);
  }
  EXPECT_TRUE(Lab::holds(range_->base(), kPage, 5));
  range_.reset();
}

TEST_F(Imported, AFailedCallLeavesNothing) {
  share(kPage, 1);
  share(2 * kPage, 2);
  const std::vector<std::pair<Call, int>> steps = {
      {Call::reserve, 1}, {Call::import_chunk, 1}, {Call::import_chunk, 2}, {Call::map, 1},
      {Call::map, 2},     {Call::set_access, 1},   {Call::set_access, 2}};
  for (const auto& [call, n] : steps) {
    driver_.clear_failures();
    driver_.fail_nth(call, static_cast<std::uint64_t>(n), broken());
    EXPECT_EQ(make({kDevice, Location::on_device(1)}).code(), StatusCode::driver_error) << to_string(call) << n;
    EXPECT_EQ(driver_.failures(), 1U) << to_string(call) << n;
    EXPECT_EQ(range_, nullptr);
    EXPECT_EQ(driver_.leaks(), "") << to_string(call) << n;
  }
  driver_.clear_failures();
  EXPECT_TRUE(make({kDevice, Location::on_device(1)}).ok());
  range_.reset();
}

TEST_F(Imported, AccessCanBeGivenLater) {
  share(kPage, 1);
  ASSERT_TRUE(make().ok());
  const Location peer = Location::on_device(1);
  EXPECT_EQ(range_->accessors(), std::vector<Location>{kDevice});
  driver_.fail_nth(Call::set_access, 1, broken());
  EXPECT_FALSE(range_->add_accessor(peer).ok());
  EXPECT_EQ(range_->accessors().size(), 1U);
  EXPECT_TRUE(range_->add_accessor(peer).ok());
  EXPECT_EQ(range_->accessors(), (std::vector<Location>{kDevice, peer}));
  const std::uint64_t calls = driver_.count(Call::set_access);
  EXPECT_TRUE(range_->add_accessor(peer).ok()) << "has it already";
  EXPECT_EQ(driver_.count(Call::set_access), calls);
  range_.reset();
}

TEST_F(Imported, WrongSizesAreRefused) {
  share(kPage, 1);
  parts_[0].size = kPage + 512;
  EXPECT_EQ(make().code(), StatusCode::invalid_argument);
  parts_[0].size = ~std::size_t{0} - kPage + 1;
  const std::vector<ImportedPart> wild = {parts_[0], parts_[0]};
  EXPECT_EQ(ImportedRange::make(driver_, wild, std::vector<Location>{kDevice}, &range_).code(),
            StatusCode::invalid_argument);
  parts_[0].size = kPage;
}

}  // namespace
}  // namespace vmm::testing

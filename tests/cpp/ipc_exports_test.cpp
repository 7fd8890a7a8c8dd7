#include "ipc/ipc_exports.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "cpp/lab.h"
#include "ipc/imported_range.h"

namespace vmm::testing {
namespace {

const Location kDevice = Location::on_device(0);
constexpr int kVersion = 2;

std::size_t open_descriptors() {
  std::size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
    count += entry.path().empty() ? 0U : 1U;
  return count;
}

class Exports : public ::testing::Test {
 protected:
  ~Exports() override {
    exports_.reset();
    driver_.clear_failures();
    for (const ChunkView& chunk : chunks_) {
      EXPECT_TRUE(driver_.unmap(chunk.address, chunk.size).ok());
      EXPECT_TRUE(driver_.unreserve(chunk.address, chunk.size).ok());
      EXPECT_TRUE(driver_.release(chunk.handle).ok());
    }
    EXPECT_EQ(driver_.leaks(), "");
  }
  ChunkView chunk(std::size_t size = kPage, bool exportable = true) {
    ChunkView made{0, size, 0, exportable, chunks_.size() + 1};
    EXPECT_TRUE(driver_.create({size, kDevice, exportable}, &made.handle).ok());
    EXPECT_TRUE(driver_.reserve(size, kPage, &made.address).ok());
    EXPECT_TRUE(driver_.map(made.address, size, made.handle).ok());
    EXPECT_TRUE(driver_.set_access(made.address, size, kDevice, Access::read_write).ok());
    chunks_.push_back(made);
    return made;
  }
  std::string share(Address block, const std::vector<ChunkView>& chunks) {
    return exports_->share(driver_, block, chunks, kVersion);
  }

  HostDriver host_{HostDriverOptions{kPage, kGiB, 1}};
  ScriptedDriver driver_{host_};
  std::vector<ChunkView> chunks_;
  std::unique_ptr<IpcExports> exports_ = std::make_unique<IpcExports>();
};

TEST_F(Exports, AHandleOpensToTheSameMemory) {
  const ChunkView a = chunk(2 * kPage);
  const ChunkView b = chunk(kPage);
  Lab::fill(a.address, a.size, 1);
  Lab::fill(b.address, b.size, 2);
  const IpcHandle handle = decode(share(a.address + 512, {a, b}));
  const Descriptors descriptors = fetch_descriptors(handle);
  std::vector<ImportedPart> parts;
  for (std::size_t k = 0; k < descriptors.size(); ++k) parts.push_back({descriptors[k].get(), handle.chunks[k].size});
  std::unique_ptr<ImportedRange> range;
  ASSERT_TRUE(ImportedRange::make(driver_, parts, std::vector<Location>{kDevice}, &range).ok());
  EXPECT_TRUE(Lab::holds(range->base(), a.size, 1));
  EXPECT_TRUE(Lab::holds(range->base() + a.size, b.size, 2));
}

TEST_F(Exports, AChunkHasOneDescriptorForAllItsBlocks) {
  const ChunkView a = chunk();
  const ChunkView b = chunk();
  const std::string first = share(a.address, {a});
  EXPECT_EQ(share(a.address + 512, {a}), first) << "the same memory, the same handle";
  EXPECT_EQ(share(a.address, {a}), first) << "the same block again";
  const std::string both = share(a.address + 1024, {a, b});
  EXPECT_NE(both, first);
  EXPECT_EQ(exports_->open_descriptors(), 2U);
  EXPECT_EQ(driver_.count(Call::export_chunk), 2U);

  exports_->forget(a.address);
  exports_->forget(a.address);  // a second time: nothing
  EXPECT_EQ(exports_->open_descriptors(), 2U);
  exports_->forget(a.address + 512);
  EXPECT_EQ(exports_->open_descriptors(), 2U) << "the third block lies on both";
  exports_->forget(a.address + 1024);
  EXPECT_EQ(exports_->open_descriptors(), 0U);
  EXPECT_NE(share(a.address, {a}), first) << "another export, though the descriptor may have the same number";
}

TEST_F(Exports, BlocksThatWereNeverSharedCostNothing) {
  const ChunkView a = chunk();
  exports_->forget(a.address);
  IpcExports::before_free(a.address);
  EXPECT_EQ(exports_->open_descriptors(), 0U);
  EXPECT_EQ(driver_.count(Call::export_chunk), 0U);
}

TEST_F(Exports, ABlockAtTheAddressOfAnotherTakesItsPlace) {
  const ChunkView a = chunk();
  const ChunkView b = chunk();
  const std::string first = share(a.address, {a});
  EXPECT_NE(share(a.address, {b}), first);
  EXPECT_EQ(exports_->open_descriptors(), 1U) << "the first chunk's is closed";
  exports_->forget(a.address);
  EXPECT_EQ(exports_->open_descriptors(), 0U);
}

TEST_F(Exports, AChunkThatGoesBackEndsWhateverLiesOnIt) {
  const ChunkView a = chunk();
  const ChunkView b = chunk();
  (void)share(a.address, {a});
  (void)share(a.address + 512, {a, b});
  (void)share(b.address + 1024, {b});
  EXPECT_TRUE(IpcExports::any_shared());
  exports_->forget_chunk(a.number);
  EXPECT_EQ(exports_->open_descriptors(), 1U) << "the block on b alone stays";
  exports_->forget_chunk(a.number);  // a second time: nothing
  exports_->forget_chunk(b.number);
  EXPECT_EQ(exports_->open_descriptors(), 0U);
  EXPECT_FALSE(IpcExports::any_shared());
}

TEST_F(Exports, AHandleThatIsGivenAgainIsAnotherChunks) {
  const ChunkView gone = chunk();
  const std::string first = share(gone.address, {gone});  // its end is told to nobody
  ChunkView now = gone;
  now.number += 1;
  EXPECT_NE(share(gone.address + 512, {now}), first);
  EXPECT_EQ(driver_.count(Call::export_chunk), 2U) << "the former chunk's descriptor opens other memory";
}

TEST_F(Exports, AFailedExportLeavesNothingOpen) {
  const ChunkView a = chunk();
  const ChunkView b = chunk();
  driver_.fail_nth(Call::export_chunk, 2, broken());
  EXPECT_THROW(share(a.address, {a, b}), DriverError);
  EXPECT_EQ(exports_->open_descriptors(), 0U);
  EXPECT_NO_THROW(share(a.address, {a, b}));
  EXPECT_EQ(exports_->open_descriptors(), 2U);
}

TEST_F(Exports, MemoryThatWasNotMadeToBeSharedIsNamed) {
  const ChunkView a = chunk();
  const ChunkView b = chunk(kPage, /*exportable=*/false);
  try {
    share(a.address, {a, b});
    FAIL();
  } catch (const NotAvailableError& error) {
    EXPECT_NE(std::string(error.what()).find("TORCH_VMM_EXPORTABLE"), std::string::npos) << error.what();
  }
  EXPECT_EQ(exports_->open_descriptors(), 0U);
}

TEST_F(Exports, ThousandsOfSharesLeaveNothingOpen) {
  const ChunkView a = chunk();
  (void)share(a.address, {a});
  exports_->forget(a.address);
  const std::size_t before = open_descriptors();
  for (std::size_t turn = 0; turn < 3000; ++turn) {
    const Address block = a.address + turn % 4096 * 512;
    (void)share(block, {a});
    exports_->forget(block);
  }
  EXPECT_EQ(open_descriptors(), before);
}

}  // namespace
}  // namespace vmm::testing

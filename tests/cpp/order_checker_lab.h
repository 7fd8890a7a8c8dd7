// The bench of the order checker's own tests: one chunk, mapped, and a few streams.
#pragma once

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>

#include "driver/host_driver.h"
#include "support/order_checker.h"
#include "support/scripted_driver.h"

namespace vmm::testing {

inline constexpr std::size_t kChunk = 2 * kMiB;
inline const StreamRef kA{reinterpret_cast<Stream>(0x10), 0};
inline const StreamRef kB{reinterpret_cast<Stream>(0x20), 0};
inline const StreamRef kBlocking{reinterpret_cast<Stream>(0x30), 0};
inline const StreamRef kDefault{nullptr, 0};
inline const StreamRef kThread{kPerThread, 0};
inline const StreamRef kOfPeer{reinterpret_cast<Stream>(0x40), 1};
inline constexpr std::uint64_t kPool = 1;
inline constexpr std::uint64_t kOtherPool = 2;

class OrderCheckerTest : public ::testing::Test {
 protected:
  OrderCheckerTest() : host({kChunk, 256 * kMiB, 2}), scripted(host), driver(scripted) {
    driver.add_stream({kA.handle, 0, false, "A"});
    driver.add_stream({kB.handle, 0, false, "B"});
    driver.add_stream({kBlocking.handle, 0, true, "blocking"});
    driver.add_stream({kOfPeer.handle, 1, false, "peer"});
    EXPECT_TRUE(driver.reserve(16 * kChunk, kChunk, &base).ok());
    EXPECT_TRUE(driver.create({kChunk, Location::on_device(0)}, &chunk).ok());
    map(base);
    EXPECT_TRUE(driver.create_fence(0, &fence).ok());
  }
  void map(Address address) {
    EXPECT_TRUE(driver.map(address, kChunk, chunk).ok());
    EXPECT_TRUE(driver.set_access(address, kChunk, Location::on_device(0), Access::read_write).ok());
    EXPECT_TRUE(driver.set_access(address, kChunk, Location::on_device(1), Access::read_write).ok());
  }
  // Everything queued on `from` so far comes before what `to` does from now on.
  void order(StreamRef from, StreamRef to) {
    EXPECT_TRUE(driver.record(fence, from.handle).ok());
    EXPECT_TRUE(driver.stream_wait(to.device, to.handle, fence).ok());
  }
  void host_waits_for(StreamRef stream) {
    EXPECT_TRUE(driver.record(fence, stream.handle).ok());
    EXPECT_TRUE(driver.wait(fence).ok());
  }
  void fill(Address address, StreamRef stream) {
    EXPECT_TRUE(driver.fill_async(0, address, 0, kChunk, stream.handle).ok());
  }
  // A block of 4096 bytes that A owns, which B has read, given back.
  void leave_a_reader_on_b() {
    driver.hand_out(base, 4096, kA, kPool);
    driver.use(kA, base, 4096, Use::write);
    driver.wait(kB, driver.point(kA));
    driver.use(kB, base, 4096, Use::read);
    driver.take_back(base);
  }

  void expect_kept() { EXPECT_NO_THROW(driver.check()); }
  void expect_broken(const std::string& part) {
    try {
      driver.check();
      FAIL() << "nothing was broken; expected: " << part;
    } catch (const std::runtime_error& error) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  }

  HostDriver host;
  ScriptedDriver scripted;
  OrderChecker driver;
  Address base = 0;
  ChunkHandle chunk = 0;
  Fence fence = nullptr;
};

}  // namespace vmm::testing

// The bench of tests of private pools: captures as torch makes them, without a GPU.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <memory>
#include <thread>

#include "core/device/private_pools.h"
#include "cpp/lab.h"

namespace vmm::testing {

inline constexpr RegionId kOne{0, 1};
inline constexpr RegionId kOther{0, 2};
inline constexpr RegionId kGraph{7, 0};
inline const Stream kCaptured = stream(0xCA);

// Captures of streams, as CUDA would tell of them, and a device's private pools.
class PrivatePoolsTest : public ::testing::Test {
 protected:
  // As Hooks has it, of the torch that is played.
  explicit PrivatePoolsTest(bool failed_are_ended = false)
      : pools(lab.memory(), {[this](Stream on) { return captures.count(on) != 0 ? captures.at(on) : 0; },
                             [this] { ++failures; }, failed_are_ended, failed_are_ended}),
        model(lab.pool("model")) {}

  static PrivatePools::Filter everywhere() {
    return [](Stream) { return true; };
  }
  static PrivatePools::Filter only(Stream stream) {
    return [stream](Stream on) { return on == stream; };
  }
  static PrivatePools::Filter this_thread_only() {
    return [mine = std::this_thread::get_id()](Stream) { return std::this_thread::get_id() == mine; };
  }

  // As torch does it: the route first, with a filter that knows the graph's capture.
  struct Graph {
    std::uint64_t id = 0;
  };
  std::shared_ptr<Graph> prepare(RegionId region, Stream on) {
    auto graph = std::make_shared<Graph>();
    const auto filter = [this, seen = std::weak_ptr<Graph>(graph)](Stream stream) {
      EXPECT_FALSE(seen.expired()) << "the filter of a graph that is gone was asked";
      const auto at = captures.find(stream);
      return at != captures.end() && !seen.expired() && at->second == seen.lock()->id;
    };
    pools.begin(region, filter, on);
    return graph;
  }
  std::shared_ptr<Graph> begin_capture(RegionId region, Stream on) {
    auto graph = prepare(region, on);
    graph->id = captures[on] = ++last_capture;
    return graph;
  }
  void end_capture(RegionId region, Stream on) {
    const std::uint64_t id = captures.at(on);
    for (auto at = captures.begin(); at != captures.end();) at = at->second == id ? captures.erase(at) : std::next(at);
    pools.end(region);
  }

  Address allocate(const std::shared_ptr<Pool>& of, std::size_t bytes, Stream on = nullptr) {
    const std::shared_ptr<Pool> part = pools.any_route() ? pools.route(of, on) : nullptr;
    return lab.allocate(part == nullptr ? *of : *part, bytes, on);
  }
  Address allocate(std::size_t bytes, Stream on = nullptr) { return allocate(model, bytes, on); }
  // Where it lies, and that its model pays for it.
  RegionId region_of(Address address, const Pool* payer = nullptr) {
    const Pool* const pool = lab.space.find(address);
    EXPECT_EQ(&pool->model(), payer == nullptr ? model.get() : payer);
    return pool->region();
  }
  std::size_t mapped(RegionId region) {
    std::size_t bytes = 0;
    for (const auto& pool : lab.memory().pools()) bytes += pool->region() == region ? pool->physical_bytes() : 0;
    return bytes;
  }
  bool is_pinned(RegionId region) {
    const PoolList parts = pools.parts(region);
    return std::all_of(parts.begin(), parts.end(), [](const auto& part) { return part->is_pinned(); });
  }
  bool exists(RegionId region) {
    try {
      return pools.use_count(region) > 0;
    } catch (const InvalidArgumentError&) {
      return false;
    }
  }
  void leave_mempool(RegionId region) {
    pools.set_use_on_oom(region, false);
    pools.release(region);
    pools.empty_cache(region);
    lab.memory().check();
  }
  void use(RegionId region, std::size_t bytes) {
    pools.begin(region, everywhere(), nullptr);
    lab.free(allocate(bytes));
    pools.end(region);
    pools.release(region);
  }
  void expect_nothing_left() {
    EXPECT_FALSE(pools.any_route());
    EXPECT_FALSE(lab.memory().clock().is_capturing());
    lab.memory().empty_cache();
    lab.memory().check();
    EXPECT_EQ(lab.memory().pools().size(), 1U);
    EXPECT_EQ(lab.memory().committed_bytes(), 0U);
  }

  const Stream a = stream(0xA);
  const Stream b = stream(0xB);
  std::map<Stream, std::uint64_t> captures;
  std::uint64_t last_capture = 0;
  int failures = 0;
  Lab lab;
  PrivatePools pools;
  std::shared_ptr<Pool> model;
};

}  // namespace vmm::testing

// The bench of tests of memory that another allocator gives: a provider that is scripted.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/errors.h"
#include "base/sync.h"
#include "core/device/private_pools.h"
#include "core/device/provided_memory.h"
#include "core/device/segment_provider.h"
#include "cpp/lab.h"

namespace vmm::testing {

inline constexpr RegionId kRegion{0, 7};
inline const Stream kOne = stream(0xA);
inline const Stream kTwo = stream(0xB);

// What a provider has been asked, and what it answers. Its memory is addresses alone:
// whoever cuts blocks looks into none.
struct Books {
  int refusals = 0;  // so many requests that come are refused, with these words
  std::string words;
  std::function<void()> in_take;       // called within take(), as Python would run
  std::function<void()> in_give_back;  // and within give_back()

  Mutex mutex;
  std::vector<std::size_t> asked VMM_GUARDED_BY(mutex);
  std::map<Address, std::size_t> out VMM_GUARDED_BY(mutex);  // given and not returned
  int unknown VMM_GUARDED_BY(mutex) = 0;                     // returned, though not out
  Address next VMM_GUARDED_BY(mutex) = Address{1} << 46;

  std::vector<std::size_t> all_asked() VMM_EXCLUDES(mutex) {
    const MutexLock lock(mutex);
    return asked;
  }
  std::size_t bytes_out() VMM_EXCLUDES(mutex) {
    const MutexLock lock(mutex);
    std::size_t bytes = 0;
    for (const auto& [address, size] : out) bytes += size;
    return bytes;
  }
};

class ScriptedProvider final : public SegmentProvider {
 public:
  explicit ScriptedProvider(Books& books) : books_(books) {}
  Address take(std::size_t bytes, std::string* words) override {
    if (books_.in_take != nullptr) books_.in_take();
    const MutexLock lock(books_.mutex);
    books_.asked.push_back(bytes);
    if (books_.refusals > 0) {
      --books_.refusals;
      *words = books_.words;
      return 0;
    }
    // Side by side, as cudaMalloc's may be: no block may lie over two.
    const Address segment = books_.next;
    books_.next += bytes;
    books_.out[segment] = bytes;
    return segment;
  }
  void give_back(Address segment) override {
    {
      const MutexLock lock(books_.mutex);
      if (books_.out.erase(segment) != 1) ++books_.unknown;
    }
    if (books_.in_give_back != nullptr) books_.in_give_back();
  }

 private:
  Books& books_;
};

inline std::atomic<int> reports{0};
inline void report(const char* /*who*/) noexcept { ++reports; }

class ProvidedMemoryTest : public ::testing::Test {
 protected:
  ProvidedMemoryTest() : memory(make(kRegion)) { reports = 0; }
  ~ProvidedMemoryTest() override {
    books.in_take = books.in_give_back = nullptr;
    lab.memory().set_observer(nullptr);
    lab.driver.release_fences();
    for (const auto& each : made) {
      each->set_pinned(false);
      each->close();
    }
    for (const Address block : std::vector<Address>(live)) free(block);
    ProvidedMemory::finish_closed(lab.memory(), /*wait=*/true);
    EXPECT_EQ(books.bytes_out(), 0U);
    {
      const MutexLock lock(books.mutex);
      EXPECT_EQ(books.unknown, 0);
    }
    EXPECT_EQ(reports, expected_reports) << "something was swallowed";
    EXPECT_FALSE(ProvidedMemory::any_segment());
    EXPECT_FALSE(ProvidedMemory::any_unfinished());
    EXPECT_EQ(lab.memory().foreign_budget().used(), 0U);
    const Statistics left = provided();
    for (const StatTriple& triple : left.stats) {
      for (const Stat& stat : triple) EXPECT_EQ(stat.current, 0);
    }
    const std::weak_ptr<ProvidedMemory> last = memory;
    memory = nullptr;
    made.clear();
    EXPECT_TRUE(last.expired()) << "somebody keeps it";
  }

  std::shared_ptr<ProvidedMemory> make(RegionId region) {
    made.push_back(
        std::make_shared<ProvidedMemory>(lab.memory(), region, std::make_unique<ScriptedProvider>(books), &report));
    return made.back();
  }
  Address allocate(ProvidedMemory& from, std::size_t bytes, Stream on) {
    const Address block = from.allocate(bytes, on);
    live.push_back(block);
    return block;
  }
  Address allocate(std::size_t bytes, Stream on = kOne) { return allocate(*memory, bytes, on); }
  void free(Address block) {
    EXPECT_EQ(std::erase(live, block), 1U);
    EXPECT_TRUE(ProvidedMemory::free(block));
  }
  // What is said of a request that finds nothing.
  std::string refusal(std::size_t bytes) {
    try {
      allocate(bytes);
    } catch (const OutOfMemoryError& error) {
      EXPECT_EQ(error.requested, bytes);
      EXPECT_EQ(error.pool, "MemPool (0, 7)");
      return error.what();
    }
    return "";
  }
  Statistics provided() const {
    Statistics statistics;
    for (const auto& each : made) statistics.add_totals(each->statistics());
    return statistics;
  }
  void finish(bool wait = false) { ProvidedMemory::finish_closed(lab.memory(), wait); }

  Lab lab;
  Books books;
  std::vector<std::shared_ptr<ProvidedMemory>> made;
  std::vector<Address> live;
  int expected_reports = 0;
  std::shared_ptr<ProvidedMemory> memory;
};

}  // namespace vmm::testing

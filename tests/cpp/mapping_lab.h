// The bench of random programs of mapped memory: a plain model of what is mapped, which pages
// there are, who pays, and what they show; and what the kernel says of an address.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "core/faces/placed_memory.h"
#include "core/faces/tensor_alias.h"
#include "core/faces/tensor_range.h"
#include "cpp/two_devices.h"

namespace vmm::testing {

// Memory, at however many addresses.
struct Page {
  std::size_t payer = 0;   // a model
  std::uint64_t seed = 0;  // of the pattern; 0: it is zero
  int aliases = 0;         // that show it
};
using Pages = std::vector<std::shared_ptr<Page>>;  // by address; nullptr: no memory

inline bool is_shown(std::span<const std::shared_ptr<Page>> pages) {
  return std::any_of(pages.begin(), pages.end(), [](const auto& page) { return page != nullptr && page->aliases > 0; });
}

enum class Kind : std::uint8_t { elastic, sparse, zeros, block, pages, placed };

struct Thing {
  Thing() = default;
  Thing(const Thing&) = delete;
  Thing& operator=(const Thing&) = delete;
  ~Thing() {
    if (end) end();
  }

  [[nodiscard]] bool is_committed(std::size_t page) const {
    return range->is_committed({{ahead + page * kPage, kPage}});
  }

  Kind kind = Kind::block;
  std::size_t model = 0;
  Address base = 0;
  std::size_t ahead = 0;               // bytes of a range that lie below, and never have memory
  std::unique_ptr<TensorRange> range;  // of the first three kinds
  std::unique_ptr<PlacedMemory> placed;
  std::function<void()> end;  // of blocks and pages
  Pages pages;
  std::vector<char> sealed;  // for its own addresses
};

// Some pages of a thing.
struct Part {
  std::shared_ptr<Thing> thing;
  std::size_t first = 0;
  std::size_t count = 0;
  [[nodiscard]] Address address() const { return thing->base + first * kPage; }
  [[nodiscard]] std::size_t size() const { return count * kPage; }
  [[nodiscard]] ByteRange range() const { return {thing->ahead + first * kPage, size()}; }
  [[nodiscard]] std::span<std::shared_ptr<Page>> pages() const { return std::span(thing->pages).subspan(first, count); }
  [[nodiscard]] std::span<char> sealed() const { return std::span(thing->sealed).subspan(first, count); }
};

struct Alias {
  std::vector<std::shared_ptr<Thing>> keeps;  // blocks: they are not held by themselves
  std::size_t opener = 0;
  std::size_t of_others = 0;  // bytes
  bool is_read_only = false;
  Pages pages;
  std::unique_ptr<TensorAlias> made;
};

inline std::size_t count(const Pages& pages, std::size_t payer) {
  return static_cast<std::size_t>(std::count_if(
      pages.begin(), pages.end(), [&](const auto& page) { return page != nullptr && page->payer == payer; }));
}
inline void add_fresh(Thing* thing, std::size_t payer, std::size_t count) {
  while (count-- > 0) thing->pages.push_back(std::make_shared<Page>(Page{payer}));
}

// Of each page that much is written, and looked at.
inline constexpr std::array<std::size_t, 3> kSpots = {0, kMiB, kPage - 512};
inline void show(Address at, Page* page, std::uint64_t seed) {
  page->seed = seed;
  for (const std::size_t spot : kSpots) Lab::fill(at + spot, 512, page->seed + spot);
}
inline bool shows(Address at, const Page* page) {
  return std::all_of(kSpots.begin(), kSpots.end(), [&](std::size_t spot) {
    const bool is_zero = page == nullptr || page->seed == 0;
    return is_zero ? Lab::is_zero(at + spot, 512) : Lab::holds(at + spot, 512, page->seed + spot);
  });
}

// Asks the kernel, which answers an error where we would fault.
class Rights {
 public:
  Rights() { EXPECT_EQ(::pipe(pipe_.data()), 0); }
  ~Rights() {
    for (const int end : pipe_) ::close(end);
  }
  Rights(const Rights&) = delete;
  Rights& operator=(const Rights&) = delete;

  bool is_writable(Address at) {
    EXPECT_EQ(::write(pipe_[1], reinterpret_cast<const void*>(at), 1), 1) << "it cannot be read";
    if (::read(pipe_[0], reinterpret_cast<void*>(at), 1) == 1) return true;
    char rest = 0;
    EXPECT_EQ(::read(pipe_[0], &rest, 1), 1);
    return false;
  }

 private:
  std::array<int, 2> pipe_{};
};

}  // namespace vmm::testing

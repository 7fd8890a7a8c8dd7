// The lossless code, on the CPU: what comes back is what went, whatever it is; and whatever the
// bytes say, nothing is read or written beyond what they are given (this runs under ASan).
#include "driver/packing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "support/packing_by_lanes.h"

namespace vmm::testing {
namespace {

using packing::Job;
using packing::Step;
using packing::Unit;

using Bytes = std::vector<unsigned char>;
using Random = std::mt19937_64;

std::uint64_t number(const void* address) { return reinterpret_cast<std::uintptr_t>(address); }

// Memory of exactly so many bytes, at an address that is so much off a line: what goes
// beyond is seen.
class Exactly {
 public:
  explicit Exactly(std::size_t size, std::size_t off = 0)
      : whole_(new (std::align_val_t{packing::kBodyAlignment}) unsigned char[size + off]), off_(off) {}
  Exactly(const Exactly&) = delete;
  Exactly& operator=(const Exactly&) = delete;
  ~Exactly() { ::operator delete[](whole_, std::align_val_t{packing::kBodyAlignment}); }
  [[nodiscard]] unsigned char* begin() const { return whole_ + off_; }

 private:
  unsigned char* const whole_;
  const std::size_t off_;
};

enum class By : std::uint8_t { cpu, lanes };

class Packed {
 public:
  explicit Packed(const Bytes& memory, std::size_t off = 0, By by = By::cpu)
      : size_(memory.size()), by_(by), memory_(size_, off) {
    std::memcpy(memory_.begin(), memory.data(), size_);
    for (std::size_t at = 0; at < size_; at += packing::kUnitBytes) {
      Unit unit{};
      unit.at = at;
      unit.size = static_cast<packing::u16>(std::min<std::size_t>(packing::kUnitBytes, size_ - at));
      units_.push_back(unit);
    }
    run(Step::survey, memory_.begin(), 0, size_);
    for (Unit& unit : units_) {
      unit.body = lines_;
      lines_ += packing::body_lines(unit.size, unit.bits, unit.escapes);
    }
    bodies_ = std::make_unique<Exactly>(std::size_t{lines_} * packing::kBodyAlignment);
  }

  void pack() { run(Step::pack, memory_.begin(), 0, size_); }
  // [begin, end) of it, to a place that is `off` a line.
  Bytes unpacked(std::size_t begin, std::size_t end, std::size_t off = 0) {
    const Exactly to(end - begin, off);
    std::memset(to.begin(), 0x5a, end - begin);
    run(Step::unpack, to.begin(), begin, end);
    return {to.begin(), to.begin() + (end - begin)};
  }
  Bytes unpacked() { return unpacked(0, size_); }
  [[nodiscard]] unsigned char* memory() const { return memory_.begin(); }
  [[nodiscard]] unsigned char* bodies() const { return bodies_->begin(); }
  [[nodiscard]] std::size_t bytes() const { return std::size_t{lines_} * packing::kBodyAlignment; }
  [[nodiscard]] const std::vector<Unit>& units() const { return units_; }

 private:
  void run(Step step, unsigned char* memory, std::size_t begin, std::size_t end) {
    const auto first =
        std::find_if(units_.begin(), units_.end(), [begin](const Unit& unit) { return unit.at + unit.size > begin; });
    const auto last = std::find_if(first, units_.end(), [end](const Unit& unit) { return unit.at >= end; });
    if (first == last) return;
    Job job{};
    job.units = number(&*first);
    job.count = static_cast<packing::u64>(last - first);
    job.bodies = bodies_ == nullptr ? 0 : number(bodies_->begin());
    job.memory = number(memory);
    job.at = begin;
    job.begin = begin;
    job.end = end;
    if (by_ == By::lanes) {
      pack_by_lanes(step, job);
    } else {
      packing::run(step, job, *scratch_);
    }
  }

  const std::size_t size_;
  const By by_;
  const Exactly memory_;
  std::vector<Unit> units_;
  packing::u32 lines_ = 0;
  std::unique_ptr<Exactly> bodies_;
  const std::unique_ptr<packing::Scratch> scratch_ = std::make_unique<packing::Scratch>();
};

Bytes of_words(std::size_t bytes, const std::function<std::uint32_t()>& word) {
  Bytes memory(bytes);
  for (std::size_t at = 0; at < bytes; at += 2) {
    const std::uint32_t value = word();
    memory[at] = static_cast<unsigned char>(value);
    if (at + 1 < bytes) memory[at + 1] = static_cast<unsigned char>(value >> 8);
  }
  return memory;
}

std::uint32_t bits_of(float value) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// All kinds of memory, by name.
std::vector<std::pair<std::string, std::function<Bytes(std::size_t, Random&)>>> kinds() {
  std::vector<std::pair<std::string, std::function<Bytes(std::size_t, Random&)>>> all;
  all.emplace_back("zeros", [](std::size_t bytes, Random&) { return Bytes(bytes); });
  all.emplace_back("ones", [](std::size_t bytes, Random&) { return Bytes(bytes, 0xff); });
  all.emplace_back("random bits", [](std::size_t bytes, Random& random) {
    return of_words(bytes, [&] { return static_cast<std::uint32_t>(random()); });
  });
  all.emplace_back("bf16, normal", [](std::size_t bytes, Random& random) {
    std::normal_distribution<float> draw(0, 0.02F);
    return of_words(bytes, [&] { return bits_of(draw(random)) >> 16; });
  });
  all.emplace_back("bf16, NaN, infinities and denormals among others", [](std::size_t bytes, Random& random) {
    return of_words(bytes, [&] {
      const std::array<std::uint32_t, 6> odd = {0x7fc0, 0x7f80, 0xff80, 0x0001, 0x8000, 0xffff};
      return random() % 40 == 0 ? odd[random() % odd.size()] : 0x3f00 | (random() & 0x807f);
    });
  });
  all.emplace_back("float32, normal", [](std::size_t bytes, Random& random) {
    std::normal_distribution<float> draw(0, 1);
    std::uint32_t latest = 0;
    bool is_high = true;
    return of_words(bytes, [&, is_high]() mutable {
      is_high = !is_high;
      if (!is_high) latest = bits_of(draw(random));
      return is_high ? latest >> 16 : latest & 0xffff;
    });
  });
  all.emplace_back("int64, small", [](std::size_t bytes, Random& random) {
    std::size_t k = 0;
    return of_words(bytes, [&]() mutable { return k++ % 4 == 0 ? static_cast<std::uint32_t>(random() % 1000) : 0U; });
  });
  // So many exponents, and now and then any other.
  for (const std::uint32_t exponents : {1U, 2U, 3U, 4U, 7U, 8U, 15U, 16U, 40U}) {
    for (const std::uint32_t rarely : {0U, 500U, 9U}) {
      all.emplace_back(std::to_string(exponents) + " exponents, and others one in " + std::to_string(rarely),
                       [=](std::size_t bytes, Random& random) {
                         const auto first = static_cast<std::uint32_t>(random() % 256);
                         return of_words(bytes, [&] {
                           const bool is_rare = rarely != 0 && random() % rarely == 0;
                           const auto draw = static_cast<std::uint32_t>(random());
                           const std::uint32_t exponent = is_rare ? draw >> 16 : first + 5 * (draw % exponents);
                           return (exponent & 0xff) << 7 | (draw >> 8 & 0x807f);
                         });
                       });
    }
  }
  return all;
}

TEST(Packing, WhatComesBackIsWhatWent) {
  Random random(16);
  std::set<int> bits;
  const std::vector<std::size_t> sizes = {1,    2,    15,    16,    17,    32,    512,   513,   2048,  4096,  510,
                                          8192, 9000, 16384, 32752, 32767, 32768, 32769, 32784, 65536, 200000};
  for (const auto& [name, make] : kinds()) {
    for (const std::size_t size : sizes) {
      for (const std::size_t off : {0U, 2U, 7U}) {
        const Bytes memory = make(size, random);
        Packed packed(memory, off);
        packed.pack();
        ASSERT_TRUE(packed.unpacked() == memory) << name << ", " << size << " bytes, " << off << " off a line";
        for (const Unit& unit : packed.units()) bits.insert(unit.bits);
      }
    }
  }
  EXPECT_EQ(bits, (std::set<int>{0, 1, 2, 3, 4}));
}

TEST(Packing, AnyPartComesByItself) {
  Random random(17);
  for (const auto& [name, make] : kinds()) {
    const Bytes memory = make(3 * packing::kUnitBytes + 4080, random);
    Packed packed(memory);
    packed.pack();
    for (std::size_t k = 0; k < 40; ++k) {
      const std::size_t begin = random() % memory.size();
      const std::size_t end = begin + 1 + random() % std::min<std::size_t>(memory.size() - begin, 70000);
      const Bytes part(memory.begin() + static_cast<std::ptrdiff_t>(begin),
                       memory.begin() + static_cast<std::ptrdiff_t>(end));
      ASSERT_TRUE(packed.unpacked(begin, end, k % 3 * 5) == part) << name << ", from " << begin << " to " << end;
    }
  }
}

TEST(Packing, WeightsGetSmallerAndNothingGetsLarger) {
  Random random(18);
  for (const auto& [name, make] : kinds()) {
    const Bytes memory = make(8 * packing::kUnitBytes, random);
    Packed packed(memory);
    EXPECT_LE(packed.bytes(), memory.size()) << name;
    if (name == "bf16, normal") {
      EXPECT_LE(packed.bytes() * 16, memory.size() * 114 / 10) << packed.bytes();
    }
    if (name == "random bits") {
      EXPECT_EQ(packed.bytes(), memory.size());
    }
    if (name == "zeros") {
      EXPECT_LE(packed.bytes() * 16, memory.size() * 9);
    }
  }
}

// A caller's mistake, and it is the contents that are lost, nobody else's.
TEST(Packing, MemoryThatChangesAfterTheSurveyOverrunsNothing) {
  Random random(19);
  const auto all = kinds();
  for (const auto& [name, make] : all) {
    for (const auto& [other_name, other] : all) {
      const std::size_t size = packing::kUnitBytes + 4096;
      Packed packed(make(size, random));
      const Bytes changed = other(size, random);
      std::memcpy(packed.memory(), changed.data(), size);
      packed.pack();
      EXPECT_EQ(packed.unpacked().size(), size);
    }
  }
}

TEST(Packing, WhateverABodySaysNothingIsOverrun) {
  Random random(20);
  for (const auto& [name, make] : kinds()) {
    Packed packed(make(2 * packing::kUnitBytes + 1040, random));
    packed.pack();
    for (int k = 0; k < 4; ++k) {
      for (std::size_t at = 0; at < packed.bytes(); ++at) packed.bodies()[at] = static_cast<unsigned char>(random());
      packed.unpacked();
      packed.unpacked(random() % 1000, 40000);
    }
  }
}

// As a GPU runs it: what one lane says and does, 512 do together.
TEST(Packing, LanesThatGoOnByThemselvesDoTheSame) {
  Random random(21);
  std::set<int> bits;
  for (const auto& [name, make] : kinds()) {
    const std::size_t size = packing::kUnitBytes + random() % 3 * 8 * 1021;
    const Bytes memory = make(size, random);
    const std::size_t off = random() % 2 * 6;
    Packed by_cpu(memory, off);
    Packed by_lanes(memory, off, By::lanes);
    ASSERT_EQ(by_cpu.units().size(), by_lanes.units().size());
    for (std::size_t k = 0; k < by_cpu.units().size(); ++k) {
      ASSERT_EQ(std::memcmp(&by_cpu.units()[k], &by_lanes.units()[k], sizeof(Unit)), 0) << name << ", unit " << k;
      bits.insert(by_cpu.units()[k].bits);
    }
    by_lanes.pack();
    ASSERT_TRUE(by_lanes.unpacked() == memory) << name;
    const std::size_t begin = random() % size;
    const std::size_t end = begin + 1 + random() % (size - begin);
    const Bytes part(memory.begin() + static_cast<std::ptrdiff_t>(begin),
                     memory.begin() + static_cast<std::ptrdiff_t>(end));
    ASSERT_TRUE(by_lanes.unpacked(begin, end, off) == part) << name << ", from " << begin << " to " << end;
    std::memcpy(by_cpu.bodies(), by_lanes.bodies(), by_cpu.bytes());
    ASSERT_TRUE(by_cpu.unpacked() == memory) << name << ", by the CPU";
  }
  EXPECT_EQ(bits, (std::set<int>{0, 1, 2, 3, 4}));
}

// NVRTC is given this very text.
TEST(Packing, TheTextIsThisHeader) {
  const std::string text = packing::text();
  EXPECT_EQ(text.rfind("// The lossless code of memory that sleeps packed.", 0), 0U);
  for (const char* const name : {"survey", "pack", "unpack"}) {
    EXPECT_NE(text.find("VMM_PACKING_KERNEL(" + std::string(name) + ")"), std::string::npos);
  }
}

}  // namespace
}  // namespace vmm::testing

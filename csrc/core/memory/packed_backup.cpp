#include "core/memory/packed_backup.h"

#include <algorithm>
#include <array>

#include "base/check.h"
#include "base/errors.h"

namespace vmm {

using packing::Job;
using packing::Step;
using packing::Unit;

namespace {

constexpr std::size_t kUnitsInSlab = PinnedMemory::kSlabBytes / sizeof(Unit);
constexpr std::size_t kLinesInSlab = PinnedMemory::kSlabBytes / packing::kBodyAlignment;

std::size_t units_of(std::size_t bytes) { return (bytes + packing::kUnitBytes - 1) / packing::kUnitBytes; }

const char* doing(Step step) {
  return step == Step::unpack ? "unpacking a model from host memory" : "packing a model into host memory";
}

// Work that was queued uses the slabs, whatever has failed since.
void wait_for(Driver& driver, const StreamUse& by) noexcept {
  try {
    if (StreamPoint({by}).wait().ok()) return;
  } catch (...) {
    // No memory for a point: the device itself is asked.
  }
  driver.synchronize(by.device->device()).ignore();
}

}  // namespace

// ------------------------------------------------------------------------- making it

std::size_t PackedBackup::table_bytes(const std::vector<Content>& contents) {
  std::size_t units = 0;
  for (const Content& each : contents) units += units_of(each.size);
  return units * sizeof(Unit);
}

std::unique_ptr<PackedBackup> PackedBackup::survey(Driver& driver, const std::shared_ptr<PinnedMemory>& memory,
                                                   const std::vector<Content>& contents, const StreamUse& by) {
  std::unique_ptr<PackedBackup> backup(new PackedBackup(driver, memory));
  const std::size_t bytes = table_bytes(contents);
  if (!backup->slabs_.grow_to(bytes)) return nullptr;
  backup->units_ = bytes / sizeof(Unit);
  backup->make_table(contents);
  try {
    std::size_t at = 0;
    for (const Content& each : contents) {
      backup->run(Step::survey, at, each.address, each.size, by);
      at += each.size;
    }
    throw_if_failed(StreamPoint({by}).wait(), doing(Step::survey));
  } catch (...) {
    wait_for(driver, by);
    throw;
  }
  backup->lay_out();
  return backup;
}

Unit* PackedBackup::table(std::size_t slab) { return reinterpret_cast<Unit*>(slabs_.slab(slab).begin()); }

void PackedBackup::make_table(const std::vector<Content>& contents) {
  std::size_t index = 0;
  std::size_t at = 0;
  Unit* units = nullptr;
  for (const Content& each : contents) {
    for (std::size_t done = 0; done < each.size; ++index) {
      if (index % kUnitsInSlab == 0) units = table(index / kUnitsInSlab);
      const std::size_t size = std::min<std::size_t>(packing::kUnitBytes, each.size - done);
      Unit unit{};
      unit.at = at + done;
      unit.size = static_cast<packing::u16>(size);
      units[index % kUnitsInSlab] = unit;
      done += size;
    }
    at += each.size;
  }
}

void PackedBackup::lay_out() {
  std::size_t line = (units_ * sizeof(Unit) + packing::kBodyAlignment - 1) / packing::kBodyAlignment;
  for (std::size_t index = 0; index < units_;) {
    Unit* const units = table(index / kUnitsInSlab);
    const std::size_t count = std::min(kUnitsInSlab, units_ - index);
    for (std::size_t k = 0; k < count; ++k) {
      Unit& unit = units[k];
      const std::size_t lines = packing::body_lines(unit.size, unit.bits, unit.escapes);
      if (line % kLinesInSlab + lines > kLinesInSlab) line = align_up(line, kLinesInSlab);
      VMM_CHECK(line <= ~packing::u32{0}, "a model of more than 512 GiB");
      unit.body = static_cast<packing::u32>(line);
      line += lines;
    }
    index += count;
  }
  bytes_ = line * packing::kBodyAlignment;
}

// ------------------------------------------------------------------------- using it

std::size_t PackedBackup::find(std::size_t at) {
  std::size_t first = 0;
  for (std::size_t left = units_; left != 0;) {
    const std::size_t half = left / 2;
    const std::size_t middle = first + half;
    const Unit& unit = table(middle / kUnitsInSlab)[middle % kUnitsInSlab];
    if (unit.at + unit.size <= at) {
      first = middle + 1;
      left -= half + 1;
    } else {
      left = half;
    }
  }
  return first;
}

template <typename Each>
void PackedBackup::for_each_job(std::size_t at, Address memory, std::size_t size, const Each& each) {
  const std::size_t end = at + size;
  for (std::size_t index = find(at); index < units_;) {
    const PinnedMemory::Slab& entries = slabs_.slab(index / kUnitsInSlab);
    const Unit* const units = reinterpret_cast<const Unit*>(entries.begin()) + index % kUnitsInSlab;
    if (units->at >= end) break;
    const std::size_t most = std::min(kUnitsInSlab - index % kUnitsInSlab, units_ - index);
    const std::size_t slab = units->body / kLinesInSlab;
    std::size_t count = 1;
    while (count < most && units[count].at < end && units[count].body / kLinesInSlab == slab) ++count;
    const PinnedMemory::Slab& bodies = slabs_.slab(slab);
    Job job{};
    job.units = reinterpret_cast<Address>(units);
    job.count = count;
    job.bodies = bodies.address() - slab * PinnedMemory::kSlabBytes;
    job.memory = memory;
    job.at = at;
    job.begin = at;
    job.end = end;
    each(job, entries.is_pinned() && bodies.is_pinned());
    index += count;
  }
}

void PackedBackup::run(Step step, std::size_t at, Address memory, std::size_t size, const StreamUse& by) {
  for_each_job(at, memory, size, [&](const Job& job, bool is_pinned) {
    if (is_pinned) {
      throw_if_failed(driver_.pack_async(by.device->device(), step, job, by.stream), doing(step));
    } else {
      run_on_host(step, job, by);
    }
  });
}

// Where the device cannot reach it: through a copy of each unit.
void PackedBackup::run_on_host(Step step, const Job& job, const StreamUse& by) {
  struct Stage {
    std::array<std::byte, packing::kUnitBytes> memory;
    packing::Scratch scratch;
  };
  const auto stage = std::make_unique<Stage>();
  const int device = by.device->device();
  const auto load = [&](Address to, Address from, std::size_t size) {
    throw_if_failed(driver_.copy_async(device, to, from, size, by.stream), doing(step));
    try {
      throw_if_failed(StreamPoint({by}).wait(), doing(step));  // the next one comes to the same place
    } catch (...) {
      wait_for(driver_, by);
      throw;
    }
  };
  for (std::size_t k = 0; k < job.count; ++k) {
    const Unit& unit = *packing::unit_of(job, k);
    Job one = job;
    one.units = reinterpret_cast<Address>(&unit);
    one.count = 1;
    one.memory = reinterpret_cast<Address>(stage->memory.data());
    one.at = unit.at;
    const Address memory = job.memory + (unit.at - job.at);
    if (step != Step::unpack) {
      throw_if_failed(driver_.read(device, stage->memory.data(), memory, unit.size), doing(step));
    }
    packing::run(step, one, stage->scratch);
    if (step == Step::unpack) {
      const std::size_t begin = std::max(job.begin, unit.at) - unit.at;
      const std::size_t end = std::min<std::size_t>(job.end - unit.at, unit.size);
      load(memory + begin, one.memory + begin, end - begin);
    }
  }
}

void PackedBackup::save(std::size_t at, Address from, std::size_t size, const StreamUse& by) {
  run(Step::pack, at, from, size, by);
}

void PackedBackup::load(std::size_t at, Address to, std::size_t size, const StreamUse& by) {
  run(Step::unpack, at, to, size, by);
}

void PackedBackup::read(std::size_t at, std::byte* to, std::size_t size) {
  const auto scratch = std::make_unique<packing::Scratch>();
  for_each_job(at, reinterpret_cast<Address>(to), size,
               [&](const Job& job, bool /*is_pinned*/) { packing::run(Step::unpack, job, *scratch); });
}

}  // namespace vmm

#include "torch_adapter/out_of_memory.h"

#include <c10/core/DeviceType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstdio>

#include "base/errors.h"
#include "base/units.h"
#include "core/device/provided_memory.h"
#include "torch_adapter/errors.h"
#include "torch_adapter/routing.h"
#include "torch_adapter/torch_kinds.h"

namespace vmm {

namespace {

// "CUDA"
std::string backend(DeviceKind kind) { return c10::DeviceTypeName(torch_kind(kind).type); }

// As torch's messages say it, always with two decimals: "20.00 MiB".
std::string torch_size(std::size_t bytes) {
  if (bytes <= kKiB) return std::to_string(bytes) + " bytes";
  const char* const unit = bytes <= kMiB ? "KiB" : bytes <= kGiB ? "MiB" : "GiB";
  const std::size_t scale = bytes <= kMiB ? kKiB : bytes <= kGiB ? kMiB : kGiB;
  return format_decimal(static_cast<double>(bytes) / static_cast<double>(scale), 2) + " " + unit;
}

std::size_t allocated(const Statistics& statistics) {
  return static_cast<std::size_t>(statistics[StatKind::allocated_bytes][0].current);
}

DeviceFigures figures_of(DeviceKind kind, int ordinal) {
  DeviceFigures figures;
  // Not made: there were no addresses for its default pool.
  if (DeviceRoom* room = Runtime::made(kind, ordinal); room != nullptr) {
    const Statistics statistics = room->memory.statistics();
    figures.allowed = room->memory.budget().limit();
    figures.allocated = allocated(statistics);
    figures.reserved = static_cast<std::size_t>(statistics[StatKind::reserved_bytes][0].current);
    for (const auto& pool : room->memory.pools()) {
      if (pool->is_private()) figures.in_private_pools += allocated(pool->statistics());
    }
    for (const auto& provided : ProvidedMemory::all_of(room->memory)) {
      figures.in_private_pools += allocated(provided->statistics());
    }
  }
  if (MemoryInfo info; Runtime::memory_info(kind, ordinal, &info).ok()) {
    figures.total = info.total;
    figures.free = info.free;
  }
  return figures;
}

}  // namespace

std::string out_of_memory_sentence(DeviceKind kind, int ordinal, std::size_t bytes, const DeviceFigures& figures) {
  std::string text = backend(kind) + " out of memory. Tried to allocate " + torch_size(bytes) + ". ";
  if (figures.total != 0) {
    text += torch_kind(kind).holder;
    if (torch_kind(kind).is_numbered) text += " " + std::to_string(ordinal);
    text += " has a total capacity of " + torch_size(figures.total) + " of which " + torch_size(figures.free) +
            " is free. ";
  }
  if (figures.allowed != kUnlimited) text += torch_size(figures.allowed) + " allowed; ";
  text += "Of the allocated memory " + torch_size(figures.allocated) + " is allocated by PyTorch, ";
  if (figures.in_private_pools != 0) {
    text += "with " + torch_size(figures.in_private_pools) + " allocated in private pools (e.g., CUDA Graphs), ";
  }
  // Other threads go on meanwhile: the two were not read at one moment.
  return text + "and " + torch_size(figures.reserved - std::min(figures.allocated, figures.reserved)) +
         " is reserved by PyTorch but unallocated.";
}

void rethrow_as_torch(DeviceKind kind, int ordinal, std::size_t bytes) {
  try {
    throw;
  } catch (const OutOfMemoryError& error) {
    const std::string text =
        out_of_memory_sentence(kind, ordinal, bytes, figures_of(kind, ordinal)) + "\ntorch_vmm: " + error.what();
    TORCH_CHECK_WITH(OutOfMemoryError, false, text);
  } catch (const AsleepError& error) {
    throw_torch_error(error.what());  // the text of AsleepError, where torch lets that through
  } catch (const VmmError& error) {
    throw_torch_error("torch_vmm: " + std::string(error.what()));
  }
}

void throw_beyond_exbibyte(DeviceKind kind, int ordinal, std::size_t bytes) {
  if (DeviceRoom* const room = Runtime::made(kind, ordinal); room != nullptr && !Runtime::in_child()) {
    const std::shared_ptr<Pool> pool = current_pool(*room);
    const Budget& budget = pool->model().budget();
    room->memory.note_refusal({bytes, budget.headroom(), budget.limit(), pool->model().name(), {}, {}});
  }
  const std::string text = backend(kind) + " out of memory. Tried to allocate more than 1EB memory.";
  TORCH_CHECK_WITH(OutOfMemoryError, false, text);
  __builtin_unreachable();
}

}  // namespace vmm

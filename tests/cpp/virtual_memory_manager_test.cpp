// Addresses, physical memory and mappings by hand: aliasing, partial rights,
// several devices, and every bad input refused by name.
#include "core/faces/virtual_memory_manager.h"

#include <gtest/gtest.h>

#include <optional>
#include <string>

#include "cpp/lab.h"
#include "cpp/lacking_memory.h"

namespace vmm::testing {
namespace {

constexpr auto kDefault = VirtualMemoryManager::kDefaultAlignment;
const Location kHere = Location::on_device(0);

std::uint64_t& word(Address address) { return *reinterpret_cast<std::uint64_t*>(address); }

class Manager : public ::testing::Test {
 protected:
  static LabSpec two_devices() {
    LabSpec spec;
    spec.device_count = 2;
    return spec;
  }
  VirtualAddressRange range(std::size_t pages = 4) { return manager_->reserve(pages * kPage, kDefault); }
  PhysicalAllocation physical(std::size_t pages = 1, Location where = kHere) {
    return manager_->alloc_physical(pages * kPage, where, /*exportable=*/false);
  }
  void open(const VirtualAddressRange& range, Access access = Access::read_write) {
    manager_->set_access(range, access, {kHere}, 0, 0);
  }

  Lab lab_{two_devices()};
  std::optional<VirtualMemoryManager> manager_{std::in_place, lab_.memory()};
};
using ManagerDeath = Manager;

// ---------------------------------------------------------------- what works

TEST_F(Manager, ReservesAlignedRangesWithNothingUnderThem) {
  const auto r = manager_->reserve(8 * kMiB, 8 * kMiB);
  EXPECT_EQ(r.base % (8 * kMiB), 0U);
  EXPECT_EQ(r.size, 8 * kMiB);
  EXPECT_EQ(r.alignment, 8 * kMiB);
  EXPECT_EQ(r.end(), r.base + 8 * kMiB);
  EXPECT_TRUE(r.contains(r.base) && r.contains(r.end() - 1));
  EXPECT_FALSE(r.contains(r.end()) || r.contains(r.base - 1));
  EXPECT_EQ(lab_.driver.live_chunks(), 0U);
  EXPECT_EQ(r.text(), "VA[" + format_hex(r.base) + ".." + format_hex(r.end()) + ", 8388608 bytes, align=8388608]");
}

TEST_F(Manager, TellsAnAllocationInWords) {
  const auto p = physical(2);
  EXPECT_EQ(p.size, 2 * kPage);
  EXPECT_EQ(p.device, 0);
  EXPECT_EQ(p.text(), "PhysAlloc[handle=" + format_hex(p.handle) + ", 4194304 bytes, dev=0]");
}

TEST_F(Manager, OneAllocationIsSeenThroughAllItsAddresses) {
  const auto r = range();
  const auto other = range(1);
  const auto p = physical();
  manager_->map(r, p, 0);
  manager_->map(r, p, 3 * kPage);
  manager_->map(other, p, 0);
  open(r);
  open(other);
  Lab::fill(r.base, kPage, 1);
  EXPECT_TRUE(Lab::holds(r.base + 3 * kPage, kPage, 1));
  EXPECT_TRUE(Lab::holds(other.base, kPage, 1));
  word(other.base + 4096) = 7;
  EXPECT_EQ(word(r.base + 4096), 7U);
  manager_->unmap(r, 0, kPage);
  EXPECT_EQ(word(r.base + 3 * kPage + 4096), 7U) << "the others stay";
  EXPECT_EQ(lab_.driver.live_chunk_bytes(), kPage);
}

TEST_F(Manager, FreshMemoryIsZeroAndKeepsItsContentWhenItMoves) {
  const auto r = range();
  const auto p = physical();
  manager_->map(r, p, 0);
  open(r);
  EXPECT_TRUE(Lab::is_zero(r.base, kPage));
  Lab::fill(r.base, kPage, 3);
  manager_->unmap(r, 0, kPage);
  manager_->map(r, p, kPage);
  open(r);
  EXPECT_TRUE(Lab::holds(r.base + kPage, kPage, 3));
}

TEST_F(Manager, ListsItsMappingsByOffset) {
  const auto r = range(6);
  const auto big = physical(2);
  const auto small = physical();
  manager_->map(r, small, 5 * kPage);
  manager_->map(r, big, kPage);
  manager_->map(r, small, 0);
  manager_->set_access(r, Access::read, {kHere}, kPage, 2 * kPage);
  const auto records = manager_->mappings(r);
  ASSERT_EQ(records.size(), 3U);
  EXPECT_EQ(records[0].va_offset, 0U);
  EXPECT_EQ(records[1].va_offset, kPage);
  EXPECT_EQ(records[1].size, 2 * kPage);
  EXPECT_EQ(records[1].phys_handle, big.handle);
  EXPECT_EQ(records[1].access, Access::read);
  EXPECT_EQ(records[2].va_offset, 5 * kPage);
  EXPECT_EQ(records[2].access, Access::none) << "not accessible until set_access";
}

TEST_F(ManagerDeath, PartOfARangeCanBeReadOnlyOrClosed) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto r = range(3);
  for (std::size_t k = 0; k < 3; ++k) manager_->map(r, physical(), k * kPage);
  EXPECT_DEATH(word(r.base) = 1, "") << "inaccessible until set_access";
  open(r);
  word(r.base + kPage) = 5;
  manager_->set_access(r, Access::read, {kHere}, kPage, kPage);
  manager_->set_access(r, Access::none, {kHere}, 2 * kPage, kPage);
  word(r.base) = 1;
  EXPECT_EQ(word(r.base + kPage), 5U);
  EXPECT_DEATH(word(r.base + kPage) = 6, "");
  EXPECT_DEATH(static_cast<void>(*static_cast<volatile std::uint64_t*>(&word(r.base + 2 * kPage))), "");
  manager_->set_access(r, Access::read_write, {kHere}, 0, 3 * kPage);
  word(r.base + 2 * kPage) = 9;
}

TEST_F(Manager, SeveralDevicesAndTheHostShareOneRange) {
  const auto r = range(3);
  const auto first = physical(1, Location::on_device(0));
  const auto second = physical(1, Location::on_device(1));
  const auto host = physical(1, Location::on_host());
  EXPECT_EQ(second.device, 1);
  EXPECT_EQ(host.device, -1);
  manager_->map(r, first, 0);
  manager_->map(r, second, kPage);
  manager_->map(r, host, 2 * kPage);
  manager_->set_access(r, Access::read_write, {Location::on_device(0), Location::on_device(1)}, 0, 0);
  Lab::fill(r.base, 3 * kPage, 4);
  EXPECT_TRUE(Lab::holds(r.base, 3 * kPage, 4));
  const auto created = lab_.driver.calls(Call::create);
  ASSERT_EQ(created.size(), 3U);
  EXPECT_EQ(created[1].b, 1U) << "on device 1";
}

TEST_F(Manager, RightsOfOneDeviceLeaveAnothersAlone) {
  const auto r = range(1);
  manager_->map(r, physical(), 0);
  manager_->set_access(r, Access::read_write, {Location::on_device(0)}, 0, kPage);
  manager_->set_access(r, Access::none, {Location::on_device(1)}, 0, kPage);
  EXPECT_EQ(manager_->mappings(r)[0].access, Access::read_write);
}

TEST_F(Manager, CountsItsMemoryAgainstTheDevicesLimit) {
  lab_.memory().set_limit(lab_.memory().budget(), 2 * kPage);
  const auto p = physical(2);
  EXPECT_EQ(lab_.memory().committed_bytes(), 2 * kPage);
  EXPECT_THROW(physical(), OutOfMemoryError);
  manager_->free_physical(p);
  EXPECT_EQ(lab_.memory().committed_bytes(), 0U);
  physical();
}

TEST_F(Manager, CountsHostMemoryApartFromTheDevices) {
  lab_.memory().set_limit(lab_.memory().budget(), kPage);
  const auto p = physical(4, Location::on_host());
  EXPECT_EQ(lab_.memory().committed_bytes(), 0U) << "no memory of the device's";
  EXPECT_EQ(lab_.memory().host_budget().used(), 4 * kPage);
  physical();  // its limit is its own
  EXPECT_THROW(physical(), OutOfMemoryError);
  VirtualMemoryManager other(lab_.memory());
  other.alloc_physical(kPage, Location::on_host(), false);
  EXPECT_EQ(lab_.memory().host_budget().used(), 5 * kPage) << "of all managers";
  lab_.memory().check();
  manager_->free_physical(p);
  EXPECT_EQ(lab_.memory().host_budget().used(), kPage);
  other.close();
  EXPECT_EQ(lab_.memory().host_budget().used(), 0U);
}

TEST_F(Manager, TakesIdleMemoryOfPoolsBeforeItFails) {
  lab_.memory().set_limit(lab_.memory().budget(), 16 * kMiB);
  const auto pool = lab_.pool("a");
  lab_.leave_idle(*pool, 16 * kMiB);
  EXPECT_NO_THROW(physical(4));
}

TEST_F(Manager, TakesNoMoreOfPoolsThanItLacks) {
  lab_.memory().set_limit(lab_.memory().budget(), 16 * kMiB);
  const auto pool = lab_.pool("a", kUnlimited);
  lab_.leave_idle(*pool, 16 * kMiB);
  const auto one = physical(1);
  EXPECT_GE(pool->physical_bytes(), 8 * kMiB);
  try {
    physical(16);
    ADD_FAILURE();
  } catch (const OutOfMemoryError& error) {
    EXPECT_LT(error.available, error.requested) << "a limit refused it, whatever the device has";
  }
  manager_->free_physical(one);
}

TEST_F(Manager, WithoutHostMemoryNothingIsHalfDone) {
  bool has_run_out = true;
  for (long n = 0; has_run_out; ++n) {
    VirtualMemoryManager manager(lab_.memory());
    runs_out_at(n, [&] {
      const auto range = manager.reserve(kPage, kPage);
      const auto page = manager.alloc_physical(kPage, Location::on_device(0), false);
      manager.free_physical(page);
      manager.release(range);
    });
    has_run_out = failures_made != 0;
    manager.close();
    EXPECT_EQ(lab_.memory().committed_bytes(), 0U) << n;
  }
}

TEST_F(Manager, WithoutHostMemoryNobodysAccessChanges) {
  const Location there = Location::on_device(1);
  bool has_run_out = true;
  for (long n = 0; has_run_out; ++n) {
    SCOPED_TRACE("allocation " + std::to_string(n));
    VirtualMemoryManager manager(lab_.memory());
    const auto range = manager.reserve(4 * kPage, kDefault);
    for (const std::size_t page : {0U, 2U}) {
      manager.map(range, manager.alloc_physical(kPage, kHere, false), page * kPage);
    }
    has_run_out = runs_out_at(n, [&] { manager.set_access(range, Access::read_write, {kHere, there, kHere}, 0, 0); });
    EXPECT_EQ(has_run_out, failures_made != 0);
    for (const MappingRecord& each : manager.mappings(range)) {
      EXPECT_EQ(each.access, has_run_out ? Access::none : Access::read_write) << each.va_offset;
    }
  }
}

TEST_F(Manager, ClosingGivesEverythingBack) {
  const auto r = range();
  const auto p = physical(2);
  manager_->map(r, p, 0);
  manager_->map(r, p, 2 * kPage);
  physical();
  range(1);
  manager_->close();
  EXPECT_TRUE(manager_->is_closed());
  EXPECT_EQ(lab_.driver.leaks(), lab_.driver.live_fences() == 0 ? "" : "1 fence");
  EXPECT_EQ(lab_.memory().committed_bytes(), 0U);
  EXPECT_NO_THROW(manager_->close());
  EXPECT_THROW(range(), InvalidArgumentError);
  EXPECT_THROW(static_cast<void>(manager_->mappings(r)), InvalidArgumentError);
}

TEST_F(Manager, TensorsHoldTheirRange) {
  const auto r = range();
  const auto p = physical();
  manager_->map(r, p, 0);
  EXPECT_THROW(manager_->hold(r, 0, 64), InvalidArgumentError) << "not accessible";
  open(r);
  EXPECT_EQ(manager_->hold(r, 128, 64), r.base + 128);
  EXPECT_THROW(manager_->unmap(r, 0, kPage), StillInUseError);
  EXPECT_THROW(manager_->release(r), StillInUseError);
  EXPECT_THROW(manager_->close(), StillInUseError);
  EXPECT_THROW(manager_->hold(r, kPage - 8, 16), NotMappedError);
  EXPECT_THROW(manager_->hold(r, 4 * kPage, 16), InvalidRangeError);
  manager_->unhold(r, 128, 64);
  manager_->unmap(r, 0, kPage);
}

TEST_F(Manager, TensorsHoldWhatTheyCoverAndNothingElse) {
  const auto r = range(4);
  for (std::size_t page = 0; page < 4; ++page) manager_->map(r, physical(), page * kPage);
  open(r);
  manager_->hold(r, kPage + 512, kPage);  // the second page and the third
  manager_->unmap(r, 0, kPage);
  for (const std::size_t page : {1U, 2U}) {
    try {
      manager_->unmap(r, page * kPage, kPage);
      FAIL() << "page " << page << " is shown";
    } catch (const StillInUseError& error) {
      EXPECT_EQ(error.live_blocks, 1U);
      EXPECT_EQ(error.live_bytes, page == 1 ? kPage - 512 : 512);
    }
  }
  manager_->unmap(r, 3 * kPage, kPage);
  manager_->unhold(r, kPage + 512, kPage);
  manager_->unmap(r, kPage, 2 * kPage);
  manager_->release(r);
}

TEST_F(Manager, WhatATensorShowsStaysAccessibleToItsDevice) {
  const auto r = range(2);
  manager_->map(r, physical(), 0);
  manager_->map(r, physical(), kPage);
  open(r);
  manager_->hold(r, 0, 64);
  EXPECT_THROW(manager_->set_access(r, Access::none, {kHere}, 0, kPage), StillInUseError);
  EXPECT_THROW(manager_->set_access(r, Access::none, {kHere}, 0, 0), StillInUseError) << "all of the range";
  manager_->set_access(r, Access::none, {kHere}, kPage, kPage);
  manager_->set_access(r, Access::none, {kHere}, kPage, 0);
  const Location other = Location::on_device(1);
  manager_->set_access(r, Access::read, {other}, 0, kPage);
  manager_->set_access(r, Access::none, {other}, 0, kPage);
  manager_->set_access(r, Access::read, {kHere}, 0, kPage);
  manager_->unhold(r, 0, 64);
  manager_->set_access(r, Access::none, {kHere}, 0, kPage);
}

TEST_F(Manager, AnotherDevicesAccessIsNoneOfATensors) {
  const auto r = range(1);
  manager_->map(r, physical(), 0);
  manager_->set_access(r, Access::read_write, {Location::on_device(1)}, 0, 0);
  EXPECT_THROW(manager_->hold(r, 0, 64), InvalidArgumentError) << "the tensor is on device 0";
}

// ----------------------------------------------------------------- bad input

TEST_F(Manager, RefusesToReserveNothing) { EXPECT_THROW(manager_->reserve(0, kDefault), InvalidRangeError); }

TEST_F(Manager, RefusesAnAlignmentOfZeroOrNoPowerOfTwo) {
  EXPECT_THROW(manager_->reserve(8 * kMiB, 0), InvalidArgumentError);
  EXPECT_THROW(manager_->reserve(6 * kMiB, 6 * kMiB), InvalidArgumentError);
  EXPECT_THROW(manager_->reserve(8 * kMiB, 4096), InvalidArgumentError) << "below the granularity";
}

TEST_F(Manager, RefusesASizeThatIsNoMultiple) {
  EXPECT_THROW(manager_->reserve(kPage + 1, kDefault), InvalidRangeError);
  EXPECT_THROW(manager_->reserve(3 * kPage, 2 * kPage), InvalidRangeError) << "of the alignment";
  EXPECT_THROW(manager_->alloc_physical(kPage - 4096, kHere, false), InvalidRangeError);
  EXPECT_THROW(manager_->alloc_physical(0, kHere, false), InvalidRangeError);
}

TEST_F(Manager, RefusesASizeBeyondAllAddresses) {
  EXPECT_THROW(manager_->reserve(std::size_t{1} << 62, kDefault), OutOfMemoryError);
  EXPECT_THROW(manager_->alloc_physical(2 * kGiB, kHere, false), OutOfMemoryError);
}

TEST_F(Manager, RefusesSizesNearTheLargestNumber) {
  const std::size_t size = std::size_t{0} - kPage;
  EXPECT_THROW(manager_->reserve(size, kDefault), OutOfMemoryError);
  EXPECT_THROW(manager_->reserve(std::size_t{1} << 63, std::size_t{1} << 63), OutOfMemoryError);
  lab_.driver.clear_calls();
  EXPECT_THROW(manager_->alloc_physical(size, kHere, false), OutOfMemoryError);
  EXPECT_THROW(manager_->alloc_physical(size, Location::on_host(), false), OutOfMemoryError);
  EXPECT_EQ(lab_.driver.count(Call::create), 0U) << "nor were they charged meanwhile";
  const auto r = range(2);
  EXPECT_THROW(manager_->unmap(r, kPage, size), InvalidRangeError);
  EXPECT_THROW(manager_->unmap(r, size, kPage), InvalidRangeError);
  EXPECT_THROW(manager_->set_access(r, Access::read, {kHere}, kPage, size), InvalidRangeError);
  EXPECT_THROW(manager_->hold(r, 512, kUnlimited - 100), InvalidRangeError);
}

TEST_F(Manager, RefusesADeviceThatDoesNotExist) {
  EXPECT_THROW(physical(1, Location::on_device(2)), InvalidArgumentError);
  EXPECT_THROW(physical(1, Location::on_device(-1)), InvalidArgumentError);
  const auto r = range();
  manager_->map(r, physical(), 0);
  EXPECT_THROW(manager_->set_access(r, Access::read, {Location::on_device(7)}, 0, kPage), InvalidArgumentError);
}

TEST_F(Manager, SaysWhatThisDeviceCannotDo) {
  lab_.driver.fail_nth(Call::create, 1, {StatusCode::not_supported, "create"});
  EXPECT_THROW(manager_->alloc_physical(kPage, Location::on_host(), true), NotAvailableError);
}

TEST_F(Manager, RefusesOffsetsThatAreUnalignedOverflowingOrBeyondTheEnd) {
  const auto r = range(2);
  const auto p = physical();
  EXPECT_THROW(manager_->map(r, p, 4096), InvalidRangeError);
  EXPECT_THROW(manager_->map(r, p, 2 * kPage), InvalidRangeError);
  EXPECT_THROW(manager_->map(r, p, kUnlimited - kPage + 1), InvalidRangeError) << "overflow";
  EXPECT_THROW(manager_->map(r, physical(3), 0), InvalidRangeError);
  manager_->map(r, p, 0);
  EXPECT_THROW(manager_->unmap(r, 0, 0), InvalidRangeError);
  EXPECT_THROW(manager_->unmap(r, 0, kPage / 2), InvalidRangeError);
  EXPECT_THROW(manager_->unmap(r, kUnlimited - kPage + 1, kPage), InvalidRangeError);
  EXPECT_THROW(manager_->set_access(r, Access::read, {kHere}, 512, kPage), InvalidRangeError);
  EXPECT_THROW(manager_->set_access(r, Access::read, {kHere}, 2 * kPage, 0), InvalidRangeError);
  EXPECT_EQ(manager_->mappings(r).size(), 1U);
}

TEST_F(Manager, RefusesToMapWhereSomethingIs) {
  const auto r = range(4);
  manager_->map(r, physical(), kPage);
  const auto wide = physical(2);
  try {
    manager_->map(r, wide, 0);
    FAIL() << "over a mapping";
  } catch (const AlreadyMappedError& error) {
    EXPECT_EQ(error.offset, kPage) << "the first page at fault";
  }
  EXPECT_THROW(manager_->map(r, wide, kPage), AlreadyMappedError);
  manager_->map(r, wide, 2 * kPage);
}

TEST_F(Manager, RefusesToUnmapAPartOrAHole) {
  const auto r = range(4);
  manager_->map(r, physical(2), 0);
  EXPECT_THROW(manager_->unmap(r, 0, kPage), InvalidRangeError) << "half a mapping";
  EXPECT_THROW(manager_->unmap(r, kPage, kPage), InvalidRangeError);
  EXPECT_THROW(manager_->set_access(r, Access::read, {kHere}, kPage, kPage), InvalidRangeError);
  try {
    manager_->unmap(r, 0, 3 * kPage);
    FAIL() << "the third page is a hole";
  } catch (const NotMappedError& error) {
    EXPECT_EQ(error.offset, 2 * kPage);
  }
  EXPECT_THROW(manager_->set_access(r, Access::read, {kHere}, 0, 3 * kPage), NotMappedError);
  EXPECT_THROW(manager_->set_access(range(1), Access::read, {kHere}, 0, 0), NotMappedError) << "nothing at all";
  EXPECT_EQ(manager_->mappings(r).size(), 1U);
}

TEST_F(Manager, RefusesToFreeWhatIsMappedAndToReleaseWhatHoldsMappings) {
  const auto r = range();
  const auto p = physical();
  manager_->map(r, p, 0);
  manager_->map(r, p, kPage);
  EXPECT_THROW(manager_->free_physical(p), StillInUseError);
  EXPECT_THROW(manager_->release(r), StillInUseError);
  manager_->unmap(r, 0, kPage);
  EXPECT_THROW(manager_->free_physical(p), StillInUseError) << "still at the second address";
  manager_->unmap(r, kPage, kPage);
  manager_->free_physical(p);
  manager_->release(r);
}

TEST_F(Manager, RefusesAnotherManagersObjects) {
  VirtualMemoryManager stranger(lab_.memory());
  const auto r = stranger.reserve(kPage, kDefault);
  const auto p = stranger.alloc_physical(kPage, kHere, false);
  EXPECT_THROW(manager_->map(r, physical(), 0), InvalidArgumentError);
  EXPECT_THROW(manager_->map(range(), p, 0), InvalidArgumentError);
  EXPECT_THROW(manager_->release(r), InvalidArgumentError);
  EXPECT_THROW(manager_->free_physical(p), InvalidArgumentError);
  EXPECT_THROW(static_cast<void>(manager_->mappings(r)), InvalidArgumentError);
}

TEST_F(Manager, RefusesWhatHasBeenReleasedOrFreed) {
  const auto r = range();
  const auto p = physical();
  manager_->release(r);
  manager_->free_physical(p);
  EXPECT_THROW(manager_->release(r), InvalidArgumentError);
  EXPECT_THROW(manager_->free_physical(p), InvalidArgumentError);
  EXPECT_THROW(manager_->map(range(), p, 0), InvalidArgumentError);
  EXPECT_THROW(manager_->map(r, physical(), 0), InvalidArgumentError) << "even if the address came back";
}

}  // namespace
}  // namespace vmm::testing

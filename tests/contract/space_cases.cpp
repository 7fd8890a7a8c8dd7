// Devices, address space, physical chunks.
#include <limits>

#include "contract/contract_lab.h"

namespace vmm::testing {
namespace {

constexpr Address kUntouched = 0xDEADBEEF;

void devices_are_listed(Driver& driver, const ContractOptions& options) {
  CONTRACT_CHECK(driver.alive());
  CONTRACT_CHECK(!driver.name().empty());
  const int count = driver.device_count();
  CONTRACT_CHECK(count > options.device, count, options.device);
  CONTRACT_CHECK(driver.missing(options.device).empty(), driver.missing(options.device));
  CONTRACT_CHECK(!driver.missing(-1).empty());
  CONTRACT_CHECK(!driver.missing(count).empty());
}

void capabilities_are_sane(Driver& driver, const ContractOptions& options) {
  const Lab lab(driver, options);
  CONTRACT_CHECK(is_power_of_two(lab.granule()) && lab.granule() >= 4096, lab.granule());
  CONTRACT_CHECK(lab.capabilities().total_memory >= lab.granule(), lab.capabilities().total_memory);
  CONTRACT_CHECK(!lab.capabilities().name.empty());
}

void unknown_devices_are_refused(Driver& driver, const ContractOptions& options) {
  Lab lab(driver, options);
  const Address at = lab.reserve(lab.granule());
  lab.map(at, lab.create(lab.granule()));
  for (const int device : {-1, driver.device_count(), std::numeric_limits<int>::max()}) {
    Capabilities capabilities;
    MemoryInfo info;
    Fence fence = nullptr;
    ChunkHandle chunk = 0;
    CONTRACT_REFUSED(driver.capabilities(device, &capabilities));
    CONTRACT_REFUSED(driver.memory_info(device, &info));
    CONTRACT_REFUSED(driver.create_fence(device, &fence));
    CONTRACT_REFUSED(driver.synchronize(device));
    CONTRACT_REFUSED(driver.create({lab.granule(), Location::on_device(device), false}, &chunk));
    CONTRACT_REFUSED(driver.set_access(at, lab.granule(), Location::on_device(device), Access::read));
    CONTRACT_REFUSED(driver.fill_async(device, at, 1, 1, nullptr));
    CONTRACT_REFUSED(driver.copy_async(device, at, at + 64, 1, nullptr));
  }
}

void reservations_are_aligned_and_apart(Driver& driver, const ContractOptions& options) {
  Lab lab(driver, options);
  std::map<Address, std::size_t> made;
  for (const std::size_t alignment : {lab.granule(), 2 * lab.granule(), 64 * lab.granule(), options.large_alignment}) {
    for (const std::size_t granules : {1U, 3U, 64U}) {
      const std::size_t size = granules * lab.granule();
      const Address at = lab.reserve(size, std::max(alignment, lab.granule()));
      for (const auto& [other, other_size] : made) {
        CONTRACT_CHECK(at + size <= other || other + other_size <= at, format_hex(at), format_hex(other));
      }
      made[at] = size;
    }
  }
}

void large_reservations_cost_nothing(Driver& driver, const ContractOptions& options) {
  Lab lab(driver, options);
  const std::size_t before = lab.free_memory(options.device);
  const Address at = lab.reserve(options.large_reservation, options.large_alignment);
  // Both ends are usable.
  lab.map(at, lab.create(lab.granule()));
  lab.map(at + options.large_reservation - lab.granule(), lab.create(lab.granule()));
  lab.fill(at, 7, lab.granule());
  CONTRACT_FILLED(lab, at + options.large_reservation - lab.granule(), lab.granule(), 0);
  CONTRACT_FILLED(lab, at, lab.granule(), 7);
  const std::size_t after = lab.free_memory(options.device);
  CONTRACT_CHECK(after + kGiB > before, before, after);
}

void bad_reservations_are_refused(Driver& driver, const ContractOptions& options) {
  const Lab lab(driver, options);
  const std::size_t g = lab.granule();
  Address at = kUntouched;
  CONTRACT_REFUSED(driver.reserve(0, g, &at));
  CONTRACT_REFUSED(driver.reserve(g + 1, g, &at));
  CONTRACT_REFUSED(driver.reserve(g / 2, g, &at));
  CONTRACT_REFUSED(driver.reserve(g, 0, &at));
  CONTRACT_REFUSED(driver.reserve(g, 3 * g, &at));
  CONTRACT_REFUSED(driver.reserve(g, g / 2, &at));
  const std::size_t everything = align_down(std::numeric_limits<std::size_t>::max(), g);
  CONTRACT_CHECK(driver.reserve(everything, g, &at).code() == StatusCode::out_of_memory);
  CONTRACT_CHECK(at == kUntouched, format_hex(at));
}

void only_whole_reservations_are_unreserved(Driver& driver, const ContractOptions& options) {
  Lab lab(driver, options);
  const std::size_t g = lab.granule();
  const Address at = lab.reserve(4 * g);
  CONTRACT_REFUSED(driver.unreserve(at, 2 * g));
  CONTRACT_REFUSED(driver.unreserve(at, 5 * g));
  CONTRACT_REFUSED(driver.unreserve(at, 0));
  CONTRACT_REFUSED(driver.unreserve(at + g, 3 * g));
  CONTRACT_REFUSED(driver.unreserve(0, 4 * g));
  lab.unreserve(at);
  CONTRACT_REFUSED(driver.unreserve(at, 4 * g));
}

void a_reservation_with_mappings_stays(Driver& driver, const ContractOptions& options) {
  Lab lab(driver, options);
  const std::size_t g = lab.granule();
  const Address at = lab.reserve(4 * g);
  lab.map(at + 3 * g, lab.create(g));
  lab.fill(at + 3 * g, 9, g);
  CONTRACT_REFUSED(driver.unreserve(at, 4 * g));
  CONTRACT_FILLED(lab, at + 3 * g, g, 9);
  lab.unmap(at + 3 * g, g);
  lab.unreserve(at);
}

void bad_chunks_are_refused(Driver& driver, const ContractOptions& options) {
  const Lab lab(driver, options);
  const std::size_t g = lab.granule();
  ChunkHandle chunk = 77;
  CONTRACT_REFUSED(driver.create({0, lab.here(), false}, &chunk));
  CONTRACT_REFUSED(driver.create({g / 2, lab.here(), false}, &chunk));
  CONTRACT_REFUSED(driver.create({g + 4096, lab.here(), false}, &chunk));
  CONTRACT_CHECK(chunk == 77, chunk);
}

void more_than_there_is_is_out_of_memory(Driver& driver, const ContractOptions& options) {
  Lab lab(driver, options);
  const std::size_t g = lab.granule();
  const std::size_t before = lab.free_memory(options.device);
  ChunkHandle chunk = 77;
  const Status too_much = driver.create({align_up(lab.capabilities().total_memory, g) + g, lab.here(), false}, &chunk);
  CONTRACT_CHECK(too_much.code() == StatusCode::out_of_memory, too_much.text());
  CONTRACT_CHECK(chunk == 77, chunk);
  CONTRACT_CHECK(lab.free_memory(options.device) + 64 * kMiB > before);
  lab.create(g);  // the next one works
}

void released_chunks_are_unknown(Driver& driver, const ContractOptions& options) {
  Lab lab(driver, options);
  const std::size_t g = lab.granule();
  const Address at = lab.reserve(g);
  const ChunkHandle chunk = lab.create(g);
  lab.release(chunk);
  int fd = -7;
  CONTRACT_REFUSED(driver.release(chunk));
  CONTRACT_REFUSED(driver.map(at, g, chunk));
  CONTRACT_REFUSED(driver.export_chunk(chunk, &fd));
  CONTRACT_REFUSED(driver.release(0));
  CONTRACT_REFUSED(driver.map(at, g, 0));
  CONTRACT_CHECK(fd == -7, fd);
}

void fresh_chunks_are_zero(Driver& driver, const ContractOptions& options) {
  Lab lab(driver, options);
  const std::size_t g = lab.granule();
  const Address at = lab.reserve(8 * g);
  for (int round = 0; round < 3; ++round) {  // the second gets what the first gave back
    std::vector<ChunkHandle> chunks;
    for (std::size_t k = 0; k < 8; ++k) {
      chunks.push_back(lab.create(g));
      lab.map(at + k * g, chunks.back());
    }
    CONTRACT_FILLED(lab, at, 8 * g, 0);
    lab.fill(at, 0xAB, 8 * g);
    lab.unmap(at, 8 * g);
    for (const ChunkHandle chunk : chunks) lab.release(chunk);
  }
}

void memory_info_follows(Driver& driver, const ContractOptions& options) {
  Lab lab(driver, options);
  MemoryInfo info;
  CONTRACT_OK(driver.memory_info(options.device, &info));
  CONTRACT_CHECK(info.free <= info.total, info.free, info.total);
  const std::size_t size = align_up(64 * kMiB, lab.granule());
  const ChunkHandle chunk = lab.create(size);
  // Others may use the same GPU: by about that much is enough.
  const std::size_t with = lab.free_memory(options.device);
  CONTRACT_CHECK(with < info.free && info.free - with >= size / 2, info.free, with);
  lab.release(chunk);
  const std::size_t without = lab.free_memory(options.device);
  CONTRACT_CHECK(without > with && without - with >= size / 2, with, without);
}

void mapped_memory_outlives_its_handle(Driver& driver, const ContractOptions& options) {
  Lab lab(driver, options);
  const std::size_t size = align_up(64 * kMiB, lab.granule());
  const Address at = lab.reserve(2 * size);
  const ChunkHandle chunk = lab.create(size);
  const std::size_t used = lab.free_memory(options.device);
  lab.map(at, chunk);
  const Bytes bytes = pattern(1000, 1);
  lab.write(at + size - 1000, bytes);
  lab.release(chunk);
  CONTRACT_REFUSED(driver.release(chunk));
  CONTRACT_REFUSED(driver.map(at + size, size, chunk));
  CONTRACT_CHECK(lab.read(at + size - 1000, 1000) == bytes);
  CONTRACT_CHECK(lab.free_memory(options.device) < used + size / 2, "memory went while it was mapped");
  lab.unmap(at, size);
  CONTRACT_CHECK(lab.free_memory(options.device) > used + size / 2, "memory stayed after the last unmap");
}

void devices_have_memory_of_their_own(Driver& driver, const ContractOptions& options) {
  if (driver.device_count() < 2) throw ContractSkip("one device only");
  Lab lab(driver, options);
  const int other = options.device == 0 ? 1 : 0;
  const std::size_t size = align_up(64 * kMiB, lab.granule());
  const std::size_t other_before = lab.free_memory(other);
  const ChunkHandle there = lab.create({size, Location::on_device(other), false});
  CONTRACT_CHECK(lab.free_memory(other) + size / 2 < other_before, "device", other);
  // One range with memory of both devices, each accessible from this one.
  const Address at = lab.reserve(2 * size);
  lab.map(at, lab.create(size));
  lab.map(at + size, there, Access::none);
  const Status peer = driver.set_access(at + size, size, lab.here(), Access::read_write);
  if (peer.code() == StatusCode::not_supported) throw ContractSkip("no peer access: " + peer.text());
  CONTRACT_OK(peer);
  CONTRACT_OK(driver.set_access(at, size, Location::on_device(other), Access::read));
  const Bytes bytes = pattern(4096, 5);
  lab.write(at + size - 2048, bytes);
  CONTRACT_CHECK(lab.read(at + size - 2048, 4096) == bytes);
  // Taking the other's access away leaves this one's.
  CONTRACT_OK(driver.set_access(at, size, Location::on_device(other), Access::none));
  CONTRACT_CHECK(lab.read(at + size - 2048, 4096) == bytes);
}

}  // namespace

std::vector<ContractCase> space_cases() {
  return {
      {"devices_are_listed", devices_are_listed},
      {"capabilities_are_sane", capabilities_are_sane},
      {"unknown_devices_are_refused", unknown_devices_are_refused},
      {"reservations_are_aligned_and_apart", reservations_are_aligned_and_apart},
      {"large_reservations_cost_nothing", large_reservations_cost_nothing},
      {"bad_reservations_are_refused", bad_reservations_are_refused},
      {"only_whole_reservations_are_unreserved", only_whole_reservations_are_unreserved},
      {"a_reservation_with_mappings_stays", a_reservation_with_mappings_stays},
      {"bad_chunks_are_refused", bad_chunks_are_refused},
      {"more_than_there_is_is_out_of_memory", more_than_there_is_is_out_of_memory},
      {"released_chunks_are_unknown", released_chunks_are_unknown},
      {"fresh_chunks_are_zero", fresh_chunks_are_zero},
      {"memory_info_follows", memory_info_follows},
      {"mapped_memory_outlives_its_handle", mapped_memory_outlives_its_handle},
      {"devices_have_memory_of_their_own", devices_have_memory_of_their_own},
  };
}

}  // namespace vmm::testing

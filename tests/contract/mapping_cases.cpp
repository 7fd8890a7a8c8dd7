// Mapping, access rights, aliases, sharing.
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "contract/contract_lab.h"

namespace vmm::testing {
namespace {

void a_chunk_is_mapped_whole(Driver& driver, const ContractOptions& options) {
  Lab lab(driver, options);
  const std::size_t g = lab.granule();
  const Address at = lab.reserve(8 * g);
  const ChunkHandle chunk = lab.create(2 * g);
  CONTRACT_REFUSED(driver.map(at, g, chunk));
  CONTRACT_REFUSED(driver.map(at, 4 * g, chunk));
  CONTRACT_REFUSED(driver.map(at, 0, chunk));
  CONTRACT_REFUSED(driver.map(at, 2 * g - 4096, chunk));
  CONTRACT_REFUSED(driver.map(at + 4096, 2 * g, chunk));
  CONTRACT_REFUSED(driver.map(at + g / 2, 2 * g, chunk));
  CONTRACT_REFUSED(driver.map(at, 2 * g, chunk + 0x10000));
  lab.map(at + g, chunk);  // nothing of the above stands in the way
  CONTRACT_FILLED(lab, at + g, 2 * g, 0);
}

void mapping_stays_inside_a_reservation(Driver& driver, const ContractOptions& options) {
  Lab lab(driver, options);
  const std::size_t g = lab.granule();
  const Address at = lab.reserve(4 * g, 64 * g);
  const ChunkHandle chunk = lab.create(2 * g);
  CONTRACT_REFUSED(driver.map(at + 3 * g, 2 * g, chunk));
  CONTRACT_REFUSED(driver.map(at - g, 2 * g, chunk));
  CONTRACT_REFUSED(driver.map(at + 4 * g, 2 * g, chunk));
  CONTRACT_REFUSED(driver.map(0, 2 * g, chunk));
  CONTRACT_REFUSED(driver.map(align_down(~Address{0}, g), 2 * g, chunk));
  const Address gone = lab.reserve(4 * g);
  lab.unreserve(gone);
  CONTRACT_REFUSED(driver.map(gone, 2 * g, chunk));
}

void nothing_is_mapped_over_a_mapping(Driver& driver, const ContractOptions& options) {
  Lab lab(driver, options);
  const std::size_t g = lab.granule();
  const Address at = lab.reserve(8 * g);
  lab.map(at + 2 * g, lab.create(2 * g));
  lab.fill(at + 2 * g, 3, 2 * g);
  const ChunkHandle small = lab.create(g);
  const ChunkHandle large = lab.create(4 * g);
  CONTRACT_REFUSED(driver.map(at + 2 * g, g, small));
  CONTRACT_REFUSED(driver.map(at + 3 * g, g, small));
  CONTRACT_REFUSED(driver.map(at + g, 4 * g, large));
  CONTRACT_REFUSED(driver.map(at, 4 * g, large));
  CONTRACT_REFUSED(driver.map(at + 3 * g, 4 * g, large));
  CONTRACT_FILLED(lab, at + 2 * g, 2 * g, 3);
  lab.map(at + g, small);  // its neighbours are free
  lab.map(at + 4 * g, large);
}

void only_whole_mappings_are_unmapped(Driver& driver, const ContractOptions& options) {
  Lab lab(driver, options);
  const std::size_t g = lab.granule();
  const Address at = lab.reserve(8 * g);
  CONTRACT_REFUSED(driver.unmap(at, g));
  lab.map(at, lab.create(2 * g));
  lab.map(at + 2 * g, lab.create(2 * g));
  lab.map(at + 5 * g, lab.create(g));
  lab.fill(at, 4, 4 * g);
  CONTRACT_REFUSED(driver.unmap(at, g));
  CONTRACT_REFUSED(driver.unmap(at + g, g));
  CONTRACT_REFUSED(driver.unmap(at, 3 * g));
  CONTRACT_REFUSED(driver.unmap(at + g, 3 * g));
  CONTRACT_REFUSED(driver.unmap(at, 6 * g));          // a gap at 4
  CONTRACT_REFUSED(driver.unmap(at + 4 * g, 2 * g));  // begins in it
  CONTRACT_REFUSED(driver.unmap(at + 5 * g, 2 * g));  // ends in the open
  CONTRACT_REFUSED(driver.unmap(at, 0));
  CONTRACT_REFUSED(driver.unmap(at + 5 * g, 16 * g));
  CONTRACT_FILLED(lab, at, 4 * g, 4);
  lab.unmap(at, 4 * g);  // a run of whole ones, in one call
  CONTRACT_REFUSED(driver.unmap(at, 4 * g));
  CONTRACT_REFUSED(driver.unmap(at, 2 * g));
}

void access_is_given_to_whole_mappings(Driver& driver, const ContractOptions& options) {
  Lab lab(driver, options);
  const std::size_t g = lab.granule();
  const Address at = lab.reserve(8 * g);
  CONTRACT_REFUSED(driver.set_access(at, g, lab.here(), Access::read_write));
  lab.map(at, lab.create(2 * g), Access::none);
  lab.map(at + 2 * g, lab.create(2 * g), Access::none);
  CONTRACT_REFUSED(driver.set_access(at, g, lab.here(), Access::read_write));
  CONTRACT_REFUSED(driver.set_access(at + g, 2 * g, lab.here(), Access::read_write));
  CONTRACT_REFUSED(driver.set_access(at, 5 * g, lab.here(), Access::read_write));
  CONTRACT_REFUSED(driver.set_access(at, 0, lab.here(), Access::read_write));
  CONTRACT_REFUSED(driver.set_access(at + 4096, 2 * g, lab.here(), Access::read_write));
  CONTRACT_OK(driver.set_access(at, 4 * g, lab.here(), Access::read_write));
  lab.fill(at, 5, 4 * g);
  CONTRACT_FILLED(lab, at, 4 * g, 5);
}

void rights_change_and_content_stays(Driver& driver, const ContractOptions& options) {
  Lab lab(driver, options);
  const std::size_t g = lab.granule();
  const Address at = lab.reserve(3 * g);
  for (std::size_t k = 0; k < 3; ++k) lab.map(at + k * g, lab.create(g));
  const Bytes bytes = pattern(3 * g, 2);
  lab.write(at, bytes);
  CONTRACT_OK(driver.set_access(at + g, g, lab.here(), Access::read));
  CONTRACT_CHECK(lab.read(at, 3 * g) == bytes);
  CONTRACT_OK(driver.set_access(at, 3 * g, lab.here(), Access::none));
  CONTRACT_OK(driver.set_access(at, g, lab.here(), Access::read));
  CONTRACT_CHECK(lab.read(at, g) == Bytes(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(g)));
  CONTRACT_OK(driver.set_access(at, 3 * g, lab.here(), Access::read_write));
  CONTRACT_CHECK(lab.read(at, 3 * g) == bytes);
  lab.fill(at, 1, 3 * g);
  CONTRACT_FILLED(lab, at, 3 * g, 1);
}

void aliases_show_the_same_memory(Driver& driver, const ContractOptions& options) {
  Lab lab(driver, options);
  const std::size_t g = lab.granule();
  const Address one = lab.reserve(4 * g);
  const Address two = lab.reserve(g);
  const ChunkHandle chunk = lab.create(g);
  lab.map(one, chunk);
  lab.map(one + 2 * g, chunk);
  lab.map(two, chunk, Access::read);
  const Bytes bytes = pattern(g, 3);
  lab.write(one, bytes);
  CONTRACT_CHECK(lab.read(one + 2 * g, g) == bytes);
  CONTRACT_CHECK(lab.read(two, g) == bytes);
  lab.fill(one + 2 * g + 100, 6, 50);
  CONTRACT_FILLED(lab, one + 100, 50, 6);
  CONTRACT_FILLED(lab, two + 100, 50, 6);
  lab.unmap(one, g);  // the others stay
  CONTRACT_FILLED(lab, two + 100, 50, 6);
}

void a_chunk_moves_with_its_content(Driver& driver, const ContractOptions& options) {
  Lab lab(driver, options);
  const std::size_t g = lab.granule();
  const Address at = lab.reserve(16 * g);
  const ChunkHandle chunk = lab.create(g);
  const Bytes bytes = pattern(g, 4);
  lab.map(at, chunk);
  lab.write(at, bytes);
  for (std::size_t k = 1; k < 16; ++k) {
    lab.map(at + k * g, chunk);  // first the new, then drop the old
    lab.unmap(at + (k - 1) * g, g);
    CONTRACT_CHECK(lab.read(at + k * g, g) == bytes, "move", k);
  }
}

// CUDA itself refuses what comes after set_access with error 999 (CudaDriver::Anchors).
void a_chunk_is_mapped_again_whichever_mapping_goes_first(Driver& driver, const ContractOptions& options) {
  Lab lab(driver, options);
  const std::size_t g = lab.granule();
  const Address at = lab.reserve(16 * g);
  const ChunkHandle chunk = lab.create(g);
  const ChunkHandle beside = lab.create(g);
  const Bytes bytes = pattern(g, 7);
  lab.map(at, chunk);
  lab.write(at, bytes);
  lab.map(at + 2 * g, chunk, Access::none);
  lab.map(at + 3 * g, beside, Access::none);
  lab.map(at + 8 * g, chunk, Access::none);
  lab.unmap(at, g);
  CONTRACT_OK(driver.set_access(at + 2 * g, 2 * g, lab.here(), Access::read_write));
  lab.map(at + 4 * g, chunk);
  CONTRACT_CHECK(lab.read(at + 2 * g, g) == bytes);
  CONTRACT_CHECK(lab.read(at + 4 * g, g) == bytes);
  lab.unmap(at + 2 * g, 2 * g);
  lab.map(at, chunk);
  CONTRACT_CHECK(lab.read(at, g) == bytes);
  CONTRACT_OK(driver.set_access(at + 8 * g, g, lab.here(), Access::read_write));
  CONTRACT_CHECK(lab.read(at + 8 * g, g) == bytes);
}

void a_chunk_is_mapped_again_after_its_access_changed(Driver& driver, const ContractOptions& options) {
  Lab lab(driver, options);
  const std::size_t g = lab.granule();
  const Address at = lab.reserve(8 * g);
  const ChunkHandle chunk = lab.create(g);
  const Bytes bytes = pattern(g, 9);
  lab.map(at, chunk);
  lab.write(at, bytes);
  lab.map(at + g, chunk);
  lab.map(at + 2 * g, chunk);
  lab.unmap(at, g);
  std::size_t next = 3;
  for (const Access access : {Access::read, Access::read_write, Access::none, Access::read_write}) {
    CONTRACT_OK(driver.set_access(at + g, g, lab.here(), access));
    lab.map(at + next * g, chunk);
    CONTRACT_CHECK(lab.read(at + next * g, g) == bytes);
    lab.unmap(at + next * g, g);
    ++next;
  }
  CONTRACT_CHECK(lab.read(at + g, g) == bytes);
  CONTRACT_CHECK(lab.read(at + 2 * g, g) == bytes);
}

void many_chunks_in_one_range(Driver& driver, const ContractOptions& options) {
  Lab lab(driver, options);
  const std::size_t g = lab.granule();
  constexpr std::size_t kCount = 48;
  const Address at = lab.reserve(kCount * g);
  std::vector<ChunkHandle> chunks;
  for (std::size_t k = 0; k < kCount; ++k) chunks.push_back(lab.create(g));
  // 11 and 48 have no common divisor: all of them, far from in order.
  for (std::size_t k = 0; k < kCount; ++k) lab.map(at + (k * 11 % kCount) * g, chunks[k], Access::none);
  CONTRACT_OK(driver.set_access(at, kCount * g, lab.here(), Access::read_write));
  for (std::size_t k = 0; k < kCount; ++k) lab.fill(at + k * g, static_cast<std::uint8_t>(k + 1), g);
  for (std::size_t k = 0; k < kCount; ++k) CONTRACT_FILLED(lab, at + k * g, g, static_cast<std::uint8_t>(k + 1));
  lab.unmap(at + 10 * g, 20 * g);
  for (std::size_t k = 30; k < kCount; ++k) CONTRACT_FILLED(lab, at + k * g, g, static_cast<std::uint8_t>(k + 1));
  lab.unmap(at, 10 * g);
  lab.unmap(at + 30 * g, (kCount - 30) * g);
  lab.unreserve(at);
}

void chunks_of_several_sizes_stand_together(Driver& driver, const ContractOptions& options) {
  Lab lab(driver, options);
  const std::size_t g = lab.granule();
  const Address at = lab.reserve(16 * g);
  std::size_t offset = 0;
  for (const std::size_t granules : {1U, 2U, 8U, 1U, 4U}) {
    lab.map(at + offset, lab.create(granules * g));
    offset += granules * g;
  }
  const Bytes bytes = pattern(offset, 6);
  lab.write(at, bytes);  // one copy over all borders
  CONTRACT_CHECK(lab.read(at, offset) == bytes);
  lab.unmap(at + g, 2 * g);
  CONTRACT_CHECK(lab.read(at, g) == Bytes(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(g)));
}

void exported_chunks_are_shared(Driver& driver, const ContractOptions& options) {
  Lab lab(driver, options);
  if (!lab.capabilities().exportable) throw ContractSkip("chunks cannot be exported");
  const std::size_t g = lab.granule();
  const Address at = lab.reserve(4 * g);
  const ChunkHandle original = lab.create({2 * g, lab.here(), true});
  int fd = -1;
  CONTRACT_OK(driver.export_chunk(original, &fd));
  CONTRACT_CHECK(fd >= 0, fd);
  ChunkHandle imported = 0;
  const Status import = driver.import_chunk(fd, 2 * g, &imported);
  ::close(fd);  // neither side needs it any more
  CONTRACT_OK(import);
  lab.adopt(imported, 2 * g);
  lab.map(at, original);
  CONTRACT_FILLED(lab, at, 2 * g, 0);
  lab.map(at + 2 * g, imported);
  const Bytes bytes = pattern(2 * g, 7);
  lab.write(at, bytes);
  CONTRACT_CHECK(lab.read(at + 2 * g, 2 * g) == bytes);
  lab.fill(at + 2 * g, 8, 10);
  CONTRACT_FILLED(lab, at, 10, 8);
  lab.unmap(at, 2 * g);  // the memory lives while anyone has it
  lab.release(original);
  CONTRACT_FILLED(lab, at + 2 * g, 10, 8);
}

void bad_exports_and_imports_are_refused(Driver& driver, const ContractOptions& options) {
  Lab lab(driver, options);
  if (!lab.capabilities().exportable) throw ContractSkip("chunks cannot be exported");
  const std::size_t g = lab.granule();
  int fd = -7;
  CONTRACT_REFUSED(driver.export_chunk(lab.create(g), &fd));
  CONTRACT_REFUSED(driver.export_chunk(0, &fd));
  CONTRACT_CHECK(fd == -7, fd);
  ChunkHandle chunk = 77;
  CONTRACT_REFUSED(driver.import_chunk(-1, g, &chunk));
  CONTRACT_REFUSED(driver.import_chunk(1 << 20, g, &chunk));
  CONTRACT_CHECK(chunk == 77, chunk);
  // A size that is not the chunk's is found at import or when it is mapped.
  CONTRACT_OK(driver.export_chunk(lab.create({g, lab.here(), true}), &fd));
  const Status none = driver.import_chunk(fd, 0, &chunk);
  const Status wrong = driver.import_chunk(fd, 2 * g, &chunk);
  ::close(fd);
  CONTRACT_REFUSED(none);
  if (!wrong.ok()) return;
  lab.adopt(chunk, 2 * g);
  const Address at = lab.reserve(2 * g);
  CONTRACT_CHECK(!driver.map(at, 2 * g, chunk).ok());
}

void host_located_chunks_are_seen_by_both(Driver& driver, const ContractOptions& options) {
  Lab lab(driver, options);
  if (!lab.capabilities().host_located) throw ContractSkip("chunks cannot live in host memory");
  const std::size_t g = lab.granule();
  const Address at = lab.reserve(2 * g);
  lab.map(at, lab.create(g));
  const std::size_t before = lab.free_memory(options.device);
  lab.map(at + g, lab.create({g, Location::on_host(), false}));
  CONTRACT_CHECK(lab.free_memory(options.device) + g / 2 > before, "it took the device's memory");
  CONTRACT_OK(driver.set_access(at + g, g, Location::on_host(), Access::read_write));
  const Bytes bytes = pattern(g, 9);
  lab.write(at + g / 2, bytes);  // half on the device, half on the host
  CONTRACT_CHECK(lab.read(at + g / 2, g) == bytes);
  auto* const direct = reinterpret_cast<std::uint8_t*>(at + g);
  CONTRACT_CHECK(std::equal(direct, direct + g / 2, bytes.begin() + static_cast<std::ptrdiff_t>(g / 2)));
  std::memset(direct, 11, g);
  CONTRACT_FILLED(lab, at + g, g, 11);
  lab.fill(at + g / 2 + 1, 12, g);
  CONTRACT_FILLED(lab, at + g / 2 + 1, g, 12);
  CONTRACT_CHECK(direct[0] == 12 && direct[g / 2] == 12 && direct[g / 2 + 1] == 11);
  // Without the host's rights it is the device's as before.
  CONTRACT_OK(driver.set_access(at + g, g, Location::on_host(), Access::none));
  lab.write(at + g / 2, bytes);
  CONTRACT_CHECK(lab.read(at + g / 2, g) == bytes);
}

}  // namespace

std::vector<ContractCase> mapping_cases() {
  return {
      {"a_chunk_is_mapped_whole", a_chunk_is_mapped_whole},
      {"mapping_stays_inside_a_reservation", mapping_stays_inside_a_reservation},
      {"nothing_is_mapped_over_a_mapping", nothing_is_mapped_over_a_mapping},
      {"only_whole_mappings_are_unmapped", only_whole_mappings_are_unmapped},
      {"access_is_given_to_whole_mappings", access_is_given_to_whole_mappings},
      {"rights_change_and_content_stays", rights_change_and_content_stays},
      {"aliases_show_the_same_memory", aliases_show_the_same_memory},
      {"a_chunk_moves_with_its_content", a_chunk_moves_with_its_content},
      {"a_chunk_is_mapped_again_whichever_mapping_goes_first", a_chunk_is_mapped_again_whichever_mapping_goes_first},
      {"a_chunk_is_mapped_again_after_its_access_changed", a_chunk_is_mapped_again_after_its_access_changed},
      {"many_chunks_in_one_range", many_chunks_in_one_range},
      {"chunks_of_several_sizes_stand_together", chunks_of_several_sizes_stand_together},
      {"exported_chunks_are_shared", exported_chunks_are_shared},
      {"bad_exports_and_imports_are_refused", bad_exports_and_imports_are_refused},
      {"host_located_chunks_are_seen_by_both", host_located_chunks_are_seen_by_both},
  };
}

}  // namespace vmm::testing

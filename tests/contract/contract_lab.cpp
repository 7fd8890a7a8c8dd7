#include "contract/contract_lab.h"

#include <algorithm>
#include <cstring>

namespace vmm::testing {

void contract_failed(const char* file, int line, const std::string& what) {
  throw ContractFailure(std::string(file) + ":" + std::to_string(line) + ": " + what);
}

std::string contract_values() { return ""; }

void check_status(const char* file, int line, const char* call, const Status& got, StatusCode wanted) {
  if (got.code() == wanted) return;
  contract_failed(file, line, std::string(call) + " answered '" + got.text() + "', wanted '" + to_string(wanted) + "'");
}

Lab::Lab(Driver& driver, const ContractOptions& options) : driver_(driver), options_(options) {
  CONTRACT_OK(driver.capabilities(options.device, &capabilities_));
}

Lab::~Lab() {
  driver_.synchronize(options_.device).ignore();
  for (const auto& [address, size] : mappings_) driver_.unmap(address, size).ignore();
  for (const auto& [chunk, size] : chunks_) driver_.release(chunk).ignore();
  for (const auto& [address, size] : reservations_) driver_.unreserve(address, size).ignore();
  for (const Fence fence : fences_) driver_.destroy_fence(fence).ignore();
}

Address Lab::reserve(std::size_t size, std::size_t alignment) {
  if (alignment == 0) alignment = granule();
  Address address = 0;
  CONTRACT_OK(driver_.reserve(size, alignment, &address));
  reservations_[address] = size;
  CONTRACT_CHECK(address != 0);
  CONTRACT_CHECK(is_aligned(address, alignment), format_hex(address), alignment);
  return address;
}

void Lab::unreserve(Address address) {
  CONTRACT_OK(driver_.unreserve(address, reservations_.at(address)));
  reservations_.erase(address);
}

ChunkHandle Lab::create(const ChunkSpec& spec) {
  ChunkHandle chunk = 0;
  CONTRACT_OK(driver_.create(spec, &chunk));
  CONTRACT_CHECK(chunk != 0);
  CONTRACT_CHECK(chunks_.count(chunk) == 0, "a live handle given out twice:", chunk);
  chunks_[chunk] = spec.size;
  return chunk;
}

void Lab::release(ChunkHandle chunk) {
  chunks_.erase(chunk);
  CONTRACT_OK(driver_.release(chunk));
}

void Lab::map(Address address, ChunkHandle chunk, Access access) {
  const std::size_t size = chunks_.at(chunk);
  CONTRACT_OK(driver_.map(address, size, chunk));
  mappings_[address] = size;
  if (access != Access::none) CONTRACT_OK(driver_.set_access(address, size, here(), access));
}

void Lab::unmap(Address address, std::size_t size) {
  CONTRACT_OK(driver_.unmap(address, size));
  mappings_.erase(mappings_.lower_bound(address), mappings_.lower_bound(address + size));
}

Fence Lab::fence() {
  Fence fence = nullptr;
  CONTRACT_OK(driver_.create_fence(options_.device, &fence));
  CONTRACT_CHECK(fence != nullptr);
  fences_.insert(fence);
  return fence;
}

void Lab::destroy(Fence fence) {
  fences_.erase(fence);
  CONTRACT_OK(driver_.destroy_fence(fence));
}

void Lab::write(Address address, const Bytes& bytes) {
  CONTRACT_OK(
      driver_.copy_async(options_.device, address, reinterpret_cast<Address>(bytes.data()), bytes.size(), nullptr));
  CONTRACT_OK(driver_.synchronize(options_.device));
}

Bytes Lab::read(Address address, std::size_t size) {
  Bytes bytes(size, 0xEE);
  CONTRACT_OK(driver_.copy_async(options_.device, reinterpret_cast<Address>(bytes.data()), address, size, nullptr));
  CONTRACT_OK(driver_.synchronize(options_.device));
  return bytes;
}

void Lab::fill(Address address, std::uint8_t byte, std::size_t size) {
  CONTRACT_OK(driver_.fill_async(options_.device, address, byte, size, nullptr));
  CONTRACT_OK(driver_.synchronize(options_.device));
}

void Lab::expect_filled(const char* file, int line, Address address, std::size_t size, std::uint8_t byte) {
  const Bytes bytes = read(address, size);
  const auto wrong = std::find_if(bytes.begin(), bytes.end(), [byte](std::uint8_t b) { return b != byte; });
  if (wrong == bytes.end()) return;
  contract_failed(file, line,
                  "byte " + std::to_string(wrong - bytes.begin()) + " of " + format_hex(address) + " is " +
                      std::to_string(*wrong) + ", wanted " + std::to_string(byte));
}

std::size_t Lab::free_memory(int device) const {
  MemoryInfo info;
  CONTRACT_OK(driver_.memory_info(device, &info));
  return info.free;
}

Bytes pattern(std::size_t size, std::uint64_t seed) {
  Bytes bytes(size);
  for (std::size_t at = 0; at < size; at += 8) {
    const std::uint64_t word = (seed + 1) * 0x9E3779B97F4A7C15ULL ^ (at / 8 * 0xD1B54A32D192ED03ULL);
    std::memcpy(bytes.data() + at, &word, std::min<std::size_t>(8, size - at));
  }
  return bytes;
}

}  // namespace vmm::testing

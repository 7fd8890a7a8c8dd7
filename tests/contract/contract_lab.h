// The workbench of a contract case: makes things on a driver, remembers them
// and cleans up, whatever the case does. It owns what the case made through
// it; it never knows the case.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "contract/driver_contract.h"

namespace vmm::testing {

[[noreturn]] void contract_failed(const char* file, int line, const std::string& what);
void check_status(const char* file, int line, const char* call, const Status& got, StatusCode wanted);

// NOLINTBEGIN(cppcoreguidelines-macro-usage): they carry file and line.
#define CONTRACT_CHECK(condition, ...)                                                                               \
  do {                                                                                                               \
    if (!(condition)) {                                                                                              \
      ::vmm::testing::contract_failed(__FILE__, __LINE__,                                                            \
                                      std::string(#condition) + " " + ::vmm::testing::contract_values(__VA_ARGS__)); \
    }                                                                                                                \
  } while (false)
#define CONTRACT_OK(call) ::vmm::testing::check_status(__FILE__, __LINE__, #call, (call), ::vmm::StatusCode::ok)
#define CONTRACT_REFUSED(call) \
  ::vmm::testing::check_status(__FILE__, __LINE__, #call, (call), ::vmm::StatusCode::invalid_argument)
// NOLINTEND(cppcoreguidelines-macro-usage)

std::string contract_values();
template <typename... Values>
std::string contract_values(const Values&... values);

using Bytes = std::vector<std::uint8_t>;

class Lab {
 public:
  Lab(Driver& driver, const ContractOptions& options);
  ~Lab();
  Lab(const Lab&) = delete;
  Lab& operator=(const Lab&) = delete;

  [[nodiscard]] std::size_t granule() const { return capabilities_.granularity; }
  [[nodiscard]] const Capabilities& capabilities() const { return capabilities_; }
  [[nodiscard]] Location here() const { return Location::on_device(options_.device); }

  // Each fails the case unless the driver does it.
  Address reserve(std::size_t size, std::size_t alignment = 0);  // 0: the granule
  void unreserve(Address address);
  ChunkHandle create(std::size_t size) { return create({size, here(), false}); }
  ChunkHandle create(const ChunkSpec& spec);
  void release(ChunkHandle chunk);
  // To be released with the rest (an imported chunk, say).
  void adopt(ChunkHandle chunk, std::size_t size) { chunks_[chunk] = size; }
  // Maps with access for this device.
  void map(Address address, ChunkHandle chunk, Access access = Access::read_write);
  void unmap(Address address, std::size_t size);
  Fence fence();
  void destroy(Fence fence);

  // Content, all done on return.
  void write(Address address, const Bytes& bytes);
  Bytes read(Address address, std::size_t size);
  void fill(Address address, std::uint8_t byte, std::size_t size);
  // The whole stretch holds nothing but `byte`.
  void expect_filled(const char* file, int line, Address address, std::size_t size, std::uint8_t byte);
  [[nodiscard]] std::size_t free_memory(int device) const;

 private:
  Driver& driver_;
  const ContractOptions& options_;
  Capabilities capabilities_;
  std::map<Address, std::size_t> reservations_;
  std::map<ChunkHandle, std::size_t> chunks_;
  std::map<Address, std::size_t> mappings_;
  std::set<Fence> fences_;
};

#define CONTRACT_FILLED(lab, address, size, byte) (lab).expect_filled(__FILE__, __LINE__, address, size, byte)

// Bytes that tell where they belong: every block of 8 differs.
Bytes pattern(std::size_t size, std::uint64_t seed);

}  // namespace vmm::testing

#include <sstream>

template <typename... Values>
std::string vmm::testing::contract_values(const Values&... values) {
  std::ostringstream text;
  ((text << values << ' '), ...);
  return text.str();
}
